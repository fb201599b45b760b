//! The rules that concern counts.
//!
//! `COUNT(column)` of a column that is never null is a count of rows: rewritten as one it needs no
//! column, and a count of rows is answered from metadata ([`CountNonNull`]). DataFusion makes a literal
//! of such a count and throws away the plan node that knew it; with [`CountSource`] the node stays below
//! the literal, so that EXPLAIN says of which version it is and what it cost.

use std::sync::Arc;

use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{Result as DFResult, ScalarValue};
use datafusion::execution::SessionStateBuilder;
use datafusion::logical_expr::expr::AggregateFunction;
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::logical_plan::Aggregate;
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan};
use datafusion::optimizer::{ApplyOrder, OptimizerConfig, OptimizerRule};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_optimizer::aggregate_statistics::AggregateStatistics;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::aggregates::AggregateExec;
use datafusion::physical_plan::placeholder_row::PlaceholderRowExec;
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::prelude::SessionContext;

use crate::physical::count::FragmentCountExec;

/// Puts [`CountSource`] before DataFusion's rule that makes literals of counts, in a session that has
/// that rule. Once is enough, and more does no harm.
pub(crate) fn show_sources(ctx: &SessionContext) {
    let state = ctx.state_ref();
    let mut state = state.write();
    let mut rules = state.physical_optimizers().to_vec();
    let named = |name| rules.iter().position(|rule| rule.name() == name);
    let (None, Some(at)) = (
        named(CountSource.name()),
        named(AggregateStatistics::new().name()),
    ) else {
        return;
    };
    rules.insert(at, Arc::new(CountSource));
    // There is no way to put a rule anywhere but last, short of building the state again.
    let config = state.config().clone();
    let mut built = SessionStateBuilder::new_from_existing(state.clone())
        .with_session_id(state.session_id().to_string())
        .with_physical_optimizer_rules(rules)
        .build();
    // The builder clears the setting that makes a default catalog, when there is one already.
    *built.config_mut() = config;
    *state = built;
}

/// Keeps the source of a count that DataFusion would make a bare literal of.
///
/// Which counts become literals is DataFusion's own rule's to say: this one applies that rule, and
/// changes only what the literal stands on.
#[derive(Debug)]
pub(crate) struct CountSource;

impl PhysicalOptimizerRule for CountSource {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &ConfigOptions,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        let rewritten = plan.transform_down(|node| {
            let Some(source) = counted(&node) else {
                return Ok(Transformed::no(node));
            };
            let literal = AggregateStatistics::new().optimize(Arc::clone(&node), config)?;
            let on_nothing = literal
                .downcast_ref::<ProjectionExec>()
                .is_some_and(|p| p.input().is::<PlaceholderRowExec>());
            if !on_nothing {
                return Ok(Transformed::no(node));
            }
            let literal = literal.with_new_children(vec![source])?;
            Ok(Transformed::new(literal, true, TreeNodeRecursion::Jump))
        })?;
        Ok(rewritten.data)
    }

    fn name(&self) -> &'static str {
        "fragtree_count_source"
    }

    // A literal is never null, while the count it replaces may have been declared otherwise.
    fn schema_check(&self) -> bool {
        false
    }
}

/// What an aggregate counts, when that is the rows of one of our tables: as the source of one row, to
/// stand below a literal.
fn counted(node: &Arc<dyn ExecutionPlan>) -> Option<Arc<dyn ExecutionPlan>> {
    let mut below = node.downcast_ref::<AggregateExec>()?.input();
    loop {
        if let Some(count) = below.downcast_ref::<FragmentCountExec>() {
            return Some(Arc::new(count.answered()));
        }
        let [input] = below.children()[..] else {
            return None;
        };
        below = input;
    }
}

/// Makes counts of rows of counts of a column that is never null. Changes no answer, with or without
/// a fragtree table below.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use datafusion::prelude::SessionConfig;

    #[tokio::test]
    async fn a_session_that_is_taught_is_the_same_session() {
        let config = SessionConfig::new().with_target_partitions(3);
        let ctx = SessionContext::new_with_config(config);
        ctx.sql("CREATE TABLE before AS SELECT 7 AS x")
            .await
            .expect("a table");
        let state = ctx.state();
        let engine = Engine::new();
        engine.register(&ctx);
        engine.register(&ctx);
        let taught = ctx.state();
        assert_eq!(taught.session_id(), state.session_id());
        assert_eq!(taught.config().target_partitions(), 3);
        assert_eq!(
            taught.config().create_default_catalog_and_schema(),
            state.config().create_default_catalog_and_schema()
        );
        assert_eq!(
            taught.scalar_functions().len(),
            state.scalar_functions().len()
        );
        let rules = taught.physical_optimizers();
        let ours = rules.iter().filter(|r| r.name() == CountSource.name());
        assert_eq!(ours.count(), 1);
        assert_eq!(rules.len(), state.physical_optimizers().len() + 1);
        let rows = ctx.sql("SELECT x FROM before").await.expect("plans");
        assert_eq!(rows.count().await.expect("runs"), 1);
    }
}
