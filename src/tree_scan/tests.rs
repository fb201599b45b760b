//! Random trees against brute force.
//!
//! A tree is made from a history: base records in leaves, then mutations, each buffered at a random
//! level (per fragment the older ones never above the newer, as a writer must push them). Whatever
//! the shape, counts over ranges, resolved records and splits must be those of the history applied
//! to a plain map.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::{FutureExt, TryStreamExt};
use lance_table::feature_flags::FLAG_FRAGMENT_TREE;
use lance_table::format::pb;
use prost::Message;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::*;
use crate::snapshot::OpenOptions;
use crate::tree::leaf_write::LeafBuilder;
use crate::tree::mutation::{Action, Mutation, apply};
use crate::tree::node::{Child, Node, Root};
use crate::tree::object::ObjectCache;
use crate::tree::record::{counts_of, to_fragment};
use crate::tree::summary::{Delta, Tally};

mod edges;

const IDS: u32 = 120;

type Model = BTreeMap<u32, pb::DataFragment>;

fn record(rng: &mut StdRng, id: u32) -> pb::DataFragment {
    let rows = rng.random_range(0..50);
    let deleted = if rows > 0 && rng.random_bool(0.3) {
        rng.random_range(1..=rows)
    } else {
        0
    };
    pb::DataFragment {
        id: u64::from(id),
        files: (0..rng.random_range(1..4)).map(|i| file(id, i)).collect(),
        physical_rows: rows,
        deletion_file: (deleted > 0).then(|| deletion(deleted)),
        ..Default::default()
    }
}

fn file(id: u32, number: u32) -> pb::DataFile {
    pb::DataFile {
        path: format!("{id}-{number}.lance"),
        fields: vec![i32::try_from(number).unwrap_or_default()],
        column_indices: vec![0],
        file_major_version: 2,
        file_minor_version: 1,
        file_size_bytes: 10,
        base_id: None,
    }
}

fn deletion(deleted: u64) -> pb::DeletionFile {
    pb::DeletionFile {
        num_deleted_rows: deleted,
        ..Default::default()
    }
}

/// A random action that the fragment's present record allows.
fn action(rng: &mut StdRng, id: u32, present: Option<&pb::DataFragment>) -> Action {
    let Some(present) = present else {
        return if rng.random_bool(0.2) {
            Action::Remove
        } else {
            Action::Upsert(Box::new(record(rng, id)))
        };
    };
    match rng.random_range(0..8) {
        0 => Action::Upsert(Box::new(record(rng, id))),
        1 | 2 => Action::Remove,
        3 => Action::AddDataFile(file(id, rng.random_range(5..90))),
        4 => Action::RemoveDataFile(file(id, 0).path),
        5 if present.physical_rows > 0 => {
            Action::AddDeletionFile(deletion(rng.random_range(1..=present.physical_rows)))
        }
        6 if !present.files.is_empty() => Action::ReplaceDataFile {
            expected_path: present.files[0].path.clone(),
            path: file(id, rng.random_range(100..200)).path,
            file_size_bytes: 3,
            base_id: None,
        },
        _ => Action::ClearDeletionFile,
    }
}

/// A mutation and the level it is buffered at: 0 in the root's children's depth and so on up.
struct Placed {
    mutation: Arc<Mutation>,
    level: u32,
}

/// Levels a mutation can be buffered at: interiors by height, then the root, then the manifest.
struct Shape {
    height: u32,
    external: bool,
}

impl Shape {
    fn root_level(&self) -> u32 {
        self.height + 1
    }

    fn top_level(&self) -> u32 {
        self.root_level() + u32::from(self.external)
    }
}

fn mutate(rng: &mut StdRng, model: &mut Model, first_sequence: u64, shape: &Shape) -> Vec<Placed> {
    let mut levels: BTreeMap<u32, u32> = BTreeMap::new();
    let mut placed = Vec::new();
    for step in 0..rng.random_range(0..80) {
        let target = rng.random_range(0..IDS);
        let action = action(rng, target, model.get(&target));
        let before = model.remove(&target);
        let mutation = Mutation {
            sequence: first_sequence + step,
            target,
            action,
            delta: Delta::default(),
        };
        let after = apply("model", before.clone(), &mutation, Owner::Current).expect("allowed");
        let delta = Delta::between(
            before.as_ref().map(counts_of),
            after.as_ref().map(counts_of),
        );
        model.extend(after.map(|a| (target, a)));
        // An action on a fragment that is buffered higher up already must not sink below it.
        let lowest = levels.get(&target).copied().unwrap_or(1);
        let level = rng.random_range(lowest..=shape.top_level());
        levels.insert(target, level);
        placed.push(Placed {
            mutation: Arc::new(Mutation {
                delta: delta.expect("fits"),
                ..mutation
            }),
            level,
        });
    }
    placed
}

struct Writer<'a> {
    dir: &'a FsPath,
    objects: usize,
}

impl Writer<'_> {
    fn put(&mut self, kind: &str, extension: &str, bytes: &[u8]) -> String {
        self.objects += 1;
        let path = format!("_bt/{kind}/{}.{extension}", self.objects);
        let target = self.dir.join(&path);
        std::fs::create_dir_all(target.parent().expect("a directory")).expect("writable");
        std::fs::write(target, bytes).expect("writable");
        path
    }

    async fn leaf(&mut self, min_key: u64, records: &[&pb::DataFragment], watermark: u64) -> Child {
        let mut builder = LeafBuilder::new();
        let mut tally = Tally::default();
        for record in records {
            builder.push(record).expect("in order");
            tally += counts_of(record);
        }
        let bytes = builder.encode().await.expect("encodes");
        Child {
            path: self.put("leaf", "lance", &bytes),
            base_id: None,
            min_key,
            counts: tally.counts("leaf").expect("valid"),
            height: 0,
            num_children: 0,
            object_size: bytes.len() as u64,
            watermark,
        }
    }

    fn node(&mut self, children: Vec<Child>, buffer: Vec<Arc<Mutation>>) -> Child {
        let (min_key, height) = (children[0].min_key, children[0].height + 1);
        let num_children = u32::try_from(children.len()).expect("few");
        let node = Node { children, buffer };
        let bytes = node.encode().encode_to_vec();
        Child {
            path: self.put("node", "node", &bytes),
            base_id: None,
            min_key,
            counts: node.tally().counts("node").expect("valid"),
            height,
            num_children,
            object_size: bytes.len() as u64,
            watermark: 0,
        }
    }
}

fn buffer(
    rng: &mut StdRng,
    placed: &[Placed],
    level: u32,
    range: &Range<u64>,
) -> Vec<Arc<Mutation>> {
    let mut buffer: Vec<_> = placed
        .iter()
        .filter(|p| p.level == level && range.contains(&u64::from(p.mutation.target)))
        .map(|p| Arc::clone(&p.mutation))
        .collect();
    // Serialization order means nothing.
    buffer.shuffle(rng);
    buffer
}

/// Writes a random tree under `dir` and returns what it must resolve to.
async fn random_tree(rng: &mut StdRng, dir: &FsPath) -> Model {
    let mut writer = Writer { dir, objects: 0 };
    let mut model = Model::new();
    let leaves = rng.random_range(0..12);
    let mut base: Vec<Vec<u32>> = Vec::new();
    let span = IDS / 12;
    for leaf in 0..leaves {
        let mut ids: Vec<u32> = (leaf * span..(leaf + 1) * span).collect();
        ids.shuffle(rng);
        ids.truncate(rng.random_range(1..=span as usize));
        ids.sort_unstable();
        for id in &ids {
            model.insert(*id, record(rng, *id));
        }
        base.push(ids);
    }
    let height = match leaves {
        0..4 => 0,
        4..8 => rng.random_range(0..2),
        _ => rng.random_range(0..3),
    };
    let shape = Shape {
        height,
        external: rng.random_bool(0.5),
    };
    let watermark = rng.random_range(0..5);
    let mut level: Vec<Child> = Vec::new();
    for (index, ids) in base.iter().enumerate() {
        let records: Vec<_> = ids.iter().map(|id| &model[id]).collect();
        // A bound need not be a stored id; the first is zero.
        let lowest = index as u64 * u64::from(span);
        let min_key = rng.random_range(lowest..=u64::from(ids[0]));
        let min_key = if index == 0 { 0 } else { min_key };
        level.push(writer.leaf(min_key, &records, watermark).await);
    }
    let placed = if leaves == 0 {
        let flat = Shape { height: 0, ..shape };
        mutate(rng, &mut model, watermark + 1, &flat)
    } else {
        mutate(rng, &mut model, watermark + 1, &shape)
    };
    for height in 1..=shape.height {
        let mut above = Vec::new();
        let mut rest = level.into_iter().peekable();
        let mut groups: Vec<Vec<Child>> = Vec::new();
        while rest.peek().is_some() {
            groups.push(rest.by_ref().take(rng.random_range(2..4)).collect());
        }
        if groups.last().is_some_and(|g| g.len() < 2) {
            let last = groups.pop().unwrap_or_default();
            groups.last_mut().expect("more than one").extend(last);
        }
        let ends: Vec<u64> = groups
            .iter()
            .skip(1)
            .map(|g| g[0].min_key)
            .chain([ID_END])
            .collect();
        for (group, end) in groups.into_iter().zip(ends) {
            let range = group[0].min_key..end;
            let own = buffer(rng, &placed, height, &range);
            above.push(writer.node(group, own));
        }
        level = above;
    }
    publish(rng, &mut writer, level, &placed, &shape, watermark);
    model
}

fn publish(
    rng: &mut StdRng,
    writer: &mut Writer<'_>,
    children: Vec<Child>,
    placed: &[Placed],
    shape: &Shape,
    watermark: u64,
) {
    let all = 0..ID_END;
    // In a tree without interiors nothing can be buffered below the root.
    let lowest = if children.first().is_some_and(|c| c.height > 0) {
        shape.root_level()
    } else {
        1
    };
    let mut own: Vec<_> = (lowest..=shape.root_level())
        .flat_map(|l| buffer(rng, placed, l, &all))
        .collect();
    let mut since = if shape.external {
        buffer(rng, placed, shape.top_level(), &all)
    } else {
        Vec::new()
    };
    // Sequences of the manifest must not be below the root's next: those that are move down.
    let next_root = own.iter().map(|m| m.sequence + 1).max().unwrap_or(1);
    let below = placed
        .iter()
        .filter(|p| p.level < shape.root_level())
        .map(|p| p.mutation.sequence + 1)
        .max()
        .unwrap_or(1);
    let mut next_root = next_root.max(below).max(watermark + 1);
    let (down, stay): (Vec<_>, Vec<_>) = since.drain(..).partition(|m| m.sequence < next_root);
    for mutation in &down {
        next_root = next_root.max(mutation.sequence + 1);
    }
    own.extend(down);
    let next = stay
        .iter()
        .map(|m| m.sequence + 1)
        .max()
        .unwrap_or(0)
        .max(next_root);
    let root = Root {
        node: Node {
            children,
            buffer: own,
        },
        next_sequence: next_root,
    };
    let root = if shape.external {
        let uuid = uuid::Uuid::new_v4();
        let path = writer
            .dir
            .join(format!("_bt/root/{}.root", uuid.hyphenated()));
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("writable");
        std::fs::write(path, root.encode().encode_to_vec()).expect("writable");
        pb::fragment_tree::Root::RootUuid(uuid.as_bytes().to_vec())
    } else {
        pb::fragment_tree::Root::InlineRoot(root.encode())
    };
    let tree = pb::FragmentTree {
        root: Some(root),
        mutations_since_root: stay.iter().map(|m| m.encode()).collect(),
        next_action_sequence: next,
    };
    write_manifest(writer.dir, tree);
}

fn write_manifest(dir: &FsPath, tree: pb::FragmentTree) {
    let manifest = pb::Manifest {
        version: 1,
        reader_feature_flags: FLAG_FRAGMENT_TREE,
        writer_feature_flags: FLAG_FRAGMENT_TREE,
        max_fragment_id: Some(IDS - 1),
        data_format: Some(pb::manifest::DataStorageFormat {
            file_format: "lance".into(),
            version: "2.1".into(),
        }),
        fragment_tree: Some(pb::FragmentTreeMetadata {
            layout: Some(pb::fragment_tree_metadata::Layout::Tree(tree)),
        }),
        ..Default::default()
    };
    let message = manifest.encode_to_vec();
    let mut file = u32::try_from(message.len())
        .expect("small")
        .to_le_bytes()
        .to_vec();
    file.extend_from_slice(&message);
    file.extend_from_slice(&0u64.to_le_bytes());
    file.extend_from_slice(&[0, 0, 1, 0]);
    file.extend_from_slice(b"LANC");
    let versions = dir.join("_versions");
    std::fs::create_dir_all(&versions).expect("writable");
    std::fs::write(
        versions.join(format!("{:020}.manifest", u64::MAX - 1)),
        file,
    )
    .expect("writable");
}

fn random_ranges(rng: &mut StdRng) -> FragmentRanges {
    let ranges = (0..rng.random_range(1..5)).map(|_| {
        let start = rng.random_range(0..u64::from(IDS) + 10);
        start..start + rng.random_range(0..60)
    });
    FragmentRanges::from_ranges(ranges.collect::<Vec<_>>())
}

fn brute_force(model: &Model, wanted: &FragmentRanges) -> Counts {
    let mut tally = Tally::default();
    for (_, record) in model
        .iter()
        .filter(|(id, _)| wanted.contains(u64::from(**id)))
    {
        tally += counts_of(record);
    }
    tally.counts("model").expect("valid")
}

async fn resolve(snapshot: &Arc<Snapshot>, wanted: &FragmentRanges) -> Vec<pb::DataFragment> {
    let walk = snapshot.fragments(
        wanted.clone(),
        &WalkOptions::default(),
        &WalkState::default(),
    );
    let batches: Vec<_> = walk.try_collect().await.expect("valid");
    let resolved = batches.into_iter().flatten().map(|fragment| {
        let record = fragment.record().expect("a record");
        let as_lance = to_fragment("x", record.clone()).expect("Lance takes it");
        assert_eq!(fragment.fragment().expect("a fragment"), as_lance);
        record
    });
    resolved.collect()
}

async fn check(rng: &mut StdRng, snapshot: &Arc<Snapshot>, model: &Model, cases: usize) {
    let all = FragmentRanges::all();
    let total = brute_force(model, &all);
    assert_eq!(snapshot.counts().expect("valid"), Some(total));
    for case in 0..cases {
        let wanted = random_ranges(rng);
        let expected = brute_force(model, &wanted);
        let counted = snapshot.count(&wanted, &WalkState::default()).await;
        assert_eq!(counted.expect("valid"), Some(expected), "{wanted}");
        if let Some((counts, true)) = snapshot.estimate(&wanted).expect("valid") {
            assert_eq!(counts, expected, "estimate of {wanted}");
        }
        if case % 4 == 0 {
            let records: Vec<_> = model
                .iter()
                .filter(|(id, _)| wanted.contains(u64::from(**id)))
                .map(|(_, record)| record.clone())
                .collect();
            assert_eq!(resolve(snapshot, &wanted).await, records, "{wanted}");
            check_split(rng, snapshot, model, &wanted);
        }
    }
}

/// Parts are disjoint, in order, and hold every wanted fragment and no id that is not wanted.
fn check_split(rng: &mut StdRng, snapshot: &Snapshot, model: &Model, wanted: &FragmentRanges) {
    let parts = rng.random_range(1..6);
    let split = snapshot.split(wanted, parts);
    assert!(split.len() <= parts);
    let mut end = 0;
    for part in &split {
        let span = part.span().expect("not empty");
        assert!(span.start >= end, "{split:?}");
        end = span.end;
    }
    for id in 0..IDS {
        let holders = split.iter().filter(|p| p.contains(u64::from(id))).count();
        let is_wanted = wanted.contains(u64::from(id));
        assert!(holders <= usize::from(is_wanted), "{id}");
        if is_wanted && model.contains_key(&id) {
            assert_eq!(holders, 1, "{id}");
        }
    }
}

async fn open(dir: &FsPath, cache: Option<ObjectCache>) -> Arc<Snapshot> {
    let options = OpenOptions {
        cache,
        ..Default::default()
    };
    let uri = dir.to_str().expect("UTF-8");
    Snapshot::open(uri, options).await.expect("opens")
}

fn scratch() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_path_buf();
    (dir, path)
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_and_records_agree_with_brute_force() {
    let (_keep, dir) = scratch();
    for seed in 0..150u64 {
        let mut rng = StdRng::seed_from_u64(seed);
        let table = dir.join(seed.to_string());
        let model = random_tree(&mut rng, &table).await;
        let snapshot = open(&table, Some(ObjectCache::new(1 << 20))).await;
        println!("seed {seed}");
        check(&mut rng, &snapshot, &model, 40).await;
        // Every part of a split together is the whole: no fragment between two parts is lost.
        let parts = snapshot.split(&FragmentRanges::all(), 3);
        let mut records = Vec::new();
        for part in &parts {
            records.extend(resolve(&snapshot, part).await);
        }
        assert_eq!(records, model.into_values().collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_opens_only_what_an_edge_cuts() {
    let (_keep, dir) = scratch();
    let mut writer = Writer {
        dir: &dir,
        objects: 0,
    };
    let mut rng = StdRng::seed_from_u64(1);
    let mut nodes = Vec::new();
    for node in 0..4u64 {
        let mut leaves = Vec::new();
        for leaf in 0..3u64 {
            let first = node * 30 + leaf * 10;
            let records: Vec<_> = (first..first + 10)
                .map(|id| record(&mut rng, u32::try_from(id).expect("small")))
                .collect();
            leaves.push(
                writer
                    .leaf(first, &records.iter().collect::<Vec<_>>(), 0)
                    .await,
            );
        }
        nodes.push(writer.node(leaves, Vec::new()));
    }
    let shape = Shape {
        height: 1,
        external: false,
    };
    publish(&mut rng, &mut writer, nodes, &[], &shape, 0);
    let snapshot = open(&dir, Some(ObjectCache::new(0))).await;
    for (range, nodes, leaves) in [
        (0..120u64, 0, 0),
        (0..30, 0, 0),
        (30..90, 0, 0),
        (0..40, 1, 0),
        (5..120, 1, 1),
        (5..115, 2, 2),
        (34..36, 1, 1),
    ] {
        let state = WalkState::default();
        // Reaching past the last fragment is the same as reaching to the end of all ids.
        let end = if range.end == 120 { ID_END } else { range.end };
        let wanted = FragmentRanges::from_ranges(std::iter::once(range.start..end));
        snapshot.count(&wanted, &state).await.expect("valid");
        let stats = state.stats().snapshot();
        assert_eq!(
            (stats.nodes_opened, stats.leaves_opened),
            (nodes, leaves),
            "{range:?}"
        );
        assert_eq!(stats.requests, nodes + leaves, "one request an object");
    }
}

/// A tree of 60 leaves of two records each.
async fn sixty_leaves(dir: &FsPath) {
    let mut writer = Writer { dir, objects: 0 };
    let mut rng = StdRng::seed_from_u64(2);
    let mut leaves = Vec::new();
    for leaf in 0..60u32 {
        let records = [record(&mut rng, leaf * 2), record(&mut rng, leaf * 2 + 1)];
        leaves.push(
            writer
                .leaf(u64::from(leaf * 2), &records.iter().collect::<Vec<_>>(), 0)
                .await,
        );
    }
    let shape = Shape {
        height: 0,
        external: false,
    };
    publish(&mut rng, &mut writer, leaves, &[], &shape, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_walk_leaves_most_of_the_cache_to_others() {
    let (_keep, dir) = scratch();
    sixty_leaves(&dir).await;
    let hits_of_a_second_walk = async |cache: ObjectCache| {
        let snapshot = open(&dir, Some(cache.clone())).await;
        let mut hits = Vec::new();
        for _ in 0..2 {
            let state = WalkState::default();
            let all = FragmentRanges::all();
            let walk = snapshot.fragments(all, &WalkOptions::default(), &state);
            walk.try_collect::<Vec<_>>().await.expect("valid");
            let stats = state.stats().snapshot();
            assert_eq!(stats.requests + stats.cache_hits, 60);
            hits.push(stats.cache_hits);
        }
        assert_eq!(hits.first(), Some(&0));
        cache.settle().await;
        (hits.last().copied().unwrap_or_default(), cache.size_bytes())
    };
    let (hits, bytes) = hits_of_a_second_walk(ObjectCache::new(64 << 20)).await;
    assert_eq!(hits, 60);
    // Room for nearly all, of which one walk takes an eighth.
    let (hits, _) = hits_of_a_second_walk(ObjectCache::new(bytes)).await;
    assert!((6..=8).contains(&hits), "{hits} of 60");
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_stream_stops_the_walk() {
    let (_keep, dir) = scratch();
    sixty_leaves(&dir).await;
    let snapshot = open(&dir, Some(ObjectCache::new(0))).await;
    let state = WalkState::default();
    let options = WalkOptions { window: 4 };
    let mut walk = snapshot.fragments(FragmentRanges::all(), &options, &state);
    assert_eq!(
        walk.try_next()
            .await
            .expect("valid")
            .expect("a batch")
            .len(),
        2
    );
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    // The window and the one handed out, however long the consumer waits.
    assert!(state.stats().snapshot().leaves_opened <= 6);
    drop(walk);
    let opened = state.stats().snapshot().leaves_opened;
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    assert_eq!(state.stats().snapshot().leaves_opened, opened);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_begun_and_left_alone_holds_up_nobody() {
    let (_keep, dir) = scratch();
    let mut writer = Writer {
        dir: &dir,
        objects: 0,
    };
    let mut rng = StdRng::seed_from_u64(3);
    let mut leaves = Vec::new();
    for leaf in 0..24u32 {
        let records = [record(&mut rng, leaf)];
        leaves.push(
            writer
                .leaf(u64::from(leaf), &records.iter().collect::<Vec<_>>(), 0)
                .await,
        );
    }
    let shape = Shape {
        height: 0,
        external: false,
    };
    publish(&mut rng, &mut writer, leaves, &[], &shape, 0);
    let snapshot = open(&dir, Some(ObjectCache::new(1 << 20))).await;
    let tree = tree_of(&snapshot).expect("a tree");
    let state = WalkState::default();
    let works = tree.root_work(&FragmentRanges::all(), &state.stats);
    // As a stream of opens is that has a batch ready and is not asked for the next: some wait for
    // their bytes, some for their turn to decode.
    let mut begun: Vec<_> = works
        .iter()
        .map(|work| Box::pin(tree.open_leaf(work, &state)))
        .collect();
    for _ in 0..2 {
        begun.retain_mut(|open| open.now_or_never().is_none());
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    for work in works.iter().rev() {
        let open = tree.open_leaf(work, &state);
        let opened = tokio::time::timeout(std::time::Duration::from_secs(60), open).await;
        opened.expect("not held up").expect("valid");
    }
    drop(begun);
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_objects_are_errors_and_never_panics() {
    let (_keep, dir) = scratch();
    let mut rng = StdRng::seed_from_u64(7);
    let mut model = Model::new();
    // A tree with something of everything.
    for seed in 7.. {
        let table = dir.join(format!("whole{seed}"));
        rng = StdRng::seed_from_u64(seed);
        model = random_tree(&mut rng, &table).await;
        if table.join("_bt/node").is_dir() && table.join("_bt/root").is_dir() {
            std::fs::rename(&table, dir.join("whole")).expect("writable");
            break;
        }
    }
    let whole = dir.join("whole");
    let objects = files_below(&whole);
    let mut noticed = 0;
    for _ in 0..200 {
        let object = &objects[rng.random_range(0..objects.len())];
        let original = Bytes::from(std::fs::read(object).expect("readable"));
        let mut damaged = original.to_vec();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..damaged.len());
            damaged[at] ^= 1 << rng.random_range(0..8);
        }
        std::fs::write(object, &damaged).expect("writable");
        let options = OpenOptions {
            cache: Some(ObjectCache::new(0)),
            ..Default::default()
        };
        let outcome = match Snapshot::open(whole.to_str().expect("UTF-8"), options).await {
            Ok(snapshot) => snapshot
                .fragments(
                    FragmentRanges::all(),
                    &WalkOptions::default(),
                    &WalkState::default(),
                )
                .try_collect::<Vec<_>>()
                .await
                .map(|batches| batches.iter().map(Vec::len).sum::<usize>()),
            Err(e) => Err(e),
        };
        match outcome {
            // A flipped bit in a path or a file size is a different table, and not a broken one.
            Ok(_) => {}
            Err(Error::Internal { message }) => panic!("{}: {message}", object.display()),
            Err(_) => noticed += 1,
        }
        std::fs::write(object, &original).expect("writable");
    }
    assert!(noticed > 50, "{noticed} of 200 noticed");
    let snapshot = open(&whole, None).await;
    let fragments = resolve(&snapshot, &FragmentRanges::all()).await;
    assert_eq!(fragments.len(), model.len());
}

fn files_below(dir: &FsPath) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}
