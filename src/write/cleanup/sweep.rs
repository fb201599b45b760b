//! Going through the files of a table: which of them go, and removing those.
//!
//! The rules are Lance's, file by file, and those of data files for everything under `_bt/`. What no
//! rule speaks of is left alone: names this build does not know may be of a format it does not know.

use std::collections::HashSet;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt};
use tokio::sync::Mutex;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::lineage::Lineage;
use super::reach::Reach;
use super::report::{FileKind, RemovedFile, Why};
use crate::error::{Error, Result};
use crate::retry::retrying;

/// The folders of a table that hold what versions name.
const FOLDERS: [&str; 8] = [
    "_versions",
    "_transactions",
    "data",
    "_blobs",
    "_indices",
    "_deletions",
    "_fri",
    "_bt",
];

/// What becomes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It is needed, or nothing is known about its kind.
    Stays,
    /// No version names it, and a commit may be about to.
    InProgress,
    Goes(FileKind, Why),
}

/// Decides which files go.
#[derive(Debug, Clone)]
pub(super) struct Judge {
    reach: Arc<Reach>,
    /// Files changed since are left alone unless a version that goes names them; none with
    /// `delete_unverified`.
    settled: Option<DateTime<Utc>>,
    keeps_blobs: bool,
    keeps_row_maps: bool,
}

impl Judge {
    pub(super) fn new(reach: &Arc<Reach>, settled: Option<DateTime<Utc>>) -> Self {
        Self {
            reach: Arc::clone(reach),
            settled,
            keeps_blobs: reach.has_managed_blobs(),
            keeps_row_maps: reach.has_row_maps(),
        }
    }

    /// `path` is relative to the table.
    fn judge(&self, path: &str, changed: DateTime<Utc>) -> Verdict {
        let (folder, rest) = path.split_once('/').unwrap_or((path, ""));
        let file = rest.rsplit('/').next().unwrap_or_default();
        let extension = file.rsplit_once('.').map_or("", |(_, extension)| extension);
        match (folder, extension) {
            ("_versions", _) if rest.starts_with(".tmp") => {
                self.by_age(FileKind::TemporaryManifest, changed)
            }
            // An index, or a map of rows, is named as a whole.
            ("_indices", _) => match rest.split_once('/') {
                Some((uuid, _)) => {
                    self.by_name(FileKind::Index, &format!("_indices/{uuid}"), changed)
                }
                None => Verdict::Stays,
            },
            ("_fri", _) if self.keeps_row_maps || !rest.contains('/') => Verdict::Stays,
            ("_fri", _) => self.by_age(FileKind::Index, changed),
            ("data", "lance") => self.by_name(FileKind::Data, path, changed),
            ("data" | "_blobs", "blob") if self.keeps_blobs => Verdict::Stays,
            ("_blobs", "blob") => self.by_name(FileKind::Data, path, changed),
            // Blobs beside a data file lie in a folder with its name, and go with it.
            ("data", "blob") => match rest.split('/').collect::<Vec<_>>().as_slice() {
                [key, _] => self.by_name(FileKind::Data, &format!("data/{key}.lance"), changed),
                _ => Verdict::Stays,
            },
            ("data", _) if file.starts_with(".tmp") => self.by_age(FileKind::Data, changed),
            ("_deletions", "arrow" | "bin") => self.by_name(FileKind::Deletion, path, changed),
            ("_transactions", "txn") => self.by_name(FileKind::Transaction, path, changed),
            ("_bt", _) => self.by_name(tree_kind(rest, extension), path, changed),
            _ => Verdict::Stays,
        }
    }

    fn by_name(&self, kind: FileKind, name: &str, changed: DateTime<Utc>) -> Verdict {
        if self.reach.is_reached(name) {
            Verdict::Stays
        } else if self.reach.is_released(name) {
            Verdict::Goes(kind, Why::Unreachable)
        } else {
            self.by_age(kind, changed)
        }
    }

    fn by_age(&self, kind: FileKind, changed: DateTime<Utc>) -> Verdict {
        if self.settled.is_some_and(|settled| changed >= settled) {
            Verdict::InProgress
        } else {
            Verdict::Goes(kind, Why::Orphan)
        }
    }
}

fn tree_kind(rest: &str, extension: &str) -> FileKind {
    match (rest.split('/').next().unwrap_or_default(), extension) {
        ("root", "root") => FileKind::TreeRoot,
        ("node", "node") => FileKind::TreeNode,
        ("leaf", "lance") => FileKind::TreeLeaf,
        _ => FileKind::TreeOther,
    }
}

/// One listed file, judged.
#[derive(Debug)]
pub(super) enum Listed {
    Stays,
    InProgress { bytes: u64 },
    Goes { location: Path, file: RemovedFile },
}

/// Every file in the folders of `table`, judged, with paths relative to `shown` where they lie in it.
/// A folder that cannot be listed is an error with its name; the others follow all the same.
pub(super) fn list<'a>(
    table: &'a Lineage,
    shown: &'a Path,
    judge: &'a Judge,
) -> BoxStream<'a, std::result::Result<Listed, (String, lance::Error)>> {
    stream::iter(FOLDERS)
        .flat_map(move |folder| {
            let directory = table.base.clone().join(folder);
            let files = table
                .store
                .read_dir_all(&directory, None)
                .filter_map(async |file| match file {
                    Err(e) if e.is_not_found() => None,
                    file => Some(file),
                });
            files
                .map_ok(move |file| judged(table, shown, judge, file))
                .map_err(move |e| (folder.to_string(), e))
                .boxed()
        })
        .boxed()
}

fn judged(table: &Lineage, shown: &Path, judge: &Judge, file: ObjectMeta) -> Listed {
    let Some(path) = relative(&table.base, &file.location) else {
        return Listed::Stays;
    };
    match judge.judge(path, file.last_modified) {
        Verdict::Stays => Listed::Stays,
        Verdict::InProgress => Listed::InProgress { bytes: file.size },
        Verdict::Goes(kind, why) => Listed::Goes {
            file: RemovedFile {
                path: show(shown, &file.location),
                kind,
                why,
                bytes: file.size,
            },
            location: file.location,
        },
    }
}

/// A location relative to `base`.
fn relative<'a>(base: &Path, location: &'a Path) -> Option<&'a str> {
    if base.as_ref().is_empty() {
        return Some(location.as_ref());
    }
    location
        .as_ref()
        .strip_prefix(base.as_ref())
        .and_then(|rest| rest.strip_prefix('/'))
}

/// A location relative to `base`, or where it lies elsewhere the whole of it.
pub(super) fn show(base: &Path, location: &Path) -> String {
    relative(base, location)
        .unwrap_or(location.as_ref())
        .to_string()
}

/// Removes files: so many at once, so many in a second.
#[derive(Debug)]
pub(super) struct Remover {
    pub concurrency: usize,
    ticks: Option<Mutex<Interval>>,
}

impl Remover {
    pub(super) fn new(concurrency: usize, rate: Option<u64>) -> Self {
        let ticks = rate.map(|rate| {
            let pause = 1_000_000_000u64.div_ceil(rate.max(1));
            let mut ticks = interval(std::time::Duration::from_nanos(pause));
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            Mutex::new(ticks)
        });
        Self { concurrency, ticks }
    }

    /// Removes one file. One that is gone already is as good as removed.
    ///
    /// # Errors
    /// [`Error::Store`], after trying again where that can help.
    pub(super) async fn remove(&self, table: &Lineage, location: &Path) -> Result<()> {
        if let Some(ticks) = &self.ticks {
            ticks.lock().await.tick().await;
        }
        retrying(|| async {
            match table.store.inner.delete(location).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(e) => Err(Error::Store {
                    object: location.to_string(),
                    source: Arc::new(e),
                }),
            }
        })
        .await
    }
}

/// Folders of indexes that a removal may have emptied.
#[derive(Debug, Default)]
pub(super) struct IndexFolders(HashSet<Path>);

impl IndexFolders {
    /// Notes the folders that held `location`.
    pub(super) fn held(&mut self, table: &Lineage, location: &Path) {
        let root = table.base.clone().join("_indices");
        let Some(path) = relative(&root, location) else {
            return;
        };
        let mut folder = root;
        let parts: Vec<_> = path.split('/').collect();
        for part in parts.iter().take(parts.len().saturating_sub(1)) {
            folder = folder.join(*part);
            self.0.insert(folder.clone());
        }
    }

    /// Removes those that are empty, where folders exist at all.
    pub(super) async fn remove_empty(
        self,
        table: &Lineage,
        reach: &Reach,
        settled: Option<DateTime<Utc>>,
    ) -> lance::Result<()> {
        let root = table.base.clone().join("_indices");
        let kept = reach.indices().into_iter();
        let kept = kept.map(|uuid| root.clone().join(uuid)).collect();
        table
            .store
            .remove_empty_dirs(root, kept, self.0, settled)
            .await
    }
}
