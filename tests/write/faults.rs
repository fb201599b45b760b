//! Writers that fail at any request, and many writers at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use arrow::array::{AsArray, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema};
use datafusion::common::runtime::SpawnedTask;
use datafusion::prelude::SessionContext;
use fragtree::write::{RowsReport, TreeTable, WriteOptions};
use fragtree::{
    Engine, FragmentRanges, OpenOptions, Snapshot, SnapshotProvider, SystemColumns, TableOptions,
    verify,
};
use futures::FutureExt;
use lance::dataset::NewColumnTransform;
use lance::dataset::optimize::CompactionOptions;
use lance_table::transaction::{Operation, Transaction};

use crate::probe::{Act, Probe};
use crate::twin::{Change, FRAGMENTS, Twin, base_rows, copy_folder, stream_of, text, tiny};

/// Which requests of a writer fail.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// One, before it has an effect.
    Once,
    /// One put, after it had its effect.
    OnceDone,
    /// One and all after it: the writer is gone.
    Killed,
    /// The same, and the first had its effect.
    KilledDone,
}

/// A store on which request number `at` fails, and whether it came to that.
fn faulty(fault: Fault, at: usize, puts_only: bool) -> (Probe, Arc<AtomicBool>) {
    let seen = AtomicUsize::new(0);
    let hit = Arc::new(AtomicBool::new(false));
    let reached = Arc::clone(&hit);
    let probe = Probe::hooked(move |verb, _| {
        if puts_only && verb != "put" {
            let dead = reached.load(Ordering::SeqCst);
            let killed = matches!(fault, Fault::Killed | Fault::KilledDone);
            let act = if dead && killed { Act::Busy } else { Act::Pass };
            return async { act }.boxed();
        }
        let number = seen.fetch_add(1, Ordering::SeqCst);
        let act = match number.cmp(&at) {
            std::cmp::Ordering::Less => Act::Pass,
            std::cmp::Ordering::Equal => {
                reached.store(true, Ordering::SeqCst);
                match fault {
                    Fault::Once | Fault::Killed => Act::Busy,
                    Fault::OnceDone | Fault::KilledDone => Act::DoneButFailed,
                }
            }
            std::cmp::Ordering::Greater => match fault {
                Fault::Once | Fault::OnceDone => Act::Pass,
                Fault::Killed | Fault::KilledDone => Act::Busy,
            },
        };
        async { act }.boxed()
    });
    (probe, hit)
}

fn writing() -> WriteOptions {
    WriteOptions {
        policy: Some(tiny()),
        // Sixteen writers on two cores may take their time.
        retry_timeout: Duration::from_secs(600),
        ..Default::default()
    }
}

/// The one column of a query of `t`, the table at `uri`.
async fn numbers(uri: &str, query: &str) -> Vec<i64> {
    let snapshot = Snapshot::open(uri, OpenOptions::default())
        .await
        .expect("opens");
    let provider = SnapshotProvider::try_new(snapshot, SystemColumns::default()).expect("a table");
    let ctx = SessionContext::new();
    ctx.register_table("t", Arc::new(provider))
        .expect("registers");
    let frame = ctx.sql(query).await.expect("plans");
    let rows = frame.collect().await.expect("runs");
    rows.iter()
        .flat_map(|b| b.column(0).as_primitive::<Int64Type>().values().to_vec())
        .collect()
}

async fn ids(uri: &str) -> Vec<i64> {
    numbers(uri, "SELECT id * 1000000 + g AS row FROM t ORDER BY row").await
}

async fn check(uri: &str, what: &str) {
    let report = verify::verify(
        uri,
        verify::VerifyOptions::default(),
        OpenOptions::default(),
        |_| {},
    )
    .await
    .expect("verifies");
    assert!(report.ok(), "{what}: {report:#?}");
}

async fn change(table: &TreeTable, kind: &str) -> fragtree::Result<()> {
    match kind {
        "append" => {
            let rows = stream_of(base_rows(5000..5040, "new"));
            table.append(rows).await.map(|_| ())
        }
        "delete" => table.delete("id % 9 = 4").await.map(|_| ()),
        "update" => table
            .update(Some("id % 8 = 3"), &[("g", "g + 20")])
            .await
            .map(|_| ()),
        "compact" => {
            let options = CompactionOptions {
                target_rows_per_fragment: 16,
                ..Default::default()
            };
            table
                .compact(FragmentRanges::all(), options)
                .await
                .map(|_| ())
        }
        "optimize" => table.optimize_tree().await.map(|_| ()),
        other => panic!("no change {other}"),
    }
}

/// Does a change on a copy of `source` with a fault, and compares what is left.
async fn with_fault(
    source: &std::path::Path,
    kind: &str,
    fault: Fault,
    at: usize,
    puts_only: bool,
    before: &[i64],
    after: &[i64],
) -> bool {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("t.lance");
    copy_folder(source, &copy);
    let uri = text(&copy);
    let (probe, hit) = faulty(fault, at, puts_only);
    let open = OpenOptions {
        object_store_wrapper: Some(Arc::new(probe)),
        ..Default::default()
    };
    let what = format!("{kind}, {fault:?} at {at}");
    let done = match TreeTable::open(&uri, open, writing()).await {
        Ok(table) => change(&table, kind).await,
        Err(e) => Err(e),
    };
    check(&uri, &what).await;
    let found = ids(&uri).await;
    if done.is_ok() {
        assert_eq!(found, after, "{what}: acknowledged");
    } else {
        assert!(
            found == before || found == after,
            "{what}: {done:?}: {found:?}"
        );
        // What the failed writer left behind is in nobody's way.
        if found == before {
            let table = TreeTable::open(&uri, OpenOptions::default(), writing())
                .await
                .expect("opens");
            change(&table, kind).await.expect("works now");
            check(&uri, &what).await;
            assert_eq!(ids(&uri).await, after, "{what}: done again");
        }
    }
    hit.load(Ordering::SeqCst)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_may_die_at_any_request() {
    let mut twin = Twin::make(false).await;
    for round in 0..4 {
        // Leaves a tree behind that is worth optimizing.
        twin.apply(&Change::Delete(format!("id % 9 = {round} AND id < 110")))
            .await;
    }
    let source = std::path::PathBuf::from(twin.tree_uri());
    let before = ids(twin.tree_uri()).await;
    for kind in ["append", "delete", "update", "compact", "optimize"] {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join("t.lance");
        copy_folder(&source, &copy);
        let table = TreeTable::open(&text(&copy), OpenOptions::default(), writing())
            .await
            .expect("opens");
        change(&table, kind).await.expect("works");
        let after = ids(&text(&copy)).await;
        let faults = match kind {
            "append" => &[
                Fault::Once,
                Fault::OnceDone,
                Fault::Killed,
                Fault::KilledDone,
            ][..],
            _ => &[Fault::Once, Fault::KilledDone][..],
        };
        for fault in faults {
            for at in 0.. {
                if !with_fault(&source, kind, *fault, at, true, &before, &after).await {
                    assert!(at > 1, "{kind} makes more than {at} puts");
                    break;
                }
            }
        }
        // FAULT_STEP=1 tries every request; the machines that run this every time are slow.
        let step = std::env::var("FAULT_STEP")
            .ok()
            .and_then(|s| s.parse().ok());
        for at in (0..).step_by(step.unwrap_or(7)) {
            if !with_fault(&source, kind, Fault::Killed, at, false, &before, &after).await {
                break;
            }
        }
    }
}

/// The values that a backfill gives the four rows of a fragment of the twins' first rows: ten times
/// their id.
fn filling(fragment: u32) -> RecordBatch {
    let schema = Schema::new(vec![Field::new("filled", DataType::Int64, true)]);
    let first = i64::from(fragment) * 4;
    let values = Int64Array::from_iter_values((first..first + 4).map(|id| id * 10));
    RecordBatch::try_new(Arc::new(schema), vec![Arc::new(values)]).expect("a batch")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_acknowledged_change_of_many_writers_is_there_once() {
    const WRITERS: u32 = 16;
    const ROUNDS: u32 = 2;
    let twin = Twin::make(false).await;
    let uri = twin.tree_uri().to_string();
    let before: Vec<i64> = ids(&uri).await.iter().map(|row| row / 1_000_000).collect();
    let filled = Schema::new(vec![Field::new("filled", DataType::Int64, true)]);
    let open = async |uri: &str| {
        TreeTable::open(uri, OpenOptions::default(), writing())
            .await
            .expect("opens")
    };
    open(&uri)
        .await
        .add_columns(NewColumnTransform::AllNulls(Arc::new(filled)), None, None)
        .await
        .expect("adds a column");
    let writers = (0..WRITERS).map(|writer| {
        let uri = uri.clone();
        SpawnedTask::spawn(async move {
            let table = open(&uri).await;
            let mut races = 0;
            for round in 0..ROUNDS {
                let first = i64::from(10_000 * (writer + 1) + round * 10);
                let rows = stream_of(base_rows(first..first + 4, "mine"));
                races += table.append(rows).await.expect("appends").lost_races;
                // A row of its own; and one of a fragment from which another deletes too, and which a
                // third fills.
                let turn = writer + round * WRITERS;
                let mine = format!("id = {first} OR id = {}", turn * 2);
                let RowsReport { rows, commit } = table.delete(&mine).await.expect("deletes");
                assert_eq!(rows, 2, "{mine}");
                races += commit.lost_races;
                let fragment = WRITERS * ROUNDS - 1 - turn;
                if fragment < FRAGMENTS {
                    let values = stream_of(filling(fragment));
                    let file = table.write_columns(fragment, values).await.expect("writes");
                    races += table.backfill(vec![file]).await.expect("fills").lost_races;
                }
            }
            races
        })
    });
    let mut races = 0;
    for writer in futures::future::join_all(writers).await {
        races += writer.expect("no panic");
    }
    let mut expected: Vec<i64> = before
        .into_iter()
        .filter(|id| *id >= i64::from(2 * ROUNDS * WRITERS) || id % 2 == 1)
        .chain((0..WRITERS).flat_map(|writer| {
            (0..ROUNDS).flat_map(move |round| {
                let first = i64::from(10_000 * (writer + 1) + round * 10);
                first + 1..first + 4
            })
        }))
        .collect();
    expected.sort_unstable();
    let found = numbers(&uri, "SELECT id FROM t ORDER BY id").await;
    assert_eq!(found, expected);
    let filled = numbers(&uri, "SELECT filled FROM t WHERE id < 1000 ORDER BY id").await;
    let tenfold = |id: &i64| (*id < 1000).then_some(id * 10);
    assert_eq!(
        filled,
        expected.iter().filter_map(tenfold).collect::<Vec<_>>()
    );
    let others = "SELECT count(filled) FROM t WHERE id >= 1000";
    assert_eq!(numbers(&uri, others).await, [0]);
    assert!(races > 0, "nobody ever lost a race");
    check(&uri, "many writers").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletes_of_the_same_fragments_at_once_count_each_row_once() {
    let twin = Twin::make(false).await;
    let uri = twin.tree_uri().to_string();
    let open = async || {
        TreeTable::open(&uri, OpenOptions::default(), writing())
            .await
            .expect("opens")
    };
    // Every fragment is wanted by every writer, each row by two of them.
    let mut writers = Vec::new();
    for k in 0..8 {
        let table = open().await;
        writers.push(SpawnedTask::spawn(async move {
            let mine = format!("id % 4 = {} AND id < 1000", k % 4);
            table.delete(&mine).await.expect("deletes").rows
        }));
    }
    let table = open().await;
    let rows = stream_of(base_rows(1000..1100, "new"));
    table.append(rows).await.expect("appends");
    let mut deleted = 0;
    for writer in writers {
        deleted += writer.await.expect("no panic");
    }
    assert_eq!(deleted, 120);
    let found: Vec<i64> = ids(&uri).await.iter().map(|row| row / 1_000_000).collect();
    assert_eq!(found, (1000..1100).collect::<Vec<i64>>());
    check(&uri, "overlapping deletes").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_chosen_by_a_subquery_are_chosen_again_only_by_who_asks() {
    let twin = Twin::make(false).await;
    let uri = twin.tree_uri().to_string();
    let ctx = SessionContext::new();
    let engine = Engine::new();
    engine.register(&ctx);
    let options = TableOptions::default();
    engine
        .register_table(&ctx, "t", &uri, options)
        .await
        .expect("registers");
    let other = TreeTable::open(&uri, OpenOptions::default(), writing())
        .await
        .expect("opens");
    let planned = async |rows: &str| {
        let frame = ctx.sql(rows).await.expect("plans");
        frame.create_physical_plan().await.expect("plans")
    };
    // Others changed other rows meanwhile, of the same fragment too.
    let plan = planned("DELETE FROM t WHERE id IN (SELECT id FROM t WHERE id < 2)").await;
    other.delete("id = 2 OR id = 50").await.expect("deletes");
    datafusion::physical_plan::collect(plan, ctx.task_ctx())
        .await
        .expect("rebases");
    let plan = planned("UPDATE t SET g = 77 WHERE id IN (SELECT 6)").await;
    other.delete("id = 7").await.expect("deletes");
    datafusion::physical_plan::collect(plan, ctx.task_ctx())
        .await
        .expect("rebases");
    // The same row.
    for change in ["DELETE FROM t", "UPDATE t SET g = 78"] {
        let plan = planned(&format!(
            "{change} WHERE id IN (SELECT id FROM t WHERE id = 11)"
        ))
        .await;
        other
            .update(Some("id = 11"), &[("g", "g + 1")])
            .await
            .expect("updates");
        let error = datafusion::physical_plan::collect(plan, ctx.task_ctx())
            .await
            .expect_err("a row that is elsewhere");
        let said = error.to_string();
        assert!(said.contains("run the statement again"), "{said}");
    }
    let left = "SELECT id * 100 + g FROM t WHERE id < 13 ORDER BY id";
    let left = numbers(&uri, left).await;
    assert_eq!(left, [303, 404, 505, 677, 808, 909, 1000, 1103, 1202]);
    check(&uri, "a statement with a subquery").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handle_sees_what_others_committed_meanwhile() {
    let twin = Twin::make(false).await;
    let uri = twin.tree_uri().to_string();
    let before = ids(&uri).await.len();
    let open = async || {
        TreeTable::open(&uri, OpenOptions::default(), writing())
            .await
            .expect("opens")
    };
    let (one, other) = (open().await, open().await);
    let seen = one.last_seen().expect("opened");
    let rows = |ids| stream_of(base_rows(ids, "other's"));
    other.append(rows(7000..7010)).await.expect("appends");
    assert_eq!(one.last_seen(), Some(seen), "nobody has told it");
    let deleted = one.delete("id >= 7000 AND id < 7004").await;
    assert_eq!(deleted.expect("deletes").rows, 4);

    // A transaction made by hand is on the version that was last seen, and goes on top of others.
    let seen = one.last_seen().expect("a version");
    let landed = other.append(rows(7010..7020)).await.expect("appends");
    let reserve = || Operation::ReserveFragments { num_fragments: 1 };
    let transaction = Transaction::new(seen, reserve(), None);
    let report = one.commit(transaction, None).await.expect("commits");
    assert_eq!(report.version, landed.version + 1);

    // On its own last version nothing has to be read, whoever made it.
    for _ in 0..3 {
        let seen = one.last_seen().expect("a version");
        let transaction = Transaction::new(seen, reserve(), None);
        let report = one.commit(transaction, None).await.expect("commits");
        assert_eq!((report.version, report.lost_races), (seen + 1, 0));
    }
    assert_eq!(ids(&uri).await.len(), before + 20 - 4);
    check(&uri, "two handles").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handle_reads_a_manifest_once_and_none_it_wrote() {
    let twin = Twin::make(false).await;
    let probe = Probe::default();
    let open = OpenOptions {
        object_store_wrapper: Some(Arc::new(probe.clone())),
        ..Default::default()
    };
    let uri = format!("file-object-store://{}", twin.tree_uri());
    let write = WriteOptions {
        assume_latest: Duration::from_secs(3600),
        ..writing()
    };
    let table = TreeTable::open(&uri, open, write).await.expect("opens");
    probe.reset();
    for _ in 0..5 {
        let seen = table.last_seen().expect("a version");
        let operation = Operation::ReserveFragments { num_fragments: 1 };
        let transaction = Transaction::new(seen, operation, None);
        table.commit(transaction, None).await.expect("commits");
    }
    // Each the transaction file and the manifest, the second only if there is none; a hint where
    // listing is slow, and nothing read.
    let versions = probe.count("put") - probe.count("latest_version_hint");
    assert_eq!(versions, 10, "{probe:?}");
    assert_eq!(probe.count("get") + probe.count("list"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_holds_without_its_transaction_file() {
    let twin = Twin::make(false).await;
    let before = ids(twin.tree_uri()).await.len();
    let probe = Probe::hooked(|verb, location| {
        let lost = verb == "put" && location.contains("_transactions/");
        let act = if lost { Act::Busy } else { Act::Pass };
        async { act }.boxed()
    });
    let open = OpenOptions {
        object_store_wrapper: Some(Arc::new(probe)),
        ..Default::default()
    };
    let uri = format!("file-object-store://{}", twin.tree_uri());
    let table = TreeTable::open(&uri, open, writing()).await.expect("opens");
    let rows = stream_of(base_rows(7000..7010, "new"));
    table.append(rows).await.expect("the manifest is there");
    assert_eq!(ids(twin.tree_uri()).await.len(), before + 10);
    // What was done is read from the manifest, by whoever has to go round it.
    let stale = Transaction::new(
        table.last_seen().expect("a version") - 1,
        Operation::ReserveFragments { num_fragments: 1 },
        None,
    );
    let writer = TreeTable::open(twin.tree_uri(), OpenOptions::default(), writing()).await;
    let report = writer.expect("opens").commit(stale, None).await;
    report.expect("commits on top of it");
    check(twin.tree_uri(), "no transaction file").await;
}
