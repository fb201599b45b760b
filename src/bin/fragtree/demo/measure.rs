//! Runs one query on one version, from opening it on, and says what that read.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::util::display::array_value_to_string;
use datafusion::physical_plan::{ExecutionPlan, collect};
use datafusion::prelude::SessionContext;
use fragtree::{Engine, SnapshotProvider, SystemColumns, VersionRef};

use crate::failure::Outcome;

/// A query of the demo over the table `t`.
#[derive(Debug)]
pub(crate) struct Query {
    /// A few words.
    pub name: &'static str,
    /// Its text.
    pub sql: String,
}

/// What a query gave and what it took.
#[derive(Debug)]
pub(crate) struct Cost {
    /// The result, on one line.
    pub answer: String,
    /// Wall time, opening and planning included.
    pub seconds: f64,
    /// Reads of the object store: listing aside, all of them.
    pub requests: u64,
    /// Bytes those gave.
    pub bytes: u64,
    /// Nodes and leaves opened after the root.
    pub opened: u64,
    /// Children of opened nodes that were not.
    pub skipped: u64,
    /// Fragments whose data was scanned.
    pub fragments: u64,
}

/// Runs `query` with nothing cached: an engine, a session and stores of its own.
pub(crate) async fn run(uri: &str, reference: VersionRef, query: &Query) -> Outcome<Cost> {
    let engine = Engine::new();
    let ctx = SessionContext::new();
    engine.register(&ctx);
    let start = Instant::now();
    let snapshot = engine.open(uri, reference, Default::default()).await?;
    let provider = SnapshotProvider::try_new(Arc::clone(&snapshot), SystemColumns::ALL)?;
    ctx.register_table("t", Arc::new(provider))?;
    let plan = ctx.sql(&query.sql).await?.create_physical_plan().await?;
    let batches = collect(Arc::clone(&plan), ctx.task_ctx()).await?;
    let seconds = start.elapsed().as_secs_f64();
    let io = snapshot
        .shell()
        .object_store(None)
        .await?
        .io_stats_snapshot();
    let sum = |name| sum_metric(&plan, name);
    Ok(Cost {
        answer: answer(&batches)?,
        seconds,
        requests: io.read_iops,
        bytes: io.read_bytes,
        opened: sum("nodes_opened") + sum("leaves_opened"),
        skipped: sum("children_skipped"),
        fragments: sum("fragments_scanned"),
    })
}

/// A counter of EXPLAIN ANALYZE, over the whole plan.
fn sum_metric(plan: &Arc<dyn ExecutionPlan>, name: &str) -> u64 {
    let own = plan.metrics().and_then(|metrics| metrics.sum_by_name(name));
    let own = own.map_or(0, |value| value.as_usize() as u64);
    own + plan
        .children()
        .into_iter()
        .map(|child| sum_metric(child, name))
        .sum::<u64>()
}

fn answer(batches: &[RecordBatch]) -> Outcome<String> {
    let mut rows = Vec::new();
    for batch in batches {
        for row in 0..batch.num_rows() {
            let cells: Result<Vec<_>, _> = batch
                .schema_ref()
                .fields()
                .iter()
                .zip(batch.columns())
                .map(|(field, column)| {
                    Ok::<_, arrow::error::ArrowError>(format!(
                        "{} = {}",
                        field.name(),
                        array_value_to_string(column, row)?
                    ))
                })
                .collect();
            rows.push(cells?.join(", "));
        }
    }
    Ok(rows.join("; "))
}
