//! Tables that follow the commits of others, tables that do not, and versions that go away.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{DataType, Int64Type};
use chrono::TimeDelta;
use datafusion::catalog::MemorySchemaProvider;
use datafusion::prelude::SessionContext;
use fragtree::write::{ConvertOptions, convert};
use fragtree::{
    Engine, Error, Layout, LiveTable, OpenOptions, Refresh, Snapshot, SnapshotProvider,
    SystemColumns, TableOptions, VersionRef,
};
use futures::FutureExt;
use lance::Dataset;
use lance::dataset::{ColumnAlteration, InsertBuilder, NewColumnTransform, WriteMode};

use super::probe::{Act, Probe};
use super::{append, batch, engine, numbers, params, probed, session, to_tree, try_numbers, write};

/// A scratch table, and its place as text.
fn place(name: &str) -> (tempfile::TempDir, PathBuf, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join(name);
    let uri = path.to_str().expect("UTF-8").to_string();
    (dir, path, uri)
}

/// Appends ten rows of ids from `from`, and leaves the layout as it is.
async fn commit(uri: &str, layout: Layout, from: i64) {
    if layout == Layout::Tree {
        convert(uri, ConvertOptions::to_flat(), OpenOptions::default())
            .await
            .expect("converted");
    }
    append(uri, from..from + 10).await;
    if layout == Layout::Tree {
        to_tree(uri).await;
    }
}

async fn table(uri: &str, layout: Layout, ids: std::ops::Range<i64>) {
    write(uri, ids, 10).await;
    if layout == Layout::Tree {
        to_tree(uri).await;
    }
}

async fn register(ctx: &SessionContext, engine: &Engine, name: &str, uri: &str, refresh: Refresh) {
    let options = TableOptions {
        refresh,
        ..Default::default()
    };
    engine
        .register_table(ctx, name, uri, options)
        .await
        .expect("opens");
}

async fn sql(ctx: &SessionContext, sql: &str) -> datafusion::error::Result<Vec<RecordBatch>> {
    ctx.sql(sql).await?.collect().await
}

async fn fails(ctx: &SessionContext, query: &str) -> String {
    let error = sql(ctx, query).await.expect_err(query);
    error.to_string()
}

async fn cleanup(uri: &str) {
    Dataset::open(uri)
        .await
        .expect("opens")
        .cleanup_old_versions(TimeDelta::zero(), Some(true), Some(false))
        .await
        .expect("cleaned up");
}

async fn overwrite(uri: &str, ids: std::ops::Range<i64>) {
    InsertBuilder::new(uri)
        .with_params(&params(10, WriteMode::Overwrite))
        .execute(vec![batch(ids)])
        .await
        .expect("overwritten");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registered_table_follows_commits_unless_it_is_pinned() {
    for layout in [Layout::Flat, Layout::Tree] {
        let (_dir, _, uri) = place("t.lance");
        table(&uri, layout, 0..100).await;
        let engine = Engine::new();
        let ctx = session(&engine, &uri).await;
        let version = Snapshot::open(&uri, OpenOptions::default())
            .await
            .expect("opens")
            .version();
        for (name, options) in [
            ("off", "refresh 'off'".to_string()),
            ("hour", "refresh '1h'".to_string()),
            ("now", "refresh 'always'".to_string()),
            ("ago", "refresh '0s'".to_string()),
            ("at", format!("version '{version}'")),
            (
                "then",
                format!("timestamp '{}'", chrono::Utc::now().to_rfc3339()),
            ),
            ("main", "branch 'main'".to_string()),
            ("plain", "system_columns ''".to_string()),
        ] {
            let create = format!(
                "CREATE EXTERNAL TABLE {name} STORED AS LANCE LOCATION '{uri}' OPTIONS ({options})"
            );
            sql(&ctx, &create).await.expect("creates");
        }
        for round in 0..2 {
            for name in [
                "t", "off", "hour", "now", "ago", "at", "then", "main", "plain",
            ] {
                let follows = !["off", "hour", "at", "then"].contains(&name);
                let rows = if follows { 100 + round * 10 } else { 100 };
                let what = format!("{layout} {name} after {round} commits");
                let count = format!("SELECT COUNT(*) FROM {name}");
                assert_eq!(numbers(&ctx, &count).await, [rows], "{what}");
                let sum = format!("SELECT SUM(id) FROM {name}");
                assert_eq!(
                    numbers(&ctx, &sum).await,
                    [(0..rows).sum::<i64>()],
                    "{what}"
                );
                let last = format!("SELECT COUNT(*) FROM {name} WHERE id = {}", rows - 1);
                assert_eq!(numbers(&ctx, &last).await, [1], "{what}");
                // The functions see what the table shows.
                let function =
                    format!("SELECT SUM(physical_rows) FROM fragtree_fragments('{name}')");
                assert_eq!(numbers(&ctx, &function).await, [rows], "{what}");
            }
            // Fragments above the greatest id that was known before can be asked for.
            let new = format!("SELECT COUNT(*) FROM t WHERE _fragid >= {}", 10 + round - 1);
            assert_eq!(numbers(&ctx, &new).await, [10], "{layout} {round}");
            commit(&uri, layout, 100 + round * 10).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_layout_is_followed() {
    let (_dir, _, uri) = place("t.lance");
    write(&uri, 0..100, 10).await;
    let ctx = session(&Engine::new(), &uri).await;
    let objects = "SELECT COUNT(*) FROM fragtree_tree('t')";
    assert_eq!(numbers(&ctx, objects).await, [0]);
    to_tree(&uri).await;
    assert_eq!(numbers(&ctx, "SELECT SUM(id) FROM t").await, [4950]);
    assert!(numbers(&ctx, objects).await[0] > 0);
    convert(&uri, ConvertOptions::to_flat(), OpenOptions::default())
        .await
        .expect("converted");
    assert_eq!(numbers(&ctx, objects).await, [0]);
    assert_eq!(numbers(&ctx, "SELECT SUM(id) FROM t").await, [4950]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_is_followed_and_others_are_not() {
    let (_dir, _, uri) = place("t.lance");
    let mut main = write(&uri, 0..100, 10).await;
    let mut dev = main.create_branch("dev", 1, None).await.expect("branches");
    let ctx = session(&Engine::new(), &uri).await;
    sql(
        &ctx,
        &format!(
            "CREATE EXTERNAL TABLE dev STORED AS LANCE LOCATION '{uri}' OPTIONS (branch 'dev')"
        ),
    )
    .await
    .expect("creates");
    dev.delete("id < 40").await.expect("deleted");
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM dev").await, [60]);
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [100]);
    append(&uri, 100..110).await;
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM dev").await, [60]);
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [110]);
}

#[tokio::test(flavor = "multi_thread")]
async fn looking_for_newer_versions_costs_one_round_trip() {
    let (_dir, path, uri) = place("t.lance");
    table(&uri, Layout::Tree, 0..500).await;
    let probe = Probe::default();
    let engine = engine(&probe);
    let ctx = session(&engine, &probed(&path)).await;
    register(
        &ctx,
        &engine,
        "rarely",
        &probed(&path),
        Refresh::Every(Duration::from_secs(3600)),
    )
    .await;

    probe.reset();
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [500]);
    assert_eq!(probe.count(".manifest"), 2, "this version and the next");
    assert_eq!(probe.count(""), 3, "and the hint");
    probe.reset();
    let join = "SELECT COUNT(*) FROM t a, t b, (SELECT MAX(id) AS m FROM t) c";
    assert_eq!(
        numbers(
            &ctx,
            &format!("{join} WHERE a._fragid = 1 AND b._fragid = 2")
        )
        .await,
        [100]
    );
    assert_eq!(probe.count(".manifest"), 2, "once a query");
    probe.reset();
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM rarely").await, [500]);
    assert_eq!(probe.count(""), 0, "not yet time");

    // Many queries at once look together.
    let slow = Probe::slow(Duration::from_millis(20));
    let ctx = session(&super::engine(&slow), &probed(&path)).await;
    slow.reset();
    let queries = (0..64).map(|_| numbers(&ctx, "SELECT COUNT(*) FROM t"));
    for count in futures::future::join_all(queries).await {
        assert_eq!(count, [500]);
    }
    assert!(slow.count("") <= 12, "{} requests", slow.count(""));

    // A newer version of a tree: the new manifest and root, and leaves that are not in the cache.
    commit(&uri, Layout::Tree, 500).await;
    slow.reset();
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [510]);
    assert!(slow.count("") <= 8, "{} requests", slow.count(""));
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_of_the_schema_are_followed() {
    let (_dir, _, uri) = place("t.lance");
    let mut dataset = write(&uri, 0..100, 10).await;
    let ctx = session(&Engine::new(), &uri).await;
    sql(&ctx, "CREATE VIEW small AS SELECT * FROM t WHERE id < 20")
        .await
        .expect("creates");
    sql(
        &ctx,
        "CREATE VIEW smaller AS SELECT id, g AS h FROM small WHERE id < 10",
    )
    .await
    .expect("creates");
    let columns = |ctx: &SessionContext, name: &'static str| {
        let ctx = ctx.clone();
        async move {
            let frame = ctx.table(name).await.expect("a table");
            let names = frame.schema().fields().iter().map(|f| f.name().clone());
            names.filter(|n| !n.starts_with('_')).collect::<Vec<_>>()
        }
    };
    assert_eq!(columns(&ctx, "t").await, ["id", "g", "name"]);

    let twice = vec![("twice".to_string(), "id * 2".to_string())];
    dataset
        .add_columns(NewColumnTransform::SqlExpressions(twice), None, None)
        .await
        .expect("added");
    assert_eq!(numbers(&ctx, "SELECT SUM(twice) FROM t").await, [9900]);
    assert_eq!(columns(&ctx, "t").await, ["id", "g", "name", "twice"]);
    assert_eq!(
        columns(&ctx, "small").await,
        ["id", "g", "name"],
        "as it was made"
    );
    assert_eq!(numbers(&ctx, "SELECT SUM(id) FROM small").await, [190]);
    assert_eq!(numbers(&ctx, "SELECT SUM(h) FROM smaller").await, [45]);
    let described = numbers(
        &ctx,
        "SELECT COUNT(*) FROM information_schema.columns WHERE table_name = 't' AND column_name = 'twice'",
    )
    .await;
    assert_eq!(described, [1]);

    // A column comes to stand elsewhere, and another goes: views find theirs by name.
    dataset.drop_columns(&["name"]).await.expect("dropped");
    assert!(
        fails(&ctx, "SELECT name FROM t")
            .await
            .contains("No field named name")
    );
    assert_eq!(
        numbers(&ctx, "SELECT SUM(twice) FROM t WHERE g = 3").await,
        [2 * 480]
    );
    let gone = fails(&ctx, "SELECT SUM(id) FROM small").await;
    assert!(
        gone.contains("column name of") && gone.contains("has none"),
        "{gone}"
    );
    assert!(
        fails(&ctx, "SELECT * FROM smaller")
            .await
            .contains("has none")
    );
    // It can still be described and dropped.
    assert_eq!(columns(&ctx, "small").await, ["id", "g", "name"]);
    sql(&ctx, "DROP VIEW small").await.expect("drops");
    sql(&ctx, "CREATE VIEW small AS SELECT * FROM t WHERE id < 20")
        .await
        .expect("creates");
    assert_eq!(numbers(&ctx, "SELECT SUM(twice) FROM small").await, [380]);

    // Another type under the same name.
    let wider = ColumnAlteration::new("g".into()).cast_to(DataType::Int32);
    dataset.alter_columns(&[wider]).await.expect("altered");
    let changed = fails(&ctx, "SELECT SUM(g) FROM small").await;
    assert!(
        changed.contains("was Int64") && changed.contains("Int32"),
        "{changed}"
    );
    assert_eq!(numbers(&ctx, "SELECT SUM(g) FROM t").await, [450]);
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_of_a_schema_reaches_a_view() {
    let (_dir, _, uri) = place("t.lance");
    let mut dataset = write(&uri, 0..100, 10).await;
    let ctx = session(&Engine::new(), &uri).await;
    sql(&ctx, "CREATE VIEW v AS SELECT g, SUM(id) AS s FROM t GROUP BY g UNION ALL SELECT id, g FROM t WHERE id IN (SELECT id FROM t WHERE g = 1)")
        .await
        .expect("creates");
    dataset
        .update_schema_metadata([("owner", "me")])
        .await
        .expect("updated");
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM v").await, [20]);
    assert_eq!(numbers(&ctx, "SELECT SUM(s) FROM v").await, [4950 + 10]);
}

/// A probe that, once it is armed, appends ten rows whenever the hint of the latest version is read:
/// at each look for newer versions. Counts the commits.
fn committing(uri: &str) -> (Probe, Arc<AtomicBool>, Arc<AtomicUsize>) {
    let armed = Arc::new(AtomicBool::new(false));
    let commits = Arc::new(AtomicUsize::new(0));
    let (uri, on, done) = (uri.to_string(), Arc::clone(&armed), Arc::clone(&commits));
    let probe = Probe::hooked(move |_, location| {
        let due = location.ends_with("hint.json") && on.load(Ordering::SeqCst);
        done.fetch_add(usize::from(due), Ordering::SeqCst);
        let uri = uri.clone();
        async move {
            if due {
                append(&uri, 0..10).await;
            }
            Act::Pass
        }
        .boxed()
    });
    (probe, armed, commits)
}

#[tokio::test(flavor = "multi_thread")]
async fn one_query_is_of_one_version_however_it_names_the_table() {
    let (_dir, path, uri) = place("t.lance");
    write(&uri, 0..100, 10).await;
    let (probe, armed, commits) = committing(&uri);
    let engine = engine(&probe);
    let ctx = session(&engine, &probed(&path)).await;
    register(&ctx, &engine, "u", &probed(&path), Refresh::Always).await;
    sql(&ctx, "CREATE VIEW v AS SELECT id, g FROM u")
        .await
        .expect("creates");
    armed.store(true, Ordering::SeqCst);
    let mut before = 0;
    // From here on every look at the table finds another commit.
    for zero in [
        "SELECT (SELECT COUNT(*) FROM t) - (SELECT COUNT(*) FROM t)",
        "SELECT (SELECT COUNT(*) FROM t) - (SELECT COUNT(*) FROM u)",
        "SELECT (SELECT COUNT(*) FROM u) - (SELECT COUNT(*) FROM t)",
        "SELECT (SELECT SUM(id) FROM t) - (SELECT SUM(id) FROM v)",
        "SELECT (SELECT SUM(id) FROM v) - (SELECT SUM(id) FROM t WHERE _fragid >= 0)",
        "SELECT COUNT(*) FROM t LEFT ANTI JOIN u ON t._rowaddr = u.id * 0 + t._rowaddr AND t.id = u.id",
        "SELECT COUNT(*) - (SELECT COUNT(*) FROM u WHERE id >= 0) FROM t",
        "SELECT COUNT(*) - (SELECT SUM(physical_rows) FROM fragtree_fragments('t')) FROM t",
        "SELECT COUNT(*) - (SELECT SUM(physical_rows) FROM fragtree_fragments('u')) FROM t JOIN (SELECT MAX(id) AS m FROM u) x ON true",
        "SELECT MAX(a.n) - MAX(b.n) FROM (SELECT COUNT(*) AS n FROM fragtree_fragments('t')) a, (SELECT COUNT(*) AS n FROM fragtree_fragments('public.t')) b",
        "WITH c AS (SELECT COUNT(*) AS n FROM t) SELECT SUM(n) - 2 * (SELECT COUNT(*) FROM t) FROM (SELECT * FROM c UNION ALL SELECT * FROM c)",
    ] {
        let query = format!("SELECT CAST(z AS BIGINT) FROM ({zero}) AS q(z)");
        assert_eq!(numbers(&ctx, &query).await, [0], "{zero}");
        let after = commits.load(Ordering::SeqCst);
        assert!(after > before, "{zero}: commits came in between");
        before = after;
    }
    // Two names of different tables stay two tables.
    let (_other_dir, _, other) = place("other.lance");
    write(&other, 0..7, 10).await;
    register(&ctx, &engine, "other", &other, Refresh::Always).await;
    assert_eq!(
        numbers(&ctx, "SELECT COUNT(*) FROM other, (SELECT MAX(id) FROM t)").await,
        [7]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_that_cannot_be_one_in_a_query_are_an_error() {
    let (_dir, path, uri) = place("t.lance");
    let dataset = write(&uri, 0..100, 10).await;
    let dataset = Arc::new(tokio::sync::Mutex::new(dataset));
    let looks = Arc::new(AtomicUsize::new(1000));
    let (seen, table) = (Arc::clone(&looks), Arc::clone(&dataset));
    // The second look of a query finds a column of another type.
    let probe = Probe::hooked(move |_, location| {
        let look = location.ends_with("hint.json");
        let due = look && seen.fetch_add(1, Ordering::SeqCst) == 1;
        let table = Arc::clone(&table);
        async move {
            if due {
                let narrow = ColumnAlteration::new("g".into()).cast_to(DataType::Int32);
                let mut table = table.lock().await;
                table.alter_columns(&[narrow]).await.expect("altered");
            }
            Act::Pass
        }
        .boxed()
    });
    let engine = engine(&probe);
    let ctx = session(&engine, &probed(&path)).await;
    register(&ctx, &engine, "u", &probed(&path), Refresh::Always).await;
    looks.store(0, Ordering::SeqCst);
    let error = fails(&ctx, "SELECT t.g FROM t, u").await;
    assert!(
        error.contains("versions 2 and 1 of") && error.contains("run it again"),
        "{error}"
    );
    assert_eq!(numbers(&ctx, "SELECT COUNT(t.g) FROM t, u").await, [10_000]);
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_beside_a_writer_see_whole_versions() {
    for layout in [Layout::Flat, Layout::Tree] {
        let (_dir, _, uri) = place("t.lance");
        table(&uri, layout, 0..100).await;
        let engine = Engine::new();
        let ctx = session(&engine, &uri).await;
        register(&ctx, &engine, "u", &uri, Refresh::Always).await;
        let writing = AtomicBool::new(true);
        let writer = async {
            for round in 0..6 {
                commit(&uri, layout, 100 + round * 10).await;
            }
            writing.store(false, Ordering::SeqCst);
        };
        let reader = async {
            let mut last = 0;
            let mut queries = 0;
            while writing.load(Ordering::SeqCst) || queries < 3 {
                let query = "SELECT COUNT(*) AS a, SUM(a.id) AS b, MAX(b.id) AS c, (SELECT COUNT(*) FROM u) AS d, (SELECT SUM(id) FROM u WHERE g >= 0) AS e FROM t a JOIN t b ON a.id = b.id";
                let batches = sql(&ctx, query).await.expect("runs");
                let row = batches.iter().find(|b| b.num_rows() > 0).expect("a row");
                let at = |column: usize| row.column(column).as_primitive::<Int64Type>().value(0);
                let rows = at(0);
                assert!(rows % 10 == 0 && rows >= last, "{rows} after {last}");
                let sum = (0..rows).sum::<i64>();
                assert_eq!((at(1), at(2), at(3), at(4)), (sum, rows - 1, rows, sum));
                last = rows;
                queries += 1;
            }
        };
        futures::join!(writer, reader);
        assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [160]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_keeps_its_version_and_a_view_does_not() {
    let (_dir, _, uri) = place("t.lance");
    write(&uri, 0..100, 10).await;
    let ctx = session(&Engine::new(), &uri).await;
    let planned = ctx
        .sql("SELECT COUNT(*), SUM(id) FROM t")
        .await
        .expect("plans");
    sql(&ctx, "PREPARE p AS SELECT COUNT(*) FROM t WHERE id >= $1")
        .await
        .expect("prepares");
    sql(&ctx, "CREATE VIEW v AS SELECT id FROM t")
        .await
        .expect("creates");
    sql(
        &ctx,
        "CREATE VIEW w AS SELECT v.id FROM v JOIN t ON v.id = t.id WHERE v.id >= 50",
    )
    .await
    .expect("creates");
    append(&uri, 100..110).await;
    let rows = planned.clone().collect().await.expect("runs");
    assert_eq!(rows[0].column(0).as_primitive::<Int64Type>().value(0), 100);
    assert_eq!(numbers(&ctx, "EXECUTE p(0)").await, [100]);
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM v").await, [110]);
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM w").await, [60]);
    assert_eq!(
        numbers(
            &ctx,
            "SELECT SUM(w.id) - SUM(t.id) FROM w JOIN t ON w.id = t.id"
        )
        .await,
        [0]
    );
    append(&uri, 110..120).await;
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM w").await, [70]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_follows_its_tables() {
    let (dir, path, uri) = place("t.lance");
    write(&uri, 0..100, 10).await;
    let probe = Probe::default();
    let engine = engine(&probe);
    let folder = probed(dir.path());
    let ctx = SessionContext::new();
    engine.register(&ctx);
    let catalog = ctx.catalog("datafusion").expect("the default");
    for (name, refresh) in [("always", Refresh::Always), ("off", Refresh::Off)] {
        let options = TableOptions {
            refresh,
            ..Default::default()
        };
        let tables = engine
            .directory_schema(&folder, options)
            .await
            .expect("a folder");
        catalog.register_schema(name, tables).expect("registers");
    }
    let both = |rows: i64, off: i64| {
        let ctx = ctx.clone();
        async move {
            assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM always.t").await, [rows]);
            assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM off.t").await, [off]);
        }
    };
    both(100, 100).await;
    sql(&ctx, "CREATE VIEW always.v AS SELECT id FROM always.t")
        .await
        .expect("creates");
    append(&uri, 100..110).await;
    both(110, 100).await;
    probe.reset();
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM always.v").await, [110]);
    assert_eq!(probe.count(""), 3, "no list and no opening: {probe:?}");
    let options = TableOptions {
        reference: VersionRef::version(1),
        ..Default::default()
    };
    let pinned = engine.directory_schema(&folder, options).await;
    assert!(matches!(pinned, Err(Error::InvalidInput { .. })));

    // Gone and made again, with fewer versions than before.
    std::fs::remove_dir_all(&path).expect("removed");
    assert!(
        fails(&ctx, "SELECT * FROM always.t")
            .await
            .contains("not found")
    );
    write(&uri, 0..7, 10).await;
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM always.t").await, [7]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_removed_or_made_again_is_noticed() {
    let (_dir, path, uri) = place("t.lance");
    write(&uri, 0..100, 10).await;
    let engine = Engine::new();
    let ctx = session(&engine, &uri).await;
    register(&ctx, &engine, "off", &uri, Refresh::Off).await;
    assert_eq!(numbers(&ctx, "SELECT SUM(id) FROM t").await, [4950]);

    std::fs::remove_dir_all(&path).expect("removed");
    let error = fails(&ctx, "SELECT COUNT(*) FROM t").await;
    assert!(
        error.contains("Lance table") && error.contains("not found"),
        "{error}"
    );
    let error = fails(&ctx, "SELECT COUNT(*) FROM fragtree_fragments('t')").await;
    assert!(error.contains("not found"), "{error}");
    let error = fails(&ctx, "SELECT SUM(id) FROM off").await;
    assert!(
        error.contains("version 1 of") && error.contains("the table was removed"),
        "{error}"
    );

    // The same version number, and other rows.
    write(&uri, 0..50, 10).await;
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [50]);
    assert_eq!(numbers(&ctx, "SELECT SUM(id) FROM t").await, [1225]);
    let error = fails(&ctx, "SELECT SUM(id) FROM off").await;
    assert!(
        error.contains("version 1 of") && error.contains("made again"),
        "{error}"
    );
    std::fs::remove_dir_all(&path).expect("removed");
    sql(&ctx, "DROP TABLE t").await.expect("drops");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_behind_a_gap_is_found() {
    let (_dir, _, uri) = place("t.lance");
    let dataset = write(&uri, 0..100, 10).await;
    dataset.tags().create("keep", 1).await.expect("tagged");
    let ctx = session(&Engine::new(), &uri).await;
    append(&uri, 100..110).await;
    append(&uri, 110..120).await;
    // Version 2 goes; the tag keeps version 1, which the session knows as the latest.
    cleanup(&uri).await;
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [120]);
    assert_eq!(
        numbers(&ctx, "SELECT COUNT(*) FROM fragtree_versions('t')").await,
        [2]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_a_removed_version_is_told_so() {
    let (_dir, _, uri) = place("t.lance");
    write(&uri, 0..100, 10).await;
    let engine = Engine::new();
    let ctx = session(&engine, &uri).await;
    let at = |name: &str, version: u64| {
        format!(
            "CREATE EXTERNAL TABLE {name} STORED AS LANCE LOCATION '{uri}' OPTIONS (version '{version}')"
        )
    };
    sql(&ctx, &at("old", 1)).await.expect("creates");
    let hour = Refresh::Every(Duration::from_secs(3600));
    register(&ctx, &engine, "rarely", &uri, hour).await;
    let running = ctx.sql("SELECT id, name FROM t").await.expect("plans");
    overwrite(&uri, 0..10).await;
    append(&uri, 10..20).await;
    cleanup(&uri).await;

    for frame in [ctx.sql("SELECT id FROM old").await.expect("plans"), running] {
        let error = frame.collect().await.expect_err("removed").to_string();
        for part in [
            "version 1 of",
            "any more",
            "it was cleaned up",
            "between 3 and 3",
            "reading fragment",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
    // A table that would not look for long does when its version is gone.
    let rarely = "SELECT SUM(id) FROM rarely";
    assert!(fails(&ctx, rarely).await.contains("it was cleaned up"));
    assert_eq!(numbers(&ctx, rarely).await, [190]);
    // What is known of it without its files is still right.
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM old").await, [100]);
    assert_eq!(numbers(&ctx, "SELECT SUM(id) FROM t").await, [190]);
    let error = fails(&ctx, &at("older", 1)).await;
    assert!(
        error.contains("version 1 of") && error.contains("it was cleaned up"),
        "{error}"
    );
    let error = fails(&ctx, &at("newer", 9)).await;
    assert!(
        error.contains("version 9 of") && !error.contains("cleaned up"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_a_removed_tree_is_told_so() {
    let (_dir, path, uri) = place("t.lance");
    write(&uri, 0..2000, 5).await;
    assert!(to_tree(&uri).await.height >= 2);
    let pinned = |engine: &Engine| {
        let (engine, uri) = (engine.clone(), uri.clone());
        async move {
            let ctx = session(&engine, &uri).await;
            let options = TableOptions {
                reference: VersionRef::version(2),
                system_columns: SystemColumns::ALL,
                ..Default::default()
            };
            engine
                .register_table(&ctx, "old", &uri, options)
                .await
                .expect("opens");
            ctx
        }
    };
    let ctx = pinned(&Engine::new()).await;
    let queries = [
        "SELECT SUM(id) FROM old",
        "SELECT id FROM old WHERE _rowaddr = 4294967297",
        "SELECT COUNT(*) FROM old WHERE _fragid BETWEEN 3 AND 70",
        "SELECT COUNT(*) FROM fragtree_fragments('old')",
        "SELECT COUNT(*) FROM fragtree_tree('old')",
    ];
    let manifest = |version: u64| {
        let name = format!("{:020}.manifest", u64::MAX - version);
        path.join("_versions").join(name)
    };
    // While the version is there, be its file a copy, an object that is missing is a broken table.
    let copy = std::fs::read(manifest(2)).expect("readable");
    std::fs::remove_file(manifest(2)).expect("removed");
    std::fs::write(manifest(2), copy).expect("written");
    let objects = path.join("_bt");
    let aside = path.join("aside");
    std::fs::rename(&objects, &aside).expect("moved");
    for query in queries {
        let error = fails(&ctx, query).await;
        assert!(
            error.contains("object_missing") && !error.contains("any more"),
            "{query}: {error}"
        );
    }
    std::fs::rename(&aside, &objects).expect("moved back");

    convert(&uri, ConvertOptions::to_flat(), OpenOptions::default())
        .await
        .expect("converted");
    let ctx = pinned(&Engine::new()).await;
    std::fs::remove_file(manifest(2)).expect("removed");
    std::fs::remove_dir_all(&objects).expect("removed");
    for query in queries {
        let error = fails(&ctx, query).await;
        for part in ["version 2 of", "any more", "it was cleaned up", "_bt/"] {
            assert!(error.contains(part), "{query}: {part}: {error}");
        }
    }
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM old").await, [2000]);
    assert_eq!(
        numbers(&ctx, "SELECT SUM(id) FROM t").await,
        [(0..2000).sum::<i64>()]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_is_removed_while_it_is_opened() {
    // The root of version 2 goes between its manifest and itself; version 3 has come meanwhile.
    for reference in [VersionRef::latest(), VersionRef::version(2)] {
        let (_dir, path, uri) = place("t.lance");
        table(&uri, Layout::Tree, 0..500).await;
        let raced = Arc::new(AtomicUsize::new(0));
        let table = (uri.clone(), path.clone());
        let probe = Probe::hooked(move |_, location| {
            let first = location.contains("_bt/root") && raced.fetch_add(1, Ordering::SeqCst) == 0;
            let (uri, path) = table.clone();
            async move {
                if first {
                    convert(&uri, ConvertOptions::to_flat(), OpenOptions::default())
                        .await
                        .expect("converted");
                    std::fs::remove_dir_all(path.join("_bt")).expect("removed");
                    let name = format!("{:020}.manifest", u64::MAX - 2);
                    std::fs::remove_file(path.join("_versions").join(name)).expect("removed");
                }
                Act::Pass
            }
            .boxed()
        });
        let latest = reference == VersionRef::latest();
        let opened = engine(&probe)
            .open(&probed(&path), reference, HashMap::new())
            .await;
        match opened {
            Ok(snapshot) => assert!(latest && snapshot.version() == 3, "{snapshot:?}"),
            Err(error) => {
                assert!(!latest, "{error}");
                assert!(matches!(error, Error::NotFound { .. }), "{error}");
                assert!(error.to_string().contains("version 2 of"), "{error}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_does_not_answer_fails_the_query_and_not_the_table() {
    let (_dir, path, uri) = place("t.lance");
    write(&uri, 0..100, 10).await;
    let down = Arc::new(AtomicBool::new(false));
    let off = Arc::clone(&down);
    let probe = Probe::hooked(move |verb, _| {
        let act = if verb == "head" && off.load(Ordering::SeqCst) {
            Act::Busy
        } else {
            Act::Pass
        };
        async move { act }.boxed()
    });
    let ctx = session(&engine(&probe), &probed(&path)).await;
    down.store(true, Ordering::SeqCst);
    let error = fails(&ctx, "SELECT COUNT(*) FROM t").await;
    assert!(
        error.contains(".manifest") && error.contains("503"),
        "{error}"
    );
    assert!(
        fails(&ctx, "SELECT * FROM fragtree_tree('t')")
            .await
            .contains("503")
    );
    assert_eq!(
        ctx.table("t")
            .await
            .expect("described")
            .schema()
            .fields()
            .len(),
        6
    );
    append(&uri, 100..110).await;
    down.store(false, Ordering::SeqCst);
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [110]);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_share_a_live_table_and_an_untaught_one_refuses_it() {
    let (_dir, path, uri) = place("t.lance");
    write(&uri, 0..100, 10).await;
    let probe = Probe::default();
    let engine = engine(&probe);
    let live: LiveTable = engine
        .live_table(&probed(&path), TableOptions::default())
        .await
        .expect("opens");
    append(&uri, 100..110).await;
    for _ in 0..2 {
        let ctx = SessionContext::new();
        engine.register(&ctx);
        engine.register(&ctx);
        ctx.register_table("t", Arc::new(live.clone()))
            .expect("free");
        // In catalogs that come later, too.
        let later = Arc::new(datafusion::catalog::MemoryCatalogProvider::new());
        ctx.register_catalog("later", later);
        let schema = Arc::new(MemorySchemaProvider::new());
        let catalog = ctx.catalog("later").expect("there");
        catalog.register_schema("s", schema).expect("registers");
        ctx.register_table("later.s.t", Arc::new(live.clone()))
            .expect("free");
        probe.reset();
        assert_eq!(
            numbers(
                &ctx,
                "SELECT COUNT(*) FROM t, later.s.t AS u WHERE t.id = u.id"
            )
            .await,
            [110]
        );
        let taken = ctx
            .deregister_table("t")
            .expect("there")
            .expect("registered");
        assert!(taken.is::<LiveTable>());
    }
    let current: SnapshotProvider = live.current().await.expect("opens");
    assert_eq!(current.snapshot().version(), 2);
    assert!(current.followed().is_some());

    let untaught = SessionContext::new();
    untaught.register_table("t", Arc::new(live)).expect("free");
    let error = try_numbers(&untaught, "SELECT COUNT(*) FROM t")
        .await
        .expect_err("refused")
        .to_string();
    assert!(error.contains("Engine::register"), "{error}");
    for options in [
        TableOptions {
            refresh: Refresh::Off,
            ..Default::default()
        },
        TableOptions {
            reference: VersionRef::version(1),
            ..Default::default()
        },
    ] {
        assert!(engine.live_table(&uri, options).await.is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_say_what_was_done_and_how_large_it_is() {
    let (_dir, path, uri) = place("t.lance");
    write(&uri, 0..100, 10).await;
    append(&uri, 100..110).await;
    let ctx = session(&Engine::new(), &uri).await;
    let wrong = "SELECT COUNT(*) FROM fragtree_versions('t') WHERE NOT (operation IN ('Overwrite', 'Append') AND transaction_bytes BETWEEN 10 AND 10000 AND mutations IS NULL)";
    assert_eq!(numbers(&ctx, wrong).await, [0]);
    let sizes = "SELECT transaction_bytes FROM fragtree_versions('t') LIMIT 1";
    let recorded = std::fs::read_dir(path.join("_transactions"));
    let latest = recorded
        .expect("a directory")
        .map(|e| e.expect("an entry").path())
        .find(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("1-"))
        });
    if let Some(latest) = latest {
        let size = std::fs::metadata(&latest).expect("there").len();
        assert_eq!(
            numbers(&ctx, sizes).await,
            [i64::try_from(size).expect("small")]
        );
    }
    to_tree(&uri).await;
    let tree =
        "SELECT version FROM fragtree_versions('t') WHERE mutations IS NULL AND layout = 'tree'";
    assert_eq!(numbers(&ctx, tree).await, [3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_of_one_version_stays_at_it() {
    let (_dir, _, uri) = place("t.lance");
    write(&uri, 0..10, 10).await;
    let engine = Engine::new();
    let provider = engine
        .provider(&uri, TableOptions::default())
        .await
        .expect("opens");
    assert!(provider.followed().is_none());
    append(&uri, 10..20).await;
    let ctx = SessionContext::new();
    engine.register(&ctx);
    ctx.register_table("t", Arc::new(provider)).expect("free");
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [10]);
    assert_eq!(numbers(&ctx, "SELECT SUM(id) FROM t").await, [45]);
}
