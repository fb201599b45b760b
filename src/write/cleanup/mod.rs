//! Cleanup: removing versions nobody needs, and the files that nothing needs any more.
//!
//! ```text
//!   policy, tags, branches ──► which versions stay, which go
//!                                    │ every manifest, every distinct subtree once      (reach)
//!                                    ▼
//!                   names reached by what stays · names released by what goes           (names)
//!                                    │
//!   manifests that go ── removed ────┤
//!   each file of the table ── judged ┴─► stays · in progress · goes                     (sweep)
//! ```
//!
//! # What goes
//!
//! The rules are those of Lance's cleanup, for flat versions and trees alike and for histories with
//! both. A version goes when it meets the policy of [`CleanupOptions`]; the latest version, later
//! ones, tagged ones, detached ones and those that a branch needs stay. A file goes when no version
//! that stays reaches it, and either a version that goes names it or it is 7 days old. A version
//! reaches what its *resolved* state names: a file named by a buffered mutation, but not one that only
//! a superseded mutation names; and the tree objects on the way there. Objects of another dataset are
//! never touched.
//!
//! # What is safe
//!
//! - Everything is read before anything is removed. If a version that stays cannot be walked to its
//!   end, nothing is removed, and the error names the object.
//! - Manifests go first and files after them, where Lance goes the other way. Stopped at any point,
//!   every manifest that is left is complete; what the removed ones named is left behind as files that
//!   no version names, and goes with a cleanup seven days later. A manifest that cannot be removed
//!   keeps all it names.
//! - Readers of versions that stay are never disturbed. A reader of a version that goes gets an error,
//!   never a wrong answer.
//! - Writers may go on. A commit names objects of the version before it, which is never older than the
//!   latest that the cleanup saw, and objects it wrote itself, which no version names yet and which
//!   are younger than 7 days. Versions that were published meanwhile are read before files are
//!   removed. The exceptions are Lance's too: a restore of a version that is just being removed, a tag
//!   or branch that is made of one, a commit that takes more than 7 days; and with
//!   `delete_unverified` any writer at all.
//! - Several cleanups at once remove no more than each of them alone.
//!
//! # Branches and clones
//!
//! A branch lies in the table and is known to it: when the version it began from would go, the files
//! that any of its versions names here stay, and if there are any that version stays too, whole.
//! (Lance leaves its manifest and removes files from under it.) A shallow clone elsewhere is not
//! known, to Lance neither: keep the versions that clones were made of with a tag.
//!
//! # What it costs
//!
//! One request a manifest, one for its root where it has one of its own, and one for each distinct
//! tree object; a version that shares a subtree with another, with the same mutations above it, does
//! not walk it again. Memory is that of the names: 8 bytes for each distinct file or object reached,
//! 16 for each that only removed versions name, and 16 for each distinct subtree, each at most
//! doubled by the free places of a hash table and once more while it grows; besides, the cache of tree
//! objects and 256 MiB of manifests. A table of a million files takes about 20 MB.

mod auto;
mod duration;
mod lineage;
mod names;
mod options;
mod reach;
mod report;
mod run;
mod sweep;

pub(crate) use auto::{SETTINGS, after_commit};
pub use duration::parse_duration;
pub use options::CleanupOptions;
pub use report::{
    CleanupProgress, CleanupReport, FailedRemoval, FileKind, FileTally, ReferencedBranch,
    RemovedFile, RemovedKind, Why,
};

use super::table::TreeTable;
use crate::error::{Error, Result};
use crate::resolve::VersionAt;
use crate::snapshot::{OpenOptions, Snapshot};

/// Cleans up the table at `uri`, of either layout, or the branch that `open.reference` names; calls
/// `progress` now and then. See [the module](self) for what goes and what is safe.
///
/// # Errors
/// Before anything is removed: [`Error::InvalidInput`] for options that make no sense and for tagged
/// versions that would go, [`Error::Corrupt`] when a version that stays breaks a rule,
/// [`Error::Unsupported`] when any version uses features this build does not know, and the store's. A
/// removal that fails is no error: it is in the report, and the next cleanup tries again.
pub async fn cleanup(
    uri: &str,
    options: CleanupOptions,
    open: OpenOptions,
    progress: impl Fn(CleanupProgress) + Send + Sync,
) -> Result<CleanupReport> {
    options.validate()?;
    if open.reference.at != VersionAt::Latest {
        return Err(Error::invalid(
            "a cleanup is of a whole table or branch: name a branch or nothing, and the versions to remove in the options",
        ));
    }
    let snapshot = Snapshot::open(uri, open.clone()).await?;
    run::cleanup(&snapshot, &options, None, &open, &progress).await
}

impl TreeTable {
    /// Cleans up the table, see [`cleanup`].
    ///
    /// # Errors
    /// Those of [`cleanup`].
    pub async fn cleanup(&self, options: CleanupOptions) -> Result<CleanupReport> {
        cleanup(self.uri(), options, self.options().clone(), |_| {}).await
    }
}
