//! Where a tree's new objects go.
//!
//! A commit that lost a race is built again from the newer version, and most of what it writes then
//! is what it wrote before: within one sink an object of the same kind and bytes is written once.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use lance_io::object_store::ObjectStore;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::error::{Error, Result};

/// The kinds of tree object: directory under `_bt/` and extension (spec, "Tree objects").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ObjectKind {
    /// A `FragmentTreeRoot`.
    Root,
    /// A `FragmentTreeNode`.
    Node,
    /// A Lance file of records.
    Leaf,
}

impl ObjectKind {
    fn directory(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Node => "node",
            Self::Leaf => "leaf",
        }
    }

    fn extension(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Node => "node",
            Self::Leaf => "lance",
        }
    }
}

/// What an object is known by: its kind, its length, and two keyed hashes of its bytes. The keys are
/// the sink's own and never leave it, so nobody can make two objects that agree in 128 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Content {
    kind: ObjectKind,
    bytes: usize,
    hashes: [u64; 2],
}

/// What a sink and its clones share.
#[derive(Debug, Default)]
struct Shared {
    keys: [RandomState; 2],
    /// Path of everything written, or about to be.
    written: Mutex<HashMap<Content, Arc<OnceCell<String>>>>,
}

/// Where a tree's objects go: a dataset's `_bt/`, or nowhere on a dry run. Clones share what they
/// know to be written.
#[derive(Debug, Clone)]
pub(crate) struct ObjectSink {
    store: Arc<ObjectStore>,
    base: Path,
    dry_run: bool,
    shared: Arc<Shared>,
}

impl ObjectSink {
    /// A sink for the dataset whose root is `base` in `store`.
    pub(crate) fn new(store: Arc<ObjectStore>, base: Path, dry_run: bool) -> Self {
        Self {
            store,
            base,
            dry_run,
            shared: Arc::default(),
        }
    }

    /// Whether nothing is really written.
    pub(crate) fn is_dry_run(&self) -> bool {
        self.dry_run
    }

    /// Writes an object, unless this sink wrote the same before. Returns its path relative to the
    /// dataset. Whoever asks while another writes the same object waits for that one.
    ///
    /// # Errors
    /// [`Error::Store`]; a later call with the same object tries again.
    pub(crate) async fn put(&self, kind: ObjectKind, bytes: Bytes) -> Result<String> {
        let content = Content {
            kind,
            bytes: bytes.len(),
            hashes: self
                .shared
                .keys
                .each_ref()
                .map(|key| key.hash_one(bytes.as_ref())),
        };
        let cell = {
            let mut written = self.lock();
            Arc::clone(written.entry(content).or_default())
        };
        cell.get_or_try_init(|| self.write(kind, bytes))
            .await
            .cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Content, Arc<OnceCell<String>>>> {
        let written = self.shared.written.lock();
        written.unwrap_or_else(PoisonError::into_inner)
    }

    async fn write(&self, kind: ObjectKind, bytes: Bytes) -> Result<String> {
        let name = format!("{}.{}", Uuid::new_v4().hyphenated(), kind.extension());
        let path = format!("_bt/{}/{name}", kind.directory());
        if !self.dry_run {
            let location = self.locate(&path);
            self.store
                .inner
                .put(&location, bytes.into())
                .await
                .map_err(|e| Error::Store {
                    object: location.to_string(),
                    source: Arc::new(e),
                })?;
        }
        Ok(path)
    }

    fn locate(&self, path: &str) -> Path {
        path.split('/')
            .fold(self.base.clone(), |base, part| base.join(part))
    }

    /// Objects written and their bytes; on a dry run, those that would have been.
    #[cfg(test)]
    pub(crate) fn written(&self) -> (u64, u64) {
        let written = self.lock();
        let done = written.iter().filter(|(_, cell)| cell.initialized());
        done.fold((0, 0), |(objects, bytes), (content, _)| {
            (objects + 1, bytes + content.bytes as u64)
        })
    }

    /// Paths of everything written. After a failed or lost commit: what no version names.
    #[allow(
        dead_code,
        reason = "for tests: an ambiguous commit may need what it wrote"
    )]
    pub(crate) fn paths(&self) -> Vec<String> {
        let written = self.lock();
        let mut paths: Vec<_> = written
            .values()
            .filter_map(|cell| cell.get().cloned())
            .collect();
        paths.sort_unstable();
        paths
    }

    /// Removes objects that no version will name. The sink forgets them, and would write them again.
    pub(crate) async fn discard(&self, paths: &[String]) {
        self.lock()
            .retain(|_, cell| cell.get().is_none_or(|path| !paths.contains(path)));
        if self.dry_run {
            return;
        }
        for path in paths {
            let location = self.locate(path);
            if let Err(error) = self.store.inner.delete(&location).await {
                tracing::warn!(%location, %error, "an unused tree object stays behind");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;

    use super::*;

    fn sink() -> ObjectSink {
        ObjectSink::new(
            Arc::new(ObjectStore::memory()),
            Path::from("table.lance"),
            false,
        )
    }

    #[tokio::test]
    async fn the_same_object_is_written_once_however_often_it_is_asked_for() {
        let sink = sink();
        let bytes = Bytes::from_static(b"records");
        let puts = (0..20).map(|_| {
            let sink = sink.clone();
            let bytes = bytes.clone();
            async move { sink.put(ObjectKind::Leaf, bytes).await.expect("written") }
        });
        let paths = join_all(puts).await;
        assert!(paths.iter().all(|path| *path == paths[0]), "{paths:?}");
        assert_eq!(sink.written(), (1, 7));
        let other = sink.put(ObjectKind::Node, bytes.clone()).await;
        assert_ne!(other.expect("written"), paths[0], "another kind");
        let longer = sink.put(ObjectKind::Leaf, "records!".into()).await;
        assert_ne!(longer.expect("written"), paths[0], "other bytes");
        assert_eq!(sink.written(), (3, 22));
        assert_eq!(sink.paths().len(), 3);
        sink.discard(&paths[..1]).await;
        assert_eq!(sink.paths().len(), 2);
        let again = sink.put(ObjectKind::Leaf, bytes).await.expect("written");
        assert_ne!(again, paths[0], "it was removed");
    }
}
