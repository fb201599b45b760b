//! Where a native write arrives: the commit handler that turns Lance's next version of a view into
//! the next version of the tree.
//!
//! ```text
//!   view of N ── native write ──► manifest of N+1, records in scope as changed
//!                                    │ difference to the view's records
//!                                    ▼
//!   tree of N ── mutations ──► objects, then manifest N+1 through the table's own handler
//!
//!  kind      what is being committed
//!  manifest  the file of the new version
//! ```
//!
//! Conflicts, rebasing and retries are Lance's: when the table's handler says that N+1 is taken, Lance
//! reads what landed through views, applies its rules and comes back with N+2.

mod kind;
mod manifest;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use lance_io::object_store::ObjectStore;
use lance_table::format::{IndexMetadata, Manifest, Transaction, is_detached_version, pb};
use lance_table::io::commit::{
    CommitError, CommitHandler, ManifestLocation, ManifestNamingScheme, ManifestWriter,
};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use parking_lot::Mutex;
use prost::Message;

pub(crate) use manifest::{finish_manifest, now_nanos};

use self::kind::{Kind, TRANSACTION_HEAD, operation_tag};
use self::manifest::{NewTree, keep_unseen};
use super::build::TreeBuilder;
use super::diff::{changes, check_storable};
use super::grow::{grow, optimize};
use super::policy::TreePolicy;
use super::publish::publish_bytes;
use super::sink::ObjectSink;
use super::view::{View, Views};
use crate::error::{Error, Result};
use crate::ranges::FragmentRanges;
use crate::resolve::Written;
use crate::snapshot::{Catalog, Snapshot, TreeCatalog};
use crate::tree_scan::{WalkOptions, WalkState};

/// Config keys of Lance's own cleanup after a commit. It would take a view for the whole table, so
/// Lance does not see them.
const AUTO_CLEANUP: &str = super::cleanup::SETTINGS;

/// What a commit wrote and read of the table's metadata.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct CommitReport {
    /// The version that was published.
    pub version: u64,
    /// Bytes of the manifest file, an inline root and the transaction included.
    pub manifest_bytes: u64,
    /// Mutations the change consists of.
    pub mutations: u64,
    /// Bytes of those mutations, encoded.
    pub mutation_bytes: u64,
    /// Tree objects written.
    pub objects_written: u64,
    /// Bytes of those objects.
    pub object_bytes_written: u64,
    /// Requests for tree objects, those for the records that the change saw included.
    pub objects_read: u64,
    /// Bytes of those objects.
    pub object_bytes_read: u64,
    /// Attempts that other writers were faster than.
    pub lost_races: u64,
}

/// Publishes what native Lance commits on a view as a version of the tree.
#[derive(Debug)]
pub(crate) struct TreeCommitHandler {
    inner: Arc<dyn CommitHandler>,
    views: Arc<Views>,
    policy: Option<TreePolicy>,
    /// The handler of another table that the write may make.
    target: Option<Arc<dyn CommitHandler>>,
    /// Reorganize the tree instead of changing it.
    optimize: bool,
    base: Path,
    sink: ObjectSink,
    store: Arc<ObjectStore>,
    /// Until when the version that the write began with may be taken for the latest unseen. Lance
    /// looks for later ones before each attempt; the first does without, for the store has the last
    /// word anyhow.
    fresh_until: Mutex<Option<Instant>>,
    outcome: Mutex<Outcome>,
}

#[derive(Debug, Default)]
struct Outcome {
    report: CommitReport,
    /// The last version that was published.
    written: Option<Written>,
    /// Our own error behind the one Lance passes on.
    failure: Option<Error>,
    /// The settings of cleanup in the version being committed.
    settings: HashMap<String, String>,
    /// Versions that were published with such settings.
    with_settings: Vec<(u64, HashMap<String, String>)>,
}

impl TreeCommitHandler {
    pub(crate) async fn new(
        snapshot: &Snapshot,
        views: Arc<Views>,
        policy: Option<TreePolicy>,
        target: Option<Arc<dyn CommitHandler>>,
        optimize: bool,
        fresh_until: Option<Instant>,
    ) -> Result<Self> {
        let store = snapshot
            .shell()
            .object_store(None)
            .await
            .map_err(|e| Error::lance("cannot open the table's object store", e))?;
        let base = snapshot.shell().branch_location().path;
        Ok(Self {
            inner: Arc::clone(snapshot.handler()),
            views,
            policy,
            target,
            optimize,
            sink: ObjectSink::new(Arc::clone(&store), base.clone(), false),
            base,
            store,
            fresh_until: Mutex::new(fresh_until),
            outcome: Mutex::default(),
        })
    }

    /// What the write has published so far.
    pub(crate) fn report(&self) -> CommitReport {
        self.outcome.lock().report
    }

    /// The version that the write published last.
    pub(crate) fn take_written(&self) -> Option<Written> {
        self.outcome.lock().written.take()
    }

    /// The reason behind an error that Lance passed on.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.outcome.lock().failure.take()
    }

    /// The versions that the write published with settings for cleanup after a commit.
    pub(crate) fn take_settings(&self) -> Vec<(u64, HashMap<String, String>)> {
        std::mem::take(&mut self.outcome.lock().with_settings)
    }

    async fn next_version(
        &self,
        manifest: &mut Manifest,
        indices: Option<Vec<IndexMetadata>>,
        writer: ManifestWriter,
        transaction: Option<Transaction>,
    ) -> Result<Bytes> {
        if is_detached_version(manifest.version) {
            return Err(Error::invalid(
                "a detached version of a tree table cannot be committed: make a branch instead",
            ));
        }
        let before = manifest
            .version
            .checked_sub(1)
            .ok_or_else(|| Error::internal("a first version in a write to a table"))?;
        let base = self.views.view(before).await?;
        let Catalog::Tree(tree) = &base.snapshot.catalog else {
            return Err(Error::Conflict {
                message: format!(
                    "version {before} of {} is flat, but this write began on a tree: run it again",
                    base.snapshot.uri()
                ),
                retryable: true,
            });
        };
        let kind = self.kind(manifest, transaction.as_ref()).await?;
        let growth = Box::pin(self.grow_tree(&base, tree, manifest, &kind)).await?;
        let indices = indices.map(|new| keep_unseen(&base, new, manifest, &kind));
        let indices = indices.transpose()?.filter(|list| !list.is_empty());
        let head = base.snapshot.head();
        if !matches!(kind, Kind::UpdateConfig) {
            let hidden = head
                .config
                .iter()
                .filter(|(k, _)| k.starts_with(AUTO_CLEANUP));
            for (key, value) in hidden {
                manifest
                    .config
                    .entry(key.clone())
                    .or_insert_with(|| value.clone());
            }
        }
        let flags = match kind {
            Kind::Overwrite => 0,
            Kind::Restore(_) => growth.flags,
            _ => head.reader_feature_flags,
        };
        manifest.max_fragment_id = growth.max_fragment_id;
        let file = finish_manifest(
            manifest,
            indices,
            writer,
            transaction,
            growth.tree,
            flags,
            growth.has_deletions,
        )
        .await?;
        let (settings, config) = std::mem::take(&mut manifest.config)
            .into_iter()
            .partition(|(key, _)| key.starts_with(AUTO_CLEANUP));
        manifest.config = config;
        let mut outcome = self.outcome.lock();
        outcome.settings = settings;
        outcome.report.manifest_bytes += file.len() as u64;
        outcome.report.mutations += growth.mutations;
        outcome.report.mutation_bytes += growth.mutation_bytes;
        outcome.report.objects_written += growth.objects;
        outcome.report.object_bytes_written += growth.object_bytes;
        Ok(file)
    }

    /// What is being committed. It is beside the manifest when it is too large to be in it, and then
    /// read back no further than need be.
    async fn kind(&self, manifest: &Manifest, transaction: Option<&Transaction>) -> Result<Kind> {
        if let Some(operation) = transaction.and_then(|t| t.as_pb().operation.as_ref()) {
            return Ok(Kind::of(operation));
        }
        let name = manifest.transaction_file.as_deref().unwrap_or_default();
        let path = self.base.clone().join("_transactions").join(name);
        let unreadable = |e| Error::store(path.to_string(), e);
        let head = self.store.inner.get_range(&path, 0..TRANSACTION_HEAD).await;
        let tag = operation_tag(&head.map_err(unreadable)?);
        if tag.is_some_and(|tag| !Kind::NOT_OTHER.contains(&tag)) {
            return Ok(Kind::Other);
        }
        let file = self.store.inner.get(&path).await.map_err(unreadable)?;
        let file = file.bytes().await.map_err(unreadable)?;
        let transaction = pb::Transaction::decode(file).ok();
        let operation = transaction.and_then(|t| t.operation).ok_or_else(|| {
            Error::corrupt(
                path.to_string(),
                "transaction_undecodable",
                "a Transaction with an operation",
                "none",
            )
        })?;
        Ok(Kind::of(&operation))
    }

    async fn grow_tree(
        &self,
        base: &View,
        tree: &TreeCatalog,
        manifest: &Manifest,
        kind: &Kind,
    ) -> Result<NewTree> {
        let policy = self.policy_of(base)?;
        let greatest = manifest.fragments.iter().map(|f| f.id).max();
        let greatest = greatest
            .map(|id| {
                u32::try_from(id).map_err(|_| {
                    Error::invalid("fragment ids are used up: 2^32 - 1 is the greatest possible")
                })
            })
            .transpose()?;
        let max_fragment_id = greatest
            .max(manifest.max_fragment_id)
            .max(tree.max_fragment_id);
        match kind {
            Kind::Overwrite => {
                let mut builder = TreeBuilder::new(self.sink.clone(), policy);
                for fragment in manifest.fragments.iter() {
                    let record = pb::DataFragment::from(fragment);
                    check_storable(&record)?;
                    builder.push(&record).await?;
                }
                NewTree::built(builder.finish().await?, max_fragment_id, 0)
            }
            Kind::Restore(version) => self.restore(*version, tree, policy, max_fragment_id).await,
            _ => {
                let growth = if self.optimize {
                    optimize(tree, &self.sink, &policy, self.views.stats())
                        .await?
                        .ok_or_else(|| Error::internal("an optimization with nothing to gain"))?
                } else {
                    let changes = changes(&base.records, &manifest.fragments)?;
                    grow(
                        tree,
                        changes,
                        max_fragment_id,
                        &self.sink,
                        &policy,
                        self.views.stats(),
                    )
                    .await?
                };
                for path in &growth.paths {
                    tracing::debug!(%path, version = manifest.version, "a tree object");
                }
                let report = &growth.report;
                Ok(NewTree {
                    has_deletions: report.counts.total_rows != report.counts.visible_rows,
                    max_fragment_id,
                    flags: 0,
                    mutations: report.mutations,
                    mutation_bytes: report.mutation_bytes,
                    objects: report.leaves + report.nodes + report.roots,
                    object_bytes: report.leaf_bytes
                        + report.node_bytes
                        + if report.roots > 0 {
                            report.root_bytes
                        } else {
                            0
                        },
                    tree: growth.tree,
                })
            }
        }
    }

    /// The tree of an old version as the new one. Its objects are shared; sequences go on from the
    /// greater of both, so that none is ever used twice.
    async fn restore(
        &self,
        version: u64,
        current: &TreeCatalog,
        policy: TreePolicy,
        max_fragment_id: Option<u32>,
    ) -> Result<NewTree> {
        let old = self.views.view(version).await?;
        let old = &old.snapshot;
        let max_fragment_id = max_fragment_id.max(old.max_fragment_id());
        let flags = old.head().reader_feature_flags;
        match &old.catalog {
            Catalog::Tree(tree) => {
                let counts = tree.counts()?;
                let next = tree.next_sequence.max(current.next_sequence);
                Ok(NewTree {
                    tree: tree.encode_with_next(next)?,
                    has_deletions: counts.total_rows != counts.visible_rows,
                    max_fragment_id,
                    flags,
                    mutations: 0,
                    mutation_bytes: 0,
                    objects: 0,
                    object_bytes: 0,
                })
            }
            Catalog::Flat(_) => {
                let mut builder = TreeBuilder::new(self.sink.clone(), policy);
                let mut fragments = old.fragments(
                    FragmentRanges::all(),
                    &WalkOptions::default(),
                    &WalkState::default(),
                );
                while let Some(batch) = fragments.try_next().await? {
                    for fragment in batch {
                        let record = fragment.record()?;
                        if fragment.physical_rows().is_none() {
                            return Err(Error::invalid(format!(
                                "version {version} does not know the rows of fragment {}: convert the table again from that version",
                                fragment.id()
                            )));
                        }
                        check_storable(&record)?;
                        builder.push(&record).await?;
                    }
                }
                NewTree::built(builder.finish().await?, max_fragment_id, flags)
            }
        }
    }

    fn policy_of(&self, base: &View) -> Result<TreePolicy> {
        match self.policy {
            Some(policy) => Ok(policy),
            None => TreePolicy::from_config(&base.snapshot.head().config),
        }
    }

    fn target_at(&self, base_path: &Path) -> Option<&Arc<dyn CommitHandler>> {
        self.target.as_ref().filter(|_| *base_path != self.base)
    }

    /// Publishes the first version of another table, whose files are all its own.
    #[expect(clippy::too_many_arguments, reason = "those of a commit")]
    async fn commit_to_target(
        &self,
        manifest: &mut Manifest,
        indices: Option<Vec<IndexMetadata>>,
        base_path: &Path,
        store: &ObjectStore,
        writer: ManifestWriter,
        naming_scheme: ManifestNamingScheme,
        transaction: Option<Transaction>,
    ) -> std::result::Result<ManifestLocation, CommitError> {
        let Some(target) = self.target_at(base_path) else {
            return Err(self.failed(Error::invalid(format!(
                "a write to {} tried to commit to {base_path}",
                self.base
            ))));
        };
        let built = async {
            let policy = match self.policy {
                Some(policy) => policy,
                None => TreePolicy::from_config(&manifest.config)?,
            };
            let sink = ObjectSink::new(Arc::new(store.clone()), base_path.clone(), false);
            let mut builder = TreeBuilder::new(sink, policy);
            for fragment in manifest.fragments.iter() {
                let record = pb::DataFragment::from(fragment);
                check_storable(&record)?;
                builder.push(&record).await?;
            }
            let (tree, report) = builder.finish().await?;
            let has_deletions = report.counts.total_rows != report.counts.visible_rows;
            finish_manifest(
                manifest,
                indices,
                writer,
                transaction,
                tree,
                0,
                has_deletions,
            )
            .await
        };
        let file = built.await.map_err(|e| self.failed(e))?;
        publish_bytes(target, store, base_path, naming_scheme, manifest, file).await
    }

    /// Remembers an error of ours, which Lance passes on without its kind.
    fn failed(&self, error: Error) -> CommitError {
        let passed_on = lance::Error::external(Box::new(error.clone()));
        self.outcome.lock().failure = Some(error);
        CommitError::OtherError(passed_on)
    }
}

#[async_trait::async_trait]
impl CommitHandler for TreeCommitHandler {
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
        if let Some(target) = self.target_at(base_path) {
            return target
                .resolve_latest_location(base_path, object_store)
                .await;
        }
        let latest = self
            .inner
            .resolve_latest_location(base_path, object_store)
            .await?;
        self.views.locate(latest).await.map_err(external)
    }

    async fn resolve_version_location(
        &self,
        base_path: &Path,
        version: u64,
        object_store: &dyn object_store::ObjectStore,
    ) -> lance::Result<ManifestLocation> {
        if let Some(target) = self.target_at(base_path) {
            return target
                .resolve_version_location(base_path, version, object_store)
                .await;
        }
        if self.views.first().snapshot.version() == version {
            return Ok(self.views.first_location());
        }
        let found = self
            .inner
            .resolve_version_location(base_path, version, object_store)
            .await?;
        self.views.locate(found).await.map_err(external)
    }

    async fn version_exists(
        &self,
        base_path: &Path,
        version: u64,
        object_store: &dyn object_store::ObjectStore,
        naming_scheme: ManifestNamingScheme,
    ) -> lance::Result<bool> {
        self.inner
            .version_exists(base_path, version, object_store, naming_scheme)
            .await
    }

    fn list_detached_manifest_locations<'a>(
        &self,
        _base_path: &Path,
        _object_store: &'a ObjectStore,
    ) -> BoxStream<'a, lance::Result<ManifestLocation>> {
        stream::empty().boxed()
    }

    fn list_manifest_locations<'a>(
        &self,
        base_path: &Path,
        object_store: &'a ObjectStore,
        sorted_descending: bool,
    ) -> BoxStream<'a, lance::Result<ManifestLocation>> {
        let list = self
            .inner
            .list_manifest_locations(base_path, object_store, sorted_descending);
        as_views(&self.views, list)
    }

    fn list_manifest_locations_since<'a>(
        &self,
        base_path: &Path,
        object_store: &'a ObjectStore,
        since_version: u64,
    ) -> BoxStream<'a, lance::Result<ManifestLocation>> {
        let fresh_until = self.fresh_until.lock().take();
        if fresh_until.is_some_and(|until| Instant::now() < until) {
            return stream::empty().boxed();
        }
        let list = self
            .inner
            .list_manifest_locations_since(base_path, object_store, since_version);
        // The latest comes first. Of those before it Lance wants to know what was done, and no more.
        let views = Arc::clone(&self.views);
        list.enumerate()
            .then(move |(place, location)| {
                let views = Arc::clone(&views);
                async move {
                    let located = match place {
                        0 => views.locate(location?).await,
                        _ => views.locate_bare(location?).await,
                    };
                    located.map_err(external)
                }
            })
            .boxed()
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
        if *base_path != self.base {
            return self
                .commit_to_target(
                    manifest,
                    indices,
                    base_path,
                    object_store,
                    manifest_writer,
                    naming_scheme,
                    transaction,
                )
                .await;
        }
        let new_ids: Vec<u64> = manifest.fragments.iter().map(|f| f.id).collect();
        let name = manifest.transaction_file.clone().unwrap_or_default();
        let recorded = self.views.transaction_file(&name);
        let inline = transaction.is_some();
        if !inline {
            // Then it is read from there.
            recorded.clone().await.map_err(|e| self.failed(e))?;
        }
        let next = self.next_version(manifest, indices, manifest_writer, transaction);
        let file = match Box::pin(next).await {
            Ok(file) => file,
            Err(error) => {
                // Lance removes the file of a commit that failed. It must not come after that.
                let _ = recorded.await;
                return Err(self.failed(error));
            }
        };
        let at = Instant::now();
        let publishing = publish_bytes(
            &self.inner,
            &self.store,
            base_path,
            naming_scheme,
            manifest,
            file.clone(),
        );
        let (published, recorded) = futures::join!(publishing, recorded);
        if let Err(error) = recorded {
            // The manifest has the transaction too, and that is the one that is read.
            tracing::warn!(%name, %error, "a transaction file could not be written");
        }
        let mut outcome = self.outcome.lock();
        match published {
            Ok(location) => {
                let stats = self.views.stats().snapshot();
                outcome.report.version = location.version;
                outcome.report.objects_read = stats.requests;
                outcome.report.object_bytes_read = stats.bytes;
                outcome.written = Some(Written {
                    location: ManifestLocation {
                        size: Some(file.len() as u64),
                        ..location.clone()
                    },
                    file,
                    at,
                });
                let settings = std::mem::take(&mut outcome.settings);
                if !settings.is_empty() {
                    outcome.with_settings.push((location.version, settings));
                }
                drop(outcome);
                self.views.widen(new_ids);
                Ok(self.views.promise(location))
            }
            Err(CommitError::CommitConflict) => {
                outcome.report.lost_races += 1;
                Err(CommitError::CommitConflict)
            }
            Err(CommitError::OtherError(error)) => Err(CommitError::OtherError(error)),
        }
    }
}

fn external(error: Error) -> lance::Error {
    lance::Error::external(Box::new(error))
}

fn as_views<'a>(
    views: &Arc<Views>,
    list: BoxStream<'a, lance::Result<ManifestLocation>>,
) -> BoxStream<'a, lance::Result<ManifestLocation>> {
    let views = Arc::clone(views);
    list.and_then(move |location| {
        let views = Arc::clone(&views);
        async move { views.locate(location).await.map_err(external) }
    })
    .boxed()
}
