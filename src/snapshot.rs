//! One version of a table, opened: its shell dataset and its fragment catalog.
//!
//! ```text
//!   reference ── resolve ──► manifest location ── one read ──► manifest
//!                                                               ├─ shell: a Lance dataset without fragments
//!                                                               └─ catalog: flat list, or root + mutations
//! ```
//!
//! The shell carries the schema, base paths, config and indexes; the catalog finds fragments. Nothing
//! here is proportional to the table but the bytes of a flat manifest.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use arrow::datatypes::{Schema, SchemaRef};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use lance::Dataset;
use lance::dataset::builder::DatasetBuilder;
use lance::session::Session;
use lance_core::datatypes::BlobHandling;
use lance_io::object_store::{
    ObjectStore, ObjectStoreParams, StorageOptionsAccessor, WrappingObjectStore,
};
use lance_table::format::{IndexMetadata, Manifest, Transaction, pb};
use lance_table::io::commit::{
    CommitError, CommitHandler, ManifestLocation, ManifestNamingScheme, ManifestWriter,
    commit_handler_from_url,
};
use object_store::path::Path;

use crate::error::{Error, Result};
use crate::flat::FlatCatalog;
use crate::manifest::{
    ManifestFile, SplitManifest, manifest_with_fragments, read_manifest, read_sections,
    shell_manifest, split_manifest,
};
use crate::ranges::FragmentRanges;
use crate::resolve::{self, Located, Table, VersionRef};
use crate::tree::mutation::{Mutation, Pending};
use crate::tree::node::{ID_END, NodeContext, Root, check_mutations, decode_mutations};
use crate::tree::object::{
    BaseTable, DEFAULT_CACHE_BYTES, Limits, ObjectCache, Owner, ReadStats, TreeObjects,
};
use crate::tree::summary::{Counts, Tally};

/// How to open a table. Plain settings; everything has a default.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Which version.
    pub reference: VersionRef,
    /// Options of the object store (credentials, endpoint, region), as Lance takes them. Of local
    /// files ranges less than 16 KiB apart are read at once; `block_size`, in bytes, is another number.
    pub storage_options: HashMap<String, String>,
    /// Limits on what a table may make us read.
    pub limits: Limits,
    /// The cache of tree objects; share one between snapshots and sessions. Default: 128 MiB of its
    /// own.
    pub cache: Option<ObjectCache>,
    /// The Lance session, with its caches of file metadata and indexes. Default: one of its own.
    pub session: Option<Arc<Session>>,
    /// Wraps every object store that is opened: for counting, throttling and fault injection.
    pub object_store_wrapper: Option<Arc<dyn WrappingObjectStore>>,
}

impl OpenOptions {
    /// Opens this version.
    pub fn with_reference(mut self, reference: VersionRef) -> Self {
        self.reference = reference;
        self
    }

    /// Uses this cache of tree objects.
    pub fn with_cache(mut self, cache: ObjectCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Uses this Lance session.
    pub fn with_session(mut self, session: Arc<Session>) -> Self {
        self.session = Some(session);
        self
    }

    /// Adds options of the object store.
    pub fn with_storage_options(mut self, options: HashMap<String, String>) -> Self {
        self.storage_options.extend(options);
        self
    }

    /// The block size of the store of `uri`; nothing for Lance's default or what the options say.
    fn block_size(&self, uri: &str) -> Option<usize> {
        let chosen = self
            .storage_options
            .keys()
            .any(|key| key.eq_ignore_ascii_case("block_size"));
        (resolve::is_local(uri) && !chosen).then_some(LOCAL_BLOCK_BYTES)
    }

    /// How the store of `uri` is opened.
    pub(crate) fn store_params(&self, uri: &str) -> ObjectStoreParams {
        let accessor = (!self.storage_options.is_empty()).then(|| {
            Arc::new(StorageOptionsAccessor::with_static_options(
                self.storage_options.clone(),
            ))
        });
        ObjectStoreParams {
            storage_options_accessor: accessor,
            object_store_wrapper: self.object_store_wrapper.clone(),
            block_size: self.block_size(uri),
            ..Default::default()
        }
    }
}

/// Ranges of a local file that are closer together than this are read at once, in bytes; so much of
/// its end is read first. Lance's own default, 4 KiB, reads the parts of a small page one by one, and
/// each costs more to ask for than the bytes between them.
const LOCAL_BLOCK_BYTES: usize = 16 << 10;

/// How a version keeps its fragment records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// In the manifest.
    Flat,
    /// In a fragment metadata tree.
    Tree,
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Flat => "flat",
            Self::Tree => "tree",
        })
    }
}

/// The tree of one version: its root, held for as long as the snapshot is.
#[derive(Debug)]
pub(crate) struct TreeCatalog {
    pub objects: TreeObjects,
    pub root: Arc<Root>,
    pub since_root: Vec<Arc<Mutation>>,
    /// Every mutation buffered in the root and since, by fragment and sequence.
    pub pending: Vec<Pending>,
    /// Path of the external root; none when it is inline.
    pub root_path: Option<String>,
    /// `FragmentTree.next_action_sequence`.
    pub next_sequence: u64,
    /// The manifest, for messages.
    pub label: String,
    pub max_fragment_id: Option<u32>,
    /// Derived from the root: never more than a sum over what is in memory.
    tally: Tally,
}

impl TreeCatalog {
    /// The version's counts (spec, "Mutations").
    pub(crate) fn counts(&self) -> Result<Counts> {
        self.tally.counts(&self.label)
    }

    /// The message of this tree, with `next_sequence` for its next mutation.
    pub(crate) fn encode_with_next(&self, next_sequence: u64) -> Result<pb::FragmentTree> {
        let root = match &self.root_path {
            None => pb::fragment_tree::Root::InlineRoot(self.root.encode()),
            Some(path) => pb::fragment_tree::Root::RootUuid(root_uuid(path)?),
        };
        Ok(pb::FragmentTree {
            root: Some(root),
            mutations_since_root: self.since_root.iter().map(|m| m.encode()).collect(),
            next_action_sequence: next_sequence,
        })
    }

    /// The context of the root, for checks.
    pub(crate) fn root_context<'a>(&'a self, object: &'a str) -> NodeContext<'a> {
        NodeContext {
            object,
            owner: Owner::Current,
            range: 0..ID_END,
            bases: &self.objects.bases,
            max_fragment_id: self.max_fragment_id,
            next_sequence: self.root.next_sequence,
        }
    }
}

/// Where a version's fragments are found.
#[derive(Debug)]
pub(crate) enum Catalog {
    Flat(FlatCatalog),
    Tree(Box<TreeCatalog>),
}

/// One version of a Lance table, in either layout. Cheap to share, immutable.
#[derive(Debug)]
pub struct Snapshot {
    uri: String,
    location: ManifestLocation,
    head: pb::Manifest,
    shell: Arc<Dataset>,
    shell_manifest: Bytes,
    handler: Arc<dyn CommitHandler>,
    params: ObjectStoreParams,
    schema: SchemaRef,
    pub(crate) catalog: Catalog,
    open: OpenCost,
    position: u64,
    sections: Option<Bytes>,
    /// Set when a reader found that the version was removed.
    pub(crate) gone: AtomicBool,
}

/// What opening a snapshot read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenCost {
    /// Requests for the manifest and the root, without those that found the version.
    pub requests: u64,
    /// Bytes of manifest and root.
    pub bytes: u64,
    /// Size of the manifest file.
    pub manifest_bytes: u64,
}

impl Snapshot {
    /// Opens a version of the table at `uri`.
    ///
    /// Requests: those that resolve the version, one for the manifest's tail when it fits, one for
    /// an external root.
    ///
    /// # Errors
    /// [`Error::NotFound`] with what exists nearby, [`Error::Corrupt`] for a broken manifest or
    /// root, [`Error::Unsupported`] for feature flags the linked Lance does not know.
    pub async fn open(uri: &str, options: OpenOptions) -> Result<Arc<Self>> {
        let uri = resolve::normalize_uri(uri)?;
        let params = options.store_params(&uri);
        let session = options.session.clone().unwrap_or_default();
        let context = || format!("cannot open {uri}");
        let (store, base) =
            ObjectStore::from_uri_and_params(session.store_registry(), &uri, &params)
                .await
                .map_err(|e| Error::lance(context(), e))?;
        let handler = commit_handler_from_url(&uri, &Some(params.clone()))
            .await
            .map_err(|e| Error::lance(context(), e))?;
        let table = Table {
            uri: uri.clone(),
            base,
            store,
            handler,
            limits: options.limits,
        };
        let located = table.clone().locate(&options.reference).await?;
        Self::open_located(table, located, params, session, &options).await
    }

    /// Opens the version that was found, without another look.
    pub(crate) async fn open_at(
        located: Located,
        handler: Arc<dyn CommitHandler>,
        mut params: ObjectStoreParams,
        session: Arc<Session>,
        options: &OpenOptions,
    ) -> Result<Arc<Self>> {
        let Located {
            uri,
            base,
            store,
            location,
            tail,
        } = located;
        let file = read_manifest(&store, &location, tail, &options.limits).await?;
        let SplitManifest {
            head,
            tree,
            mut flat,
        } = split_manifest(&file.label, &file.message)?;
        if head.writer_version.is_none() {
            // Writers that did not name themselves wrote wrong row counts; Lance does not use them
            // either. The records of a tree are recounted before they come into it.
            flat.distrust_row_counts();
        }
        if head.version != location.version {
            return Err(Error::corrupt(
                file.label.as_str(),
                "manifest_version",
                format!("version {}, as the file is named", location.version),
                head.version,
            ));
        }
        if !head.base_paths.iter().all(|b| resolve::is_local(&b.path)) {
            // Lance opens the stores of other bases as it opens this one.
            params.block_size = None;
        }
        let shell_manifest = shell_manifest(&head);
        let shell = load_dataset(
            &uri,
            &shell_manifest,
            &location,
            &handler,
            &params,
            &session,
        )
        .await
        .map_err(|e| Error::lance(format!("cannot open version {} of {uri}", head.version), e))?;
        let shell = Arc::new(shell);
        let schema = scan_schema(&shell);
        let stats = ReadStats::default();
        let catalog = match tree {
            None => Catalog::Flat(flat),
            Some(tree) => {
                let own = format!("{}/{base}", store.store_prefix);
                let objects = TreeObjects::new(
                    Arc::clone(&shell),
                    base_table(&file, &head, own, &session, &params)?,
                    options
                        .cache
                        .clone()
                        .unwrap_or_else(|| ObjectCache::new(DEFAULT_CACHE_BYTES)),
                    options.limits,
                );
                let tree = open_tree(&file, &head, tree, objects, &stats).await?;
                Catalog::Tree(Box::new(tree))
            }
        };
        let tree_cost = stats.snapshot();
        Ok(Arc::new(Self {
            uri,
            location,
            head,
            shell,
            shell_manifest,
            handler,
            params,
            schema,
            catalog,
            open: OpenCost {
                requests: file.requests + tree_cost.requests,
                bytes: file.bytes + tree_cost.bytes,
                manifest_bytes: file.file_size,
            },
            position: file.position,
            sections: file.sections,
            gone: AtomicBool::new(false),
        }))
    }

    /// Where the table lies.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The version number.
    pub fn version(&self) -> u64 {
        self.head.version
    }

    /// When the version was written.
    pub fn timestamp(&self) -> DateTime<Utc> {
        self.shell.manifest().timestamp()
    }

    /// How the version keeps its fragment records.
    pub fn layout(&self) -> Layout {
        match self.catalog {
            Catalog::Flat(_) => Layout::Flat,
            Catalog::Tree(_) => Layout::Tree,
        }
    }

    /// The table's columns as a scan gives them, without system columns.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Counts of the whole version, from what opening it read. Nothing when a flat manifest leaves
    /// out row counts, as old writers did.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the derived counts are impossible.
    pub fn counts(&self) -> Result<Option<Counts>> {
        match &self.catalog {
            Catalog::Flat(flat) => Ok(flat.counts(&FragmentRanges::all())),
            Catalog::Tree(tree) => tree.counts().map(Some),
        }
    }

    /// Number of fragments.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the derived count is impossible.
    pub fn num_fragments(&self) -> Result<u64> {
        match &self.catalog {
            Catalog::Flat(flat) => Ok(flat.len() as u64),
            Catalog::Tree(tree) => Ok(tree.counts()?.fragments),
        }
    }

    /// The greatest fragment id ever allocated, or in a flat version without one the greatest
    /// present.
    pub fn max_fragment_id(&self) -> Option<u32> {
        match &self.catalog {
            Catalog::Flat(flat) => self.head.max_fragment_id.max(flat.max_id()),
            Catalog::Tree(_) => self.head.max_fragment_id,
        }
    }

    /// Whether row ids are stable, so that `_rowid` is not an address.
    pub fn uses_stable_row_ids(&self) -> bool {
        self.shell.manifest().uses_stable_row_ids()
    }

    /// What opening read.
    pub fn open_cost(&self) -> OpenCost {
        self.open
    }

    /// A Lance dataset with this version's schema, config, base paths and indexes, and no fragments.
    pub fn shell(&self) -> &Arc<Dataset> {
        &self.shell
    }

    /// Everything in the manifest but fragments and tree.
    pub(crate) fn head(&self) -> &pb::Manifest {
        &self.head
    }

    pub(crate) fn location(&self) -> &ManifestLocation {
        &self.location
    }

    pub(crate) fn handler(&self) -> &Arc<dyn CommitHandler> {
        &self.handler
    }

    /// The sections in front of the manifest message. No I/O when opening read them.
    pub(crate) async fn sections(&self) -> Result<Bytes> {
        if let Some(sections) = &self.sections {
            return Ok(sections.clone());
        }
        let store = self
            .shell
            .object_store(None)
            .await
            .map_err(|e| Error::lance("cannot open the table's object store", e))?;
        read_sections(&store, &self.location, self.position).await
    }

    /// The manifest message of this version with just `fragments`, for Lance.
    pub(crate) fn manifest_of<'a>(
        &self,
        fragments: impl IntoIterator<Item = &'a pb::DataFragment>,
    ) -> Vec<u8> {
        manifest_with_fragments(&self.shell_manifest, fragments)
    }

    pub(crate) fn params(&self) -> &ObjectStoreParams {
        &self.params
    }

    /// A Lance dataset of this version that holds just `fragments`, so that Lance can scan them with
    /// everything it has. No I/O but for the schemas of dictionary columns.
    pub(crate) async fn dataset_with(
        &self,
        fragments: impl IntoIterator<Item = &pb::DataFragment>,
    ) -> Result<Dataset> {
        let manifest = manifest_with_fragments(&self.shell_manifest, fragments);
        load_dataset(
            &self.uri,
            &manifest,
            &self.location,
            &self.handler,
            &self.params,
            &self.shell.session(),
        )
        .await
        .map_err(|e| {
            Error::lance(
                format!(
                    "cannot use fragments of version {} of {}",
                    self.version(),
                    self.uri
                ),
                e,
            )
        })
    }
}

pub(crate) async fn load_dataset(
    uri: &str,
    manifest: &[u8],
    location: &ManifestLocation,
    handler: &Arc<dyn CommitHandler>,
    params: &ObjectStoreParams,
    session: &Arc<Session>,
) -> lance::Result<Dataset> {
    DatasetBuilder::from_uri(uri)
        .with_store_params(params.clone())
        .with_session(Arc::clone(session))
        .with_commit_handler(Arc::new(PinnedHandler {
            location: location.clone(),
            inner: Arc::clone(handler),
        }))
        .with_serialized_manifest(manifest)?
        .load()
        .await
}

/// The schema a Lance scan of all columns gives, so that ours is the same to the last metadata.
/// Planning such a scan to ask it would take longer than all the rest of opening a version.
fn scan_schema(shell: &Arc<Dataset>) -> SchemaRef {
    let all = shell
        .full_projection()
        .with_blob_handling(BlobHandling::default())
        .to_bare_schema();
    Arc::new(Schema::new_with_metadata(
        Schema::from(&all).fields().clone(),
        Schema::from(shell.schema()).metadata().clone(),
    ))
}

pub(crate) fn base_table(
    file: &ManifestFile,
    head: &pb::Manifest,
    own_location: String,
    session: &Arc<Session>,
    params: &ObjectStoreParams,
) -> Result<BaseTable> {
    let registry = session.store_registry();
    BaseTable::try_new(&file.label, own_location, &head.base_paths, |uri| {
        let prefix = registry
            .calculate_object_store_prefix(uri, params.storage_options())
            .map_err(|e| e.to_string())?;
        let path = ObjectStore::extract_path_from_uri(Arc::clone(&registry), uri)
            .map_err(|e| e.to_string())?;
        Ok(format!("{prefix}/{path}"))
    })
}

/// Opens the tree: at most one request, for an external root. Everything decoded here is checked
/// here, whether or not a query will follow it (`spec/notes.md` 22).
pub(crate) async fn open_tree(
    file: &ManifestFile,
    head: &pb::Manifest,
    tree: pb::FragmentTree,
    objects: TreeObjects,
    stats: &ReadStats,
) -> Result<TreeCatalog> {
    let label = file.label.as_str();
    let (root, root_path) = match tree.root {
        None => {
            return Err(Error::corrupt(
                label,
                "root_missing",
                "exactly one of inline_root and root_uuid",
                "neither",
            ));
        }
        Some(pb::fragment_tree::Root::InlineRoot(root)) => {
            if !tree.mutations_since_root.is_empty() {
                return Err(Error::corrupt(
                    label,
                    "inline_with_mutations_since_root",
                    "no mutations_since_root beside an inline root",
                    tree.mutations_since_root.len(),
                ));
            }
            (Arc::new(Root::from_message(label, root)?), None)
        }
        Some(pb::fragment_tree::Root::RootUuid(uuid)) => {
            let path = root_path(label, &uuid)?;
            (objects.root(&path, stats).await?, Some(path))
        }
    };
    if tree.next_action_sequence < root.next_sequence {
        return Err(Error::corrupt(
            label,
            "tree_next_below_root_next",
            format!(
                "a next_action_sequence of at least {}, the root's",
                root.next_sequence
            ),
            tree.next_action_sequence,
        ));
    }
    let height = root.child_height().unwrap_or_default();
    if height > GREATEST_HEIGHT {
        return Err(Error::corrupt(
            label,
            "height_mismatch",
            format!("a height of at most {GREATEST_HEIGHT}: there are no ids for more leaves"),
            height,
        ));
    }
    if height > objects.limits().max_height {
        return Err(Error::invalid(format!(
            "{label}: the tree has height {height}, more than the limit of {} (raise max_height)",
            objects.limits().max_height
        )));
    }
    let since_root = decode_mutations(label, tree.mutations_since_root)?;
    let mut tally = root.node.tally();
    for mutation in &since_root {
        tally += mutation.delta;
    }
    let all = root.node.buffer.iter().chain(&since_root);
    let mut pending: Vec<_> = all.map(|m| Pending::new(m, Owner::Current)).collect();
    pending.sort_unstable_by_key(Pending::key);
    let catalog = TreeCatalog {
        pending,
        root,
        since_root,
        root_path,
        next_sequence: tree.next_action_sequence,
        label: label.to_string(),
        max_fragment_id: head.max_fragment_id,
        tally,
        objects,
    };
    check_tree(&catalog)?;
    Ok(catalog)
}

fn check_tree(catalog: &TreeCatalog) -> Result<()> {
    let own = catalog
        .root_path
        .as_deref()
        .map(|path| catalog.objects.bases.location(Owner::Current, path))
        .transpose()?;
    let object = own.as_deref().unwrap_or(&catalog.label);
    let context = catalog.root_context(object);
    catalog.root.node.check(&context)?;
    if catalog.max_fragment_id.is_none() && !catalog.root.node.children.is_empty() {
        return Err(Error::corrupt(
            object,
            "max_fragment_id_absent",
            "no fragment while max_fragment_id is absent",
            format!("{} children", catalog.root.node.children.len()),
        ));
    }
    let since = NodeContext {
        object: &catalog.label,
        ..context
    };
    check_mutations(
        &catalog.since_root,
        &since,
        catalog.root.next_sequence..catalog.next_sequence,
    )
}

/// An interior has two children at least and every leaf a fragment of its own, of which there can be
/// 2^32.
const GREATEST_HEIGHT: u32 = 32;

/// The path of an external root (spec, "Snapshot").
pub(crate) fn root_path(label: &str, uuid: &[u8]) -> Result<String> {
    let uuid = uuid::Uuid::from_slice(uuid).map_err(|_| {
        Error::corrupt(
            label,
            "root_uuid_length",
            "a root_uuid of 16 bytes",
            format!("{} bytes", uuid.len()),
        )
    })?;
    Ok(format!("_bt/root/{}.root", uuid.hyphenated()))
}

/// The name of the external root at `path`, as a manifest stores it.
pub(crate) fn root_uuid(path: &str) -> Result<Vec<u8>> {
    path.strip_prefix("_bt/root/")
        .and_then(|p| p.strip_suffix(".root"))
        .and_then(|u| uuid::Uuid::parse_str(u).ok())
        .map(|uuid| uuid.as_bytes().to_vec())
        .ok_or_else(|| Error::internal(format!("{path} names no root")))
}

/// A commit handler that knows where one version lies, so that making a dataset of it asks nobody.
/// Everything else goes to the table's own handler.
#[derive(Debug)]
struct PinnedHandler {
    location: ManifestLocation,
    inner: Arc<dyn CommitHandler>,
}

#[async_trait::async_trait]
impl CommitHandler for PinnedHandler {
    fn is_version_not_found_definitive(&self) -> bool {
        self.inner.is_version_not_found_definitive()
    }

    fn propagate_commit_error_after_success(&self) -> bool {
        self.inner.propagate_commit_error_after_success()
    }

    async fn resolve_latest_location(
        &self,
        base_path: &Path,
        object_store: &ObjectStore,
    ) -> lance::Result<ManifestLocation> {
        self.inner
            .resolve_latest_location(base_path, object_store)
            .await
    }

    async fn resolve_version_location(
        &self,
        base_path: &Path,
        version: u64,
        object_store: &dyn object_store::ObjectStore,
    ) -> lance::Result<ManifestLocation> {
        if version == self.location.version {
            return Ok(self.location.clone());
        }
        self.inner
            .resolve_version_location(base_path, version, object_store)
            .await
    }

    async fn commit(
        &self,
        manifest: &mut Manifest,
        indices: Option<Vec<IndexMetadata>>,
        base_path: &Path,
        object_store: &ObjectStore,
        manifest_writer: ManifestWriter,
        naming_scheme: ManifestNamingScheme,
        transaction: Option<Transaction>,
    ) -> std::result::Result<ManifestLocation, CommitError> {
        // A snapshot is for reading; a native commit through it would lose every other fragment.
        let _ = (
            manifest,
            indices,
            base_path,
            object_store,
            manifest_writer,
            naming_scheme,
            transaction,
        );
        Err(CommitError::OtherError(lance::Error::not_supported(
            "a fragtree snapshot is read-only: write to the table through Lance or convert it",
        )))
    }
}
