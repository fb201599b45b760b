//! How a session comes to see the current version of a live table: its catalogs, wrapped.
//!
//! The wrappers pass everything on to what they wrap, and change only what [`SchemaProvider::table`]
//! returns. DataFusion's own tables of URLs hook into a session in the same way.

use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::catalog::{
    CatalogProvider, CatalogProviderList, SchemaProvider, Session, TableProvider,
};
use datafusion::common::{DataFusionError, Result as DFResult};
use datafusion::datasource::ViewTable;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::logical_expr::{Expr, TableType};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionContext;

use super::LiveTable;
use super::plan::current_view;
use crate::error::Error;

/// Makes look-ups of tables in `ctx` see live tables, and views of them, at their current versions.
/// Once is enough, and more does no harm.
pub(crate) fn follow(ctx: &SessionContext) {
    let catalogs = Arc::clone(ctx.state_ref().read().catalog_list());
    if !catalogs.is::<LiveCatalogs>() {
        ctx.register_catalog_list(Arc::new(LiveCatalogs { inner: catalogs }));
    }
}

/// A session's catalogs.
#[derive(Debug)]
struct LiveCatalogs {
    inner: Arc<dyn CatalogProviderList>,
}

impl CatalogProviderList for LiveCatalogs {
    fn register_catalog(
        &self,
        name: String,
        catalog: Arc<dyn CatalogProvider>,
    ) -> Option<Arc<dyn CatalogProvider>> {
        self.inner.register_catalog(name, catalog)
    }

    fn catalog_names(&self) -> Vec<String> {
        self.inner.catalog_names()
    }

    fn catalog(&self, name: &str) -> Option<Arc<dyn CatalogProvider>> {
        let inner = self.inner.catalog(name)?;
        Some(Arc::new(LiveCatalog { inner }))
    }
}

/// A catalog's schemas.
#[derive(Debug)]
struct LiveCatalog {
    inner: Arc<dyn CatalogProvider>,
}

impl CatalogProvider for LiveCatalog {
    fn schema_names(&self) -> Vec<String> {
        self.inner.schema_names()
    }

    fn schema(&self, name: &str) -> Option<Arc<dyn SchemaProvider>> {
        let inner = self.inner.schema(name)?;
        Some(Arc::new(LiveSchema { inner }))
    }

    fn register_schema(
        &self,
        name: &str,
        schema: Arc<dyn SchemaProvider>,
    ) -> DFResult<Option<Arc<dyn SchemaProvider>>> {
        self.inner.register_schema(name, schema)
    }

    fn deregister_schema(
        &self,
        name: &str,
        cascade: bool,
    ) -> DFResult<Option<Arc<dyn SchemaProvider>>> {
        self.inner.deregister_schema(name, cascade)
    }
}

/// A schema's tables.
#[derive(Debug)]
struct LiveSchema {
    inner: Arc<dyn SchemaProvider>,
}

#[async_trait]
impl SchemaProvider for LiveSchema {
    fn owner_name(&self) -> Option<&str> {
        self.inner.owner_name()
    }

    fn table_names(&self) -> Vec<String> {
        self.inner.table_names()
    }

    async fn table(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>, DataFusionError> {
        let Some(table) = self.inner.table(name).await? else {
            return Ok(None);
        };
        let current = if let Some(live) = table.downcast_ref::<LiveTable>() {
            live.current()
                .await
                .map(|provider| Arc::new(provider) as Arc<dyn TableProvider>)
        } else if let Some(view) = table.downcast_ref::<ViewTable>() {
            current_view(view)
                .await
                .map(|view| view.map_or_else(|| Arc::clone(&table), |view| Arc::new(view) as _))
        } else {
            return Ok(Some(table));
        };
        Ok(Some(current.unwrap_or_else(|error| {
            Arc::new(Unavailable::new(table.as_ref(), error))
        })))
    }

    async fn table_type(&self, name: &str) -> DFResult<Option<TableType>> {
        self.inner.table_type(name).await
    }

    fn register_table(
        &self,
        name: String,
        table: Arc<dyn TableProvider>,
    ) -> DFResult<Option<Arc<dyn TableProvider>>> {
        self.inner.register_table(name, table)
    }

    fn deregister_table(&self, name: &str) -> DFResult<Option<Arc<dyn TableProvider>>> {
        self.inner.deregister_table(name)
    }

    fn table_exist(&self, name: &str) -> bool {
        self.inner.table_exist(name)
    }
}

/// A registered table whose current version cannot be had. It can be described and dropped; a query
/// of it, and a change, fail with the reason.
#[derive(Debug)]
pub(crate) struct Unavailable {
    schema: SchemaRef,
    table_type: TableType,
    error: Error,
}

impl Unavailable {
    fn new(table: &dyn TableProvider, error: Error) -> Self {
        Self {
            schema: table.schema(),
            table_type: table.table_type(),
            error,
        }
    }

    /// Why.
    pub(crate) fn error(&self) -> &Error {
        &self.error
    }
}

#[async_trait]
impl TableProvider for Unavailable {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        self.table_type
    }

    async fn scan(
        &self,
        _state: &dyn Session,
        _projection: Option<&Vec<usize>>,
        _filters: &[Expr],
        _limit: Option<usize>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        Err(self.error.clone().into())
    }

    async fn insert_into(
        &self,
        _state: &dyn Session,
        _input: Arc<dyn ExecutionPlan>,
        _insert_op: InsertOp,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        Err(self.error.clone().into())
    }

    async fn delete_from(
        &self,
        _state: &dyn Session,
        _filters: Vec<Expr>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        Err(self.error.clone().into())
    }

    async fn update(
        &self,
        _state: &dyn Session,
        _assignments: Vec<(String, Expr)>,
        _filters: Vec<Expr>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        Err(self.error.clone().into())
    }

    async fn truncate(&self, _state: &dyn Session) -> DFResult<Arc<dyn ExecutionPlan>> {
        Err(self.error.clone().into())
    }
}
