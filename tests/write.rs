//! Writing: the same changes on a flat table through Lance and on its twin with a tree, compared in
//! everything a reader can see.
#![expect(clippy::panic, reason = "helpers of tests")]

#[path = "common/probe.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod probe;

#[path = "write/cleanup.rs"]
mod cleanup;

#[path = "write/faults.rs"]
mod faults;

#[path = "write/merge.rs"]
mod merge;

#[path = "write/twin.rs"]
mod twin;

use datafusion::prelude::{col, lit};
use twin::{Change, Twin};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_change_is_the_same_on_both_twins() {
    for stable in [false, true] {
        let mut twin = Twin::make(stable).await;
        let changes = [
            Change::Append { rows: 7 },
            Change::Delete("id % 5 = 2".into()),
            Change::Delete("id between 10 and 24".into()),
            Change::Delete("id < -5".into()),
            Change::Update("id % 7 = 3".into(), "g".into(), "g + 100".into()),
            Change::Merge { from: 40, to: 55 },
            Change::Index("id".into()),
            Change::Append { rows: 12 },
            Change::OptimizeIndices,
            Change::Merge { from: 30, to: 70 },
            Change::AddNulls("n1".into()),
            Change::AddExpression("e1".into(), "id * 2".into()),
            Change::Backfill {
                column: "n1".into(),
                every: 2,
            },
            Change::Rename("e1".into(), "e2".into()),
            Change::Delete("g = 3".into()),
            Change::Compact,
            Change::Append { rows: 5 },
            Change::Narrow("g".into()),
            Change::Drop("e2".into()),
            Change::Config("k".into(), "v".into()),
            Change::SchemaMetadata("s".into(), "t".into()),
            Change::Update("true".into(), "g".into(), "1".into()),
            Change::DropIndex("id".into()),
            Change::Restore { back: 4 },
            Change::Append { rows: 3 },
            Change::Delete("true".into()),
            Change::Append { rows: 9 },
            Change::Overwrite { rows: 20 },
            Change::Append { rows: 2 },
        ];
        for change in changes {
            twin.apply(&change).await;
            twin.compare(&format!("{change:?}, stable row ids {stable}"))
                .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_sequences_are_the_same_on_both_twins() {
    let seeds = std::env::var("TWIN_SEEDS")
        .ok()
        .and_then(|s| s.parse().ok());
    for seed in 0..seeds.unwrap_or(4u64) {
        let mut twin = Twin::make(seed % 2 == 1).await;
        let mut random = twin::Random::new(seed);
        for step in 0..25 {
            let change = twin.random_change(&mut random);
            twin.apply(&change).await;
            twin.compare(&format!("seed {seed}, step {step}: {change:?}"))
                .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_tables_begin_as_trees() {
    for stable in [false, true] {
        let mut twin = Twin::create(stable).await;
        twin.compare("created").await;
        for change in [
            Change::Append { rows: 30 },
            Change::Delete("id % 3 = 0".into()),
            Change::Compact,
        ] {
            twin.apply(&change).await;
            twin.compare(&format!("created, {change:?}")).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clones_and_branches_go_their_own_way() {
    for stable in [false, true] {
        let mut twin = Twin::make(stable).await;
        // No index: Lance's own clones look for a compacted one in the source.
        for change in [
            Change::Delete("id % 4 = 1".into()),
            Change::Append { rows: 10 },
        ] {
            twin.apply(&change).await;
        }
        for mut copy in [
            twin.shallow_clone().await,
            twin.branch().await,
            twin.deep_clone().await,
        ] {
            copy.compare("a copy").await;
            for change in [
                Change::Delete("id < 30".into()),
                Change::Append { rows: 6 },
                Change::Update("id % 6 = 0".into(), "g".into(), "g + 1".into()),
                Change::Compact,
                Change::AddNulls("n".into()),
                Change::Delete("id > 100".into()),
            ] {
                copy.apply(&change).await;
                copy.compare(&format!("a copy, {change:?}")).await;
            }
        }
        twin.compare("the source of copies").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn optimizing_changes_nothing_but_the_tree() {
    let mut twin = Twin::make(false).await;
    let mut optimized = 0;
    for round in 0..6 {
        twin.apply(&Change::Append { rows: 9 }).await;
        let some = format!("id % 11 = {round}");
        twin.apply(&Change::Delete(some)).await;
        optimized += u32::from(twin.optimize().await);
        twin.compare("optimized").await;
    }
    assert!(optimized > 0, "never anything to gain");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updates_that_cannot_be_are_refused() {
    let twin = Twin::make(true).await;
    let table = twin.table();
    let before = table.latest().await.expect("opens").version();
    let refused = async |assignments: &[(&str, &str)], why: &str| {
        let error = table.update(Some("id < 9"), assignments).await;
        let error = error.expect_err(why).to_string();
        assert!(
            error.contains(why) && error.contains("tree.lance"),
            "{error}"
        );
    };
    refused(&[], "sets no column").await;
    refused(&[("g", "1"), ("g", "2")], "g of").await;
    refused(&[("nope", "1")], "has no column nope").await;
    refused(&[("id", "NULL")], "NOT NULL").await;
    refused(
        &[(
            "g",
            "CASE WHEN id = 1 THEN 9223372036854775807 ELSE 1e30 END",
        )],
        "cannot set g",
    )
    .await;
    assert_eq!(table.latest().await.expect("opens").version(), before);
    let data = format!("{}/data", twin.tree_uri());
    let files = std::fs::read_dir(data).expect("a folder").count();
    assert_eq!(files, 30, "nothing stays of what was refused");
    // By expressions, as a query engine has them.
    let by_expression = table
        .update_where(
            &[col("id").lt(lit(9))],
            &[("g".to_string(), col("id") + col("g"))],
        )
        .await
        .expect("updates");
    assert_eq!(by_expression.rows, 9);
    table
        .update_config(&[("lance.row_lineage.spill", Some("true"))])
        .await
        .expect("commits");
    refused(&[("g", "1")], "only Lance can carry over").await;
}
