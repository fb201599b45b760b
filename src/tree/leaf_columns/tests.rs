//! The short way against Lance's reader.

use lance_table::format::pb::{DataFile, DataFragment, DataOverlayFile};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::*;
use crate::tree::leaf::Leaf;
use crate::tree::leaf_file::{decode_file, read_batches};
use crate::tree::leaf_write::LeafBuilder;

fn file(path: String, minor: u32, base_id: Option<u32>) -> DataFile {
    DataFile {
        path,
        fields: vec![0, 1],
        column_indices: vec![0, 1],
        file_major_version: 2,
        file_minor_version: minor,
        file_size_bytes: 4096,
        base_id,
    }
}

fn leaf(records: &[DataFragment]) -> InMemory {
    let mut builder = LeafBuilder::new();
    for record in records {
        builder.push(record).expect("in order");
    }
    let bytes = futures::executor::block_on(builder.encode()).expect("encodes");
    InMemory::new("x", bytes)
}

fn footer(file: &InMemory) -> Footer {
    Footer::read("x", file.bytes()).expect("a footer")
}

/// What every record says, as Lance's reader has it.
fn whole(file: &InMemory) -> Vec<RecordBatch> {
    decode_file(file.clone(), &footer(file)).expect("readable")
}

fn without_overlays(batches: &[RecordBatch]) -> Vec<Vec<ArrayRef>> {
    batches
        .iter()
        .map(|b| b.columns().iter().take(3).cloned().collect())
        .collect()
}

fn fragment(id: u64, files: Vec<DataFile>) -> DataFragment {
    DataFragment {
        id,
        files,
        physical_rows: 10,
        ..Default::default()
    }
}

#[test]
fn one_value_for_a_page_is_not_decoded() {
    let files = |id, base| (0..3).map(|f| file(format!("{id}/{f}"), 1, base)).collect();
    let usual: Vec<_> = (0..500).map(|id| fragment(id, files(id, None))).collect();
    let usual = leaf(&usual);
    let expected = whole(&usual);
    let column = |c| Column::read(usual.bytes(), &footer(&usual), c, 500).expect("plain");
    assert_eq!(column(MAJOR).number(), Some(2));
    assert_eq!(column(MINOR).number(), Some(1));
    assert!(column(BASE).is_null());
    assert!(!column(2).is_null());
    assert!(column(OVERLAY_META).is_empty_list());
    assert!(!column(BASE).is_empty_list());
    let found = read(&usual, &footer(&usual)).expect("the usual leaf");
    assert_eq!(without_overlays(&found), without_overlays(&expected));

    let cloned: Vec<_> = (0..9).map(|id| fragment(id, files(id, Some(3)))).collect();
    let cloned = leaf(&cloned);
    let column = Column::read(cloned.bytes(), &footer(&cloned), BASE, 9).expect("plain");
    assert!(!column.is_null());
    let found = read(&cloned, &footer(&cloned)).expect("read with all columns");
    assert_eq!(without_overlays(&found), without_overlays(&whole(&cloned)));
}

#[test]
fn what_is_unusual_is_left_to_lance() {
    let overlay = DataOverlayFile {
        data_file: Some(file("o".into(), 1, None)),
        committed_version: 3,
        coverage: None,
    };
    let mut record = fragment(1, vec![file("a".into(), 1, None)]);
    record.overlays.push(overlay);
    let overlaid = leaf(&[record]);
    whole(&overlaid);
    assert!(read(&overlaid, &footer(&overlaid)).is_none());
    let Footer {
        version, columns, ..
    } = footer(&overlaid);
    assert_eq!((version, columns), ((2, 2), COLUMNS));
}

/// Broken bytes are an error or records, as the reader of Lance finds; never a panic that escapes.
#[test]
fn broken_bytes_do_not_get_past() {
    let records: Vec<_> = (0..40)
        .map(|id| fragment(id, vec![file(format!("{id}"), 1, None)]))
        .collect();
    let good = leaf(&records);
    whole(&good);
    let bytes = good.bytes();
    // Field ids of a schema may be any: such a file would be learnt from.
    let schema = footer(&good).schema;
    for at in (0..bytes.len())
        .step_by(29)
        .filter(|at| !schema.contains(at))
    {
        let mut broken = bytes.to_vec();
        broken[at] ^= 0x55;
        // Its own checks refuse it, or it still says what a leaf can say.
        let _ = Leaf::decode("x", broken.into());
    }
}

/// What nobody reads is looked at by those who verify.
#[test]
fn a_broken_column_without_values_is_found_by_reading_all() {
    let good = leaf(&[fragment(1, vec![file("a".into(), 1, None)])]);
    whole(&good);
    let place = footer(&good).column(good.bytes(), BASE + 1);
    let mut broken = good.bytes().to_vec();
    broken[place.expect("a column of overlays")].fill(0xff);
    let broken = Bytes::from(broken);
    let leaf = Leaf::decode("x", broken.clone()).expect("says all it says");
    assert_eq!(leaf.ids(), [1]);
    let error = Leaf::decode_whole("x", broken).expect_err("broken");
    assert_eq!(error.corrupt_rule(), Some("leaf_unreadable"));
}

fn any_file() -> impl Strategy<Value = DataFile> {
    let base = prop_oneof![3 => Just(None), 1 => (0..3u32).prop_map(Some)];
    (
        "[a-z0-9]{0,24}",
        prop_oneof![5 => Just(1), 1 => Just(2)],
        base,
    )
        .prop_map(|(path, minor, base)| file(path, minor, base))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_short_way_gives_what_lance_gives(
        files in prop::collection::vec(prop::collection::vec(any_file(), 0..5), 1..60),
        plain in any::<bool>(),
    ) {
        let records = files.into_iter().zip(0..).map(|(mut files, id)| {
            if plain {
                files.iter_mut().for_each(|f| *f = file(f.path.clone(), 1, None));
            }
            fragment(id, files)
        });
        let stored = leaf(&records.collect::<Vec<_>>());
        let expected = whole(&stored);
        let found = read(&stored, &footer(&stored))
            .ok_or_else(|| TestCaseError::fail("not read the short way"))?;
        prop_assert_eq!(without_overlays(&found), without_overlays(&expected));
        let both = read_batches("x", stored.bytes().clone()).expect("readable");
        prop_assert_eq!(without_overlays(&both), without_overlays(&expected));
    }
}
