//! Cleanup: the same files as Lance's own on flat tables, and on trees everything that stays complete.

#[path = "cleanup/garbage.rs"]
mod garbage;
#[path = "cleanup/others.rs"]
mod others;
#[path = "cleanup/stops.rs"]
mod stops;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use datafusion::prelude::SessionContext;
use fragtree::write::cleanup::{FileKind, Why};
use fragtree::write::{CleanupOptions, CleanupReport, cleanup};
use fragtree::{OpenOptions, Snapshot, SnapshotProvider, SystemColumns, VersionRef, verify};
use futures::FutureExt;
use futures::future::{BoxFuture, LocalBoxFuture};
use lance::Dataset;
use lance::dataset::cleanup::CleanupPolicyBuilder;

use crate::twin::{Change, Random, Twin, text};

// Helpers give boxed futures: in a debug build a future that awaits many others takes their sizes on
// the stack several times over.

/// Every file below a folder with its bytes, hints of the latest version apart.
fn files(root: &Path) -> BTreeMap<String, u64> {
    fn collect(root: &Path, folder: &Path, into: &mut BTreeMap<String, u64>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let entry = entry.expect("an entry");
            let meta = entry.metadata().expect("a type");
            if meta.is_dir() {
                collect(root, &entry.path(), into);
            } else {
                let path = entry.path();
                let path = path.strip_prefix(root).expect("below");
                into.insert(text(path), meta.len());
            }
        }
    }
    let mut found = BTreeMap::new();
    if root.exists() {
        collect(root, root, &mut found);
    }
    found.retain(|path, _| !path.ends_with("latest_version_hint.json"));
    found
}

fn files_at(uri: &str) -> BTreeMap<String, u64> {
    files(Path::new(uri))
}

/// Copies a folder with the times of its files, which decide what Lance's cleanup looks at.
fn copy_with_times(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        let meta = entry.metadata().expect("a type");
        if meta.is_dir() {
            copy_with_times(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), &target).expect("copies");
            set_time(&target, meta.modified().expect("a time"));
        }
    }
}

fn set_time(path: &Path, time: SystemTime) {
    let file = File::options().write(true).open(path).expect("opens");
    file.set_modified(time).expect("sets the time");
}

/// Makes a file a bit more than a week old.
fn age(path: &Path) {
    let week = Duration::from_secs(7 * 24 * 3600 + 60);
    set_time(path, SystemTime::now() - week);
}

/// No condition: everything goes but the latest version.
fn all() -> CleanupOptions {
    CleanupOptions {
        older_than: None,
        error_if_tagged: false,
        list_files: usize::MAX,
        ..Default::default()
    }
}

fn keep(versions: usize) -> CleanupOptions {
    CleanupOptions {
        keep: Some(versions),
        ..all()
    }
}

fn clean(uri: &str, options: CleanupOptions) -> BoxFuture<'_, CleanupReport> {
    async move {
        cleanup(uri, options, OpenOptions::default(), |_| {})
            .await
            .expect("cleans up")
    }
    .boxed()
}

fn open(uri: &str, reference: VersionRef) -> BoxFuture<'_, fragtree::Result<Arc<Snapshot>>> {
    async move { Snapshot::open(uri, OpenOptions::default().with_reference(reference)).await }
        .boxed()
}

/// All rows of a version with all its system columns, as text.
fn rows_of(snapshot: &Arc<Snapshot>) -> BoxFuture<'_, String> {
    async move {
        let provider = SnapshotProvider::try_new(Arc::clone(snapshot), SystemColumns::ALL);
        let ctx = SessionContext::new();
        ctx.register_table("t", Arc::new(provider.expect("a table")))
            .expect("registers");
        let rows = ctx
            .sql("SELECT * FROM t ORDER BY _rowaddr")
            .await
            .expect("plans")
            .collect()
            .await
            .expect("runs");
        arrow::util::pretty::pretty_format_batches(&rows)
            .expect("shows")
            .to_string()
    }
    .boxed()
}

/// A version breaks no rule, has all its files, and holds `rows`.
fn check<'a>(
    uri: &'a str,
    reference: VersionRef,
    rows: Option<&'a str>,
    what: &'a str,
) -> LocalBoxFuture<'a, ()> {
    async move {
        let open_options = OpenOptions::default().with_reference(reference.clone());
        let checks = verify::VerifyOptions::default();
        let report = verify::verify(uri, checks, open_options, |_| {})
            .await
            .unwrap_or_else(|e| panic!("{what}, {reference:?}: {e}"));
        assert!(report.ok(), "{what}, {reference:?}: {report:#?}");
        if let Some(rows) = rows {
            let snapshot = open(uri, reference.clone()).await.expect("opens");
            assert_eq!(rows_of(&snapshot).await, rows, "{what}, {reference:?}");
        }
    }
    .boxed_local()
}

/// The versions a table has.
fn versions(uri: &str) -> BoxFuture<'_, BTreeSet<u64>> {
    async move {
        let latest = open(uri, VersionRef::latest()).await.expect("opens");
        let mut found = BTreeSet::new();
        for version in 1..=latest.version() {
            match open(uri, VersionRef::version(version)).await {
                Ok(_) => found.insert(version),
                Err(fragtree::Error::NotFound { .. }) => continue,
                Err(e) => panic!("version {version}: {e}"),
            };
        }
        found
    }
    .boxed()
}

/// What of `before` is gone, as paths.
fn gone(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> BTreeSet<String> {
    let gone = before.keys().filter(|path| !after.contains_key(*path));
    gone.cloned().collect()
}

/// Runs a cleanup after a dry run, which must change nothing and foretell exactly what goes.
fn clean_as_foretold<'a>(
    uri: &'a str,
    options: CleanupOptions,
    what: &'a str,
) -> BoxFuture<'a, CleanupReport> {
    async move {
        let before = files_at(uri);
        let dry = CleanupOptions {
            dry_run: true,
            ..options.clone()
        };
        let mut foretold = clean(uri, dry).await;
        assert_eq!(files_at(uri), before, "{what}: a dry run");
        let report = clean(uri, options).await;
        let after = files_at(uri);
        assert!(foretold.dry_run && !report.dry_run, "{what}");
        foretold.dry_run = false;
        foretold.objects_read = report.objects_read;
        foretold.object_bytes_read = report.object_bytes_read;
        assert_eq!(foretold, report, "{what}");
        let listed: BTreeSet<_> = report.files.iter().map(|f| f.path.clone()).collect();
        assert_eq!(listed, gone(&before, &after), "{what}");
        let total = report.total();
        let bytes: u64 = listed.iter().map(|path| before[path]).sum();
        assert_eq!(
            (total.files, total.bytes),
            (listed.len() as u64, bytes),
            "{what}"
        );
        report
    }
    .boxed()
}

/// Lance's own cleanup of a flat table.
fn clean_by_lance<'a>(uri: &'a str, options: &'a CleanupOptions) -> BoxFuture<'a, ()> {
    async move {
        let dataset = Dataset::open(uri).await.expect("opens");
        let mut policy = CleanupPolicyBuilder::default()
            .error_if_tagged_old_versions(options.error_if_tagged)
            .delete_unverified(options.delete_unverified);
        if let Some(keep) = options.keep {
            policy = policy
                .retain_n_versions(&dataset, keep)
                .await
                .expect("a policy");
        }
        if let Some(versions) = &options.versions {
            policy = policy
                .versions(versions.iter().copied().collect())
                .expect("a policy");
        }
        let mut policy = policy.build();
        policy.before_version = options.before_version.or(policy.before_version);
        let done = dataset.cleanup(policy).execute().await;
        done.expect("Lance cleans up");
    }
    .boxed()
}

/// A twin with a history of everything.
fn with_history(stable: bool) -> BoxFuture<'static, Twin> {
    async move {
        let mut twin = Twin::make(stable).await;
        for change in [
            Change::Append { rows: 7 },
            Change::Delete("id % 5 = 2".into()),
            Change::Delete("id between 10 and 24".into()),
            Change::Update("id % 7 = 3".into(), "g".into(), "g + 100".into()),
            Change::Index("id".into()),
            Change::Append { rows: 12 },
            Change::OptimizeIndices,
            Change::AddExpression("e1".into(), "id * 2".into()),
            Change::AddNulls("n1".into()),
            Change::Backfill {
                column: "n1".into(),
                every: 2,
            },
            Change::Delete("g = 3".into()),
            Change::Compact,
            Change::Drop("e1".into()),
            Change::Restore { back: 3 },
            Change::Delete("id % 4 = 0".into()),
            Change::DropIndex("id".into()),
            Change::Drop("e1".into()),
            Change::Drop("n1".into()),
            Change::Append { rows: 3 },
        ] {
            twin.apply(&change).await;
        }
        twin
    }
    .boxed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flat_table_is_left_as_lance_leaves_it() {
    let twin = with_history(false).await;
    let source = Dataset::open(twin.flat_uri()).await.expect("opens");
    let latest = source.version().version;
    for (name, version) in [("early", 4), ("late", latest - 2)] {
        source.tags().create(name, version).await.expect("tags");
    }
    let garbage: Vec<_> = [
        "data/lost.lance",
        "data/lost/00001.blob",
        "data/.tmp_lost",
        "data/notes.txt",
        "_deletions/9-9-9.arrow",
        "_deletions/9-9-10.bin",
        "_transactions/1-lost.txn",
        "_versions/.tmp_lost",
        "_indices/6b1a1bf4-5d4c-4a52-8a5e-0b8b4ab54f3e/page.lance",
        "_blobs/lost.blob",
        "_other/lost.lance",
    ]
    .map(|path| Path::new(twin.flat_uri()).join(path))
    .into();
    for path in &garbage {
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, "garbage").expect("writes");
        age(path);
    }
    let young = Path::new(twin.flat_uri()).join("data/young.lance");
    fs::write(young, "in progress").expect("writes");

    let old = |change: fn(&mut CleanupOptions)| {
        let mut options = all();
        change(&mut options);
        options
    };
    let policies = [
        all(),
        keep(1),
        keep(4),
        keep(100),
        old(|o| o.before_version = Some(6)),
        old(|o| o.versions = Some([3, 5, 6, 9].into())),
        old(|o| {
            o.keep = Some(2);
            o.versions = Some([1, 2, 3, 4, 5, 900].into());
        }),
        old(|o| o.delete_unverified = true),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    for (number, options) in policies.into_iter().enumerate() {
        let what = format!("{options:?}");
        let [by_lance, by_us] = ["lance", "us"].map(|who| {
            let copy = folder.path().join(format!("{number}-{who}.lance"));
            copy_with_times(Path::new(twin.flat_uri()), &copy);
            text(&copy)
        });
        clean_by_lance(&by_lance, &options).await;
        let report = clean_as_foretold(&by_us, options, &what).await;
        assert_eq!(files_at(&by_us), files_at(&by_lance), "{what}");
        assert_eq!(report.failures, 0, "{what}: {report:?}");
        for version in versions(&by_us).await {
            check(&by_us, VersionRef::version(version), None, &what).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tagged_versions_stay_or_are_refused() {
    let twin = with_history(false).await;
    let uri = twin.tree_uri();
    twin.table().create_tag("keep-me", 5).await.expect("tags");
    twin.table().create_tag("me-too", 5).await.expect("tags");
    let before = files_at(uri);
    let options = CleanupOptions {
        error_if_tagged: true,
        ..all()
    };
    let error = twin.table().cleanup(options).await.expect_err("refused");
    let message = error.to_string();
    assert!(message.contains("version 5 (keep-me, me-too)"), "{message}");
    assert_eq!(files_at(uri), before, "nothing is removed");

    let snapshot = open(uri, VersionRef::tag("keep-me")).await.expect("opens");
    let rows = rows_of(&snapshot).await;
    let latest = twin.table().latest().await.expect("opens").version();
    let report = clean_as_foretold(uri, all(), "around tags").await;
    assert_eq!(versions(uri).await, BTreeSet::from([5, latest]));
    assert_eq!(report.kept_versions, 2);
    check(uri, VersionRef::tag("me-too"), Some(&rows), "tagged").await;
    check(uri, VersionRef::latest(), None, "tagged").await;

    for tag in ["keep-me", "me-too"] {
        twin.table().delete_tag(tag).await.expect("deletes");
    }
    clean_as_foretold(uri, all(), "without tags").await;
    assert_eq!(versions(uri).await, BTreeSet::from([latest]));
    twin.compare("after cleanup").await;
}

/// Files in each folder of a table that versions name.
fn counts(uri: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for path in files_at(uri).into_keys() {
        let folder = path.split('/').next().unwrap_or_default().to_string();
        if folder != "_bt" && folder != "_refs" {
            *counts.entry(folder).or_default() += 1;
        }
    }
    counts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_stays_is_complete_after_every_cleanup() {
    let seeds = std::env::var("CLEANUP_SEEDS");
    let seeds = seeds.ok().and_then(|s| s.parse().ok()).unwrap_or(2u64);
    for seed in 0..seeds {
        let mut twin = Twin::make(seed % 2 == 1).await;
        let uri = twin.tree_uri().to_string();
        let mut random = Random::new(seed + 1000);
        let mut rows = BTreeMap::new();
        let mut readers = BTreeMap::new();
        for step in 0..40 {
            let what = format!("seed {seed}, step {step}");
            let there = versions(&uri).await;
            for version in &there {
                if !rows.contains_key(version) {
                    let snapshot = open(&uri, VersionRef::version(*version)).await;
                    let snapshot = snapshot.expect("opens");
                    rows.insert(*version, rows_of(&snapshot).await);
                    readers.insert(*version, snapshot);
                }
            }
            let latest = *there.last().expect("a version");
            match random.below(8) {
                0..5 => {
                    let change = twin.random_change(&mut random);
                    if let Change::Restore { back } = change
                        && !there.contains(&(latest - back))
                    {
                        continue;
                    }
                    twin.apply(&change).await;
                }
                5 => {
                    let version = pick(&mut random, &there);
                    tag_both(&twin, version, random.below(2) == 0).await;
                }
                _ => {
                    let options = random_options(&mut random, &there);
                    let what = format!("{what}: {options:?}");
                    clean_as_foretold(&uri, options.clone(), &what).await;
                    clean_by_lance(twin.flat_uri(), &options).await;
                    let left = versions(&uri).await;
                    assert_eq!(left, versions(twin.flat_uri()).await, "{what}");
                    for version in &left {
                        let reference = VersionRef::version(*version);
                        check(&uri, reference, Some(&rows[version]), &what).await;
                        // A reader that was there before goes on.
                        assert_eq!(rows_of(&readers[version]).await, rows[version], "{what}");
                    }
                    // The second version of the tree is the conversion, which has no transaction.
                    let mut expected = counts(twin.flat_uri());
                    if left.contains(&2) {
                        *expected.get_mut("_transactions").expect("some") -= 1;
                    }
                    expected.retain(|_, count| *count > 0);
                    assert_eq!(counts(&uri), expected, "{what}");
                }
            }
        }
        twin.compare(&format!("seed {seed}, at the end")).await;
    }
}

fn pick(random: &mut Random, versions: &BTreeSet<u64>) -> u64 {
    let at = random.below(versions.len() as u64);
    let mut versions = versions.iter().zip(0..);
    let found = versions.find(|(_, number)| *number == at);
    *found.expect("a version").0
}

async fn tag_both(twin: &Twin, version: u64, delete: bool) {
    let flat = Dataset::open(twin.flat_uri()).await.expect("opens");
    let name = format!("t{}", version % 3);
    if flat.tags().get(&name).await.is_ok() {
        flat.tags().delete(&name).await.expect("deletes");
        twin.table().delete_tag(&name).await.expect("deletes");
        if delete {
            return;
        }
    }
    flat.tags().create(&name, version).await.expect("tags");
    twin.table().create_tag(&name, version).await.expect("tags");
}

fn random_options(random: &mut Random, versions: &BTreeSet<u64>) -> CleanupOptions {
    let latest = *versions.last().expect("a version");
    match random.below(5) {
        0 => all(),
        1 => keep(1),
        2 => keep(2 + usize::from(random.below(2) == 0) * 2),
        3 => CleanupOptions {
            before_version: Some(latest - random.below(latest)),
            ..all()
        },
        _ => {
            let some = versions.iter().copied().filter(|_| random.below(2) == 0);
            CleanupOptions {
                versions: Some(some.chain([1]).collect()),
                ..all()
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_go_by_age_and_by_name() {
    let twin = with_history(false).await;
    let uri = twin.tree_uri();
    let before = files_at(uri);
    let young = clean(uri, CleanupOptions::default()).await;
    assert_eq!((young.total().files, young.removed_versions.len()), (0, 0));
    assert_eq!(files_at(uri), before, "a week is the default");

    let named = CleanupOptions {
        versions: Some([1, 3, 9999].into()),
        ..all()
    };
    let report = clean_as_foretold(uri, named, "by name").await;
    assert_eq!(report.removed_versions, [1, 3]);
    let at = open(uri, VersionRef::version(7)).await.expect("opens");
    let aged = CleanupOptions {
        before: Some(at.timestamp()),
        ..all()
    };
    let report = clean_as_foretold(uri, aged, "by age").await;
    assert_eq!(report.removed_versions, [2, 4, 5, 6]);
    for options in [
        CleanupOptions {
            keep: Some(0),
            ..all()
        },
        CleanupOptions {
            versions: Some(BTreeSet::new()),
            ..all()
        },
    ] {
        assert!(twin.table().cleanup(options).await.is_err());
    }
    let pinned = OpenOptions::default().with_reference(VersionRef::version(8));
    assert!(cleanup(uri, all(), pinned, |_| {}).await.is_err());
}

/// The kinds of file a report counts, with why.
fn kinds(report: &CleanupReport) -> BTreeMap<(FileKind, Why), u64> {
    let kinds = report.removed.iter();
    kinds
        .map(|removed| ((removed.kind, removed.why), removed.tally.files))
        .collect()
}
