//! A table that is written to: the door through which every native Lance write becomes a commit.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use datafusion::execution::SendableRecordBatchStream;
use lance::Dataset;
use lance::dataset::builder::DatasetBuilder;
use lance::dataset::{CommitBuilder, InsertBuilder, WriteMode, WriteParams};
use lance::session::Session;
use lance_io::object_store::{ChainedWrappingObjectStore, ObjectStoreParams, WrappingObjectStore};
use lance_select::RowAddrTreeMap;
use lance_table::io::commit::CommitHandler;
use lance_table::transaction::{Transaction, TransactionBuilder};
use parking_lot::Mutex;
use url::Url;

use super::cleanup::after_commit;
use super::commit::{CommitReport, TreeCommitHandler};
use super::grow::optimize;
use super::policy::TreePolicy;
use super::publish::{DONE, unchanging_operation};
use super::sink::ObjectSink;
use super::view::{ViewStores, Views};
use crate::error::{Error, Result, plain_message};
use crate::manifest::check_writable;
use crate::ranges::FragmentRanges;
use crate::resolve::{VersionAt, VersionRef, Written};
use crate::snapshot::{Catalog, Layout, OpenOptions, Snapshot};
use crate::tree::object::{DEFAULT_CACHE_BYTES, ObjectCache, ReadStats};

/// How writes behave.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// Sizes of the tree. Default: those in the table's config, and where it has none the defaults.
    pub policy: Option<TreePolicy>,
    /// How often a commit is tried again that lost the next version to a compatible change: it is
    /// rebased and nothing is read or written anew but metadata. Default 100.
    pub commit_retries: u32,
    /// How often a change that lost to an incompatible one is done over, from reading on. Default 10.
    pub retries: u32,
    /// How long either is tried. Default 60 s.
    pub retry_timeout: Duration,
    /// How long a version that was the latest is taken for it without another look, by a commit that
    /// begins on it; changes that read the table look in any case. The store has the last word, as
    /// each version can be written but once: only where others commit two versions and clean up the
    /// first of them within this time would nobody notice, as in the gap that Lance leaves between
    /// its look and its commit. Default 1 s; with zero there is always a look.
    pub assume_latest: Duration,
    /// Whether to pass over the cleanup that the table's config (`lance.auto_cleanup.*`) asks for
    /// after commits. Default off.
    pub skip_auto_cleanup: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            policy: None,
            commit_retries: 100,
            retries: 10,
            retry_timeout: Duration::from_secs(60),
            assume_latest: Duration::from_secs(1),
            skip_auto_cleanup: false,
        }
    }
}

/// Sizes of the caches of one write. They begin empty: what a view shows must not be taken for the
/// table by anything that outlives the write.
const WRITE_CACHE_BYTES: usize = 64 << 20;

/// Records that are worth another thread to free.
const MANY_RECORDS: usize = 10_000;

/// A table of either layout, for writing. Cheap to clone; may be used by many tasks at once.
///
/// Each method is one commit, or for the few that say so some: it reads the latest version, lets Lance
/// do the work on just the fragments the change can touch, and publishes the difference.
///
/// ```no_run
/// # async fn example() -> fragtree::Result<()> {
/// use fragtree::write::{TreeTable, WriteOptions};
///
/// let table = TreeTable::open("/data/t.lance", Default::default(), WriteOptions::default()).await?;
/// let report = table.delete("id < 100").await?;
/// println!("{} rows, {} bytes", report.rows, report.commit.manifest_bytes);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct TreeTable {
    uri: String,
    options: OpenOptions,
    write: WriteOptions,
    stores: ViewStores,
    seen: Arc<Mutex<Option<Seen>>>,
}

/// The last version that a table was known to be at.
#[derive(Debug, Clone)]
struct Seen {
    snapshot: Arc<Snapshot>,
    /// A moment at which it was the latest.
    at: Instant,
    /// The version after it, which this handle wrote itself.
    written: Option<Written>,
}

/// What a change of rows did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct RowsReport {
    /// Rows that were deleted, updated or inserted.
    pub rows: u64,
    /// The commit.
    pub commit: CommitReport,
}

impl TreeTable {
    /// The table at `uri`, or the branch that `options.reference` names.
    ///
    /// # Errors
    /// Those of [`Snapshot::open`], and [`Error::InvalidInput`] when the options name a version, tag
    /// or time: only the latest version can be written to.
    pub async fn open(uri: &str, options: OpenOptions, write: WriteOptions) -> Result<Self> {
        if options.reference.at != VersionAt::Latest {
            return Err(Error::invalid(
                "a table is written to at its latest version: name a branch or nothing",
            ));
        }
        if let Some(policy) = &write.policy {
            policy.validate()?;
        }
        let at = Instant::now();
        let snapshot = Snapshot::open(uri, options.clone()).await?;
        let table = Self::of(&snapshot, options, write);
        table.saw(&snapshot, at);
        Ok(table)
    }

    /// The table that `snapshot` is a version of.
    pub(crate) fn of(snapshot: &Snapshot, mut options: OpenOptions, write: WriteOptions) -> Self {
        // A commit leaves most objects as they are: the next one need not read them again.
        options
            .cache
            .get_or_insert_with(|| ObjectCache::new(DEFAULT_CACHE_BYTES));
        Self {
            // Of a branch, its own location.
            uri: snapshot.uri().to_string(),
            options: options.with_reference(VersionRef::latest()),
            write,
            stores: ViewStores::default(),
            seen: Arc::default(),
        }
    }

    fn saw(&self, snapshot: &Arc<Snapshot>, at: Instant) {
        *self.seen.lock() = Some(Seen {
            snapshot: Arc::clone(snapshot),
            at,
            written: None,
        });
    }

    /// Where the table lies.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    pub(crate) fn options(&self) -> &OpenOptions {
        &self.options
    }

    pub(crate) fn write_options(&self) -> &WriteOptions {
        &self.write
    }

    /// The last version that this handle, or a clone of it, has read or written. Nothing is looked up:
    /// it is what a transaction made by hand builds on, which [`Self::commit`] then brings up to date.
    pub fn last_seen(&self) -> Option<u64> {
        let seen = self.seen.lock();
        let seen = seen.as_ref()?;
        let written = seen.written.as_ref().map(|w| w.location.version);
        Some(written.unwrap_or_else(|| seen.snapshot.version()))
    }

    /// Whether the last version seen was the latest a moment ago.
    fn is_fresh(&self) -> bool {
        let seen = self.seen.lock();
        let at = seen
            .as_ref()
            .map(|s| s.written.as_ref().map_or(s.at, |w| w.at));
        at.is_some_and(|at| at.elapsed() < self.write.assume_latest)
    }

    /// Version `version` if it is the last one seen.
    async fn seen_at(&self, version: u64) -> Result<Option<Arc<Snapshot>>> {
        let Some(seen) = self.seen.lock().clone() else {
            return Ok(None);
        };
        if seen.snapshot.version() == version {
            return Ok(Some(seen.snapshot));
        }
        let Some(written) = seen.written.filter(|w| w.location.version == version) else {
            return Ok(None);
        };
        let snapshot = Box::pin(seen.snapshot.after(&written, &self.options)).await?;
        self.saw(&snapshot, written.at);
        Ok(Some(snapshot))
    }

    /// The latest version.
    ///
    /// # Errors
    /// Those of [`Snapshot::open`].
    pub async fn latest(&self) -> Result<Arc<Snapshot>> {
        let at = Instant::now();
        let seen = self.seen.lock().clone();
        let snapshot = match seen {
            None => Box::pin(Snapshot::open(&self.uri, self.options.clone())).await?,
            Some(seen) => {
                let latest = seen.snapshot.latest(&self.options, seen.written.as_ref());
                Box::pin(latest).await?
            }
        };
        self.saw(&snapshot, at);
        Ok(snapshot)
    }

    /// Does any native write: `work` gets a Lance dataset of the latest version that holds the
    /// fragments in `scope`, and what it commits there is committed to the table.
    ///
    /// `work` must touch no fragment outside `scope` and must not depend on those it cannot see. New
    /// fragments are no matter. On a flat table the dataset is whole.
    ///
    /// # Errors
    /// Lance's for the work and its conflicts; [`Error::Unsupported`] for writer features the linked
    /// Lance does not know.
    pub async fn with_dataset<T, F>(
        &self,
        scope: FragmentRanges,
        work: impl FnOnce(Dataset) -> F + Send,
    ) -> Result<(T, CommitReport)>
    where
        F: Future<Output = lance::Result<T>> + Send,
    {
        // Most often the version last seen is the latest still, and its records can be read meanwhile.
        let seen = match self.last_seen() {
            Some(version) => self.seen_at(version).await.ok().flatten(),
            None => None,
        };
        let seen = seen.filter(|s| s.layout() == Layout::Tree && !scope.is_empty());
        let ahead = async {
            let begun = self
                .stores
                .begin(seen?, scope.clone(), self.options.clone());
            begun.await.ok()
        };
        let (snapshot, ahead) = futures::join!(self.latest(), Box::pin(ahead));
        let snapshot = snapshot?;
        let views = ahead.filter(|views| Arc::ptr_eq(&views.first().snapshot, &snapshot));
        Box::pin(self.run(&snapshot, scope, views, None, false, work)).await
    }

    /// [`Self::with_dataset`] on a version at hand, the latest when it was opened.
    pub(crate) async fn on<T, F>(
        &self,
        snapshot: &Arc<Snapshot>,
        scope: FragmentRanges,
        work: impl FnOnce(Dataset) -> F + Send,
    ) -> Result<(T, CommitReport)>
    where
        F: Future<Output = lance::Result<T>> + Send,
    {
        Box::pin(self.run(snapshot, scope, None, None, false, work)).await
    }

    /// [`Self::on`] for work that makes another table through `target`.
    pub(crate) async fn on_target<T, F>(
        &self,
        snapshot: &Arc<Snapshot>,
        scope: FragmentRanges,
        target: Option<Arc<dyn CommitHandler>>,
        work: impl FnOnce(Dataset) -> F + Send,
    ) -> Result<(T, CommitReport)>
    where
        F: Future<Output = lance::Result<T>> + Send,
    {
        Box::pin(self.run(snapshot, scope, None, target, false, work)).await
    }

    /// Reorganizes the tree: drains buffers, merges small objects, splits large ones. Fragments stay as
    /// they are. Safe beside writers and readers; nothing when there is nothing to gain.
    ///
    /// # Errors
    /// Those of [`Self::with_dataset`]; [`Error::InvalidInput`] for a flat table.
    pub async fn optimize_tree(&self) -> Result<Option<CommitReport>> {
        let snapshot = self.latest().await?;
        let Catalog::Tree(tree) = &snapshot.catalog else {
            return Err(Error::invalid(format!(
                "{} is flat and has no tree to optimize: convert it first",
                self.uri
            )));
        };
        let policy = match self.write.policy {
            Some(policy) => policy,
            None => TreePolicy::from_config(&snapshot.head().config)?,
        };
        let base = snapshot.shell().branch_location().path;
        let store = snapshot
            .shell()
            .object_store(None)
            .await
            .map_err(|e| Error::lance("cannot open the table's object store", e))?;
        let dry = ObjectSink::new(store, base, true);
        let stats = ReadStats::default();
        if optimize(tree, &dry, &policy, &stats).await?.is_none() {
            return Ok(None);
        }
        let done = HashMap::from([(DONE.to_string(), "optimize tree".to_string())]);
        let transaction = TransactionBuilder::new(snapshot.version(), unchanging_operation())
            .transaction_properties(Some(Arc::new(done)))
            .build();
        let work = move |dataset: Dataset| async move {
            let committer = self.committer(Arc::new(dataset));
            committer.execute(transaction).await.map(|_| ())
        };
        let ((), mut report) = self
            .run(&snapshot, FragmentRanges::empty(), None, None, true, work)
            .await?;
        // What was read to decide is in the cache by the time it is read to be written.
        let decided = stats.snapshot();
        report.objects_read += decided.requests;
        report.object_bytes_read += decided.bytes;
        Ok(Some(report))
    }

    async fn run<T, F>(
        &self,
        snapshot: &Arc<Snapshot>,
        scope: FragmentRanges,
        views: Option<Arc<Views>>,
        target: Option<Arc<dyn CommitHandler>>,
        optimize: bool,
        work: impl FnOnce(Dataset) -> F + Send,
    ) -> Result<(T, CommitReport)>
    where
        F: Future<Output = lance::Result<T>> + Send,
    {
        check_writable(snapshot.location().path.as_ref(), snapshot.head())?;
        let context = || format!("cannot write to {}", self.uri);
        if snapshot.layout() == Layout::Flat {
            let dataset = self.flat_version(snapshot).await?;
            let failed = match Box::pin(work(dataset)).await {
                Ok(done) => return Ok((done, CommitReport::default())),
                Err(error) => lance_error(context(), error),
            };
            // Lance cannot read what came after a conversion and so cannot tell.
            let latest = self.latest().await?;
            if latest.layout() == Layout::Tree {
                return Err(Error::Conflict {
                    message: format!(
                        "{} was converted to a tree while it was written to: run the change again ({failed})",
                        self.uri
                    ),
                    retryable: true,
                });
            }
            return Err(failed);
        }
        let views = match views {
            Some(views) => views,
            None => {
                let begun = self
                    .stores
                    .begin(Arc::clone(snapshot), scope, self.options.clone());
                Box::pin(begun).await?
            }
        };
        let fresh_until = match &*self.seen.lock() {
            Some(seen) if Arc::ptr_eq(&seen.snapshot, snapshot) => {
                seen.at.checked_add(self.write.assume_latest)
            }
            _ => None,
        };
        let handler = TreeCommitHandler::new(
            snapshot,
            Arc::clone(&views),
            self.write.policy,
            target,
            optimize,
            fresh_until,
        )
        .await?;
        let handler = Arc::new(handler);
        let view = Arc::clone(views.first());
        let dataset = DatasetBuilder::from_uri(view_uri(&self.uri)?)
            .with_store_params(self.view_params())
            .with_session(self.write_session())
            .with_commit_handler(Arc::clone(&handler) as _)
            .with_serialized_manifest(view.message())
            .map_err(|e| Error::lance(context(), e))?
            .load()
            .await
            .map_err(|e| Error::lance(context(), e))?;
        // Boxed, as are the other long futures of a write: together they would fill a thread's stack.
        let worked = Box::pin(work(dataset)).await;
        let outcome = match worked {
            Ok(done) => {
                if let Some(written) = handler.take_written() {
                    self.wrote(snapshot, written);
                }
                let commits = handler.take_settings();
                if !self.write.skip_auto_cleanup && !commits.is_empty() {
                    Box::pin(after_commit(self, commits)).await;
                }
                Ok((done, handler.report()))
            }
            Err(error) => Err(handler
                .take_failure()
                .unwrap_or_else(|| lance_error(context(), error))),
        };
        drop(handler);
        if view.records.len() > MANY_RECORDS {
            free_elsewhere((view, views));
        }
        outcome
    }

    /// Remembers what was committed on `snapshot`, to read the next version from.
    fn wrote(&self, snapshot: &Arc<Snapshot>, written: Written) {
        if let Some(seen) = &mut *self.seen.lock()
            && Arc::ptr_eq(&seen.snapshot, snapshot)
        {
            seen.written = Some(written);
        }
    }

    /// A whole Lance dataset of a flat version.
    pub(crate) async fn flat_version(&self, snapshot: &Snapshot) -> Result<Dataset> {
        DatasetBuilder::from_uri(&self.uri)
            .with_store_params(self.options.store_params(&self.uri))
            .with_session(self.write_session())
            .with_version(snapshot.version())
            .load()
            .await
            .map_err(|e| Error::lance(format!("cannot write to {}", self.uri), e))
    }

    /// A session of its own over the shared connections.
    pub(crate) fn write_session(&self) -> Arc<Session> {
        let registry = match &self.options.session {
            Some(session) => session.store_registry(),
            None => Arc::default(),
        };
        Arc::new(Session::new(WRITE_CACHE_BYTES, WRITE_CACHE_BYTES, registry))
    }

    fn view_params(&self) -> ObjectStoreParams {
        let mut params = self.options.store_params(&self.uri);
        let own: Arc<dyn WrappingObjectStore> = Arc::new(self.stores.clone());
        params.object_store_wrapper = Some(match params.object_store_wrapper.take() {
            None => own,
            Some(theirs) => Arc::new(ChainedWrappingObjectStore::new(vec![theirs, own])),
        });
        params
    }

    /// Runs `attempt` until it neither loses a conflict that doing it over can solve nor runs out of
    /// tries.
    pub(crate) async fn retrying<T, F>(&self, mut attempt: impl FnMut() -> F + Send) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send,
    {
        let start = Instant::now();
        let mut tries = 0u32;
        loop {
            let error = match attempt().await {
                Err(
                    error @ Error::Conflict {
                        retryable: true, ..
                    },
                ) => error,
                done => return done,
            };
            tries += 1;
            if tries > self.write.retries || start.elapsed() > self.write.retry_timeout {
                return Err(Error::Conflict {
                    message: format!(
                        "gave up after {tries} tries in {:.1} s, other writers were in the way each time (the last: {error})",
                        start.elapsed().as_secs_f64()
                    ),
                    retryable: true,
                });
            }
            tracing::info!(tries, %error, "doing a change over");
            let slot = 10u64.saturating_mul(1 << tries.min(7));
            let pause = rand::random_range(slot / 2..=slot);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    /// Appends rows. Their schema must fit the table's as Lance asks for.
    ///
    /// # Errors
    /// Those of [`Self::with_dataset`], and of `rows`.
    pub async fn append(&self, rows: SendableRecordBatchStream) -> Result<CommitReport> {
        self.insert(rows, WriteMode::Append).await
    }

    /// Replaces everything in the table, its schema too.
    ///
    /// # Errors
    /// Those of [`Self::with_dataset`], and of `rows`.
    pub async fn overwrite(&self, rows: SendableRecordBatchStream) -> Result<CommitReport> {
        self.insert(rows, WriteMode::Overwrite).await
    }

    async fn insert(
        &self,
        rows: SendableRecordBatchStream,
        mode: WriteMode,
    ) -> Result<CommitReport> {
        let write = move |dataset: Dataset| async move {
            let params = WriteParams {
                mode,
                ..Default::default()
            };
            let dataset = Arc::new(dataset);
            let transaction = InsertBuilder::new(Arc::clone(&dataset))
                .with_params(&params)
                .execute_uncommitted_stream(rows)
                .await?;
            self.committer(dataset)
                .execute(transaction)
                .await
                .map(|_| ())
        };
        let ((), report) = self.with_dataset(FragmentRanges::empty(), write).await?;
        Ok(report)
    }

    /// Lance's commit to `dataset`, as patient as the options say.
    pub(crate) fn committer(&self, dataset: Arc<Dataset>) -> CommitBuilder<'static> {
        CommitBuilder::new(dataset)
            .with_max_retries(self.write.commit_retries)
            .with_retry_timeout(self.write.retry_timeout)
    }

    /// Commits a transaction made elsewhere, as distributed writers do. `affected_rows` are the
    /// addresses it deletes or moves, with which Lance can merge it with others of the same
    /// fragments.
    ///
    /// # Errors
    /// Those of [`Self::with_dataset`]; [`Error::Conflict`] when an incompatible change came first.
    pub async fn commit(
        &self,
        transaction: Transaction,
        affected_rows: Option<RowAddrTreeMap>,
    ) -> Result<CommitReport> {
        let scope = super::scope::of_operation(&transaction.operation)?;
        // The version it read, so that Lance checks all that came since.
        let version = transaction.read_version;
        let seen = match self.is_fresh() {
            true => self.seen_at(version).await?,
            false => None,
        };
        let read = match seen {
            Some(seen) => seen,
            None => {
                let latest = self.latest().await?;
                if version == 0 || version == latest.version() {
                    latest
                } else {
                    let reference = VersionRef::version(version);
                    let options = self.options.clone().with_reference(reference);
                    Box::pin(Snapshot::open(&self.uri, options)).await?
                }
            }
        };
        let commit = move |dataset: Dataset| async move {
            let mut builder = self.committer(Arc::new(dataset));
            if let Some(rows) = affected_rows {
                builder = builder.with_affected_rows(rows);
            }
            builder.execute(transaction).await.map(|_| ())
        };
        let ((), report) = self.on(&read, scope, commit).await?;
        Ok(report)
    }
}

/// Nobody need wait until a million records are freed.
#[expect(
    clippy::disallowed_methods,
    reason = "nobody waits for it, so it must not end with whoever began it"
)]
fn free_elsewhere<T: Send + 'static>(value: T) {
    drop(tokio::task::spawn_blocking(move || drop(value)));
}

/// The URI under which Lance opens views. Its local files would otherwise be read past the store that
/// serves them.
fn view_uri(uri: &str) -> Result<String> {
    let url = match Url::parse(uri) {
        Ok(url) if url.scheme() == "memory" => {
            return Err(Error::invalid(format!(
                "{uri} cannot be written to: a memory:// table is private to the store that opened it, use shared-memory://"
            )));
        }
        Ok(url) if url.scheme().len() > 1 => url,
        Ok(_) | Err(_) => Url::from_file_path(uri)
            .map_err(|()| Error::invalid(format!("{uri} is no absolute path")))?,
    };
    let url = url.to_string();
    Ok(match url.strip_prefix("file:") {
        Some(rest) => format!("file-object-store:{rest}"),
        None => url,
    })
}

/// Lance's error as ours: lost races are conflicts, errors of ours that went through Lance are ours.
fn lance_error(context: String, error: lance::Error) -> Error {
    let mut source = std::error::Error::source(&error);
    while let Some(inner) = source {
        if let Some(own) = inner.downcast_ref::<Error>() {
            return own.clone();
        }
        source = inner.source();
    }
    match error {
        lance::Error::RetryableCommitConflict { .. }
        | lance::Error::CommitConflict { .. }
        | lance::Error::IncompatibleTransaction { .. }
        | lance::Error::TooMuchWriteContention { .. } => Error::Conflict {
            retryable: !matches!(error, lance::Error::IncompatibleTransaction { .. }),
            message: format!("{context}: {}", plain_message(&error.to_string())),
        },
        lance::Error::External { source } => match source.downcast::<Error>() {
            Ok(own) => *own,
            Err(source) => Error::lance(context, lance::Error::External { source }),
        },
        error => Error::lance(context, error),
    }
}
