//! Cleanup beside other tables: branches of the same one, and clones.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use fragtree::write::{
    CleanupOptions, CleanupReport, ConvertOptions, TreeTable, WriteOptions, cleanup, convert,
};
use fragtree::{Layout, OpenOptions, VersionRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use lance::Dataset;
use lance::dataset::cleanup::CleanupPolicyBuilder;
use lance_table::format::pb;
use prost::Message;

use super::{
    all, check, clean, clean_as_foretold, files, files_at, keep, open, rows_of, versions,
    with_history,
};
use crate::twin::{Change, Twin, base_rows, stream_of, text, tiny};

fn on(branch: &str) -> OpenOptions {
    OpenOptions::default().with_reference(VersionRef::branch(branch))
}

fn writer(uri: &str, open: OpenOptions) -> BoxFuture<'_, TreeTable> {
    let write = WriteOptions {
        policy: Some(tiny()),
        ..Default::default()
    };
    async move { TreeTable::open(uri, open, write).await.expect("opens") }.boxed()
}

fn append(table: &TreeTable, from: i64) -> BoxFuture<'_, ()> {
    let rows = stream_of(base_rows(from..from + 9, "later"));
    async move {
        table.append(rows).await.expect("appends");
    }
    .boxed()
}

fn delete<'a>(table: &'a TreeTable, predicate: &'a str) -> BoxFuture<'a, ()> {
    async move {
        table.delete(predicate).await.expect("deletes");
    }
    .boxed()
}

/// Nothing of before is needed after this.
fn overwrite(table: &TreeTable) -> BoxFuture<'_, ()> {
    let rows = stream_of(base_rows(0..10, "own"));
    async move {
        table.overwrite(rows).await.expect("overwrites");
    }
    .boxed()
}

fn branch_of<'a>(table: &'a TreeTable, name: &'a str) -> BoxFuture<'a, ()> {
    async move {
        let latest = VersionRef::latest();
        table.create_branch(name, latest).await.expect("branches");
    }
    .boxed()
}

fn to_tree(uri: &str, open: OpenOptions) -> BoxFuture<'_, ()> {
    let options = ConvertOptions {
        policy: tiny(),
        force: true,
        ..ConvertOptions::to_tree()
    };
    async move {
        convert(uri, options, open).await.expect("converts");
    }
    .boxed()
}

fn clean_branch<'a>(uri: &'a str, branch: &'a str) -> BoxFuture<'a, CleanupReport> {
    async move {
        let report = cleanup(uri, all(), on(branch), |_| {}).await;
        report.expect("cleans up")
    }
    .boxed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_branch_keeps_what_it_shares() {
    let twin = with_history(false).await;
    let uri = twin.tree_uri();
    let table = twin.table();
    let root = open(uri, VersionRef::latest()).await.expect("opens");
    branch_of(table, "side").await;
    let side = writer(uri, on("side")).await;
    delete(&side, "id % 3 = 1").await;
    append(&side, 20_000).await;
    // A branch of the branch needs files of the main one too.
    branch_of(&side, "deep/er").await;
    let deep = writer(uri, on("deep/er")).await;
    append(&deep, 30_000).await;
    let mut rows = HashMap::new();
    for branch in ["side", "deep/er"] {
        let snapshot = open(uri, VersionRef::branch(branch)).await.expect("opens");
        rows.insert(branch, rows_of(&snapshot).await);
    }
    // The main one forgets everything it had.
    overwrite(table).await;
    append(table, 40_000).await;
    let report = clean_as_foretold(uri, all(), "with branches").await;
    let latest = report.latest_version;
    assert_eq!(
        versions(uri).await,
        BTreeSet::from([root.version(), latest]),
        "the version the branch began from stays"
    );
    assert_eq!(report.branches.len(), 2);
    assert!(
        report
            .branches
            .iter()
            .all(|b| b.keeps_version && !b.cleaned)
    );
    for version in [root.version(), latest] {
        check(uri, VersionRef::version(version), None, "main").await;
    }
    for branch in ["side", "deep/er"] {
        let reference = VersionRef::branch(branch);
        check(uri, reference, Some(&rows[branch]), "a branch").await;
    }
    // The branch is cleaned by itself, around the branch of it.
    let before = files_at(uri);
    let mut main = before.clone();
    main.retain(|path, _| !path.starts_with("tree/"));
    let report = clean_branch(uri, "side").await;
    assert!(!report.removed_versions.is_empty());
    let mut left = files_at(uri);
    left.retain(|path, _| !path.starts_with("tree/"));
    assert_eq!(left, main, "nothing of the main one");
    for branch in ["side", "deep/er"] {
        let reference = VersionRef::branch(branch);
        check(uri, reference, Some(&rows[branch]), "a cleaned branch").await;
    }
    // Without branches nothing is kept for them.
    table.delete_branch("deep/er").await.expect("deletes");
    table.delete_branch("side").await.expect("deletes");
    clean_as_foretold(uri, all(), "without branches").await;
    assert_eq!(versions(uri).await, BTreeSet::from([latest]));
    check(uri, VersionRef::latest(), None, "main").await;
}

/// Branches made by Lance of a flat version, which then go their own ways.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flat_and_tree_branches_protect_each_other() {
    let twin = with_history(false).await;
    let uri = twin.flat_uri();
    let mut flat = Dataset::open(uri).await.expect("opens");
    let root = flat.version().version;
    flat.create_branch("flat", root, None)
        .await
        .expect("branches");
    flat.create_branch("tree", root, None)
        .await
        .expect("branches");
    to_tree(uri, on("tree")).await;
    to_tree(uri, OpenOptions::default()).await;
    let branches = ["flat", "tree"];
    let mut rows = Vec::new();
    for branch in branches {
        let table = writer(uri, on(branch)).await;
        delete(&table, "id % 6 = 2").await;
        append(&table, 50_000).await;
        let snapshot = open(uri, VersionRef::branch(branch)).await.expect("opens");
        rows.push(rows_of(&snapshot).await);
    }
    let main = writer(uri, OpenOptions::default()).await;
    main.truncate().await.expect("deletes");
    append(&main, 60_000).await;
    clean_as_foretold(uri, all(), "mixed branches").await;
    assert!(versions(uri).await.contains(&root));
    for reference in [VersionRef::version(root), VersionRef::latest()] {
        check(uri, reference, None, "main").await;
    }
    for (branch, rows) in branches.iter().zip(&rows) {
        clean_branch(uri, branch).await;
        check(uri, VersionRef::branch(*branch), Some(rows), "a branch").await;
    }
    // Even when the version they began from is lost.
    let manifest = format!("_versions/{:020}.manifest", u64::MAX - root);
    std::fs::remove_file(Path::new(uri).join(manifest)).expect("removes");
    delete(&main, "id = 60001").await;
    let unsafe_otherwise = CleanupOptions {
        delete_unverified: true,
        ..all()
    };
    clean_as_foretold(uri, unsafe_otherwise, "without their root").await;
    check(uri, VersionRef::latest(), None, "main").await;
    for (branch, rows) in branches.iter().zip(&rows) {
        check(uri, VersionRef::branch(*branch), Some(rows), "a branch").await;
    }
    let layouts = [Layout::Flat, Layout::Tree];
    for (branch, layout) in branches.iter().zip(layouts) {
        let snapshot = open(uri, VersionRef::branch(*branch)).await.expect("opens");
        assert_eq!(snapshot.layout(), layout);
    }
}

async fn cascade(uri: &str, dry_run: bool) -> CleanupReport {
    let options = CleanupOptions {
        clean_referenced_branches: true,
        dry_run,
        ..all()
    };
    clean(uri, options).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn branches_are_cleaned_by_their_own_settings() {
    let twin = with_history(false).await;
    let uri = twin.tree_uri();
    let table = twin.table();
    for branch in ["with", "without"] {
        branch_of(table, branch).await;
        append(&writer(uri, on(branch)).await, 20_000).await;
    }
    let with = writer(uri, on("with")).await;
    with.update_config(&[
        ("lance.auto_cleanup.interval", Some("1")),
        ("lance.auto_cleanup.older_than", Some("0s")),
    ])
    .await
    .expect("commits");
    // The settings clean up after each commit; what is here by now is what they keep.
    overwrite(&with).await;
    append(table, 40_000).await;
    let before = files_at(uri);
    let foretold = cascade(uri, true).await;
    assert_eq!(files_at(uri), before);
    let mut report = cascade(uri, false).await;
    report.dry_run = true;
    report.objects_read = foretold.objects_read;
    report.object_bytes_read = foretold.object_bytes_read;
    assert_eq!(report, foretold);
    let cleaned: Vec<_> = report.branches.iter().filter(|b| b.cleaned).collect();
    assert_eq!(cleaned.len(), 1, "{report:#?}");
    assert_eq!(cleaned[0].name, "with");
    assert!(
        !cleaned[0].keeps_version,
        "it has nothing of the main one left"
    );
    for branch in ["with", "without"] {
        check(uri, VersionRef::branch(branch), None, branch).await;
    }
    for version in versions(uri).await {
        check(uri, VersionRef::version(version), None, "main").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_owns_nothing_of_its_source() {
    let twin = with_history(false).await;
    let clone = twin.shallow_clone().await;
    let source = files_at(twin.tree_uri());
    let table = clone.table();
    delete(table, "id % 3 = 0").await;
    append(table, 30_000).await;
    table
        .update(Some("id % 5 = 1"), &[("g", "0")])
        .await
        .expect("updates");
    let snapshot = table.latest().await.expect("opens");
    let rows = rows_of(&snapshot).await;
    let options = CleanupOptions {
        delete_unverified: true,
        ..all()
    };
    let report = clean_as_foretold(clone.tree_uri(), options, "a clone").await;
    assert!(!report.removed_versions.is_empty());
    check(
        clone.tree_uri(),
        VersionRef::latest(),
        Some(&rows),
        "a clone",
    )
    .await;
    // Even when the clone needs none of it any more.
    overwrite(table).await;
    clean(clone.tree_uri(), all()).await;
    check(clone.tree_uri(), VersionRef::latest(), None, "a clone").await;
    assert_eq!(files_at(twin.tree_uri()), source, "the source is untouched");
}

fn fixtures() -> Option<PathBuf> {
    let root = std::env::var_os("FRAGTREE_FIXTURES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures"),
        PathBuf::from,
    );
    root.is_dir().then_some(root)
}

/// Moves base paths that begin with `/FIXTURES` to `root`.
fn relocate(path: &Path, root: &str) {
    let file = std::fs::read(path).expect("reads");
    let (body, footer) = file.split_at(file.len() - 16);
    let position = u64::from_le_bytes(footer[..8].try_into().expect("a number"));
    let position = usize::try_from(position).expect("in the file");
    let mut manifest = pb::Manifest::decode(&body[position + 4..]).expect("a manifest");
    for base in &mut manifest.base_paths {
        base.path = base.path.replace("/FIXTURES", root);
    }
    let message = manifest.encode_to_vec();
    let mut moved = body[..position].to_vec();
    let length = u32::try_from(message.len()).expect("a small one");
    moved.extend(length.to_le_bytes());
    moved.extend(message);
    moved.extend(footer);
    std::fs::write(path, moved).expect("writes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_of_another_writer_are_cleaned_too() {
    let Some(fixtures) = fixtures() else {
        eprintln!("no fixtures: nothing is checked");
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let root = text(folder.path());
    crate::twin::copy_folder(&fixtures.join("valid"), folder.path());
    let mut tables = Vec::new();
    for entry in std::fs::read_dir(folder.path()).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|e| e != "lance") {
            continue;
        }
        for entry in std::fs::read_dir(path.join("_versions")).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|e| e == "manifest") {
                relocate(&path, &root);
            }
        }
        tables.push(text(&path));
    }
    assert!(tables.len() > 20, "{tables:?}");
    // Clones of fixtures name `valid` as a folder of its own.
    std::os::unix::fs::symlink(folder.path(), folder.path().join("valid")).expect("links");
    for uri in tables {
        let own = format!(
            "{}/",
            Path::new(&uri).file_name().expect("a name").display()
        );
        let others = || {
            let mut all = files(folder.path());
            all.retain(|path, _| !path.starts_with(&own) && !path.starts_with("valid/"));
            all
        };
        let before = others();
        let snapshot = open(&uri, VersionRef::latest()).await.expect("opens");
        let rows = rows_of(&snapshot).await;
        let options = CleanupOptions {
            delete_unverified: true,
            ..all()
        };
        let report = clean_as_foretold(&uri, options, &uri).await;
        assert_eq!(report.failures, 0, "{uri}");
        check(&uri, VersionRef::latest(), Some(&rows), &uri).await;
        assert!(others() == before, "{uri}: files of others changed");
    }
}

/// Commits outside the history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn detached_versions_stay_until_they_are_named() {
    let twin = with_history(false).await;
    let uri = twin.flat_uri();
    let dataset = std::sync::Arc::new(Dataset::open(uri).await.expect("opens"));
    let params = lance::dataset::WriteParams {
        mode: lance::dataset::WriteMode::Append,
        ..Default::default()
    };
    let schema = arrow::datatypes::Schema::from(dataset.schema());
    let empty = arrow::array::RecordBatch::new_empty(std::sync::Arc::new(schema));
    let rows = arrow::compute::concat_batches(&empty.schema(), [&empty]).expect("rows");
    let transaction = lance::dataset::InsertBuilder::new(std::sync::Arc::clone(&dataset))
        .with_params(&params)
        .execute_uncommitted(vec![rows])
        .await
        .expect("writes");
    let detached = lance::dataset::CommitBuilder::new(std::sync::Arc::clone(&dataset))
        .with_detached(true)
        .execute(transaction)
        .await
        .expect("commits");
    let number = detached.version().version;
    // The history forgets everything that the detached version shares.
    let main = writer(uri, OpenOptions::default()).await;
    overwrite(&main).await;
    let report = clean_as_foretold(uri, all(), "detached").await;
    assert_eq!(report.kept_versions, 2);
    check(uri, VersionRef::version(number), None, "detached").await;
    let named = CleanupOptions {
        versions: Some([number].into()),
        ..all()
    };
    let report = clean_as_foretold(uri, named, "detached").await;
    assert_eq!(report.removed_versions, [number]);
    let latest = open(uri, VersionRef::latest()).await.expect("opens");
    assert_eq!(versions(uri).await, BTreeSet::from([latest.version()]));
    check(uri, VersionRef::latest(), None, "detached").await;
}

/// Branches as Lance itself leaves them: never less than Lance keeps.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_less_stays_for_a_branch_than_in_lance() {
    let mut twin = Twin::make(false).await;
    for change in [
        Change::Delete("id % 4 = 1".into()),
        Change::Append { rows: 8 },
        Change::Index("id".into()),
    ] {
        twin.apply(&change).await;
    }
    let mut flat = Dataset::open(twin.flat_uri()).await.expect("opens");
    let root = flat.version().version;
    flat.create_branch("side", root, None)
        .await
        .expect("branches");
    let main = writer(twin.flat_uri(), OpenOptions::default()).await;
    delete(&main, "id < 60").await;
    overwrite(&main).await;
    let folder = tempfile::tempdir().expect("a folder");
    // In the same place, or the branch's base path leads to another table.
    let saved = folder.path().join("saved");
    super::copy_with_times(Path::new(twin.flat_uri()), &saved);
    let policy = CleanupPolicyBuilder::default().build();
    let dataset = Dataset::open(twin.flat_uri()).await.expect("opens");
    dataset.cleanup(policy).execute().await.expect("cleans up");
    let by_lance = files_at(twin.flat_uri());
    std::fs::remove_dir_all(twin.flat_uri()).expect("removes");
    super::copy_with_times(&saved, Path::new(twin.flat_uri()));
    clean_as_foretold(twin.flat_uri(), keep(1), "beside a branch").await;
    let by_us = files_at(twin.flat_uri());
    for path in by_lance.keys() {
        assert!(by_us.contains_key(path), "Lance keeps {path}");
    }
    check(twin.flat_uri(), VersionRef::branch("side"), None, "side").await;
    check(twin.flat_uri(), VersionRef::version(root), None, "root").await;
}
