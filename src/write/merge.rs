//! Merging rows into a table by key.
//!
//! ```text
//!  source ─► kept, in memory and on disk ┬─► keys ─► scan of the table's keys ─► fragments with a match
//!                                        └─► Lance's merge on a view of just those
//! ```

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::catalog::TableProvider;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::{Column, JoinType, Result as DFResult};
use datafusion::execution::context::SessionContext;
use datafusion::execution::disk_manager::RefCountedTempFile;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::Expr;
use datafusion::physical_plan::SpillManager;
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, SpillMetrics};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use futures::{StreamExt, TryStreamExt, stream};
use lance::Dataset;
use lance::dataset::write::merge_insert::SourceDedupeBehavior;
use lance::dataset::{
    MergeInsertBuilder, MergeInsertJob, MergeInsertWriteMode, WhenMatched, WhenNotMatched,
    WhenNotMatchedBySource,
};
use lance::index::DatasetIndexExt;

use super::rows::{Selection, addresses_of, frame};
use super::table::{RowsReport, TreeTable};
use crate::error::{Error, Result};
use crate::pruning::ROW_ADDR;
use crate::ranges::FragmentRanges;
use crate::snapshot::{Layout, Snapshot};

/// Bytes of a source that are kept in memory; what is more goes to a temporary file.
const SOURCE_IN_MEMORY: usize = 64 << 20;

/// What a merge does with a row, by whether its key is in the table, in the source, or in both. The
/// default inserts what is not there and leaves alone what is.
#[derive(Debug, Clone)]
pub struct MergeOptions {
    /// The key is in both.
    pub when_matched: WhenMatched,
    /// It is in the source alone.
    pub when_not_matched: WhenNotMatched,
    /// It is in the table alone. Anything but [`WhenNotMatchedBySource::Keep`] looks at every row of
    /// the table.
    pub when_not_matched_by_source: WhenNotMatchedBySource,
    /// Two rows of the source match the same row of the table.
    pub source_dedupe_behavior: SourceDedupeBehavior,
    /// How changed rows are stored where the source has some of the columns.
    pub write_mode: MergeInsertWriteMode,
    /// Whether an index on the key may be used. Lance then goes by what the index names, and sees the
    /// whole table.
    pub use_index: bool,
}

impl Default for MergeOptions {
    fn default() -> Self {
        Self {
            when_matched: WhenMatched::DoNothing,
            when_not_matched: WhenNotMatched::InsertAll,
            when_not_matched_by_source: WhenNotMatchedBySource::Keep,
            source_dedupe_behavior: SourceDedupeBehavior::default(),
            write_mode: MergeInsertWriteMode::default(),
            use_index: true,
        }
    }
}

impl MergeOptions {
    /// Updates the rows that are there and inserts the others.
    pub fn upsert() -> Self {
        Self {
            when_matched: WhenMatched::UpdateAll,
            ..Self::default()
        }
    }

    fn job(
        &self,
        dataset: Arc<Dataset>,
        on: &[String],
        retries: u32,
    ) -> lance::Result<MergeInsertJob> {
        MergeInsertBuilder::try_new(dataset, on.to_vec())?
            // Ours: each time the rows are looked for again.
            .conflict_retries(0)
            .commit_retries(retries)
            .when_matched(self.when_matched.clone())
            .when_not_matched(self.when_not_matched.clone())
            .when_not_matched_by_source(self.when_not_matched_by_source.clone())
            .source_dedupe_behavior(self.source_dedupe_behavior)
            .write_mode(self.write_mode)
            .use_index(self.use_index)
            .try_build()
    }
}

impl TreeTable {
    /// Merges `source` into the table by the columns `on`, or where that is empty by the primary key of
    /// the table's schema.
    ///
    /// The table's keys are scanned for those of the source, which are held in memory, and Lance then
    /// works on the fragments that have one. It works on the whole table, and holds every fragment's
    /// record meanwhile, where rows that the source does not match are to go; where there is an index on
    /// a key, which it then looks into; and for keys that are nested or of another type than the source's.
    /// The source is kept until the end, above 64 MiB in a temporary file.
    ///
    /// # Errors
    /// Lance's, and the source's; [`Error::Conflict`] when other writers were in the way each time it
    /// was tried.
    pub async fn merge_insert(
        &self,
        on: &[&str],
        options: &MergeOptions,
        source: SendableRecordBatchStream,
    ) -> Result<RowsReport> {
        let on = &on.iter().map(|c| (*c).to_string()).collect::<Vec<_>>();
        let retries = self.write_options().commit_retries;
        // What cannot be asked for is refused before anything is read.
        let shell = Arc::clone(self.latest().await?.shell());
        let refused = |e| Error::lance(format!("cannot merge into {}", self.uri()), e);
        options.job(shell, on, retries).map_err(refused)?;
        let failed = |e| {
            Error::datafusion(
                format!("cannot read the rows to merge into {}", self.uri()),
                e,
            )
        };
        let source = KeptRows::read(source, SOURCE_IN_MEMORY).await;
        let source = &source.and_then(KeptRows::into_table).map_err(failed)?;
        self.retrying(|| async move {
            let snapshot = self.latest().await?;
            let scope = scope(&snapshot, on, options, source).await?;
            let work = |dataset: Dataset| async move {
                let job = options.job(Arc::new(dataset), on, retries)?;
                let (_, stats) = job.execute_provider(Arc::clone(source)).await?;
                Ok(stats.num_inserted_rows + stats.num_updated_rows + stats.num_deleted_rows)
            };
            let (rows, commit) = self.on(&snapshot, scope, work).await?;
            Ok(RowsReport { rows, commit })
        })
        .await
    }
}

/// The fragments that Lance has to see: those with a row whose key is in `source`, and all of them
/// where it may look at others, or only it can tell.
async fn scope(
    snapshot: &Arc<Snapshot>,
    on: &[String],
    options: &MergeOptions,
    source: &Arc<dyn TableProvider>,
) -> Result<FragmentRanges> {
    // On a flat version it sees them all in any case.
    let narrows = snapshot.layout() == Layout::Tree
        && options.when_not_matched_by_source == WhenNotMatchedBySource::Keep;
    match plain_keys(snapshot, on, source) {
        Some(keys) if narrows && !is_indexed(snapshot, &keys, options).await? => {
            matched(snapshot, &keys, source).await
        }
        _ => Ok(FragmentRanges::all()),
    }
}

/// The fragments with a row whose key is in `source`.
async fn matched(
    snapshot: &Arc<Snapshot>,
    keys: &[Key],
    source: &Arc<dyn TableProvider>,
) -> Result<FragmentRanges> {
    let failed = |e| Error::datafusion(format!("cannot look for keys in {}", snapshot.uri()), e);
    let session = SessionContext::new();
    // Names of our own: those of the columns may be anything.
    let renamed = |side: &str| -> (Vec<Expr>, Vec<String>) {
        let column = |(i, key): (usize, &Key)| {
            let name = format!("{side}{i}");
            let column = Expr::Column(Column::new_unqualified(&key.name));
            (column.alias(&name), name)
        };
        keys.iter().enumerate().map(column).unzip()
    };
    let (theirs, their_names) = renamed("source");
    let (mut ours, our_names) = renamed("key");
    ours.push(Expr::Column(Column::new_unqualified(ROW_ADDR)));
    let their_names: Vec<_> = their_names.iter().map(String::as_str).collect();
    let our_names: Vec<_> = our_names.iter().map(String::as_str).collect();
    // The left side of a join is the one that is held.
    let theirs = session
        .read_table(Arc::clone(source))
        .and_then(|f| f.select(theirs))
        .map_err(failed)?;
    let ours = frame(&session, snapshot)?.select(ours).map_err(failed)?;
    let found = theirs
        .join(ours, JoinType::RightSemi, &their_names, &our_names, None)
        .map_err(failed)?;
    let rows = addresses_of(found).await.map_err(failed)?;
    Ok(Selection::Rows(rows).scope())
}

/// A key column.
struct Key {
    name: String,
    id: i32,
}

/// The keys, when each is a column that source and table have in the same form.
fn plain_keys(
    snapshot: &Snapshot,
    on: &[String],
    source: &Arc<dyn TableProvider>,
) -> Option<Vec<Key>> {
    let schema = snapshot.shell().schema();
    let fields: Vec<_> = if on.is_empty() {
        schema.unenforced_primary_key()
    } else {
        let found = on.iter().map(|name| schema.field_case_insensitive(name));
        found.collect::<Option<_>>()?
    };
    let (ours, theirs) = (snapshot.schema(), source.schema());
    let keys = fields.into_iter().map(|field| {
        // Lance goes by the name alone, which a nested field may share with a column.
        let top_level = schema.fields.iter().any(|f| f.id == field.id);
        let (_, own) = ours.column_with_name(&field.name)?;
        let (_, given) = theirs.column_with_name(&field.name)?;
        let same = own.data_type() == given.data_type() && !own.data_type().is_nested();
        (top_level && same).then(|| Key {
            name: field.name.clone(),
            id: field.id,
        })
    });
    keys.collect::<Option<Vec<_>>>().filter(|k| !k.is_empty())
}

/// Whether Lance may look keys up in an index: it then needs the fragments that the index names.
async fn is_indexed(
    snapshot: &Arc<Snapshot>,
    keys: &[Key],
    options: &MergeOptions,
) -> Result<bool> {
    if !options.use_index {
        return Ok(false);
    }
    let indexes = snapshot.shell().load_indices().await;
    let indexes = indexes
        .map_err(|e| Error::lance(format!("cannot read the indexes of {}", snapshot.uri()), e))?;
    let mut fields = indexes.iter().flat_map(|i| &i.fields);
    Ok(fields.any(|id| keys.iter().any(|key| key.id == *id)))
}

/// Rows of a stream that can be read again.
#[derive(Debug)]
struct KeptRows {
    schema: SchemaRef,
    in_memory: Vec<RecordBatch>,
    /// Those that came after them.
    on_disk: Option<(SpillManager, RefCountedTempFile)>,
}

impl KeptRows {
    /// Reads a stream to its end; what is more than `in_memory` bytes goes to a file.
    async fn read(mut rows: SendableRecordBatchStream, in_memory: usize) -> DFResult<Self> {
        let schema = rows.schema();
        let metrics = SpillMetrics::new(&ExecutionPlanMetricsSet::new(), 0);
        let runtime = SessionContext::new().runtime_env();
        let manager = SpillManager::new(runtime, metrics, Arc::clone(&schema));
        let (mut kept, mut bytes, mut file) = (Vec::new(), 0_usize, None);
        while let Some(batch) = rows.try_next().await? {
            bytes = bytes.saturating_add(batch.get_array_memory_size());
            if bytes <= in_memory {
                kept.push(batch);
            } else if batch.num_rows() > 0 {
                let file = match &mut file {
                    Some(file) => file,
                    none => none.insert(manager.create_in_progress_file("rows to merge")?),
                };
                file.append_batch(&batch)?;
            }
        }
        let file = file.map(|mut f| f.finish()).transpose()?.flatten();
        Ok(Self {
            schema,
            in_memory: kept,
            on_disk: file.map(|file| (manager, file)),
        })
    }

    /// The rows as a table that says nothing about their number, as a stream does not: Lance would plan
    /// another join for a number, and write rows in another order.
    fn into_table(self) -> DFResult<Arc<dyn TableProvider>> {
        let schema = Arc::clone(&self.schema);
        Ok(Arc::new(StreamingTable::try_new(
            schema,
            vec![Arc::new(self)],
        )?))
    }
}

impl PartitionStream for KeptRows {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let kept = stream::iter(self.in_memory.clone()).map(Ok);
        let rest = match &self.on_disk {
            None => stream::empty().boxed(),
            Some((manager, file)) => match manager.read_spill_as_stream(file.clone(), None) {
                Ok(rows) => rows.boxed(),
                Err(e) => stream::once(std::future::ready(Err(e))).boxed(),
            },
        };
        let schema = Arc::clone(&self.schema);
        Box::pin(RecordBatchStreamAdapter::new(schema, kept.chain(rest)))
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{AsArray, Int64Array};
    use arrow::datatypes::{DataType, Field, Int64Type, Schema};
    use datafusion::common::DataFusionError;

    use super::*;

    fn rows(batches: Vec<DFResult<RecordBatch>>) -> SendableRecordBatchStream {
        let schema = Arc::new(Schema::new(vec![Field::new("a", DataType::Int64, false)]));
        Box::pin(RecordBatchStreamAdapter::new(schema, stream::iter(batches)))
    }

    fn batch(range: std::ops::Range<i64>) -> RecordBatch {
        let numbers = Arc::new(Int64Array::from_iter_values(range));
        RecordBatch::try_from_iter([("a", numbers as _)]).expect("a batch")
    }

    #[tokio::test]
    async fn kept_rows_are_read_again_from_memory_and_disk() {
        let batches: Vec<_> = (0..20).map(|i| batch(i * 50..(i + 1) * 50)).collect();
        let size = batches
            .first()
            .map_or(0, RecordBatch::get_array_memory_size);
        for (limit, in_memory) in [(0, 0), (size * 3, 3), (usize::MAX, 20)] {
            let source = batches.iter().cloned().map(Ok).collect();
            let kept = KeptRows::read(rows(source), limit).await.expect("kept");
            assert_eq!(kept.in_memory.len(), in_memory);
            assert_eq!(kept.on_disk.is_some(), in_memory < 20);
            let session = SessionContext::new();
            let table = kept.into_table().expect("a table");
            for _ in 0..2 {
                let frame = session.read_table(Arc::clone(&table)).expect("a frame");
                let read = frame.collect().await.expect("read");
                let numbers = read.iter().map(|b| b.column(0).as_primitive::<Int64Type>());
                let numbers: Vec<_> = numbers.flat_map(|c| c.values().to_vec()).collect();
                assert_eq!(numbers, (0..1000).collect::<Vec<_>>());
            }
        }
        let none = KeptRows::read(rows(Vec::new()), 0).await.expect("kept");
        assert!(none.on_disk.is_none());
    }

    #[tokio::test]
    async fn a_source_that_fails_is_not_half_kept() {
        let failed = DataFusionError::Execution("the network is down".into());
        let source = vec![Ok(batch(0..50)), Err(failed), Ok(batch(50..60))];
        let error = KeptRows::read(rows(source), usize::MAX).await;
        let error = error.expect_err("failed").to_string();
        assert!(error.contains("the network is down"), "{error}");
    }
}
