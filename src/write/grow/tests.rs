//! Random histories against a plain map, and what single changes cost.
//!
//! A table here is one manifest that is written again for every version, over objects in a
//! directory: what a version resolves to is read back by the crate's own reader and checked by its
//! own `verify`.

mod costs;
mod foreign;
mod shapes;

use std::collections::BTreeMap;
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;

use futures::TryStreamExt;
use lance_table::feature_flags::{FLAG_BASE_PATHS, FLAG_FRAGMENT_TREE};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::*;
use crate::ranges::FragmentRanges;
use crate::snapshot::{Catalog, OpenOptions, Snapshot};
use crate::tree::mutation::apply;
use crate::tree::object::ObjectCache;
use crate::tree::record::counts_of;
use crate::tree_scan::{TreeObject, WalkOptions};
use crate::verify::{VerifyOptions, verify};

type Model = BTreeMap<u32, pb::DataFragment>;

/// A table of one version, and what it must hold.
struct Table {
    _keep: tempfile::TempDir,
    dir: PathBuf,
    model: Model,
    max_id: Option<u32>,
    policy: TreePolicy,
    cache: ObjectCache,
    bases: Vec<pb::BasePath>,
    snapshot: Arc<Snapshot>,
}

/// Actions on fragments, in the order they apply.
type Actions = Vec<(u32, Action)>;

impl Table {
    async fn new(policy: TreePolicy) -> Self {
        let root = Root {
            next_sequence: 1,
            ..Default::default()
        };
        let tree = pb::FragmentTree {
            root: Some(pb::fragment_tree::Root::InlineRoot(root.encode())),
            mutations_since_root: Vec::new(),
            next_action_sequence: 1,
        };
        Self::of(policy, tree, Model::new(), None, Vec::new()).await
    }

    async fn of(
        policy: TreePolicy,
        tree: pb::FragmentTree,
        model: Model,
        max_id: Option<u32>,
        bases: Vec<pb::BasePath>,
    ) -> Self {
        let keep = tempfile::tempdir().expect("a directory");
        let dir = keep.path().join("table.lance");
        write_manifest(&dir, tree, max_id, &bases);
        let cache = ObjectCache::new(64 << 20);
        let snapshot = open(&dir, &cache).await;
        Self {
            _keep: keep,
            dir,
            model,
            max_id,
            policy,
            cache,
            bases,
            snapshot,
        }
    }

    fn tree(&self) -> &TreeCatalog {
        tree_of(&self.snapshot)
    }

    async fn sink(&self) -> ObjectSink {
        sink_of(&self.snapshot).await
    }

    /// The changes of these actions, as a writer that knows the records finds them.
    fn changes(&mut self, actions: Actions) -> Vec<Change> {
        let changes = actions.into_iter().map(|(target, action)| {
            self.max_id = self.max_id.max(Some(target));
            let mutation = Mutation {
                sequence: 1,
                target,
                action,
                delta: Delta::default(),
            };
            let before = self.model.remove(&target);
            let after = apply("model", before.clone(), &mutation, Owner::Current).expect("allowed");
            let counts = |r: &Option<pb::DataFragment>| r.as_ref().map(counts_of);
            let delta = Delta::between(counts(&before), counts(&after)).expect("small");
            self.model.extend(after.map(|record| (target, record)));
            Change {
                target,
                action: mutation.action,
                delta,
            }
        });
        changes.collect()
    }

    /// Publishes a growth.
    async fn publish(&mut self, tree: pb::FragmentTree) {
        write_manifest(&self.dir, tree, self.max_id, &self.bases);
        self.snapshot = open(&self.dir, &self.cache).await;
    }

    /// Commits actions, and checks what can be checked without reading the tree.
    async fn commit(&mut self, actions: Actions) -> GrowthReport {
        let changes = self.changes(actions);
        let next = self.tree().next_sequence + changes.len() as u64;
        let sink = self.sink().await;
        let stats = ReadStats::default();
        let growth = grow(
            self.tree(),
            changes,
            self.max_id,
            &sink,
            &self.policy,
            &stats,
        )
        .await
        .expect("a valid change");
        assert_eq!(growth.tree.next_action_sequence, next, "none is used twice");
        self.check_report(&growth, &sink);
        assert_eq!(stats.snapshot().bytes, growth.report.request_bytes);
        self.publish(growth.tree).await;
        growth.report
    }

    /// Optimizes; whether there was something to gain.
    async fn optimize(&mut self) -> Option<GrowthReport> {
        let sink = self.sink().await;
        let stats = ReadStats::default();
        let growth = optimize(self.tree(), &sink, &self.policy, &stats).await;
        let growth = growth.expect("a valid tree")?;
        self.check_report(&growth, &sink);
        self.publish(growth.tree).await;
        Some(growth.report)
    }

    /// Optimizes what was optimized: soon there is nothing to gain.
    async fn optimize_again(&mut self) {
        // The size of a leaf of one or two records says nothing, so one made of two can look as if
        // it should be two.
        if self.policy.leaf_bytes < 6000 {
            return;
        }
        for _ in 0..3 {
            if self.optimize().await.is_none() {
                return;
            }
        }
        panic!("always something to gain");
    }

    fn check_report(&self, growth: &Growth, sink: &ObjectSink) {
        let report = &growth.report;
        assert_eq!(
            report.counts,
            brute_force(&self.model, &FragmentRanges::all())
        );
        let objects = report.leaves + report.nodes + report.roots;
        assert_eq!(growth.paths.len() as u64, objects);
        assert!(sink.written().0 >= objects);
        assert_eq!(
            report.root_inline,
            growth.tree.root.as_ref().is_some_and(is_inline)
        );
    }

    async fn records(&self) -> Vec<pb::DataFragment> {
        let walk = self.snapshot.fragments(
            FragmentRanges::all(),
            &WalkOptions::default(),
            &WalkState::default(),
        );
        let batches: Vec<_> = walk.try_collect().await.expect("valid");
        let fragments = batches.into_iter().flatten();
        fragments.map(|f| f.record().expect("a record")).collect()
    }

    /// Compares everything with the model.
    async fn check(&self, rng: &mut StdRng) {
        let expected: Vec<_> = self.model.values().cloned().collect();
        assert_eq!(self.records().await, expected);
        let total = brute_force(&self.model, &FragmentRanges::all());
        assert_eq!(self.snapshot.counts().expect("valid"), Some(total));
        let end = self.max_id.map_or(0, u64::from) + 10;
        for _ in 0..6 {
            let start = rng.random_range(0..end);
            let wanted = FragmentRanges::from_ranges(std::iter::once(
                start..start + rng.random_range(0..end),
            ));
            let counted = self.snapshot.count(&wanted, &WalkState::default()).await;
            assert_eq!(
                counted.expect("valid"),
                Some(brute_force(&self.model, &wanted)),
                "{wanted}"
            );
        }
    }

    /// Checks every rule of the format.
    async fn verify(&self) {
        let uri = self.dir.to_str().expect("UTF-8");
        let options = VerifyOptions { data_files: false };
        let report = verify(uri, options, OpenOptions::default(), |_| {}).await;
        let report = report.expect("a table");
        assert!(report.ok(), "{:#?}", report.findings);
        assert_eq!(report.fragments, self.model.len() as u64);
    }

    async fn objects(&self) -> Vec<TreeObject> {
        self.snapshot
            .tree_objects(&FragmentRanges::all(), &WalkState::default())
            .await
            .expect("valid")
    }

    fn height(&self) -> u32 {
        self.tree().root.child_height().map_or(0, |h| h + 1)
    }
}

fn is_inline(root: &pb::fragment_tree::Root) -> bool {
    matches!(root, pb::fragment_tree::Root::InlineRoot(_))
}

fn tree_of(snapshot: &Snapshot) -> &TreeCatalog {
    match &snapshot.catalog {
        Catalog::Tree(tree) => tree,
        Catalog::Flat(_) => panic!("a flat table"),
    }
}

async fn sink_of(snapshot: &Snapshot) -> ObjectSink {
    let shell = snapshot.shell();
    let store = shell.object_store(None).await.expect("a store");
    ObjectSink::new(store, shell.branch_location().path, false)
}

async fn open(dir: &FsPath, cache: &ObjectCache) -> Arc<Snapshot> {
    let options = OpenOptions::default().with_cache(cache.clone());
    Snapshot::open(dir.to_str().expect("UTF-8"), options)
        .await
        .expect("opens")
}

fn write_manifest(
    dir: &FsPath,
    tree: pb::FragmentTree,
    max_fragment_id: Option<u32>,
    bases: &[pb::BasePath],
) {
    let flags = FLAG_FRAGMENT_TREE | if bases.is_empty() { 0 } else { FLAG_BASE_PATHS };
    let manifest = pb::Manifest {
        version: 1,
        reader_feature_flags: flags,
        writer_feature_flags: flags,
        max_fragment_id,
        base_paths: bases.to_vec(),
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
    let name = format!("{:020}.manifest", u64::MAX - 1);
    std::fs::write(versions.join(name), file).expect("writable");
}

fn brute_force(model: &Model, wanted: &FragmentRanges) -> Counts {
    let mut tally = Tally::default();
    for (id, record) in model {
        if wanted.contains(u64::from(*id)) {
            tally += counts_of(record);
        }
    }
    tally.counts("model").expect("valid")
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

fn upsert(rng: &mut StdRng, id: u32) -> (u32, Action) {
    (id, Action::Upsert(Box::new(record(rng, id))))
}

/// A new name, which collides with an old one now and then.
fn path(rng: &mut StdRng, id: u32) -> String {
    file(id, rng.random_range(0..8)).path
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
    match rng.random_range(0..9) {
        0 => Action::Upsert(Box::new(record(rng, id))),
        1 => Action::Remove,
        2 | 3 => Action::AddDataFile(file(id, rng.random_range(0..8))),
        4 => Action::RemoveDataFile(path(rng, id)),
        5 | 6 if present.physical_rows > 0 => {
            Action::AddDeletionFile(deletion(rng.random_range(1..=present.physical_rows)))
        }
        7 | 8 if !present.files.is_empty() => Action::ReplaceDataFile {
            expected_path: present.files[rng.random_range(0..present.files.len())]
                .path
                .clone(),
            path: path(rng, id),
            file_size_bytes: 3,
            base_id: None,
        },
        _ => Action::ClearDeletionFile,
    }
}

/// Actions on random fragments, each allowed by what those before it left.
fn scattered(rng: &mut StdRng, model: &Model, ids: &[u32], count: usize) -> Actions {
    let mut now = model.clone();
    let mut actions = Vec::new();
    for _ in 0..count {
        let id = ids[rng.random_range(0..ids.len())];
        let action = action(rng, id, now.get(&id));
        let mutation = Mutation {
            sequence: 1,
            target: id,
            action: action.clone(),
            delta: Delta::default(),
        };
        let after = apply("x", now.remove(&id), &mutation, Owner::Current).expect("allowed");
        now.extend(after.map(|record| (id, record)));
        actions.push((id, action));
    }
    actions
}

/// One commit's actions: of the kinds that real writers make.
fn workload(rng: &mut StdRng, table: &Table) -> Actions {
    let next = table.max_id.map_or(0, |id| id + 1);
    let present: Vec<u32> = table.model.keys().copied().collect();
    let kind = if present.is_empty() {
        0
    } else {
        rng.random_range(0..12)
    };
    match kind {
        // Appends.
        0..=3 => {
            let count = rng.random_range(1..40);
            (next..next + count).map(|id| upsert(rng, id)).collect()
        }
        // Anything anywhere, ids without a record included.
        4 | 5 => {
            let all: Vec<u32> = (0..next + 3).collect();
            let count = rng.random_range(1..30);
            scattered(rng, &table.model, &all, count)
        }
        6 | 7 => {
            let count = rng.random_range(1..60);
            scattered(rng, &table.model, &present, count)
        }
        // A range goes.
        8 => {
            let from = rng.random_range(0..present.len());
            let to = (from + rng.random_range(1..60)).min(present.len());
            present[from..to]
                .iter()
                .map(|id| (*id, Action::Remove))
                .collect()
        }
        // Most goes.
        9 if rng.random_bool(0.4) => {
            let mut gone = present.clone();
            gone.shuffle(rng);
            gone.truncate(present.len() - rng.random_range(0..5).min(present.len()));
            gone.into_iter().map(|id| (id, Action::Remove)).collect()
        }
        // Compaction: some go and some come.
        10 => {
            let from = rng.random_range(0..present.len());
            let to = (from + rng.random_range(1..30)).min(present.len());
            let mut actions: Actions = present[from..to]
                .iter()
                .map(|id| (*id, Action::Remove))
                .collect();
            actions.extend((next..next + 3).map(|id| upsert(rng, id)));
            actions
        }
        // A column for everybody.
        _ => present
            .iter()
            .map(|id| (*id, Action::AddDataFile(file(*id, rng.random_range(0..90)))))
            .collect(),
    }
}

fn pick<T: Copy>(rng: &mut StdRng, values: &[T]) -> T {
    values[rng.random_range(0..values.len())]
}

fn random_policy(rng: &mut StdRng) -> TreePolicy {
    TreePolicy {
        leaf_bytes: pick(rng, &[4200, 5500, 6500, 9000]),
        node_bytes: pick(rng, &[200, 350, 900, 4000]),
        buffer_bytes: pick(rng, &[0, 300, 2000, 1 << 20]),
        root_buffer_bytes: pick(rng, &[0, 300, 2000, 20_000]),
        since_root_bytes: pick(rng, &[0, 400, 3000]),
        inline_root_bytes: pick(rng, &[0, 700, 1 << 20]),
        min_fragments: 0,
    }
}

/// How many random tables a test makes; `FRAGTREE_TEST_SEEDS` asks for more.
fn seeds(usual: u64) -> u64 {
    let asked = std::env::var("FRAGTREE_TEST_SEEDS").ok();
    asked.and_then(|n| n.parse().ok()).unwrap_or(usual)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_random_history_is_what_a_plain_map_holds() {
    let mut heights = BTreeMap::new();
    for seed in 0..seeds(8) {
        let mut rng = StdRng::seed_from_u64(seed);
        let policy = random_policy(&mut rng);
        println!("seed {seed}: {policy:?}");
        let mut table = Table::new(policy).await;
        for step in 0..25 {
            println!("seed {seed}, step {step}");
            let actions = workload(&mut rng, &table);
            table.commit(actions).await;
            table.check(&mut rng).await;
            if step % 5 == 4 {
                table.verify().await;
            }
            if rng.random_bool(0.06) {
                table.optimize().await;
                table.check(&mut rng).await;
                table.verify().await;
                table.optimize_again().await;
            }
            *heights.entry(table.height()).or_insert(0) += 1;
        }
        table.verify().await;
    }
    assert!(heights.len() >= 4, "{heights:?}");
}

/// Trees of a record or two a leaf and two or three children a node, from which whole ranges go
/// but for a few: whatever is left has to find its place among neighbours of its height.
#[tokio::test(flavor = "multi_thread")]
async fn a_tall_tree_shrinks_and_grows_in_order() {
    let mut tallest = 0;
    for seed in 0..seeds(6) {
        let mut rng = StdRng::seed_from_u64(1000 + seed);
        let policy = TreePolicy {
            leaf_bytes: pick(&mut rng, &[4200, 5400, 6000]),
            node_bytes: pick(&mut rng, &[190, 260, 400]),
            buffer_bytes: pick(&mut rng, &[0, 0, 200, 1500]),
            root_buffer_bytes: pick(&mut rng, &[0, 0, 400]),
            since_root_bytes: 0,
            inline_root_bytes: pick(&mut rng, &[0, 1 << 20]),
            min_fragments: 0,
        };
        println!("seed {seed}: {policy:?}");
        let mut table = Table::new(policy).await;
        for step in 0..14 {
            let present: Vec<u32> = table.model.keys().copied().collect();
            let actions: Actions = if present.len() < 60 {
                let next = table.max_id.map_or(0, |id| id + 1);
                let new = next..next + 80;
                let mut actions: Actions = new.map(|id| upsert(&mut rng, id)).collect();
                // Old ids again, as a restore of an old version brings them.
                for _ in 0..rng.random_range(0..20) {
                    let id = rng.random_range(0..=next);
                    actions.push(upsert(&mut rng, id));
                }
                actions
            } else {
                let from = rng.random_range(0..present.len());
                let to = (from + rng.random_range(10..90)).min(present.len());
                let stays = rng.random_range(0.0..0.2);
                let mut range: Vec<u32> = present[from..to].to_vec();
                if rng.random_bool(0.3) {
                    range = present[..to].to_vec();
                }
                range.retain(|_| !rng.random_bool(stays));
                range.into_iter().map(|id| (id, Action::Remove)).collect()
            };
            println!("seed {seed}, step {step}");
            table.commit(actions).await;
            tallest = tallest.max(table.height());
            table.check(&mut rng).await;
            if step % 3 == 2 {
                table.verify().await;
            }
        }
        table.optimize().await;
        table.check(&mut rng).await;
        table.verify().await;
        table.optimize_again().await;
    }
    assert!(tallest >= 4, "{tallest}");
}
