//! The fixtures of an independent implementation: valid tables resolve to exactly what they list,
//! corrupt ones are refused by the operation that must notice.
//!
//! They lie beside the checkout, in `../shared/fixtures`; without them these tests do nothing, and
//! the tests of `tree` and `tree_scan` cover the same rules on trees made there.
#![expect(clippy::panic, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fragtree::{
    Engine, FragmentRanges, Snapshot, SnapshotProvider, SystemColumns, VersionRef, WalkOptions,
    WalkState,
};
use futures::TryStreamExt;
use lance_table::format::Fragment;
use prost::Message;
use serde_json::Value;

fn fixtures() -> Option<PathBuf> {
    let root = std::env::var_os("FRAGTREE_FIXTURES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures"),
        PathBuf::from,
    );
    if root.is_dir() {
        return Some(root);
    }
    eprintln!("no fixtures at {}: nothing is checked", root.display());
    None
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("readable")).expect("JSON")
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no {key}"))
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("no {key}"))
}

/// Copies a table, and rewrites base paths that begin with `/FIXTURES` to where its kind now lies.
fn copy_table(from: &Path, to: &Path, fixtures: &Path) {
    for entry in std::fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            std::fs::create_dir_all(&target).expect("a directory");
            copy_table(&entry.path(), &target, fixtures);
        } else {
            std::fs::create_dir_all(to).expect("a directory");
            let bytes = std::fs::read(entry.path()).expect("readable");
            let manifest = target.extension().is_some_and(|e| e == "manifest");
            let bytes = if manifest {
                relocate(&bytes, fixtures).unwrap_or(bytes)
            } else {
                bytes
            };
            std::fs::write(&target, bytes).expect("writable");
        }
    }
}

/// The manifest file with its base paths moved; nothing when it names none.
fn relocate(file: &[u8], fixtures: &Path) -> Option<Vec<u8>> {
    use lance_table::format::pb;
    let (body, footer) = file.split_at_checked(file.len().checked_sub(16)?)?;
    let position = usize::try_from(u64::from_le_bytes(footer[..8].try_into().ok()?)).ok()?;
    let mut manifest = pb::Manifest::decode(body.get(position + 4..)?).ok()?;
    let root = fixtures.canonicalize().ok()?;
    let mut moved = false;
    for base in &mut manifest.base_paths {
        if let Some(at) = base.path.find("/FIXTURES") {
            base.path
                .replace_range(at..at + "/FIXTURES".len(), root.to_str()?);
            moved = true;
        }
    }
    if !moved {
        return None;
    }
    let message = manifest.encode_to_vec();
    let mut out = body[..position].to_vec();
    out.extend_from_slice(&u32::try_from(message.len()).ok()?.to_le_bytes());
    out.extend_from_slice(&message);
    out.extend_from_slice(footer);
    Some(out)
}

async fn open(table: &Path, version: u64) -> fragtree::Result<Arc<Snapshot>> {
    let uri = table.to_str().expect("UTF-8");
    Engine::new()
        .open(uri, VersionRef::version(version), Default::default())
        .await
}

async fn resolve(
    snapshot: &Arc<Snapshot>,
    wanted: FragmentRanges,
) -> fragtree::Result<Vec<fragtree::ResolvedFragment>> {
    let batches: Vec<_> = snapshot
        .fragments(wanted, &WalkOptions::default(), &WalkState::default())
        .try_collect()
        .await?;
    Ok(batches.into_iter().flatten().collect())
}

async fn rows(snapshot: &Arc<Snapshot>, sql: &str) -> Vec<Value> {
    let ctx = datafusion::prelude::SessionContext::new();
    let provider = SnapshotProvider::try_new(Arc::clone(snapshot), SystemColumns::default())
        .expect("a provider");
    ctx.register_table("t", Arc::new(provider)).expect("free");
    let batches = ctx
        .sql(sql)
        .await
        .expect("plans")
        .collect()
        .await
        .expect("runs");
    let mut buffer = Vec::new();
    let mut writer = arrow::json::ArrayWriter::new(&mut buffer);
    writer
        .write_batches(&batches.iter().collect::<Vec<_>>())
        .expect("JSON");
    writer.finish().expect("JSON");
    if buffer.is_empty() {
        return Vec::new();
    }
    match serde_json::from_slice(&buffer).expect("JSON") {
        Value::Array(rows) => rows,
        other => panic!("{other}"),
    }
}

async fn check_valid(expected: &Value, table: &Path) {
    let name = text(expected, "name");
    let snapshot = open(table, number(expected, "version"))
        .await
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let counts = snapshot.counts().expect("valid").expect("known");
    assert_eq!(
        counts.fragments,
        number(expected, "num_fragments"),
        "{name}"
    );
    assert_eq!(counts.total_rows, number(expected, "total_rows"), "{name}");
    assert_eq!(
        counts.visible_rows,
        number(expected, "visible_rows"),
        "{name}"
    );
    let fragments = resolve(&snapshot, FragmentRanges::all())
        .await
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let ids: Vec<_> = fragments.iter().map(|f| u64::from(f.id())).collect();
    let listed: Vec<_> = expected["fragment_ids"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|v| v.as_u64().expect("an id"))
        .collect();
    assert_eq!(ids, listed, "{name}");
    for (fragment, listed) in fragments
        .iter()
        .zip(expected["fragments"].as_array().expect("a list"))
    {
        check_record(name, fragment, listed);
    }
    if let Some(listed) = expected["rows"].as_array() {
        check_rows(name, &snapshot, listed).await;
    }
}

fn check_record(name: &str, fragment: &fragtree::ResolvedFragment, listed: &Value) {
    let record = fragment.record().expect("a record");
    let label = format!("{name}, fragment {}", record.id);
    assert_eq!(
        fragment.fragment().expect("a fragment"),
        Fragment::try_from(record.clone()).expect("Lance takes it"),
        "{label}"
    );
    assert_eq!(
        record.physical_rows,
        number(listed, "physical_rows"),
        "{label}"
    );
    let paths: Vec<_> = record.files.iter().map(|f| f.path.as_str()).collect();
    let expected: Vec<_> = listed["files"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|f| text(f, "path"))
        .collect();
    assert_eq!(paths, expected, "{label}");
    for (file, expected) in record
        .files
        .iter()
        .zip(listed["files"].as_array().expect("a list"))
    {
        let ints = |key: &str| -> Vec<i32> {
            let list = expected[key].as_array().expect("a list");
            list.iter()
                .map(|v| i32::try_from(v.as_i64().expect("an int")).expect("32 bits"))
                .collect()
        };
        assert_eq!(file.fields, ints("field_ids"), "{label}");
        assert_eq!(file.column_indices, ints("column_indices"), "{label}");
        assert_eq!(
            file.file_size_bytes,
            number(expected, "file_size_bytes"),
            "{label}"
        );
    }
    let deleted = record.deletion_file.map(|d| d.num_deleted_rows);
    assert_eq!(
        deleted,
        listed["deletion_file"]["num_deleted_rows"].as_u64(),
        "{label}"
    );
    if let Some(hex) = listed["record_protobuf_hex"].as_str() {
        let bytes: Vec<u8> = (0..hex.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).expect("hex"))
            .collect();
        let expected =
            lance_table::format::pb::DataFragment::decode(bytes.as_slice()).expect("a record");
        assert_eq!(record, expected, "{label}");
    }
}

async fn check_rows(name: &str, snapshot: &Arc<Snapshot>, listed: &[Value]) {
    let found = rows(snapshot, "SELECT * FROM t ORDER BY id").await;
    assert_eq!(found.len(), listed.len(), "{name}");
    for (found, listed) in found.iter().zip(listed) {
        for (column, value) in listed.as_object().expect("a row") {
            // JSON leaves NULL columns out.
            let found = found.get(column).unwrap_or(&Value::Null);
            let same = match (found.as_f64(), value.as_f64()) {
                (Some(a), Some(b)) => (a - b).abs() < 1e-6,
                _ => found == value,
            };
            assert!(same, "{name}: {column} is {found}, listed {value}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn valid_tables_are_read_as_listed() {
    let Some(fixtures) = fixtures() else { return };
    let scratch = tempfile::tempdir().expect("a directory");
    let valid = scratch.path().join("valid");
    copy_table(&fixtures.join("valid"), &valid, scratch.path());
    let mut checked = 0;
    for entry in std::fs::read_dir(&valid).expect("a directory") {
        let path = entry.expect("an entry").path();
        if !path.to_string_lossy().ends_with(".expected.json") {
            continue;
        }
        let expected = json(&path);
        check_valid(&expected, &valid.join(text(&expected, "tree_table"))).await;
        // The flat twin through the same type.
        let flat = valid.join(text(&expected, "flat_table"));
        let flat = open(&flat, number(&expected, "flat_version"))
            .await
            .expect("opens");
        if let Some(listed) = expected["rows"].as_array() {
            check_rows(text(&expected, "name"), &flat, listed).await;
        }
        checked += 1;
    }
    assert!(checked >= 18, "{checked} tables");
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_the_prototype_are_read_as_listed() {
    let Some(fixtures) = fixtures() else { return };
    for entry in std::fs::read_dir(fixtures.join("reference")).expect("a directory") {
        let path = entry.expect("an entry").path();
        let expected = json(&path.join("expected.json"));
        let table = path.join(text(&expected, "tree_table"));
        check_valid(&expected, &table).await;
        for other in expected["other_versions"].as_array().into_iter().flatten() {
            let mut other = other.clone();
            let name = format!("{} at {}", text(&expected, "name"), other["version"]);
            other["name"] = Value::String(name);
            check_valid(&other, &table).await;
        }
    }
}

/// Runs one operation of a corrupt fixture as a reader would.
async fn operate(table: &Path, version: u64, operation: &str) -> fragtree::Result<()> {
    let snapshot = open(table, version).await?;
    match operation {
        "open" => {}
        "count" => {
            snapshot.counts()?;
        }
        "full_scan" => {
            resolve(&snapshot, FragmentRanges::all()).await?;
        }
        sql if sql.starts_with("SELECT") => {
            let provider = SnapshotProvider::try_new(snapshot, SystemColumns::ALL)?;
            let ctx = datafusion::prelude::SessionContext::new();
            ctx.register_table("t", Arc::new(provider)).expect("free");
            let run = async { ctx.sql(sql).await?.collect().await };
            let context = || format!("cannot run {sql}");
            run.await.map_err(|e| fragtree::Error::DataFusion {
                context: context(),
                source: Arc::new(e),
            })?;
        }
        point => {
            let id = point.strip_prefix("point:").expect("point:N");
            snapshot.fragment(id.parse().expect("an id")).await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn corrupt_tables_are_refused_where_they_must_be() {
    let Some(fixtures) = fixtures() else { return };
    let scratch = tempfile::tempdir().expect("a directory");
    copy_table(
        &fixtures.join("corrupt"),
        &scratch.path().join("corrupt"),
        scratch.path(),
    );
    // Foreign leaves of corrupt tables lie in a valid one.
    copy_table(
        &fixtures.join("valid"),
        &scratch.path().join("valid"),
        scratch.path(),
    );
    let mut wrong = Vec::new();
    let mut checked = 0;
    for entry in std::fs::read_dir(scratch.path().join("corrupt")).expect("a directory") {
        let path = entry.expect("an entry").path();
        let case = json(&path.join("case.json"));
        let table = path.join(text(&case, "table"));
        let version = number(&case, "version");
        let list = |key: &str| -> Vec<String> {
            let list = case[key].as_array().expect("a list");
            list.iter()
                .map(|v| v.as_str().expect("text").to_string())
                .collect()
        };
        let is_control = text(&case, "certainty") == "control";
        let may = if is_control {
            list("operations_that_may_fail")
        } else {
            Vec::new()
        };
        for operation in list("operations_that_must_fail") {
            checked += 1;
            match operate(&table, version, &operation).await {
                Ok(()) => wrong.push(format!("{}: {operation} was accepted", text(&case, "case"))),
                Err(fragtree::Error::Corrupt { .. } | fragtree::Error::Unsupported { .. }) => {}
                Err(e) => wrong.push(format!("{}: {operation}: {e}", text(&case, "case"))),
            }
        }
        // What no walk can take gives no rows to a query either.
        if list("operations_that_must_fail").contains(&"full_scan".into()) {
            checked += 1;
            if operate(&table, version, "SELECT * FROM t").await.is_ok() {
                wrong.push(format!("{}: SELECT * was accepted", text(&case, "case")));
            }
        }
        for operation in list("operations_not_affected").into_iter().chain(may) {
            checked += 1;
            if let Err(e) = operate(&table, version, &operation).await {
                wrong.push(format!(
                    "{}: {operation} need not notice: {e}",
                    text(&case, "case")
                ));
            }
        }
        // `verify` sees all of it, and nothing in a table that is whole.
        let report = fragtree::verify::verify(
            table.to_str().expect("UTF-8"),
            Default::default(),
            fragtree::OpenOptions::default().with_reference(VersionRef::version(version)),
            |_| {},
        )
        .await
        .expect("a report");
        checked += 1;
        if report.ok() != is_control {
            wrong.push(format!(
                "{}: verify: {:?}",
                text(&case, "case"),
                report.findings
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {checked} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(checked > 400, "{checked} operations");
}
