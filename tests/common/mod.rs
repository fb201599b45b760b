//! Lance tables for tests: a catalogue of named ones, and what it takes to make others.
//!
//! Rows are written down as SQL and stored by Lance itself, so that a table is what any writer would
//! have left. Each table of the catalogue lies twice: in the flat layout, and converted to a tree
//! with objects so small that a few fragments have several leaves.
//!
//! ```text
//!  tables::make_all ─► flat/t1.lance ──copy──► tree/t1.lance ──convert──► its next version
//! ```
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod tables;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{RecordBatch, RecordBatchIterator};
use arrow::compute::concat_batches;
use arrow::datatypes::{Field, Schema};
use datafusion::prelude::{SessionConfig, SessionContext};
use fragtree::write::{ConvertOptions, ConvertReport, TreePolicy, convert};
use fragtree::{FragmentRanges, Layout, OpenOptions, Snapshot, VersionRef, WalkState};
use lance::Dataset;
use lance::dataset::WriteParams;
use tempfile::TempDir;

/// Rows made by a query over nothing.
pub(crate) async fn rows(sql: &str) -> RecordBatch {
    let mut config = SessionConfig::new().with_target_partitions(1);
    // Lance stores no string views.
    config.options_mut().sql_parser.map_string_types_to_utf8view = false;
    let ctx = SessionContext::new_with_config(config);
    let query = ctx.sql(sql).await.unwrap_or_else(|e| fail(sql, e));
    let schema = Arc::new(query.schema().as_arrow().clone());
    let batches = query.collect().await.unwrap_or_else(|e| fail(sql, e));
    let schema = batches.first().map_or(schema, RecordBatch::schema);
    concat_batches(&schema, &batches).expect("batches of one schema")
}

#[expect(clippy::panic, reason = "tests only")]
fn fail<T>(what: &str, error: impl std::fmt::Display) -> T {
    panic!("{what}: {error}")
}

/// The same rows with these columns NOT NULL and all others nullable.
pub(crate) fn not_null(rows: &RecordBatch, columns: &[&str]) -> RecordBatch {
    let schema = rows.schema();
    let fields: Vec<Field> = schema
        .fields()
        .iter()
        .map(|field| {
            let nullable = !columns.contains(&field.name().as_str());
            field.as_ref().clone().with_nullable(nullable)
        })
        .collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), rows.columns().to_vec())
        .expect("no NULL in these columns")
}

/// Writes files of this many rows, one for each fragment.
pub(crate) fn per_file(rows: usize) -> WriteParams {
    WriteParams {
        max_rows_per_file: rows,
        max_rows_per_group: rows,
        ..Default::default()
    }
}

/// Writes a new table.
pub(crate) async fn create(uri: &str, rows: RecordBatch, params: WriteParams) -> Dataset {
    let schema = rows.schema();
    let rows = RecordBatchIterator::new([Ok(rows)], schema);
    Dataset::write(rows, uri, Some(params))
        .await
        .unwrap_or_else(|e| fail(uri, e))
}

/// Appends rows, with the nullability the table asks for.
pub(crate) async fn append(dataset: &mut Dataset, rows: &RecordBatch, rows_per_file: usize) {
    let schema = Arc::new(Schema::from(dataset.schema()));
    let rows = RecordBatch::try_new(Arc::clone(&schema), rows.columns().to_vec())
        .unwrap_or_else(|e| fail(dataset.uri(), e));
    let rows = RecordBatchIterator::new([Ok(rows)], schema);
    let uri = dataset.uri().to_string();
    dataset
        .append(rows, Some(per_file(rows_per_file)))
        .await
        .unwrap_or_else(|e| fail(&uri, e));
}

/// A policy that gives ten fragments three leaves or so, and keeps the root in the manifest.
pub(crate) fn small_tree() -> TreePolicy {
    TreePolicy {
        leaf_bytes: 4352,
        node_bytes: 1 << 10,
        inline_root_bytes: 4 << 10,
        min_fragments: 0,
        ..TreePolicy::default()
    }
}

/// The policy for a table of the catalogue. Some have a root of its own, and `many` has several
/// levels over leaves of a dozen fragments.
fn policy_of(uri: &str) -> TreePolicy {
    let outside = TreePolicy {
        inline_root_bytes: 1,
        ..small_tree()
    };
    if uri.ends_with("/many.lance") {
        return TreePolicy {
            leaf_bytes: 5300,
            node_bytes: 300,
            ..outside
        };
    }
    if uri.contains("/t3") {
        outside
    } else {
        small_tree()
    }
}

/// Publishes the table as a tree of small objects.
pub(crate) async fn to_tree(
    uri: &str,
    policy: TreePolicy,
    reference: VersionRef,
) -> fragtree::Result<ConvertReport> {
    let options = ConvertOptions {
        policy,
        force: true,
        ..ConvertOptions::to_tree()
    };
    let open = OpenOptions::default().with_reference(reference);
    convert(uri, options, open).await
}

/// Publishes the table as a flat list.
pub(crate) async fn to_flat(uri: &str) -> fragtree::Result<ConvertReport> {
    convert(uri, ConvertOptions::to_flat(), OpenOptions::default()).await
}

/// Copies a folder with everything in it.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("a file");
        }
    }
}

/// The text of a path.
pub(crate) fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_string()
}

/// The catalogue, made: every table in both layouts, in a folder that goes with this value.
#[derive(Debug)]
pub(crate) struct Tables {
    scratch: TempDir,
    /// What test files may refer to, by layout: `${NAME}`.
    variables: BTreeMap<&'static str, BTreeMap<String, String>>,
    /// Tables that could not be converted, and why.
    pub problems: Vec<String>,
}

impl Tables {
    /// Makes all of them. Takes some seconds.
    pub(crate) async fn make() -> Self {
        let mut tables = Self {
            scratch: tempfile::tempdir().expect("a folder"),
            variables: BTreeMap::new(),
            problems: Vec::new(),
        };
        let flat = tables.folder(Layout::Flat);
        std::fs::create_dir_all(&flat).expect("a folder");
        let shared = tables::make_all(&flat).await;
        copy_folder(&flat, &tables.folder(Layout::Tree));
        for layout in [Layout::Flat, Layout::Tree] {
            let folder = tables.folder(layout);
            let mut variables = shared.clone();
            let done = tables::make_own(&folder, layout, &mut variables).await;
            if layout == Layout::Tree {
                tables.convert_all(&done).await;
            }
            // Edges on a path of the tree, and with it nodes between root and leaf, and levels.
            let height = tables.height(layout, "many").await;
            let inner = height.saturating_sub(1);
            variables.insert("MANY_HEIGHT".into(), height.to_string());
            variables.insert("MANY_INNER".into(), inner.to_string());
            variables.insert("MANY_LEVELS".into(), (height + 1).to_string());
            variables.insert("LAYOUT".into(), layout.to_string());
            // Every tenth address of a fragment.
            let addresses: Vec<_> = (0..10_000).map(|n| (n * 10).to_string()).collect();
            variables.insert("TEN_THOUSAND".into(), addresses.join(", "));
            variables.insert("DIR".into(), text(&folder));
            variables.insert("DIR_RELATIVE".into(), relative(&folder));
            variables.insert("DIR_URL".into(), format!("file://{}", text(&folder)));
            // The version of a table that Lance has committed to so many times.
            for commits in 1..=9 {
                let converted = u64::from(layout == Layout::Tree);
                variables.insert(format!("V{commits}"), (commits + converted).to_string());
            }
            tables.variables.insert(name_of(layout), variables);
        }
        tables
    }

    async fn convert_all(&mut self, done: &[String]) {
        let folder = self.folder(Layout::Tree);
        let paths = folder.join("paths");
        for place in [folder, paths] {
            for entry in std::fs::read_dir(place).expect("a folder") {
                let uri = text(&entry.expect("an entry").path());
                if uri.ends_with("/paths") || uri.ends_with("/branches") || done.contains(&uri) {
                    continue;
                }
                if let Err(e) = to_tree(&uri, policy_of(&uri), VersionRef::latest()).await {
                    self.problems.push(format!("cannot convert {uri}: {e}"));
                }
            }
        }
    }

    /// Edges from the root of a tree to its leaves; none in a flat table.
    async fn height(&self, layout: Layout, name: &str) -> u32 {
        let uri = self.uri(layout, name);
        let open = OpenOptions::default();
        let snapshot = Snapshot::open(&uri, open)
            .await
            .unwrap_or_else(|e| fail(&uri, e));
        let objects = snapshot
            .tree_objects(&FragmentRanges::all(), &WalkState::default())
            .await;
        let objects = objects.unwrap_or_else(|e| fail(&uri, e));
        objects
            .iter()
            .map(|object| object.height)
            .max()
            .unwrap_or(0)
    }

    /// Where everything lies.
    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Where the tables of a layout lie.
    pub(crate) fn folder(&self, layout: Layout) -> PathBuf {
        self.scratch.path().join(name_of(layout))
    }

    /// Where a table lies.
    pub(crate) fn uri(&self, layout: Layout, name: &str) -> String {
        text(&self.folder(layout).join(format!("{name}.lance")))
    }

    /// What test files may refer to.
    pub(crate) fn variables(&self, layout: Layout) -> &BTreeMap<String, String> {
        &self.variables[name_of(layout)]
    }

    /// The names of the tables, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(self.folder(Layout::Flat))
            .expect("a folder")
            .map(|e| e.expect("an entry").file_name())
            .filter_map(|n| n.to_str()?.strip_suffix(".lance").map(str::to_string))
            .collect();
        names.sort();
        names
    }
}

pub(crate) fn name_of(layout: Layout) -> &'static str {
    match layout {
        Layout::Flat => "flat",
        Layout::Tree => "tree",
    }
}

/// The path as seen from the current folder.
fn relative(path: &Path) -> String {
    let here = std::env::current_dir().expect("a folder");
    let up = "../".repeat(here.components().count() - 1);
    format!("{up}{}", text(path).trim_start_matches('/'))
}
