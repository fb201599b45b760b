//! The plan node that reads rows of fragments.
//!
//! ```text
//!  partition: ranges ─► walk ─► chunk ─► Lance scan ─► batches
//!                         └───► chunk ─► Lance scan, started while the first drains
//! ```

use std::fmt;
use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::common::runtime::SpawnedTask;
use datafusion::common::stats::Precision;
use datafusion::common::{ColumnStatistics, DataFusionError, Result as DFResult, Statistics};
use datafusion::execution::TaskContext;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::metrics::{BaselineMetrics, MetricsSet, RecordOutput};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties,
    SendableRecordBatchStream,
};
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};

use super::chunk::{ScanRequest, scan_chunk};
use super::metrics::{DataStats, NodeMetrics};
use crate::ranges::FragmentRanges;
use crate::snapshot::Snapshot;
use crate::tree::summary::Counts;
use crate::tree_scan::{FragmentStream, ResolvedFragment, WalkOptions, WalkState};

/// What a scan reads, and what is known about it before anything is read.
#[derive(Debug, Clone)]
pub(crate) struct ScanPlan {
    pub snapshot: Arc<Snapshot>,
    /// Whether the table stays at this version, and was not only at it when it was looked up.
    pub pinned: bool,
    pub request: Arc<ScanRequest>,
    /// The fragments to read.
    pub fragments: FragmentRanges,
    /// Filters that narrowed the scan but are still to be checked above it, for display.
    pub residual: Vec<String>,
    /// Counts over `fragments` and whether they are exact; nothing when unknown.
    pub estimate: Option<(Counts, bool)>,
    /// Fragments in the version.
    pub total_fragments: Option<u64>,
}

impl ScanPlan {
    /// Number of rows the scan gives, as far as it is known without reading. Exact only when nothing
    /// can change it: no filter, no row selection, no limit.
    pub(crate) fn num_rows(&self) -> Precision<usize> {
        let Some((counts, exact)) = self.estimate else {
            return Precision::Absent;
        };
        let rows = usize::try_from(counts.visible_rows).unwrap_or(usize::MAX);
        let request = &self.request;
        let untouched =
            request.filter.is_none() && request.rows.is_none() && request.fetch.is_none();
        let rows = rows.min(request.fetch.unwrap_or(usize::MAX));
        if exact && untouched {
            Precision::Exact(rows)
        } else {
            Precision::Inexact(rows)
        }
    }

    fn statistics(&self) -> Statistics {
        let num_rows = self.num_rows();
        let column_statistics = self
            .request
            .schema
            .fields()
            .iter()
            .map(|field| {
                let mut column = ColumnStatistics::new_unknown();
                if !field.is_nullable() {
                    column.null_count = Precision::Exact(0);
                }
                column
            })
            .collect();
        Statistics {
            num_rows,
            total_byte_size: Precision::Absent,
            column_statistics,
        }
    }

    /// Writes what was pruned and what is left to do, the same for every node over a plan.
    pub(crate) fn fmt_scan(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = crate::resolve::display_uri(self.snapshot.uri());
        let name = table
            .trim_end_matches('/')
            .rsplit('/')
            .next()
            .unwrap_or(&table);
        write!(
            f,
            "table={name}, version={}{}, layout={}, fragments={}",
            self.snapshot.version(),
            if self.pinned { " (pinned)" } else { "" },
            self.snapshot.layout(),
            self.fragments
        )?;
        match (self.estimate, self.total_fragments) {
            (Some((counts, exact)), Some(total)) => {
                let about = if exact { "" } else { "~" };
                write!(f, " ({about}{} of {total})", counts.fragments)?;
            }
            (None, Some(total)) => write!(f, " (of {total})")?,
            (_, None) => {}
        }
        if let Some(rows) = &self.request.rows {
            write!(f, ", rows={rows}")?;
        }
        if let Some(filter) = &self.request.filter {
            write!(f, ", filter={filter}")?;
        }
        if !self.residual.is_empty() {
            write!(f, ", residual=[{}]", self.residual.join(", "))?;
        }
        if let Some(fetch) = self.request.fetch {
            write!(f, ", limit={fetch}")?;
        }
        Ok(())
    }

    fn fmt_count(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.num_rows() {
            Precision::Exact(rows) => write!(f, ", count={rows} (exact, from summaries)"),
            Precision::Inexact(rows) => write!(f, ", count=~{rows} (by scanning)"),
            Precision::Absent => write!(f, ", count=unknown (by scanning)"),
        }
    }
}

/// Reads rows of the fragments of a [`ScanPlan`].
#[derive(Debug)]
pub(crate) struct FragmentScanExec {
    plan: ScanPlan,
    partitions: Vec<FragmentRanges>,
    properties: Arc<PlanProperties>,
    metrics: NodeMetrics,
    /// What the walks of the partitions share.
    walk: WalkState,
}

impl FragmentScanExec {
    /// A scan over at most `target_partitions` partitions, divided by summaries alone.
    pub(crate) fn new(plan: ScanPlan, target_partitions: usize) -> Self {
        let parts = partitions_for(&plan, target_partitions);
        let mut partitions = plan.snapshot.split(&plan.fragments, parts);
        if partitions.is_empty() {
            partitions.push(FragmentRanges::empty());
        }
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::clone(&plan.request.schema)),
            Partitioning::UnknownPartitioning(partitions.len()),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        let metrics = NodeMetrics::default();
        Self {
            plan,
            partitions,
            properties: Arc::new(properties),
            walk: WalkState::with_stats(Arc::clone(&metrics.tree)),
            metrics,
        }
    }
}

/// A small limit is not worth several partitions, each of which would read up to the limit.
const ROWS_WORTH_A_PARTITION: usize = 100_000;

fn partitions_for(plan: &ScanPlan, target: usize) -> usize {
    match plan.request.fetch {
        Some(fetch) if plan.request.filter.is_none() => {
            target.min(fetch.div_ceil(ROWS_WORTH_A_PARTITION)).max(1)
        }
        _ => target.max(1),
    }
}

impl DisplayAs for FragmentScanExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match t {
            DisplayFormatType::Default | DisplayFormatType::Verbose => {
                write!(f, "FragmentScanExec: ")?;
                self.plan.fmt_scan(f)?;
                self.plan.fmt_count(f)?;
                write!(f, ", partitions={}", self.partitions.len())?;
                let fields = self.plan.request.schema.fields();
                let names: Vec<_> = fields.iter().map(|f| f.name().as_str()).collect();
                write!(f, ", columns=[{}]", names.join(", "))
            }
            DisplayFormatType::TreeRender => self.plan.fmt_scan(f),
        }
    }
}

impl ExecutionPlan for FragmentScanExec {
    fn name(&self) -> &'static str {
        "FragmentScanExec"
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
        context: Arc<TaskContext>,
    ) -> DFResult<SendableRecordBatchStream> {
        let ranges = self.partitions.get(partition).cloned().ok_or_else(|| {
            DataFusionError::Internal(format!(
                "partition {partition} of a scan with {}",
                self.partitions.len()
            ))
        })?;
        let source = ChunkSource {
            snapshot: Arc::clone(&self.plan.snapshot),
            request: Arc::clone(&self.plan.request),
            context,
            stats: Arc::clone(&self.metrics.data),
        };
        let baseline = BaselineMetrics::new(&self.metrics.set, partition);
        let batches = source.batches(ranges, &self.walk);
        let batches = limited(batches, self.plan.request.fetch)
            .map_ok(move |batch| batch.record_output(&baseline));
        let schema = Arc::clone(&self.plan.request.schema);
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.metrics())
    }

    fn partition_statistics(&self, partition: Option<usize>) -> DFResult<Arc<Statistics>> {
        let statistics = match partition {
            None => self.plan.statistics(),
            Some(_) => Statistics::new_unknown(&self.plan.request.schema),
        };
        Ok(Arc::new(statistics))
    }

    fn supports_limit_pushdown(&self) -> bool {
        false
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn ExecutionPlan>> {
        let mut plan = self.plan.clone();
        let mut request = plan.request.as_ref().clone();
        request.fetch = limit;
        plan.request = Arc::new(request);
        Some(Arc::new(Self::new(plan, self.partitions.len())))
    }

    fn fetch(&self) -> Option<usize> {
        self.plan.request.fetch
    }
}

/// A leaf node's `with_new_children`.
pub(crate) fn no_children<P: ExecutionPlan + 'static>(
    plan: Arc<P>,
    children: &[Arc<dyn ExecutionPlan>],
) -> DFResult<Arc<dyn ExecutionPlan>> {
    if children.is_empty() {
        return Ok(plan);
    }
    Err(DataFusionError::Internal(format!(
        "{} takes no children, {} given",
        plan.name(),
        children.len()
    )))
}

/// Cuts a stream off after `fetch` rows.
fn limited(
    batches: BoxStream<'static, DFResult<RecordBatch>>,
    fetch: Option<usize>,
) -> BoxStream<'static, DFResult<RecordBatch>> {
    let Some(fetch) = fetch else { return batches };
    stream::try_unfold((batches, fetch), |(mut batches, left)| async move {
        if left == 0 {
            return Ok(None);
        }
        let Some(batch) = batches.try_next().await? else {
            return Ok(None);
        };
        let batch = batch.slice(0, left.min(batch.num_rows()));
        let left = left - batch.num_rows();
        Ok(Some((batch, (batches, left))))
    })
    .boxed()
}

/// Fragments in the first chunk: few, so that first rows come early.
const FIRST_CHUNK: usize = 4;
/// Fragments in a chunk at most.
const LARGEST_CHUNK: usize = 1024;
/// Physical rows after which a chunk is closed.
const CHUNK_ROWS: u64 = 4 << 20;
/// Chunks in flight: one draining, one started.
const CHUNKS_IN_FLIGHT: usize = 2;
/// Leaves read ahead of the chunks, in each partition: a chunk takes far longer than a leaf.
const LEAVES_AHEAD: usize = 8;
/// The same where there is a limit.
const LEAVES_FOR_A_LIMIT: usize = 2;
/// Batches a started chunk has ready.
const READY_BATCHES: usize = 2;

/// Makes Lance scans of the fragments of a walk.
#[derive(Debug, Clone)]
pub(crate) struct ChunkSource {
    pub snapshot: Arc<Snapshot>,
    pub request: Arc<ScanRequest>,
    pub context: Arc<TaskContext>,
    pub stats: Arc<DataStats>,
}

impl ChunkSource {
    /// The batches of `ranges`, in id order.
    pub(crate) fn batches(
        self,
        ranges: FragmentRanges,
        state: &WalkState,
    ) -> BoxStream<'static, DFResult<RecordBatch>> {
        // A limit is often met by the first chunk.
        let (window, in_flight) = match self.request.fetch {
            Some(_) => (LEAVES_FOR_A_LIMIT, 1),
            None => (LEAVES_AHEAD, CHUNKS_IN_FLIGHT),
        };
        let walk = WalkOptions { window };
        let fragments = self.snapshot.fragments(ranges, &walk, state);
        chunks(fragments)
            .map(move |chunk| {
                let source = self.clone();
                // Spawned, so that the next chunk starts while this one drains.
                let task =
                    chunk.map(|chunk| SpawnedTask::spawn(async move { source.start(chunk).await }));
                async move {
                    task?
                        .await
                        .map_err(|e| DataFusionError::ExecutionJoin(Box::new(e)))?
                }
            })
            .buffered(in_flight)
            .try_flatten()
            .boxed()
    }

    /// Scans a chunk up to its first few batches, which wait for the consumer with the rest of the
    /// scan. From there on the consumer drives it: Lance decodes on tasks of its own, and another
    /// task between the two would cost a wake-up a batch.
    async fn start(
        self,
        chunk: Vec<ResolvedFragment>,
    ) -> DFResult<BoxStream<'static, DFResult<RecordBatch>>> {
        let scan = scan_chunk(
            &self.snapshot,
            &self.request,
            chunk,
            &self.context,
            &self.stats,
        )
        .await?;
        let Some(mut batches) = scan else {
            return Ok(stream::empty().boxed());
        };
        let mut ready = Vec::with_capacity(READY_BATCHES);
        while ready.len() < READY_BATCHES
            && let Some(batch) = batches.next().await
        {
            // An error waits for its turn: the rows before it may be all that is wanted.
            let failed = batch.is_err();
            ready.push(batch);
            if failed {
                break;
            }
        }
        Ok(stream::iter(ready).chain(batches).boxed())
    }
}

/// Groups fragments into chunks that grow from [`FIRST_CHUNK`].
fn chunks(fragments: FragmentStream) -> BoxStream<'static, DFResult<Vec<ResolvedFragment>>> {
    struct State {
        fragments: FragmentStream,
        waiting: std::vec::IntoIter<ResolvedFragment>,
        size: usize,
    }
    let state = State {
        fragments,
        waiting: Vec::new().into_iter(),
        size: FIRST_CHUNK,
    };
    stream::try_unfold(state, |mut state| async move {
        let mut chunk = Vec::new();
        let mut rows = 0_u64;
        while chunk.len() < state.size && rows < CHUNK_ROWS {
            if let Some(fragment) = state.waiting.next() {
                rows = fragment
                    .physical_rows()
                    .map_or(rows, |n| rows.saturating_add(n));
                chunk.push(fragment);
                continue;
            }
            match state.fragments.try_next().await? {
                Some(batch) => state.waiting = batch.into_iter(),
                None => break,
            }
        }
        if chunk.is_empty() {
            return Ok(None);
        }
        state.size = (state.size * 4).min(LARGEST_CHUNK);
        Ok(Some((chunk, state)))
    })
    .map_err(|e: crate::error::Error| DataFusionError::from(e))
    .boxed()
}
