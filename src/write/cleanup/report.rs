//! What a cleanup did, or would do.

use std::collections::BTreeMap;

use serde::Serialize;

/// Kinds of file that a cleanup removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FileKind {
    /// The manifest of a version.
    Manifest,
    /// What a failed commit left of a manifest.
    TemporaryManifest,
    /// A data file, with its blobs.
    Data,
    /// A deletion file.
    Deletion,
    /// A file of an index.
    Index,
    /// The record of a transaction.
    Transaction,
    /// The root of a tree.
    TreeRoot,
    /// An interior node of a tree.
    TreeNode,
    /// A leaf of a tree.
    TreeLeaf,
    /// Anything else under `_bt/`.
    TreeOther,
}

impl std::fmt::Display for FileKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Manifest => "manifests",
            Self::TemporaryManifest => "temporary manifests",
            Self::Data => "data files",
            Self::Deletion => "deletion files",
            Self::Index => "index files",
            Self::Transaction => "transactions",
            Self::TreeRoot => "tree roots",
            Self::TreeNode => "tree nodes",
            Self::TreeLeaf => "tree leaves",
            Self::TreeOther => "other tree objects",
        })
    }
}

/// Why a file goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Why {
    /// It is the manifest of a version that goes.
    VersionRemoved,
    /// Only versions that go name it.
    Unreachable,
    /// No version names it, and it is older than what a commit could still be working on: a failed
    /// commit left it, or a cleanup that was stopped.
    Orphan,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::VersionRemoved => "version removed",
            Self::Unreachable => "named only by removed versions",
            Self::Orphan => "named by no version",
        })
    }
}

/// A number of files and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct FileTally {
    /// Files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl FileTally {
    pub(super) fn add(&mut self, bytes: u64) {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    fn merge(&mut self, other: Self) {
        self.files += other.files;
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// Files of one kind that went for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RemovedKind {
    /// What they are.
    pub kind: FileKind,
    /// Why they went.
    pub why: Why,
    /// How many, and their bytes.
    #[serde(flatten)]
    pub tally: FileTally,
}

/// One file that went.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RemovedFile {
    /// Its path relative to the table.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// Why it went.
    pub why: Why,
    /// Its bytes.
    pub bytes: u64,
}

/// A file that could not be removed, or a folder that could not be listed. The next cleanup tries
/// again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FailedRemoval {
    /// Its path relative to the table.
    pub path: String,
    /// Why not.
    pub error: String,
}

/// A branch that shares files with versions this cleanup may remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReferencedBranch {
    /// Its name.
    pub name: String,
    /// The version of this table it began from, or the branch between them did.
    pub version: u64,
    /// Whether it needs files of this table itself, so that this version stays too.
    pub keeps_version: bool,
    /// Whether it was cleaned too.
    pub cleaned: bool,
}

/// What a cleanup did, or on a dry run would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CleanupReport {
    /// The table.
    pub uri: String,
    /// Whether nothing was removed.
    pub dry_run: bool,
    /// The latest version when it began.
    pub latest_version: u64,
    /// Versions that stay, detached ones included; those of branches that were cleaned too.
    pub kept_versions: u64,
    /// Versions that went, in order.
    pub removed_versions: Vec<u64>,
    /// Files that went, by kind and reason.
    pub removed: Vec<RemovedKind>,
    /// Those files, in the order of their paths; of more than `CleanupOptions::list_files`, some.
    pub files: Vec<RemovedFile>,
    /// Files that no version names and that may belong to a commit in progress.
    pub in_progress: FileTally,
    /// How many removals failed.
    pub failures: u64,
    /// The first of them.
    pub failed: Vec<FailedRemoval>,
    /// Branches that share files with versions that go.
    pub branches: Vec<ReferencedBranch>,
    /// What was left alone although it may be garbage, and why.
    pub warnings: Vec<String>,
    /// Requests for tree objects.
    pub objects_read: u64,
    /// Bytes of those objects.
    pub object_bytes_read: u64,
}

impl CleanupReport {
    /// All files that went.
    pub fn total(&self) -> FileTally {
        let mut total = FileTally::default();
        for removed in &self.removed {
            total.merge(removed.tally);
        }
        total
    }
}

/// How far a cleanup is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CleanupProgress {
    /// Versions whose files are known.
    pub versions_done: u64,
    /// Versions there are.
    pub versions_known: u64,
    /// Tree objects opened.
    pub objects: u64,
    /// Files listed.
    pub files_listed: u64,
    /// Files removed; on a dry run, those that would be.
    pub files_removed: u64,
}

/// Failures that are kept with their message.
const FAILURES_SHOWN: usize = 100;

/// A report being written.
#[derive(Debug)]
pub(super) struct Ledger {
    pub report: CleanupReport,
    removed: BTreeMap<(FileKind, Why), FileTally>,
    list: usize,
}

impl Ledger {
    pub(super) fn new(uri: String, latest_version: u64, dry_run: bool, list: usize) -> Self {
        Self {
            report: CleanupReport {
                uri,
                dry_run,
                latest_version,
                kept_versions: 0,
                removed_versions: Vec::new(),
                removed: Vec::new(),
                files: Vec::new(),
                in_progress: FileTally::default(),
                failures: 0,
                failed: Vec::new(),
                branches: Vec::new(),
                warnings: Vec::new(),
                objects_read: 0,
                object_bytes_read: 0,
            },
            removed: BTreeMap::new(),
            list,
        }
    }

    pub(super) fn removed(&mut self, file: RemovedFile) {
        let tally = self.removed.entry((file.kind, file.why)).or_default();
        tally.add(file.bytes);
        if self.report.files.len() < self.list {
            self.report.files.push(file);
        }
    }

    pub(super) fn failed(&mut self, path: String, error: impl std::fmt::Display) {
        let error = error.to_string();
        // Only the first is shouted: a store that fails would say so for each of a million files.
        if self.report.failures == 0 {
            tracing::warn!(%path, %error, "a file could not be removed, going on");
        }
        self.report.failures += 1;
        if self.report.failed.len() < FAILURES_SHOWN {
            self.report.failed.push(FailedRemoval { path, error });
        }
    }

    pub(super) fn warn(&mut self, warning: String) {
        tracing::warn!("{warning}");
        if !self.report.warnings.contains(&warning) {
            self.report.warnings.push(warning);
        }
    }

    pub(super) fn finish(mut self) -> CleanupReport {
        self.report.removed = self
            .removed
            .into_iter()
            .map(|((kind, why), tally)| RemovedKind { kind, why, tally })
            .collect();
        self.report.files.sort_unstable();
        self.report.removed_versions.sort_unstable();
        self.report
    }
}
