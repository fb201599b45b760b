//! Shallow clones: objects of another dataset are read and never written, and what is taken out of
//! them still belongs to that dataset.

use super::*;
use crate::tree::record::resolve_owner;

/// The id by which the clone knows its source.
const SOURCE: u32 = 3;

/// A tree of three levels with something in every buffer, and a clone of it.
async fn clone(rng: &mut StdRng, policy: TreePolicy) -> (Table, Table) {
    let mut source = Table::new(TreePolicy {
        leaf_bytes: 5500,
        node_bytes: 300,
        buffer_bytes: 3000,
        root_buffer_bytes: 300,
        since_root_bytes: 0,
        inline_root_bytes: 1 << 20,
        min_fragments: 0,
    })
    .await;
    let actions = (0..150).map(|id| upsert(rng, id)).collect();
    source.commit(actions).await;
    for _ in 0..8 {
        let all: Vec<u32> = (0..150).collect();
        let actions = scattered(rng, &source.model, &all, 12);
        source.commit(actions).await;
    }
    let objects = source.objects().await;
    assert!(objects.iter().any(|o| o.height > 0 && o.buffered > Some(0)));
    let mut root = source.tree().root.as_ref().clone();
    for child in &mut root.node.children {
        child.base_id = Some(SOURCE);
    }
    let own = std::mem::take(&mut root.node.buffer).into_iter();
    root.node.buffer = own
        .map(|m| Mutation::adopt(m, Owner::Base(SOURCE)))
        .collect();
    let tree = pb::FragmentTree {
        root: Some(pb::fragment_tree::Root::InlineRoot(root.encode())),
        mutations_since_root: Vec::new(),
        next_action_sequence: root.next_sequence,
    };
    let mut model = source.model.clone();
    for record in model.values_mut() {
        resolve_owner(record, Owner::Base(SOURCE));
    }
    let bases = vec![pb::BasePath {
        id: SOURCE,
        path: format!("file://{}", source.dir.display()),
        is_dataset_root: true,
        ..Default::default()
    }];
    let clone = Table::of(policy, tree, model, source.max_id, bases).await;
    (source, clone)
}

fn listing(dir: &FsPath) -> Vec<(PathBuf, u64)> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let entry = entry.expect("an entry");
            if entry.path().is_dir() {
                dirs.push(entry.path());
            } else {
                files.push((entry.path(), entry.metadata().expect("a file").len()));
            }
        }
    }
    files.sort();
    files
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_clone_changes_is_its_own_and_the_rest_stays_its_sources() {
    for seed in 0..seeds(3) {
        let mut rng = StdRng::seed_from_u64(seed);
        let policy = TreePolicy {
            leaf_bytes: 5500,
            node_bytes: 300,
            ..random_policy(&mut rng)
        };
        println!("seed {seed}: {policy:?}");
        let (source, mut clone) = clone(&mut rng, policy).await;
        let before = listing(&source.dir);
        clone.check(&mut rng).await;
        clone.verify().await;
        for step in 0..10 {
            println!("seed {seed}, step {step}");
            let actions = workload(&mut rng, &clone);
            clone.commit(actions).await;
            clone.check(&mut rng).await;
            clone.verify().await;
        }
        clone.optimize().await;
        clone.check(&mut rng).await;
        clone.verify().await;
        assert_eq!(listing(&source.dir), before, "the source is as it was");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_untouched_subtree_stays_a_reference_to_the_source() {
    let mut rng = StdRng::seed_from_u64(9);
    let policy = TreePolicy {
        leaf_bytes: 5500,
        node_bytes: 300,
        buffer_bytes: 0,
        root_buffer_bytes: 0,
        since_root_bytes: 0,
        inline_root_bytes: 1 << 20,
        min_fragments: 0,
    };
    let (_source, mut clone) = clone(&mut rng, policy).await;
    let id = *clone.model.keys().next().expect("fragments");
    let report = clone
        .commit(vec![(id, Action::AddDataFile(file(id, 40)))])
        .await;
    assert!(report.leaves >= 1);
    let objects = clone.objects().await;
    let (own, foreign): (Vec<_>, Vec<_>) =
        objects.iter().skip(1).partition(|o| o.base_id.is_none());
    assert_eq!(own.len() as u64, report.leaves + report.nodes);
    assert!(!foreign.is_empty());
    assert!(foreign.iter().all(|o| o.base_id == Some(SOURCE)));
    let record = &clone.records().await[0];
    let bases: Vec<_> = record.files.iter().map(|f| f.base_id).collect();
    let (last, others) = bases.split_last().expect("files");
    assert_eq!(*last, None, "the new file is the clone's");
    assert!(others.iter().all(|base| *base == Some(SOURCE)));
}
