//! Trees made by hand, of shapes that this writer comes to seldom or never.

use super::shapes::{eager, plain, remove};
use super::*;
use crate::tree::leaf_write::LeafBuilder;

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

/// What is left of two interiors is one leaf, and the interior before them is written already: it is
/// read back, as a leaf cannot stand beside interiors.
#[tokio::test]
async fn a_leaf_that_is_left_alone_joins_an_interior_that_was_just_written() {
    let mut table = Table::new(TreePolicy {
        leaf_bytes: 9000,
        node_bytes: 400,
        root_buffer_bytes: 600,
        ..eager()
    })
    .await;
    let hand = ByHand(&table.dir);
    let mut nodes = Vec::new();
    let mut model = Model::new();
    for (name, leaves) in [
        ("first", [0..25, 30..55]),
        ("middle", [60..65, 70..75]),
        ("last", [80..85, 90..95]),
    ] {
        let mut children = Vec::new();
        for ids in leaves {
            let min_key = u64::from(ids.start);
            let records: Vec<_> = ids.clone().map(plain).collect();
            children.push(hand.leaf(&min_key.to_string(), min_key, &records).await);
            model.extend(ids.zip(records));
        }
        nodes.push(hand.node(name, children, vec![]));
    }
    let root = Root {
        node: Node {
            children: nodes,
            buffer: vec![],
        },
        next_sequence: 1,
    };
    table.model = model;
    table.max_id = Some(94);
    table
        .publish(pb::FragmentTree {
            root: Some(pb::fragment_tree::Root::InlineRoot(root.encode())),
            mutations_since_root: Vec::new(),
            next_action_sequence: 1,
        })
        .await;
    let add = |id, number| (id, Action::AddDataFile(file(id, number)));
    // A heavy batch for the first interior and the last, which loses a leaf; a light one for the
    // middle, which would lose a leaf as well and is not opened for that.
    let mut actions = remove(60..65);
    actions.extend((0..5).flat_map(|id| [add(id, 1), add(id, 2)]));
    actions.extend((80..85).flat_map(|id| [add(id, 1), add(id, 2)]));
    actions.extend(remove(90..95));
    let report = table.commit(actions).await;
    assert_eq!(table.height(), 1, "{report:?}");
    assert_eq!(table.tree().root.node.children.len(), 3);
    assert_eq!(
        (report.leaves, report.nodes),
        (2, 0),
        "what was read back is not in the tree"
    );
    table.check(&mut StdRng::seed_from_u64(1)).await;
    table.verify().await;
}
