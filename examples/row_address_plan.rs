//! A scan of rows that something else chose: a row-address plan made by hand, as an index search or
//! a sampler would make one.
//!
//! Run with `cargo run --example row_address_plan`.

use std::error::Error;
use std::sync::Arc;

use arrow::array::{AsArray, Int64Array, RecordBatch, RecordBatchIterator};
use arrow::datatypes::{DataType, Field, Int64Type, Schema};
use arrow::util::pretty::pretty_format_batches;
use datafusion::physical_plan::{collect, displayable};
use datafusion::prelude::SessionContext;
use fragtree::write::{ConvertOptions, convert};
use fragtree::{Engine, FragmentRanges, RowAddrSet, RowAddressPlan, SystemColumns, TableOptions};
use lance::Dataset;
use lance::dataset::WriteParams;

const FRAGMENTS: i64 = 50;
const ROWS: i64 = 10;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let scratch = tempfile::tempdir()?;
    let uri = scratch.path().join("events.lance");
    let uri = uri.to_str().ok_or("a scratch folder whose name is UTF-8")?;
    make_table(uri).await?;

    let options = TableOptions {
        system_columns: SystemColumns::ALL,
        ..Default::default()
    };
    let provider = Engine::new().provider(uri, options).await?;
    let ctx = SessionContext::new();

    // Three rows, by address: the fragment's id in the upper half, the row's place in the lower.
    let address = |fragment: u64, row: u64| (fragment << 32) | row;
    let chosen = RowAddrSet::from_addrs([address(3, 4), address(17, 0), address(42, 9)]);
    let mut plan = RowAddressPlan::from_rows(chosen);
    // Whatever else is known can only take rows away.
    plan.intersect_fragments(&FragmentRanges::from_ranges(std::iter::once(0..40)));
    let scan = provider.scan_plan(&ctx.state(), plan, None, None).await?;
    println!("{}", displayable(scan.as_ref()).indent(false));
    let rows = collect(scan, ctx.task_ctx()).await?;
    println!("{}", pretty_format_batches(&rows)?);
    assert_eq!(ids(&rows), [34, 170]);

    // Whole fragments, only the first column, at most 15 rows.
    let plan = RowAddressPlan::from_fragments(FragmentRanges::from_ids([7, 8, 30]));
    let scan = provider
        .scan_plan(&ctx.state(), plan, Some(&vec![0]), Some(15))
        .await?;
    let rows = ids(&collect(scan, ctx.task_ctx()).await?);
    println!("{} rows of fragments 7, 8 and 30", rows.len());
    assert_eq!(rows.len(), 15);
    assert!(rows.iter().all(|id| [7, 8, 30].contains(&(id / ROWS))));
    Ok(())
}

fn ids(batches: &[RecordBatch]) -> Vec<i64> {
    let columns = batches
        .iter()
        .map(|batch| batch.column(0).as_primitive::<Int64Type>());
    let mut ids: Vec<_> = columns
        .flat_map(|column| column.values().to_vec())
        .collect();
    ids.sort_unstable();
    ids
}

/// A table of 50 fragments of 10 rows, as a tree.
async fn make_table(uri: &str) -> Result<(), Box<dyn Error>> {
    let schema = Arc::new(Schema::new(vec![Field::new("id", DataType::Int64, false)]));
    let ids = Int64Array::from_iter_values(0..FRAGMENTS * ROWS);
    let batch = RecordBatch::try_new(Arc::clone(&schema), vec![Arc::new(ids)])?;
    let params = WriteParams {
        max_rows_per_file: usize::try_from(ROWS)?,
        ..Default::default()
    };
    Dataset::write(
        RecordBatchIterator::new([Ok(batch)], schema),
        uri,
        Some(params),
    )
    .await?;

    let mut options = ConvertOptions::to_tree();
    options.policy.leaf_bytes = 1024;
    options.force = true;
    convert(uri, options, Engine::new().open_options()).await?;
    Ok(())
}
