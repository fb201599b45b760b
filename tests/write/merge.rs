//! Merges by key: on a tree as Lance does them on a flat twin, with only the fragments that match.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray, StructArray,
};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, Schema};
use datafusion::prelude::SessionContext;
use fragtree::write::{ConvertOptions, MergeOptions, RowsReport, TreeTable, WriteOptions, convert};
use fragtree::{ObjectCache, OpenOptions, Snapshot, SnapshotProvider, SystemColumns, verify};
use futures::FutureExt;
use lance::Dataset;
use lance::dataset::write::merge_insert::SourceDedupeBehavior;
use lance::dataset::{
    InsertBuilder, MergeInsertBuilder, MergeInsertWriteMode, WhenMatched, WhenNotMatched,
    WhenNotMatchedBySource, WriteMode, WriteParams,
};
use lance::index::DatasetIndexExt;
use lance_index::IndexType;
use lance_index::scalar::ScalarIndexParams;

use crate::probe::{Act, Probe};
use crate::twin::{copy_folder, stream_of, text, tiny};

/// Rows with a key of two columns, one of them with a name that SQL would change, and with NULLs.
fn rows(keys: &[(i64, Option<&str>)], value: i64) -> RecordBatch {
    let a: Int64Array = keys.iter().map(|(a, _)| Some(*a)).collect();
    let b: StringArray = keys.iter().map(|(_, b)| *b).collect();
    let x: ArrayRef = Arc::new(Int64Array::from(vec![value; keys.len()]));
    let nested = StructArray::from(vec![(
        Arc::new(Field::new("x", DataType::Int64, true)),
        Arc::clone(&x),
    )]);
    let schema = Schema::new(vec![
        Field::new("a", DataType::Int64, true),
        Field::new("B key", DataType::Utf8, true),
        Field::new("value", DataType::Int64, true),
        Field::new("nested", nested.data_type().clone(), true),
    ]);
    RecordBatch::try_new(
        Arc::new(schema),
        vec![Arc::new(a), Arc::new(b), x, Arc::new(nested)],
    )
    .expect("a batch")
}

const NAMES: [Option<&str>; 3] = [Some("x"), Some("y"), None];

fn table_rows() -> RecordBatch {
    let keys: Vec<_> = (0..300i64)
        .map(|i| (i / 3, NAMES[usize::try_from(i % 3).expect("small")]))
        .collect();
    rows(&keys, 0)
}

struct Pair {
    _folder: tempfile::TempDir,
    flat: String,
    tree: String,
}

/// A hundred fragments of three rows, flat and as a tree.
async fn pair_of(stable: bool, index: Option<&str>) -> Pair {
    let folder = tempfile::tempdir().expect("a folder");
    let (flat, tree) = (folder.path().join("flat"), folder.path().join("tree"));
    let params = WriteParams {
        mode: WriteMode::Create,
        max_rows_per_file: 3,
        max_rows_per_group: 3,
        enable_stable_row_ids: stable,
        ..Default::default()
    };
    let mut dataset = InsertBuilder::new(text(&flat).as_str())
        .with_params(&params)
        .execute(vec![table_rows()])
        .await
        .expect("written");
    if let Some(column) = index {
        let scalar = ScalarIndexParams::default();
        dataset
            .create_index(&[column], IndexType::BTree, None, &scalar, false)
            .await
            .expect("an index");
    }
    copy_folder(&flat, &tree);
    let options = ConvertOptions {
        policy: tiny(),
        force: true,
        ..ConvertOptions::to_tree()
    };
    convert(&text(&tree), options, OpenOptions::default())
        .await
        .expect("converted");
    Pair {
        flat: text(&flat),
        tree: text(&tree),
        _folder: folder,
    }
}

async fn all_rows(uri: &str) -> String {
    let snapshot = Snapshot::open(uri, OpenOptions::default())
        .await
        .expect("opens");
    let provider = SnapshotProvider::try_new(snapshot, SystemColumns::default()).expect("a table");
    let ctx = SessionContext::new();
    ctx.register_table("t", Arc::new(provider)).expect("free");
    let sql = "SELECT * FROM t ORDER BY a, \"B key\", value";
    let batches = ctx.sql(sql).await.expect("plans").collect().await;
    let batches = batches.expect("runs");
    let schema = batches.first().expect("rows").schema();
    let all = concat_batches(&schema, &batches).expect("one batch");
    let shown = arrow::util::pretty::pretty_format_batches(&[all]);
    shown.expect("shown").to_string()
}

async fn open(uri: &str, options: OpenOptions) -> TreeTable {
    let write = WriteOptions {
        policy: Some(tiny()),
        ..Default::default()
    };
    TreeTable::open(uri, options, write).await.expect("opens")
}

async fn lance_merge(
    uri: &str,
    on: &[&str],
    options: &MergeOptions,
    source: RecordBatch,
) -> lance::Result<u64> {
    let dataset = Arc::new(Dataset::open(uri).await?);
    let on = on.iter().map(|c| (*c).to_string()).collect();
    let mut builder = MergeInsertBuilder::try_new(dataset, on)?;
    builder
        .when_matched(options.when_matched.clone())
        .when_not_matched(options.when_not_matched.clone())
        .when_not_matched_by_source(options.when_not_matched_by_source.clone())
        .source_dedupe_behavior(options.source_dedupe_behavior)
        .write_mode(options.write_mode)
        .use_index(options.use_index);
    let job = builder.try_build()?;
    let (_, stats) = job.execute(stream_of(source)).await?;
    Ok(stats.num_inserted_rows + stats.num_updated_rows + stats.num_deleted_rows)
}

/// Merges on both twins, compares what they hold, and returns what the tree said.
async fn merge(
    pair: &Pair,
    on: &[&str],
    options: &MergeOptions,
    source: &RecordBatch,
) -> Option<RowsReport> {
    let expected = lance_merge(&pair.flat, on, options, source.clone()).await;
    // Without a cache every object that is looked at is read.
    let uncached = OpenOptions::default().with_cache(ObjectCache::new(0));
    let table = open(&pair.tree, uncached).await;
    let found = table
        .merge_insert(on, options, stream_of(source.clone()))
        .await;
    assert_eq!(all_rows(&pair.flat).await, all_rows(&pair.tree).await);
    let report = verify::verify(
        &pair.tree,
        Default::default(),
        OpenOptions::default(),
        |_| {},
    );
    assert!(report.await.expect("a report").ok());
    match (expected, found) {
        (Ok(expected), Ok(found)) => {
            assert_eq!(found.rows, expected);
            Some(found)
        }
        (Err(_), Err(_)) => None,
        (expected, found) => panic!("Lance: {expected:?}, here: {found:?}"),
    }
}

const KEY: [&str; 2] = ["a", "B key"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_merge_sees_the_fragments_that_match() {
    for stable in [false, true] {
        let pair = pair_of(stable, None).await;
        let upsert = MergeOptions::upsert();
        // One there, one new, and a NULL that is equal to nothing.
        let source = rows(&[(7, Some("y")), (700, Some("y")), (8, None)], 1);
        let report = merge(&pair, &KEY, &upsert, &source).await.expect("merges");
        assert_eq!(report.rows, 3);
        let some = report.commit.objects_read;
        // With an index on a key it sees all of them.
        let indexed = pair_of(stable, Some("a")).await;
        let whole = merge(&indexed, &KEY, &upsert, &source)
            .await
            .expect("merges");
        let all = whole.commit.objects_read;
        assert!(some * 2 <= all, "{some} of {all}");
        // Unless it is not to be used.
        let indexed = pair_of(stable, Some("a")).await;
        let scanned = MergeOptions {
            use_index: false,
            ..upsert.clone()
        };
        let whole = merge(&indexed, &KEY, &scanned, &source)
            .await
            .expect("merges");
        assert!(whole.commit.objects_read * 2 <= all, "{whole:?}");
        // A name in another case is the same column, as in Lance.
        let source = rows(&[(9, Some("y")), (39, Some("x"))], 2);
        let on = ["A", "b key"];
        merge(&pair, &on, &upsert, &source).await.expect("merges");
        let everywhere: Vec<_> = (0..40).map(|a| (a, Some("x"))).collect();
        let source = rows(&everywhere, 3);
        let report = merge(&pair, &KEY, &upsert, &source).await.expect("merges");
        assert_eq!(report.rows, 40);
        // Nothing matches.
        let source = rows(&[(900, Some("y"))], 4);
        merge(&pair, &KEY, &upsert, &source).await.expect("merges");
        let source = rows(&[], 5);
        merge(&pair, &KEY, &upsert, &source).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_merge_does_what_it_is_told() {
    let pair = pair_of(false, None).await;
    let source = rows(&[(7, Some("y")), (700, Some("y"))], 1);
    let base = MergeOptions::default();
    for options in [
        base.clone(),
        MergeOptions {
            when_matched: WhenMatched::Fail,
            ..base.clone()
        },
        MergeOptions {
            when_matched: WhenMatched::Delete,
            when_not_matched: WhenNotMatched::DoNothing,
            ..base.clone()
        },
        MergeOptions {
            when_matched: WhenMatched::update_if_expr(datafusion::prelude::lit(true)),
            ..base.clone()
        },
        MergeOptions {
            when_not_matched_by_source: WhenNotMatchedBySource::Delete,
            ..MergeOptions::upsert()
        },
    ] {
        merge(&pair, &KEY, &options, &source).await;
    }
    // The same row twice.
    let twice = rows(&[(7, Some("y")), (7, Some("y"))], 2);
    let done = merge(&pair, &KEY, &MergeOptions::upsert(), &twice).await;
    assert!(done.is_none());
    let first = MergeOptions {
        source_dedupe_behavior: SourceDedupeBehavior::FirstSeen,
        ..MergeOptions::upsert()
    };
    merge(&pair, &KEY, &first, &twice).await.expect("merges");
    // Some of the columns, in rows of their own and beside the others.
    let part = rows(&[(7, Some("y")), (700, Some("y"))], 6);
    let part = part.project(&[2, 1, 0]).expect("three columns");
    for write_mode in [
        MergeInsertWriteMode::RewriteRows,
        MergeInsertWriteMode::RewriteColumns,
    ] {
        let options = MergeOptions {
            when_not_matched: WhenNotMatched::DoNothing,
            write_mode,
            ..MergeOptions::upsert()
        };
        merge(&pair, &KEY, &options, &part).await;
    }
    // Keys that are not there, none at all, and nested ones.
    for on in [&["nowhere"][..], &[], &["nested"], &["nested.x"]] {
        merge(&pair, on, &MergeOptions::upsert(), &source).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_merge_by_an_indexed_key_goes_the_way_of_lance() {
    let pair = pair_of(false, Some("a")).await;
    let by_a: Vec<_> = [3, 30, 300].map(|a| (a, Some("z"))).to_vec();
    let upsert = MergeOptions::upsert();
    merge(&pair, &["a"], &upsert, &rows(&by_a, 1)).await;
    // A part of the columns, which Lance then stores beside the others.
    let part = rows(&by_a, 2).project(&[0, 2]).expect("two columns");
    merge(&pair, &["a"], &upsert, &part).await;
}

/// Somebody takes a row that is merged, after it was looked for: the merge looks again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_merge_that_lost_its_rows_is_done_over() {
    let pair = pair_of(false, None).await;
    let other = open(&pair.tree, OpenOptions::default()).await;
    let raced = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let other = Arc::new(other);
    let probe = Probe::hooked(move |verb, location| {
        let manifest = verb == "put" && location.contains("_versions");
        let first = manifest && !raced.swap(true, std::sync::atomic::Ordering::SeqCst);
        let other = Arc::clone(&other);
        async move {
            if first {
                let deleted = other.delete("a = 7 AND \"B key\" = 'y'").await;
                assert_eq!(deleted.expect("deletes").rows, 1);
            }
            Act::Pass
        }
        .boxed()
    });
    let options = OpenOptions {
        object_store_wrapper: Some(Arc::new(probe)),
        ..Default::default()
    };
    let table = open(&format!("file-object-store://{}", pair.tree), options).await;
    let source = rows(&[(7, Some("y")), (8, Some("y"))], 1);
    let report = table
        .merge_insert(&KEY, &MergeOptions::upsert(), stream_of(source))
        .await
        .expect("merges in the end");
    assert_eq!(report.rows, 2);
    let found = all_rows(&pair.tree).await;
    assert_eq!(
        found.lines().filter(|l| l.contains("| 1     |")).count(),
        2,
        "{found}"
    );
}

/// A flat table takes merges too, and floats are equal as they are to Lance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn merges_by_floats_and_into_flat_tables() {
    let floats = |values: &[f64], note: i64| {
        let key: Float64Array = values.iter().copied().collect();
        let notes: Int64Array = values.iter().map(|_| note).collect();
        RecordBatch::try_from_iter([("k", Arc::new(key) as ArrayRef), ("note", Arc::new(notes))])
            .expect("a batch")
    };
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let params = WriteParams {
        mode: WriteMode::Create,
        max_rows_per_file: 2,
        max_rows_per_group: 2,
        ..Default::default()
    };
    InsertBuilder::new(text(&path("lance")).as_str())
        .with_params(&params)
        .execute(vec![floats(&[0.0, 1.5, f64::NAN, -7.0, 3.0, 9.0], 0)])
        .await
        .expect("written");
    copy_folder(&path("lance"), &path("flat"));
    copy_folder(&path("lance"), &path("tree"));
    let options = ConvertOptions {
        policy: tiny(),
        force: true,
        ..ConvertOptions::to_tree()
    };
    let tree = text(&path("tree"));
    let converted = convert(&tree, options, OpenOptions::default()).await;
    converted.expect("converted");
    let source = floats(&[-0.0, f64::NAN, 1.5, 1e300], 1);
    let upsert = MergeOptions::upsert();
    let lance = text(&path("lance"));
    let expected = lance_merge(&lance, &["k"], &upsert, source.clone()).await;
    let expected = expected.expect("Lance merges");
    let sorted = async |uri: String| {
        let snapshot = Snapshot::open(&uri, OpenOptions::default()).await;
        let provider = SnapshotProvider::try_new(snapshot.expect("opens"), Default::default());
        let ctx = SessionContext::new();
        ctx.register_table("t", Arc::new(provider.expect("a table")))
            .expect("free");
        let query = ctx.sql("SELECT * FROM t ORDER BY k, note").await;
        let batches = query.expect("plans").collect().await.expect("runs");
        let shown = arrow::util::pretty::pretty_format_batches(&batches);
        shown.expect("shown").to_string()
    };
    for name in ["flat", "tree"] {
        let table = open(&text(&path(name)), OpenOptions::default()).await;
        let merged = table.merge_insert(&["k"], &upsert, stream_of(source.clone()));
        assert_eq!(merged.await.expect("merges").rows, expected, "{name}");
        assert_eq!(sorted(text(&path(name))).await, sorted(lance.clone()).await);
    }
}
