//! Trees that are broken, or odd, where a range, a count or a scan could pass them by.

use datafusion::prelude::SessionContext;

use super::*;
use crate::provider::{SnapshotProvider, SystemColumns};
use crate::tree::object::Limits;

fn whole(id: u32) -> pb::DataFragment {
    pb::DataFragment {
        id: u64::from(id),
        files: vec![file(id, 0)],
        physical_rows: 5,
        ..Default::default()
    }
}

fn publish_root(dir: &FsPath, children: Vec<Child>, buffer: Vec<Arc<Mutation>>) {
    let root = Root {
        node: Node { children, buffer },
        next_sequence: 9,
    };
    let tree = pb::FragmentTree {
        root: Some(pb::fragment_tree::Root::InlineRoot(root.encode())),
        mutations_since_root: Vec::new(),
        next_action_sequence: 9,
    };
    write_manifest(dir, tree);
}

async fn two_leaves(writer: &mut Writer<'_>, second: u32) -> Vec<Child> {
    let (a, b) = (whole(0), whole(second));
    vec![
        writer.leaf(0, &[&a], 5).await,
        writer.leaf(u64::from(second), &[&b], 0).await,
    ]
}

async fn walked(snapshot: &Arc<Snapshot>, wanted: FragmentRanges) -> Result<usize> {
    let walk = snapshot.fragments(wanted, &WalkOptions::default(), &WalkState::default());
    let batches: Vec<_> = walk.try_collect().await?;
    Ok(batches.iter().map(Vec::len).sum())
}

/// The manifest says that there is no fragment from `IDS` on, and a leaf begins there.
#[tokio::test(flavor = "multi_thread")]
async fn a_scan_does_not_pass_by_what_lies_above_the_greatest_id() {
    for nested in [false, true] {
        let (_keep, dir) = scratch();
        let mut writer = Writer {
            dir: &dir,
            objects: 0,
        };
        let mut children = two_leaves(&mut writer, IDS).await;
        if nested {
            children = vec![writer.node(children, Vec::new())];
        }
        publish_root(&dir, children, Vec::new());
        let snapshot = open(&dir, None).await;
        for parts in 1..5 {
            let mut failed = Vec::new();
            for part in snapshot.split(&FragmentRanges::all(), parts) {
                failed.extend(walked(&snapshot, part).await.err());
            }
            let rules: Vec<_> = failed.iter().map(Error::corrupt_rule).collect();
            assert_eq!(rules, [Some("id_over_max_fragment_id")], "{parts}");
        }
        let first = FragmentRanges::from_ids([0, 1]);
        for part in snapshot.split(&first, 2) {
            walked(&snapshot, part).await.expect("not touched");
        }
    }
}

/// A leaf that is wholly wanted is counted by its parent's summary, and with it what is pending: that
/// must not be in the leaf already.
#[tokio::test(flavor = "multi_thread")]
async fn a_count_refuses_what_a_leaf_has_already() {
    let (_keep, dir) = scratch();
    let mut writer = Writer {
        dir: &dir,
        objects: 0,
    };
    let children = two_leaves(&mut writer, 10).await;
    let twice = Mutation {
        sequence: 4,
        target: 0,
        action: Action::AddDeletionFile(deletion(2)),
        delta: Delta {
            fragments: 0,
            total_rows: 0,
            visible_rows: -2,
        },
    };
    publish_root(&dir, children, vec![Arc::new(twice)]);
    let snapshot = open(&dir, None).await;
    let count = |ids: Range<u64>| {
        let snapshot = Arc::clone(&snapshot);
        async move {
            let wanted = FragmentRanges::from_ranges([ids]);
            snapshot.count(&wanted, &WalkState::default()).await
        }
    };
    let error = count(0..10).await.expect_err("at the watermark");
    assert_eq!(error.corrupt_rule(), Some("mutation_at_or_below_watermark"));
    let other = count(10..ID_END).await.expect("another leaf");
    assert_eq!(other.map(|c| c.visible_rows), Some(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_any_size_are_added_up() {
    let (_keep, dir) = scratch();
    let mut writer = Writer {
        dir: &dir,
        objects: 0,
    };
    let mut children = two_leaves(&mut writer, 10).await;
    for child in &mut children {
        child.counts.total_rows = u64::MAX;
    }
    publish_root(&dir, children, Vec::new());
    let snapshot = open(&dir, None).await;
    let cut = FragmentRanges::from_ranges(std::iter::once(1..u64::from(IDS) - 1));
    let estimate = snapshot.estimate(&cut).expect("a guess");
    assert_eq!(estimate.map(|(_, exact)| exact), Some(false));
    for wanted in [cut, FragmentRanges::all()] {
        let parts = snapshot.split(&wanted, 4);
        let ids = parts.iter().flat_map(FragmentRanges::iter).cloned();
        assert_eq!(FragmentRanges::from_ranges(ids), wanted);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_tree_is_higher_than_there_are_ids() {
    let (_keep, dir) = scratch();
    let mut writer = Writer {
        dir: &dir,
        objects: 0,
    };
    let leaves = two_leaves(&mut writer, 10).await;
    let mut top = writer.node(leaves, Vec::new());
    for height in [33, 40, u32::MAX] {
        top.height = height;
        publish_root(&dir, vec![top.clone()], Vec::new());
        let uri = dir.to_str().expect("UTF-8");
        let opened = Snapshot::open(uri, OpenOptions::default()).await;
        let error = opened.expect_err("too high");
        assert_eq!(error.corrupt_rule(), Some("height_mismatch"), "{error}");
    }
}

/// No rows are none, also where there is no file to read them from; rows without a file are not
/// taken for a file that somebody removed.
#[tokio::test(flavor = "multi_thread")]
async fn fragments_without_rows_or_files() {
    async fn scan(record: pb::DataFragment) -> datafusion::error::Result<usize> {
        let (_keep, dir) = scratch();
        let mut writer = Writer {
            dir: &dir,
            objects: 0,
        };
        let children = vec![writer.leaf(0, &[&record], 0).await];
        publish_root(&dir, children, Vec::new());
        let snapshot = open(&dir, None).await;
        let ctx = SessionContext::new();
        let provider = SnapshotProvider::try_new(snapshot, SystemColumns::ALL).expect("a table");
        ctx.register_table("t", Arc::new(provider)).expect("free");
        let query = ctx.sql("SELECT _rowaddr FROM t").await.expect("plans");
        let batches = query.collect().await?;
        Ok(batches.iter().map(|b| b.num_rows()).sum())
    }
    let none = pb::DataFragment {
        id: 3,
        ..Default::default()
    };
    let unread = pb::DataFragment {
        physical_rows: 0,
        ..whole(3)
    };
    for record in [none.clone(), unread] {
        assert_eq!(scan(record).await.expect("no rows"), 0);
    }
    let rows = pb::DataFragment {
        physical_rows: 5,
        ..none
    };
    let error = scan(rows).await.expect_err("no file").to_string();
    assert!(
        error.contains("fragment 3, which has no data file"),
        "{error}"
    );
    assert!(!error.contains("removed"), "{error}");
}

/// Leaves and mutations that are whole, in a place where they may not be.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_the_wrong_place_is_refused() {
    let removal = |sequence, target| {
        Arc::new(Mutation {
            sequence,
            target,
            action: Action::Remove,
            delta: Delta {
                fragments: -1,
                total_rows: -5,
                visible_rows: -5,
            },
        })
    };
    let in_base = |action: Action| {
        Arc::new(Mutation {
            sequence: 6,
            target: 0,
            action,
            delta: Delta::default(),
        })
    };
    let far_deletion = pb::DeletionFile {
        base_id: Some(7),
        ..deletion(1)
    };
    let far_overlay = pb::DataOverlayFile {
        data_file: Some(pb::DataFile {
            base_id: Some(7),
            ..file(0, 1)
        }),
        ..Default::default()
    };
    type Broken = (&'static str, pb::DataFragment, u64, Vec<Arc<Mutation>>);
    let broken: Vec<Broken> = vec![
        ("leaf_id_out_of_range", whole(4), 10, Vec::new()),
        (
            "unknown_base_id",
            pb::DataFragment {
                deletion_file: Some(far_deletion),
                ..whole(10)
            },
            10,
            Vec::new(),
        ),
        (
            "unknown_base_id",
            pb::DataFragment {
                overlays: vec![far_overlay],
                ..whole(10)
            },
            10,
            Vec::new(),
        ),
        (
            "unknown_base_id",
            whole(10),
            10,
            vec![in_base(Action::AddDeletionFile(far_deletion))],
        ),
        (
            "mutation_at_or_below_watermark",
            whole(10),
            10,
            vec![removal(5, 0)],
        ),
        (
            "sequence_duplicate",
            whole(10),
            10,
            vec![removal(6, 0), removal(6, 10)],
        ),
        (
            "sequence_not_below_next",
            whole(10),
            10,
            vec![removal(9, 0)],
        ),
    ];
    for (rule, record, min_key, buffer) in broken {
        let (_keep, dir) = scratch();
        let mut writer = Writer {
            dir: &dir,
            objects: 0,
        };
        let first = writer.leaf(0, &[&whole(0)], 5).await;
        let second = writer.leaf(min_key, &[&record], 0).await;
        publish_root(&dir, vec![first, second], buffer);
        let uri = dir.to_str().expect("UTF-8");
        let walk = async {
            let snapshot = Snapshot::open(uri, OpenOptions::default()).await?;
            walked(&snapshot, FragmentRanges::all()).await
        };
        let error = walk.await.expect_err(rule);
        assert_eq!(error.corrupt_rule(), Some(rule), "{error}");
    }
}

/// A mutation is in one object, and in one place of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_is_used_once_in_root_and_interior() {
    let (_keep, dir) = scratch();
    let mut writer = Writer {
        dir: &dir,
        objects: 0,
    };
    let clear = |target| {
        Arc::new(Mutation {
            sequence: 7,
            target,
            action: Action::ClearDeletionFile,
            delta: Delta::default(),
        })
    };
    let leaves = two_leaves(&mut writer, 10).await;
    let node = writer.node(leaves, vec![clear(0)]);
    publish_root(&dir, vec![node], vec![clear(10)]);
    let snapshot = open(&dir, None).await;
    let error = walked(&snapshot, FragmentRanges::all()).await;
    let error = error.expect_err("twice");
    assert_eq!(error.corrupt_rule(), Some("sequence_duplicate"));
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_named_with_what_exceeds_them() {
    let (_keep, dir) = scratch();
    let mut writer = Writer {
        dir: &dir,
        objects: 0,
    };
    let leaves = two_leaves(&mut writer, 10).await;
    let node = writer.node(leaves, Vec::new());
    publish_root(&dir, vec![node], Vec::new());
    let uri = dir.to_str().expect("UTF-8");
    let walk = async |limits: Limits| {
        let options = OpenOptions {
            limits,
            ..Default::default()
        };
        let snapshot = Snapshot::open(uri, options).await?;
        walked(&snapshot, FragmentRanges::all()).await
    };
    walk(Limits::default()).await.expect("within");
    for (setting, limits) in [
        (
            "max_height",
            Limits {
                max_height: 0,
                ..Limits::default()
            },
        ),
        (
            "max_object_bytes",
            Limits {
                max_object_bytes: 10,
                ..Limits::default()
            },
        ),
    ] {
        let error = walk(limits).await.expect_err(setting);
        assert!(matches!(error, Error::InvalidInput { .. }), "{error}");
        assert!(error.to_string().contains(setting), "{error}");
    }
}
