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
//! from the plan as it was written, and what cannot be taken from there is refused.

mod exec;
mod rule;

use std::sync::Arc;

use datafusion::logical_expr::Expr;

use crate::error::{Error, Result};
use crate::live::LiveTable;
use crate::provider::SnapshotProvider;
use crate::resolve::display_uri;
use crate::write::{TreeTable, WriteOptions};

pub(crate) use exec::{ChangeExec, insert_plan};
pub(crate) use rule::CaptureChange;

/// What a `DELETE` or `UPDATE` asks for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request {
    /// All of these hold for the rows to change; none are all rows.
    pub filters: Vec<Expr>,
    /// Columns and their new values; empty for a deletion.
    pub assignments: Vec<(String, Expr)>,
}

/// A change of rows, ready to be made.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    /// Delete the rows for which the filters hold.
    Delete(Vec<Expr>),
    /// Set columns, as SQL for Lance, of the rows for which the filters hold.
    Update(Vec<Expr>, Vec<(String, String)>),
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
/// had, or for a system column that cannot be set.
pub(crate) fn change(
    provider: &SnapshotProvider,
    request: Option<&Result<Arc<Request>>>,
) -> Result<Change> {
    let request = request.cloned().ok_or_else(|| {
        Error::invalid(
            "this session plans DELETE and UPDATE without fragtree's rules: call Engine::register on it, or use write::TreeTable",
        )
    })??;
    if request.assignments.is_empty() {
        return Ok(Change::Delete(request.filters.clone()));
    }
    let table = provider.snapshot().schema();
    let mut assignments = Vec::with_capacity(request.assignments.len());
    for (column, value) in &request.assignments {
        if table.column_with_name(column).is_none() {
            return Err(Error::invalid(format!(
                "{column} is where a row is and not part of it: it cannot be set"
            )));
        }
        assignments.push((column.clone(), exec::lance_sql(value)?));
    }
    Ok(Change::Update(request.filters.clone(), assignments))
}
