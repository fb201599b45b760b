//! What queries share: the cache of tree objects, the Lance session, the limits; and the one call
//! that teaches a DataFusion session everything fragtree has.

use std::collections::HashMap;
use std::sync::Arc;

use datafusion::catalog::SchemaProvider;
use datafusion::prelude::SessionContext;
use lance::session::Session;
use lance_io::object_store::WrappingObjectStore;

use crate::catalog::{DirectorySchema, LanceTableFactory};
use crate::error::{Error, Result};
use crate::functions::MetadataFunction;
use crate::optimizer::CountNonNull;
use crate::provider::{SnapshotProvider, SystemColumns};
use crate::resolve::VersionRef;
use crate::snapshot::{OpenOptions, Snapshot};
use crate::tree::object::{DEFAULT_CACHE_BYTES, Limits, ObjectCache};

/// Settings and components of an [`Engine`].
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Bytes of decoded tree objects kept. Default 128 MiB.
    pub cache_bytes: u64,
    /// Limits on what a table may make us read.
    pub limits: Limits,
    /// The Lance session to use, with its caches of file metadata. Default: one of the engine's own.
    pub session: Option<Arc<Session>>,
    /// Wraps every object store that is opened: for counting, throttling and fault injection.
    pub object_store_wrapper: Option<Arc<dyn WrappingObjectStore>>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            cache_bytes: DEFAULT_CACHE_BYTES,
            limits: Limits::default(),
            session: None,
            object_store_wrapper: None,
        }
    }
}

/// How to show one table.
#[derive(Debug, Clone, Default)]
pub struct TableOptions {
    /// Which version.
    pub reference: VersionRef,
    /// System columns to expose.
    pub system_columns: SystemColumns,
    /// Options of the object store.
    pub storage_options: HashMap<String, String>,
}

/// Opens tables over shared caches. Cheap to clone; one for a process is the usual number.
///
/// ```no_run
/// # async fn example() -> fragtree::Result<()> {
/// use datafusion::prelude::SessionContext;
///
/// let engine = fragtree::Engine::new();
/// let ctx = SessionContext::new();
/// engine.register(&ctx);
/// engine.register_table(&ctx, "t", "s3://bucket/t.lance", Default::default()).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Engine {
    cache: ObjectCache,
    limits: Limits,
    session: Arc<Session>,
    wrapper: Option<Arc<dyn WrappingObjectStore>>,
}

impl Default for Engine {
    fn default() -> Self {
        Self::new()
    }
}

impl Engine {
    /// An engine with default settings.
    pub fn new() -> Self {
        Self::with_options(EngineOptions::default())
    }

    /// An engine with these settings and components.
    pub fn with_options(options: EngineOptions) -> Self {
        Self {
            cache: ObjectCache::new(options.cache_bytes),
            limits: options.limits,
            session: options.session.unwrap_or_default(),
            wrapper: options.object_store_wrapper,
        }
    }

    /// Options that open a table over this engine's caches.
    pub fn open_options(&self) -> OpenOptions {
        OpenOptions {
            limits: self.limits,
            cache: Some(self.cache.clone()),
            session: Some(Arc::clone(&self.session)),
            object_store_wrapper: self.wrapper.clone(),
            ..Default::default()
        }
    }

    /// Opens a version of the table at `uri`.
    ///
    /// # Errors
    /// Those of [`Snapshot::open`].
    pub async fn open(
        &self,
        uri: &str,
        reference: VersionRef,
        storage_options: HashMap<String, String>,
    ) -> Result<Arc<Snapshot>> {
        let options = self
            .open_options()
            .with_reference(reference)
            .with_storage_options(storage_options);
        Snapshot::open(uri, options).await
    }

    /// Opens a table as a DataFusion provider.
    ///
    /// # Errors
    /// Those of [`Snapshot::open`] and [`SnapshotProvider::try_new`].
    pub async fn provider(&self, uri: &str, options: TableOptions) -> Result<SnapshotProvider> {
        let snapshot = self
            .open(uri, options.reference, options.storage_options)
            .await?;
        SnapshotProvider::try_new(snapshot, options.system_columns)
    }

    /// Teaches `ctx` `STORED AS LANCE`, the metadata table functions and to answer a count of a
    /// non-null column as a count of rows.
    pub fn register(&self, ctx: &SessionContext) {
        let factory = Arc::new(LanceTableFactory::new(self.clone()));
        ctx.state_ref()
            .write()
            .table_factories_mut()
            .insert("LANCE".to_string(), factory);
        for function in MetadataFunction::all(self, ctx) {
            ctx.register_udtf(function.name(), Arc::new(function));
        }
        ctx.add_optimizer_rule(Arc::new(CountNonNull));
    }

    /// Opens a table and registers it under `name`.
    ///
    /// # Errors
    /// Those of [`Engine::provider`]; nothing is registered then.
    pub async fn register_table(
        &self,
        ctx: &SessionContext,
        name: &str,
        uri: &str,
        options: TableOptions,
    ) -> Result<()> {
        let provider = self.provider(uri, options).await?;
        ctx.register_table(
            datafusion::sql::TableReference::bare(name),
            Arc::new(provider),
        )
        .map_err(|e| Error::datafusion(format!("cannot register {name}"), e))?;
        Ok(())
    }

    /// The tables of a directory as a DataFusion schema: every `NAME.lance` below `uri` is a table
    /// `NAME`, looked up anew at each query.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the directory cannot be listed.
    pub async fn directory_schema(
        &self,
        uri: &str,
        system_columns: SystemColumns,
        storage_options: HashMap<String, String>,
    ) -> Result<Arc<dyn SchemaProvider>> {
        let schema =
            DirectorySchema::open(self.clone(), uri, system_columns, storage_options).await?;
        Ok(Arc::new(schema))
    }
}
