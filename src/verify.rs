//! Checking a whole version against every rule, and listing everything that is wrong.
//!
//! A query stops at the first broken rule it meets; `verify` notes it and goes on with what can
//! still be reached. The checks themselves are the readers' own.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures::{StreamExt, stream};
use lance::Dataset;
use lance_io::object_store::ObjectStore;
use lance_table::format::pb;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde::Serialize;

use crate::deletions::check_deletions;
use crate::error::{Error, Result};
use crate::functions::deletion_path;
use crate::ranges::FragmentRanges;
use crate::snapshot::{Catalog, OpenOptions, Snapshot, TreeCatalog};
use crate::tree::object::{BaseTable, Owner, dataset_root, off_thread};
use crate::tree::record::check_record;
use crate::tree::summary::{Counts, Tally};
use crate::tree_scan::{
    ResolvedFragment, WalkOptions, WalkState, Work, childless, overlapping, resolve_leaf,
};

/// What to check besides the metadata.
#[derive(Debug, Clone, Copy)]
pub struct VerifyOptions {
    /// Also ask the store for every data file, and read every deletion file: one request a file.
    /// Default on.
    pub data_files: bool,
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self { data_files: true }
    }
}

/// How far a verification is.
#[derive(Debug, Clone, Copy)]
pub struct VerifyProgress {
    /// Tree objects checked.
    pub objects_done: u64,
    /// Tree objects known so far; grows while nodes are opened.
    pub objects_known: u64,
    /// Fragments checked.
    pub fragments: u64,
}

/// One broken rule.
#[derive(Debug, Clone, Serialize, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The object that breaks it.
    pub object: String,
    /// The rule's name.
    pub rule: String,
    /// What the rule asks for.
    pub expected: String,
    /// What the object holds.
    pub found: String,
}

impl Finding {
    fn of(error: &Error) -> Self {
        match error {
            Error::Corrupt {
                object,
                rule,
                expected,
                found,
            } => Self {
                object: object.clone(),
                rule: (*rule).to_string(),
                expected: expected.clone(),
                found: found.clone(),
            },
            Error::Unsupported { object, what } => Self {
                object: object.clone(),
                rule: "unsupported".to_string(),
                expected: "features this version knows".to_string(),
                found: what.clone(),
            },
            other => Self {
                object: String::new(),
                rule: "unreadable".to_string(),
                expected: "an object that can be read".to_string(),
                found: other.to_string(),
            },
        }
    }
}

/// The result of a verification.
#[derive(Debug, Clone, Serialize)]
pub struct VerifyReport {
    /// The table.
    pub uri: String,
    /// The version; none when its manifest could not be opened.
    pub version: Option<u64>,
    /// Its layout.
    pub layout: Option<String>,
    /// Fragments found.
    pub fragments: u64,
    /// Visible rows of those fragments.
    pub visible_rows: u64,
    /// Tree objects checked, the root included.
    pub objects: u64,
    /// Data and deletion files asked for.
    pub files: u64,
    /// Everything that is wrong.
    pub findings: Vec<Finding>,
}

impl VerifyReport {
    /// Whether nothing is wrong.
    pub fn ok(&self) -> bool {
        self.findings.is_empty()
    }
}

/// Checks a version, calling `progress` now and then.
///
/// # Errors
/// Only when the request cannot be served: no such table or version, or a store that cannot be
/// reached. A corrupt version is a report with findings.
pub async fn verify(
    uri: &str,
    options: VerifyOptions,
    open: OpenOptions,
    progress: impl Fn(VerifyProgress),
) -> Result<VerifyReport> {
    let mut report = VerifyReport {
        uri: crate::resolve::display_uri(uri),
        version: None,
        layout: None,
        fragments: 0,
        visible_rows: 0,
        objects: 0,
        files: 0,
        findings: Vec::new(),
    };
    let snapshot = match Snapshot::open(uri, open).await {
        Ok(snapshot) => snapshot,
        Err(e @ (Error::Corrupt { .. } | Error::Unsupported { .. })) => {
            report.findings.push(Finding::of(&e));
            return Ok(report);
        }
        Err(e) => return Err(e),
    };
    report.version = Some(snapshot.version());
    report.layout = Some(snapshot.layout().to_string());
    let mut verifier = Verifier {
        files: FileChecker::new(&snapshot, options.data_files),
        snapshot: Arc::clone(&snapshot),
        state: WalkState::of_every_column(),
        tally: Tally::default(),
        fragments: 0,
        objects_done: 0,
        objects_known: 0,
        findings: BTreeSet::new(),
        progress: &progress,
    };
    match &snapshot.catalog {
        Catalog::Flat(_) => verifier.flat().await,
        Catalog::Tree(tree) => verifier.tree(tree).await,
    }
    report.objects = verifier.objects_done;
    report.fragments = verifier.fragments;
    report.visible_rows = verifier
        .tally
        .counts(uri)
        .map_or(0, |counts| counts.visible_rows);
    report.files = verifier.files.asked.load(Ordering::Relaxed);
    report.findings = verifier.findings.into_iter().collect();
    Ok(report)
}

struct Verifier<'a> {
    snapshot: Arc<Snapshot>,
    state: WalkState,
    files: FileChecker,
    tally: Tally,
    fragments: u64,
    objects_done: u64,
    objects_known: u64,
    findings: BTreeSet<Finding>,
    progress: &'a dyn Fn(VerifyProgress),
}

impl Verifier<'_> {
    fn note(&mut self, error: &Error) {
        self.findings.insert(Finding::of(error));
    }

    fn object_done(&mut self) {
        self.objects_done += 1;
        (self.progress)(VerifyProgress {
            objects_done: self.objects_done,
            objects_known: self.objects_known,
            fragments: self.fragments,
        });
    }

    async fn tree(&mut self, tree: &TreeCatalog) {
        if let Err(e) = tree.counts() {
            self.note(&e);
        }
        self.objects_known = 1;
        let mut complete = true;
        if tree.root.child_height().is_none() {
            match childless(tree, &FragmentRanges::all(), &self.state) {
                Ok(fragments) => self.check_fragments(fragments).await,
                Err(e) => {
                    complete = false;
                    self.note(&e);
                    for target in targets(&tree.since_root, &tree.root.node.buffer) {
                        let one = FragmentRanges::single(target);
                        match childless(tree, &one, &self.state) {
                            Ok(fragments) => self.check_fragments(fragments).await,
                            Err(e) => self.note(&e),
                        }
                    }
                }
            }
        }
        self.object_done();
        let all = FragmentRanges::all();
        let mut stack = tree.root_work(&all, &self.state.stats);
        stack.reverse();
        self.objects_known += stack.len() as u64;
        // Depth first, so that what is waiting is at most a path's width.
        while let Some(work) = stack.pop() {
            if work.child.height == 0 {
                complete &= self.leaf(tree, &work).await;
            } else {
                match tree.open_node(&work, &self.state).await {
                    Ok((node, pending)) => {
                        let mut below =
                            overlapping(&node, &work, &pending, &all, &self.state.stats);
                        self.objects_known += below.len() as u64;
                        below.reverse();
                        stack.extend(below);
                    }
                    Err(e) => {
                        complete = false;
                        self.note(&e);
                    }
                }
            }
            self.object_done();
        }
        if complete {
            self.check_totals(tree.counts());
        }
    }

    /// Checks a leaf and its fragments; whether all of them could be resolved.
    async fn leaf(&mut self, tree: &TreeCatalog, work: &Work) -> bool {
        let leaf = match tree.open_leaf(work, &self.state).await {
            Ok(leaf) => leaf,
            Err(e) => {
                self.note(&e);
                return false;
            }
        };
        match resolve_leaf(&leaf, work, &FragmentRanges::all()) {
            Ok(fragments) => {
                self.check_fragments(fragments).await;
                true
            }
            Err(_) => {
                // One by one, to name each fragment that cannot be resolved and keep the others.
                let mut ids: BTreeSet<u32> = leaf.ids().iter().copied().collect();
                ids.extend(work.pending.iter().map(|p| p.mutation.target));
                for id in ids {
                    match resolve_leaf(&leaf, work, &FragmentRanges::single(id)) {
                        Ok(fragments) => self.check_fragments(fragments).await,
                        Err(e) => self.note(&e),
                    }
                }
                false
            }
        }
    }

    async fn flat(&mut self) {
        let walk =
            self.snapshot
                .fragments(FragmentRanges::all(), &WalkOptions::default(), &self.state);
        let mut walk = walk;
        let mut last = None;
        while let Some(batch) = walk.next().await {
            match batch {
                Ok(fragments) => {
                    for fragment in &fragments {
                        if last == Some(fragment.id()) {
                            self.note(&Error::corrupt(
                                format!("fragment {}", fragment.id()),
                                "fragment_duplicate",
                                "fragment ids that are unique",
                                "two records",
                            ));
                        }
                        last = Some(fragment.id());
                    }
                    self.check_flat_records(&fragments);
                    self.check_fragments(fragments).await;
                }
                Err(e) => self.note(&e),
            }
        }
    }

    fn check_flat_records(&mut self, fragments: &[ResolvedFragment]) {
        let bases = BaseTable::try_new(
            "manifest",
            String::new(),
            &self.snapshot.head().base_paths,
            |path| Ok(path.to_string()),
        );
        let bases = match bases {
            Ok(bases) => bases,
            Err(e) => return self.note(&e),
        };
        for fragment in fragments {
            let checked = fragment.record().and_then(|mut record| {
                let label = format!("fragment {}", fragment.id());
                // A flat record may leave out counts; what it has must be right.
                if fragment.physical_rows().is_none() {
                    record.deletion_file = None;
                }
                check_record(&label, &record, &bases)
            });
            if let Err(e) = checked {
                self.note(&e);
            }
        }
    }

    async fn check_fragments(&mut self, fragments: Vec<ResolvedFragment>) {
        self.fragments += fragments.len() as u64;
        for fragment in &fragments {
            self.tally += fragment.counts().unwrap_or_default();
        }
        for finding in self.files.check(&fragments).await {
            self.findings.insert(finding);
        }
    }

    /// The sums over all records must be what the root's summaries derive.
    fn check_totals(&mut self, derived: Result<Counts>) {
        let (Ok(derived), Ok(found)) = (derived, self.tally.counts("records")) else {
            return;
        };
        if derived != found {
            self.note(&Error::corrupt(
                "version",
                "derived_counts",
                format!("{derived:?}, as summaries and deltas derive"),
                format!("{found:?} in the records"),
            ));
        }
    }
}

fn targets(
    a: &[Arc<crate::tree::mutation::Mutation>],
    b: &[Arc<crate::tree::mutation::Mutation>],
) -> BTreeSet<u32> {
    a.iter().chain(b).map(|m| m.target).collect()
}

/// Files asked for at once.
const FILE_CONCURRENCY: usize = 32;

/// Asks the store for the files that records name.
struct FileChecker {
    dataset: Arc<Dataset>,
    on: bool,
    asked: AtomicU64,
    /// Set after the store itself failed, so that one outage is one finding and not a million.
    failed: AtomicBool,
}

impl FileChecker {
    fn new(snapshot: &Snapshot, on: bool) -> Self {
        Self {
            dataset: Arc::clone(snapshot.shell()),
            on,
            asked: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        }
    }

    async fn check(&self, fragments: &[ResolvedFragment]) -> Vec<Finding> {
        if !self.on {
            return Vec::new();
        }
        let records = fragments.iter().map(ResolvedFragment::record);
        let checks = stream::iter(records)
            .map(|record| async move {
                match record {
                    Ok(record) => self.check_record(&record).await,
                    Err(e) => vec![Finding::of(&e)],
                }
            })
            .buffer_unordered(FILE_CONCURRENCY);
        checks.concat().await
    }

    async fn check_record(&self, record: &pb::DataFragment) -> Vec<Finding> {
        let mut findings = Vec::new();
        let overlays = record.overlays.iter().filter_map(|o| o.data_file.as_ref());
        for file in record.files.iter().chain(overlays) {
            let size = Some(file.file_size_bytes).filter(|size| *size > 0);
            let found = self
                .check_file(record.id, "data", &file.path, file.base_id, size)
                .await;
            findings.extend(found.err().map(|e| Finding::of(&e)));
        }
        if let Some(deletion) = &record.deletion_file {
            let found = self.check_deletions(record, deletion).await;
            findings.extend(found.err().map(|e| Finding::of(&e)));
        }
        findings
    }

    async fn check_file(
        &self,
        fragment: u64,
        directory: &str,
        path: &str,
        base_id: Option<u32>,
        size: Option<u64>,
    ) -> Result<()> {
        if self.failed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (store, location) = self.locate(directory, path, base_id).await?;
        let object = format!("fragment {fragment}, file {location}");
        match store.inner.head(&location).await {
            Ok(meta) if size.is_none_or(|size| size == meta.size) => Ok(()),
            Ok(meta) => Err(Error::corrupt(
                object,
                "file_size",
                format!("{} bytes", size.unwrap_or_default()),
                format!("{} bytes", meta.size),
            )),
            Err(e) => Err(self.unread(object, e)),
        }
    }

    /// Reads a deletion file: it may be there and say something else than the record.
    async fn check_deletions(
        &self,
        record: &pb::DataFragment,
        deletion: &pb::DeletionFile,
    ) -> Result<()> {
        if self.failed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let path = deletion_path(record.id, deletion);
        let (store, location) = self.locate("", &path, deletion.base_id).await?;
        let object = format!("fragment {}, file {location}", record.id);
        let read = async { store.inner.get(&location).await?.bytes().await };
        let bytes = read.await.map_err(|e| self.unread(object.clone(), e))?;
        let (id, rows, deletion) = (record.id, record.physical_rows, *deletion);
        off_thread(usize::MAX, move || {
            check_deletions(&object, id, &deletion, rows, &bytes)
        })
        .await
    }

    /// A file that cannot be read: a finding, or an outage.
    fn unread(&self, object: String, error: object_store::Error) -> Error {
        match error {
            object_store::Error::NotFound { .. } => {
                Error::corrupt(object, "file_missing", "a file at this location", "none")
            }
            e => {
                self.failed.store(true, Ordering::Relaxed);
                Error::store(object, e)
            }
        }
    }

    /// Where a file lies; counts it as asked for.
    async fn locate(
        &self,
        directory: &str,
        path: &str,
        base_id: Option<u32>,
    ) -> Result<(Arc<ObjectStore>, Path)> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let owner = base_id.map_or(Owner::Current, Owner::Base);
        let (store, mut location) = dataset_root(&self.dataset, owner).await?;
        let is_root = base_id.is_none_or(|id| {
            let base = self.dataset.manifest().base_paths.get(&id);
            base.is_some_and(|b| b.is_dataset_root)
        });
        if is_root && !directory.is_empty() {
            location = location.join(directory);
        }
        let location = path
            .split('/')
            .fold(location, |location: Path, part| location.join(part));
        Ok((store, location))
    }
}
