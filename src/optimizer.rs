//! `COUNT(column)` of a column that is never null is a count of rows.
//!
//! Rewritten as one, it needs no column, and a count of rows is answered from metadata.

use datafusion::common::tree_node::Transformed;
use datafusion::common::{Result as DFResult, ScalarValue};
use datafusion::logical_expr::expr::AggregateFunction;
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::logical_plan::Aggregate;
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan};
use datafusion::optimizer::{ApplyOrder, OptimizerConfig, OptimizerRule};

/// The rule. Changes no answer, with or without a fragtree table below.
#[derive(Debug)]
pub struct CountNonNull;

impl OptimizerRule for CountNonNull {
    fn name(&self) -> &'static str {
        "fragtree_count_non_null"
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        Some(ApplyOrder::BottomUp)
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        _config: &dyn OptimizerConfig,
    ) -> DFResult<Transformed<LogicalPlan>> {
        let LogicalPlan::Aggregate(aggregate) = plan else {
            return Ok(Transformed::no(plan));
        };
        let counts_rows = |e: &Expr| is_count_of_non_null(e, &aggregate);
        if !aggregate.aggr_expr.iter().any(counts_rows) {
            return Ok(Transformed::no(LogicalPlan::Aggregate(aggregate)));
        }
        let preserver = NamePreserver::new_for_projection();
        let aggr_expr = aggregate
            .aggr_expr
            .iter()
            .map(|expr| {
                if !is_count_of_non_null(expr, &aggregate) {
                    return expr.clone();
                }
                let name = preserver.save(expr);
                name.restore(count_rows(expr.clone()))
            })
            .collect();
        let rewritten = Aggregate::try_new(aggregate.input, aggregate.group_expr, aggr_expr)?;
        Ok(Transformed::yes(LogicalPlan::Aggregate(rewritten)))
    }
}

fn unaliased(expr: &Expr) -> &Expr {
    match expr {
        Expr::Alias(alias) => &alias.expr,
        expr => expr,
    }
}

fn is_count_of_non_null(expr: &Expr, aggregate: &Aggregate) -> bool {
    let Expr::AggregateFunction(function) = unaliased(expr) else {
        return false;
    };
    let params = &function.params;
    let plain = function.func.name() == "count" && !params.distinct && params.order_by.is_empty();
    let [argument @ Expr::Column(_)] = params.args.as_slice() else {
        return false;
    };
    plain && matches!(argument.nullable(aggregate.input.schema()), Ok(false))
}

fn count_rows(expr: Expr) -> Expr {
    match expr {
        Expr::Alias(mut alias) => {
            alias.expr = Box::new(count_rows(*alias.expr));
            Expr::Alias(alias)
        }
        Expr::AggregateFunction(AggregateFunction { func, mut params }) => {
            params.args = vec![Expr::Literal(ScalarValue::Int64(Some(1)), None)];
            Expr::AggregateFunction(AggregateFunction { func, params })
        }
        expr => expr,
    }
}
