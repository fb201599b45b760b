//! The catalogue of test tables. Names are those of the recipes in `behaviours.md`; a suffix says in
//! which state the table is.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float32Array, Int64Array, LargeBinaryArray, RecordBatch, StringArray,
};
use arrow::array::{FixedSizeListArray, ListArray};
use arrow::datatypes::{DataType, Field, Float32Type, Int32Type, Schema};
use chrono::SecondsFormat;
use fragtree::{Engine, Layout, VersionRef};
use lance::Dataset;
use lance::blob::{BlobArrayBuilder, blob_field};
use lance::dataset::{ColumnAlteration, NewColumnTransform, UpdateBuilder, WriteParams};
use lance_file::version::LanceFileVersion;

use super::{append, create, not_null, per_file, rows, small_tree, text, to_flat, to_tree};

/// A folder of tables.
struct Folder<'a>(&'a Path);

impl Folder<'_> {
    fn uri(&self, name: &str) -> String {
        text(&self.0.join(format!("{name}.lance")))
    }

    /// A table of the rows of a query, with so many in each fragment.
    async fn table(
        &self,
        name: &str,
        rows_per_file: usize,
        required: &[&str],
        sql: &str,
    ) -> Dataset {
        self.with(name, per_file(rows_per_file), required, sql)
            .await
    }

    async fn with(&self, name: &str, params: WriteParams, required: &[&str], sql: &str) -> Dataset {
        let rows = not_null(&rows(sql).await, required);
        create(&self.uri(name), rows, params).await
    }
}

async fn delete(dataset: &mut Dataset, predicate: &str) {
    dataset.delete(predicate).await.expect("deletes");
}

fn stable(rows_per_file: usize) -> WriteParams {
    WriteParams {
        enable_stable_row_ids: true,
        ..per_file(rows_per_file)
    }
}

fn stored_as(rows_per_file: usize, version: LanceFileVersion) -> WriteParams {
    WriteParams {
        data_storage_version: Some(version),
        ..per_file(rows_per_file)
    }
}

/// Makes the tables whose files may be copied to another place. Gives variables for test files.
pub(crate) async fn make_all(folder: &Path) -> BTreeMap<String, String> {
    let at = Folder(folder);
    let mut variables = BTreeMap::new();
    counted(&at, &mut variables).await;
    identified(&at).await;
    evolved(&at).await;
    named(&at).await;
    nested(&at).await;
    emptied(&at).await;
    typed(&at).await;
    extended(&at).await;
    stored(&at).await;
    placed(&folder.join("paths")).await;
    branched_in_place(&folder.join("branches")).await;
    variables
}

const T1: &str = "SELECT value AS id, value % 10 AS g FROM range(0, 1000)";

/// Counts, limits and deletions.
async fn counted(at: &Folder<'_>, variables: &mut BTreeMap<String, String>) {
    at.table("t1", 100, &["id"], T1).await;
    let mut t1_del = at.table("t1_del", 100, &["id"], T1).await;
    delete(&mut t1_del, "id % 7 = 0").await;
    let mut stable_del = at.with("t1_stable_del", stable(100), &["id"], T1).await;
    delete(&mut stable_del, "id % 7 = 0").await;

    // The data file of fragment 4 is lost.
    let gone = at.table("t1_gone", 100, &["id"], T1).await;
    let lost = gone.get_fragment(4).expect("a fragment").metadata().files[0]
        .path
        .clone();
    std::fs::remove_file(at.0.join("t1_gone.lance/data").join(&lost)).expect("removed");
    variables.insert("GONE_FILE".into(), lost);

    let ids = |n: u32| format!("SELECT value AS id FROM range(0, {n})");
    let mut t3 = at.table("t3", 250, &["id"], &ids(1000)).await;
    delete(&mut t3, "id < 100").await;
    let mut t3_big = at.table("t3_big", 5000, &["id"], &ids(10_000)).await;
    delete(&mut t3_big, "id < 1000").await;
    at.table("big", 50_000, &["id"], &ids(150_000)).await;
    at.table(
        "t4",
        100,
        &["id"],
        "SELECT value AS id, 'A' AS topic, value >= 950 AS night FROM range(0, 1000)",
    )
    .await;
    let t6 = "SELECT id, value, arrow_cast(n, 'Int32') AS n FROM (VALUES \
              (0, true, 1), (1, false, 5), (2, NULL, NULL)) AS t(id, value, n)";
    at.table("t6", 100, &["id"], t6).await;
    at.table("t6_apart", 1, &["id"], t6).await;
    at.table(
        "d",
        100,
        &["k"],
        "SELECT k, v FROM (VALUES (1, 1), (998, 998)) AS d(k, v)",
    )
    .await;
    // 200 fragments of 5 rows; rows are deleted everywhere, and fragments 50 to 59 altogether.
    let mut many = at
        .table(
            "many",
            5,
            &["id"],
            "SELECT value AS id, CASE WHEN value % 4 = 0 THEN NULL \
             ELSE concat('n', value % 3) END AS s FROM range(0, 1000)",
        )
        .await;
    delete(&mut many, "id % 11 = 0 OR (id >= 250 AND id < 300)").await;
}

/// Row ids and addresses.
async fn identified(at: &Folder<'_>) {
    let twelve = "SELECT value AS id FROM range(0, 12)";
    at.with("t11", stable(4), &["id"], twelve).await;
    at.table("t11_unstable", 4, &["id"], twelve).await;
    // An update moves row 5 to fragment 3, where it keeps its stable id.
    for (name, params) in [
        ("t11_moved", stable(4)),
        ("t11_unstable_moved", per_file(4)),
    ] {
        let sql = "SELECT value AS id, 'old' AS v FROM range(0, 12)";
        let moved = at.with(name, params, &["id"], sql).await;
        UpdateBuilder::new(Arc::new(moved))
            .update_where("id = 5")
            .and_then(|update| update.set("v", "'new'"))
            .and_then(|update| update.build())
            .expect("an update")
            .execute()
            .await
            .expect("updates");
    }
    at.table(
        "own_fragid",
        4,
        &["id"],
        "SELECT value AS id, value * 2 AS \"_fragid\" FROM range(0, 12)",
    )
    .await;
}

/// Columns that came, went, and changed their names and types.
async fn evolved(at: &Folder<'_>) {
    let scores = "SELECT value * 5 AS score FROM range(0, 20)";
    for name in ["t16_renamed", "t16"] {
        let mut t16 = at.table(name, 10, &[], scores).await;
        let rename = ColumnAlteration::new("score".into()).rename("grade".into());
        t16.alter_columns(&[rename]).await.expect("renames");
        if name == "t16" {
            let c = Schema::new(vec![Field::new("c", DataType::Utf8, true)]);
            t16.add_columns(NewColumnTransform::AllNulls(Arc::new(c)), None, None)
                .await
                .expect("adds");
            let more = "SELECT arrow_cast(NULL, 'Int64') AS grade, 'x' AS c FROM range(0, 3)";
            append(&mut t16, &rows(more).await, 10).await;
        }
    }

    // Files hold (c, a, b), then (c) again; the table says (a, b, c). Later files hold (a, b, c).
    let columns = "SELECT concat('c', value) AS c, 9 - value AS a, value AS b FROM range(0, 5)";
    let mut t28 = at.table("t28", 3, &[], columns).await;
    let copy = NewColumnTransform::SqlExpressions(vec![("c2".into(), "c".into())]);
    t28.add_columns(copy, None, None).await.expect("adds");
    t28.drop_columns(&["c"]).await.expect("drops");
    let rename = ColumnAlteration::new("c2".into()).rename("c".into());
    t28.alter_columns(&[rename]).await.expect("renames");
    let more = "SELECT 9 - value AS a, value AS b, concat('c', value) AS c FROM range(5, 10)";
    append(&mut t28, &rows(more).await, 3).await;

    // `v` goes and another `v` of another type comes; rows of before are NULL in it.
    let mut again = at
        .table(
            "readded",
            5,
            &["id"],
            "SELECT value AS id, value AS v FROM range(0, 10)",
        )
        .await;
    again.drop_columns(&["v"]).await.expect("drops");
    let v = Schema::new(vec![Field::new("v", DataType::Utf8, true)]);
    again
        .add_columns(NewColumnTransform::AllNulls(Arc::new(v)), None, None)
        .await
        .expect("adds");
    let more = "SELECT value AS id, concat('v', value) AS v FROM range(10, 15)";
    append(&mut again, &rows(more).await, 5).await;

    // An INT becomes a BIGINT, by files of its own; other rows come after.
    let sql = "SELECT value AS id, arrow_cast(value, 'Int32') AS n FROM range(0, 10)";
    let mut widened = at.table("widened", 5, &["id"], sql).await;
    delete(&mut widened, "id = 3").await;
    let cast = ColumnAlteration::new("n".into()).cast_to(DataType::Int64);
    widened.alter_columns(&[cast]).await.expect("casts");
    let more = "SELECT value AS id, value * 1000000000000 AS n FROM range(10, 15)";
    append(&mut widened, &rows(more).await, 5).await;
}

/// Names that need care.
async fn named(at: &Folder<'_>) {
    // Lance refuses a top-level column `a.b`.
    at.table(
        "t26",
        2,
        &[],
        "SELECT * FROM (VALUES ('D', 1, 10, 'x', 'p', 'u'), ('R', 2, 20, 'y', 'q', 'v'), \
         ('R', 3, 30, 'z', 'r', 'w'), ('D', 4, 40, NULL, 's', 'z')) AS \
         t(\"PartyAbbrev\", \"user-id\", \"a:b\", \"select\", \"With Space\", \"größe\")",
    )
    .await;
    // Lance itself cannot scan all columns of this one.
    at.table(
        "t26_tick",
        2,
        &["id"],
        "SELECT value AS id, value * 1.5 AS \"tick`ed\" FROM range(0, 4)",
    )
    .await;
    at.table(
        "t13",
        100,
        &["id"],
        "SELECT * FROM (VALUES (1, 'a', 0), (2, 'b', 1), (3, 'c', 0), (4, 'd', 1)) \
         AS t(id, name, flag)",
    )
    .await;
}

/// Structs and lists.
async fn nested(at: &Folder<'_>) {
    let age = "named_struct('basic', named_struct('age', arrow_cast(value % 50, 'Int32')))";
    at.table(
        "t23",
        50,
        &["id"],
        &format!("SELECT value AS id, {age} AS p FROM range(0, 200)"),
    )
    .await;
    at.table(
        "t23_null",
        50,
        &["id"],
        &format!(
            "SELECT value AS id, CASE WHEN value % 10 = 0 THEN NULL ELSE {age} END AS p \
             FROM range(0, 200)"
        ),
    )
    .await;
    let sub = |v: &str| {
        format!(
            "named_struct('second', make_array(named_struct('third', named_struct('v', \
             arrow_cast({v}, 'Int32')), 's', concat('s', {v}))))"
        )
    };
    at.table(
        "t29",
        10,
        &[],
        &format!("SELECT 'test' AS item, {} AS sub", sub("7")),
    )
    .await;
    at.table(
        "t29_more",
        2,
        &[],
        &format!(
            "SELECT concat('i', value) AS item, {} AS sub FROM range(0, 5)",
            sub("value")
        ),
    )
    .await;
}

/// Nothing, and next to nothing.
async fn emptied(at: &Folder<'_>) {
    let thousand = "SELECT value AS id, concat('n', value) AS name FROM range(0, 1000)";
    for (name, predicates) in [
        ("t30_none", &["true"][..]),
        ("t30_again", &["true"]),
        ("t30_ends", &["id IN (249, 499, 749, 999)"]),
        (
            "t30_hole",
            &["id IN (249, 499, 749, 999)", "id >= 250 AND id < 500"],
        ),
    ] {
        let mut t30 = at.table(name, 250, &["id"], thousand).await;
        for predicate in predicates {
            delete(&mut t30, predicate).await;
        }
        if name == "t30_again" {
            let more = "SELECT value AS id, concat('n', value) AS name FROM range(0, 20)";
            append(&mut t30, &not_null(&rows(more).await, &["id"]), 250).await;
        }
    }
    let none = "SELECT value AS id, concat('n', value) AS name FROM range(0, 0)";
    at.table("t30_new", 250, &["id"], none).await;
}

/// Every type that Lance stores.
async fn typed(at: &Folder<'_>) {
    // From 2024-01-01T00:00.
    let hour = "arrow_cast(1704067200 + value * 3600, 'Timestamp(Second, None)')";
    at.table(
        "t18",
        24,
        &["h"],
        &format!(
            "SELECT value AS h, {hour} AS s, \
             arrow_cast({hour}, 'Timestamp(Millisecond, None)') AS ms, \
             arrow_cast({hour}, 'Timestamp(Microsecond, None)') AS us, \
             arrow_cast({hour}, 'Timestamp(Nanosecond, None)') AS ns, \
             arrow_cast(arrow_cast({hour}, 'Timestamp(Microsecond, None)'), \
             'Timestamp(Microsecond, Some(\"UTC\"))') AS utc FROM range(0, 72)"
        ),
    )
    .await;
    at.table(
        "t20",
        2,
        &[],
        "SELECT arrow_cast(d, 'Decimal128(7, 2)') AS d, arrow_cast(day, 'Date32') AS day FROM \
         (VALUES ('99.99', '2024-01-01'), ('100.00', '2024-01-02'), ('150.50', '2024-01-03'), \
         (NULL, '2024-01-04')) AS t(d, day)",
    )
    .await;
    at.table(
        "t38",
        50,
        &["u"],
        "SELECT arrow_cast(value, 'UInt32') AS u, arrow_cast(arrow_cast(3726 + value, 'Int32'), \
         'Time32(Second)') AS tm, arrow_cast(CASE WHEN value = 0 THEN 'a' ELSE concat('b', value) \
         END, 'LargeUtf8') AS ls FROM range(0, 100)",
    )
    .await;
    for (name, columns, values) in TYPED {
        let (fields, casts): (Vec<_>, Vec<_>) = columns
            .iter()
            .map(|(field, ty)| (*field, format!("arrow_cast({field}, '{ty}') AS {field}")))
            .unzip();
        let sql = format!(
            "SELECT {} FROM (VALUES {values}) AS t({})",
            casts.join(", "),
            fields.join(", ")
        );
        at.table(name, 2, &["id"], &sql).await;
    }
    at.table(
        "types_nested",
        2,
        &["id"],
        "SELECT 0 AS id, make_array(1, NULL, 3) AS l, arrow_cast(make_array('a', 'b'), \
         'LargeList(Utf8)') AS ll, arrow_cast(make_array(1.0, 2.0), 'FixedSizeList(2, Float32)') \
         AS f, named_struct('x', 1, 'y', 'one') AS st, make_array(named_struct('k', 1), \
         named_struct('k', 2)) AS ls, make_array(make_array(1, 2), make_array(3)) AS nl \
         UNION ALL SELECT 1, make_array(), make_array(), NULL, NULL, NULL, NULL \
         UNION ALL SELECT 2, NULL, NULL, make_array(-1.5, 0.0), named_struct('x', NULL, 'y', NULL), \
         make_array(), make_array(make_array(9)) ORDER BY id",
    )
    .await;
}

/// Tables of plain types: name, columns with Arrow types, and rows as text.
type Typed = (
    &'static str,
    &'static [(&'static str, &'static str)],
    &'static str,
);

const TYPED: [Typed; 4] = [
    (
        "types_numbers",
        &[
            ("id", "Int32"),
            ("i8", "Int8"),
            ("i16", "Int16"),
            ("i64", "Int64"),
            ("u8", "UInt8"),
            ("u16", "UInt16"),
            ("u32", "UInt32"),
            ("u64", "UInt64"),
            ("f16", "Float16"),
            ("f32", "Float32"),
            ("f64", "Float64"),
            ("d128", "Decimal128(38, 10)"),
            ("d256", "Decimal256(50, 5)"),
        ],
        "('0', '-128', '-32768', '-9223372036854775808', '0', '0', '0', '0', '-1.5', '-1.5', 'NaN', \
          '-1234567890123456789.0123456789', '-1.5'), \
         ('1', '127', '32767', '9223372036854775807', '255', '65535', '4294967295', \
          '18446744073709551615', '2.5', '2.5', 'inf', '1234567890123456789.0123456789', \
          '123456789012345678901234567890.12345'), \
         ('2', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL), \
         ('3', '0', '0', '0', '1', '1', '1', '1', '0', '0', '-0.0', '0', '0')",
    ),
    (
        "types_text",
        &[
            ("id", "Int32"),
            ("b", "Boolean"),
            ("t", "Utf8"),
            ("lt", "LargeUtf8"),
            ("bin", "Binary"),
            ("lbin", "LargeBinary"),
        ],
        "('0', 'true', 'abc', 'abc', 'abc', 'abc'), ('1', 'false', '', '', '', ''), \
         ('2', NULL, NULL, NULL, NULL, NULL), ('3', 'true', 'größe 表', '表', '表', '表')",
    ),
    (
        "types_time",
        &[
            ("id", "Int32"),
            ("d32", "Date32"),
            ("d64", "Date64"),
            ("t32s", "Time32(Second)"),
            ("t32ms", "Time32(Millisecond)"),
            ("t64us", "Time64(Microsecond)"),
            ("t64ns", "Time64(Nanosecond)"),
        ],
        "('0', '1969-12-31', '1969-12-31', '01:02:06', '01:02:06.007', '01:02:06.000007', \
          '01:02:06.000000007'), ('1', '2024-02-29', '2024-02-29', '23:59:59', '23:59:59.999', \
          '23:59:59.999999', '23:59:59.999999999'), ('2', NULL, NULL, NULL, NULL, NULL, NULL)",
    ),
    (
        "types_dictionary",
        &[("id", "Int32"), ("c", "Dictionary(Int32, Utf8)")],
        "('0', 'red'), ('1', 'blue'), ('2', NULL), ('3', 'red'), ('4', 'green')",
    ),
];

fn marked(field: Field, key: &str, value: &str) -> Field {
    field.with_metadata(HashMap::from([(key.to_string(), value.to_string())]))
}

/// Blobs, JSON and vectors.
async fn extended(at: &Folder<'_>) {
    let ids = || -> ArrayRef { Arc::new(Int64Array::from(vec![1, 2, 3])) };
    let id = || Field::new("id", DataType::Int64, false);
    let data = [Some(b"first".as_slice()), None, Some(b"third one")];

    let blob = marked(
        Field::new("blob", DataType::LargeBinary, true),
        "lance-encoding:blob",
        "true",
    );
    let columns = vec![
        ids(),
        Arc::new(LargeBinaryArray::from(data.to_vec())) as ArrayRef,
    ];
    let rows = batch(vec![id(), blob], columns);
    create(
        &at.uri("t37_blob"),
        rows,
        stored_as(2, LanceFileVersion::V2_1),
    )
    .await;

    let mut blobs = BlobArrayBuilder::new(3);
    for value in data {
        match value {
            Some(value) => blobs.push_bytes(value),
            None => blobs.push_null(),
        }
        .expect("a blob");
    }
    let columns = vec![ids(), blobs.finish().expect("blobs")];
    let rows = batch(vec![id(), blob_field("blob", true)], columns);
    create(
        &at.uri("t37_blob2"),
        rows,
        stored_as(2, LanceFileVersion::V2_2),
    )
    .await;

    let json = marked(
        Field::new("doc", DataType::Utf8, true),
        "ARROW:extension:name",
        "arrow.json",
    );
    let docs = StringArray::from(vec![Some(r#"{"a":1}"#), None, Some(r#"[true,"x"]"#)]);
    let rows = batch(vec![id(), json], vec![ids(), Arc::new(docs)]);
    create(
        &at.uri("t37_json"),
        rows,
        stored_as(2, LanceFileVersion::V2_2),
    )
    .await;

    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let floats = Float32Array::from_iter_values((1..=12_u8).map(f32::from));
    let vectors = FixedSizeListArray::new(Arc::clone(&item), 4, Arc::new(floats), None);
    let vec = Field::new("vec", vectors.data_type().clone(), true);
    let tags = ListArray::from_iter_primitive::<Int32Type, _, _>([
        Some(vec![Some(1)]),
        None,
        Some(vec![]),
    ]);
    let weights = ListArray::from_iter_primitive::<Float32Type, _, _>([
        Some(vec![Some(0.5), None]),
        Some(vec![]),
        None,
    ]);
    let fields = vec![
        id(),
        vec,
        Field::new("tags", tags.data_type().clone(), true),
        Field::new("weights", weights.data_type().clone(), true),
    ];
    let columns: Vec<ArrayRef> = vec![ids(), Arc::new(vectors), Arc::new(tags), Arc::new(weights)];
    create(&at.uri("t37_vector"), batch(fields, columns), per_file(2)).await;
}

use arrow::array::Array;

fn batch(fields: Vec<Field>, columns: Vec<ArrayRef>) -> RecordBatch {
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).expect("a batch")
}

/// Every data file version that the linked Lance writes, and the older names of manifests.
async fn stored(at: &Folder<'_>) {
    let sql = "SELECT value AS id, concat('s', value % 5) AS s, \
               CASE WHEN value % 3 = 0 THEN NULL ELSE value / 2.0 END AS x FROM range(0, 40)";
    for (name, version) in [
        ("file_legacy", LanceFileVersion::Legacy),
        ("file_2_0", LanceFileVersion::V2_0),
        ("file_2_1", LanceFileVersion::V2_1),
        ("file_2_2", LanceFileVersion::V2_2),
        ("file_2_3", LanceFileVersion::V2_3),
    ] {
        let mut table = at.with(name, stored_as(10, version), &[], sql).await;
        delete(&mut table, "id % 7 = 0").await;
    }
    let old_names = WriteParams {
        enable_v2_manifest_paths: false,
        ..per_file(10)
    };
    let mut table = at.with("manifest_v1", old_names, &[], sql).await;
    delete(&mut table, "id % 7 = 0").await;
}

/// Folder names that need care.
pub(crate) const PLACES: [&str; 5] = ["my table", "表", "100%25", "a+b~c", "q?x#y"];

/// Tables in folders with such names. They get the names afterwards, so that what Lance makes of
/// one does not matter.
async fn placed(folder: &Path) {
    std::fs::create_dir_all(folder).expect("a folder");
    for (index, name) in PLACES.iter().enumerate() {
        let plain = folder.join(format!("plain{index}"));
        let sql = format!("SELECT value AS id FROM range(0, {})", 10 + index);
        let rows = not_null(&rows(&sql).await, &["id"]);
        create(&text(&plain), rows, per_file(4)).await;
        std::fs::rename(plain, folder.join(name)).expect("renamed");
    }
}

/// A table with a branch in a folder whose name needs care. The branch names the table by the path it
/// had when it was made, so that path stays as a link.
async fn branched_in_place(folder: &Path) {
    std::fs::create_dir_all(folder).expect("a folder");
    let (plain, odd) = (folder.join("plain"), folder.join("q?x#y"));
    let ids = |from: u32, to: u32| format!("SELECT value AS id FROM range({from}, {to})");
    let first = not_null(&rows(&ids(0, 10)).await, &["id"]);
    let mut main = create(&text(&plain), first, per_file(4)).await;
    let mut dev = main.create_branch("dev", 1, None).await.expect("branches");
    append(&mut dev, &not_null(&rows(&ids(10, 15)).await, &["id"]), 4).await;
    std::fs::rename(&plain, &odd).expect("renamed");
    std::os::unix::fs::symlink(&odd, &plain).expect("linked");
}

/// Makes the tables that are not the same in both layouts: with a history in the layout, or with
/// paths in them. Gives those that are not to be converted any more.
pub(crate) async fn make_own(
    folder: &Path,
    layout: Layout,
    variables: &mut BTreeMap<String, String>,
) -> Vec<String> {
    let at = Folder(folder);
    let history = historic(&at, layout, variables).await;
    let branched = branched(&at, layout).await;
    cloned(&at).await;
    vec![history, branched]
}

/// T24: 100 rows, then `id < 50` deleted, then `id >= 80` deleted. In the tree layout each of the
/// three states is a tree.
async fn historic(
    at: &Folder<'_>,
    layout: Layout,
    variables: &mut BTreeMap<String, String>,
) -> String {
    let uri = at.uri("t24");
    let sql = "SELECT value AS id FROM range(0, 100)";
    let mut t24 = at.table("t24", 25, &["id"], sql).await;
    let states = [
        ("FULL", None),
        ("HALF", Some("id < 50")),
        ("LAST", Some("id >= 80")),
    ];
    for (state, predicate) in states {
        if let Some(predicate) = predicate {
            delete(&mut t24, predicate).await;
        }
        let mut version = t24.version().version;
        if layout == Layout::Tree {
            let report = to_tree(&uri, small_tree(), VersionRef::latest()).await;
            version = report.expect("converts").to_version.expect("published");
            if state != "LAST" {
                to_flat(&uri).await.expect("converts");
                t24 = Dataset::open(&uri).await.expect("a flat version");
            }
        }
        let snapshot = Engine::new()
            .open(&uri, VersionRef::version(version), HashMap::new())
            .await;
        let time = snapshot.expect("opens").timestamp();
        variables.insert(format!("T24_{state}"), version.to_string());
        let time = time.to_rfc3339_opts(SecondsFormat::Nanos, true);
        variables.insert(format!("T24_{state}_TIME"), time);
        if state == "HALF" {
            let tags = t24.tags();
            tags.create("half", version).await.expect("tags");
            tags.create("gone", version).await.expect("tags");
            tags.delete("gone").await.expect("untags");
        }
    }
    uri
}

/// 100 rows; then 10 more on the main branch, and 50 more on the branch `dev`.
async fn branched(at: &Folder<'_>, layout: Layout) -> String {
    let ids = |from: u32, to: u32| format!("SELECT value AS id FROM range({from}, {to})");
    let uri = at.uri("branched");
    let mut main = at.table("branched", 25, &["id"], &ids(0, 100)).await;
    let mut dev = main.create_branch("dev", 1, None).await.expect("branches");
    append(
        &mut dev,
        &not_null(&rows(&ids(100, 150)).await, &["id"]),
        25,
    )
    .await;
    append(
        &mut main,
        &not_null(&rows(&ids(200, 210)).await, &["id"]),
        25,
    )
    .await;
    if layout == Layout::Tree {
        for reference in [VersionRef::latest(), VersionRef::branch("dev")] {
            to_tree(&uri, small_tree(), reference)
                .await
                .expect("converts");
        }
    }
    uri
}

/// A shallow clone of T1 with 20 rows of its own: most files are another table's.
async fn cloned(at: &Folder<'_>) {
    let mut t1 = Dataset::open(&at.uri("t1")).await.expect("opens");
    let version = t1.version().version;
    let clone = t1.shallow_clone(&at.uri("cloned"), version, None).await;
    let mut clone = clone.expect("clones");
    let more = "SELECT value AS id, value % 10 AS g FROM range(1000, 1020)";
    append(&mut clone, &not_null(&rows(more).await, &["id"]), 100).await;
    delete(&mut clone, "id < 10").await;
}
