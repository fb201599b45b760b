//! The plan node for a scan of no column: rows are counted and not read.
//!
//! `COUNT(*)`, `SELECT 1 FROM t` and `EXISTS` ask a table for rows without columns. When every filter
//! is on row addresses the number of rows follows from summaries, from the leaves an edge of a range
//! cuts, and from the deletion files of the fragments an edge cuts.
//!
//! The number is found when the scan is planned. Then it is an exact statistic, of which DataFusion
//! makes a literal: a count costs what the edges cost. Found later it would have to be handed on as
//! that many rows, and a table can have more of those than anything can be proportional to.

use std::fmt;
use std::sync::Arc;

use arrow::array::{RecordBatch, RecordBatchOptions};
use datafusion::common::stats::Precision;
use datafusion::common::{DataFusionError, Result as DFResult, Statistics};
use datafusion::execution::TaskContext;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType, SchedulingType};
use datafusion::physical_plan::metrics::{BaselineMetrics, MetricsSet, RecordOutput};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties,
    SendableRecordBatchStream,
};
use futures::{StreamExt, TryStreamExt, stream};

use super::chunk::{scan_chunk, wanted_offsets};
use super::metrics::NodeMetrics;
use super::scan::{ScanPlan, no_children};
use crate::error::{Error, Result};
use crate::ranges::RowAddrSet;
use crate::tree_scan::{WalkOptions, WalkState};

/// Rows without columns that are handed on at a time: a counter takes any number in one step, an
/// expression over them makes an array of this length.
const BATCH_ROWS: u64 = 1 << 16;

/// What the node gives out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Output {
    /// As many rows as were counted, up to the limit of the plan.
    Counted,
    /// One row, for the literal above that is the count.
    One,
}

/// Gives as many rows without columns as the fragments of a plan hold; or one row, below a literal
/// that says how many.
#[derive(Debug)]
pub(crate) struct FragmentCountExec {
    plan: ScanPlan,
    rows: u64,
    output: Output,
    properties: Arc<PlanProperties>,
    metrics: NodeMetrics,
}

impl FragmentCountExec {
    /// Counts a plan without columns and without a filter on data, reading what an edge of its
    /// ranges cuts.
    pub(crate) async fn count(plan: ScanPlan, context: Arc<TaskContext>) -> Result<Self> {
        if !plan.request.columns.is_empty() || plan.request.filter.is_some() {
            return Err(Error::internal("a count that needs columns"));
        }
        let metrics = NodeMetrics::default();
        // All rows are counted; a limit, which a planner may still change, is for the output.
        let mut all = plan.clone();
        let mut request = all.request.as_ref().clone();
        request.fetch = None;
        all.request = Arc::new(request);
        let counter = Counter {
            state: WalkState::with_stats(Arc::clone(&metrics.tree)),
            plan: all,
            metrics,
            context,
        };
        let rows = counter.count().await?;
        Ok(Self::new(plan, rows, Output::Counted, counter.metrics))
    }

    /// The same count, as the source of the one row of a literal.
    pub(crate) fn answered(&self) -> Self {
        let mut plan = self.plan.clone();
        let mut request = plan.request.as_ref().clone();
        request.fetch = None;
        plan.request = Arc::new(request);
        Self::new(plan, self.rows, Output::One, self.metrics.clone())
    }

    fn new(plan: ScanPlan, rows: u64, output: Output, metrics: NodeMetrics) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::clone(&plan.request.schema)),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        // One row is soon given; many would have to be given with pauses.
        let scheduling = match output {
            Output::Counted => SchedulingType::NonCooperative,
            Output::One => SchedulingType::Cooperative,
        };
        let properties = properties.with_scheduling_type(scheduling);
        Self {
            plan,
            rows,
            output,
            properties: Arc::new(properties),
            metrics,
        }
    }

    fn rows_out(&self) -> u64 {
        let rows = match self.output {
            Output::Counted => self.rows,
            Output::One => 1,
        };
        let fetch = self.plan.request.fetch.map_or(u64::MAX, |f| f as u64);
        rows.min(fetch)
    }
}

impl DisplayAs for FragmentCountExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if matches!(t, DisplayFormatType::Default | DisplayFormatType::Verbose) {
            write!(f, "FragmentCountExec: ")?;
        }
        self.plan.fmt_scan(f)?;
        write!(f, ", count={} (exact, from metadata)", self.rows)
    }
}

impl ExecutionPlan for FragmentCountExec {
    fn name(&self) -> &'static str {
        "FragmentCountExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        no_children(self, &children)
    }

    fn execute(
        &self,
        partition: usize,
        _context: Arc<TaskContext>,
    ) -> DFResult<SendableRecordBatchStream> {
        if partition != 0 {
            return Err(DataFusionError::Internal(format!(
                "partition {partition} of a count with 1"
            )));
        }
        let baseline = BaselineMetrics::new(&self.metrics.set, partition);
        let schema = Arc::clone(&self.plan.request.schema);
        let batches =
            row_batches(self.rows_out()).map_ok(move |batch| batch.record_output(&baseline));
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.metrics())
    }

    fn partition_statistics(&self, _partition: Option<usize>) -> DFResult<Arc<Statistics>> {
        let mut statistics = Statistics::new_unknown(&self.plan.request.schema);
        let rows = self.rows_out();
        statistics.num_rows = usize::try_from(rows).map_or(Precision::Absent, Precision::Exact);
        Ok(Arc::new(statistics))
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn ExecutionPlan>> {
        let mut plan = self.plan.clone();
        let mut request = plan.request.as_ref().clone();
        request.fetch = limit;
        plan.request = Arc::new(request);
        Some(Arc::new(Self::new(
            plan,
            self.rows,
            self.output,
            self.metrics.clone(),
        )))
    }

    fn fetch(&self) -> Option<usize> {
        self.plan.request.fetch
    }
}

fn row_batches(rows: u64) -> impl stream::Stream<Item = DFResult<RecordBatch>> {
    let steps = rows.div_ceil(BATCH_ROWS);
    stream::iter(0..steps).map(move |step| {
        let rows = BATCH_ROWS.min(rows - step * BATCH_ROWS);
        let rows = usize::try_from(rows).unwrap_or(usize::MAX);
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let schema = Arc::new(arrow::datatypes::Schema::empty());
        Ok(RecordBatch::try_new_with_options(
            schema,
            Vec::new(),
            &options,
        )?)
    })
}

struct Counter {
    plan: ScanPlan,
    metrics: NodeMetrics,
    state: WalkState,
    context: Arc<TaskContext>,
}

impl Counter {
    async fn count(&self) -> Result<u64> {
        let snapshot = &self.plan.snapshot;
        let unknown = || Error::internal("a count over unknown row counts");
        let Some(rows) = &self.plan.request.rows else {
            let counts = snapshot.count(&self.plan.fragments, &self.state).await?;
            return Ok(counts.ok_or_else(unknown)?.visible_rows);
        };
        let whole = rows.whole_fragments().intersect(&self.plan.fragments);
        let counts = snapshot.count(&whole, &self.state).await?;
        let mut total = counts.ok_or_else(unknown)?.visible_rows;
        let cut = rows.cut_fragments().intersect(&self.plan.fragments);
        let mut fragments = snapshot.fragments(cut, &WalkOptions::default(), &self.state);
        while let Some(batch) = fragments.try_next().await? {
            let mut with_deletions = Vec::new();
            for fragment in batch {
                match (fragment.physical_rows(), fragment.deleted_rows()) {
                    (Some(physical), Some(0)) => {
                        total += selected(rows, fragment.id(), physical);
                    }
                    _ => with_deletions.push(fragment),
                }
            }
            total += self.count_by_deletion_file(with_deletions).await?;
        }
        Ok(total)
    }

    /// Counts selected rows that are not deleted. Lance reads the deletion files and no data: a scan
    /// of no column is a scan of row addresses, which are computed.
    async fn count_by_deletion_file(
        &self,
        fragments: Vec<crate::tree_scan::ResolvedFragment>,
    ) -> Result<u64> {
        let scan = scan_chunk(
            &self.plan.snapshot,
            &self.plan.request,
            fragments,
            &self.context,
            &self.metrics.data,
        )
        .await?;
        let Some(mut batches) = scan else {
            return Ok(0);
        };
        let mut total = 0;
        while let Some(batch) = batches.next().await {
            let batch = batch.map_err(|e| Error::datafusion("cannot count rows", e))?;
            total += batch.num_rows() as u64;
        }
        Ok(total)
    }
}

fn selected(rows: &RowAddrSet, id: u32, physical_rows: u64) -> u64 {
    wanted_offsets(rows, id, physical_rows)
        .iter()
        .map(|r| r.end - r.start)
        .sum()
}
