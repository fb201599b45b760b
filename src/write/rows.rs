//! Changes of rows: deleting and updating.
//!
//! Which rows a predicate means is found by a scan like any other, with all its pruning. Lance then
//! works on just the fragments those rows lie in.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::AsArray;
use arrow::datatypes::UInt64Type;
use datafusion::common::Result as DFResult;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::context::SessionContext;
use datafusion::logical_expr::utils::conjunction;
use datafusion::logical_expr::{Expr, lit};
use datafusion::prelude::DataFrame;
use futures::{StreamExt, TryStreamExt, stream};
use lance::Dataset;
use lance_select::RowAddrTreeMap;
use lance_table::format::Fragment;
use lance_table::transaction::{Operation, Transaction};
use roaring::{RoaringBitmap, RoaringTreemap};

use super::table::{RowsReport, TreeTable};
use crate::error::{Error, Result};
use crate::provider::{SnapshotProvider, SystemColumns};
use crate::pruning::{FRAG_ID, ROW_ADDR};
use crate::ranges::FragmentRanges;
use crate::snapshot::Snapshot;
use crate::tree_scan::{WalkOptions, WalkState};

/// Deletion files of one commit that are read and written at once.
const DELETIONS_IN_FLIGHT: usize = 16;

/// Rows to change: by address, or all there are.
pub(super) enum Selection {
    All,
    Rows(RoaringTreemap),
}

impl Selection {
    /// The fragments they lie in.
    pub(super) fn scope(&self) -> FragmentRanges {
        match self {
            Self::All => FragmentRanges::all(),
            Self::Rows(rows) => FragmentRanges::from_ids(rows.bitmaps().map(|(id, _)| id)),
        }
    }
}

impl TreeTable {
    /// Deletes the rows for which `predicate` holds: a SQL expression over the table's columns and
    /// `_rowaddr`, `_rowid` and `_fragid`.
    ///
    /// # Errors
    /// [`Error::DataFusion`] for an expression that cannot be evaluated; [`Error::Conflict`] when
    /// others changed the same rows each time it was tried.
    pub async fn delete(&self, predicate: &str) -> Result<RowsReport> {
        self.retrying(|| async move {
            let snapshot = self.latest().await?;
            let filter = parse(&snapshot, predicate)?;
            let selection = select(&SessionContext::new(), &snapshot, &[filter]).await?;
            self.delete_on(&snapshot, selection, predicate).await
        })
        .await
    }

    /// Deletes the rows for which all of `filters` hold.
    ///
    /// # Errors
    /// Those of [`Self::delete`].
    pub async fn delete_where(&self, filters: &[Expr]) -> Result<RowsReport> {
        self.delete_in(&SessionContext::new(), filters).await
    }

    /// [`Self::delete_where`], evaluated with the functions and settings of `session`.
    pub(crate) async fn delete_in(
        &self,
        session: &SessionContext,
        filters: &[Expr],
    ) -> Result<RowsReport> {
        let shown = conjunction(filters.iter().cloned()).map_or("true".into(), |f| f.to_string());
        let shown = shown.as_str();
        self.retrying(|| async move {
            let snapshot = self.latest().await?;
            let selection = select(session, &snapshot, filters).await?;
            self.delete_on(&snapshot, selection, shown).await
        })
        .await
    }

    /// Deletes rows of `snapshot` by their addresses. Changes of others since are rebased over; where
    /// they changed the same rows, only who chose the rows can choose again.
    ///
    /// # Errors
    /// Those of [`Self::delete`].
    pub(crate) async fn delete_rows(
        &self,
        snapshot: &Arc<Snapshot>,
        rows: RoaringTreemap,
    ) -> Result<RowsReport> {
        let shown = format!("{ROW_ADDR} IN ({} addresses)", rows.len());
        let done = self.delete_on(snapshot, Selection::Rows(rows), &shown);
        done.await.map_err(to_choose_again)
    }

    /// Deletes all rows. Columns, config and indexes stay.
    ///
    /// # Errors
    /// Those of [`Self::delete`].
    pub async fn truncate(&self) -> Result<RowsReport> {
        self.delete_where(&[]).await
    }

    async fn delete_on(
        &self,
        snapshot: &Arc<Snapshot>,
        selection: Selection,
        predicate: &str,
    ) -> Result<RowsReport> {
        let scope = selection.scope();
        let predicate = predicate.to_string();
        let version = snapshot.version();
        let before = snapshot.counts()?.map(|c| c.visible_rows);
        let ids = match &selection {
            Selection::All => fragment_ids(snapshot).await?,
            Selection::Rows(_) => Vec::new(),
        };
        let work = move |dataset: Dataset| async move {
            let dataset = Arc::new(dataset);
            let (updated_fragments, deleted_fragment_ids, affected, rows) = match selection {
                Selection::All => {
                    let rows = match before {
                        Some(rows) => rows,
                        None => dataset.count_rows(None).await? as u64,
                    };
                    (Vec::new(), ids, None, rows)
                }
                Selection::Rows(rows) => {
                    let (updated, deleted) = delete_rows(&dataset, &rows).await?;
                    let count = rows.len();
                    (updated, deleted, Some(RowAddrTreeMap::from(rows)), count)
                }
            };
            let operation = Operation::Delete {
                updated_fragments,
                deleted_fragment_ids,
                predicate,
            };
            let mut builder = self.committer(Arc::clone(&dataset));
            if let Some(affected) = affected {
                builder = builder.with_affected_rows(affected);
            }
            builder
                .execute(Transaction::new(version, operation, None))
                .await?;
            Ok(rows)
        };
        let (rows, commit) = self.on(snapshot, scope, work).await?;
        Ok(RowsReport { rows, commit })
    }

    /// Sets columns of the rows for which `predicate` holds, or of all rows: names, each with a SQL
    /// expression over the row as it was, with its `_rowaddr`, `_rowid` and `_fragid`.
    ///
    /// # Errors
    /// Those of [`Self::delete`]; [`Error::InvalidInput`] for a column that is not there, is set twice,
    /// or must not be null and would be; and for tables that only Lance can write anew, with blob columns
    /// of version 2 or row ids in data files.
    pub async fn update(
        &self,
        predicate: Option<&str>,
        assignments: &[(&str, &str)],
    ) -> Result<RowsReport> {
        let session = &SessionContext::new();
        self.retrying(|| async move {
            let snapshot = self.latest().await?;
            let filters = predicate.map(|p| parse(&snapshot, p)).transpose()?;
            let values = assignments
                .iter()
                .map(|(column, value)| Ok(((*column).to_string(), parse(&snapshot, value)?)))
                .collect::<Result<Vec<_>>>()?;
            let selection = select(session, &snapshot, filters.as_slice()).await?;
            self.update_on(session, &snapshot, selection, &values).await
        })
        .await
    }

    /// [`Self::update`] of the rows for which all of `filters` hold.
    ///
    /// # Errors
    /// Those of [`Self::update`].
    pub async fn update_where(
        &self,
        filters: &[Expr],
        assignments: &[(String, Expr)],
    ) -> Result<RowsReport> {
        self.update_in(&SessionContext::new(), filters, assignments)
            .await
    }

    /// [`Self::update_where`], evaluated with the functions and settings of `session`.
    pub(crate) async fn update_in(
        &self,
        session: &SessionContext,
        filters: &[Expr],
        assignments: &[(String, Expr)],
    ) -> Result<RowsReport> {
        self.retrying(|| async move {
            let snapshot = self.latest().await?;
            let selection = select(session, &snapshot, filters).await?;
            self.update_on(session, &snapshot, selection, assignments)
                .await
        })
        .await
    }

    /// [`Self::update`] of rows of `snapshot` by their addresses, as [`Self::delete_rows`] deletes them.
    pub(crate) async fn update_rows(
        &self,
        session: &SessionContext,
        snapshot: &Arc<Snapshot>,
        rows: RoaringTreemap,
        assignments: &[(String, Expr)],
    ) -> Result<RowsReport> {
        let done = self.update_on(session, snapshot, Selection::Rows(rows), assignments);
        done.await.map_err(to_choose_again)
    }
}

async fn fragment_ids(snapshot: &Arc<Snapshot>) -> Result<Vec<u64>> {
    let mut fragments = snapshot.fragments(
        FragmentRanges::all(),
        &WalkOptions::default(),
        &WalkState::default(),
    );
    let mut ids = Vec::new();
    while let Some(batch) = fragments.try_next().await? {
        ids.extend(batch.iter().map(|f| u64::from(f.id())));
    }
    Ok(ids)
}

/// A version as a table that shows its system columns.
pub(super) fn frame(session: &SessionContext, snapshot: &Arc<Snapshot>) -> Result<DataFrame> {
    // A column of the table's own goes before the fragment's id. Lance allows no other such name.
    let system = SystemColumns {
        frag_id: snapshot.schema().column_with_name(FRAG_ID).is_none(),
        ..SystemColumns::ALL
    };
    let provider = SnapshotProvider::try_new(Arc::clone(snapshot), system)?;
    session
        .read_table(Arc::new(provider))
        .map_err(|e| Error::datafusion(format!("cannot read {}", snapshot.uri()), e))
}

fn parse(snapshot: &Arc<Snapshot>, predicate: &str) -> Result<Expr> {
    frame(&SessionContext::new(), snapshot)?
        .parse_sql_expr(predicate)
        .map_err(|e| Error::datafusion(format!("cannot understand {predicate:?}"), e))
}

async fn select(
    session: &SessionContext,
    snapshot: &Arc<Snapshot>,
    filters: &[Expr],
) -> Result<Selection> {
    let Some(filter) = conjunction(filters.iter().cloned()) else {
        return Ok(Selection::All);
    };
    if filter == lit(true) {
        return Ok(Selection::All);
    }
    let failed = |e| Error::datafusion(format!("cannot find rows of {}", snapshot.uri()), e);
    let found = frame(session, snapshot)?.filter(filter).map_err(failed)?;
    let rows = addresses_of(found).await.map_err(failed)?;
    Ok(Selection::Rows(rows))
}

/// The addresses of the rows of a frame.
pub(super) async fn addresses_of(rows: DataFrame) -> DFResult<RoaringTreemap> {
    let rows = rows.select_columns(&[ROW_ADDR])?.execute_stream().await?;
    addresses_in(rows).await
}

/// The row addresses that a query gives as its only column.
pub(crate) async fn addresses_in(mut rows: SendableRecordBatchStream) -> DFResult<RoaringTreemap> {
    let mut found = RoaringTreemap::new();
    while let Some(batch) = rows.try_next().await? {
        let column = batch.columns().first();
        let addresses = column
            .and_then(|c| c.as_primitive_opt::<UInt64Type>())
            .ok_or_else(|| Error::internal("a scan of addresses without addresses"))?;
        found.extend(addresses.values().iter().copied());
    }
    Ok(found)
}

/// Who chose rows of a version by something else than a condition has to do so again.
fn to_choose_again(error: Error) -> Error {
    match error {
        Error::Conflict {
            message,
            retryable: true,
        } => Error::Conflict {
            message: format!(
                "{message}: others changed some of these rows, run the statement again"
            ),
            retryable: true,
        },
        other => other,
    }
}

/// Writes the deletion files that add `rows`. Returns the changed fragments, and those of which no
/// row is left.
pub(super) async fn delete_rows(
    dataset: &Arc<Dataset>,
    rows: &RoaringTreemap,
) -> lance::Result<(Vec<Fragment>, Vec<u64>)> {
    let by_fragment: BTreeMap<u32, &RoaringBitmap> = rows.bitmaps().collect();
    let touched = dataset.get_fragments().into_iter().filter_map(|fragment| {
        let id = u32::try_from(fragment.id()).ok()?;
        Some((fragment, (*by_fragment.get(&id)?).clone()))
    });
    let mut written = stream::iter(touched)
        .map(|(fragment, offsets)| async move {
            let id = fragment.id() as u64;
            let left = fragment.extend_deletions(offsets).await?;
            Ok::<_, lance::Error>((id, left.map(|f| f.metadata().clone())))
        })
        .buffered(DELETIONS_IN_FLIGHT);
    let (mut updated, mut removed) = (Vec::new(), Vec::new());
    while let Some((id, left)) = written.try_next().await? {
        match left {
            Some(fragment) => updated.push(fragment),
            None => removed.push(id),
        }
    }
    Ok((updated, removed))
}
