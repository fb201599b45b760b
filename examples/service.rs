//! A table in a service: opened once, queried by many at the same time over one cache, at the latest
//! version each time.
//!
//! Run with `cargo run --example service`.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{Int64Array, RecordBatch, RecordBatchIterator};
use arrow::datatypes::{DataType, Field, Int64Type, Schema};
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::prelude::{SessionConfig, SessionContext};
use fragtree::write::{ConvertOptions, convert};
use fragtree::{Engine, EngineOptions, LiveTable, Refresh, SystemColumns, TableOptions};
use lance::Dataset;
use lance::dataset::WriteParams;
use tokio::task::JoinSet;

const FRAGMENTS: i64 = 100;
const ROWS: i64 = 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let scratch = tempfile::tempdir()?;
    let uri = scratch.path().join("events.lance");
    let uri = uri.to_str().ok_or("a scratch folder whose name is UTF-8")?;
    make_table(uri).await?;

    // Once for the process: caches bounded in bytes, and a runtime with a memory limit.
    let engine = Engine::with_options(EngineOptions {
        cache_bytes: 32 << 20,
        ..Default::default()
    });
    let runtime = RuntimeEnvBuilder::new()
        .with_memory_limit(256 << 20, 1.0)
        .build_arc()?;

    // Once for the table: it can be shared by any number of sessions, and follows new versions. Here
    // it looks for them once in a second at most, and not for each query.
    let options = TableOptions {
        system_columns: SystemColumns::ALL,
        refresh: Refresh::Every(Duration::from_secs(1)),
        ..Default::default()
    };
    let events = engine.live_table(uri, options).await?;
    let version = events.current().await?.snapshot().version();
    println!("serving version {version} of {uri}");

    // For each request a session of its own, which costs next to nothing.
    let start = Instant::now();
    let mut requests = JoinSet::new();
    for fragment in 0..64 {
        let (engine, events, runtime) = (engine.clone(), events.clone(), Arc::clone(&runtime));
        requests.spawn(async move { serve(&engine, events, runtime, fragment).await });
    }
    let mut sums = requests
        .join_all()
        .await
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    sums.sort_unstable();
    println!("64 queries at once in {:.0?}", start.elapsed());

    let first: i64 = (0..ROWS).sum();
    let expected: Vec<_> = (0..64)
        .map(|fragment| first + fragment * ROWS * ROWS)
        .collect();
    assert_eq!(sums, expected);
    Ok(())
}

/// Answers one request: a sum over one fragment.
async fn serve(
    engine: &Engine,
    events: LiveTable,
    runtime: Arc<RuntimeEnv>,
    fragment: i64,
) -> datafusion::error::Result<i64> {
    let config = SessionConfig::new().with_target_partitions(2);
    let ctx = SessionContext::new_with_config_rt(config, runtime);
    engine.register(&ctx);
    ctx.register_table("events", Arc::new(events))?;
    let sql = format!("SELECT SUM(id) FROM events WHERE _fragid = {fragment}");
    let batches = ctx.sql(&sql).await?.collect().await?;
    let sums = batches.iter().flat_map(|batch| {
        use arrow::array::AsArray;
        batch
            .column(0)
            .as_primitive::<Int64Type>()
            .values()
            .to_vec()
    });
    Ok(sums.sum())
}

/// A table of 100 fragments of 20 rows, as a tree.
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
