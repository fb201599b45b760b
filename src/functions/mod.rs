//! Table functions over metadata: `fragtree_fragments`, `fragtree_tree`, `fragtree_versions`.
//!
//! Each takes a registered table's name or a location. Names are looked up when a query is planned,
//! and a function sees the version that the query's scans of that name see.

mod fragments;
mod objects;
mod versions;

pub(crate) use fragments::deletion_path;

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::{Session, TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::config::CatalogOptions;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{Column, DataFusionError, Result as DFResult, ScalarValue};
use datafusion::datasource::{provider_as_source, source_as_provider};
use datafusion::execution::SessionState;
use datafusion::logical_expr::{Expr, LogicalPlan, TableProviderFilterPushDown, TableType};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionContext;
use datafusion::sql::TableReference;
use tokio::sync::OnceCell;

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::live::Unavailable;
use crate::physical::metadata::{MetadataExec, MetadataSource};
use crate::provider::SnapshotProvider;
use crate::pruning::{AddressColumns, AddressDomain, FRAG_ID, prune};
use crate::ranges::FragmentRanges;
use crate::resolve::VersionRef;
use crate::snapshot::Snapshot;

/// Which metadata a function shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Fragments,
    Objects,
    Versions,
}

impl Kind {
    fn schema(self) -> SchemaRef {
        match self {
            Self::Fragments => fragments::schema(),
            Self::Objects => objects::schema(),
            Self::Versions => versions::schema(),
        }
    }
}

/// One of the table functions.
#[derive(Debug)]
pub(crate) struct MetadataFunction {
    kind: Kind,
    engine: Engine,
    state: StateRef,
}

/// The session a function belongs to. Weak: a session owns its functions.
#[derive(Clone)]
struct StateRef(std::sync::Weak<parking_lot::RwLock<SessionState>>);

impl std::fmt::Debug for StateRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StateRef")
    }
}

impl MetadataFunction {
    /// All the functions, for `ctx`.
    pub(crate) fn all(engine: &Engine, ctx: &SessionContext) -> [Self; 3] {
        [Kind::Fragments, Kind::Objects, Kind::Versions].map(|kind| Self {
            kind,
            engine: engine.clone(),
            state: StateRef(ctx.state_weak_ref()),
        })
    }

    /// The function's name in SQL.
    pub(crate) fn name(&self) -> &'static str {
        match self.kind {
            Kind::Fragments => "fragtree_fragments",
            Kind::Objects => "fragtree_tree",
            Kind::Versions => "fragtree_versions",
        }
    }
}

impl TableFunctionImpl for MetadataFunction {
    fn call_with_args(&self, args: TableFunctionArgs<'_, '_>) -> DFResult<Arc<dyn TableProvider>> {
        let usage = || {
            Error::invalid(format!(
                "{0} takes one text: a table's name or location, as in {0}('t')",
                self.name()
            ))
        };
        let [argument] = args.exprs() else {
            return Err(usage().into());
        };
        let target = match argument {
            Expr::Literal(ScalarValue::Utf8(Some(text)), _) => text.clone(),
            Expr::Column(column) => column.flat_name(),
            _ => return Err(usage().into()),
        };
        Ok(Arc::new(MetadataTable {
            kind: self.kind,
            name: self.name(),
            target,
            engine: self.engine.clone(),
            state: self.state.clone(),
            schema: self.kind.schema(),
            version: Arc::default(),
        }))
    }
}

/// A metadata table of a target that is looked up at each query.
#[derive(Debug, Clone)]
struct MetadataTable {
    kind: Kind,
    name: &'static str,
    target: String,
    engine: Engine,
    state: StateRef,
    schema: SchemaRef,
    /// The version of the target in one query, shared by the query's functions of that target.
    version: Arc<OnceCell<Arc<Snapshot>>>,
}

impl MetadataTable {
    async fn snapshot(&self) -> Result<Arc<Snapshot>> {
        let version = self.version.get_or_try_init(|| self.look_up()).await?;
        Ok(Arc::clone(version))
    }

    async fn look_up(&self) -> Result<Arc<Snapshot>> {
        if let Some(provider) = self.registered().await? {
            if let Some(unavailable) = provider.downcast_ref::<Unavailable>() {
                return Err(unavailable.error().clone());
            }
            let lance = provider.downcast_ref::<SnapshotProvider>();
            return lance.map(|p| Arc::clone(p.snapshot())).ok_or_else(|| {
                Error::invalid(format!(
                    "{}: table {:?} is not a Lance table",
                    self.name, self.target
                ))
            });
        }
        self.engine
            .open(&self.target, VersionRef::latest(), HashMap::new())
            .await
            .map_err(|e| match e {
                Error::NotFound { what, hint } => Error::NotFound {
                    what: format!(
                        "{}: no table {:?} is registered, and {what}",
                        self.name, self.target
                    ),
                    hint,
                },
                e => e,
            })
    }

    async fn registered(&self) -> Result<Option<Arc<dyn TableProvider>>> {
        let Some(state) = self.state.0.upgrade() else {
            return Ok(None);
        };
        let reference = TableReference::parse_str(&self.target);
        let schema = state.read().schema_for_ref(reference.clone());
        let Ok(schema) = schema else { return Ok(None) };
        schema
            .table(reference.table())
            .await
            .map_err(|e| Error::datafusion(format!("cannot look up {:?}", self.target), e))
    }

    fn source(
        &self,
        snapshot: Arc<Snapshot>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Arc<dyn MetadataSource> {
        match self.kind {
            Kind::Fragments => {
                let wanted = ids_of(filters, "fragment_id");
                Arc::new(fragments::Fragments { snapshot, wanted })
            }
            Kind::Objects => {
                let wanted = objects::wanted(filters);
                Arc::new(objects::Objects { snapshot, wanted })
            }
            Kind::Versions => Arc::new(versions::Versions {
                snapshot,
                engine: self.engine.clone(),
                limit,
            }),
        }
    }
}

/// Makes the functions in a plan that name the same table show one version: that of the plan's scans
/// of the table, when it has any.
pub(crate) fn agree(plan: LogicalPlan, names: &CatalogOptions) -> DFResult<LogicalPlan> {
    let resolve =
        |name: TableReference| name.resolve(&names.default_catalog, &names.default_schema);
    let mut any = false;
    // Nothing where a name stands for more than one version.
    let mut scanned: HashMap<_, Option<Arc<Snapshot>>> = HashMap::new();
    plan.apply_with_subqueries(|node| {
        let LogicalPlan::TableScan(scan) = node else {
            return Ok(TreeNodeRecursion::Continue);
        };
        let provider = source_as_provider(&scan.source);
        let Ok(provider) = provider else {
            return Ok(TreeNodeRecursion::Continue);
        };
        any |= provider.is::<MetadataTable>();
        if let Some(provider) = provider.downcast_ref::<SnapshotProvider>() {
            let snapshot = provider.snapshot();
            scanned
                .entry(resolve(scan.table_name.clone()))
                .and_modify(|s| *s = s.take().filter(|s| Arc::ptr_eq(s, snapshot)))
                .or_insert_with(|| Some(Arc::clone(snapshot)));
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    if !any {
        return Ok(plan);
    }
    let mut versions: HashMap<_, Arc<OnceCell<Arc<Snapshot>>>> = HashMap::new();
    let agreed = plan.transform_up_with_subqueries(|node| {
        let LogicalPlan::TableScan(mut scan) = node else {
            return Ok(Transformed::no(node));
        };
        let provider = source_as_provider(&scan.source).ok();
        let table = provider
            .as_ref()
            .and_then(|p| p.downcast_ref::<MetadataTable>());
        let Some(table) = table else {
            return Ok(Transformed::no(LogicalPlan::TableScan(scan)));
        };
        let name = resolve(TableReference::parse_str(&table.target));
        let version = versions.entry(name.clone()).or_insert_with(|| {
            let scanned = scanned.get(&name).cloned().flatten();
            Arc::new(OnceCell::new_with(scanned))
        });
        scan.source = provider_as_source(Arc::new(MetadataTable {
            version: Arc::clone(version),
            ..table.clone()
        }));
        Ok(Transformed::yes(LogicalPlan::TableScan(scan)))
    })?;
    Ok(agreed.data)
}

#[async_trait]
impl TableProvider for MetadataTable {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::View
    }

    async fn scan(
        &self,
        _state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        let snapshot = self.snapshot().await?;
        let schema = match projection {
            Some(projection) => Arc::new(self.schema.project(projection)?),
            None => Arc::clone(&self.schema),
        };
        let source = self.source(snapshot, filters, limit);
        Ok(Arc::new(MetadataExec::new(source, schema)))
    }

    fn supports_filters_pushdown(
        &self,
        filters: &[&Expr],
    ) -> DFResult<Vec<TableProviderFilterPushDown>> {
        // They narrow the walk; DataFusion checks them again on the few rows that come out.
        let answer = match self.kind {
            Kind::Fragments | Kind::Objects => TableProviderFilterPushDown::Inexact,
            Kind::Versions => TableProviderFilterPushDown::Unsupported,
        };
        Ok(vec![answer; filters.len()])
    }
}

/// The fragment ids that `filters` allow for the column `name`. Any 32-bit id may be asked for, also
/// one above the greatest allocated: a record there is for the walk to refuse.
fn ids_of(filters: &[Expr], name: &str) -> FragmentRanges {
    let domain = AddressDomain::new(Some(u32::MAX));
    allowed_values(filters, name, &domain).unwrap_or_else(FragmentRanges::all)
}

/// The values in `domain` that `filters` allow for an id column; nothing when they allow all.
fn allowed_values(filters: &[Expr], name: &str, domain: &AddressDomain) -> Option<FragmentRanges> {
    let columns = AddressColumns {
        row_addr: false,
        row_id: false,
        frag_id: true,
    };
    let mut allowed = None;
    for filter in filters {
        let renamed = rename(filter, name)?;
        let may = prune(&renamed, &columns, domain).may;
        if !may.is_all() {
            let ids = may.fragments();
            allowed = Some(allowed.map_or(ids.clone(), |a: FragmentRanges| a.intersect(&ids)));
        }
    }
    allowed
}

/// The filter with column `name` as the fragment-id column that pruning knows, and any column of
/// that name as one it does not.
fn rename(filter: &Expr, name: &str) -> Option<Expr> {
    let renamed = filter.clone().transform(|expr| {
        Ok(match expr {
            Expr::Column(column) if column.name == name => {
                Transformed::yes(Expr::Column(Column::new_unqualified(FRAG_ID)))
            }
            expr => Transformed::no(expr),
        })
    });
    renamed.ok().map(|t| t.data)
}

/// A batch of the columns that `schema` asks for, each made by name.
fn batch_of(
    schema: &SchemaRef,
    rows: usize,
    mut column: impl FnMut(&str) -> Result<ArrayRef>,
) -> Result<RecordBatch> {
    let columns = schema
        .fields()
        .iter()
        .map(|field| column(field.name()))
        .collect::<Result<Vec<_>>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::clone(schema), columns, &options)
        .map_err(|e| Error::datafusion("cannot build a metadata batch", DataFusionError::from(e)))
}

fn unknown_column(name: &str) -> Error {
    Error::internal(format!("a metadata table without a column {name}"))
}

fn schema_of(fields: Vec<arrow::datatypes::Field>) -> SchemaRef {
    Arc::new(Schema::new(fields))
}
