//! What goes besides versions: what failed commits left, and what a superseded change named.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fragtree::write::cleanup::{FileKind, Why};
use fragtree::write::{CleanupOptions, TreeTable, WriteOptions, cleanup};
use fragtree::{
    Engine, EngineOptions, FragmentRanges, ObjectCache, OpenOptions, VersionRef, WalkState,
};

use super::{age, all, check, clean, clean_as_foretold, files_at, gone, keep, kinds, versions};
use crate::probe::{Act, Probe};
use crate::twin::{Change, Twin, base_rows, stream_of, tiny};

const ORPHANS: [(&str, FileKind); 12] = [
    (
        "_bt/root/00000000-0000-0000-0000-000000000001.root",
        FileKind::TreeRoot,
    ),
    (
        "_bt/node/00000000-0000-0000-0000-000000000002.node",
        FileKind::TreeNode,
    ),
    (
        "_bt/leaf/00000000-0000-0000-0000-000000000003.lance",
        FileKind::TreeLeaf,
    ),
    ("_bt/odd/thing", FileKind::TreeOther),
    ("data/lost.lance", FileKind::Data),
    ("data/lost/0001.blob", FileKind::Data),
    ("data/.tmp0001", FileKind::Data),
    ("_deletions/1-2-3.arrow", FileKind::Deletion),
    ("_deletions/1-2-4.bin", FileKind::Deletion),
    ("_transactions/3-lost.txn", FileKind::Transaction),
    (
        "_indices/00000000-0000-0000-0000-000000000004/part/page.lance",
        FileKind::Index,
    ),
    ("_versions/.tmp_lost", FileKind::TemporaryManifest),
];

const STRANGERS: [&str; 4] = [
    "data/notes.txt",
    "_other/lost.lance",
    "notes.lance",
    "_deletions/readme",
];

fn put(uri: &str, path: &str, old: bool) {
    let path = Path::new(uri).join(path);
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    fs::write(&path, "garbage").expect("writes");
    if old {
        age(&path);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orphans_go_when_they_are_old() {
    let mut twin = Twin::make(false).await;
    twin.apply(&Change::Append { rows: 9 }).await;
    let uri = twin.tree_uri();
    let before = files_at(uri);
    for (path, _) in ORPHANS {
        put(uri, path, false);
    }
    for path in STRANGERS {
        put(uri, path, true);
    }
    let week = CleanupOptions {
        list_files: usize::MAX,
        ..Default::default()
    };
    let report = clean_as_foretold(uri, week.clone(), "young").await;
    assert_eq!(report.total().files, 0);
    assert_eq!(report.in_progress.files, ORPHANS.len() as u64);

    for (path, _) in ORPHANS {
        age(&Path::new(uri).join(path));
    }
    let report = clean_as_foretold(uri, week, "old").await;
    let mut expected = BTreeMap::new();
    for (_, kind) in ORPHANS {
        *expected.entry((kind, Why::Orphan)).or_default() += 1;
    }
    assert_eq!(kinds(&report), expected);
    let mut left = files_at(uri);
    for path in STRANGERS {
        assert!(left.remove(path).is_some(), "{path} is none of ours");
    }
    assert_eq!(left, before);
    twin.compare("without orphans").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn young_orphans_go_when_nobody_writes() {
    let mut twin = Twin::make(false).await;
    twin.apply(&Change::Delete("id = 3".into())).await;
    let uri = twin.tree_uri();
    let before = files_at(uri);
    for (path, _) in ORPHANS {
        put(uri, path, false);
    }
    let options = CleanupOptions {
        delete_unverified: true,
        list_files: usize::MAX,
        ..Default::default()
    };
    clean_as_foretold(uri, options, "unverified").await;
    assert_eq!(files_at(uri), before);
    let index = Path::new(uri).join("_indices/00000000-0000-0000-0000-000000000004");
    assert!(!index.exists(), "its folder goes too");
    twin.compare("without orphans").await;
}

/// A failed write leaves objects; a cleanup finds them, and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_commit_leaves_nothing_for_ever() {
    let twin = Twin::make(false).await;
    let uri = twin.tree_uri();
    let before = files_at(uri);
    let probe = Probe::hooked(|verb, location| {
        let fails = verb == "put" && location.contains("_versions");
        let act = if fails { Act::Busy } else { Act::Pass };
        Box::pin(async move { act })
    });
    let engine = Engine::with_options(EngineOptions {
        object_store_wrapper: Some(Arc::new(probe)),
        ..Default::default()
    });
    let write = WriteOptions {
        policy: Some(tiny()),
        ..Default::default()
    };
    let table = TreeTable::open(uri, engine.open_options(), write);
    let table = table.await.expect("opens");
    let rows = stream_of(base_rows(7000..7100, "lost"));
    table.append(rows).await.expect_err("no version");
    let left = files_at(uri);
    let lost: BTreeSet<_> = gone(&left, &before);
    assert!(
        lost.iter().any(|path| path.starts_with("data/")),
        "{lost:?}"
    );
    for path in &lost {
        age(&Path::new(uri).join(path));
    }
    let report = clean_as_foretold(uri, keep(100), "after a failed commit").await;
    assert!(kinds(&report).keys().all(|(_, why)| *why == Why::Orphan));
    assert_eq!(files_at(uri), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_superseded_change_keeps_no_file() {
    let mut twin = Twin::make(false).await;
    // Both deletion files of fragment 0 are named by changes that are still buffered.
    twin.apply(&Change::Delete("id = 0".into())).await;
    twin.apply(&Change::Delete("id = 1".into())).await;
    let uri = twin.tree_uri().to_string();
    let deletions = |files: &BTreeMap<String, u64>| {
        let files = files.keys().filter(|f| f.starts_with("_deletions/"));
        files.count()
    };
    assert_eq!(deletions(&files_at(&uri)), 2);
    let report = clean_as_foretold(&uri, all(), "superseded").await;
    assert_eq!(deletions(&files_at(&uri)), 1);
    assert_eq!(kinds(&report)[&(FileKind::Deletion, Why::Unreachable)], 1);
    twin.compare("superseded").await;

    // Many more, through flushes.
    for id in 2..60 {
        twin.apply(&Change::Delete(format!("id = {id}"))).await;
    }
    clean_as_foretold(&uri, all(), "many superseded").await;
    clean(twin.flat_uri(), all()).await;
    let left = deletions(&files_at(&uri));
    assert_eq!(left, deletions(&files_at(twin.flat_uri())));
    twin.compare("many superseded").await;
}

/// Versions share what they did not change: the walks of thirty cost little more than one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_subtrees_are_walked_once() {
    let mut twin = Twin::make(false).await;
    for _ in 0..3 {
        twin.apply(&Change::Append { rows: 100 }).await;
    }
    let uri = format!("file-object-store://{}", twin.tree_uri());
    let opened = async |uri: &str| {
        let probe = Probe::default();
        let open = OpenOptions {
            object_store_wrapper: Some(Arc::new(probe.clone())),
            // Nothing but what the walk itself remembers.
            cache: Some(ObjectCache::new(0)),
            ..Default::default()
        };
        let options = CleanupOptions {
            dry_run: true,
            ..keep(1000)
        };
        let last = AtomicU64::new(0);
        let report = cleanup(uri, options, open, |progress| {
            last.store(progress.versions_done, Ordering::SeqCst);
        });
        let report = report.await.expect("walks");
        assert_eq!(last.load(Ordering::SeqCst), report.kept_versions);
        let objects = probe.count("_bt/leaf") + probe.count("_bt/node");
        (objects, report.kept_versions)
    };
    let (first, _) = opened(&uri).await;
    let objects = files_at(twin.tree_uri());
    let objects = objects.keys().filter(|path| path.contains("_bt/leaf"));
    assert!(objects.count() > 10, "the tree has some leaves");
    // Changes of the config touch no fragment, and share everything.
    for n in 0..12 {
        let change = Change::Config("n".into(), n.to_string());
        twin.apply(&change).await;
    }
    let (same, versions) = opened(&uri).await;
    assert!(versions > 12);
    assert_eq!(same, first, "nothing new to walk");
    // A buffered change costs the path to what it changes.
    for id in 0..10 {
        twin.apply(&Change::Delete(format!("id = {}", id * 4)))
            .await;
    }
    let (changed, _) = opened(&uri).await;
    let latest = twin.table().latest().await.expect("opens");
    let (everything, state) = (FragmentRanges::all(), WalkState::default());
    let tree = latest.tree_objects(&everything, &state).await;
    let height = u64::from(tree.expect("walks")[0].height);
    assert!(height > 1, "several levels");
    // A path for each of ten changes, and what the flushes between them wrote anew.
    assert!(
        changed - first <= 10 * 2 * height,
        "{changed} objects opened, {first} before, height {height}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_config_cleans_up_after_commits_as_in_lance() {
    for settings in [
        [("retain_versions", "2"), ("interval", "3")],
        [("older_than", "0s"), ("interval", "2")],
        [("older_than", "14days"), ("interval", "1")],
        [("older_than", "0s"), ("interval", "0")],
    ] {
        let mut twin = Twin::make(false).await;
        for (key, value) in settings {
            let key = format!("lance.auto_cleanup.{key}");
            twin.apply(&Change::Config(key, value.into())).await;
        }
        for round in 0..7 {
            let change = match round % 3 {
                0 => Change::Append { rows: 5 },
                1 => Change::Delete(format!("id = {}", round * 7)),
                _ => Change::Compact,
            };
            twin.apply(&change).await;
            let what = format!("{settings:?}, {change:?}");
            twin.compare(&what).await;
            let left = versions(twin.tree_uri()).await;
            assert_eq!(left, versions(twin.flat_uri()).await, "{what}");
            for version in left {
                check(twin.tree_uri(), VersionRef::version(version), None, &what).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_may_pass_over_the_cleanup() {
    let mut twin = Twin::make(false).await;
    for (key, value) in [("older_than", "0s"), ("interval", "2")] {
        let key = format!("lance.auto_cleanup.{key}");
        twin.apply(&Change::Config(key, value.into())).await;
    }
    let before = versions(twin.tree_uri()).await;
    let write = WriteOptions {
        skip_auto_cleanup: true,
        ..Default::default()
    };
    let table = TreeTable::open(twin.tree_uri(), OpenOptions::default(), write);
    let table = table.await.expect("opens");
    for id in 0..4 {
        table.delete(&format!("id = {id}")).await.expect("deletes");
    }
    let after = versions(twin.tree_uri()).await;
    assert_eq!(after.len(), before.len() + 4);
    // A setting that cannot be read ends no write.
    let table = twin.table();
    let wrong = [("lance.auto_cleanup.interval", Some("often"))];
    table.update_config(&wrong).await.expect("commits");
    table.delete("id = 50").await.expect("deletes");
    assert_eq!(versions(table.uri()).await.len(), after.len() + 2);
}
