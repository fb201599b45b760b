//! What native Lance sees of a tree table while it writes: flat versions that hold just the
//! fragments a change can touch.
//!
//! ```text
//!   Lance's writer ── commit handler ──► location of a view ──┐
//!        │                                                    ▼
//!        └──── object store ── `_versions/view-…` ──► served from memory: the version's own
//!                     │                               sections and schema, the fragments in scope
//!                     └── anything else ──► the table's store
//! ```
//!
//! Lance opens, reads newer versions and resolves conflicts by itself, on any version, and never
//! meets a tree. A view lies at a path that only this process knows, so no real manifest is ever
//! masked; and through this store nothing can be deleted that it did not write.
//!
//! The store also lets Lance go on while a transaction file is on its way: the manifest, which holds
//! the transaction as well, goes out beside it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::common::runtime::SpawnedTask;
use futures::future::{BoxFuture, Shared as SharedFuture};
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt, TryStreamExt};
use lance_io::object_store::WrappingObjectStore;
use lance_table::format::{IndexMetadata, pb};
use lance_table::io::commit::ManifestLocation;
use object_store::list::PaginatedListStore;
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, RenameOptions,
};
use parking_lot::Mutex;
use prost::Message;

use crate::error::{Error, Result};
use crate::manifest::{FOOTER_BYTES, frame_manifest};
use crate::ranges::FragmentRanges;
use crate::resolve::VersionRef;
use crate::snapshot::{OpenOptions, Snapshot};
use crate::tree::object::ReadStats;
use crate::tree_scan::{ResolvedFragment, WalkOptions, WalkState};

/// Tree objects read at a time. More than a scan's: nothing is handed on before all are there, so on a
/// store that answers slowly each round counts.
const WINDOW: usize = 128;

/// Batches of resolved fragments that are made into records at a time.
const RECORDS_AT_ONCE: usize = 4;

/// One version as Lance sees it.
#[derive(Debug)]
pub(crate) struct View {
    /// The version itself.
    pub snapshot: Arc<Snapshot>,
    /// The complete records in scope, by fragment id, every file's base named.
    pub records: BTreeMap<u64, pb::DataFragment>,
    /// The manifest file that Lance reads.
    file: Bytes,
    /// Where in the file its message lies.
    message: Range<usize>,
}

impl View {
    async fn new(
        snapshot: Arc<Snapshot>,
        scope: FragmentRanges,
        stats: &Arc<ReadStats>,
    ) -> Result<Self> {
        let mut records = Vec::new();
        if !scope.is_empty() {
            let state = WalkState::with_stats(Arc::clone(stats));
            let options = WalkOptions { window: WINDOW };
            let mut batches = snapshot
                .fragments(scope, &options, &state)
                .map(|batch| async move {
                    let batch = batch?;
                    let build = async move { batch.iter().map(ResolvedFragment::record).collect() };
                    SpawnedTask::spawn(build)
                        .await
                        .map_err(|e| Error::internal(format!("a view's task ended: {e}")))?
                })
                .buffered(RECORDS_AT_ONCE);
            while let Some(batch) = batches.try_next().await? {
                let batch: Vec<pb::DataFragment> = batch;
                records.extend(batch.into_iter().map(|record| (record.id, record)));
            }
        }
        let records = BTreeMap::from_iter(records);
        let message = snapshot.manifest_of(records.values());
        let file = frame_manifest(&snapshot.sections().await?, &message)?;
        let end = file.len().saturating_sub(FOOTER_BYTES);
        Ok(Self {
            snapshot,
            records,
            message: end.saturating_sub(message.len())..end,
            file,
        })
    }

    /// The manifest message with the records.
    pub(crate) fn message(&self) -> &[u8] {
        self.file.get(self.message.clone()).unwrap_or_default()
    }
}

impl View {
    /// The indexes of the version, from what opening it read.
    pub(crate) fn indices(&self) -> Result<Vec<IndexMetadata>> {
        read_indices(&self.snapshot, &self.file)
    }
}

/// The indexes of a version.
pub(crate) async fn indices_of(snapshot: &Snapshot) -> Result<Vec<IndexMetadata>> {
    read_indices(snapshot, &snapshot.sections().await?)
}

/// Decodes the index section, which lies in front of the message.
fn read_indices(snapshot: &Snapshot, file: &[u8]) -> Result<Vec<IndexMetadata>> {
    let Some(at) = snapshot.head().index_section else {
        return Ok(Vec::new());
    };
    let label = snapshot.location().path.as_ref();
    let broken = |found: String| {
        Error::corrupt(
            label,
            "index_section",
            "an index section in the file",
            found,
        )
    };
    let start = usize::try_from(at).map_err(|_| broken(at.to_string()))?;
    let length = file
        .get(start..)
        .and_then(|rest| rest.first_chunk::<4>())
        .map(|b| u32::from_le_bytes(*b) as usize)
        .ok_or_else(|| broken(at.to_string()))?;
    let section = start
        .checked_add(4)
        .and_then(|from| file.get(from..from.checked_add(length)?))
        .ok_or_else(|| broken(format!("{length} bytes at {at}")))?;
    let section = pb::IndexSection::decode(section).map_err(|e| broken(e.to_string()))?;
    let indices = section.indices.into_iter().map(IndexMetadata::try_from);
    indices
        .collect::<lance::Result<_>>()
        .map_err(|e| Error::lance(format!("cannot read the indexes of {label}"), e))
}

/// The views of one write: every version it meets, through one scope.
#[derive(Debug)]
pub(crate) struct Views {
    id: u64,
    uri: String,
    options: OpenOptions,
    scope: Mutex<FragmentRanges>,
    /// What the write has read of the tree.
    stats: Arc<ReadStats>,
    shared: Arc<Shared>,
    /// The view Lance starts from.
    first: Arc<View>,
    views: Mutex<BTreeMap<Key, Making>>,
}

/// A view that is there or on its way.
type Making = SharedFuture<BoxFuture<'static, Result<Arc<View>>>>;

/// Which view of a version: with the fragments in scope, or of its transaction alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    version: u64,
    bare: bool,
}

impl Views {
    /// The view of `version`, made when it is first asked for.
    pub(crate) async fn view(self: &Arc<Self>, version: u64) -> Result<Arc<View>> {
        self.get(Key {
            version,
            bare: false,
        })
        .await
    }

    /// A view is made by a task of its own: several ask for it, and the first may be part of a stream
    /// that Lance does not poll until another has it.
    async fn get(self: &Arc<Self>, key: Key) -> Result<Arc<View>> {
        let making = {
            let mut views = self.views.lock();
            let other = Key {
                bare: !key.bare,
                ..key
            };
            let other = views.get(&other).cloned();
            let begin = || {
                let own = Arc::clone(self);
                let task = SpawnedTask::spawn(async move { own.make(key, other).await });
                let made = async move {
                    task.await
                        .map_err(|e| Error::internal(format!("a view's task ended: {e}")))?
                };
                made.boxed().shared()
            };
            views.entry(key).or_insert_with(begin).clone()
        };
        let made = making.clone().await;
        if made.is_err() {
            // Whoever asks again may have more luck.
            let mut views = self.views.lock();
            if views.get(&key).is_some_and(|m| m.ptr_eq(&making)) {
                views.remove(&key);
            }
        }
        made
    }

    /// Makes a view. `other` is the other view of the same version.
    async fn make(&self, key: Key, other: Option<Making>) -> Result<Arc<View>> {
        let other = match other {
            Some(other) => other.await.ok(),
            None => None,
        };
        let snapshot = match other {
            Some(view) => Arc::clone(&view.snapshot),
            None => {
                let reference = VersionRef::version(key.version);
                let options = self.options.clone().with_reference(reference);
                Box::pin(Snapshot::open(&self.uri, options)).await?
            }
        };
        let scope = if key.bare {
            FragmentRanges::empty()
        } else {
            self.scope.lock().clone()
        };
        let view = View::new(snapshot, scope, &self.stats).await?;
        Ok(Arc::new(view))
    }

    /// What the write has read of the tree: for the views, and where it counts itself.
    pub(crate) fn stats(&self) -> &ReadStats {
        &self.stats
    }

    /// Waits for the transaction file `name`, if it is still on its way, and says what became of it.
    pub(crate) fn transaction_file(&self, name: &str) -> Pending {
        let pending = self.shared.pending.lock().remove(name);
        pending.unwrap_or_else(|| futures::future::ready(Ok(())).boxed().shared())
    }

    /// Makes later versions show `fragments` too: those this write created.
    pub(crate) fn widen(&self, fragments: impl IntoIterator<Item = u64>) {
        let ranges = fragments.into_iter().map(|id| id..id + 1);
        let mut scope = self.scope.lock();
        *scope = scope.union(&FragmentRanges::from_ranges(ranges));
    }

    /// Where Lance finds the view of the version at `location`.
    pub(crate) async fn locate(
        self: &Arc<Self>,
        location: ManifestLocation,
    ) -> Result<ManifestLocation> {
        self.locate_as(location, false).await
    }

    /// The same, for a version of which Lance reads nothing but the transaction.
    pub(crate) async fn locate_bare(
        self: &Arc<Self>,
        location: ManifestLocation,
    ) -> Result<ManifestLocation> {
        self.locate_as(location, true).await
    }

    async fn locate_as(
        self: &Arc<Self>,
        location: ManifestLocation,
        bare: bool,
    ) -> Result<ManifestLocation> {
        let version = location.version;
        let view = self.get(Key { version, bare }).await?;
        Ok(ManifestLocation {
            size: Some(view.file.len() as u64),
            ..self.location_at(location, bare)
        })
    }

    /// Where Lance will find the view of a version that was just published, without making it.
    pub(crate) fn promise(&self, location: ManifestLocation) -> ManifestLocation {
        ManifestLocation {
            size: None,
            ..self.location_at(location, false)
        }
    }

    fn location_at(&self, location: ManifestLocation, bare: bool) -> ManifestLocation {
        let mut parts: Vec<_> = location.path.parts().collect();
        parts.pop();
        let directory: Path = parts.into_iter().collect();
        let kind = if bare { BARE } else { FULL };
        let name = format!("{kind}{}-{}.manifest", self.id, location.version);
        ManifestLocation {
            // Part of the key of Lance's caches: another write's view is another object.
            e_tag: Some(name.clone()),
            path: directory.join(name),
            ..location
        }
    }

    /// The view Lance starts from.
    pub(crate) fn first(&self) -> &Arc<View> {
        &self.first
    }

    /// Where Lance finds the view it starts from.
    pub(crate) fn first_location(&self) -> ManifestLocation {
        ManifestLocation {
            size: Some(self.first.file.len() as u64),
            ..self.location_at(self.first.snapshot.location().clone(), false)
        }
    }
}

const FULL: &str = "view-";
const BARE: &str = "transaction-of-";

/// The number of the write and the view that a path names.
fn parse_view(path: &Path) -> Option<(u64, Key)> {
    let name = path.filename()?.strip_suffix(".manifest")?;
    let (bare, name) = match name.strip_prefix(FULL) {
        Some(rest) => (false, rest),
        None => (true, name.strip_prefix(BARE)?),
    };
    let (id, version) = name.split_once('-')?;
    let version = version.parse().ok()?;
    Some((id.parse().ok()?, Key { version, bare }))
}

/// The end of a put that goes on by itself.
pub(crate) type Pending = SharedFuture<BoxFuture<'static, Result<()>>>;

#[derive(Debug, Default)]
struct Shared {
    next: AtomicU64,
    writes: Mutex<BTreeMap<u64, Weak<Views>>>,
    /// What was written through the wrapped stores, by store and location.
    written: Mutex<HashSet<(String, Path)>>,
    /// Transaction files on their way, by name. Names are unique.
    pending: Mutex<HashMap<String, Pending>>,
}

/// Wraps the stores of a table's writes. One for a table, so that its writes share connections.
#[derive(Debug, Clone, Default)]
pub(crate) struct ViewStores {
    shared: Arc<Shared>,
}

impl ViewStores {
    /// Views for a write that starts from `snapshot` and touches `scope`.
    pub(crate) async fn begin(
        &self,
        snapshot: Arc<Snapshot>,
        scope: FragmentRanges,
        options: OpenOptions,
    ) -> Result<Arc<Views>> {
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let first_key = Key {
            version: snapshot.version(),
            bare: false,
        };
        let uri = snapshot.uri().to_string();
        let stats = Arc::default();
        let first = Arc::new(View::new(snapshot, scope.clone(), &stats).await?);
        let ready: BoxFuture<'static, _> = futures::future::ready(Ok(Arc::clone(&first))).boxed();
        let views = Arc::new(Views {
            id,
            uri,
            options,
            scope: Mutex::new(scope),
            stats,
            shared: Arc::clone(&self.shared),
            first,
            views: Mutex::new(BTreeMap::from([(first_key, ready.shared())])),
        });
        let mut writes = self.shared.writes.lock();
        writes.retain(|_, write| write.strong_count() > 0);
        writes.insert(id, Arc::downgrade(&views));
        Ok(views)
    }
}

impl WrappingObjectStore for ViewStores {
    fn wrap(&self, store_prefix: &str, original: Arc<dyn ObjectStore>) -> Arc<dyn ObjectStore> {
        Arc::new(ViewStore {
            inner: original,
            prefix: store_prefix.to_string(),
            shared: Arc::clone(&self.shared),
        })
    }

    fn wrap_paginated(
        &self,
        _: &str,
        original: Arc<dyn PaginatedListStore>,
    ) -> Option<Arc<dyn PaginatedListStore>> {
        Some(original)
    }
}

/// The name of a transaction file.
fn transaction_name(path: &Path) -> Option<&str> {
    let directory = path.parts().rev().nth(1)?;
    let name = path.filename()?;
    (directory.as_ref() == "_transactions" && name.ends_with(".txn")).then_some(name)
}

#[derive(Debug, Clone)]
struct ViewStore {
    inner: Arc<dyn ObjectStore>,
    prefix: String,
    shared: Arc<Shared>,
}

impl fmt::Display for ViewStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "views over {}", self.inner)
    }
}

impl ViewStore {
    async fn view_file(&self, location: &Path) -> object_store::Result<Option<Bytes>> {
        let Some((id, key)) = parse_view(location) else {
            return Ok(None);
        };
        let write = self.shared.writes.lock().get(&id).and_then(Weak::upgrade);
        let Some(write) = write else { return Ok(None) };
        let view = write.get(key).await.map_err(|e| failed(Box::new(e)))?;
        Ok(Some(view.file.clone()))
    }

    fn wrote(&self, location: &Path) {
        let key = (self.prefix.clone(), location.clone());
        self.shared.written.lock().insert(key);
    }

    /// Begins to write a transaction file. Nothing depends on it before the manifest is written.
    #[expect(
        clippy::disallowed_methods,
        reason = "Lance was told that the file is written: it must be, also when the commit is dropped"
    )]
    fn put_transaction(&self, name: String, location: &Path, payload: PutPayload) {
        let (inner, path) = (Arc::clone(&self.inner), location.clone());
        let put = tokio::spawn(async move {
            let put = inner.put(&path, payload).await;
            put.map(|_| ())
                .map_err(|e| Error::store(path.to_string(), e))
        });
        let put = async move {
            let put = put.await.map_err(|e| Error::internal(e.to_string()));
            put.flatten()
        };
        self.shared
            .pending
            .lock()
            .insert(name, put.boxed().shared());
        self.wrote(location);
    }

    /// Waits until a transaction file that is on its way is there.
    async fn arrived(&self, location: &Path) {
        let name = transaction_name(location);
        let pending = name.and_then(|name| self.shared.pending.lock().get(name).cloned());
        if let Some(pending) = pending {
            // Whoever commits hears what became of it.
            let _ = pending.await;
        }
    }

    /// The same for one that is to go: nobody will commit with it.
    async fn given_up(&self, location: &Path) {
        self.arrived(location).await;
        if let Some(name) = transaction_name(location) {
            self.shared.pending.lock().remove(name);
        }
    }

    fn check_own(&self, location: Path) -> object_store::Result<Path> {
        let key = (self.prefix.clone(), location);
        if self.shared.written.lock().remove(&key) {
            return Ok(key.1);
        }
        Err(failed(
            format!(
                "{} was not written by this process: a write to a tree table deletes nothing else, clean it up with fragtree",
                key.1
            )
            .into(),
        ))
    }
}

fn failed(source: Box<dyn std::error::Error + Send + Sync>) -> object_store::Error {
    object_store::Error::Generic {
        store: "fragtree",
        source,
    }
}

fn serve(location: &Path, file: &Bytes, options: &GetOptions) -> object_store::Result<GetResult> {
    let size = file.len() as u64;
    let range = match &options.range {
        None => 0..size,
        Some(range) => range.as_range(size).map_err(|e| failed(Box::new(e)))?,
    };
    let slice = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(file.len());
    let bytes = file.slice(slice(range.start)..slice(range.end));
    Ok(GetResult {
        payload: GetResultPayload::Stream(stream::once(async { Ok(bytes) }).boxed()),
        meta: ObjectMeta {
            location: location.clone(),
            last_modified: chrono::DateTime::UNIX_EPOCH,
            size,
            e_tag: None,
            version: None,
        },
        range,
        attributes: Attributes::default(),
        extensions: Default::default(),
    })
}

#[async_trait]
impl ObjectStore for ViewStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        if let Some(name) = transaction_name(location)
            && options == PutOptions::default()
        {
            self.put_transaction(name.to_string(), location, payload);
            return Ok(PutResult {
                e_tag: None,
                version: None,
                extensions: Default::default(),
            });
        }
        let put = self.inner.put_opts(location, payload, options).await?;
        self.wrote(location);
        Ok(put)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        let upload = self.inner.put_multipart_opts(location, options).await?;
        self.wrote(location);
        Ok(upload)
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        if let Some(file) = self.view_file(location).await? {
            return serve(location, &file, &options);
        }
        self.arrived(location).await;
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        let own = self.clone();
        let checked = locations
            .then(move |location| {
                let own = own.clone();
                async move {
                    let location = location?;
                    own.given_up(&location).await;
                    own.check_own(location)
                }
            })
            .boxed();
        self.inner.delete_stream(checked)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await?;
        self.wrote(to);
        Ok(())
    }

    async fn rename_opts(
        &self,
        from: &Path,
        to: &Path,
        options: RenameOptions,
    ) -> object_store::Result<()> {
        // A rename deletes its source.
        let from = self.check_own(from.clone())?;
        self.inner.rename_opts(&from, to, options).await?;
        self.wrote(to);
        Ok(())
    }
}
