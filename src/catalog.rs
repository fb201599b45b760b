//! Where people name tables: `STORED AS LANCE` and directories of tables.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};
use async_trait::async_trait;
use datafusion::catalog::{SchemaProvider, Session, TableProvider, TableProviderFactory};
use datafusion::common::{DataFusionError, Result as DFResult, exec_err};
use datafusion::logical_expr::{CreateExternalTable, TableType};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt, stream};
use lance_io::object_store::ObjectStore;
use object_store::path::Path;
use parking_lot::Mutex;

use crate::engine::{Engine, TableOptions};
use crate::error::{Error, Result};
use crate::live::{LiveTable, Refresh};
use crate::provider::SnapshotProvider;
use crate::resolve::{VersionAt, VersionRef, display_uri, normalize_uri, parse_timestamp};
use crate::write::{CONFIG_PREFIX, CreateOptions, TreePolicy};

/// Options of `CREATE EXTERNAL TABLE … STORED AS LANCE` that are ours; the others are the object
/// store's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TableOptionKey {
    /// A version number.
    Version,
    /// A tag's name.
    Tag,
    /// A branch's name.
    Branch,
    /// A time: the last version at or before it.
    Timestamp,
    /// A list of system columns.
    SystemColumns,
    /// How often to look for newer versions: `always`, `off` or a time.
    Refresh,
}

impl TableOptionKey {
    const ALL: [(Self, &'static str); 6] = [
        (Self::Version, "version"),
        (Self::Tag, "tag"),
        (Self::Branch, "branch"),
        (Self::Timestamp, "timestamp"),
        (Self::SystemColumns, "system_columns"),
        (Self::Refresh, "refresh"),
    ];

    fn parse(key: &str) -> Option<Self> {
        let found = Self::ALL.iter().find(|(_, name)| *name == key);
        found.map(|(key, _)| *key)
    }
}

/// Options that say how a new table is made.
const CREATION_OPTIONS: [&str; 3] = [
    "stable_row_ids",
    "data_storage_version",
    "fragtree.leaf_bytes and the other sizes of a tree",
];

/// Prefixes under which DataFusion's users write options of a store.
const STORE_PREFIXES: [&str; 6] = ["aws.", "s3.", "gcp.", "gcs.", "azure.", "storage."];

/// Options of the object store that every store takes.
const COMMON_STORE_OPTIONS: [&str; 8] = [
    "allow_http",
    "allow_invalid_certificates",
    "block_size",
    "client_max_retries",
    "client_retry_timeout",
    "connect_timeout",
    "download_retry_count",
    "timeout",
];

/// Options of one kind of store, by the location's scheme.
fn store_options(scheme: &str) -> &'static [&'static str] {
    match scheme {
        "s3" => &[
            "access_key_id",
            "bucket_virtual_hosted_style_request",
            "conditional_put",
            "default_region",
            "endpoint",
            "imdsv1_fallback",
            "metadata_endpoint",
            "provider",
            "region",
            "request_payer",
            "s3_express",
            "secret_access_key",
            "server_side_encryption",
            "session_token",
            "skip_signature",
            "sse_kms_key_id",
            "unsigned_payload",
            "virtual_hosted_style_request",
        ],
        "gs" | "gcs" => &[
            "application_credentials",
            "service_account",
            "service_account_key",
            "service_account_path",
            "skip_signature",
            "storage_token",
        ],
        "az" | "abfss" => &[
            "account_key",
            "account_name",
            "authority_id",
            "client_id",
            "client_secret",
            "endpoint",
            "sas_token",
            "skip_signature",
            "tenant_id",
            "token",
            "use_emulator",
        ],
        _ => &[],
    }
}

/// Reads the options of a statement. Keys may carry the prefix DataFusion or its users give them.
///
/// # Errors
/// [`Error::InvalidInput`] for an unknown key, listing the known ones, or a value that cannot be
/// read. Values of store options are never part of a message.
pub(crate) fn parse_options(
    location: &str,
    options: &HashMap<String, String>,
) -> Result<TableOptions> {
    let scheme = scheme_of(location);
    let mut parsed = TableOptions::default();
    let mut reference = References::default();
    let mut refresh = None;
    // In order of their names, so that the same statement gives the same error.
    let mut options: Vec<_> = options.iter().collect();
    options.sort_unstable();
    for (key, value) in options {
        let key = key.strip_prefix("format.").unwrap_or(key);
        match TableOptionKey::parse(key) {
            Some(TableOptionKey::SystemColumns) => parsed.system_columns = value.parse()?,
            Some(TableOptionKey::Refresh) => refresh = Some(value.parse()?),
            Some(key) => reference.set(key, value)?,
            None => {
                let name = store_option(&scheme, key)?;
                parsed.storage_options.insert(name, value.clone());
            }
        }
    }
    parsed.reference = reference.finish()?;
    if let Some(refresh) = refresh {
        if refresh != Refresh::Off && parsed.reference.at != VersionAt::Latest {
            return Err(Error::invalid(
                "options version, tag and timestamp name one version, and there is nothing to \
                 refresh: leave refresh out, or them",
            ));
        }
        parsed.refresh = refresh;
    }
    Ok(parsed)
}

#[derive(Debug, Default)]
struct References {
    branch: Option<String>,
    at: Option<VersionAt>,
}

impl References {
    fn set(&mut self, key: TableOptionKey, value: &str) -> Result<()> {
        let at = match key {
            TableOptionKey::Branch => {
                self.branch = Some(value.to_string());
                return Ok(());
            }
            TableOptionKey::Version => VersionAt::Version(value.parse().map_err(|_| {
                Error::invalid(format!("option version: {value:?} is no version number"))
            })?),
            TableOptionKey::Tag => VersionAt::Tag(value.to_string()),
            TableOptionKey::Timestamp => VersionAt::Timestamp(parse_timestamp(value)?),
            TableOptionKey::SystemColumns | TableOptionKey::Refresh => {
                return Err(Error::internal("not a reference"));
            }
        };
        if self.at.replace(at).is_some() {
            return Err(Error::invalid(
                "options version, tag and timestamp exclude each other: give one",
            ));
        }
        Ok(())
    }

    fn finish(self) -> Result<VersionRef> {
        if self.branch.is_some() && matches!(self.at, Some(VersionAt::Tag(_))) {
            return Err(Error::invalid(
                "options tag and branch exclude each other: a tag knows its branch",
            ));
        }
        Ok(VersionRef {
            branch: self.branch,
            at: self.at.unwrap_or_default(),
        })
    }
}

fn scheme_of(location: &str) -> String {
    url::Url::parse(location).map_or_else(|_| "file".into(), |u| u.scheme().to_string())
}

/// The name under which the object store of `location` knows an option. Keys may carry the prefix
/// that users give them: `aws.region` is `region`.
///
/// # Errors
/// [`Error::InvalidInput`] for an option that this kind of store does not have, listing those it has.
pub fn storage_option(location: &str, key: &str) -> Result<String> {
    let scheme = scheme_of(location);
    known_option(&scheme, key).ok_or_else(|| {
        let known: Vec<_> = COMMON_STORE_OPTIONS
            .iter()
            .chain(store_options(&scheme))
            .copied()
            .collect();
        Error::invalid(format!(
            "unknown option {key:?} of the {scheme} store: there are {}",
            known.join(", ")
        ))
    })
}

/// The store's own name of an option, when the store of this scheme has one.
fn store_option(scheme: &str, key: &str) -> Result<String> {
    known_option(scheme, key).ok_or_else(|| {
        let ours = TableOptionKey::ALL.iter().map(|(_, name)| *name);
        let ours: Vec<_> = ours.chain(CREATION_OPTIONS).collect();
        let known = store_options(scheme);
        let store: Vec<_> = COMMON_STORE_OPTIONS.iter().chain(known).copied().collect();
        Error::invalid(format!(
            "unknown option {key:?}: there are {}; and of the {scheme} store: {}",
            ours.join(", "),
            store.join(", ")
        ))
    })
}

fn known_option(scheme: &str, key: &str) -> Option<String> {
    let plain = STORE_PREFIXES
        .iter()
        .find_map(|prefix| key.strip_prefix(prefix))
        .unwrap_or(key);
    let base = match plain.split_once('.') {
        // `base_3.region`: an option of one base path only.
        Some((base, rest)) if base.starts_with("base_") => rest,
        _ => plain,
    };
    let bare = ["aws_", "google_", "azure_storage_", "azure_"]
        .iter()
        .find_map(|prefix| base.strip_prefix(prefix))
        .unwrap_or(base);
    let known = store_options(scheme).contains(&bare) || COMMON_STORE_OPTIONS.contains(&bare);
    known.then(|| plain.to_string())
}

/// `CREATE EXTERNAL TABLE … STORED AS LANCE`.
#[derive(Debug)]
pub struct LanceTableFactory {
    engine: Engine,
}

impl LanceTableFactory {
    /// A factory of tables over the engine's caches.
    pub fn new(engine: Engine) -> Self {
        Self { engine }
    }
}

#[async_trait]
impl TableProviderFactory for LanceTableFactory {
    async fn create(
        &self,
        _state: &dyn Session,
        cmd: &CreateExternalTable,
    ) -> DFResult<Arc<dyn TableProvider>> {
        let (create, given) = creation_options(&cmd.options)?;
        let options = parse_options(&cmd.location, &given)?;
        for (given, what) in [
            (!cmd.table_partition_cols.is_empty(), "PARTITIONED BY"),
            (!cmd.order_exprs.is_empty(), "WITH ORDER"),
            (cmd.unbounded, "UNBOUNDED"),
            (!cmd.column_defaults.is_empty(), "DEFAULT"),
            (!cmd.constraints.is_empty(), "PRIMARY KEY or UNIQUE"),
        ] {
            if given {
                return Err(
                    Error::invalid(format!("{what} has no meaning for a Lance table")).into(),
                );
            }
        }
        let declared = cmd.schema.as_arrow();
        let can_begin = !declared.fields().is_empty() && options.reference == VersionRef::latest();
        let table = match self.engine.table(&cmd.location, options.clone()).await {
            Err(Error::NotFound { .. }) if can_begin => {
                let schema = Arc::new(storable(declared));
                let none = RecordBatchStreamAdapter::new(schema, stream::empty());
                let storage = options.storage_options.clone();
                self.engine
                    .create_table(
                        &cmd.location,
                        Box::pin(none),
                        create.unwrap_or_default(),
                        storage,
                    )
                    .await?;
                return Ok(self.engine.table(&cmd.location, options).await?);
            }
            found => found?,
        };
        if create.is_some() {
            return Err(Error::invalid(format!(
                "there is a table at {} already: options that say how to make one have no meaning",
                display_uri(&cmd.location)
            ))
            .into());
        }
        check_columns(declared, &table.schema(), &cmd.location)?;
        Ok(table)
    }
}

/// Splits off the options that say how a new table is made; none when there are none of them.
fn creation_options(
    options: &HashMap<String, String>,
) -> Result<(Option<CreateOptions>, HashMap<String, String>)> {
    let mut create = CreateOptions::default();
    let (mut policy, mut rest) = (HashMap::new(), HashMap::new());
    let mut given = false;
    for (key, value) in options {
        let name = key.strip_prefix("format.").unwrap_or(key);
        match name {
            "stable_row_ids" => {
                create.stable_row_ids = value.parse().map_err(|_| {
                    Error::invalid(format!(
                        "option stable_row_ids: {value:?} is neither true nor false"
                    ))
                })?;
            }
            "data_storage_version" => {
                let version = value.parse().map_err(|e| {
                    Error::lance(format!("option data_storage_version: {value:?}"), e)
                })?;
                create.data_storage_version = Some(version);
            }
            _ if name.starts_with(CONFIG_PREFIX) => {
                policy.insert(name.to_string(), value.clone());
            }
            _ => {
                rest.insert(key.clone(), value.clone());
                continue;
            }
        }
        given = true;
    }
    create.policy = TreePolicy::from_config(&policy)?;
    Ok((given.then_some(create), rest))
}

/// A column list as a Lance table can have it: SQL's text and binary types become the plain ones.
pub(crate) fn storable(declared: &Schema) -> Schema {
    let fields: Vec<_> = declared
        .fields()
        .iter()
        .map(|field| {
            let plain = match field.data_type() {
                DataType::Utf8View => DataType::Utf8,
                DataType::BinaryView => DataType::Binary,
                other => other.clone(),
            };
            field.as_ref().clone().with_data_type(plain)
        })
        .collect();
    Schema::new(fields)
}

/// A column list in the statement must say what the table has: names, order and types.
fn check_columns(declared: &Schema, table: &Schema, location: &str) -> Result<()> {
    if declared.fields().is_empty() {
        return Ok(());
    }
    let same = |a: &Field, b: &Field| {
        a.name() == b.name() && plain_type(a.data_type()) == plain_type(b.data_type())
    };
    let agrees = declared.fields().len() == table.fields().len()
        && declared
            .fields()
            .iter()
            .zip(table.fields())
            .all(|(a, b)| same(a, b));
    if agrees {
        return Ok(());
    }
    let list = |schema: &Schema| {
        let columns: Vec<_> = schema
            .fields()
            .iter()
            .map(|f| format!("{} {}", f.name(), f.data_type()))
            .collect();
        columns.join(", ")
    };
    Err(Error::invalid(format!(
        "the column list ({}) is not that of {} ({}): leave it out, or make it the same",
        list(declared),
        display_uri(location),
        list(table)
    )))
}

/// A type without what SQL cannot say: which of Arrow's text or binary types it is.
fn plain_type(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Utf8View | DataType::LargeUtf8 => DataType::Utf8,
        DataType::BinaryView | DataType::LargeBinary => DataType::Binary,
        other => other.clone(),
    }
}

/// A table of a directory, opened.
#[derive(Debug, Clone)]
enum Opened {
    Live(LiveTable),
    Pinned(SnapshotProvider),
}

/// Tables of a directory that are looked at at once.
const LOOKS_AT_ONCE: usize = 16;

/// The `.lance` tables of a directory.
#[derive(Debug)]
pub struct DirectorySchema {
    engine: Engine,
    uri: String,
    store: Arc<ObjectStore>,
    base: Path,
    options: TableOptions,
    /// The tables that were asked for so far. One that is gone is forgotten when it is asked for.
    opened: Mutex<HashMap<String, Opened>>,
    /// Views and tables that the session itself makes.
    made: datafusion::catalog::MemorySchemaProvider,
}

impl DirectorySchema {
    /// Opens a directory.
    ///
    /// # Errors
    /// [`Error::NotFound`] when it cannot be listed; [`Error::InvalidInput`] for options that name one
    /// version.
    pub(crate) async fn open(engine: Engine, uri: &str, options: TableOptions) -> Result<Self> {
        if options.reference.at != VersionAt::Latest {
            return Err(Error::invalid(
                "the tables of a directory have no version in common: name one when opening a table",
            ));
        }
        let uri = normalize_uri(uri)?;
        let open = engine
            .open_options()
            .with_storage_options(options.storage_options.clone());
        let registry = open.session.clone().unwrap_or_default().store_registry();
        let (store, base) =
            ObjectStore::from_uri_and_params(registry, &uri, &open.store_params(&uri))
                .await
                .map_err(|e| Error::lance(format!("cannot open directory {uri}"), e))?;
        let schema = Self {
            engine,
            uri,
            store,
            base,
            options,
            opened: Mutex::default(),
            made: datafusion::catalog::MemorySchemaProvider::new(),
        };
        let local = schema.store.is_local() && !std::path::Path::new(&schema.uri).is_dir();
        if local && !schema.uri.starts_with("file:") {
            return Err(Error::NotFound {
                what: format!("directory {}", schema.uri),
                hint: String::new(),
            });
        }
        let names = schema.read_dir().await?;
        if names.iter().any(|name| name == "_versions") {
            return Err(Error::invalid(format!(
                "{} is a Lance table and not a directory of tables: open it as one",
                display_uri(&schema.uri)
            )));
        }
        Ok(schema)
    }

    async fn read_dir(&self) -> Result<Vec<String>> {
        let names = self.store.read_dir(self.base.clone()).await;
        names.map_err(|e| Error::lance(format!("cannot list {}", display_uri(&self.uri)), e))
    }

    /// The names of what looks like a table.
    async fn named(&self) -> Result<Vec<String>> {
        let mut named = Vec::new();
        for name in self.read_dir().await? {
            if let Some(name) = name.trim_end_matches('/').strip_suffix(".lance") {
                named.push(name.to_string());
            }
        }
        Ok(named)
    }

    /// The tables there are, in order of their names.
    async fn list(&self) -> Result<Vec<String>> {
        let named = self.named().await?;
        let looks = named.into_iter().map(|name| async move {
            let is_table = self.has_versions(&name).await?;
            Ok::<_, Error>(is_table.then_some(name))
        });
        let looked: Vec<_> = stream::iter(looks)
            .buffered(LOOKS_AT_ONCE)
            .try_collect()
            .await?;
        let mut tables: Vec<_> = looked.into_iter().flatten().collect();
        tables.sort_unstable();
        Ok(tables)
    }

    /// Whether there is a version of the table: what is left of one that was never finished, or any
    /// other file with such a name, is no table.
    async fn has_versions(&self, name: &str) -> Result<bool> {
        let (store, base) = self.store_of(name).await?;
        // The first will do: there may be thousands of versions.
        let versions = base.join("_versions");
        let mut listed = store.inner.list(Some(&versions));
        while let Some(entry) = listed.next().await {
            match entry {
                Ok(entry) if entry.location.as_ref().ends_with(".manifest") => return Ok(true),
                Ok(_) => {}
                // No such folder, or a file in its place.
                Err(_) if store.is_local() => return Ok(false),
                Err(e) => return Err(Error::store(versions.to_string(), e)),
            }
        }
        Ok(false)
    }

    /// Whether there are files of a table that never had a version: its name is free.
    async fn is_left_over(&self, name: &str) -> Result<bool> {
        let (store, base) = self.store_of(name).await?;
        let entries = match store.read_dir(base).await {
            Ok(entries) => entries,
            Err(_) if store.is_local() => return Ok(false),
            Err(e) => {
                let context = format!("cannot list {}", display_uri(&self.location(name)));
                return Err(Error::lance(context, e));
            }
        };
        let own = ["data", "_transactions", "_bt"];
        Ok(entries
            .iter()
            .any(|n| own.contains(&n.trim_end_matches('/'))))
    }

    /// Where a table of the directory lies, or would.
    async fn store_of(&self, name: &str) -> Result<(Arc<ObjectStore>, Path)> {
        let uri = self.location(name);
        let open = self
            .engine
            .open_options()
            .with_storage_options(self.options.storage_options.clone());
        let registry = open.session.clone().unwrap_or_default().store_registry();
        let params = open.store_params(&uri);
        ObjectStore::from_uri_and_params(registry, &uri, &params)
            .await
            .map_err(|e| Error::lance(format!("cannot open {}", display_uri(&uri)), e))
    }

    /// Waits in a place that cannot: on a thread of its own, with a runtime of its own.
    fn now<T: Default + Send>(&self, answer: impl Future<Output = Result<T>> + Send) -> T {
        let answered = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let runtime = tokio::runtime::Builder::new_current_thread()
                        .enable_all()
                        .build()
                        .map_err(|e| Error::internal(e.to_string()))?;
                    runtime.block_on(answer)
                })
                .join()
                .unwrap_or_else(|_| Err(Error::internal("listing ended early")))
        });
        answered.unwrap_or_else(|error| {
            tracing::warn!(%error, directory = %self.uri, "cannot list tables");
            T::default()
        })
    }

    fn is_table_now(&self, name: &str) -> bool {
        self.now(self.has_versions(name))
    }

    fn location(&self, name: &str) -> String {
        format!("{}/{name}.lance", self.uri)
    }

    fn live(&self, name: &str) -> Option<LiveTable> {
        match self.opened.lock().get(name) {
            Some(Opened::Live(live)) => Some(live.clone()),
            Some(Opened::Pinned(_)) | None => None,
        }
    }

    fn forget(&self, name: &str) {
        self.opened.lock().remove(name);
    }

    /// The version for one query of a table that is there.
    async fn opened(&self, name: &str) -> Result<SnapshotProvider> {
        let known = self.opened.lock().get(name).cloned();
        let table = match known {
            Some(table) => table,
            None => {
                let location = self.location(name);
                let options = self.options.clone();
                let table = if options.is_pinned() {
                    Opened::Pinned(self.engine.provider(&location, options).await?)
                } else {
                    Opened::Live(self.engine.live_table(&location, options).await?)
                };
                // Another query may have opened it first: one for all, so that they look once.
                let mut opened = self.opened.lock();
                opened.entry(name.to_string()).or_insert(table).clone()
            }
        };
        match table {
            Opened::Live(live) => live.current().await,
            Opened::Pinned(provider) => Ok(provider),
        }
    }
}

#[async_trait]
impl SchemaProvider for DirectorySchema {
    fn table_names(&self) -> Vec<String> {
        let mut names = self.now(self.list());
        names.extend(self.made.table_names());
        names.sort_unstable();
        names.dedup();
        names
    }

    async fn table(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>, DataFusionError> {
        if let Some(made) = self.made.table(name).await? {
            return Ok(Some(made));
        }
        if let Some(live) = self.live(name) {
            match live.current().await {
                Err(Error::NotFound { .. }) => self.forget(name),
                current => return Ok(Some(Arc::new(current?))),
            }
        }
        if !self.has_versions(name).await? {
            self.forget(name);
            let named = self.named().await?.iter().any(|n| n == name);
            if !named || self.is_left_over(name).await? {
                return Ok(None);
            }
            // What only has the name of a table is opened all the same: the error says what it is.
        }
        Ok(Some(Arc::new(self.opened(name).await?)))
    }

    /// Known without opening the table, so that listing tables needs none of them whole.
    async fn table_type(&self, name: &str) -> Result<Option<TableType>, DataFusionError> {
        if let Some(made) = self.made.table_type(name).await? {
            return Ok(Some(made));
        }
        let is_table = self.has_versions(name).await?;
        Ok(is_table.then_some(TableType::Base))
    }

    fn register_table(
        &self,
        name: String,
        table: Arc<dyn TableProvider>,
    ) -> DFResult<Option<Arc<dyn TableProvider>>> {
        if self.is_table_now(&name) {
            // What was made or opened by its location is a table of the directory by now, and seen
            // as the directory's tables are.
            let live = table.downcast_ref::<LiveTable>();
            if live.is_some_and(|live| live.is_at(&self.location(&name), &self.options)) {
                return Ok(None);
            }
            return exec_err!("{name} is a table of {} already", display_uri(&self.uri));
        }
        self.made.register_table(name, table)
    }

    fn deregister_table(&self, name: &str) -> DFResult<Option<Arc<dyn TableProvider>>> {
        if let Some(made) = self.made.deregister_table(name)? {
            return Ok(Some(made));
        }
        if self.is_table_now(name) {
            return exec_err!(
                "{name} is a table of the directory {}: its files are not dropped from here",
                display_uri(&self.uri)
            );
        }
        Ok(None)
    }

    fn table_exist(&self, name: &str) -> bool {
        self.made.table_exist(name) || self.is_table_now(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect()
    }

    #[test]
    fn store_options_are_taken_with_and_without_prefix() {
        for key in ["aws.region", "region", "format.region", "aws_region"] {
            let parsed = parse_options("s3://b/t", &options(&[(key, "x")])).expect("known");
            assert_eq!(parsed.storage_options.len(), 1, "{key}");
        }
    }

    #[test]
    fn an_unknown_option_is_named_and_secrets_are_not() {
        let given = options(&[("aws.secret_acces_key", "hunter2"), ("aws.region", "x")]);
        let error = parse_options("s3://b/t", &given)
            .expect_err("misspelt")
            .to_string();
        assert!(error.contains("aws.secret_acces_key") && error.contains("system_columns"));
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn one_version_is_not_refreshed() {
        let refresh = |pairs: &[(&str, &str)]| {
            parse_options("/t", &options(pairs)).map(|o| (o.refresh, o.is_pinned()))
        };
        assert_eq!(refresh(&[]).expect("given"), (Refresh::Always, false));
        let every = Refresh::Every(std::time::Duration::from_secs(5));
        assert_eq!(
            refresh(&[("refresh", "5s")]).expect("given"),
            (every, false)
        );
        assert_eq!(
            refresh(&[("refresh", "off")]).expect("given"),
            (Refresh::Off, true)
        );
        let off = refresh(&[("refresh", "off"), ("version", "1")]);
        assert_eq!(off.expect("given"), (Refresh::Off, true));
        assert!(refresh(&[("refresh", "soon")]).is_err());
        for pinned in [("version", "1"), ("tag", "a"), ("timestamp", "2026-01-01")] {
            assert!(refresh(&[("refresh", "always"), pinned]).is_err());
            assert!(refresh(&[pinned]).expect("given").1);
        }
        let branch = refresh(&[("branch", "dev"), ("refresh", "always")]);
        assert!(!branch.expect("given").1);
    }

    #[test]
    fn references_exclude_each_other() {
        assert!(parse_options("/t", &options(&[("version", "1"), ("tag", "a")])).is_err());
        assert!(parse_options("/t", &options(&[("branch", "b"), ("tag", "a")])).is_err());
        assert!(parse_options("/t", &options(&[("version", "x")])).is_err());
        let both = parse_options("/t", &options(&[("branch", "b"), ("format.version", "3")]))
            .expect("a version of a branch");
        assert_eq!(both.reference.branch.as_deref(), Some("b"));
        assert_eq!(both.reference.at, VersionAt::Version(3));
    }
}
