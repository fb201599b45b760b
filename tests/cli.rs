//! The command line as a user meets it: what it prints, where, and how it ends.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside test functions"
)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, RecordBatchIterator, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use lance::Dataset;
use lance::dataset::WriteParams;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder with `t.lance`: 12 rows in 4 fragments, flat as version 1 and a tree as version 2.
struct Tables {
    folder: TempDir,
}

impl Tables {
    fn make() -> Self {
        let tables = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(write(&tables.uri()));
        let converted = tables.run(&["convert", &tables.uri(), "--force", "--leaf-bytes", "1KiB"]);
        assert!(converted.status.success(), "{}", stderr(&converted));
        tables
    }

    fn uri(&self) -> String {
        self.folder
            .path()
            .join("t.lance")
            .to_str()
            .unwrap()
            .to_string()
    }

    /// `t` and `flat` are the two layouts.
    fn sql(&self, args: &[&str]) -> Output {
        let (tree, flat) = (
            format!("t={}", self.uri()),
            format!("flat={}@1", self.uri()),
        );
        let mut all = vec!["sql", "--table", &tree, "--table", &flat];
        all.extend(args);
        self.run(&all)
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.run(args);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| {
            panic!("{args:?}: {e}: {} {}", stdout(&output), stderr(&output));
        })
    }

    fn run(&self, args: &[&str]) -> Output {
        fragtree(args, self.folder.path()).output().unwrap()
    }
}

fn fragtree(args: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fragtree"));
    command.args(args).current_dir(folder).env("HOME", folder);
    command
}

async fn write(uri: &str) {
    let schema = Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("name", DataType::Utf8, true),
    ]));
    let names = (0..12).map(|id| (id % 4 != 3).then(|| format!("n{id}")));
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(0..12)),
        Arc::new(names.collect::<StringArray>()),
    ];
    let batch = RecordBatch::try_new(Arc::clone(&schema), columns).unwrap();
    let params = WriteParams {
        max_rows_per_file: 3,
        ..Default::default()
    };
    let rows = RecordBatchIterator::new([Ok(batch)], schema);
    Dataset::write(rows, uri, Some(params)).await.unwrap();
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Output of a run that must go well.
fn good(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{} {}",
        stdout(output),
        stderr(output)
    );
    stdout(output)
}

#[test]
fn answers_the_same_on_both_layouts() {
    let tables = Tables::make();
    for table in ["t", "flat"] {
        let sql = format!(
            "SELECT COUNT(*) AS n FROM {table}; SELECT id, name FROM {table} WHERE id IN (2, 3) ORDER BY id"
        );
        let text = good(&tables.sql(&["-q", "-c", &sql]));
        assert_eq!(
            text,
            "+----+\n| n  |\n+----+\n| 12 |\n+----+\n\
             +----+------+\n| id | name |\n+----+------+\n| 2  | n2   |\n| 3  | NULL |\n+----+------+\n"
        );
    }
}

#[test]
fn machine_formats_hold_every_row_and_nothing_else() {
    let tables = Tables::make();
    let query = "SELECT id, name FROM t WHERE id >= 10 ORDER BY id";
    let run = |format| good(&tables.sql(&["--format", format, "-c", query]));
    assert_eq!(run("csv"), "id,name\n10,n10\n11,\n");
    let rows: Value = serde_json::from_str(&run("json")).unwrap();
    assert_eq!(
        rows,
        json!([{"id": 10, "name": "n10"}, {"id": 11, "name": null}])
    );
    assert_eq!(run("nd-json").lines().count(), 2);

    let empty = tables.sql(&[
        "-q",
        "--format",
        "json",
        "-c",
        "SELECT id FROM t WHERE id > 99",
    ]);
    assert_eq!(good(&empty), "[]\n");
    let many = tables.sql(&[
        "-q",
        "--format",
        "csv",
        "-c",
        "SELECT value FROM generate_series(1, 100000)",
    ]);
    assert_eq!(good(&many).lines().count(), 100_001);
}

#[test]
fn the_first_error_ends_a_command_with_a_message() {
    let tables = Tables::make();
    let output = tables.sql(&[
        "-q",
        "-c",
        "SELECT 1 AS a; SELECT nope FROM t; SELECT 2 AS b",
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("| a |") && !stdout(&output).contains("| b |"));
    let message = stderr(&output);
    assert!(
        message.starts_with("error: ") && message.contains("nope"),
        "{message}"
    );
    assert_eq!(message.lines().count(), 1, "{message}");

    for (table, code) in [("x=/no/such/table.lance", 1), ("x", 2)] {
        let output = tables.run(&["sql", "--table", table, "-c", "SELECT 1"]);
        assert_eq!(output.status.code(), Some(code), "{table}");
        assert!(stderr(&output).contains("error: "), "{}", stderr(&output));
    }
}

#[test]
fn files_run_statement_by_statement() {
    let tables = Tables::make();
    let script = tables.folder.path().join("script.sql");
    std::fs::write(
        &script,
        "#!/usr/bin/env fragtree\n-- it's; a comment\nCREATE VIEW v AS\n  SELECT id, ';' AS x FROM t;\n\
         SELECT COUNT(*) AS n FROM v WHERE x = ';'",
    )
    .unwrap();
    let script = script.to_str().unwrap();
    assert!(good(&tables.sql(&["-q", "-f", script])).contains("| 12 |"));
    let missing = tables.sql(&["-f", "missing.sql"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        stderr(&missing).contains("missing.sql"),
        "{}",
        stderr(&missing)
    );
}

#[test]
fn a_directory_gives_all_its_tables_and_takes_more() {
    let tables = Tables::make();
    let folder = tables.folder.path().to_str().unwrap();
    let sql =
        "SHOW TABLES; CREATE VIEW few AS SELECT id FROM t WHERE id < 2; SELECT COUNT(*) FROM few";
    let output = tables.run(&["sql", "-q", "--dir", folder, "--format", "csv", "-c", sql]);
    let text = good(&output);
    assert!(text.contains("datafusion,public,t,BASE TABLE"), "{text}");
    assert!(text.ends_with("\n2\n"), "{text}");
}

/// What never became a table is none: not what a failed statement leaves, no empty folder and no file.
#[test]
fn a_table_that_was_never_finished_is_not_there() {
    let tables = Tables::make();
    let sql =
        |command: &str| tables.run(&["sql", "--dir", ".", "--format", "csv", "-q", "-c", command]);
    let folder = tables.folder.path();
    let failed =
        sql("CREATE TABLE x AS SELECT 10 / (v - 500000) AS a FROM generate_series(1, 600000) g(v)");
    assert!(
        stderr(&failed).contains("Divide by zero"),
        "{}",
        stderr(&failed)
    );
    std::fs::create_dir(folder.join("hollow.lance")).unwrap();
    std::fs::write(folder.join("notes.lance"), "no table").unwrap();
    let listed =
        sql("SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'");
    let listed = good(&listed);
    for name in ["x", "hollow", "notes"] {
        assert!(!listed.lines().any(|l| l == name), "{name} in {listed}");
    }
    let columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 't'";
    assert!(good(&sql(columns)).contains("name"));
    let hollow = sql("SELECT * FROM hollow");
    assert!(
        stderr(&hollow).contains("hollow.lance"),
        "{}",
        stderr(&hollow)
    );
    // The name of one that failed is free.
    good(&sql("CREATE TABLE x AS SELECT 7 AS a"));
    let found = good(&sql("SELECT a + 35 AS n FROM x"));
    assert!(found.lines().any(|l| l == "42"), "{found}");
}

#[test]
fn a_directory_takes_new_tables_that_are_trees() {
    let tables = Tables::make();
    let sql = |commands: &[&str]| {
        let mut args = vec!["sql", "--dir", ".", "--format", "csv", "-q"];
        for command in commands {
            args.extend(["-c", command]);
        }
        tables.run(&args)
    };
    let made = sql(&[
        "CREATE TABLE big AS SELECT id, name FROM t WHERE id > 4",
        "CREATE TABLE IF NOT EXISTS big AS SELECT 1 AS x",
        "CREATE TABLE empty (id BIGINT NOT NULL, v VARCHAR)",
        "INSERT INTO empty VALUES (1, 'one'), (2, NULL)",
        "UPDATE big SET name = 'x' WHERE name IS NULL",
        "DELETE FROM big WHERE id = 5",
        "SELECT count(*), min(id), count(name) FROM big",
        "SELECT id, v FROM empty ORDER BY id",
        "SELECT DISTINCT layout FROM fragtree_versions('big')",
    ]);
    let text = good(&made);
    for line in ["6,6,6", "1,one", "2,", "tree"] {
        assert!(text.lines().any(|l| l == line), "{line} in {text}");
    }
    assert!(tables.folder.path().join("big.lance/_versions").is_dir());
    // One that is made by its location is a table of the directory too.
    let text = good(&sql(&[
        "CREATE EXTERNAL TABLE placed (id BIGINT) STORED AS LANCE LOCATION 'placed.lance'",
        "INSERT INTO placed VALUES (3)",
        "SELECT id + 39 AS n FROM placed",
        "CREATE EXTERNAL TABLE other STORED AS LANCE LOCATION 'placed.lance'",
        "DROP TABLE other",
    ]));
    assert!(text.lines().any(|l| l == "42"), "{text}");
    let table = tables.run(&["sql", "--dir", "placed.lance", "-c", "SHOW TABLES"]);
    assert!(!table.status.success());
    let said = stderr(&table);
    assert!(
        said.contains("is a Lance table and not a directory"),
        "{said}"
    );
    let misspelt = tables.run(&["inspect", "placed.lance", "--option", "regoin=eu"]);
    assert!(stderr(&misspelt).contains("unknown option \"regoin\""));
    // Another program sees them.
    let again = good(&sql(&["SELECT count(*) AS n FROM big"]));
    assert_eq!(again, "n\n6\n");
    for (statement, why) in [
        ("CREATE TABLE big AS SELECT 1 AS x", "already"),
        (
            "CREATE OR REPLACE TABLE big AS SELECT 1 AS x",
            "INSERT OVERWRITE",
        ),
        (
            "CREATE TABLE \"a/b\" AS SELECT 1 AS x",
            "cannot be the name",
        ),
        ("DROP TABLE big", "its files are not dropped from here"),
        (
            "DROP TABLE IF EXISTS big",
            "its files are not dropped from here",
        ),
        ("CREATE VIEW v AS SELECT 1; DROP TABLE v", "doesn't exist"),
        (
            "CREATE EXTERNAL TABLE placed STORED AS LANCE LOCATION 'placed.lance' OPTIONS (system_columns '_rowaddr')",
            "already",
        ),
    ] {
        let refused = sql(&[statement]);
        assert!(!refused.status.success(), "{statement}");
        assert!(stderr(&refused).contains(why), "{}", stderr(&refused));
    }
}

#[test]
fn optimizes_a_tree_once() {
    let tables = Tables::make();
    let uri = tables.uri();
    for id in 0..12 {
        let delete = format!("DELETE FROM t WHERE id = {id} AND id % 3 = 1");
        good(&tables.run(&["sql", "--table", &format!("t={uri}"), "-q", "-c", &delete]));
    }
    let first = tables.json(&["optimize", &uri, "--format", "json"]);
    assert_eq!(first["table"], json!(uri));
    let again = tables.json(&["optimize", &uri, "--format", "json"]);
    assert_eq!(again["commit"], Value::Null, "{again}");
    let shown = good(&tables.run(&["optimize", &uri]));
    assert!(shown.contains("good shape"), "{shown}");
    let flat = tables.run(&["convert", &uri, "--to", "flat"]);
    good(&flat);
    let refused = tables.run(&["optimize", &uri]);
    assert!(!refused.status.success());
    assert!(
        stderr(&refused).contains("convert it first"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn creates_external_tables_with_options() {
    let tables = Tables::make();
    let create = |name: &str, options: &str| {
        let uri = tables.uri();
        format!(
            "CREATE EXTERNAL TABLE {name} STORED AS LANCE LOCATION '{uri}' OPTIONS ({options});"
        )
    };
    let sql = format!(
        "{} {} SELECT MAX(_fragid) AS f FROM e",
        create("e", "version '1', system_columns '_fragid'"),
        "EXPLAIN SELECT id FROM e;"
    );
    let text = good(&tables.run(&["sql", "-q", "-c", &sql]));
    assert!(text.contains("| 3 |") && text.contains("flat"), "{text}");

    let output = tables.run(&["sql", "-c", &create("e", "verzion '1'")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("verzion") && stderr(&output).contains("system_columns"));
}

#[test]
fn a_pipe_takes_statements_and_commands() {
    let tables = Tables::make();
    let input = format!(
        "CREATE EXTERNAL TABLE e STORED AS LANCE\n  LOCATION '{}' OPTIONS (version '2');\n\n-- its columns\n\\d e\nSELECT nope FROM e;\n\
         \\pset format csv\nSELECT id, ';' AS semi FROM e\nWHERE id = 7; -- done\nSELECT COUNT(*) AS n FROM e",
        tables.uri()
    );
    let mut child = fragtree(&["sql", "-q"], tables.folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let text = stdout(&output);
    assert!(
        text.contains("| datafusion    | public       | e          | id "),
        "{text}"
    );
    assert!(text.ends_with("id,semi\n7,;\nn\n12\n"), "{text}");
    assert!(stderr(&output).contains("nope"), "{}", stderr(&output));
    assert_eq!(output.status.code(), Some(1), "a statement failed");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let tables = Tables::make();
    let sql = "SELECT value FROM generate_series(1, 3000000)";
    let mut child = fragtree(
        &["sql", "-q", "--format", "csv", "-c", sql],
        tables.folder.path(),
    )
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), stderr(&output).as_str()),
        (Some(0), "")
    );
}

#[test]
fn the_demo_makes_a_table_that_the_readme_can_query() {
    let scratch = tempfile::tempdir().unwrap();
    let mut demo = fragtree(&["demo", "--fragments", "20"], scratch.path());
    let text = good(&demo.env("TMPDIR", scratch.path()).output().unwrap());
    assert!(
        text.contains("one row by address") && text.contains("of 20"),
        "{text}"
    );

    let made = std::fs::read_dir(scratch.path())
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let readme = include_str!("../README.md");
    let sql = readme
        .split("```sql\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let args = [
        "sql",
        "--table",
        "t=demo.lance",
        "--system-columns",
        "_rowaddr,_fragid",
        "-c",
        sql,
    ];
    let text = good(&fragtree(&args, &made).output().unwrap());
    assert!(
        text.contains("| 199 | Kyoto | 49.75  |") && text.contains("leaves_opened=1"),
        "{text}"
    );
}

#[test]
fn a_session_sees_what_other_programs_commit() {
    let tables = Tables::make();
    let uri = tables.uri();
    let mut child = fragtree(
        &[
            "sql",
            "-q",
            "--format",
            "csv",
            "--table",
            &format!("t={uri}"),
            "--table",
            &format!("two={uri}@2"),
        ],
        tables.folder.path(),
    )
    .stdin(Stdio::piped())
    .stdout(Stdio::piped())
    .spawn()
    .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut trees = |of: &str| {
        let sql = format!("SELECT COUNT(*) > 0 AS n FROM fragtree_tree('{of}');");
        writeln!(input, "{sql}").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "n");
        lines.next().unwrap().unwrap()
    };
    assert_eq!((trees("t"), trees("two")), ("true".into(), "true".into()));
    good(&tables.run(&["convert", &uri, "--to", "flat"]));
    assert_eq!((trees("t"), trees("two")), ("false".into(), "true".into()));
    drop(input);
    assert!(child.wait().unwrap().success());

    let wrong = tables.run(&["sql", "--refresh", "soon", "-c", "SELECT 1"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        stderr(&wrong).contains("always nor off"),
        "{}",
        stderr(&wrong)
    );
    let off = ["--refresh", "off", "-c", "EXPLAIN SELECT id FROM t"];
    let text = good(&tables.sql(&off));
    assert!(text.contains("version=3 (pinned)"), "{text}");
}

#[test]
fn inspects_both_layouts() {
    let tables = Tables::make();
    let tree = tables.json(&["inspect", &tables.uri(), "--format", "json"]);
    assert_eq!(
        (&tree["layout"], &tree["version"]),
        (&json!("tree"), &json!(2))
    );
    assert_eq!(
        (&tree["fragments"], &tree["visible_rows"]),
        (&json!(4), &json!(12))
    );
    let levels = tree["tree"]["levels"].as_array().unwrap();
    let leaves = levels.last().unwrap();
    assert_eq!(
        (&leaves["kind"], &leaves["fragments"]),
        (&json!("leaf"), &json!(4))
    );

    let flat = tables.json(&[
        "inspect",
        &tables.uri(),
        "--version",
        "1",
        "--format",
        "json",
    ]);
    assert_eq!(
        (&flat["layout"], &flat["tree"]),
        (&json!("flat"), &Value::Null)
    );
    let text = good(&tables.run(&["inspect", &tables.uri()]));
    assert!(
        text.contains("layout        tree") && text.contains("leaf"),
        "{text}"
    );
}

#[test]
fn converts_there_and_back() {
    let tables = Tables::make();
    let dry = tables.json(&[
        "convert",
        &tables.uri(),
        "--to",
        "flat",
        "--dry-run",
        "--format",
        "json",
    ]);
    assert_eq!(dry["to_version"], Value::Null);
    let back = tables.json(&["convert", &tables.uri(), "--to", "flat", "--format", "json"]);
    assert_eq!(
        (&back["from_version"], &back["to_version"]),
        (&json!(2), &json!(3))
    );
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let rows = runtime.block_on(async {
        let table = Dataset::open(&tables.uri()).await.unwrap();
        table.count_rows(None).await.unwrap()
    });
    assert_eq!(rows, 12, "released Lance reads what came back");

    for size in ["--leaf-bytes", "--root-buffer-bytes"] {
        let senseless = tables.run(&["convert", &tables.uri(), "--to", "flat", size, "1k"]);
        assert_eq!(senseless.status.code(), Some(2));
    }
    let uri = tables.uri();
    let sizes = ["--buffer-bytes", "64k", "--since-root-bytes", "9000"];
    let shaped = [&["convert", &uri, "--force"], &sizes[..]].concat();
    let shaped = tables.run(&shaped);
    assert!(shaped.status.success(), "{shaped:?}");
    let tree = tables.json(&["inspect", &tables.uri(), "--format", "json"]);
    let size = |name: &str| &tree["config"][name];
    assert_eq!(size("fragtree.buffer_bytes"), "65536");
    assert_eq!(size("fragtree.since_root_bytes"), "9000");
}

#[test]
fn verify_lists_what_is_wrong() {
    let tables = Tables::make();
    let report = tables.json(&["verify", &tables.uri(), "--format", "json"]);
    assert_eq!(
        (&report["fragments"], &report["findings"]),
        (&json!(4), &json!([]))
    );

    // Half of each leaf is gone.
    let leaves: Vec<_> = std::fs::read_dir(Path::new(&tables.uri()).join("_bt/leaf"))
        .unwrap()
        .collect();
    assert!(!leaves.is_empty());
    for leaf in leaves {
        let path = leaf.unwrap().path();
        let half = std::fs::read(&path).unwrap();
        std::fs::write(&path, &half[..half.len() / 2]).unwrap();
    }
    let output = tables.run(&["verify", &tables.uri()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stdout(&output).contains("object_size"),
        "{}",
        stdout(&output)
    );
    assert_eq!(stderr(&output), "");
}

#[test]
fn cleanup_says_what_goes_and_removes_just_that() {
    let tables = Tables::make();
    let uri = tables.uri();
    let count = || {
        let versions = std::fs::read_dir(Path::new(&uri).join("_versions")).unwrap();
        let names = versions.map(|entry| entry.unwrap().file_name());
        names
            .filter(|name| name.to_str().unwrap().ends_with(".manifest"))
            .count()
    };
    // A week is the default, and everything is younger.
    let text = good(&tables.run(&["cleanup", &uri]));
    assert!(text.contains("0 versions, 0 files"), "{text}");

    let dry = ["cleanup", &uri, "--keep", "1", "--dry-run"];
    let text = good(&tables.run(&[&dry[..], &["--list", "9"]].concat()));
    assert!(text.contains("would go  1 version, 2 files"), "{text}");
    assert!(text.contains("_transactions/"), "{text}");
    assert_eq!(count(), 2);
    let mut foretold = tables.json(&[&dry[..], &["--format", "json"]].concat());
    let report = tables.json(&["cleanup", &uri, "--keep", "1", "--format", "json"]);
    assert_eq!(count(), 1);
    foretold["dry_run"] = json!(false);
    assert_eq!(foretold, report);
    assert_eq!(report["removed_versions"], json!([1]));
    assert_eq!(
        (&report["removed"][0]["kind"], &report["removed"][0]["why"]),
        (&json!("manifest"), &json!("version_removed"))
    );
    good(&tables.run(&["verify", &uri]));

    let gone = tables.run(&["inspect", &uri, "--version", "1"]);
    assert_eq!(gone.status.code(), Some(1));
    for senseless in [
        &["--older-than", "soon"][..],
        &["--before", "yesterday"],
        &["--keep", "few"],
    ] {
        let output = tables.run(&[&["cleanup", &uri], senseless].concat());
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    }
    let output = tables.run(&["cleanup", &uri, "--keep", "0"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("at least 1"),
        "{}",
        stderr(&output)
    );
}
