//! Tree objects on storage: who owns them, where they lie, and fetching them whole.
//!
//! An object is named by a path relative to a dataset and by the dataset that owns it
//! ([`Owner`]). The [`BaseTable`] is the manifest's list of other datasets; [`TreeObjects`] turns a
//! reference into bytes with one request, checks the length the parent promised, and keeps decoded
//! objects in an [`ObjectCache`]: they are immutable, so a cached one never goes stale.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use lance::Dataset;
use lance_io::object_store::ObjectStore;
use lance_table::format::pb;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::leaf::Leaf;
use super::node::{Node, Root};
use crate::error::{Error, Result};
use crate::retry::retrying;

/// The dataset that owns a tree object, and so the files of a record that name no base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The dataset (or branch) that was opened.
    Current,
    /// The dataset that this id names in the manifest's base paths.
    Base(u32),
}

impl Owner {
    /// The base id that names this owner from the opened manifest; none for the dataset itself.
    pub fn base_id(self) -> Option<u32> {
        match self {
            Self::Current => None,
            Self::Base(id) => Some(id),
        }
    }

    /// The owner of a reference found in an object of this owner (spec, "Object references").
    pub(crate) fn of_reference(self, base_id: Option<u32>) -> Self {
        base_id.map_or(self, Self::Base)
    }
}

/// Limits that keep a hostile table from using more than it should.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Greatest height of a root's children. A tree of fan-out 2 over every possible fragment id
    /// has height 32, so the default of 32 refuses nothing sensible.
    pub max_height: u32,
    /// Greatest size of one tree object, in bytes. Default 1 GiB.
    pub max_object_bytes: u64,
    /// Greatest size of a manifest, in bytes. Default 8 GiB.
    pub max_manifest_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_height: 32,
            max_object_bytes: 1 << 30,
            max_manifest_bytes: 8 << 30,
        }
    }
}

#[derive(Debug, Clone)]
struct BaseEntry {
    path: String,
    is_dataset_root: bool,
    /// Store prefix and path, or why the location cannot be resolved.
    location: std::result::Result<String, String>,
}

/// The manifest's base paths, looked up by id and never by position.
#[derive(Debug, Clone)]
pub(crate) struct BaseTable {
    own_location: String,
    entries: HashMap<u32, BaseEntry>,
}

impl BaseTable {
    /// Builds the table; `locate` turns a base path into its resolved location.
    ///
    /// # Errors
    /// `base_id_duplicate` when two entries share an id.
    pub(crate) fn try_new(
        manifest: &str,
        own_location: String,
        base_paths: &[pb::BasePath],
        locate: impl Fn(&str) -> std::result::Result<String, String>,
    ) -> Result<Self> {
        let mut entries = HashMap::with_capacity(base_paths.len());
        for base in base_paths {
            let entry = BaseEntry {
                path: base.path.clone(),
                is_dataset_root: base.is_dataset_root,
                location: locate(&base.path),
            };
            if entries.insert(base.id, entry).is_some() {
                return Err(Error::corrupt(
                    manifest,
                    "base_id_duplicate",
                    "base path ids that are unique",
                    base.id,
                ));
            }
        }
        Ok(Self {
            own_location,
            entries,
        })
    }

    fn entry(&self, object: &str, id: u32) -> Result<&BaseEntry> {
        self.entries.get(&id).ok_or_else(|| {
            Error::corrupt(
                object,
                "unknown_base_id",
                "a base_id among the manifest's base paths",
                id,
            )
        })
    }

    /// Checks that a `base_id`, when set, is known.
    pub(crate) fn require(&self, object: &str, base_id: Option<u32>) -> Result<()> {
        base_id.map_or(Ok(()), |id| self.entry(object, id).map(|_| ()))
    }

    /// Checks that a `base_id`, when set, names a dataset root, as tree references must.
    pub(crate) fn require_dataset_root(&self, object: &str, base_id: Option<u32>) -> Result<()> {
        let Some(id) = base_id else { return Ok(()) };
        let entry = self.entry(object, id)?;
        if entry.is_dataset_root {
            return Ok(());
        }
        Err(Error::corrupt(
            object,
            "base_not_dataset_root",
            format!("base path {id} with is_dataset_root"),
            format!("file directory {}", entry.path),
        ))
    }

    /// Where a base lies: its path as the manifest writes it, its resolved location or nothing when
    /// that cannot be told, and whether it is a dataset's root.
    pub(crate) fn base(&self, id: u32) -> Option<(&str, Option<&str>, bool)> {
        let entry = self.entries.get(&id)?;
        let location = entry.location.as_deref().ok();
        Some((&entry.path, location, entry.is_dataset_root))
    }

    /// Ids of all bases.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> {
        self.entries.keys().copied()
    }

    /// The resolved location of `path` under `owner`: equal exactly for the same object.
    pub(crate) fn location(&self, owner: Owner, path: &str) -> Result<String> {
        let root = match owner {
            Owner::Current => &self.own_location,
            Owner::Base(id) => {
                let entry = self.entry(path, id)?;
                entry.location.as_ref().map_err(|why| {
                    Error::invalid(format!(
                        "base path {id} ({}) cannot be used: {why}",
                        entry.path
                    ))
                })?
            }
        };
        Ok(format!("{root}/{path}"))
    }
}

/// Checks the path of a tree object (spec, "Tree objects"; `spec/notes.md` 3).
///
/// # Errors
/// `path_empty`, `path_absolute`, `path_outside_bt`.
pub(crate) fn check_tree_path(object: &str, path: &str) -> Result<()> {
    let broken =
        |rule, expected: &str| Err(Error::corrupt(object, rule, expected, format!("{path:?}")));
    if path.is_empty() {
        return broken("path_empty", "a path");
    }
    if path.starts_with('/') || path.contains("://") {
        return broken("path_absolute", "a path relative to the dataset");
    }
    let mut segments = path.split('/');
    if segments.next() != Some("_bt") {
        return broken("path_outside_bt", "a path that begins with _bt/");
    }
    let mut depth = 0;
    for segment in segments {
        if matches!(segment, "" | "." | "..") {
            return broken("path_outside_bt", "a path without empty, . or .. segments");
        }
        depth += 1;
    }
    if depth == 0 {
        return broken("path_outside_bt", "a path that begins with _bt/");
    }
    Ok(())
}

/// What reading tree objects cost. Counts requests and bytes of tree objects only, not of manifests
/// or data files; an object served by the cache counts as opened but not as a request.
#[derive(Debug, Default)]
pub struct ReadStats {
    /// GET requests sent.
    pub requests: AtomicU64,
    /// Bytes received.
    pub bytes: AtomicU64,
    /// Interior nodes opened.
    pub nodes_opened: AtomicU64,
    /// Leaves opened.
    pub leaves_opened: AtomicU64,
    /// Opened objects that the cache already held.
    pub cache_hits: AtomicU64,
    /// Children that the wanted ranges did not touch, or whose summary was enough.
    pub children_skipped: AtomicU64,
    /// Fragment records resolved.
    pub fragments_resolved: AtomicU64,
}

impl ReadStats {
    pub(crate) fn add(counter: &AtomicU64, value: u64) {
        counter.fetch_add(value, Ordering::Relaxed);
    }

    /// The current values, in field order.
    pub fn snapshot(&self) -> ReadStatsSnapshot {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        ReadStatsSnapshot {
            requests: get(&self.requests),
            bytes: get(&self.bytes),
            nodes_opened: get(&self.nodes_opened),
            leaves_opened: get(&self.leaves_opened),
            cache_hits: get(&self.cache_hits),
            children_skipped: get(&self.children_skipped),
            fragments_resolved: get(&self.fragments_resolved),
        }
    }
}

/// [`ReadStats`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadStatsSnapshot {
    /// GET requests sent.
    pub requests: u64,
    /// Bytes received.
    pub bytes: u64,
    /// Interior nodes opened.
    pub nodes_opened: u64,
    /// Leaves opened.
    pub leaves_opened: u64,
    /// Opened objects that the cache already held.
    pub cache_hits: u64,
    /// Children skipped.
    pub children_skipped: u64,
    /// Fragment records resolved.
    pub fragments_resolved: u64,
}

/// A decoded tree object.
#[derive(Debug, Clone)]
enum Cached {
    Root(Arc<Root>),
    Node(Arc<Node>),
    Leaf(Arc<Leaf>),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct CacheKey {
    location: String,
    kind: Kind,
    /// Part of the key so that a reference with a wrong size is never served from a right one.
    size: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Root,
    Node,
    Leaf,
}

/// A reference to open, and whether to keep what is opened.
struct Wanted<'a> {
    kind: Kind,
    owner: Owner,
    path: &'a str,
    size: Option<u64>,
    keep: bool,
}

/// Decoded tree objects, bounded by their size in memory. Cheap to clone; share one between
/// snapshots, providers and sessions.
#[derive(Clone)]
pub struct ObjectCache {
    inner: moka::future::Cache<CacheKey, Cached>,
}

impl std::fmt::Debug for ObjectCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectCache")
            .field("entries", &self.inner.entry_count())
            .field("bytes", &self.inner.weighted_size())
            .finish()
    }
}

impl ObjectCache {
    /// A cache that holds at most `bytes` of decoded objects; zero turns caching off. One operation
    /// adds at most an eighth of that in leaves; of leaves that are not to be kept, each reader loads
    /// its own.
    pub fn new(bytes: u64) -> Self {
        let inner = moka::future::Cache::builder()
            .weigher(|key: &CacheKey, value: &Cached| {
                let bytes = key.location.len()
                    + match value {
                        Cached::Root(root) => root.memory_bytes(),
                        Cached::Node(node) => node.memory_bytes(),
                        Cached::Leaf(leaf) => leaf.memory_bytes(),
                    };
                u32::try_from(bytes).unwrap_or(u32::MAX)
            })
            .max_capacity(bytes)
            .build();
        Self { inner }
    }

    /// Bytes the cache holds now, about.
    pub fn size_bytes(&self) -> u64 {
        self.inner.weighted_size()
    }

    /// Waits until [`Self::size_bytes`] is exact.
    #[cfg(test)]
    pub(crate) async fn settle(&self) {
        self.inner.run_pending_tasks().await;
    }

    /// Bytes of leaves that one operation may add. A walk over a table that is larger than the cache
    /// would only push out what others use, and would find nothing when it came again.
    fn share_of_an_operation(&self) -> u64 {
        self.inner.policy().max_capacity().unwrap_or(u64::MAX) / 8
    }
}

/// The default cache size of a snapshot that is given none: 128 MiB.
pub(crate) const DEFAULT_CACHE_BYTES: u64 = 128 << 20;

/// Reads tree objects of one version, whole.
#[derive(Debug, Clone)]
struct Fetcher {
    dataset: Arc<Dataset>,
    limits: Limits,
}

impl Fetcher {
    /// Reads the object `path` of `owner`, which messages call `label`.
    async fn fetch(
        &self,
        owner: Owner,
        path: &str,
        label: &str,
        size: Option<u64>,
        stats: &ReadStats,
    ) -> Result<Bytes> {
        let (store, root) = dataset_root(&self.dataset, owner).await?;
        let location = if root.as_ref().is_empty() {
            path.to_string()
        } else {
            format!("{root}/{path}")
        };
        let location = Path::parse(&location)
            .map_err(|e| Error::corrupt(label, "path_outside_bt", "a path of valid segments", e))?;
        let bytes = retrying(|| {
            ReadStats::add(&stats.requests, 1);
            self.fetch_once(&store, &location, label, size)
        })
        .await?;
        ReadStats::add(&stats.bytes, bytes.len() as u64);
        Ok(bytes)
    }

    async fn fetch_once(
        &self,
        store: &ObjectStore,
        location: &Path,
        label: &str,
        size: Option<u64>,
    ) -> Result<Bytes> {
        let result = store
            .inner
            .get(location)
            .await
            .map_err(|e| Error::store(label, e))?;
        let stored = result.meta.size;
        self.check_size(label, size, stored)?;
        let bytes = result.bytes().await.map_err(|e| Error::store(label, e))?;
        self.check_size(label, size.or(Some(stored)), bytes.len() as u64)?;
        Ok(bytes)
    }

    fn check_size(&self, label: &str, expected: Option<u64>, found: u64) -> Result<()> {
        if let Some(expected) = expected
            && expected != found
        {
            return Err(Error::corrupt(
                label,
                "object_size_mismatch",
                format!("{expected} bytes"),
                format!("{found} bytes"),
            ));
        }
        if found > self.limits.max_object_bytes {
            return Err(Error::invalid(format!(
                "{label} has {found} bytes, more than the limit of {} (raise max_object_bytes to read it)",
                self.limits.max_object_bytes
            )));
        }
        Ok(())
    }
}

/// How an operation reads leaves.
#[derive(Debug, Default)]
pub(crate) struct LeafReading {
    /// Bytes of leaves that it added to the cache.
    pub kept: AtomicU64,
    /// Whether every column is decoded, also those that say nothing.
    pub whole: bool,
}

/// Tree objects of one version: the way from a reference to a decoded object.
#[derive(Debug)]
pub(crate) struct TreeObjects {
    fetcher: Fetcher,
    pub(crate) bases: BaseTable,
    cache: ObjectCache,
}

impl TreeObjects {
    pub(crate) fn new(
        dataset: Arc<Dataset>,
        bases: BaseTable,
        cache: ObjectCache,
        limits: Limits,
    ) -> Self {
        Self {
            fetcher: Fetcher { dataset, limits },
            bases,
            cache,
        }
    }

    /// What hostile objects are held to.
    pub(crate) fn limits(&self) -> &Limits {
        &self.fetcher.limits
    }

    /// Reads a whole object with one request.
    ///
    /// # Errors
    /// `object_size_mismatch` when the store's object is not `size` bytes long (spec, "Routing");
    /// `object_missing` when there is none; [`Error::InvalidInput`] over the size limit.
    pub(crate) async fn fetch(
        &self,
        owner: Owner,
        path: &str,
        size: Option<u64>,
        stats: &ReadStats,
    ) -> Result<Bytes> {
        let label = self.bases.location(owner, path)?;
        self.fetcher.fetch(owner, path, &label, size, stats).await
    }

    /// Opens the external root.
    pub(crate) async fn root(&self, path: &str, stats: &ReadStats) -> Result<Arc<Root>> {
        let decode = |label: String, bytes: Bytes| async move {
            Ok(Cached::Root(Arc::new(Root::decode(&label, &bytes)?)))
        };
        let wanted = Wanted {
            kind: Kind::Root,
            owner: Owner::Current,
            path,
            size: None,
            keep: true,
        };
        let opened = self.open(wanted, stats, decode);
        match opened.await?.0 {
            Cached::Root(root) => Ok(root),
            Cached::Node(_) | Cached::Leaf(_) => Err(Error::internal("cache kinds mixed up")),
        }
    }

    /// Opens an interior node.
    pub(crate) async fn node(
        &self,
        owner: Owner,
        path: &str,
        size: u64,
        stats: &ReadStats,
    ) -> Result<Arc<Node>> {
        ReadStats::add(&stats.nodes_opened, 1);
        let decode = |label: String, bytes: Bytes| async move {
            let node = off_thread(bytes.len(), move || Node::decode(&label, &bytes)).await?;
            Ok(Cached::Node(Arc::new(node)))
        };
        let wanted = Wanted {
            kind: Kind::Node,
            owner,
            path,
            size: Some(size),
            keep: true,
        };
        let opened = self.open(wanted, stats, decode);
        match opened.await?.0 {
            Cached::Node(node) => Ok(node),
            Cached::Root(_) | Cached::Leaf(_) => Err(Error::internal("cache kinds mixed up")),
        }
    }

    /// Opens a leaf. It is decoded on a blocking thread, and added to the cache unless the operation
    /// has added its share.
    pub(crate) async fn leaf(
        &self,
        owner: Owner,
        path: &str,
        size: u64,
        stats: &ReadStats,
        reading: &LeafReading,
    ) -> Result<Arc<Leaf>> {
        let LeafReading { kept, whole } = reading;
        let read = if *whole {
            Leaf::decode_whole
        } else {
            Leaf::decode
        };
        ReadStats::add(&stats.leaves_opened, 1);
        // Counted before it is loaded, so that a window of loads does not pass at once.
        let before = kept.fetch_add(size, Ordering::Relaxed);
        let keep = before < self.cache.share_of_an_operation();
        let decode = move |label: String, bytes: Bytes| async move {
            let leaf = off_thread(usize::MAX, move || read(&label, bytes)).await?;
            Ok(Cached::Leaf(Arc::new(leaf)))
        };
        let wanted = Wanted {
            kind: Kind::Leaf,
            owner,
            path,
            size: Some(size),
            keep,
        };
        let opened = self.open(wanted, stats, decode);
        match opened.await? {
            (Cached::Leaf(leaf), loaded) => {
                if keep && loaded {
                    kept.fetch_add(leaf.memory_bytes() as u64, Ordering::Relaxed);
                }
                kept.fetch_sub(size, Ordering::Relaxed);
                Ok(leaf)
            }
            (Cached::Root(_) | Cached::Node(_), _) => Err(Error::internal("cache kinds mixed up")),
        }
    }

    /// Takes an object from the cache, or reads and decodes it; and says whether it was this call that
    /// did. Concurrent misses of one object that is to be kept share one load.
    ///
    /// A load is a task of its own. Others wait for it, or for its turn to decode, and whoever began
    /// it may be a stream that nobody asks for more until just those others are done.
    async fn open<F>(
        &self,
        wanted: Wanted<'_>,
        stats: &ReadStats,
        decode: impl FnOnce(String, Bytes) -> F + Send + 'static,
    ) -> Result<(Cached, bool)>
    where
        F: Future<Output = Result<Cached>> + Send,
    {
        let Wanted {
            kind,
            owner,
            path,
            size,
            keep,
        } = wanted;
        let key = CacheKey {
            location: self.bases.location(owner, path)?,
            kind,
            size: size.unwrap_or_default(),
        };
        if let Some(found) = self.cache.inner.get(&key).await {
            ReadStats::add(&stats.cache_hits, 1);
            return Ok((found, false));
        }
        let (cache, fetcher) = (self.cache.inner.clone(), self.fetcher.clone());
        let (path, label) = (path.to_string(), key.location.clone());
        // The load that another call began does not run here.
        let spent = Arc::new((ReadStats::default(), AtomicBool::new(false)));
        let spending = Arc::clone(&spent);
        // Dropped, it stops the task.
        let mut task = JoinSet::new();
        task.spawn(async move {
            let load = async {
                let (stats, loaded) = spending.as_ref();
                loaded.store(true, Ordering::Relaxed);
                let bytes = fetcher.fetch(owner, &path, &label, size, stats).await?;
                decode(label, bytes).await
            };
            if keep {
                return cache.try_get_with(key, load).await;
            }
            load.await.map_err(Arc::new)
        });
        let loaded = task.join_next().await;
        let loaded_here = spent.1.load(Ordering::Relaxed);
        let spent = spent.0.snapshot();
        ReadStats::add(&stats.requests, spent.requests);
        ReadStats::add(&stats.bytes, spent.bytes);
        match loaded {
            Some(Ok(loaded)) => loaded
                .map(|object| (object, loaded_here))
                .map_err(|e: Arc<Error>| e.as_ref().clone()),
            Some(Err(e)) => Err(Error::internal(format!("a load ended: {e}"))),
            None => Err(Error::internal("a load that was never begun")),
        }
    }
}

/// The store and the root path of the dataset that `owner` names, from the shell's manifest.
pub(crate) async fn dataset_root(
    dataset: &Dataset,
    owner: Owner,
) -> Result<(Arc<ObjectStore>, Path)> {
    let context = || "cannot open the object store of a base path".to_string();
    let store = dataset
        .object_store(owner.base_id())
        .await
        .map_err(|e| Error::lance(context(), e))?;
    let path = match owner {
        Owner::Current => dataset.branch_location().path,
        Owner::Base(id) => {
            let base = dataset.manifest().base_paths.get(&id);
            let base = base.ok_or_else(|| Error::internal(format!("base path {id} vanished")))?;
            base.extract_path(dataset.session().store_registry())
                .map_err(|e| Error::lance(context(), e))?
        }
    };
    Ok((store, path))
}

/// Decoding over this many bytes leaves the async threads.
const INLINE_DECODE_BYTES: usize = 16 << 10;

#[expect(
    clippy::disallowed_methods,
    reason = "this module knows no DataFusion, and a decode once begun is short"
)]
pub(crate) async fn off_thread<T: Send + 'static>(
    bytes: usize,
    decode: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    /// One more at once than there are processors, so that none waits for the next. More would not be
    /// faster, and each would keep the memory of a decode, on a thread of its own.
    static DECODERS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| {
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Arc::new(Semaphore::new(threads + 1))
    });
    if bytes <= INLINE_DECODE_BYTES {
        return decode();
    }
    let permit = Arc::clone(&DECODERS).acquire_owned().await;
    let decode = move || {
        // Held to the end of the decode, also when nobody waits for it any more.
        let _permit = permit;
        decode()
    };
    tokio::task::spawn_blocking(decode)
        .await
        .map_err(|e| Error::internal(format!("a decoding task ended: {e}")))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_paths_stay_under_bt() {
        for good in ["_bt/leaf/a.lance", "_bt/x", "_bt/a/b/c", "_bt/..a"] {
            assert!(check_tree_path("x", good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "/_bt/x",
            "_bt",
            "_bt/",
            "_bt//x",
            "_bt/./x",
            "_bt/../x",
            "_btx/y",
            "./_bt/x",
            "data/_bt/x",
            "s3://b/_bt/x",
            "_bt/x/",
            "_bt/x/..",
        ] {
            assert!(check_tree_path("x", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bases_are_looked_up_by_id() {
        let base = |id, root| pb::BasePath {
            id,
            path: format!("/tables/{id}"),
            is_dataset_root: root,
            ..Default::default()
        };
        let locate = |p: &str| Ok(format!("file{p}"));
        let table = BaseTable::try_new(
            "m",
            "file/own".into(),
            &[base(4, true), base(0, false)],
            locate,
        )
        .expect("unique ids");
        assert!(table.require("x", Some(4)).is_ok());
        assert!(table.require("x", Some(1)).is_err());
        assert!(table.require_dataset_root("x", Some(4)).is_ok());
        assert!(table.require_dataset_root("x", Some(0)).is_err());
        assert_eq!(
            table.location(Owner::Base(4), "_bt/a").expect("known"),
            "file/tables/4/_bt/a"
        );
        let twice = [base(1, true), base(1, true)];
        let error = BaseTable::try_new("m", String::new(), &twice, locate).expect_err("twice");
        assert_eq!(error.corrupt_rule(), Some("base_id_duplicate"));
    }
}
