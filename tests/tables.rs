//! Whole tables through the public types: what queries cost in requests, faults, races, conversion.
#![expect(clippy::panic, reason = "helpers of tests")]

#[path = "tables/freshness.rs"]
mod freshness;
#[path = "common/probe.rs"]
mod probe;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arrow::array::{AsArray, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, UInt64Type};
use datafusion::catalog::TableProvider;
use datafusion::physical_plan::{ExecutionPlan, collect};
use datafusion::prelude::{SessionConfig, SessionContext};
use fragtree::write::{ConvertOptions, ConvertReport, TreePolicy, convert};
use fragtree::{
    Engine, EngineOptions, Error, FragmentRanges, Layout, OpenOptions, Refresh, RowAddrSet,
    RowAddressPlan, Snapshot, SnapshotProvider, SystemColumns, TableOptions, VersionRef,
};
use futures::{FutureExt, StreamExt, TryStreamExt};
use lance::Dataset;
use lance::dataset::{InsertBuilder, WriteMode, WriteParams};
use lance::index::DatasetIndexExt;
use lance_index::IndexType;
use lance_index::scalar::ScalarIndexParams;
use prost::Message;

use probe::{Act, Probe};

fn batch(ids: std::ops::Range<i64>) -> RecordBatch {
    let schema = Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("g", DataType::Int64, true),
        Field::new("name", DataType::Utf8, true),
    ]);
    let names: StringArray = ids.clone().map(|i| Some(format!("name {i}"))).collect();
    RecordBatch::try_new(
        Arc::new(schema),
        vec![
            Arc::new(Int64Array::from_iter_values(ids.clone())),
            Arc::new(Int64Array::from_iter_values(ids.map(|i| i % 10))),
            Arc::new(names),
        ],
    )
    .expect("a batch")
}

fn params(rows_per_file: usize, mode: WriteMode) -> WriteParams {
    WriteParams {
        max_rows_per_file: rows_per_file,
        max_rows_per_group: rows_per_file,
        mode,
        ..Default::default()
    }
}

async fn write(uri: &str, ids: std::ops::Range<i64>, rows_per_file: usize) -> Dataset {
    InsertBuilder::new(uri)
        .with_params(&params(rows_per_file, WriteMode::Create))
        .execute(vec![batch(ids)])
        .await
        .expect("written")
}

async fn append(uri: &str, ids: std::ops::Range<i64>) {
    InsertBuilder::new(uri)
        .with_params(&params(10, WriteMode::Append))
        .execute(vec![batch(ids)])
        .await
        .expect("appended");
}

/// Small objects, so that a small table has several levels.
fn small() -> ConvertOptions {
    ConvertOptions {
        policy: TreePolicy {
            leaf_bytes: 5000,
            node_bytes: 600,
            inline_root_bytes: 0,
            min_fragments: 0,
            ..TreePolicy::default()
        },
        ..ConvertOptions::to_tree()
    }
}

async fn to_tree(uri: &str) -> ConvertReport {
    convert(uri, small(), OpenOptions::default())
        .await
        .expect("converted")
}

fn engine(probe: &Probe) -> Engine {
    Engine::with_options(EngineOptions {
        object_store_wrapper: Some(Arc::new(probe.clone())),
        ..Default::default()
    })
}

/// A location whose every access goes through the object store, where a probe sees it.
fn probed(dir: &Path) -> String {
    format!("file-object-store://{}", dir.to_str().expect("UTF-8"))
}

async fn session(engine: &Engine, uri: &str) -> SessionContext {
    session_of(engine, uri, Refresh::Always).await
}

/// A session whose table does not look for newer versions, and so costs only what queries touch.
async fn pinned_session(engine: &Engine, uri: &str) -> SessionContext {
    session_of(engine, uri, Refresh::Off).await
}

async fn session_of(engine: &Engine, uri: &str, refresh: Refresh) -> SessionContext {
    let config = SessionConfig::new()
        .with_target_partitions(2)
        .with_information_schema(true);
    let ctx = SessionContext::new_with_config(config);
    engine.register(&ctx);
    let options = TableOptions {
        system_columns: SystemColumns::ALL,
        refresh,
        ..Default::default()
    };
    engine
        .register_table(&ctx, "t", uri, options)
        .await
        .expect("opens");
    ctx
}

async fn numbers(ctx: &SessionContext, sql: &str) -> Vec<i64> {
    try_numbers(ctx, sql)
        .await
        .unwrap_or_else(|e| panic!("{sql}: {e}"))
}

async fn try_numbers(ctx: &SessionContext, sql: &str) -> datafusion::error::Result<Vec<i64>> {
    let batches = ctx.sql(sql).await?.collect().await?;
    let mut numbers = Vec::new();
    for batch in batches {
        let column = batch.column(0);
        match column.as_primitive_opt::<Int64Type>() {
            Some(column) => numbers.extend(column.values()),
            None => numbers.extend(
                column
                    .as_primitive::<UInt64Type>()
                    .values()
                    .iter()
                    .map(|v| i64::try_from(*v).expect("small")),
            ),
        }
    }
    Ok(numbers)
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_cost_what_they_touch() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    write(uri, 0..2000, 5).await;
    let report = to_tree(uri).await;
    assert!(report.height >= 2, "{report:?}");
    assert!(!report.root_inline);

    let probe = Probe::default();
    let ctx = pinned_session(&engine(&probe), &probed(&dir)).await;
    assert_eq!(
        probe.count(".manifest"),
        2,
        "the manifest's tail, and that there is no next one"
    );
    assert_eq!(probe.count("_bt/root"), 1);
    assert_eq!(probe.count(""), 4, "and the version hint");

    probe.reset();
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [2000]);
    assert_eq!(numbers(&ctx, "SELECT COUNT(id) FROM t").await, [2000]);
    assert_eq!(probe.count(""), 0, "counts come from the root");

    let address = 77u64 << 32 | 3;
    let sql = format!("SELECT id FROM t WHERE _rowaddr = {address}");
    ctx.sql(&format!("EXPLAIN {sql}"))
        .await
        .expect("plans")
        .collect()
        .await
        .expect("runs");
    assert_eq!(probe.count(""), 0, "planning reads nothing");
    assert_eq!(numbers(&ctx, &sql).await, [77 * 5 + 3]);
    assert_eq!(probe.count("_bt/leaf"), 1);
    assert!(probe.count("_bt/node") < u64::from(report.height));
    let opened = probe.count("/data/");
    probe.reset();
    assert_eq!(numbers(&ctx, &sql).await, [77 * 5 + 3]);
    assert_eq!(probe.count("_bt"), 0, "the cache has the path");
    assert!(probe.count("/data/") <= opened);

    probe.reset();
    assert_eq!(
        numbers(
            &ctx,
            "SELECT COUNT(*) FROM t WHERE _fragid BETWEEN 20 AND 119"
        )
        .await,
        [500]
    );
    assert_eq!(probe.count("/data/"), 0);
    assert!(probe.count("_bt/leaf") <= 2, "only cut leaves");

    // Row counts inside a fragment by arithmetic, and of a non-null column too.
    probe.reset();
    let cut = format!(
        "_rowaddr >= {} AND _rowaddr < {}",
        (20u64 << 32) | 3,
        (119u64 << 32) | 2
    );
    let expected = 2 + 98 * 5 + 2;
    for count in ["COUNT(*)", "COUNT(id)"] {
        let sql = format!("SELECT {count} FROM t WHERE {cut}");
        assert_eq!(numbers(&ctx, &sql).await, [expected]);
    }
    assert_eq!(probe.count("/data/"), 0);
}

/// A metric of a plan and of those below it.
fn metric(plan: &Arc<dyn ExecutionPlan>, name: &str) -> u64 {
    let own = plan
        .metrics()
        .and_then(|m| m.sum_by_name(name))
        .map_or(0, |v| v.as_usize() as u64);
    let below = plan.children().into_iter();
    own + below.map(|child| metric(child, name)).sum::<u64>()
}

/// Files larger than a block, of several columns: Lance reads each in several places.
#[tokio::test(flavor = "multi_thread")]
async fn a_plan_reports_the_requests_the_store_sees() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    write(uri, 0..60_000, 20_000).await;
    for layout in [Layout::Flat, Layout::Tree] {
        if layout == Layout::Tree {
            to_tree(uri).await;
        }
        let probe = Probe::default();
        let ctx = pinned_session(&engine(&probe), &probed(&dir)).await;
        for (sql, leaves) in [
            ("SELECT * FROM t", 1),
            ("SELECT name FROM t WHERE g = 3", 0),
        ] {
            probe.reset();
            let plan = ctx.sql(sql).await.expect("plans");
            let plan = plan.create_physical_plan().await.expect("plans");
            collect(Arc::clone(&plan), ctx.task_ctx())
                .await
                .expect("runs");
            let data = probe.count("/data/");
            assert!(data >= 6, "{layout}: {sql}: {data}");
            assert_eq!(metric(&plan, "data_requests"), data, "{layout}: {sql}");
            let tree = probe.count("_bt/leaf");
            assert_eq!(metric(&plan, "tree_requests"), tree, "{layout}: {sql}");
            // What the first query opened, the second finds in the cache.
            let expected = if layout == Layout::Tree { leaves } else { 0 };
            assert_eq!(tree, expected, "{layout}: {sql}");
        }
    }
}

/// Small pages of a local file are read together; who chooses a block size has it.
#[tokio::test(flavor = "multi_thread")]
async fn parts_of_a_local_file_that_are_close_are_read_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    write(dir.to_str().expect("UTF-8"), 0..16_000, 4000).await;
    let requests = async |block_size: Option<&str>| {
        let probe = Probe::default();
        let ctx = SessionContext::new();
        let chosen = block_size.map(|size| ("block_size".to_string(), size.to_string()));
        let options = TableOptions {
            storage_options: chosen.into_iter().collect(),
            ..Default::default()
        };
        engine(&probe)
            .register_table(&ctx, "t", &probed(&dir), options)
            .await
            .expect("opens");
        let sum = numbers(&ctx, "SELECT SUM(id + g + length(name)) FROM t").await;
        (sum, probe.count("/data/"))
    };
    let (sum, four) = requests(Some("4096")).await;
    // The end of each file, what its pages are made of, and the pages.
    assert_eq!(requests(None).await, (sum.clone(), 4 * 3));
    assert_eq!(requests(Some("16384")).await, (sum, 4 * 3));
    assert!(four > 4 * 3, "{four}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_fragments_count_through_their_deletion_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    let mut dataset = write(uri, 0..400, 20).await;
    dataset.delete("id % 3 = 0").await.expect("deleted");
    for layout in [Layout::Flat, Layout::Tree] {
        if layout == Layout::Tree {
            to_tree(uri).await;
        }
        let probe = Probe::default();
        let ctx = session(&engine(&probe), &probed(&dir)).await;
        for (from, to) in [(7, 391), (0, 1), (33, 34), (100, 120), (5, 6)] {
            let address = |id: u64| (id / 20) << 32 | (id % 20);
            let sql = format!(
                "SELECT COUNT(*) FROM t WHERE _rowaddr >= {} AND _rowaddr < {}",
                address(from),
                address(to)
            );
            let expected = (from..to).filter(|id| id % 3 != 0).count();
            let expected = i64::try_from(expected).expect("small");
            assert_eq!(
                numbers(&ctx, &sql).await,
                [expected],
                "{layout} {from}..{to}"
            );
        }
        assert_eq!(probe.count("/data/"), 0, "{layout}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_addresses_in_a_list() {
    let dir = tempfile::tempdir().expect("a directory");
    let uri = dir.path().join("t.lance");
    let uri = uri.to_str().expect("UTF-8");
    write(uri, 0..20_000, 100).await;
    to_tree(uri).await;
    let ctx = session(&Engine::new(), uri).await;
    let addresses: Vec<_> = (0..20_000u64)
        .step_by(2)
        .map(|id| ((id / 100) << 32 | (id % 100)).to_string())
        .collect();
    let sql = format!(
        "SELECT SUM(id) FROM t WHERE _rowaddr IN ({})",
        addresses.join(", ")
    );
    assert_eq!(
        numbers(&ctx, &sql).await,
        [(0..20_000).step_by(2).sum::<i64>()]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_made_by_hand_reads_its_rows() {
    let dir = tempfile::tempdir().expect("a directory");
    let uri = dir.path().join("t.lance");
    let uri = uri.to_str().expect("UTF-8");
    write(uri, 0..100, 10).await;
    to_tree(uri).await;
    let engine = Engine::new();
    let provider = engine
        .provider(uri, TableOptions::default())
        .await
        .expect("opens");
    let ctx = SessionContext::new();
    let ids = |plan: RowAddressPlan, limit| {
        let (provider, ctx) = (provider.clone(), ctx.clone());
        async move {
            let plan = provider
                .scan_plan(&ctx.state(), plan, Some(&vec![0, 0]), limit)
                .await
                .expect("plans");
            let batches = collect(plan, ctx.task_ctx()).await.expect("runs");
            let ids = batches
                .iter()
                .flat_map(|b| b.column(1).as_primitive::<Int64Type>().values().to_vec());
            let mut ids: Vec<_> = ids.collect();
            ids.sort_unstable();
            ids
        }
    };
    let fragments = FragmentRanges::from_ids([2, 9]);
    let expected: Vec<_> = (20..30).chain(90..100).collect();
    assert_eq!(
        ids(RowAddressPlan::from_fragments(fragments), None).await,
        expected
    );
    let rows = RowAddrSet::from_addrs([3 << 32 | 1, 7 << 32 | 9, 7 << 32 | 10, 99 << 32]);
    assert_eq!(
        ids(RowAddressPlan::from_rows(rows.clone()), None).await,
        [31, 79]
    );
    assert_eq!(ids(RowAddressPlan::from_rows(rows), Some(1)).await.len(), 1);
    let mut map = lance::dataset::scanner::RowAddrTreeMap::new();
    map.insert_fragment(4);
    map.insert(5 << 32);
    let expected: Vec<_> = (40..51).collect();
    assert_eq!(
        ids(RowAddressPlan::from_row_addr_map(&map), None).await,
        expected
    );
    assert!(
        ids(RowAddressPlan::from_rows(RowAddrSet::empty()), None)
            .await
            .is_empty()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_queries_share_one_provider() {
    let dir = tempfile::tempdir().expect("a directory");
    let uri = dir.path().join("t.lance");
    let uri = uri.to_str().expect("UTF-8");
    write(uri, 0..640, 10).await;
    to_tree(uri).await;
    let engine = Engine::with_options(EngineOptions {
        cache_bytes: 64 << 10,
        ..Default::default()
    });
    let ctx = session(&engine, uri).await;
    let queries = (0..64i64).map(|q| {
        let ctx = ctx.clone();
        async move {
            let sql = format!(
                "SELECT SUM(id) FROM t WHERE _fragid = {q} OR _fragid = {}",
                63 - q
            );
            let sum = |f: i64| (f * 10..f * 10 + 10).sum::<i64>();
            assert_eq!(numbers(&ctx, &sql).await, [sum(q) + sum(63 - q)]);
        }
    });
    futures::stream::iter(queries)
        .buffer_unordered(64)
        .collect::<Vec<_>>()
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_store_is_asked_again_and_a_dead_one_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    write(uri, 0..200, 5).await;
    to_tree(uri).await;
    for (times, works) in [(2, true), (usize::MAX, false)] {
        let failures = Arc::new(AtomicUsize::new(0));
        let probe = Probe::hooked(move |_, location| {
            let fails =
                location.contains("_bt/leaf") && failures.fetch_add(1, Ordering::SeqCst) < times;
            let act = if fails { Act::Busy } else { Act::Pass };
            async move { act }.boxed()
        });
        let ctx = session(&engine(&probe), &probed(&dir)).await;
        let result = try_numbers(&ctx, "SELECT SUM(id) FROM t").await;
        match result {
            Ok(sum) => assert!(works && sum == [(0..200).sum::<i64>()]),
            Err(e) => {
                assert!(!works, "{e}");
                assert!(e.to_string().contains("_bt/leaf"), "names the object: {e}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_data_file_fails_only_who_reads_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let uri = dir.path().join("t.lance");
    let uri = uri.to_str().expect("UTF-8");
    let dataset = write(uri, 0..100, 10).await;
    let file = dataset.fragments()[4].files[0].path.clone();
    for layout in [Layout::Flat, Layout::Tree] {
        if layout == Layout::Tree {
            to_tree(uri).await;
        }
        let path = Path::new(uri).join("data").join(&file);
        let bytes = std::fs::read(&path).expect("readable");
        std::fs::remove_file(&path).expect("removed");
        let ctx = session(&Engine::new(), uri).await;
        let error = try_numbers(&ctx, "SELECT SUM(id) FROM t")
            .await
            .expect_err("missing");
        let error = error.to_string();
        assert!(error.contains(&file), "names the file: {error}");
        assert!(error.contains("version"), "and the version: {error}");
        let sql = "SELECT SUM(id) FROM t WHERE _fragid < 4";
        assert_eq!(numbers(&ctx, sql).await, [(0..40).sum::<i64>()]);
        assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [100]);
        std::fs::write(&path, bytes).expect("written");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_query_stops_its_requests() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    write(uri, 0..2000, 10).await;
    to_tree(uri).await;
    let probe = Probe::slow(Duration::from_millis(20));
    let ctx = session(&engine(&probe), &probed(&dir)).await;
    let mut stream = ctx
        .sql("SELECT id, name FROM t")
        .await
        .expect("plans")
        .execute_stream()
        .await
        .expect("starts");
    stream.next().await.expect("a batch").expect("rows");
    drop(stream);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let before = probe.count("");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(probe.count(""), before, "nothing goes on");
    assert_eq!(
        numbers(&ctx, "SELECT COUNT(*) FROM t WHERE g = 3").await,
        [200]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversion_loses_a_race_and_starts_over() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8").to_string();
    write(&uri, 0..100, 10).await;
    let raced = Arc::new(AtomicUsize::new(0));
    let other = uri.clone();
    let probe = Probe::hooked(move |verb, location| {
        let first = verb == "put"
            && location.contains("_versions")
            && raced.fetch_add(1, Ordering::SeqCst) == 0;
        let other = other.clone();
        async move {
            if first {
                append(&other, 100..150).await;
            }
            Act::Pass
        }
        .boxed()
    });
    let report = convert(&probed(&dir), small(), engine(&probe).open_options())
        .await
        .expect("converted");
    assert_eq!((report.from_version, report.to_version), (2, Some(3)));
    assert_eq!(report.visible_rows, 150);
    let ctx = session(&Engine::new(), &uri).await;
    assert_eq!(
        numbers(&ctx, "SELECT SUM(id) FROM t").await,
        [(0..150).sum::<i64>()]
    );
    let verified =
        fragtree::verify::verify(&uri, Default::default(), OpenOptions::default(), |_| {})
            .await
            .expect("readable");
    assert!(verified.ok(), "{verified:?}");
    // What the lost attempt wrote is gone again.
    let objects = walk(&dir.join("_bt"));
    assert_eq!(
        objects as u64,
        report.leaves + report.nodes + u64::from(!report.root_inline)
    );
}

/// What no query need notice: files that are gone or cut, and a version under another's name.
#[tokio::test(flavor = "multi_thread")]
async fn verify_lists_what_is_wrong_with_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    let mut dataset = write(uri, 0..40, 10).await;
    dataset.delete("id % 20 = 15").await.expect("deleted");
    to_tree(uri).await;
    let files = |of: &str| {
        let entries = std::fs::read_dir(dir.join(of)).expect("a directory");
        let mut files: Vec<_> = entries.map(|e| e.expect("an entry").path()).collect();
        files.sort();
        files
    };
    let data = files("data");
    std::fs::remove_file(&data[0]).expect("removed");
    std::fs::write(&data[1], b"cut").expect("written");
    // One that says nothing readable; the other deletes what it should.
    let deletions = files("_deletions");
    assert_eq!(deletions.len(), 2);
    std::fs::write(&deletions[0], b"hello world").expect("written");
    for layout in [Layout::Tree, Layout::Flat] {
        let version = if layout == Layout::Tree { 3 } else { 2 };
        let options = OpenOptions::default().with_reference(VersionRef::version(version));
        let report = fragtree::verify::verify(uri, Default::default(), options, |_| {})
            .await
            .expect("a report");
        let mut rules: Vec<_> = report.findings.iter().map(|f| f.rule.as_str()).collect();
        rules.sort_unstable();
        let expected = ["deletion_file_undecodable", "file_missing", "file_size"];
        assert_eq!(rules, expected, "{layout}");
    }

    let manifests = files("_versions");
    // Versions are named from the greatest number down, so that the latest comes first.
    let latest = manifests
        .iter()
        .find(|m| m.extension().is_some_and(|e| e == "manifest"));
    let latest = latest.expect("three versions");
    let name = latest
        .file_stem()
        .and_then(|s| s.to_str())
        .expect("a number");
    let next = name.parse::<u64>().expect("a number") - 1;
    let renamed = dir.join(format!("_versions/{next:020}.manifest"));
    std::fs::copy(latest, renamed).expect("copied");
    let opened = Snapshot::open(uri, OpenOptions::default()).await;
    let error = opened.expect_err("version 3 as version 4");
    assert_eq!(error.corrupt_rule(), Some("manifest_version"), "{error}");
}

fn walk(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).expect("a directory");
    entries
        .map(|e| e.expect("an entry").path())
        .map(|p| if p.is_dir() { walk(&p) } else { 1 })
        .sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ambiguous_commit_is_settled_by_reading_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    write(uri, 0..100, 10).await;
    let probe = Probe::hooked(|verb, location| {
        let act =
            if verb == "put" && location.contains("_versions") && location.ends_with(".manifest") {
                Act::DoneButFailed
            } else {
                Act::Pass
            };
        async move { act }.boxed()
    });
    let report = convert(&probed(&dir), small(), engine(&probe).open_options())
        .await
        .expect("the version is there");
    assert_eq!(report.to_version, Some(2));
    let ctx = session(&Engine::new(), uri).await;
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [100]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_conversion_leaves_the_table_as_it_was() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    write(uri, 0..500, 5).await;
    // Every put in turn fails for good.
    for failing in 0.. {
        let puts = Arc::new(AtomicUsize::new(0));
        let probe = Probe::hooked(move |verb, _| {
            let fails = verb == "put" && puts.fetch_add(1, Ordering::SeqCst) == failing;
            let act = if fails { Act::Busy } else { Act::Pass };
            async move { act }.boxed()
        });
        let outcome = convert(&probed(&dir), small(), engine(&probe).open_options()).await;
        let ctx = session(&Engine::new(), uri).await;
        assert_eq!(
            numbers(&ctx, "SELECT SUM(id) FROM t").await,
            [(0..500).sum::<i64>()]
        );
        if let Ok(report) = outcome {
            assert!(failing > 3, "{failing} puts");
            assert_eq!(report.to_version, Some(2));
            break;
        }
    }
}

async fn flat_fragments(uri: &str, version: u64) -> Vec<lance_table::format::pb::DataFragment> {
    let snapshot = Engine::new()
        .open(uri, VersionRef::version(version), Default::default())
        .await
        .expect("opens");
    let batches: Vec<_> = snapshot
        .fragments(
            FragmentRanges::all(),
            &Default::default(),
            &Default::default(),
        )
        .try_collect()
        .await
        .expect("valid");
    let fragments = batches.into_iter().flatten();
    fragments.map(|f| f.record().expect("a record")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn converting_there_and_back_loses_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let uri = dir.path().join("t.lance");
    let uri = uri.to_str().expect("UTF-8");
    let mut dataset = write(uri, 0..200, 10).await;
    dataset.delete("id % 7 = 0").await.expect("deleted");
    dataset
        .create_index(
            &["id"],
            IndexType::BTree,
            None,
            &ScalarIndexParams::default(),
            true,
        )
        .await
        .expect("indexed");
    dataset
        .update_config([("owner", "me")])
        .await
        .expect("configured");
    dataset
        .tags()
        .create("before", dataset.version_id())
        .await
        .expect("tagged");
    let before = dataset.version_id();
    let dataset = Dataset::open(uri).await.expect("opens");
    let indexes = dataset.load_indices().await.expect("readable");

    let tree = to_tree(uri).await;
    assert_eq!(tree.from_version, before);
    let refused = Dataset::open(uri)
        .await
        .expect_err("released Lance refuses a tree");
    assert!(refused.to_string().contains("cannot be read"), "{refused}");
    let snapshot = Snapshot::open(uri, OpenOptions::default())
        .await
        .expect("opens");
    assert_eq!(snapshot.layout(), Layout::Tree);
    assert_eq!(
        *snapshot.shell().load_indices().await.expect("readable"),
        *indexes
    );
    let again = convert(uri, small(), OpenOptions::default())
        .await
        .expect_err("a tree already");
    assert!(matches!(again, Error::InvalidInput { .. }), "{again}");

    let options = ConvertOptions::to_flat();
    let flat = convert(uri, options, OpenOptions::default())
        .await
        .expect("converted");
    let dataset = Dataset::open(uri).await.expect("Lance opens it again");
    assert_eq!(Some(dataset.version_id()), flat.to_version);
    assert_eq!(dataset.count_rows(None).await.expect("counts"), 171);
    assert_eq!(*dataset.load_indices().await.expect("readable"), *indexes);
    assert_eq!(dataset.config()["owner"], "me");
    let version = flat.to_version.expect("published");
    assert_eq!(
        flat_fragments(uri, before).await,
        flat_fragments(uri, version).await
    );
    assert_eq!(
        flat_fragments(uri, before).await,
        flat_fragments(uri, before + 1).await
    );
    let tagged = Engine::new()
        .open(uri, VersionRef::tag("before"), Default::default())
        .await
        .expect("opens");
    assert_eq!(tagged.version(), before);
    // And a native write goes on from there.
    append(uri, 200..210).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_says_sizes_and_writes_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    write(uri, 0..200, 10).await;
    let dry = ConvertOptions {
        dry_run: true,
        ..small()
    };
    let dry = convert(uri, dry, OpenOptions::default())
        .await
        .expect("worked out");
    assert_eq!(dry.to_version, None);
    assert!(!dir.join("_bt").exists());
    let declined = convert(uri, ConvertOptions::to_tree(), OpenOptions::default()).await;
    assert!(
        declined
            .expect_err("too few")
            .to_string()
            .contains("--force")
    );
    let wet = to_tree(uri).await;
    assert_eq!(
        (dry.leaves, dry.leaf_bytes, dry.height),
        (wet.leaves, wet.leaf_bytes, wet.height)
    );
}

/// Rewrites the manifest of version 1 as writers before 0.5 left it: unnamed, with wrong counts.
fn spoil_row_counts(dir: &Path) {
    use lance_table::format::pb;
    let versions = std::fs::read_dir(dir.join("_versions")).expect("a directory");
    let path = versions
        .map(|e| e.expect("an entry").path())
        .find(|p| p.extension().is_some_and(|e| e == "manifest"))
        .expect("a manifest");
    let file = std::fs::read(&path).expect("readable");
    let (body, footer) = file.split_at(file.len() - 16);
    let position = u64::from_le_bytes(footer[..8].try_into().expect("8 bytes"));
    let position = usize::try_from(position).expect("small");
    let mut manifest = pb::Manifest::decode(&body[position + 4..]).expect("a manifest");
    manifest.writer_version = None;
    for (index, fragment) in manifest.fragments.iter_mut().enumerate() {
        fragment.physical_rows = if index % 2 == 0 { 0 } else { 3 };
    }
    let message = manifest.encode_to_vec();
    let mut out = body[..position].to_vec();
    out.extend_from_slice(&u32::try_from(message.len()).expect("small").to_le_bytes());
    out.extend_from_slice(&message);
    out.extend_from_slice(footer);
    std::fs::write(&path, out).expect("written");
}

#[tokio::test(flavor = "multi_thread")]
async fn row_counts_nobody_trusts_are_read_from_the_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("t.lance");
    let uri = dir.to_str().expect("UTF-8");
    write(uri, 0..95, 10).await;
    spoil_row_counts(&dir);
    let ctx = session(&Engine::new(), uri).await;
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [95]);
    let sql = "SELECT COUNT(*) FROM t WHERE _rowaddr >= 4294967299";
    assert_eq!(numbers(&ctx, sql).await, [95 - 13]);
    let report = to_tree(uri).await;
    assert_eq!((report.rows_recounted, report.total_rows), (10, 95));
    let ctx = session(&Engine::new(), uri).await;
    assert_eq!(numbers(&ctx, "SELECT COUNT(*) FROM t").await, [95]);
    assert_eq!(numbers(&ctx, sql).await, [95 - 13]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_named_with_what_is_near() {
    let dir = tempfile::tempdir().expect("a directory");
    let uri = dir.path().join("there.lance");
    let uri = uri.to_str().expect("UTF-8");
    let dataset = write(uri, 0..10, 10).await;
    dataset.tags().create("good", 1).await.expect("tagged");
    append(uri, 10..20).await;
    let open = |uri: String, reference: VersionRef| async move {
        let error = Engine::new()
            .open(&uri, reference, Default::default())
            .await;
        let error = error.expect_err("missing");
        assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
        error.to_string()
    };
    let near = dir
        .path()
        .join("their.lance")
        .to_str()
        .expect("UTF-8")
        .to_string();
    assert!(
        open(near, VersionRef::latest())
            .await
            .contains("there.lance")
    );
    let version = open(uri.into(), VersionRef::version(9)).await;
    assert!(version.contains("near it: 1, 2"), "{version}");
    assert!(
        open(uri.into(), VersionRef::tag("bad"))
            .await
            .contains("good")
    );
    assert!(
        open(uri.into(), VersionRef::branch("side"))
            .await
            .contains("no branch")
    );
    let old = "2001-01-01".parse().expect("a time");
    assert!(open(uri.into(), old).await.contains("the oldest is from"));
    let now = VersionRef::timestamp(chrono::Utc::now());
    let latest = Engine::new()
        .open(uri, now, Default::default())
        .await
        .expect("opens");
    assert_eq!(latest.version(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_refuses_a_projection_outside_its_schema() {
    let dir = tempfile::tempdir().expect("a directory");
    let uri = dir.path().join("t.lance");
    let uri = uri.to_str().expect("UTF-8");
    write(uri, 0..10, 10).await;
    let snapshot = Snapshot::open(uri, OpenOptions::default())
        .await
        .expect("opens");
    let provider = SnapshotProvider::try_new(snapshot, SystemColumns::default()).expect("made");
    let ctx = SessionContext::new();
    let outside = provider.scan(&ctx.state(), Some(&vec![7]), &[], None).await;
    assert!(outside.is_err());
}
