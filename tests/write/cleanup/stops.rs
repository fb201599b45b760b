//! Cleanups that are refused, stopped or hindered: whatever is left is complete.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fragtree::write::cleanup::FileKind;
use fragtree::write::{CleanupOptions, cleanup};
use fragtree::{OpenOptions, VersionRef};
use futures::FutureExt;
use tokio::sync::Notify;

use super::{
    all, check, clean, clean_as_foretold, copy_with_times, files_at, keep, versions, with_history,
};
use crate::probe::{Act, Probe};
use crate::twin::{Change, Twin, text};

fn probed(uri: &str) -> String {
    format!("file-object-store://{uri}")
}

fn with(probe: &Probe) -> OpenOptions {
    OpenOptions {
        object_store_wrapper: Some(Arc::new(probe.clone())),
        ..Default::default()
    }
}

async fn check_all(uri: &str, what: &str) -> BTreeSet<u64> {
    let left = versions(uri).await;
    for version in &left {
        check(uri, VersionRef::version(*version), None, what).await;
    }
    left
}

/// A store on which the cleanup stops for ever at removal number `at`, and who hears of it.
fn stopping(at: usize) -> (Probe, Arc<Notify>) {
    let removals = AtomicUsize::new(0);
    let stopped = Arc::new(Notify::new());
    let heard = Arc::clone(&stopped);
    let probe = Probe::hooked(move |verb, _| {
        let stops = verb == "delete" && removals.fetch_add(1, Ordering::SeqCst) == at;
        let heard = Arc::clone(&heard);
        async move {
            if stops {
                heard.notify_one();
                std::future::pending::<()>().await;
            }
            Act::Pass
        }
        .boxed()
    });
    (probe, stopped)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleanup_that_is_stopped_leaves_every_version_whole() {
    let twin = with_history(true).await;
    let folder = tempfile::tempdir().expect("a folder");
    let mut completed = false;
    let mut at = 0;
    while !completed {
        let copy = text(&folder.path().join(format!("{at}.lance")));
        copy_with_times(Path::new(twin.tree_uri()), Path::new(&copy));
        let (probe, stopped) = stopping(at);
        let uri = probed(&copy);
        let options = CleanupOptions {
            delete_concurrency: Some(1),
            ..keep(3)
        };
        tokio::select! {
            report = cleanup(&uri, options, with(&probe), |_| {}) => {
                assert_eq!(report.expect("cleans up").failures, 0);
                completed = true;
            }
            () = stopped.notified() => {}
        }
        let left = check_all(&copy, &format!("stopped at removal {at}")).await;
        assert!(left.len() >= 3);
        // What was left behind counts as in progress for a week, and is no trouble.
        if !completed {
            let report = clean_as_foretold(&copy, keep(3), "the next one").await;
            assert_eq!(report.failures, 0);
            assert_eq!(check_all(&copy, "the next one").await.len(), 3);
            let rest = CleanupOptions {
                delete_unverified: true,
                ..keep(3)
            };
            clean(&copy, rest).await;
        }
        assert_eq!(check_all(&copy, "at the end").await.len(), 3);
        fs::remove_dir_all(&copy).expect("removes");
        // Each manifest, and then some of the files.
        at += if at < 18 { 3 } else { 17 };
    }
    assert!(at > 40, "stopped at {at} places only");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removals_that_fail_are_reported_and_stop_nothing() {
    let twin = with_history(false).await;
    let folder = tempfile::tempdir().expect("a folder");
    for part in ["_versions/", "_bt/", "data/", "_deletions/", "_indices/"] {
        for done in [false, true] {
            let copy = text(&folder.path().join("t.lance"));
            copy_with_times(Path::new(twin.tree_uri()), Path::new(&copy));
            let failing = AtomicUsize::new(0);
            let probe = Probe::hooked(move |verb, location| {
                let fails = verb == "delete"
                    && location.contains(part)
                    && failing.fetch_add(1, Ordering::SeqCst) < 8;
                let act = match (fails, done) {
                    (false, _) => Act::Pass,
                    (true, false) => Act::Busy,
                    (true, true) => Act::DoneButFailed,
                };
                async { act }.boxed()
            });
            let options = CleanupOptions {
                delete_concurrency: Some(1),
                ..keep(3)
            };
            let before = files_at(&copy);
            let report = cleanup(&probed(&copy), options, with(&probe), |_| {}).await;
            let report = report.expect("goes on");
            let what = format!("{part}, done {done}");
            // Each is tried four times, and one that is gone is gone, whatever the store said.
            assert_eq!(
                report.failures,
                if done { 0 } else { 2 },
                "{what}: {report:#?}"
            );
            assert_eq!(report.failed.len() as u64, report.failures);
            let left = check_all(&copy, &what).await;
            let kept = if part == "_versions/" && !done { 5 } else { 3 };
            assert_eq!(left.len(), kept, "{what}");
            assert_eq!(report.kept_versions, kept as u64, "{what}");
            let after = files_at(&copy);
            let removed = (before.len() - after.len()) as u64;
            assert_eq!(report.total().files, removed, "{what}");
            for failed in &report.failed {
                assert!(after.contains_key(&failed.path), "{what}: {failed:?}");
            }
            // The next one does the rest.
            let rest = CleanupOptions {
                delete_unverified: true,
                ..keep(3)
            };
            assert_eq!(clean(&copy, rest).await.failures, 0);
            assert_eq!(check_all(&copy, &what).await.len(), 3);
            fs::remove_dir_all(&copy).expect("removes");
        }
    }
}

/// A leaf that only some versions have.
fn leaves(uri: &str) -> Vec<String> {
    let files = files_at(uri).into_keys();
    files.filter(|path| path.starts_with("_bt/leaf")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_version_that_stays_ends_it_before_anything_goes() {
    let twin = with_history(false).await;
    let uri = twin.tree_uri();
    let latest = twin.table().latest().await.expect("opens");
    let last = keep(1);
    let needed = {
        let dry = CleanupOptions {
            dry_run: true,
            ..last.clone()
        };
        let report = clean(uri, dry).await;
        let going: BTreeSet<_> = report.files.into_iter().map(|f| f.path).collect();
        let mut leaves = leaves(uri).into_iter();
        leaves.find(|leaf| !going.contains(leaf)).expect("a leaf")
    };
    let path = Path::new(uri).join(&needed);
    let bytes = fs::read(&path).expect("reads");
    for broken in [None, Some(&bytes[..bytes.len() / 2])] {
        match broken {
            None => fs::remove_file(&path).expect("removes"),
            Some(half) => fs::write(&path, half).expect("writes"),
        }
        let before = files_at(uri);
        let error = clean_error(uri, last.clone()).await;
        assert!(error.corrupt_rule().is_some(), "{error}");
        let message = error.to_string();
        assert!(message.contains(&needed), "{message}");
        let version = format!("of version {}", latest.version());
        assert!(message.contains(&version), "{message}");
        assert_eq!(files_at(uri), before, "nothing is removed");
    }
    fs::write(&path, &bytes).expect("writes");
    clean_as_foretold(uri, last, "mended").await;
    twin.compare("mended").await;
}

async fn clean_error(uri: &str, options: CleanupOptions) -> fragtree::Error {
    cleanup(uri, options, OpenOptions::default(), |_| {})
        .await
        .expect_err("refused")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_old_version_can_be_removed() {
    let mut twin = Twin::make(false).await;
    let uri = twin.tree_uri().to_string();
    let old = leaves(&uri);
    // Everything is rewritten, so that no later version needs those leaves.
    twin.apply(&Change::Update("true".into(), "g".into(), "7".into()))
        .await;
    twin.apply(&Change::Compact).await;
    let latest = twin.table().latest().await.expect("opens").version();
    let broken = old.first().expect("a leaf");
    fs::remove_file(Path::new(&uri).join(broken)).expect("removes");
    let error = clean_error(&uri, keep(100)).await;
    let message = error.to_string();
    assert!(
        message.contains(broken) && message.contains("stays"),
        "{message}"
    );
    let report = clean(&uri, keep(1)).await;
    assert!(report.removed_versions.contains(&2), "{report:?}");
    assert!(
        report.warnings.iter().any(|w| w.contains(broken)),
        "{:?}",
        report.warnings
    );
    assert_eq!(versions(&uri).await, BTreeSet::from([latest]));
    twin.compare("without the broken version").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_manifests_end_it() {
    let twin = with_history(false).await;
    let uri = twin.tree_uri();
    let manifest = files_at(uri).into_keys().rfind(|path| {
        // Names count backwards: the last one is the first version.
        path.starts_with("_versions/")
    });
    let path = Path::new(uri).join(manifest.expect("a manifest"));
    let bytes = fs::read(&path).expect("reads");
    fs::write(&path, &bytes[..bytes.len() - 9]).expect("writes");
    let before = files_at(uri);
    let error = clean_error(uri, all()).await;
    assert_eq!(error.corrupt_rule(), Some("manifest_footer"), "{error}");
    assert_eq!(files_at(uri), before, "nothing is removed");
}

/// A restore that is published while manifests are being removed keeps what it restored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_published_meanwhile_keep_their_files() {
    let twin = Arc::new(with_history(false).await);
    let uri = twin.tree_uri().to_string();
    let done = Arc::new(AtomicUsize::new(0));
    let (other, once) = (Arc::clone(&twin), Arc::clone(&done));
    let probe = Probe::hooked(move |verb, location| {
        let now = verb == "delete"
            && location.contains("_versions")
            && once.fetch_add(1, Ordering::SeqCst) == 0;
        let other = Arc::clone(&other);
        async move {
            if now {
                other.table().restore(4).await.expect("restores");
            }
            Act::Pass
        }
        .boxed()
    });
    let before = open_rows(&uri, 4).await;
    let options = CleanupOptions {
        delete_concurrency: Some(1),
        ..all()
    };
    let report = cleanup(&probed(&uri), options, with(&probe), |_| {}).await;
    let report = report.expect("cleans up");
    assert!(done.load(Ordering::SeqCst) > 1);
    assert_eq!(report.kept_versions, 2);
    let restored = report.latest_version + 1;
    check(
        &uri,
        VersionRef::version(restored),
        Some(&before),
        "restored",
    )
    .await;
    check_all(&uri, "after a race").await;
}

async fn open_rows(uri: &str, version: u64) -> String {
    let snapshot = super::open(uri, VersionRef::version(version)).await;
    super::rows_of(&snapshot.expect("opens")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tags_and_branches_made_meanwhile_are_respected() {
    let twin = Arc::new(with_history(false).await);
    let uri = twin.tree_uri().to_string();
    let (tagged, branched) = (5, 8);
    let rows = [
        open_rows(&uri, tagged).await,
        open_rows(&uri, branched).await,
    ];
    let once = AtomicUsize::new(0);
    let other = Arc::clone(&twin);
    let probe = Probe::hooked(move |_, location| {
        // Tags and branches are read by now, and versions are being.
        let now = location.contains("_bt/leaf") && once.fetch_add(1, Ordering::SeqCst) == 0;
        let other = Arc::clone(&other);
        async move {
            if now {
                let table = other.table();
                table.create_tag("new", tagged).await.expect("tags");
                let version = VersionRef::version(branched);
                table.create_branch("new", version).await.expect("branches");
            }
            Act::Pass
        }
        .boxed()
    });
    let report = cleanup(&probed(&uri), all(), with(&probe), |_| {}).await;
    let report = report.expect("cleans up");
    let left = check_all(&uri, "after a race").await;
    let expected = BTreeSet::from([tagged, branched, report.latest_version]);
    assert_eq!(left, expected);
    check(&uri, VersionRef::tag("new"), Some(&rows[0]), "tagged").await;
    check(&uri, VersionRef::branch("new"), None, "branched").await;
    check(
        &uri,
        VersionRef::version(branched),
        Some(&rows[1]),
        "branched",
    )
    .await;
}

/// Another cleanup takes away what this one is reading.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stricter_cleanup_in_between_does_no_harm() {
    let twin = with_history(false).await;
    let uri = twin.tree_uri().to_string();
    let latest = twin.table().latest().await.expect("opens").version();
    for kind in ["_bt/leaf", "_bt/node", "_versions"] {
        let copy = format!("{uri}-{}", kind.len());
        copy_with_times(Path::new(&uri), Path::new(&copy));
        let once = AtomicUsize::new(0);
        let other = copy.clone();
        let probe = Probe::hooked(move |verb, location| {
            let now = verb == "get"
                && location.contains(kind)
                && once.fetch_add(1, Ordering::SeqCst) == 2;
            let other = other.clone();
            async move {
                if now {
                    assert_eq!(clean(&other, all()).await.failures, 0);
                }
                Act::Pass
            }
            .boxed()
        });
        let report = cleanup(&probed(&copy), keep(12), with(&probe), |_| {}).await;
        let report = report.expect("nothing is missing that is needed");
        assert_eq!(report.failures, 0, "{kind}: {report:?}");
        assert_eq!(check_all(&copy, kind).await, BTreeSet::from([latest]));
    }
}

/// Writers, readers and cleanups at once, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_and_cleanups_go_on_beside_each_other() {
    let twin = Arc::new(Twin::make(false).await);
    let table = twin.table().clone();
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..2 {
        let table = table.clone();
        tasks.spawn(async move {
            // Who falls behind by more versions than stay cannot rebase over those that went. Nothing is
            // acknowledged then, and it is begun again.
            let left_behind = |e: &fragtree::Error| matches!(e, fragtree::Error::NotFound { .. });
            for round in 0..12 {
                let from = 10_000 * (writer + 1) + round * 10;
                loop {
                    let rows = crate::twin::base_rows(from..from + 5, "beside");
                    match table.append(crate::twin::stream_of(rows)).await {
                        Err(e) if left_behind(&e) => {}
                        done => {
                            done.expect("appends");
                            break;
                        }
                    }
                }
                let some = format!("id = {} or id = {}", from + 1, writer * 40 + round);
                loop {
                    match table.delete(&some).await {
                        Err(e) if left_behind(&e) => {}
                        done => {
                            done.expect("deletes");
                            break;
                        }
                    }
                }
            }
        });
    }
    for _ in 0..2 {
        let table = table.clone();
        tasks.spawn(async move {
            for _ in 0..12 {
                // Two versions stay, so that one who just opened the latest finds it.
                match table.cleanup(keep(4)).await {
                    Ok(report) => assert_eq!(report.failures, 0, "{report:?}"),
                    // The other cleanup was faster.
                    Err(fragtree::Error::Conflict { .. }) => {}
                    Err(fragtree::Error::NotFound { .. }) => {}
                    Err(e) => panic!("{e}"),
                }
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("no task fails");
    }
    let uri = twin.tree_uri();
    check_all(uri, "afterwards").await;
    let report = clean(uri, keep(1)).await;
    assert_eq!(report.failures, 0);
    let rows = table
        .latest()
        .await
        .expect("opens")
        .counts()
        .expect("known");
    let rows = rows.expect("known").visible_rows;
    // 24 rounds of five rows less one, and two writers that each deleted twelve of the first 120.
    assert_eq!(rows, 120 + 24 * 4 - 24);
    check_all(uri, "at the end").await;
    let kinds: BTreeSet<_> = report.removed.iter().map(|r| r.kind).collect();
    assert!(kinds.contains(&FileKind::Manifest));
}
