//! What a change does to the shape of a tree, and what it does not touch.

use super::*;
use crate::tree::leaf_write::LeafBuilder;
use crate::tree::object::ReadStatsSnapshot;
use crate::write::build::TreeBuilder;

/// Leaves of about twenty fragments, nodes of about eight children, no buffers.
fn eager() -> TreePolicy {
    TreePolicy {
        leaf_bytes: 6500,
        node_bytes: 600,
        buffer_bytes: 0,
        root_buffer_bytes: 0,
        since_root_bytes: 0,
        inline_root_bytes: 1 << 20,
        min_fragments: 0,
    }
}

/// A fragment of one file with a name that cannot be compressed, as Lance gives.
fn plain(id: u32) -> pb::DataFragment {
    let mut rng = StdRng::seed_from_u64(u64::from(id));
    let name = uuid::Uuid::from_u128(rng.random());
    pb::DataFragment {
        id: u64::from(id),
        files: vec![pb::DataFile {
            path: format!("{}.lance", name.simple()),
            ..file(id, 0)
        }],
        physical_rows: 10,
        ..Default::default()
    }
}

fn append(ids: std::ops::Range<u32>) -> Actions {
    ids.map(|id| (id, Action::Upsert(Box::new(plain(id)))))
        .collect()
}

fn remove(ids: impl IntoIterator<Item = u32>) -> Actions {
    ids.into_iter().map(|id| (id, Action::Remove)).collect()
}

/// A table of `count` plain fragments in leaves of a good size.
async fn table(policy: TreePolicy, count: u32) -> Table {
    let mut table = Table::new(policy).await;
    table.commit(append(0..count)).await;
    // The first leaves are cut by a guess at how their records are stored.
    for _ in 0..4 {
        if table.optimize().await.is_none() {
            return table;
        }
    }
    panic!("always something to gain");
}

async fn try_grow(table: &Table, changes: Vec<Change>, sink: &ObjectSink) -> Result<Growth> {
    grow(
        table.tree(),
        changes,
        table.max_id,
        sink,
        &table.policy,
        &ReadStats::default(),
    )
    .await
}

/// A commit handler's future moves between threads, and so must these.
#[tokio::test]
async fn growing_can_move_between_threads() {
    fn movable<T: Send>(future: T) -> T {
        future
    }
    let table = table(eager(), 10).await;
    let sink = table.sink().await;
    let stats = ReadStats::default();
    let same = movable(grow(
        table.tree(),
        Vec::new(),
        table.max_id,
        &sink,
        &table.policy,
        &stats,
    ));
    let growth = same.await.expect("valid");
    assert_eq!(growth.tree.next_action_sequence, table.tree().next_sequence);
    assert_eq!(growth.paths, Vec::<String>::new());
    let better = movable(optimize(table.tree(), &sink, &table.policy, &stats));
    assert!(better.await.expect("valid").is_none());
}

#[tokio::test]
async fn removing_everything_leaves_a_root_without_children_and_reads_nothing() {
    for inline_root_bytes in [0, 1 << 20] {
        let policy = TreePolicy {
            inline_root_bytes,
            since_root_bytes: 1 << 20,
            ..eager()
        };
        let mut table = table(policy, 600).await;
        assert!(table.height() >= 2);
        let report = table.commit(remove(0..600)).await;
        assert_eq!((report.requests, report.leaves, report.nodes), (0, 0, 0));
        assert_eq!((report.height, report.buffered), (0, 0));
        assert_eq!(
            table.snapshot.counts().expect("valid"),
            Some(Counts::default())
        );
        table.verify().await;
        // The tree grows again, with ids that go on.
        table.commit(append(600..700)).await;
        table.check(&mut StdRng::seed_from_u64(1)).await;
        table.verify().await;
    }
}

#[tokio::test]
async fn a_range_that_goes_takes_its_objects_with_it() {
    let mut table = table(eager(), 600).await;
    let objects = table.objects().await;
    let first = objects.iter().find(|o| o.height == 1).expect("an interior");
    assert_eq!(first.range.start, 0);
    let end = u32::try_from(first.range.end).expect("an id");
    let report = table.commit(remove(0..end)).await;
    // The next interior begins at 0 now, and with it the nodes on its left edge.
    assert_eq!(report.leaves, 0);
    assert!(report.nodes <= u64::from(table.height()));
    table.check(&mut StdRng::seed_from_u64(1)).await;
    table.verify().await;
}

#[tokio::test]
async fn a_root_takes_the_place_of_an_only_interior() {
    let mut table = table(eager(), 300).await;
    while table.height() != 2 {
        let next = table.max_id.map_or(0, |id| id + 1);
        table.commit(append(next..next + 20)).await;
    }
    // All but the first interior go: it is not touched and becomes an only child.
    let first = table.tree().root.node.children[0].clone();
    let start = u32::try_from(table.tree().root.node.children[1].min_key).expect("an id");
    let all = table.max_id.expect("fragments") + 1;
    let report = table.commit(remove(start..all)).await;
    assert_eq!(table.height(), 1);
    assert_eq!(
        table.tree().root.node.children.len(),
        first.num_children as usize
    );
    assert_eq!((report.leaves, report.nodes), (0, 0));
    assert!(report.requests <= 1);
    table.check(&mut StdRng::seed_from_u64(1)).await;
    table.verify().await;
}

#[tokio::test]
async fn one_fragment_more_writes_one_path() {
    let mut table = table(eager(), 3000).await;
    let height = table.height();
    assert!(height >= 3, "{height}");
    let report = table.commit(append(3000..3001)).await;
    // The last leaf may be full.
    assert!(report.leaves <= 2, "{report:?}");
    assert_eq!(report.nodes, u64::from(height) - 1);
    assert!(report.requests <= u64::from(height));
    let buffered = TreePolicy {
        root_buffer_bytes: 4096,
        ..table.policy
    };
    table.policy = buffered;
    let report = table.commit(append(3001..3002)).await;
    assert_eq!((report.leaves, report.nodes, report.requests), (0, 0, 0));
    assert_eq!(report.buffered, 1);
    table.verify().await;
}

#[tokio::test]
async fn appends_fill_leaves() {
    let mut table = Table::new(eager()).await;
    for next in 0..150 {
        table.commit(append(next * 4..next * 4 + 4)).await;
    }
    table.check(&mut StdRng::seed_from_u64(1)).await;
    let objects = table.objects().await;
    let leaves: Vec<_> = objects.iter().filter(|o| o.height == 0).collect();
    let all_but_last = &leaves[..leaves.len() - 1];
    let least = all_but_last.iter().map(|o| o.counts.fragments).min();
    let most = all_but_last.iter().map(|o| o.counts.fragments).max();
    assert!(least >= most.map(|most| most / 2), "{least:?} {most:?}");
    // The same records at once look much the same.
    let mut builder = TreeBuilder::new(table.sink().await, table.policy);
    for id in 0..600 {
        builder.push(&plain(id)).await.expect("in order");
    }
    let (_, built) = builder.finish().await.expect("written");
    assert_eq!(u64::from(table.height()), u64::from(built.height));
    let leaves = leaves.len() as u64;
    assert!(leaves <= built.leaves * 2 && built.leaves <= leaves * 2);
}

#[tokio::test]
async fn an_external_root_is_used_again_while_changes_fit_beside_it() {
    let policy = TreePolicy {
        inline_root_bytes: 0,
        since_root_bytes: 500,
        root_buffer_bytes: 2000,
        ..eager()
    };
    let mut table = table(policy, 300).await;
    let mut roots = vec![table.tree().root_path.clone()];
    let mut next = 300;
    while roots.len() < 3 {
        let report = table.commit(append(next..next + 1)).await;
        next += 1;
        let root = table.tree().root_path.clone();
        if roots.last() == Some(&root) {
            assert_eq!((report.roots, report.leaves, report.nodes), (0, 0, 0));
            assert_eq!((report.requests, report.root_bytes), (0, 0));
            assert!(report.manifest_bytes <= 500 && report.manifest_bytes > 0);
        } else {
            assert_eq!(report.roots, 1);
            assert!(table.tree().since_root.is_empty());
            roots.push(root);
        }
        table.verify().await;
    }
    assert!(next > 305, "several fit");
}

#[tokio::test]
async fn a_lost_commit_is_built_again_from_what_it_wrote() {
    let mut table = table(eager(), 600).await;
    let sink = table.sink().await;
    let mine = |table: &mut Table| {
        let model = table.model.clone();
        let changes = table.changes(vec![(500, Action::AddDataFile(file(500, 7)))]);
        table.model = model;
        changes
    };
    let changes = mine(&mut table);
    let lost = try_grow(&table, changes, &sink).await.expect("valid");
    let written = sink.written();
    assert_eq!(lost.report.leaves, 1);
    // Another writer was first, elsewhere in the tree.
    table
        .commit(vec![(3, Action::AddDataFile(file(3, 7)))])
        .await;
    let changes = mine(&mut table);
    let growth = try_grow(&table, changes, &sink).await.expect("valid");
    assert_eq!(growth.report.leaves, 1);
    let leaf = |growth: &Growth| {
        let mut paths = growth.paths.iter();
        paths.find(|p| p.starts_with("_bt/leaf/")).cloned()
    };
    assert_eq!(leaf(&growth), leaf(&lost), "the same leaf");
    assert_eq!(sink.written().0 - written.0, growth.report.nodes);
    assert!(growth.paths.iter().all(|p| sink.paths().contains(p)));
    let changes = vec![(500, Action::AddDataFile(file(500, 7)))];
    table.changes(changes);
    table.publish(growth.tree).await;
    table.check(&mut StdRng::seed_from_u64(1)).await;
    table.verify().await;
}

#[tokio::test]
async fn a_dry_run_finds_the_same_and_writes_nothing() {
    let mut rng = StdRng::seed_from_u64(5);
    for seed in 0..4 {
        rng = StdRng::seed_from_u64(seed);
        let policy = TreePolicy {
            leaf_bytes: 5400,
            node_bytes: 200,
            ..eager()
        };
        let mut table = table(policy, 150).await;
        let gone: Vec<u32> = (0..150).filter(|_| rng.random_bool(0.85)).collect();
        let changes = table.changes(remove(gone));
        let real = table.sink().await;
        let shell = table.snapshot.shell();
        let store = shell.object_store(None).await.expect("a store");
        let dry = ObjectSink::new(store, shell.branch_location().path, true);
        let dry_growth = try_grow(&table, changes.clone(), &dry)
            .await
            .expect("valid");
        let growth = try_grow(&table, changes, &real).await.expect("valid");
        assert_eq!(dry_growth.report.leaves, growth.report.leaves);
        assert_eq!(dry_growth.report.nodes, growth.report.nodes);
        assert_eq!(dry_growth.report.node_bytes, growth.report.node_bytes);
        for path in &dry_growth.paths {
            assert!(!table.dir.join(path).exists());
        }
        for path in &growth.paths {
            assert!(table.dir.join(path).exists());
        }
    }
    let _ = rng;
}

#[tokio::test]
async fn other_sizes_are_other_layouts() {
    let mut sidecar = table(TreePolicy::one_sidecar(), 2000).await;
    let report = sidecar.commit(append(2000..2001)).await;
    assert_eq!((report.leaves, report.nodes, report.buffered), (1, 0, 0));
    assert_eq!(sidecar.tree().root.node.children.len(), 1);
    assert!(report.root_inline);

    let two = TreePolicy {
        leaf_bytes: 9000,
        root_buffer_bytes: 20_000,
        since_root_bytes: 0,
        ..TreePolicy::two_levels()
    };
    let mut two = table(two, 2000).await;
    assert_eq!(two.height(), 1);
    assert!(two.tree().root.node.children.len() > 10);
    let scattered = (0..100).map(|i| (i * 20, Action::ClearDeletionFile));
    let report = two.commit(scattered.collect()).await;
    assert_eq!((report.leaves, report.roots, report.buffered), (0, 1, 100));
    two.verify().await;
}

#[tokio::test]
async fn changes_that_no_tree_can_hold_are_refused() {
    let table = table(eager(), 10).await;
    let sink = table.sink().await;
    let delta = |fragments, rows| Delta {
        fragments,
        total_rows: rows,
        visible_rows: rows,
    };
    let change = |target, action, delta| Change {
        target,
        action,
        delta,
    };
    let mut broken = plain(3);
    broken.files[0].column_indices = vec![0, 0];
    broken.files[0].fields = vec![0, 1];
    let refused = vec![
        change(3, Action::Upsert(Box::new(plain(4))), delta(0, 0)),
        change(3, Action::Upsert(Box::new(broken)), delta(0, 0)),
        change(3, Action::ClearDeletionFile, delta(1, 0)),
        change(3, Action::AddDeletionFile(deletion(0)), delta(0, 0)),
    ];
    for change in refused {
        let error = try_grow(&table, vec![change.clone()], &sink).await;
        let error = error.expect_err("refused");
        assert!(
            matches!(error, Error::InvalidInput { .. }),
            "{change:?}: {error}"
        );
    }
    for (rule, change) in [
        (
            "id_over_max_fragment_id",
            change(10, Action::Upsert(Box::new(plain(10))), delta(1, 10)),
        ),
        ("delta_mismatch", change(3, Action::Remove, delta(-1, -9))),
        (
            "modify_absent_fragment",
            change(3, Action::AddDataFile(file(3, 1)), delta(0, 0)),
        ),
        ("count_overflow", change(3, Action::Remove, delta(-1, -999))),
    ] {
        let mut changes = vec![change];
        if rule == "modify_absent_fragment" {
            changes.insert(
                0,
                super::Change {
                    target: 3,
                    action: Action::Remove,
                    delta: delta(-1, -10),
                },
            );
        }
        let error = try_grow(&table, changes, &sink).await.expect_err("wrong");
        assert_eq!(error.corrupt_rule(), Some(rule), "{error}");
    }
}

/// Writes objects of a tree that this writer would not make.
struct ByHand<'a>(&'a FsPath);

impl ByHand<'_> {
    fn put(&self, path: &str, bytes: &[u8]) {
        let target = self.0.join(path);
        std::fs::create_dir_all(target.parent().expect("a directory")).expect("writable");
        std::fs::write(target, bytes).expect("writable");
    }

    async fn leaf(&self, name: &str, min_key: u64, records: &[pb::DataFragment]) -> Child {
        let mut builder = LeafBuilder::new();
        let mut tally = Tally::default();
        for record in records {
            builder.push(record).expect("in order");
            tally += counts_of(record);
        }
        let bytes = builder.encode().await.expect("encodes");
        let path = format!("_bt/leaf/{name}.lance");
        self.put(&path, &bytes);
        Child {
            path,
            base_id: None,
            min_key,
            counts: tally.counts("leaf").expect("valid"),
            height: 0,
            num_children: 0,
            object_size: bytes.len() as u64,
            watermark: 0,
        }
    }

    fn node(&self, name: &str, children: Vec<Child>, buffer: Vec<Arc<Mutation>>) -> Child {
        let (min_key, height) = (children[0].min_key, children[0].height + 1);
        let num_children = u32::try_from(children.len()).expect("few");
        let node = Node { children, buffer };
        let bytes = node.encode().encode_to_vec();
        let path = format!("_bt/node/{name}.node");
        self.put(&path, &bytes);
        Child {
            path,
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

/// Sequence order is not level order: here a node holds what belongs between two mutations of its
/// root. Neither may be left out for the other.
#[tokio::test]
async fn a_newer_mutation_below_an_older_one_keeps_its_place() {
    let empty = Table::new(eager()).await;
    let hand = ByHand(&empty.dir);
    let mut nodes = Vec::new();
    let deleted = |sequence, rows, visible_rows| {
        Arc::new(Mutation {
            sequence,
            target: 5,
            action: Action::AddDeletionFile(deletion(rows)),
            delta: Delta {
                visible_rows,
                ..Default::default()
            },
        })
    };
    for node in 0..2u32 {
        let mut leaves = Vec::new();
        for leaf in 0..2u32 {
            let first = node * 20 + leaf * 10;
            let records: Vec<_> = (first..first + 10).map(plain).collect();
            let name = format!("{first}");
            leaves.push(hand.leaf(&name, u64::from(first), &records).await);
        }
        let buffer = if node == 0 {
            vec![deleted(7, 5, -3)]
        } else {
            vec![]
        };
        nodes.push(hand.node(&format!("{node}"), leaves, buffer));
    }
    let root = Root {
        node: Node {
            children: nodes,
            buffer: vec![deleted(9, 6, -1), deleted(3, 2, -2)],
        },
        next_sequence: 10,
    };
    let tree = pb::FragmentTree {
        root: Some(pb::fragment_tree::Root::InlineRoot(root.encode())),
        mutations_since_root: Vec::new(),
        next_action_sequence: 10,
    };
    let mut model: Model = (0..40).map(|id| (id, plain(id))).collect();
    model.get_mut(&5).expect("present").deletion_file = Some(deletion(6));
    let policy = TreePolicy {
        root_buffer_bytes: 4096,
        ..eager()
    };
    // The same objects under a manifest of the table's own.
    let mut table = empty;
    table.policy = policy;
    table.model = model;
    table.max_id = Some(39);
    table.publish(tree).await;
    let mut rng = StdRng::seed_from_u64(1);
    table.check(&mut rng).await;
    table
        .commit(vec![
            (5, Action::AddDeletionFile(deletion(8))),
            (5, Action::AddDeletionFile(deletion(9))),
            (30, Action::AddDataFile(file(30, 1))),
        ])
        .await;
    let own: Vec<_> = pending(table.tree()).iter().map(|m| m.key()).collect();
    assert_eq!(
        own,
        [(5, 3), (5, 9), (5, 11), (30, 12)],
        "only new ones are squashed"
    );
    table.check(&mut rng).await;
    table.verify().await;
    table.policy.root_buffer_bytes = 0;
    table.commit(vec![(5, Action::ClearDeletionFile)]).await;
    table.check(&mut rng).await;
    table.verify().await;
}

#[tokio::test]
async fn a_heavy_batch_does_not_wait_in_a_buffer() {
    let policy = TreePolicy {
        buffer_bytes: 1 << 20,
        root_buffer_bytes: 100,
        ..eager()
    };
    let mut table = table(policy, 1200).await;
    assert!(table.height() >= 2);
    let report = table.commit(append(1200..1300)).await;
    assert!(report.leaves >= 2, "{report:?}");
    let scattered = (0..60).map(|i| (i * 20, Action::AddDataFile(file(i * 20, 3))));
    let report = table.commit(scattered.collect()).await;
    assert_eq!(report.leaves, 0, "{report:?}");
    assert!(report.nodes >= 1, "{report:?}");
    table.check(&mut StdRng::seed_from_u64(1)).await;
    table.verify().await;
    // What the nodes buffer is found and applied.
    let report = table.optimize().await.expect("buffers");
    assert!(report.leaves > 0);
    assert!(
        table
            .objects()
            .await
            .iter()
            .all(|o| o.buffered.unwrap_or(0) == 0)
    );
    table.check(&mut StdRng::seed_from_u64(1)).await;
}

#[tokio::test]
async fn optimizing_a_good_tree_reads_no_leaf_and_changes_nothing() {
    let mut table = table(eager(), 1200).await;
    table.optimize_again().await;
    let sink = table.sink().await;
    let stats = ReadStats::default();
    let growth = optimize(table.tree(), &sink, &table.policy, &stats).await;
    assert!(growth.expect("valid").is_none());
    assert_eq!(sink.written(), (0, 0));
    let ReadStatsSnapshot {
        nodes_opened,
        leaves_opened,
        ..
    } = stats.snapshot();
    assert!(nodes_opened > 0);
    assert_eq!(leaves_opened, 0);
}

#[tokio::test]
async fn optimizing_mends_leaves_that_deletions_left_small() {
    let mut table = table(
        TreePolicy {
            leaf_bytes: 9000,
            ..eager()
        },
        2000,
    )
    .await;
    // One leaf at a time loses most of what it has, so that none sees a small neighbour.
    let before = table.objects().await;
    for leaf in before.iter().filter(|o| o.height == 0) {
        let start = u32::try_from(leaf.range.start).expect("an id");
        let end = u32::try_from(leaf.range.end.min(2000)).expect("an id");
        table
            .commit(remove((start..end).filter(|id| id % 3 != 0)))
            .await;
    }
    let count = |objects: &[TreeObject]| objects.iter().filter(|o| o.height == 0).count();
    let left = count(&table.objects().await);
    table.optimize().await.expect("small leaves");
    table.optimize_again().await;
    let mended = count(&table.objects().await);
    assert!(mended < left, "{left} leaves, then {mended}");
    table.check(&mut StdRng::seed_from_u64(1)).await;
    table.verify().await;
}
