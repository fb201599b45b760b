//! A flat table and its twin with a tree.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::prelude::SessionContext;
use fragtree::write::{
    ConvertOptions, CreateOptions, MergeOptions, TreePolicy, TreeTable, WriteOptions, convert,
};
use fragtree::{
    FragmentRanges, Layout, OpenOptions, Snapshot, SnapshotProvider, SystemColumns, VersionRef,
    verify,
};
use futures::{TryStreamExt, stream};
use lance::Dataset;
use lance::dataset::optimize::{CompactionOptions, compact_files};
use lance::dataset::{
    ColumnAlteration, CommitBuilder, InsertBuilder, MergeInsertBuilder, NewColumnTransform,
    UpdateBuilder, WhenMatched, WhenNotMatched, WriteMode, WriteParams,
};
use lance::index::DatasetIndexExt;
use lance_index::IndexType;
use lance_index::optimize::OptimizeOptions;
use lance_index::scalar::ScalarIndexParams;
use lance_table::format::pb;
use lance_table::transaction::{DataReplacementGroup, Operation, Transaction};

#[derive(Debug, Clone)]
pub(crate) enum Change {
    Append { rows: i64 },
    Overwrite { rows: i64 },
    Delete(String),
    Update(String, String, String),
    Merge { from: i64, to: i64 },
    AddNulls(String),
    AddExpression(String, String),
    Backfill { column: String, every: u64 },
    Drop(String),
    Rename(String, String),
    Narrow(String),
    Compact,
    Index(String),
    DropIndex(String),
    OptimizeIndices,
    Config(String, String),
    SchemaMetadata(String, String),
    Restore { back: u64 },
}

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

pub(crate) struct Twin {
    folder: Arc<tempfile::TempDir>,
    flat: String,
    tree: TreeTable,
    next_id: i64,
    names: u64,
}

const ROWS_PER_FILE: usize = 4;

/// Fragments of a twin at first, each of `ROWS_PER_FILE` rows with ids in order.
pub(crate) const FRAGMENTS: u32 = 30;

fn signed(number: usize) -> i64 {
    i64::try_from(number).expect("small")
}

pub(crate) fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_string()
}

/// Sizes at which a few dozen fragments make several levels.
pub(crate) fn tiny() -> TreePolicy {
    TreePolicy {
        leaf_bytes: 6 << 10,
        node_bytes: 400,
        buffer_bytes: 600,
        root_buffer_bytes: 300,
        min_fragments: 1,
        ..Default::default()
    }
}

fn params(mode: WriteMode, stable: bool) -> WriteParams {
    WriteParams {
        mode,
        max_rows_per_file: ROWS_PER_FILE,
        max_rows_per_group: ROWS_PER_FILE,
        enable_stable_row_ids: stable,
        ..Default::default()
    }
}

pub(crate) fn base_rows(ids: impl Iterator<Item = i64> + Clone, note: &str) -> RecordBatch {
    let schema = Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("g", DataType::Int64, true),
        Field::new("name", DataType::Utf8, true),
    ]);
    let names: StringArray = ids.clone().map(|i| Some(format!("{note} {i}"))).collect();
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

pub(crate) fn stream_of(rows: RecordBatch) -> datafusion::execution::SendableRecordBatchStream {
    let schema = rows.schema();
    Box::pin(RecordBatchStreamAdapter::new(
        schema,
        stream::iter(vec![Ok(rows)]),
    ))
}

pub(crate) fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("a type").is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).expect("copies");
        }
    }
}

impl Twin {
    pub(crate) async fn make(stable: bool) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let flat = folder.path().join("flat.lance");
        let tree = folder.path().join("tree.lance");
        let mut dataset = InsertBuilder::new(text(&flat).as_str())
            .with_params(&params(WriteMode::Create, stable))
            .execute(vec![base_rows(
                0..i64::from(FRAGMENTS) * signed(ROWS_PER_FILE),
                "first",
            )])
            .await
            .expect("writes");
        copy_folder(&flat, &tree);
        // The conversion is a version; so is this.
        dataset
            .update_config([("twin", "flat")])
            .await
            .expect("commits");
        let options = ConvertOptions {
            policy: tiny(),
            ..ConvertOptions::to_tree()
        };
        convert(&text(&tree), options, OpenOptions::default())
            .await
            .expect("converts");
        let write = WriteOptions {
            policy: Some(tiny()),
            ..Default::default()
        };
        let tree = TreeTable::open(&text(&tree), OpenOptions::default(), write)
            .await
            .expect("opens");
        Self {
            folder: Arc::new(folder),
            flat: text(&flat),
            tree,
            next_id: 1000,
            names: 0,
        }
    }

    /// Twins that hold no row and whose second version is the first that is the same.
    pub(crate) async fn create(stable: bool) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let flat = text(&folder.path().join("flat.lance"));
        let tree = text(&folder.path().join("tree.lance"));
        let none = base_rows(0..0, "none");
        InsertBuilder::new(flat.as_str())
            .with_params(&params(WriteMode::Create, stable))
            .execute_stream(stream_of(none.clone()))
            .await
            .expect("writes");
        let create = CreateOptions {
            stable_row_ids: stable,
            policy: tiny(),
            ..Default::default()
        };
        let tree = TreeTable::create(
            &tree,
            stream_of(none),
            create,
            OpenOptions::default(),
            WriteOptions::default(),
        )
        .await
        .expect("creates");
        Self {
            folder: Arc::new(folder),
            flat,
            tree,
            next_id: 1000,
            names: 0,
        }
    }

    pub(crate) fn tree_uri(&self) -> &str {
        self.tree.uri()
    }

    pub(crate) fn flat_uri(&self) -> &str {
        &self.flat
    }

    pub(crate) fn table(&self) -> &TreeTable {
        &self.tree
    }

    async fn copy(&self, flat: String, tree: &str, open: OpenOptions) -> Self {
        let write = WriteOptions {
            policy: Some(tiny()),
            ..Default::default()
        };
        Self {
            folder: Arc::clone(&self.folder),
            flat,
            tree: TreeTable::open(tree, open, write).await.expect("opens"),
            next_id: self.next_id,
            names: self.names,
        }
    }

    pub(crate) async fn shallow_clone(&self) -> Self {
        let at = |name: &str| text(&self.folder.path().join(name));
        let mut flat = self.flat().await;
        let version = flat.version().version;
        flat.shallow_clone(&at("flat-clone.lance"), version, None)
            .await
            .expect("clones");
        let tree = at("tree-clone.lance");
        self.tree
            .shallow_clone(&tree, VersionRef::latest(), HashMap::new())
            .await
            .expect("clones");
        self.copy(at("flat-clone.lance"), &tree, OpenOptions::default())
            .await
    }

    pub(crate) async fn deep_clone(&self) -> Self {
        let at = |name: &str| text(&self.folder.path().join(name));
        let mut flat = self.flat().await;
        let version = flat.version().version;
        flat.deep_clone(&at("flat-deep.lance"), version, None)
            .await
            .expect("clones");
        let tree = at("tree-deep.lance");
        self.tree
            .deep_clone(&tree, VersionRef::latest(), HashMap::new())
            .await
            .expect("clones");
        self.copy(at("flat-deep.lance"), &tree, OpenOptions::default())
            .await
    }

    pub(crate) async fn branch(&self) -> Self {
        let mut flat = self.flat().await;
        let version = flat.version().version;
        flat.create_branch("side", version, None)
            .await
            .expect("branches");
        self.tree
            .create_branch("side", VersionRef::latest())
            .await
            .expect("branches");
        let open = OpenOptions::default().with_reference(VersionRef::branch("side"));
        let branch = format!("{}/tree/side", self.flat);
        self.copy(branch, self.tree.uri(), open).await
    }

    /// Optimizes the tree, if there is something to gain; the flat twin then gets a version too.
    pub(crate) async fn optimize(&self) -> bool {
        let done = self.tree.optimize_tree().await.expect("optimizes");
        if done.is_some() {
            self.flat()
                .await
                .update_config([("twin", "flat again")])
                .await
                .expect("commits");
        }
        done.is_some()
    }

    async fn flat(&self) -> Dataset {
        Dataset::open(&self.flat).await.expect("opens")
    }

    /// Rows for an append: every column the table has now.
    async fn rows(&mut self, count: i64, note: &str) -> RecordBatch {
        let ids = self.next_id..self.next_id + count;
        self.next_id += count;
        self.fit(base_rows(ids, note)).await
    }

    /// Adds what columns the table has beyond the first three, and takes away those it has not.
    async fn fit(&self, rows: RecordBatch) -> RecordBatch {
        let schema = Schema::from(self.flat().await.schema());
        let columns = schema
            .fields()
            .iter()
            .map(|f| match rows.column_by_name(f.name()) {
                Some(column) => arrow::compute::cast(column, f.data_type()).expect("casts"),
                None if f.is_nullable() => {
                    arrow::array::new_null_array(f.data_type(), rows.num_rows())
                }
                None => Arc::new(Int64Array::from_iter_values(0..signed(rows.num_rows()))),
            })
            .collect();
        RecordBatch::try_new(Arc::new(schema), columns).expect("a batch")
    }

    /// Applies one change to both.
    pub(crate) async fn apply(&mut self, change: &Change) {
        let mut flat = self.flat().await;
        let tree = self.tree.clone();
        match change {
            Change::Append { rows } => {
                let rows = self.rows(*rows, "appended").await;
                InsertBuilder::new(Arc::new(flat))
                    .with_params(&params(WriteMode::Append, false))
                    .execute(vec![rows.clone()])
                    .await
                    .expect("flat appends");
                let scope = FragmentRanges::empty();
                tree.with_dataset(scope, |dataset| async move {
                    InsertBuilder::new(Arc::new(dataset))
                        .with_params(&params(WriteMode::Append, false))
                        .execute(vec![rows])
                        .await
                        .map(|_| ())
                })
                .await
                .expect("tree appends");
            }
            Change::Overwrite { rows } => {
                let ids = self.next_id..self.next_id + rows;
                self.next_id += rows;
                let rows = base_rows(ids, "over");
                InsertBuilder::new(Arc::new(flat))
                    .with_params(&params(WriteMode::Overwrite, false))
                    .execute(vec![rows.clone()])
                    .await
                    .expect("flat overwrites");
                let scope = FragmentRanges::empty();
                tree.with_dataset(scope, |dataset| async move {
                    InsertBuilder::new(Arc::new(dataset))
                        .with_params(&params(WriteMode::Overwrite, false))
                        .execute(vec![rows])
                        .await
                        .map(|_| ())
                })
                .await
                .expect("tree overwrites");
            }
            Change::Delete(predicate) => {
                let expected = flat.delete(predicate).await.expect("flat deletes");
                let report = tree.delete(predicate).await.expect("tree deletes");
                assert_eq!(report.rows, expected.num_deleted_rows, "{change:?}");
            }
            Change::Update(predicate, column, value) => {
                let expected = UpdateBuilder::new(Arc::new(flat))
                    .update_where(predicate)
                    .and_then(|b| b.set(column, value))
                    .and_then(UpdateBuilder::build)
                    .expect("an update")
                    .execute()
                    .await
                    .expect("flat updates");
                let report = tree
                    .update(Some(predicate), &[(column, value)])
                    .await
                    .expect("tree updates");
                assert_eq!(report.rows, expected.rows_updated, "{change:?}");
            }
            Change::Merge { from, to } => {
                let rows = self.fit(base_rows(*from..*to, "merged")).await;
                let mut builder = MergeInsertBuilder::try_new(Arc::new(flat), vec!["id".into()])
                    .expect("a merge");
                builder
                    .when_matched(WhenMatched::UpdateAll)
                    .when_not_matched(WhenNotMatched::InsertAll);
                builder
                    .try_build()
                    .expect("a merge")
                    .execute(stream_of(rows.clone()))
                    .await
                    .expect("flat merges");
                tree.merge_insert(&["id"], &MergeOptions::upsert(), stream_of(rows))
                    .await
                    .expect("tree merges");
            }
            Change::AddNulls(name) => {
                let schema = Schema::new(vec![Field::new(name, DataType::Int64, true)]);
                let nulls = || NewColumnTransform::AllNulls(Arc::new(schema.clone()));
                flat.add_columns(nulls(), None, None).await.expect("adds");
                tree.add_columns(nulls(), None, None).await.expect("adds");
            }
            Change::AddExpression(name, value) => {
                let of = || NewColumnTransform::SqlExpressions(vec![(name.clone(), value.clone())]);
                flat.add_columns(of(), None, None).await.expect("adds");
                tree.add_columns(of(), None, None).await.expect("adds");
            }
            Change::Backfill { column, every } => self.backfill(flat, column, *every).await,
            Change::Drop(name) => {
                flat.drop_columns(&[name]).await.expect("drops");
                tree.drop_columns(&[name]).await.expect("drops");
            }
            Change::Rename(from, to) => {
                let alteration = || [ColumnAlteration::new(from.clone()).rename(to.clone())];
                flat.alter_columns(&alteration()).await.expect("renames");
                tree.alter_columns(&alteration()).await.expect("renames");
            }
            Change::Narrow(name) => {
                let alteration = || [ColumnAlteration::new(name.clone()).cast_to(DataType::Int32)];
                flat.alter_columns(&alteration()).await.expect("casts");
                tree.alter_columns(&alteration()).await.expect("casts");
            }
            Change::Compact => {
                let options = || CompactionOptions {
                    target_rows_per_fragment: 16,
                    ..Default::default()
                };
                compact_files(&mut flat, options(), None)
                    .await
                    .expect("compacts");
                tree.compact(FragmentRanges::all(), options())
                    .await
                    .expect("compacts");
            }
            Change::Index(column) => {
                let index = ScalarIndexParams::default();
                let name = Some(format!("{column}_idx"));
                flat.create_index(&[column], IndexType::BTree, name.clone(), &index, true)
                    .await
                    .expect("indexes");
                tree.create_index(&[column], IndexType::BTree, name, &index, true)
                    .await
                    .expect("indexes");
            }
            Change::DropIndex(column) => {
                let name = format!("{column}_idx");
                let found = flat.drop_index(&name).await;
                let own = tree.drop_index(&name).await;
                assert_eq!(found.is_ok(), own.is_ok(), "{found:?} {own:?}");
            }
            Change::OptimizeIndices => {
                let options = OptimizeOptions::append();
                flat.optimize_indices(&options).await.expect("optimizes");
                tree.optimize_indices(&options).await.expect("optimizes");
            }
            Change::Config(key, value) => {
                flat.update_config([(key.as_str(), value.as_str())])
                    .await
                    .expect("configures");
                tree.update_config(&[(key, Some(value))])
                    .await
                    .expect("configures");
            }
            Change::SchemaMetadata(key, value) => {
                flat.update_schema_metadata([(key.as_str(), Some(value.as_str()))])
                    .await
                    .expect("sets");
                tree.update_schema_metadata(&[(key, Some(value))])
                    .await
                    .expect("sets");
            }
            Change::Restore { back } => {
                let version = flat.version().version.saturating_sub(*back).max(2);
                let mut old = flat.checkout_version(version).await.expect("opens");
                old.restore().await.expect("restores");
                tree.restore(version).await.expect("restores");
            }
        }
    }

    /// Fills a column of some fragments that have none of it yet.
    async fn backfill(&self, flat: Dataset, column: &str, every: u64) {
        let schema = Schema::new(vec![Field::new(column, DataType::Int64, true)]);
        let mut files = Vec::new();
        for fragment in flat.get_fragments() {
            if !(fragment.id() as u64).is_multiple_of(every) {
                continue;
            }
            let rows = fragment.physical_rows().await.expect("rows");
            let values: Int64Array = (0..rows)
                .map(|r| Some(signed(fragment.id() * 100 + r)))
                .collect();
            let batch = RecordBatch::try_new(Arc::new(schema.clone()), vec![Arc::new(values)])
                .expect("a batch");
            files.push((u32::try_from(fragment.id()).expect("an id"), batch));
        }
        let of_flat = TreeTable::open(&self.flat, OpenOptions::default(), WriteOptions::default())
            .await
            .expect("opens");
        let mut flat_files = Vec::new();
        let mut tree_files = Vec::new();
        for (id, batch) in files {
            let rows = || stream_of(batch.clone());
            flat_files.push(of_flat.write_columns(id, rows()).await.expect("writes"));
            tree_files.push(self.tree.write_columns(id, rows()).await.expect("writes"));
        }
        let groups = flat_files
            .into_iter()
            .map(|(id, file)| DataReplacementGroup(id, file))
            .collect();
        let operation = Operation::DataReplacement {
            replacements: groups,
        };
        let transaction = Transaction::new(flat.version().version, operation, None);
        CommitBuilder::new(Arc::new(flat))
            .execute(transaction)
            .await
            .expect("flat backfills");
        self.tree
            .backfill(tree_files)
            .await
            .expect("tree backfills");
    }

    async fn provider(uri: &str, ctx: &SessionContext, name: &str) -> Arc<Snapshot> {
        let snapshot = Snapshot::open(uri, OpenOptions::default())
            .await
            .expect("opens");
        let provider = SnapshotProvider::try_new(Arc::clone(&snapshot), SystemColumns::ALL)
            .expect("a provider");
        ctx.register_table(name, Arc::new(provider))
            .expect("registers");
        snapshot
    }

    /// Compares everything a reader can see.
    pub(crate) async fn compare(&self, what: &str) {
        let ctx = SessionContext::new();
        let flat = Self::provider(&self.flat, &ctx, "flat").await;
        let tree = Self::provider(self.tree.uri(), &ctx, "tree").await;
        assert_eq!(tree.layout(), Layout::Tree, "{what}");
        let report = verify::verify(
            self.tree.uri(),
            verify::VerifyOptions::default(),
            OpenOptions::default(),
            |_| {},
        )
        .await
        .expect("verifies");
        assert!(report.ok(), "{what}: {report:#?}");
        assert_eq!(tree.version(), flat.version(), "{what}");
        assert_eq!(
            tree.counts().expect("counts"),
            flat.counts().expect("counts"),
            "{what}"
        );
        let expected = fragments(&flat).await;
        let found = fragments(&tree).await;
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found, expected, "{what}");
        }
        assert_eq!(found.len(), expected.len(), "{what}");
        let (expected, found) = (flat.shell(), tree.shell());
        let (of_flat, of_tree) = (expected.manifest(), found.manifest());
        assert_eq!(of_tree.schema, of_flat.schema, "{what}");
        assert_eq!(of_tree.next_row_id, of_flat.next_row_id, "{what}");
        assert_eq!(tree.max_fragment_id(), flat.max_fragment_id(), "{what}");
        assert_eq!(
            of_tree.max_allocated_field_id, of_flat.max_allocated_field_id,
            "{what}"
        );
        assert_eq!(
            own_config(&of_tree.config),
            own_config(&of_flat.config),
            "{what}"
        );
        assert_eq!(
            of_tree.reader_feature_flags, of_flat.reader_feature_flags,
            "{what}"
        );
        // Only the flat twin was given a config to begin with.
        let config = lance_table::feature_flags::FLAG_TABLE_CONFIG;
        let writer = |flags: u64| flags & !config;
        assert_eq!(
            writer(of_tree.writer_feature_flags),
            writer(of_flat.writer_feature_flags),
            "{what}"
        );
        assert_eq!(indices(found).await, indices(expected).await, "{what}");
        assert_eq!(operation(found).await, operation(expected).await, "{what}");
        for sql in [
            "SELECT * FROM {} ORDER BY _rowaddr",
            "SELECT COUNT(*) FROM {}",
            "SELECT COUNT(*) FROM {} WHERE _fragid BETWEEN 3 AND 17",
        ] {
            let rows = async |name: &str| {
                let rows = ctx.sql(&sql.replace("{}", name)).await.expect("plans");
                let rows = rows.collect().await.expect("runs");
                arrow::util::pretty::pretty_format_batches(&rows)
                    .expect("shows")
                    .to_string()
            };
            assert_eq!(rows("tree").await, rows("flat").await, "{what}: {sql}");
        }
    }

    pub(crate) fn random_change(&mut self, random: &mut Random) -> Change {
        self.names += 1;
        match random.below(16) {
            0..4 => Change::Append {
                rows: 1 + random.below(12).cast_signed(),
            },
            4 | 5 => Change::Delete(format!(
                "id % {} = {}",
                5 + random.below(9),
                random.below(5)
            )),
            6 => {
                let from = random.below(1200);
                Change::Delete(format!("id between {from} and {}", from + random.below(40)))
            }
            7 | 8 => Change::Update(
                format!("id % {} = 1", 6 + random.below(9)),
                "name".into(),
                format!("'set {}'", self.names),
            ),
            9 => {
                let from = random.below(1100).cast_signed();
                Change::Merge {
                    from,
                    to: from + 15,
                }
            }
            10 => Change::AddNulls(format!("n{}", self.names)),
            11 => Change::AddExpression(format!("e{}", self.names), "id + 1".into()),
            12 => Change::Compact,
            13 => Change::Index("id".into()),
            14 => Change::OptimizeIndices,
            _ => Change::Restore {
                back: 1 + random.below(3),
            },
        }
    }
}

fn own_config(config: &HashMap<String, String>) -> BTreeMap<&String, &String> {
    config
        .iter()
        .filter(|(k, _)| *k != "twin" && !k.starts_with("fragtree."))
        .collect()
}

async fn fragments(snapshot: &Arc<Snapshot>) -> Vec<pb::DataFragment> {
    let batches: Vec<_> = snapshot
        .fragments(
            FragmentRanges::all(),
            &fragtree::WalkOptions::default(),
            &fragtree::WalkState::default(),
        )
        .try_collect()
        .await
        .expect("walks");
    let mut records: Vec<_> = batches
        .into_iter()
        .flatten()
        .map(|f| f.record().expect("a record"))
        .collect();
    for record in &mut records {
        // Names are made up anew by each writer.
        for file in &mut record.files {
            file.path.clear();
        }
        if let Some(deletion) = &mut record.deletion_file {
            deletion.id = 0;
        }
    }
    records
}

async fn indices(dataset: &Arc<Dataset>) -> Vec<String> {
    let indices = dataset.load_indices().await.expect("indexes");
    let mut shown: Vec<_> = indices
        .iter()
        .map(|i| {
            format!(
                "{} {:?} {:?} version {}",
                i.name, i.fields, i.fragment_bitmap, i.dataset_version
            )
        })
        .collect();
    shown.sort();
    shown
}

async fn operation(dataset: &Arc<Dataset>) -> Option<String> {
    let transaction = dataset.read_transaction().await.expect("a transaction");
    transaction.map(|t| format!("{} of {}", t.operation, t.read_version))
}
