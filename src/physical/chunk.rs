//! A few resolved fragments, scanned by Lance.
//!
//! A chunk becomes a Lance dataset that holds exactly its fragments, so that Lance applies
//! everything it knows: deletions, columns a fragment never wrote, late materialisation, row ids. No
//! manifest is read for it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow::array::{ArrayRef, AsArray, BooleanArray, RecordBatch, RecordBatchOptions, UInt64Array};
use arrow::compute::filter_record_batch;
use arrow::datatypes::{SchemaRef, UInt64Type};
use datafusion::common::{DataFusionError, Result as DFResult};
use datafusion::execution::TaskContext;
use datafusion::logical_expr::Expr;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, SendableRecordBatchStream,
};
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use lance::Dataset;
use lance::dataset::scanner::MaterializationStyle;
use lance_core::datatypes::Schema as LanceSchema;
use lance_file::version::ConcreteFileVersion;
use lance_select::RowAddrTreeMap;
use roaring::RoaringBitmap;

use super::metrics::{DataStats, PlanCost};
use crate::error::{Error, Result};
use crate::pruning::{ROW_ADDR, ROW_ID};
use crate::ranges::RowAddrSet;
use crate::snapshot::Snapshot;
use crate::tree_scan::ResolvedFragment;

/// Bytes one Lance scan may have read and not yet decoded.
const IO_BUFFER_BYTES: u64 = 256 << 20;

/// One column of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OutputColumn {
    /// A column of the table, by its place in the table's schema.
    Data(usize),
    /// `_rowid`.
    RowId,
    /// `_rowaddr`.
    RowAddr,
    /// `_fragid`.
    FragId,
}

/// What to read from each fragment.
#[derive(Debug, Clone)]
pub(crate) struct ScanRequest {
    /// Schema of the output, a field for each of `columns`.
    pub schema: SchemaRef,
    /// The output, in order; may repeat a column.
    pub columns: Vec<OutputColumn>,
    /// A filter on data columns that Lance applies in full.
    pub filter: Option<Expr>,
    /// Rows to read; none for every row of the fragments.
    pub rows: Option<Arc<RowAddrSet>>,
    /// Rows wanted at most.
    pub fetch: Option<usize>,
}

impl ScanRequest {
    fn wants(&self, column: &OutputColumn) -> bool {
        self.columns.contains(column)
    }

    /// The table's columns that are read, each once, in table order.
    fn data_columns(&self) -> Vec<usize> {
        let mut columns: Vec<_> = self
            .columns
            .iter()
            .filter_map(|c| match c {
                OutputColumn::Data(index) => Some(*index),
                OutputColumn::RowId | OutputColumn::RowAddr | OutputColumn::FragId => None,
            })
            .collect();
        columns.sort_unstable();
        columns.dedup();
        columns
    }
}

/// The rows of a fragment that are wanted, as ranges of offsets below its row count.
pub(crate) fn wanted_offsets(rows: &RowAddrSet, id: u32, physical_rows: u64) -> Vec<Range<u64>> {
    rows.in_fragment(id)
        .into_iter()
        .map(|r| r.start..r.end.min(physical_rows))
        .filter(|r| !r.is_empty())
        .collect()
}

/// How a chunk's rows are chosen.
enum Selection {
    /// All of them.
    All,
    /// Lance reads only these.
    Rows(RowAddrTreeMap),
    /// Lance reads all and we drop the others: for v1 files and unknown row counts.
    Afterwards(Arc<RowAddrSet>),
}

/// Starts a scan of `fragments`. An empty chunk, or one none of whose rows is wanted, gives none.
pub(crate) async fn scan_chunk(
    snapshot: &Arc<Snapshot>,
    request: &Arc<ScanRequest>,
    fragments: Vec<ResolvedFragment>,
    context: &Arc<TaskContext>,
    stats: &Arc<DataStats>,
) -> Result<Option<BoxStream<'static, DFResult<RecordBatch>>>> {
    match start(snapshot, request, fragments, context, stats).await {
        Ok(scan) => Ok(scan),
        Err(e) => Err(snapshot.explain(e).await),
    }
}

async fn start(
    snapshot: &Arc<Snapshot>,
    request: &Arc<ScanRequest>,
    fragments: Vec<ResolvedFragment>,
    context: &Arc<TaskContext>,
    stats: &Arc<DataStats>,
) -> Result<Option<BoxStream<'static, DFResult<RecordBatch>>>> {
    let (fragments, selection) = choose(snapshot, request, fragments);
    if fragments.is_empty() {
        return Ok(None);
    }
    stats.scans.fetch_add(1, Ordering::Relaxed);
    stats
        .fragments
        .fetch_add(fragments.len() as u64, Ordering::Relaxed);
    let label = describe(snapshot, &fragments);
    let records = fragments
        .iter()
        .map(ResolvedFragment::record)
        .collect::<Result<Vec<_>>>()?;
    if let Some(record) = records.iter().find(|r| r.files.is_empty()) {
        return Err(Error::Unsupported {
            object: label.to_string(),
            what: format!("fragment {}, which has no data file", record.id),
        });
    }
    let dataset = Arc::new(snapshot.dataset_with(&records).await?);
    let plan = plan_scan(&dataset, request, &selection, context)
        .await
        .map_err(|e| Error::lance(format!("cannot plan a scan of {label}"), e))?;
    let plan = match plan.output_partitioning().partition_count() {
        1 => plan,
        _ => Arc::new(CoalescePartitionsExec::new(plan)),
    };
    let stream = plan
        .execute(0, Arc::clone(context))
        .map_err(|e| Error::datafusion(format!("cannot scan {label}"), e))?;
    let cost = PlanCost {
        plan,
        stats: Arc::clone(stats),
    };
    let stream = explained(stream, Arc::clone(snapshot), label);
    Ok(Some(shape(stream, Arc::clone(request), selection, cost)))
}

/// Names what is read, for errors: table, version and fragments.
fn describe(snapshot: &Snapshot, fragments: &[ResolvedFragment]) -> Arc<str> {
    let first = fragments.first().map_or(0, ResolvedFragment::id);
    let last = fragments.last().map_or(0, ResolvedFragment::id);
    let table = crate::resolve::display_uri(snapshot.uri());
    let version = snapshot.version();
    let which = if first == last {
        format!("fragment {first}")
    } else {
        format!("fragments {first} to {last}")
    };
    format!("{which} of version {version} of {table}").into()
}

fn choose(
    snapshot: &Snapshot,
    request: &ScanRequest,
    mut fragments: Vec<ResolvedFragment>,
) -> (Vec<ResolvedFragment>, Selection) {
    // Lance takes 0 rows for an unknown number and would look into a file, if there is one.
    fragments.retain(|fragment| fragment.physical_rows() != Some(0));
    let Some(rows) = &request.rows else {
        return (fragments, Selection::All);
    };
    let v1 = snapshot
        .shell()
        .manifest()
        .data_storage_format
        .lance_file_format()
        == ConcreteFileVersion::V1;
    if v1 || fragments.iter().any(|f| f.physical_rows().is_none()) {
        return (fragments, Selection::Afterwards(Arc::clone(rows)));
    }
    let mut map = RowAddrTreeMap::new();
    let mut whole = true;
    let chosen: Vec<_> = fragments
        .into_iter()
        .filter(|fragment| {
            let physical = fragment.physical_rows().unwrap_or_default();
            let offsets = wanted_offsets(rows, fragment.id(), physical);
            match offsets.as_slice() {
                [] => false,
                [all] if all.start == 0 && all.end == physical => {
                    map.insert_fragment(fragment.id());
                    true
                }
                some => {
                    whole = false;
                    let mut bitmap = RoaringBitmap::new();
                    for range in some {
                        let bound = |b: u64| u32::try_from(b).unwrap_or(u32::MAX);
                        bitmap.insert_range(bound(range.start)..=bound(range.end - 1));
                    }
                    map.insert_bitmap(fragment.id(), bitmap);
                    true
                }
            }
        })
        .collect();
    let selection = if whole {
        Selection::All
    } else {
        Selection::Rows(map)
    };
    (chosen, selection)
}

async fn plan_scan(
    dataset: &Arc<Dataset>,
    request: &ScanRequest,
    selection: &Selection,
    context: &TaskContext,
) -> lance::Result<Arc<dyn ExecutionPlan>> {
    let mut scan = dataset.scan();
    let wanted = request.data_columns();
    let schema = dataset.schema();
    let fields = schema
        .fields
        .iter()
        .enumerate()
        .filter(|(i, _)| wanted.contains(i))
        .map(|(_, f)| f.clone())
        .collect();
    scan.project_with_schema(&LanceSchema {
        fields,
        metadata: schema.metadata.clone(),
    })?;
    if request.wants(&OutputColumn::RowId) {
        scan.with_row_id();
    }
    // The address also stands in where no column is read, and is what rows are dropped by.
    let address = request.wants(&OutputColumn::RowAddr) || request.wants(&OutputColumn::FragId);
    let carries_rows = !wanted.is_empty() || request.wants(&OutputColumn::RowId);
    if address || !carries_rows || matches!(selection, Selection::Afterwards(_)) {
        scan.with_row_address();
    }
    if let Selection::Rows(rows) = selection {
        scan.with_physical_row_addr_prefilter(rows.clone());
    }
    if let Some(filter) = &request.filter {
        scan.filter_expr(filter.clone());
    }
    if let Some(fetch) = request.fetch
        && !matches!(selection, Selection::Afterwards(_))
    {
        scan.limit(Some(i64::try_from(fetch).unwrap_or(i64::MAX)), None)?;
    }
    scan.batch_size(context.session_config().batch_size());
    scan.io_buffer_size(IO_BUFFER_BYTES);
    if dataset.manifest().uses_stable_row_ids() {
        // Fetching columns after the filter looks rows up in an index of row ids that Lance caches
        // for each version of a table, and another chunk of this version has other rows.
        scan.materialization_style(MaterializationStyle::AllEarly);
    }
    // Answers do not depend on indexes, and an index knows nothing of fragments above its coverage.
    scan.use_scalar_index(false);
    scan.create_plan().await
}

/// Turns Lance's batches into the output: columns by name, system columns computed, rows dropped.
fn shape(
    stream: BoxStream<'static, DFResult<RecordBatch>>,
    request: Arc<ScanRequest>,
    selection: Selection,
    cost: PlanCost,
) -> BoxStream<'static, DFResult<RecordBatch>> {
    stream
        .map(move |batch| {
            // Held until the stream goes.
            let _ = &cost;
            let batch = match &selection {
                Selection::Afterwards(rows) => keep_rows(&batch?, |a| rows.contains(a))?,
                Selection::All | Selection::Rows(_) => batch?,
            };
            shape_batch(&batch, &request)
        })
        .boxed()
}

/// Says which fragments a failed read was for, and whether its version was removed meanwhile.
fn explained(
    stream: SendableRecordBatchStream,
    snapshot: Arc<Snapshot>,
    label: Arc<str>,
) -> BoxStream<'static, DFResult<RecordBatch>> {
    stream
        .or_else(move |error| {
            let (snapshot, label) = (Arc::clone(&snapshot), Arc::clone(&label));
            async move { Err(explain(error, &snapshot, &label).await) }
        })
        .boxed()
}

async fn explain(error: DataFusionError, snapshot: &Snapshot, label: &str) -> DataFusionError {
    let text = error.to_string();
    if let Some(removed) = snapshot.removed(&text).await {
        return DataFusionError::from(removed).context(format!("reading {label}"));
    }
    let text = text.to_lowercase();
    let missing = text.contains("not found") || text.contains("no such file");
    let advice = if missing {
        "; a file that the version names is gone: it was removed by hand or by a cleanup of old versions"
    } else {
        ""
    };
    error.context(format!("reading {label}{advice}"))
}

/// The rows of a scan whose addresses are wanted.
pub(crate) fn keep_rows(
    batch: &RecordBatch,
    wanted: impl Fn(u64) -> bool,
) -> DFResult<RecordBatch> {
    let addresses = numbers(batch, ROW_ADDR)?.values().iter();
    let keep: BooleanArray = addresses.map(|address| Some(wanted(*address))).collect();
    Ok(filter_record_batch(batch, &keep)?)
}

/// A system column of a scan, `_rowaddr` or `_rowid`.
pub(crate) fn numbers<'a>(batch: &'a RecordBatch, name: &str) -> DFResult<&'a UInt64Array> {
    batch
        .column_by_name(name)
        .and_then(|c| c.as_primitive_opt::<UInt64Type>())
        .ok_or_else(|| DataFusionError::Internal(format!("a Lance scan without {name}")))
}

/// `_fragid` of the rows of a scan: Lance does not know it.
pub(crate) fn fragment_ids(batch: &RecordBatch) -> DFResult<ArrayRef> {
    let ids: UInt64Array = numbers(batch, ROW_ADDR)?.unary(|address| address >> 32);
    Ok(Arc::new(ids))
}

fn shape_batch(batch: &RecordBatch, request: &ScanRequest) -> DFResult<RecordBatch> {
    let by_name = |name: &str| -> DFResult<ArrayRef> {
        batch
            .column_by_name(name)
            .cloned()
            .ok_or_else(|| DataFusionError::Internal(format!("a Lance scan without {name}")))
    };
    let columns = request
        .columns
        .iter()
        .zip(request.schema.fields())
        .map(|(column, field)| match column {
            OutputColumn::Data(_) => by_name(field.name()),
            OutputColumn::RowId => by_name(ROW_ID),
            OutputColumn::RowAddr => by_name(ROW_ADDR),
            OutputColumn::FragId => fragment_ids(batch),
        })
        .collect::<DFResult<Vec<_>>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(
        Arc::clone(&request.schema),
        columns,
        &options,
    )?)
}
