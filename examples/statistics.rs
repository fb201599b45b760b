//! Counts and statistics of a table without a query engine: the snapshot answers them.
//!
//! Run with `cargo run --example statistics`.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use arrow::array::{Int64Array, RecordBatch, RecordBatchIterator};
use arrow::datatypes::{DataType, Field, Schema};
use fragtree::write::{ConvertOptions, convert};
use fragtree::{Engine, FragmentRanges, Layout, VersionRef, WalkOptions, WalkState};
use futures::TryStreamExt;
use lance::Dataset;
use lance::dataset::WriteParams;

const FRAGMENTS: i64 = 200;
const ROWS: i64 = 10;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let scratch = tempfile::tempdir()?;
    let uri = scratch.path().join("events.lance");
    let uri = uri.to_str().ok_or("a scratch folder whose name is UTF-8")?;
    make_table(uri).await?;

    let engine = Engine::new();
    let latest = engine
        .open(uri, VersionRef::latest(), HashMap::new())
        .await?;
    assert_eq!(latest.layout(), Layout::Tree);

    // Of the whole version: known once it is open.
    let counts = latest.counts()?.ok_or("a tree always knows its counts")?;
    println!(
        "version {}: {} fragments, {} rows of which {} are visible",
        latest.version(),
        counts.fragments,
        counts.total_rows,
        counts.visible_rows
    );
    assert_eq!(counts.fragments, 200);
    assert_eq!((counts.total_rows, counts.visible_rows), (2000, 1995));

    // Of some fragments: opens only what an edge of the range cuts.
    let walk = WalkState::default();
    let some = FragmentRanges::from_ranges(std::iter::once(50..150));
    let counts = latest.count(&some, &walk).await?.ok_or("row counts")?;
    let read = walk.stats().snapshot();
    println!(
        "fragments 50 to 149: {} rows; opened {} tree objects and skipped {}",
        counts.total_rows,
        read.nodes_opened + read.leaves_opened,
        read.children_skipped
    );
    assert_eq!(counts.total_rows, 1000);

    // Of each fragment, streamed: memory does not grow with the table.
    let walk = WalkState::default();
    let all = latest.fragments(FragmentRanges::all(), &WalkOptions::default(), &walk);
    let with_deletions = all
        .try_fold(Vec::new(), |mut found, batch| async move {
            let deleted = batch.iter().filter(|f| f.deleted_rows().unwrap_or(0) > 0);
            found.extend(deleted.map(|f| f.id()));
            Ok(found)
        })
        .await?;
    println!("fragments with deleted rows: {with_deletions:?}");
    assert_eq!(with_deletions, [10]);

    // An earlier version, still in the other layout.
    let first = engine
        .open(uri, VersionRef::version(1), HashMap::new())
        .await?;
    println!(
        "version 1 is {} and opening it read {} bytes",
        first.layout(),
        first.open_cost().bytes
    );
    assert_eq!(first.layout(), Layout::Flat);
    assert_eq!(first.counts()?.map(|c| c.visible_rows), Some(2000));
    Ok(())
}

/// A table of 200 fragments with five rows deleted, in a tree whose leaves hold a few fragments each.
async fn make_table(uri: &str) -> Result<(), Box<dyn Error>> {
    let schema = Arc::new(Schema::new(vec![Field::new("id", DataType::Int64, false)]));
    let ids = Int64Array::from_iter_values(0..FRAGMENTS * ROWS);
    let batch = RecordBatch::try_new(Arc::clone(&schema), vec![Arc::new(ids)])?;
    let params = WriteParams {
        max_rows_per_file: usize::try_from(ROWS)?,
        ..Default::default()
    };
    let rows = RecordBatchIterator::new([Ok(batch)], schema);
    let mut table = Dataset::write(rows, uri, Some(params)).await?;
    table.delete("id >= 105 AND id < 110").await?;

    let mut options = ConvertOptions::to_tree();
    options.policy.leaf_bytes = 1024;
    options.force = true;
    convert(uri, options, Engine::new().open_options()).await?;
    Ok(())
}
