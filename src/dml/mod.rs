//! SQL that writes: `INSERT`, `DELETE`, `UPDATE` and `TRUNCATE`.
//!
//! ```text
//!   analyzer ── CaptureChange: what a DELETE or UPDATE asks for, before anything is optimized (rule)
//!                   │  kept in the statement's target
//!   planner ── SnapshotProvider::delete_from … ──► ChangeExec; nothing is written yet         (exec)
//!   execution ── TreeTable on the latest version ──► one row: how many
//! ```
//!
//! DataFusion hands a provider the filters it finds in the optimized plan of a `DELETE`. What the
//! optimizer has turned into something else, a condition that is never true or a subquery that
//! became a join, is then not among them, and no filter means all rows. So the condition is taken
//! from the plan as it was written, and what cannot be taken from there is refused. A condition with a
//! subquery becomes a query of its own, for the addresses of the rows.

mod exec;
mod rule;

use std::sync::Arc;

use datafusion::catalog::Session;
use datafusion::common::Result as DFResult;
use datafusion::execution::SessionState;
use datafusion::logical_expr::{Expr, LogicalPlan};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionContext;

use crate::error::{Error, Result};
use crate::live::LiveTable;
use crate::provider::SnapshotProvider;
use crate::resolve::display_uri;
use crate::snapshot::Snapshot;
use crate::write::{TreeTable, WriteOptions};

pub(crate) use exec::{ChangeExec, insert_plan};
pub(crate) use rule::CaptureChange;

/// What a `DELETE` or `UPDATE` asks for.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// The rows to change.
    pub rows: Asked,
    /// Columns and their new values; empty for a deletion.
    pub assignments: Vec<(String, Expr)>,
}

/// Which rows a statement asks for.
#[derive(Debug, Clone)]
pub(crate) enum Asked {
    /// Those for which all of these hold; none are all rows.
    Where(Vec<Expr>),
    /// Those of this version whose addresses this query gives.
    Query(Arc<Snapshot>, Arc<LogicalPlan>),
}

/// Rows to change, ready to be found.
#[derive(Debug, Clone)]
pub(crate) enum Rows {
    /// Those for which all of these hold, in the latest version when it comes to that.
    Where(Vec<Expr>),
    /// Those of this version whose addresses this plan gives.
    Planned(Arc<Snapshot>, Arc<dyn ExecutionPlan>),
}

/// A change of rows, ready to be made.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    /// Which rows.
    pub rows: Rows,
    /// Columns to set, each to a value over the row as it was; empty for a deletion.
    pub assignments: Vec<(String, Expr)>,
    /// The session of the statement, with whose functions and settings conditions and values are
    /// evaluated.
    pub session: Arc<SessionState>,
}

impl Change {
    /// A change that takes all rows away.
    pub(crate) fn truncation(state: &dyn Session) -> Self {
        Self {
            rows: Rows::Where(Vec::new()),
            assignments: Vec::new(),
            session: session_of(state),
        }
    }
}

/// The table that a statement writes to through `provider`.
///
/// # Errors
/// [`Error::InvalidInput`] for a provider of one version: it would not show what was written.
pub(crate) fn writable(provider: &SnapshotProvider) -> Result<(TreeTable, LiveTable)> {
    let snapshot = provider.snapshot();
    let live = provider.followed().ok_or_else(|| {
        Error::invalid(format!(
            "{} is registered at version {} and cannot be written to: register the table without a version, tag, timestamp or refresh = off",
            display_uri(snapshot.uri()),
            snapshot.version()
        ))
    })?;
    let table = TreeTable::of(
        snapshot,
        live.open_options().clone(),
        WriteOptions::default(),
    );
    Ok((table, live.clone()))
}

/// What `request` means for `provider`.
///
/// # Errors
/// [`Error::InvalidInput`] when the session did not capture what was asked for, when that cannot be
/// had, or for a system column that cannot be set; those of planning a query.
pub(crate) async fn change(
    state: &dyn Session,
    provider: &SnapshotProvider,
    request: Option<&Result<Arc<Request>>>,
) -> DFResult<Change> {
    let request = request.cloned().ok_or_else(|| {
        Error::invalid(
            "this session plans DELETE and UPDATE without fragtree's rules: call Engine::register on it, or use write::TreeTable",
        )
    })??;
    let table = provider.snapshot().schema();
    for (column, _) in &request.assignments {
        if table.column_with_name(column).is_none() {
            let why = format!("{column} is where a row is and not part of it: it cannot be set");
            return Err(Error::invalid(why).into());
        }
    }
    let rows = match &request.rows {
        Asked::Where(filters) => Rows::Where(filters.clone()),
        Asked::Query(snapshot, query) => {
            let plan = state.create_physical_plan(query).await?;
            Rows::Planned(Arc::clone(snapshot), plan)
        }
    };
    Ok(Change {
        rows,
        assignments: request.assignments.clone(),
        session: session_of(state),
    })
}

fn session_of(state: &dyn Session) -> Arc<SessionState> {
    let own = state.as_any().downcast_ref::<SessionState>().cloned();
    Arc::new(own.unwrap_or_else(|| SessionContext::new().state()))
}
