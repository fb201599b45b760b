//! What queries share: the cache of tree objects, the Lance session, the limits; and the one call
//! that teaches a DataFusion session everything fragtree has.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use datafusion::catalog::{SchemaProvider, TableProvider};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::prelude::SessionContext;
use futures::StreamExt;
use lance::session::Session;
use lance_io::object_store::WrappingObjectStore;

use crate::catalog::{DirectorySchema, LanceTableFactory, storable};
use crate::dml::CaptureChange;
use crate::error::{Error, Result};
use crate::functions::MetadataFunction;
use crate::live::{LiveTable, OneVersion, Refresh, follow};
use crate::optimizer::{CountNonNull, show_sources};
use crate::provider::{SnapshotProvider, SystemColumns};
use crate::resolve::{VersionAt, VersionRef, display_uri};
use crate::snapshot::{OpenOptions, Snapshot};
use crate::tree::object::{DEFAULT_CACHE_BYTES, Limits, ObjectCache};
use crate::write::{CreateOptions, TreeTable, WriteOptions};

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
    /// How often a registered table looks for newer versions. Without meaning for a `reference` that
    /// names one version: see [`TableOptions::is_pinned`].
    pub refresh: Refresh,
}

impl TableOptions {
    /// Whether the table stays at the version it is opened at: because a version, a tag or a
    /// timestamp is asked for, or because [`Refresh::Off`] is.
    pub fn is_pinned(&self) -> bool {
        self.refresh == Refresh::Off || self.reference.at != VersionAt::Latest
    }
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

    /// Opens a version of a table as a DataFusion provider, which stays at that version.
    ///
    /// # Errors
    /// Those of [`Snapshot::open`] and [`SnapshotProvider::try_new`].
    pub async fn provider(&self, uri: &str, options: TableOptions) -> Result<SnapshotProvider> {
        let snapshot = self
            .open(uri, options.reference, options.storage_options)
            .await?;
        SnapshotProvider::try_new(snapshot, options.system_columns)
    }

    /// Opens a table that follows the commits to its branch, for registering in any number of sessions
    /// that [`Engine::register`] has taught.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for options that pin it ([`TableOptions::is_pinned`]); those of
    /// [`Engine::provider`].
    pub async fn live_table(&self, uri: &str, options: TableOptions) -> Result<LiveTable> {
        let age = match options.refresh {
            _ if options.is_pinned() => {
                return Err(Error::invalid(format!(
                    "{} is asked for at one version, and cannot follow commits: leave out the \
                     reference and refresh = off, or open it as a provider",
                    display_uri(uri)
                )));
            }
            Refresh::Always | Refresh::Off => Duration::ZERO,
            Refresh::Every(age) => age,
        };
        let opened = Instant::now();
        let open = self
            .open_options()
            .with_reference(options.reference)
            .with_storage_options(options.storage_options);
        let snapshot = Snapshot::open(uri, open.clone()).await?;
        LiveTable::try_new(snapshot, open, options.system_columns, age, opened)
    }

    /// Opens a table for registering: a [`LiveTable`], or a [`SnapshotProvider`] when `options` pin
    /// it.
    ///
    /// # Errors
    /// Those of [`Engine::provider`].
    pub async fn table(&self, uri: &str, options: TableOptions) -> Result<Arc<dyn TableProvider>> {
        if options.is_pinned() {
            return Ok(Arc::new(self.provider(uri, options).await?));
        }
        Ok(Arc::new(self.live_table(uri, options).await?))
    }

    /// Opens a table for writing.
    ///
    /// # Errors
    /// Those of [`TreeTable::open`].
    pub async fn writer(
        &self,
        uri: &str,
        storage_options: HashMap<String, String>,
        write: WriteOptions,
    ) -> Result<TreeTable> {
        let open = self.open_options().with_storage_options(storage_options);
        TreeTable::open(uri, open, write).await
    }

    /// Makes a table of `rows` that is a tree from its first version. Text and binary views, which SQL
    /// gives and Lance does not store, become plain text and binary.
    ///
    /// # Errors
    /// Those of [`TreeTable::create`].
    pub async fn create_table(
        &self,
        uri: &str,
        rows: SendableRecordBatchStream,
        create: CreateOptions,
        storage_options: HashMap<String, String>,
    ) -> Result<TreeTable> {
        let open = self.open_options().with_storage_options(storage_options);
        let schema = Arc::new(storable(&rows.schema()));
        let target = Arc::clone(&schema);
        let stored = rows.map(move |batch| {
            let batch = batch?;
            let columns = batch.columns().iter().zip(target.fields());
            let columns = columns
                .map(|(column, field)| arrow::compute::cast(column, field.data_type()))
                .collect::<std::result::Result<Vec<_>, _>>()?;
            Ok(RecordBatch::try_new(Arc::clone(&target), columns)?)
        });
        let rows = Box::pin(RecordBatchStreamAdapter::new(schema, stored));
        TreeTable::create(uri, rows, create, open, WriteOptions::default()).await
    }

    /// Teaches `ctx` `STORED AS LANCE`, the metadata table functions, to answer a count of a non-null
    /// column as a count of rows, to show in EXPLAIN where a count comes from, and to see live tables
    /// at their current versions.
    ///
    /// The last is by wrapping the session's list of catalogs: catalogs and schemas registered before
    /// or after are reached through it, a list registered after is not. The one before builds the
    /// session's state again, which forgets prepared statements: call this first.
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
        ctx.add_analyzer_rule(Arc::new(OneVersion));
        ctx.add_analyzer_rule(Arc::new(CaptureChange));
        show_sources(ctx);
        follow(ctx);
    }

    /// Opens a table and registers it under `name`, in a session that [`Engine::register`] has
    /// taught. It follows new versions unless `options` pin it.
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
        follow(ctx);
        let table = self.table(uri, options).await?;
        ctx.register_table(datafusion::sql::TableReference::bare(name), table)
            .map_err(|e| Error::datafusion(format!("cannot register {name}"), e))?;
        Ok(())
    }

    /// The tables of a directory as a DataFusion schema: every `NAME.lance` below `uri` is a table
    /// `NAME`, found anew at each query and opened with `options`.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the directory cannot be listed; [`Error::InvalidInput`] for options
    /// that name one version.
    pub async fn directory_schema(
        &self,
        uri: &str,
        options: TableOptions,
    ) -> Result<Arc<dyn SchemaProvider>> {
        let schema = DirectorySchema::open(self.clone(), uri, options).await?;
        Ok(Arc::new(schema))
    }
}
