//! Taking the condition and the new values of a statement from its plan as it was written.

use std::sync::Arc;

use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{Column, Result as DFResult, TableReference};
use datafusion::datasource::{provider_as_source, source_as_provider};
use datafusion::logical_expr::logical_plan::TableScan;
use datafusion::logical_expr::logical_plan::dml::DmlStatement;
use datafusion::logical_expr::utils::{conjunction, split_conjunction_owned};
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, WriteOp, lit};
use datafusion::optimizer::AnalyzerRule;

use super::{Asked, Request};
use crate::error::{Error, Result};
use crate::provider::SnapshotProvider;
use crate::pruning::ROW_ADDR;

/// Puts what a `DELETE` or `UPDATE` asks for into its target. The last analyzer rule: expressions
/// have their types by then, and nothing is optimized yet but what a prepared statement had optimized
/// when it was prepared.
#[derive(Debug)]
pub(crate) struct CaptureChange;

impl AnalyzerRule for CaptureChange {
    fn name(&self) -> &'static str {
        "fragtree_capture_change"
    }

    fn analyze(&self, plan: LogicalPlan, _config: &ConfigOptions) -> DFResult<LogicalPlan> {
        let captured = plan.transform_down(|node| match node {
            LogicalPlan::Dml(statement) => capture(statement),
            other => Ok(Transformed::no(other)),
        })?;
        Ok(captured.data)
    }
}

fn capture(statement: DmlStatement) -> DFResult<Transformed<LogicalPlan>> {
    let unchanged = |statement| Ok(Transformed::no(LogicalPlan::Dml(statement)));
    let Ok(provider) = source_as_provider(&statement.target) else {
        return unchanged(statement);
    };
    let Some(provider) = provider.downcast_ref::<SnapshotProvider>() else {
        return unchanged(statement);
    };
    // A refusal is kept too, for the planner to meet: from here it would carry this rule's name.
    let request = match &statement.op {
        WriteOp::Delete => rows_of(&statement.input, "DELETE").map(|rows| Request {
            rows,
            assignments: Vec::new(),
        }),
        WriteOp::Update => update_of(&statement.input),
        WriteOp::Insert(_) | WriteOp::Ctas | WriteOp::Truncate => return unchanged(statement),
    };
    let target = provider.clone().asked(request.map(Arc::new));
    Ok(Transformed::yes(LogicalPlan::Dml(DmlStatement::new(
        statement.table_name,
        provider_as_source(Arc::new(target)),
        statement.op,
        statement.input,
    ))))
}

/// The new values are the top projection of an update, the condition is below it.
fn update_of(input: &LogicalPlan) -> Result<Request> {
    if let LogicalPlan::EmptyRelation(empty) = input
        && let Some(first) = empty.schema.fields().first()
    {
        let itself = Expr::Column(Column::new_unqualified(first.name()));
        return Ok(Request {
            rows: rows_of(input, "UPDATE")?,
            assignments: vec![(first.name().clone(), itself)],
        });
    }
    let LogicalPlan::Projection(projection) = input else {
        return Err(refused("UPDATE", input));
    };
    let mut assignments = Vec::new();
    for expr in &projection.expr {
        let Expr::Alias(alias) = expr else { continue };
        let same = matches!(alias.expr.as_ref(), Expr::Column(c) if c.name == alias.name);
        if !same {
            if has_subquery(&alias.expr) {
                return Err(Error::invalid(format!(
                    "UPDATE cannot set {} to the result of a subquery on a Lance table: run the subquery first and put its result into the statement",
                    alias.name
                )));
            }
            assignments.push((
                alias.name.clone(),
                unqualified(alias.expr.as_ref().clone())?,
            ));
        }
    }
    if assignments.is_empty() {
        // Every column is set to itself. The rows are written anew all the same, and counted.
        let first = input.schema().fields().first();
        let first = first.ok_or_else(|| Error::invalid("an UPDATE of a table without columns"))?;
        let itself = Expr::Column(Column::new_unqualified(first.name()));
        assignments.push((first.name().clone(), itself));
    }
    Ok(Request {
        rows: rows_of(&projection.input, "UPDATE")?,
        assignments,
    })
}

/// The rows between the statement and its one table.
fn rows_of(input: &LogicalPlan, statement: &str) -> Result<Asked> {
    let mut filters = Vec::new();
    let mut aliases = Vec::new();
    let mut plan = input;
    loop {
        plan = match plan {
            LogicalPlan::Filter(filter) => {
                filters.extend(split_conjunction_owned(filter.predicate.clone()));
                &filter.input
            }
            LogicalPlan::SubqueryAlias(alias) => {
                aliases.push(alias.alias.clone());
                &alias.input
            }
            LogicalPlan::TableScan(scan) if scan.fetch.is_none() => {
                // A prepared statement was optimized before it comes here.
                for filter in &scan.filters {
                    filters.push(named_by(aliases.first(), filter.clone())?);
                }
                if filters.iter().any(has_subquery) {
                    return query_of(scan, aliases, filters);
                }
                let plain = filters.into_iter().map(unqualified);
                return Ok(Asked::Where(plain.collect::<Result<_>>()?));
            }
            LogicalPlan::EmptyRelation(empty) if !empty.produce_one_row => {
                return Ok(Asked::Where(vec![lit(false)]));
            }
            other => return Err(refused(statement, other)),
        };
    }
}

/// A query for the addresses of the rows for which `filters` hold.
fn query_of(scan: &TableScan, aliases: Vec<TableReference>, filters: Vec<Expr>) -> Result<Asked> {
    let failed = |e| Error::datafusion("cannot plan the condition of a change", e);
    let source = source_as_provider(&scan.source).map_err(failed)?;
    let provider = source
        .downcast_ref::<SnapshotProvider>()
        .ok_or_else(|| Error::internal("a change of a table that is not scanned"))?;
    let snapshot = Arc::clone(provider.snapshot());
    let addressed = provider_as_source(Arc::new(provider.with_addresses()?));
    let named = aliases.first().cloned();
    let mut query = LogicalPlanBuilder::scan(scan.table_name.clone(), addressed, None);
    for alias in aliases.into_iter().rev() {
        query = query.and_then(|q| q.alias(alias));
    }
    if let Some(condition) = conjunction(filters) {
        query = query.and_then(|q| q.filter(condition));
    }
    let table = named.unwrap_or_else(|| scan.table_name.clone());
    let address = Expr::Column(Column::new(Some(table), ROW_ADDR));
    let query = query.and_then(|q| q.project([address])?.build());
    Ok(Asked::Query(snapshot, Arc::new(query.map_err(failed)?)))
}

fn refused(statement: &str, plan: &LogicalPlan) -> Error {
    let what = match plan {
        LogicalPlan::Limit(_) => "a LIMIT",
        LogicalPlan::Join(_) => "a FROM or USING, or a subquery in a prepared statement,",
        LogicalPlan::Projection(_) => "values that a prepared statement shares between columns",
        LogicalPlan::Sort(_) => "an ORDER BY",
        _ => "more than a condition on its own table",
    };
    Error::invalid(format!(
        "{statement} with {what} is not supported on a Lance table: name the rows in WHERE by columns of the table alone"
    ))
}

fn has_subquery(expr: &Expr) -> bool {
    let found = expr.exists(|e| {
        Ok(matches!(
            e,
            Expr::Exists(_)
                | Expr::InSubquery(_)
                | Expr::ScalarSubquery(_)
                | Expr::SetComparison(_)
        ))
    });
    found.unwrap_or(true)
}

/// A filter that was pushed below the alias of its table, by that alias.
fn named_by(alias: Option<&TableReference>, filter: Expr) -> Result<Expr> {
    let Some(alias) = alias else {
        return Ok(filter);
    };
    filter
        .transform(|e| {
            Ok(match e {
                Expr::Column(column) => {
                    Transformed::yes(Expr::Column(Column::new(Some(alias.clone()), column.name)))
                }
                other => Transformed::no(other),
            })
        })
        .map(|t| t.data)
        .map_err(|e| Error::datafusion("cannot read a condition", e))
}

/// The expression with columns by their plain names, as the table itself knows them.
fn unqualified(expr: Expr) -> Result<Expr> {
    expr.transform(|e| {
        Ok(match e {
            Expr::Column(column) if column.relation.is_some() => {
                Transformed::yes(Expr::Column(Column::new_unqualified(column.name)))
            }
            other => Transformed::no(other),
        })
    })
    .map(|t| t.data)
    .map_err(|e| Error::datafusion("cannot read a condition", e))
}
