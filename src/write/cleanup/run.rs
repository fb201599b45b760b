//! One cleanup, from the first look to the last removal.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use chrono::{DateTime, Utc};
use futures::{StreamExt, stream};
use lance_table::format::is_detached_version;
use lance_table::io::commit::ManifestLocation;
use object_store::path::Path;

use super::auto;
use super::lineage::{Lineage, References, Version};
use super::options::{CleanupOptions, Policy, UNVERIFIED_AGE, before};
use super::reach::{Fate, Reach};
use super::report::{
    CleanupProgress, CleanupReport, FileKind, Ledger, ReferencedBranch, RemovedFile, Why,
};
use super::sweep::{IndexFolders, Judge, Listed, Remover, list, show};
use crate::error::{Error, Result};
use crate::resolve::{VersionRef, display_uri};
use crate::snapshot::{OpenOptions, Snapshot};
use crate::tree::object::{DEFAULT_CACHE_BYTES, ObjectCache};

/// Files between two reports of progress.
const PROGRESS_STEP: u64 = 256;

/// Cleans up the lineage that `snapshot` is the latest version of. Versions from `stay_from` on stay,
/// whatever the options.
pub(super) async fn cleanup(
    snapshot: &Snapshot,
    options: &CleanupOptions,
    stay_from: Option<u64>,
    open: &OpenOptions,
    progress: &(dyn Fn(CleanupProgress) + Send + Sync),
) -> Result<CleanupReport> {
    // Caches that all lineages share.
    let mut open = open.clone();
    open.session
        .get_or_insert_with(|| snapshot.shell().session());
    open.cache
        .get_or_insert_with(|| ObjectCache::new(DEFAULT_CACHE_BYTES));
    let table = Lineage::of(snapshot, &open).await?;
    let uri = display_uri(snapshot.uri());
    let concurrency = options
        .delete_concurrency
        .unwrap_or_else(|| table.store.io_parallelism())
        .max(1);
    let mut run = Run {
        options,
        open,
        now: Utc::now(),
        remover: Remover::new(concurrency, options.delete_rate_limit),
        root: table.base.clone(),
        ledger: Ledger::new(uri, table.latest, options.dry_run, options.list_files),
        gone: HashSet::new(),
        counters: Counters::default(),
        stay_from,
        progress,
    };
    run.lineage(&table, options, false).await?;
    Ok(run.ledger.finish())
}

#[derive(Debug, Default)]
struct Counters {
    versions_done: AtomicU64,
    versions_known: AtomicU64,
    objects: AtomicU64,
    listed: AtomicU64,
    removed: AtomicU64,
}

impl Counters {
    fn add(counter: &AtomicU64, value: u64) -> u64 {
        counter.fetch_add(value, Ordering::Relaxed) + value
    }

    fn progress(&self) -> CleanupProgress {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        CleanupProgress {
            versions_done: get(&self.versions_done),
            versions_known: get(&self.versions_known),
            objects: get(&self.objects),
            files_listed: get(&self.listed),
            files_removed: get(&self.removed),
        }
    }
}

/// A version that goes.
#[derive(Debug, Clone)]
struct Doomed {
    location: ManifestLocation,
    bytes: u64,
}

impl Doomed {
    fn version(&self) -> u64 {
        self.location.version
    }
}

struct Run<'a> {
    options: &'a CleanupOptions,
    open: OpenOptions,
    now: DateTime<Utc>,
    remover: Remover,
    /// The root of the table, to which paths in the report are relative.
    root: Path,
    ledger: Ledger,
    /// Manifests that went, or on a dry run would have: of branches that were cleaned first.
    gone: HashSet<Path>,
    counters: Counters,
    stay_from: Option<u64>,
    progress: &'a (dyn Fn(CleanupProgress) + Send + Sync),
}

impl Run<'_> {
    fn tell(&self) {
        (self.progress)(self.counters.progress());
    }

    fn settled(&self, options: &CleanupOptions) -> Option<DateTime<Utc>> {
        (!options.delete_unverified).then(|| before(self.now, UNVERIFIED_AGE))
    }

    /// Cleans one lineage: the table itself, or with `cascaded` a branch of it.
    async fn lineage(
        &mut self,
        table: &Lineage,
        options: &CleanupOptions,
        cascaded: bool,
    ) -> Result<()> {
        let versions = table.versions().await?;
        let history: Vec<u64> = versions
            .iter()
            .map(|location| location.version)
            .filter(|version| !is_detached_version(*version))
            .collect();
        let mut policy = options.policy(self.now, &history);
        if !cascaded {
            policy.limit(self.stay_from);
        }
        let newest = history.first().copied().unwrap_or(table.latest);
        let references = table.references().await?;
        let branches = self.referenced(table, &policy, &references).await?;
        let mut cleaned = BTreeSet::new();
        if options.clean_referenced_branches && !cascaded {
            for (name, _) in &branches {
                if self.branch(table, name).await? {
                    cleaned.insert(name.clone());
                }
            }
        }
        let reach = Arc::new(Reach::new(table));
        let mut kept = self
            .enter_branches(table, &reach, &branches, (!cascaded).then_some(&cleaned))
            .await?;
        kept.extend(references.tags.keys());
        let doomed = self
            .enter_versions(table, &reach, versions, &policy, &kept)
            .await?;
        if options.error_if_tagged {
            self.refuse_tagged(&doomed.tagged, &references)?;
        }
        self.warn_of_unknown(&reach);
        let mut doomed = doomed.versions;
        doomed.sort_unstable_by_key(Doomed::version);
        if options.dry_run {
            self.pretend_manifests(doomed);
        } else {
            let doomed = self
                .spare_newly_referenced(table, &reach, &references, doomed)
                .await?;
            self.remove_manifests(table, &reach, doomed).await?;
            self.enter_new(table, &reach, newest).await?;
        }
        let stats = reach.stats.snapshot();
        self.ledger.report.objects_read += stats.requests;
        self.ledger.report.object_bytes_read += stats.bytes;
        self.sweep(table, &reach, options).await
    }

    /// Branches that began from a version that the policy would remove, or that is gone already. Those
    /// of other versions name nothing that such a version, which stays, does not name too.
    async fn referenced(
        &self,
        table: &Lineage,
        policy: &Policy,
        references: &References,
    ) -> Result<Vec<(String, u64)>> {
        let mut branches = Vec::new();
        for (name, version) in &references.branches {
            let read = match table.locate(*version).await? {
                Some(location) => table.read(&location).await?,
                None => None,
            };
            if read.is_none_or(|version| policy.cleans(&version.head)) {
                branches.push((name.clone(), *version));
            }
        }
        Ok(branches)
    }

    /// Cleans a branch by its own settings, if it has any that are due.
    async fn branch(&mut self, table: &Lineage, name: &str) -> Result<bool> {
        let place = table.sibling(name)?;
        let open = self.open.clone().with_reference(VersionRef::latest());
        let snapshot = Snapshot::open(&place.uri, open).await?;
        let config = auto::settings(&snapshot.head().config);
        let Some(options) = auto::due(&config, snapshot.version())? else {
            return Ok(false);
        };
        let options = CleanupOptions {
            clean_referenced_branches: false,
            dry_run: self.options.dry_run,
            ..options
        };
        let branch = Lineage::of(&snapshot, &self.open).await?;
        // A future that holds itself has no size.
        Box::pin(self.lineage(&branch, &options, true)).await?;
        Ok(true)
    }

    /// Enters all versions of branches. The versions of this table that stay for them. Reports about
    /// them when told which were cleaned.
    async fn enter_branches(
        &mut self,
        table: &Lineage,
        reach: &Arc<Reach>,
        branches: &[(String, u64)],
        report_with: Option<&BTreeSet<String>>,
    ) -> Result<BTreeSet<u64>> {
        let mut kept = BTreeSet::new();
        for (name, version) in branches {
            let branch = table.sibling(name)?;
            let mut versions = branch.versions().await?;
            versions.retain(|location| !self.gone.contains(&location.path));
            self.know(versions.len());
            let mut named = false;
            let mut all = branch.read_all(versions);
            while let Some(read) = all.next().await {
                // One that went away since it was listed needs nothing any more.
                if let Some(version) = read.version.map_err(|e| needed(e, read.location.version))? {
                    let entered = enter(reach, &branch, &version, Fate::Elsewhere).await?;
                    named |= entered.unwrap_or_default();
                }
                self.done(reach);
            }
            if named {
                kept.insert(*version);
            }
            if let Some(cleaned) = report_with {
                self.ledger.report.branches.push(ReferencedBranch {
                    name: name.clone(),
                    version: *version,
                    keeps_version: named,
                    cleaned: cleaned.contains(name),
                });
            }
        }
        Ok(kept)
    }

    /// Decides about each version and enters it.
    async fn enter_versions(
        &mut self,
        table: &Lineage,
        reach: &Arc<Reach>,
        mut versions: Vec<ManifestLocation>,
        policy: &Policy,
        kept: &BTreeSet<u64>,
    ) -> Result<Doom> {
        versions.retain(|location| !self.gone.contains(&location.path));
        self.know(versions.len());
        let mut doom = Doom::default();
        let mut latest_seen = false;
        // The latest first: what it shares with older ones is then known to stay.
        let mut all = table.read_all(versions);
        while let Some(read) = all.next().await {
            let number = read.location.version;
            let is_latest = number >= table.latest && !is_detached_version(number);
            let version = match read.version {
                Ok(Some(version)) => version,
                // Another cleanup was faster.
                Ok(None) if !is_latest => {
                    self.done(reach);
                    continue;
                }
                Ok(None) => return Err(vanished(table, number)),
                Err(e) => return Err(needed(e, number)),
            };
            latest_seen |= number == table.latest;
            let wanted = policy.cleans(&version.head) && !is_latest;
            if wanted && !kept.contains(&number) {
                self.release(table, reach, &version).await?;
                doom.versions.push(Doomed {
                    bytes: version.file_size,
                    location: read.location,
                });
            } else {
                if wanted {
                    doom.tagged.insert(number);
                }
                let entered = enter(reach, table, &version, Fate::Stays).await?;
                if entered.is_none() && is_latest {
                    return Err(vanished(table, number));
                }
                self.ledger.report.kept_versions += u64::from(entered.is_some());
            }
            self.done(reach);
        }
        if !latest_seen {
            return Err(vanished(table, table.latest));
        }
        Ok(doom)
    }

    /// Enters a version that goes. A broken one goes all the same: what it alone names then has to
    /// grow old first.
    async fn release(
        &mut self,
        table: &Lineage,
        reach: &Arc<Reach>,
        version: &Version,
    ) -> Result<()> {
        match reach.enter(table, version, Fate::Goes).await {
            Err(error @ Error::Corrupt { .. }) => {
                self.ledger.warn(format!(
                    "version {} is broken ({error}): it goes, but files that only it names stay until they are 7 days old",
                    version.number()
                ));
                Ok(())
            }
            entered => entered.map(|_| ()),
        }
    }

    fn refuse_tagged(&self, wanted: &BTreeSet<u64>, references: &References) -> Result<()> {
        let tagged: Vec<_> = wanted
            .iter()
            .filter_map(|version| Some((version, references.tags.get(version)?)))
            .map(|(version, tags)| {
                let tags: Vec<_> = tags.iter().map(String::as_str).collect();
                format!("version {version} ({})", tags.join(", "))
            })
            .collect();
        if tagged.is_empty() {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "tagged versions would be removed: {}. Delete the tags, or clean up around them with error_if_tagged off (--keep-tagged); nothing was removed",
            tagged.join(", ")
        )))
    }

    fn warn_of_unknown(&mut self, reach: &Reach) {
        if reach.has_managed_blobs() {
            self.ledger.warn(
                "the table has managed blobs, which records do not name: blobs are left alone"
                    .to_string(),
            );
        }
        if reach.has_row_maps() {
            self.ledger.warn(
                "a fragment reuse index names row maps: files in _fri are left alone".to_string(),
            );
        }
    }

    /// Leaves out versions that were tagged or branched off since the references were read.
    async fn spare_newly_referenced(
        &mut self,
        table: &Lineage,
        reach: &Arc<Reach>,
        before: &References,
        doomed: Vec<Doomed>,
    ) -> Result<Vec<Doomed>> {
        let now = table.references().await?;
        let branched = now.branches.iter().filter(|b| !before.branches.contains(b));
        let new: BTreeSet<u64> = branched
            .map(|(_, version)| *version)
            .chain(now.tags.keys().copied())
            .collect();
        let (spared, doomed): (Vec<_>, Vec<_>) = doomed
            .into_iter()
            .partition(|doomed| new.contains(&doomed.version()));
        for version in spared {
            self.keep(table, reach, &version.location).await?;
        }
        Ok(doomed)
    }

    /// Enters a version that stays after all. Nothing when it is gone.
    async fn keep(
        &mut self,
        table: &Lineage,
        reach: &Arc<Reach>,
        location: &ManifestLocation,
    ) -> Result<bool> {
        let version = table.read(location).await;
        let Some(version) = version.map_err(|e| needed(e, location.version))? else {
            return Ok(false);
        };
        let entered = enter(reach, table, &version, Fate::Stays).await?;
        self.ledger.report.kept_versions += u64::from(entered.is_some());
        Ok(entered.is_some())
    }

    fn pretend_manifests(&mut self, doomed: Vec<Doomed>) {
        for version in doomed {
            self.manifest_gone(version);
        }
    }

    fn manifest_gone(&mut self, version: Doomed) {
        self.ledger.removed(RemovedFile {
            path: show(&self.root, &version.location.path),
            kind: FileKind::Manifest,
            why: Why::VersionRemoved,
            bytes: version.bytes,
        });
        self.ledger.report.removed_versions.push(version.version());
        Counters::add(&self.counters.removed, 1);
        self.gone.insert(version.location.path);
    }

    /// Removes manifests, the oldest first. One that cannot be removed keeps what it names.
    async fn remove_manifests(
        &mut self,
        table: &Lineage,
        reach: &Arc<Reach>,
        doomed: Vec<Doomed>,
    ) -> Result<()> {
        let remover = &self.remover;
        let outcomes: Vec<_> = stream::iter(doomed)
            .map(|version| async move {
                let outcome = remover.remove(table, &version.location.path).await;
                (version, outcome)
            })
            .buffered(remover.concurrency)
            .collect()
            .await;
        for (version, outcome) in outcomes {
            let error = match outcome {
                Ok(()) => None,
                // It may be gone all the same: what counts is whether it is there.
                Err(error) => self
                    .keep(table, reach, &version.location)
                    .await?
                    .then_some(error),
            };
            match error {
                None => {
                    self.forget(table, &version).await;
                    self.manifest_gone(version);
                }
                Some(error) => {
                    let path = show(&self.root, &version.location.path);
                    self.ledger.failed(path, error);
                }
            }
        }
        self.tell();
        Ok(())
    }

    /// Retires what an external manifest store knows of a version that is gone.
    async fn forget(&mut self, table: &Lineage, version: &Doomed) {
        let Some(identity) = &version.location.identity else {
            return;
        };
        let forgotten = table
            .handler
            .forget_version(&table.base, version.version(), identity)
            .await;
        if let Err(error) = forgotten {
            let path = show(&self.root, &version.location.path);
            self.ledger.failed(path, error);
        }
    }

    /// Enters versions that were published since the list was made: a restore among them may name
    /// what only removed versions named.
    async fn enter_new(&mut self, table: &Lineage, reach: &Arc<Reach>, newest: u64) -> Result<()> {
        for location in table.versions_since(newest).await? {
            self.keep(table, reach, &location).await?;
        }
        Ok(())
    }

    /// Goes through the files.
    async fn sweep(
        &mut self,
        table: &Lineage,
        reach: &Arc<Reach>,
        options: &CleanupOptions,
    ) -> Result<()> {
        let settled = self.settled(options);
        let judge = Judge::new(reach, settled);
        let mut folders = IndexFolders::default();
        let Self {
            remover,
            root,
            ledger,
            counters,
            progress,
            ..
        } = self;
        let (remover, counters) = (&*remover, &*counters);
        let judged = list(table, root, &judge);
        let outcomes = judged
            .inspect(|_| {
                if Counters::add(&counters.listed, 1).is_multiple_of(PROGRESS_STEP) {
                    progress(counters.progress());
                }
            })
            .map(|listed| async move {
                match listed {
                    Ok(Listed::Goes { location, file }) if !options.dry_run => {
                        let outcome = remover.remove(table, &location).await;
                        Ok((Listed::Goes { location, file }, outcome))
                    }
                    Ok(listed) => Ok((listed, Ok(()))),
                    Err(e) => Err(e),
                }
            })
            .buffer_unordered(remover.concurrency);
        let mut outcomes = std::pin::pin!(outcomes);
        while let Some(outcome) = outcomes.next().await {
            match outcome {
                Ok((Listed::Stays, _)) => {}
                Ok((Listed::InProgress { bytes }, _)) => ledger.report.in_progress.add(bytes),
                Ok((Listed::Goes { location, file }, Ok(()))) => {
                    if file.kind == FileKind::Index {
                        folders.held(table, &location);
                    }
                    ledger.removed(file);
                    Counters::add(&counters.removed, 1);
                }
                Ok((Listed::Goes { file, .. }, Err(error))) => ledger.failed(file.path, error),
                Err((folder, error)) => ledger.failed(folder, error),
            }
        }
        if !options.dry_run
            && let Err(error) = folders.remove_empty(table, reach, settled).await
        {
            ledger.warn(format!("empty index folders are left: {error}"));
        }
        progress(counters.progress());
        Ok(())
    }

    fn know(&self, versions: usize) {
        Counters::add(&self.counters.versions_known, versions as u64);
    }

    fn done(&self, reach: &Reach) {
        Counters::add(&self.counters.versions_done, 1);
        self.counters
            .objects
            .store(reach.objects(), Ordering::Relaxed);
        self.tell();
    }
}

/// What the policy would remove.
#[derive(Debug, Default)]
struct Doom {
    versions: Vec<Doomed>,
    /// Versions it would remove and that stay for a tag or a branch.
    tagged: BTreeSet<u64>,
}

/// Enters a version that stays. Nothing when another cleanup removed it meanwhile, and with it files
/// that were still to be read.
async fn enter(
    reach: &Arc<Reach>,
    table: &Lineage,
    version: &Version,
    fate: Fate,
) -> Result<Option<bool>> {
    let error = match reach.enter(table, version, fate).await {
        Ok(named) => return Ok(Some(named)),
        Err(error) => needed(error, version.number()),
    };
    if error.corrupt_rule().is_some() && table.read(&version.location).await?.is_none() {
        // The walk ended half-way through subtrees that other versions may share.
        reach.forget_walks();
        return Ok(None);
    }
    Err(error)
}

/// The error that ends a cleanup: a version that stays cannot be walked to its end.
fn needed(error: Error, version: u64) -> Error {
    match error {
        Error::Corrupt {
            object,
            rule,
            expected,
            found,
        } => Error::Corrupt {
            object: format!(
                "{object} (of version {version}, which stays: what it needs cannot be told, so no file was removed)"
            ),
            rule,
            expected,
            found,
        },
        error => error,
    }
}

fn vanished(table: &Lineage, version: u64) -> Error {
    Error::Conflict {
        message: format!(
            "version {version} of {} went away while it was being looked at: is another cleanup running?",
            display_uri(&table.uri)
        ),
        retryable: true,
    }
}
