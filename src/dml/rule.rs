//! Taking the condition and the new values of a statement from its plan as it was written.

use std::sync::Arc;

use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{Column, Result as DFResult};
use datafusion::datasource::{provider_as_source, source_as_provider};
use datafusion::logical_expr::logical_plan::dml::DmlStatement;
use datafusion::logical_expr::utils::split_conjunction_owned;
use datafusion::logical_expr::{Expr, LogicalPlan, WriteOp};
use datafusion::optimizer::AnalyzerRule;

use super::Request;
use crate::error::{Error, Result};
use crate::provider::SnapshotProvider;

/// Puts what a `DELETE` or `UPDATE` asks for into its target. The last analyzer rule: expressions
/// have their types by then, and nothing is optimized yet.
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
        WriteOp::Delete => filters_of(&statement.input, "DELETE").map(|filters| Request {
            filters,
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
    let LogicalPlan::Projection(projection) = input else {
        return Err(refused("UPDATE", input));
    };
    let mut assignments = Vec::new();
    for expr in &projection.expr {
        let Expr::Alias(alias) = expr else { continue };
        let same = matches!(alias.expr.as_ref(), Expr::Column(c) if c.name == alias.name);
        if !same {
            check_expr("UPDATE", &alias.expr)?;
            assignments.push((
                alias.name.clone(),
                unqualified(alias.expr.as_ref().clone())?,
            ));
        }
    }
    if assignments.is_empty() {
        return Err(Error::invalid(
            "this UPDATE sets every column to itself: there is nothing to do",
        ));
    }
    Ok(Request {
        filters: filters_of(&projection.input, "UPDATE")?,
        assignments,
    })
}

/// The conditions between the statement and its one table.
fn filters_of(input: &LogicalPlan, statement: &str) -> Result<Vec<Expr>> {
    let mut filters = Vec::new();
    let mut plan = input;
    loop {
        plan = match plan {
            LogicalPlan::Filter(filter) => {
                for part in split_conjunction_owned(filter.predicate.clone()) {
                    check_expr(statement, &part)?;
                    filters.push(unqualified(part)?);
                }
                &filter.input
            }
            LogicalPlan::SubqueryAlias(alias) => &alias.input,
            LogicalPlan::TableScan(scan) if scan.fetch.is_none() && scan.filters.is_empty() => {
                return Ok(filters);
            }
            other => return Err(refused(statement, other)),
        };
    }
}

fn refused(statement: &str, plan: &LogicalPlan) -> Error {
    let what = match plan {
        LogicalPlan::Limit(_) => "a LIMIT",
        LogicalPlan::Join(_) => "a FROM or USING",
        LogicalPlan::Sort(_) => "an ORDER BY",
        _ => "more than a condition on its own table",
    };
    Error::invalid(format!(
        "{statement} with {what} is not supported on a Lance table: name the rows in WHERE by columns of the table alone"
    ))
}

fn check_expr(statement: &str, expr: &Expr) -> Result<()> {
    let mut foreign = false;
    let walked = expr.apply(|e| {
        foreign |= matches!(
            e,
            Expr::Exists(_)
                | Expr::InSubquery(_)
                | Expr::ScalarSubquery(_)
                | Expr::SetComparison(_)
                | Expr::OuterReferenceColumn(..)
        );
        Ok(if foreign {
            TreeNodeRecursion::Stop
        } else {
            TreeNodeRecursion::Continue
        })
    });
    if foreign || walked.is_err() {
        return Err(Error::invalid(format!(
            "{statement} with a subquery is not supported on a Lance table: run the subquery first and put its result into the statement, as in id IN (1, 2, 3)"
        )));
    }
    Ok(())
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
