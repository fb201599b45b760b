//! Merging rows into a table by key.
//!
//! ```text
//!  source ─► kept, in memory or on disk ─┬─► keys ─► scan of the table's keys ─► fragments with a match
//!                                        └─► Lance's merge on a view of just those
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;

use datafusion::catalog::TableProvider;
use datafusion::common::{Column, JoinType};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::context::SessionContext;
use datafusion::logical_expr::Expr;
use lance::Dataset;
use lance::dataset::write::merge_insert::SourceDedupeBehavior;
use lance::dataset::{
    MergeInsertBuilder, MergeInsertWriteMode, WhenMatched, WhenNotMatched, WhenNotMatchedBySource,
};
use lance::index::DatasetIndexExt;
use lance_datafusion::spill::spilling_table_provider;

use super::rows::{Selection, addresses_in, frame};
use super::table::{RowsReport, TreeTable};
use crate::error::{Error, Result};
use crate::pruning::ROW_ADDR;
use crate::ranges::FragmentRanges;
use crate::snapshot::Snapshot;

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
}

impl Default for MergeOptions {
    fn default() -> Self {
        Self {
            when_matched: WhenMatched::DoNothing,
            when_not_matched: WhenNotMatched::InsertAll,
            when_not_matched_by_source: WhenNotMatchedBySource::Keep,
            source_dedupe_behavior: SourceDedupeBehavior::default(),
            write_mode: MergeInsertWriteMode::default(),
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
}

impl TreeTable {
    /// Merges `source` into the table by the columns `on`, or where that is empty by the primary key of
    /// the table's schema.
    ///
    /// The table's keys are scanned for those of the source, and Lance then works on the fragments that
    /// have one. It works on the whole table, and holds every fragment's record meanwhile, where rows
    /// that the source does not match are to go; where there is an index on a key, which it then looks
    /// into; and for keys that are nested or of another type than the source's. The source is kept until
    /// the end, above 64 MiB in a temporary file.
    ///
    /// # Errors
    /// Lance's; [`Error::Conflict`] when others changed the same rows each time it was tried.
    pub async fn merge_insert(
        &self,
        on: &[&str],
        options: &MergeOptions,
        source: SendableRecordBatchStream,
    ) -> Result<RowsReport> {
        let failed = |e| Error::datafusion(format!("cannot keep rows for {}", self.uri()), e);
        let source = spilling_table_provider(source, SOURCE_IN_MEMORY).await;
        let source = &source.map_err(failed)?;
        let on: &Vec<String> = &on.iter().map(|c| (*c).to_string()).collect();
        self.retrying(|| async move {
            let snapshot = self.latest().await?;
            let scope = match options.when_not_matched_by_source {
                WhenNotMatchedBySource::Keep => matched(&snapshot, on, source).await?,
                _ => FragmentRanges::all(),
            };
            let work = |dataset: Dataset| async move {
                let mut builder = MergeInsertBuilder::try_new(Arc::new(dataset), on.clone())?;
                builder
                    .conflict_retries(0)
                    .when_matched(options.when_matched.clone())
                    .when_not_matched(options.when_not_matched.clone())
                    .when_not_matched_by_source(options.when_not_matched_by_source.clone())
                    .source_dedupe_behavior(options.source_dedupe_behavior)
                    .write_mode(options.write_mode);
                let job = builder.try_build()?;
                let (_, stats) = job.execute_provider(Arc::clone(source)).await?;
                Ok(stats.num_inserted_rows + stats.num_updated_rows + stats.num_deleted_rows)
            };
            let (rows, commit) = self.on(&snapshot, scope, work).await?;
            Ok(RowsReport { rows, commit })
        })
        .await
    }
}

/// The fragments with a row whose key is in `source`; all of them where only Lance can tell.
async fn matched(
    snapshot: &Arc<Snapshot>,
    on: &[String],
    source: &Arc<dyn TableProvider>,
) -> Result<FragmentRanges> {
    let Some(keys) = plain_keys(snapshot, on, source).await? else {
        return Ok(FragmentRanges::all());
    };
    let failed = |e| Error::datafusion(format!("cannot look for keys in {}", snapshot.uri()), e);
    let session = SessionContext::new();
    // Names of our own: those of the columns may be anything.
    let renamed = |side: &str| -> (Vec<Expr>, Vec<String>) {
        let column = |(i, key): (usize, &String)| {
            let name = format!("{side}{i}");
            let column = Expr::Column(Column::new_unqualified(key));
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
        .and_then(|f| f.select_columns(&[ROW_ADDR]))
        .map_err(failed)?
        .execute_stream()
        .await
        .map_err(failed)?;
    let rows = addresses_in(found).await.map_err(failed)?;
    Ok(Selection::Rows(rows).scope())
}

/// The key columns, when they are columns that source and table have in the same form and no index
/// knows: with one, Lance may go another way, and needs the fragments that the index names.
async fn plain_keys(
    snapshot: &Arc<Snapshot>,
    on: &[String],
    source: &Arc<dyn TableProvider>,
) -> Result<Option<Vec<String>>> {
    let shell = snapshot.shell();
    let (ours, theirs) = (snapshot.schema(), source.schema());
    let mut keys = Vec::new();
    let mut ids = BTreeSet::new();
    for name in on {
        let Some(field) = shell.schema().field_case_insensitive(name) else {
            return Ok(None);
        };
        let of = |schema: &arrow::datatypes::Schema| {
            let (_, field) = schema.column_with_name(&field.name)?;
            Some(field.data_type().clone())
        };
        match (of(ours), of(&theirs)) {
            (Some(ours), Some(theirs)) if ours == theirs && !ours.is_nested() => {
                keys.push(field.name.clone());
                ids.insert(field.id);
            }
            _ => return Ok(None),
        }
    }
    if keys.is_empty() {
        return Ok(None);
    }
    let indexes = shell
        .load_indices()
        .await
        .map_err(|e| Error::lance(format!("cannot read the indexes of {}", snapshot.uri()), e))?;
    let indexed = indexes
        .iter()
        .flat_map(|i| &i.fields)
        .any(|f| ids.contains(f));
    Ok((!indexed).then_some(keys))
}
