//! The rules a leaf can break by itself, in files that are whole in every other way.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, ListArray, RecordBatch, StructArray, UInt64Array,
};
use futures::executor::block_on;
use lance_table::format::pb;
use prost::Message;

use super::Leaf;
use crate::error::Error;
use crate::tree::leaf_write::{LeafBuilder, encode_batch};

fn file() -> pb::DataFile {
    pb::DataFile {
        path: "a".into(),
        fields: vec![0],
        column_indices: vec![0],
        file_major_version: 2,
        ..Default::default()
    }
}

/// Two records, the first with an overlay.
fn records() -> RecordBatch {
    let mut builder = LeafBuilder::new();
    for id in [3, 8] {
        let overlay = pb::DataOverlayFile {
            data_file: Some(file()),
            ..Default::default()
        };
        let record = pb::DataFragment {
            id,
            files: vec![file()],
            overlays: vec![overlay; usize::from(id == 3)],
            physical_rows: 10,
            ..Default::default()
        };
        builder.push(&record).expect("in order");
    }
    builder.finish().expect("a batch")
}

/// What is wrong with a leaf of these records, with a column replaced.
fn error(column: &str, with: ArrayRef) -> Error {
    let batch = records();
    let mut columns = batch.columns().to_vec();
    columns[batch.schema().index_of(column).expect("a column")] = with;
    let batch = RecordBatch::try_new(batch.schema(), columns).expect("of the schema");
    let bytes = block_on(encode_batch(&batch)).expect("encodes");
    let whole = Leaf::decode_whole("x", bytes.clone()).expect_err("broken");
    let usual = Leaf::decode("x", bytes).expect_err("broken");
    assert_eq!(usual.to_string(), whole.to_string());
    usual
}

fn with_meta(meta: &[u8]) -> Error {
    let fine = pb::DataFragment::default().encode_to_vec();
    error(
        "fragment_meta",
        Arc::new(BinaryArray::from_vec(vec![&fine, meta])),
    )
}

fn with_overlay(meta: &[u8]) -> Error {
    let batch = records();
    let list: &ListArray = batch["overlays"].as_list();
    let overlays = list.values().as_struct();
    let values: ArrayRef = Arc::new(StructArray::new(
        overlays.fields().clone(),
        vec![
            Arc::clone(overlays.column(0)),
            Arc::new(BinaryArray::from_vec(vec![meta])),
        ],
        None,
    ));
    let arrow::datatypes::DataType::List(item) = list.data_type() else {
        panic!("a list");
    };
    let list = ListArray::new(Arc::clone(item), list.offsets().clone(), values, None);
    error("overlays", Arc::new(list))
}

#[test]
fn whole_records_are_read() {
    let bytes = block_on(encode_batch(&records())).expect("encodes");
    assert_eq!(Leaf::decode("x", bytes).expect("valid").ids(), [3, 8]);
}

#[test]
fn ids_increase_and_have_32_bits() {
    for (ids, rule) in [
        ([3, 3], "leaf_rows_out_of_order"),
        ([8, 3], "leaf_rows_out_of_order"),
        ([3, 1 << 32], "id_over_u32"),
    ] {
        let error = error("id", Arc::new(UInt64Array::from(ids.to_vec())));
        assert_eq!(error.corrupt_rule(), Some(rule), "{ids:?}");
    }
}

#[test]
fn a_fragment_meta_says_what_it_may() {
    let deletion = |file_type, num_deleted_rows| pb::DataFragment {
        physical_rows: 10,
        deletion_file: Some(pb::DeletionFile {
            file_type,
            num_deleted_rows,
            ..Default::default()
        }),
        ..Default::default()
    };
    let id = pb::DataFragment {
        id: 8,
        ..Default::default()
    };
    let files = pb::DataFragment {
        files: vec![file()],
        ..Default::default()
    };
    let overlays = pb::DataFragment {
        overlays: vec![pb::DataOverlayFile::default()],
        ..Default::default()
    };
    for (meta, rule) in [
        (id, "fragment_meta_id"),
        (files, "fragment_meta_files"),
        (overlays, "fragment_meta_files"),
        (deletion(0, 0), "deletion_count_missing"),
        (deletion(1, 11), "deletion_exceeds_rows"),
    ] {
        let error = with_meta(&meta.encode_to_vec());
        assert_eq!(error.corrupt_rule(), Some(rule), "{error}");
    }
    let error = with_meta(&[0xff]);
    assert_eq!(error.corrupt_rule(), Some("fragment_meta_undecodable"));
    let error = with_meta(&deletion(9, 1).encode_to_vec());
    assert!(
        error.to_string().contains("deletion file type 9"),
        "{error}"
    );
    // Row ids in a file of their own, which drafts of the format had.
    let error = with_meta(&[0x20, 10, 0x32, 0]);
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

#[test]
fn an_overlay_meta_says_what_it_may() {
    let error = with_overlay(&[0xff]);
    assert_eq!(error.corrupt_rule(), Some("overlay_meta_undecodable"));
    let file = pb::DataOverlayFile {
        data_file: Some(file()),
        ..Default::default()
    };
    let error = with_overlay(&file.encode_to_vec());
    assert_eq!(error.corrupt_rule(), Some("overlay_meta_data_file"));
}
