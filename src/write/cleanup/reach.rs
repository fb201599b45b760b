//! What a version reaches: every file and tree object its resolved state names.
//!
//! ```text
//!   manifest ── root ── nodes ── leaves ── records + pending mutations ── names
//!                 └───────────────┴─ a subtree seen before with the same mutations above it: skipped
//! ```
//!
//! Versions share most of their trees. A subtree is walked once for each list of mutations that is
//! pending above it, whatever the number of versions that hold it so; a commit that buffers a change
//! costs the paths to what it changes, one that rewrites a leaf costs that leaf. A mutation is known
//! by its content and not by its number: another writer's history may use a number twice.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use datafusion::common::runtime::SpawnedTask;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use lance_table::feature_flags::FLAG_MANAGED_BLOBS;
use lance_table::format::pb;
use lance_table::system_index::frag_reuse::FRAG_REUSE_INDEX_NAME;
use parking_lot::Mutex;
use prost::Message;

use super::lineage::{Fragments, Lineage, Version};
use super::names::{Key, Keys, Names, Set, listed};
use crate::error::{Error, Result};
use crate::functions::deletion_path;
use crate::ranges::FragmentRanges;
use crate::snapshot::TreeCatalog;
use crate::tree::node::ID_END;
use crate::tree::object::{BaseTable, Owner, ReadStats};
use crate::tree_scan::{ResolvedFragment, WalkState, Work, childless, overlapping, resolve_leaf};

/// Tree objects opened at once, at each level.
const WINDOW: usize = 8;
/// Records of a flat version between two chances for other tasks.
const FLAT_BATCH: usize = 4096;

/// What becomes of a version that is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Fate {
    /// It stays, and all it names.
    Stays,
    /// It goes: what only such versions name can go with it.
    Goes,
    /// It is a version of another lineage, and stays: what it names here stays too.
    Elsewhere,
}

/// Where a base path leads, seen from the table that is cleaned.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// Into the table: the directory below its root.
    Here(String),
    Away,
}

/// What was found in the versions looked at so far.
#[derive(Debug, Default)]
struct Found {
    names: Names,
    /// Keys of subtrees with the mutations above them, by whether what they name stays.
    walked: [Set<Key>; 2],
    /// Indexes of versions that stay.
    indices: BTreeSet<String>,
    /// Whether some version keeps blobs that no record names.
    managed_blobs: bool,
    /// Whether some version maps rows through files that only its indexes name.
    row_maps: bool,
}

/// Collects what versions reach in one table.
#[derive(Debug)]
pub(super) struct Reach {
    /// Resolved location and URI of the table that is cleaned.
    location: String,
    uri: String,
    keys: Keys,
    found: Mutex<Found>,
    pub stats: Arc<ReadStats>,
    objects: AtomicU64,
}

/// How to read the names in one version.
struct Reader {
    fate: Fate,
    /// Whether the version is of the table that is cleaned.
    own: bool,
    places: HashMap<u32, (Place, bool)>,
    keys: Keys,
    /// What base ids mean in it: part of every subtree's key.
    meaning: Key,
    /// Whether it named something of the table through a base.
    named: AtomicBool,
}

impl Reader {
    /// The places that a reference from this version can mean, as directories of the table, with
    /// whether the base is a dataset's root. Nothing for what does not matter.
    ///
    /// A version that stays protects more than it names: the same path in this table, whatever the
    /// base, as Lance does. A base may lead here in ways that cannot be seen, by a link or another
    /// host name.
    fn places(&self, base_id: Option<u32>, mut name: impl FnMut(&str, bool)) {
        let Some(id) = base_id else {
            if self.own {
                name("", true);
            }
            return;
        };
        let place = self.places.get(&id);
        if let Some((Place::Here(directory), is_root)) = place {
            self.named.store(true, Ordering::Relaxed);
            name(directory, *is_root);
        }
        let is_root = place == Some(&(Place::Here(String::new()), true));
        if self.fate != Fate::Goes && !is_root {
            name("", true);
        }
    }

    fn object(&self, owner: Owner, path: &str, into: &mut Vec<Key>) {
        self.places(owner.base_id(), |directory, _| {
            let raw = match directory {
                "" => path.to_string(),
                directory => format!("{directory}/{path}"),
            };
            into.push(self.keys.of(raw.as_bytes()));
            let listed = listed(directory, path);
            if listed != raw {
                into.push(self.keys.of(listed.as_bytes()));
            }
        });
    }

    fn data_file(&self, path: &str, base_id: Option<u32>, into: &mut Vec<Key>) {
        self.places(base_id, |directory, is_root| {
            let directory = match (directory, is_root) {
                ("", true) => "data".to_string(),
                (directory, true) => format!("{directory}/data"),
                (directory, false) => directory.to_string(),
            };
            into.push(self.keys.of(listed(&directory, path).as_bytes()));
            if path.contains('/') {
                // Lance takes it for one name.
                let one = object_store::path::Path::from(directory.as_str()).join(path);
                into.push(self.keys.of(one.as_ref().as_bytes()));
            }
        });
    }

    fn record(&self, record: &pb::DataFragment, into: &mut Vec<Key>) {
        let overlays = record.overlays.iter().filter_map(|o| o.data_file.as_ref());
        for file in record.files.iter().chain(overlays) {
            self.data_file(&file.path, file.base_id, into);
        }
        if let Some(deletion) = &record.deletion_file {
            let path = deletion_path(record.id, deletion);
            self.places(deletion.base_id, |directory, _| {
                into.push(self.keys.of(listed(directory, &path).as_bytes()));
            });
        }
    }

    fn fragments(&self, fragments: &[ResolvedFragment]) -> Result<Vec<Key>> {
        let mut names = Vec::with_capacity(fragments.len());
        for fragment in fragments {
            self.record(&fragment.record()?, &mut names);
        }
        Ok(names)
    }

    /// The key of a subtree with all that is pending above it.
    fn subtree(&self, location: &str, work: &Work) -> Key {
        let mut bytes = Vec::with_capacity(location.len() + 64);
        bytes.extend_from_slice(location.as_bytes());
        bytes.push(0);
        let child = &work.child;
        for number in [
            u64::from(child.height),
            child.object_size,
            child.watermark,
            work.range.start,
            work.range.end,
        ] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&self.meaning.to_bytes());
        for pending in &work.pending {
            let owner = pending.owner.base_id();
            bytes.push(u8::from(owner.is_some()));
            bytes.extend_from_slice(&owner.unwrap_or_default().to_le_bytes());
            let mutation = pending.mutation.encode();
            bytes.extend_from_slice(&mutation.encode_length_delimited_to_vec());
        }
        self.keys.of(&bytes)
    }
}

/// A location without the name of its store, where stores of other names hold the same files.
fn same_store(location: &str) -> &str {
    let (store, path) = location.split_once('/').unwrap_or((location, ""));
    if store.starts_with("file") {
        path
    } else {
        location
    }
}

impl Reach {
    pub(super) fn new(table: &Lineage) -> Self {
        Self {
            location: table.location(),
            uri: table.uri.clone(),
            keys: Keys::default(),
            found: Mutex::default(),
            stats: Arc::default(),
            objects: AtomicU64::new(0),
        }
    }

    /// Tree objects opened so far.
    pub(super) fn objects(&self) -> u64 {
        self.objects.load(Ordering::Relaxed)
    }

    /// Notes everything that `version` of `lineage` reaches. Whether it named anything of the cleaned
    /// table through a base, as branches do.
    ///
    /// # Errors
    /// Those of a version that cannot be walked to the end. What was noted until then stays noted.
    pub(super) async fn enter(
        self: &Arc<Self>,
        lineage: &Lineage,
        version: &Version,
        fate: Fate,
    ) -> Result<bool> {
        let reader = Arc::new(self.reader(lineage, version, fate));
        let mut names = Vec::new();
        if reader.own && !version.head.transaction_file.is_empty() {
            let name = listed("_transactions", &version.head.transaction_file);
            names.push(self.keys.of(name.as_bytes()));
        }
        self.enter_indices(version, &reader, &mut names);
        self.note(&reader, names);
        match &version.fragments {
            Fragments::Flat(flat) => {
                for entries in flat.entries_in(&(0..ID_END)).chunks(FLAT_BATCH) {
                    let mut names = Vec::with_capacity(entries.len());
                    for entry in entries {
                        reader.record(&flat.record(entry)?, &mut names);
                    }
                    self.note(&reader, names);
                    tokio::task::yield_now().await;
                }
            }
            Fragments::Tree(tree) => {
                let tree = lineage.tree(version, tree, &self.stats).await?;
                self.walk(Arc::new(tree), Arc::clone(&reader)).await?;
            }
        }
        Ok(reader.named.load(Ordering::Relaxed))
    }

    fn reader(&self, lineage: &Lineage, version: &Version, fate: Fate) -> Reader {
        let mut bases = version.head.base_paths.clone();
        bases.sort_unstable_by_key(|base| base.id);
        let mut meaning = lineage.location().into_bytes();
        for base in &bases {
            meaning.extend_from_slice(&base.encode_length_delimited_to_vec());
        }
        Reader {
            fate,
            own: fate != Fate::Elsewhere,
            places: self.places(&version.bases),
            keys: self.keys.clone(),
            meaning: self.keys.of(&meaning),
            named: AtomicBool::new(false),
        }
    }

    fn places(&self, bases: &BaseTable) -> HashMap<u32, (Place, bool)> {
        let place = |id: u32| {
            let (path, location, is_root) = bases.base(id)?;
            let own = same_store(&self.location);
            let below = location.and_then(|l| same_store(l).strip_prefix(own));
            let place = match below {
                Some("") => Place::Here(String::new()),
                Some(below) => match below.strip_prefix('/') {
                    Some(directory) => Place::Here(directory.to_string()),
                    None => Place::Away,
                },
                None if path == self.uri => Place::Here(String::new()),
                None => Place::Away,
            };
            Some((id, (place, is_root)))
        };
        bases.ids().filter_map(place).collect()
    }

    fn enter_indices(&self, version: &Version, reader: &Reader, names: &mut Vec<Key>) {
        let mut found = self.found.lock();
        found.managed_blobs |= version.head.reader_feature_flags & FLAG_MANAGED_BLOBS != 0;
        for index in &version.indices {
            // The files behind a map of rows are named inside the index alone.
            found.row_maps |=
                index.name == FRAG_REUSE_INDEX_NAME && index.index_version.unwrap_or_default() != 0;
            let uuid = index.uuid.as_ref().map(|u| u.uuid.as_slice());
            let Some(uuid) = uuid.and_then(|u| uuid::Uuid::from_slice(u).ok()) else {
                continue;
            };
            let uuid = uuid.to_string();
            reader.places(index.base_id, |directory, _| {
                let name = listed(directory, &format!("_indices/{uuid}"));
                names.push(self.keys.of(name.as_bytes()));
                if reader.fate != Fate::Goes {
                    found.indices.insert(uuid.clone());
                }
            });
        }
    }

    fn note(&self, reader: &Reader, names: Vec<Key>) {
        let mut found = self.found.lock();
        match reader.fate {
            Fate::Stays | Fate::Elsewhere => found.names.reach(names),
            Fate::Goes => found.names.release(names),
        }
    }

    async fn walk(self: &Arc<Self>, tree: Arc<TreeCatalog>, reader: Arc<Reader>) -> Result<()> {
        let state = WalkState::with_stats(Arc::clone(&self.stats));
        let all = FragmentRanges::all();
        if let Some(path) = &tree.root_path {
            let mut names = Vec::new();
            reader.object(Owner::Current, path, &mut names);
            self.note(&reader, names);
        }
        let Some(height) = tree.root.child_height() else {
            let fragments = childless(&tree, &all, &state)?;
            self.note(&reader, reader.fragments(&fragments)?);
            return Ok(());
        };
        let first = self.unseen(&tree, &reader, tree.root_work(&all, &state.stats))?;
        let mut level: BoxStream<'static, Result<Work>> =
            stream::iter(first.into_iter().map(Ok)).boxed();
        // One stage a level, as the walk of a query: what waits is a window's width at each.
        for _ in 0..height {
            let (reach, tree) = (Arc::clone(self), Arc::clone(&tree));
            let (reader, state) = (Arc::clone(&reader), state.clone());
            level = level
                .map(move |work| {
                    let (reach, tree) = (Arc::clone(&reach), Arc::clone(&tree));
                    let (reader, state) = (Arc::clone(&reader), state.clone());
                    async move {
                        let work = work?;
                        let below = reach.open_node(&tree, &reader, &work, &state).await?;
                        Ok(stream::iter(below.into_iter().map(Ok)))
                    }
                })
                .buffer_unordered(WINDOW)
                .try_flatten()
                .boxed();
        }
        let mut leaves = level
            .map(|work| {
                let (tree, state, reader) = (Arc::clone(&tree), state.clone(), Arc::clone(&reader));
                let task = work.map(|work| {
                    SpawnedTask::spawn(async move {
                        let leaf = tree.open_leaf(&work, &state).await?;
                        let fragments = resolve_leaf(&leaf, &work, &FragmentRanges::all())?;
                        reader.fragments(&fragments)
                    })
                });
                async move {
                    task?
                        .await
                        .map_err(|e| Error::internal(format!("a walk task ended: {e}")))?
                }
            })
            .buffer_unordered(WINDOW);
        while let Some(names) = leaves.try_next().await? {
            self.objects.fetch_add(1, Ordering::Relaxed);
            self.note(&reader, names);
        }
        Ok(())
    }

    async fn open_node(
        &self,
        tree: &TreeCatalog,
        reader: &Reader,
        work: &Work,
        state: &WalkState,
    ) -> Result<Vec<Work>> {
        let (node, pending) = tree.open_node(work, state).await?;
        self.objects.fetch_add(1, Ordering::Relaxed);
        let all = FragmentRanges::all();
        let below = overlapping(&node, work, &pending, &all, &state.stats);
        self.unseen(tree, reader, below)
    }

    /// Names children, and leaves out those that were walked before.
    ///
    /// A child counts as walked from here on. When its walk fails, so does that of its version: for one
    /// that stays that ends the cleanup or calls for [`Self::forget_walks`]; one that goes merely
    /// releases less.
    fn unseen(&self, tree: &TreeCatalog, reader: &Reader, work: Vec<Work>) -> Result<Vec<Work>> {
        let mut names = Vec::with_capacity(work.len());
        let mut keys = Vec::with_capacity(work.len());
        for work in &work {
            let location = tree.objects.bases.location(work.owner, &work.child.path)?;
            reader.object(work.owner, &work.child.path, &mut names);
            keys.push(reader.subtree(&location, work));
        }
        self.note(reader, names);
        let mut found = self.found.lock();
        let [staying, going] = &mut found.walked;
        let mut is_new = |key: Key| match reader.fate {
            Fate::Stays | Fate::Elsewhere => staying.insert(key),
            Fate::Goes => !staying.contains(&key) && going.insert(key),
        };
        let unseen = work.into_iter().zip(keys);
        Ok(unseen
            .filter(|(_, key)| is_new(*key))
            .map(|(work, _)| work)
            .collect())
    }

    /// Walks everything again from here on: a walk that failed left subtrees unread that it had already
    /// counted as walked. What was noted stays noted.
    pub(super) fn forget_walks(&self) {
        self.found.lock().walked = Default::default();
    }

    /// Whether a version that stays needs `name`.
    pub(super) fn is_reached(&self, name: &str) -> bool {
        let key = self.keys.of(name.as_bytes());
        self.found.lock().names.is_reached(key)
    }

    /// Whether a version that goes names `name`.
    pub(super) fn is_released(&self, name: &str) -> bool {
        let key = self.keys.of(name.as_bytes());
        self.found.lock().names.is_released(key)
    }

    /// Indexes of versions that stay.
    pub(super) fn indices(&self) -> BTreeSet<String> {
        self.found.lock().indices.clone()
    }

    /// Whether some version keeps blobs that no record names.
    pub(super) fn has_managed_blobs(&self) -> bool {
        self.found.lock().managed_blobs
    }

    /// Whether some version maps rows through files that only its indexes name.
    pub(super) fn has_row_maps(&self) -> bool {
        self.found.lock().row_maps
    }
}
