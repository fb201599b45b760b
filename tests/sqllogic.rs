//! SQL in, rows out: every file in `tests/sqllogic/` on both layouts, and every query of
//! `differential.sql` against Lance's own provider and against the same rows in memory.
//!
//! ```text
//!  flat/  tree/       the tables of tests/common, in two layouts
//!    └──┬──┘
//!  each .slt file  x  layout  x  1 or 4 partitions  x  counts folded by the planner or not
//! ```
//!
//! In a file `t1` is `t1.lance` of the layout in turn, `sys.t1` the same with all system columns.
//! `${DIR}` and other variables are those of [`common::Tables::variables`]; `onlyif` and `skipif`
//! know the labels `flat`, `tree`, `p1`, `p4` and `unfolded`. `SLT=limits,nulls` runs those files
//! only.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, UInt64Type};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use async_trait::async_trait;
use datafusion::catalog::{MemorySchemaProvider, SchemaProvider, TableProvider};
use datafusion::datasource::MemTable;
use datafusion::error::DataFusionError;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::prelude::{SessionConfig, SessionContext, col, lit};
use fragtree::{Engine, Layout, SystemColumns, TableOptions};
use lance::Dataset;
use lance::datafusion::LanceTableProvider;
use sqllogictest::{AsyncDB, ColumnType, DBOutput, Record, Runner};
use tokio::task::JoinSet;

use common::Tables;

/// How one run of all files is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Setting {
    layout: Layout,
    partitions: usize,
    /// Whether the planner may answer counts from statistics, and count a non-null column as rows.
    folded: bool,
}

impl Setting {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for layout in [Layout::Flat, Layout::Tree] {
            for (partitions, folded) in [(1, true), (4, true), (4, false)] {
                all.push(Self {
                    layout,
                    partitions,
                    folded,
                });
            }
        }
        all
    }

    fn labels(self) -> Vec<String> {
        let mut labels = vec![self.layout.to_string(), format!("p{}", self.partitions)];
        if !self.folded {
            labels.push("unfolded".into());
        }
        labels
    }

    fn name(self) -> String {
        self.labels().join("-")
    }

    /// Whether a file is run in this setting. All are run on both layouts, with one partition and
    /// with four; those that partitions or the way of counting can make a difference to are run in
    /// every combination.
    fn runs(self, file: &str) -> bool {
        let one_each = (self.layout == Layout::Flat) == (self.partitions == 1);
        match file {
            "counts" | "empty" | "limits" | "projection" => true,
            "explain" | "joins" | "missing_files" | "nulls" | "queries" | "system_columns" => {
                self.folded
            }
            _ => self.folded && one_each,
        }
    }

    fn context(self) -> SessionContext {
        let config = SessionConfig::new()
            .with_target_partitions(self.partitions)
            .with_information_schema(true);
        if self.folded {
            return SessionContext::new_with_config(config);
        }
        let mut rules = PhysicalOptimizer::new().rules;
        rules.retain(|rule| rule.name() != "aggregate_statistics");
        let state = SessionStateBuilder::new()
            .with_config(config)
            .with_default_features()
            .with_physical_optimizer_rules(rules)
            .build();
        SessionContext::new_with_state(state)
    }

    /// A session with the tables of a folder as `public`, and with system columns as `sys`.
    async fn session(self, folder: &Path, catalogue: bool) -> SessionContext {
        let ctx = self.context();
        let engine = Engine::new();
        engine.register(&ctx);
        if !self.folded {
            assert!(ctx.remove_optimizer_rule("fragtree_count_non_null"));
        }
        if catalogue {
            let uri = common::text(folder);
            for (schema, columns) in [
                ("public", SystemColumns::default()),
                ("sys", SystemColumns::ALL),
            ] {
                let options = TableOptions {
                    system_columns: columns,
                    ..Default::default()
                };
                let tables = engine.directory_schema(&uri, options).await;
                register_schema(&ctx, schema, tables.expect("a folder"));
            }
        }
        ctx
    }
}

fn register_schema(ctx: &SessionContext, name: &str, schema: Arc<dyn SchemaProvider>) {
    ctx.catalog("datafusion")
        .expect("the default catalog")
        .register_schema(name, schema)
        .expect("registers");
}

/// A session that sqllogictest talks to.
struct Database {
    ctx: SessionContext,
}

#[async_trait]
impl AsyncDB for Database {
    type Error = DataFusionError;
    type ColumnType = Kind;

    async fn run(&mut self, sql: &str) -> Result<DBOutput<Kind>, DataFusionError> {
        let query = self.ctx.sql(sql).await?;
        let schema = query.schema().as_arrow().clone();
        let batches = query.collect().await?;
        for batch in &batches {
            check_announced(&schema, &batch.schema())?;
        }
        let types: Vec<_> = schema
            .fields()
            .iter()
            .map(|f| Kind::of(f.data_type()))
            .collect();
        let mut rows = Vec::new();
        for batch in &batches {
            rows.extend(cells(batch)?);
        }
        if types.is_empty() && rows.is_empty() {
            return Ok(DBOutput::StatementComplete(0));
        }
        let is_plan = schema
            .fields()
            .first()
            .is_some_and(|f| f.name() == "plan_type");
        if is_plan {
            rows = rows.iter().flat_map(|row| plan_lines(row)).collect();
        }
        for cell in rows.iter_mut().flatten() {
            *cell = cell.replace('\n', "\\n");
        }
        Ok(DBOutput::Rows { types, rows })
    }

    async fn shutdown(&mut self) {}

    fn engine_name(&self) -> &str {
        "fragtree"
    }
}

/// What comes out is what the plan said would.
fn check_announced(announced: &Schema, found: &Schema) -> Result<(), DataFusionError> {
    let types = |schema: &Schema| -> Vec<(String, DataType)> {
        let fields = schema.fields().iter();
        fields
            .map(|f| (f.name().clone(), f.data_type().clone()))
            .collect()
    };
    if types(announced) == types(found) {
        return Ok(());
    }
    Err(DataFusionError::Internal(format!(
        "announced {announced:?}, found {found:?}"
    )))
}

/// A plan has a line for each node, numbered as in DataFusion's own files: what leads a line would
/// be lost otherwise.
fn plan_lines(row: &[String]) -> Vec<Vec<String>> {
    let [kind, plan] = row else {
        return vec![row.to_vec()];
    };
    let mut lines = vec![vec![kind.clone()]];
    for (index, line) in plan.trim_end().lines().enumerate() {
        let text = line.trim_start();
        let indent = "-".repeat(line.len() - text.len());
        lines.push(vec![format!("{:02}){indent}{text}", index + 1)]);
    }
    lines
}

/// The rows of a batch as text.
fn cells(batch: &RecordBatch) -> Result<Vec<Vec<String>>, DataFusionError> {
    let options = FormatOptions::new().with_null("NULL");
    let columns = batch
        .columns()
        .iter()
        .map(|column| ArrayFormatter::try_new(column.as_ref(), &options))
        .collect::<Result<Vec<_>, _>>()?;
    let cell = |column: usize, row: usize| -> Result<String, DataFusionError> {
        let value = columns[column].value(row).try_to_string()?;
        let empty = value.is_empty() && !batch.column(column).is_null(row);
        Ok(if empty { "(empty)".into() } else { value })
    };
    (0..batch.num_rows())
        .map(|row| {
            (0..batch.num_columns())
                .map(|column| cell(column, row))
                .collect()
        })
        .collect()
}

/// The kinds of columns a test file tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Boolean,
    Date,
    Integer,
    Timestamp,
    Real,
    Text,
    Other,
}

impl Kind {
    fn of(data_type: &DataType) -> Self {
        match data_type {
            DataType::Boolean => Self::Boolean,
            DataType::Date32 | DataType::Date64 | DataType::Time32(_) | DataType::Time64(_) => {
                Self::Date
            }
            DataType::Timestamp(..) => Self::Timestamp,
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Self::Text,
            t if t.is_integer() => Self::Integer,
            t if t.is_numeric() => Self::Real,
            _ => Self::Other,
        }
    }
}

impl ColumnType for Kind {
    fn from_char(value: char) -> Option<Self> {
        Some(match value {
            'B' => Self::Boolean,
            'D' => Self::Date,
            'I' => Self::Integer,
            'P' => Self::Timestamp,
            'R' => Self::Real,
            'T' => Self::Text,
            '?' => Self::Other,
            _ => return None,
        })
    }

    fn to_char(&self) -> char {
        match self {
            Self::Boolean => 'B',
            Self::Date => 'D',
            Self::Integer => 'I',
            Self::Timestamp => 'P',
            Self::Real => 'R',
            Self::Text => 'T',
            Self::Other => '?',
        }
    }
}

/// The test files, by name.
fn files() -> Vec<PathBuf> {
    let wanted = std::env::var("SLT").ok();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sqllogic");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "slt"))
        .filter(|path| match &wanted {
            Some(wanted) => wanted.split(',').any(|w| w == stem(path)),
            None => true,
        })
        .collect();
    files.sort();
    files
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .expect("a name")
        .to_string_lossy()
        .into_owned()
}

/// Runs one file to its end. Gives what went wrong, record by record.
async fn run_file(tables: Arc<Tables>, setting: Setting, file: PathBuf) -> Vec<String> {
    let name = stem(&file);
    let scratch = tables
        .scratch()
        .join(format!("runs/{name}-{}", setting.name()));
    std::fs::create_dir_all(&scratch).expect("a folder");
    let mut script = std::fs::read_to_string(&file).expect("readable");
    let mut variables = tables.variables(setting.layout).clone();
    variables.insert("SCRATCH".into(), common::text(&scratch));
    for (key, value) in &variables {
        script = script.replace(&format!("${{{key}}}"), value);
    }

    if let Some(at) = script.find("${") {
        let unknown: String = script[at..].chars().take(20).collect();
        return vec![format!(
            "tests/sqllogic/{name}.slt: no such variable: {unknown}"
        )];
    }

    let folder = tables.folder(setting.layout);
    let ctx = setting.session(&folder, name != "catalog").await;
    if name == "catalog" {
        // A folder of three tables, of which more may be made.
        let three = scratch.join("folder");
        for table in ["t13", "t6", "d"] {
            let table = format!("{table}.lance");
            common::copy_folder(&folder.join(&table), &three.join(&table));
        }
        let engine = Engine::new();
        let tables = engine
            .directory_schema(&common::text(&three), TableOptions::default())
            .await;
        register_schema(&ctx, "folder", tables.expect("a folder"));
    }

    if name == "writes" {
        // Tables of its own, to be written to, in the layout of the run.
        for table in [
            "t1",
            "t3",
            "t13",
            "t26",
            "t37_blob",
            "t37_blob2",
            "t37_json",
            "file_legacy",
        ] {
            let table = format!("{table}.lance");
            common::copy_folder(&folder.join(&table), &scratch.join(&table));
        }
    }

    let shown = format!("tests/sqllogic/{name}.slt");
    let records = match sqllogictest::parse_with_name::<Kind>(&script, shown.as_str()) {
        Ok(records) => records,
        Err(e) => return vec![e.to_string()],
    };
    let mut runner = Runner::new(move || {
        let ctx = ctx.clone();
        async move { Ok(Database { ctx }) }
    });
    runner.with_column_validator(sqllogictest::strict_column_validator);
    for label in setting.labels() {
        runner.add_label(&label);
    }
    let mut wrong = Vec::new();
    for record in records {
        if matches!(record, Record::Halt { .. }) {
            break;
        }
        if let Err(e) = runner.run_async(record).await {
            wrong.push(e.to_string());
        }
    }
    wrong
}

async fn run_files(tables: &Arc<Tables>) -> BTreeMap<String, Vec<String>> {
    let mut runs = JoinSet::new();
    let mut wrong: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for setting in Setting::all() {
        for file in files() {
            if !setting.runs(&stem(&file)) {
                continue;
            }
            let tables = Arc::clone(tables);
            runs.spawn(async move {
                let start = std::time::Instant::now();
                let wrong = run_file(tables, setting, file.clone()).await;
                if std::env::var_os("SLT_TIMES").is_some() {
                    let (time, file) = (start.elapsed(), stem(&file));
                    eprintln!("{time:?} {file} {}: {} wrong", setting.name(), wrong.len());
                    for failure in &wrong {
                        eprintln!("[{}] {failure}", setting.name());
                    }
                }
                (setting, wrong)
            });
        }
    }
    while let Some(run) = runs.join_next().await {
        let (setting, failures) = run.expect("runs");
        for failure in failures {
            // Where the scratch folder is says nothing.
            let failure = failure.replace(&common::text(tables.scratch()), "…");
            wrong.entry(failure).or_default().push(setting.name());
        }
    }
    wrong
}

/// One query of `differential.sql`.
struct Query {
    line: usize,
    sql: String,
}

/// Queries end with a semicolon at the end of a line.
fn queries() -> Vec<Query> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sqllogic/differential.sql");
    let text = std::fs::read_to_string(path).expect("readable");
    let mut queries = Vec::new();
    let mut sql = String::new();
    for (index, line) in text.lines().enumerate() {
        if line.starts_with("--") {
            continue;
        }
        sql.push_str(line);
        sql.push('\n');
        if let Some(query) = sql.trim().strip_suffix(';') {
            queries.push(Query {
                line: index + 1,
                sql: query.to_string(),
            });
            sql.clear();
        }
    }
    queries
}

/// The same tables under each of the providers.
struct Providers {
    /// The rows in memory.
    memory: SessionContext,
    /// The same with the system columns that Lance's provider has.
    memory_as_lance: SessionContext,
    lance: SessionContext,
    flat: SessionContext,
    tree: SessionContext,
}

const SYSTEM: [&str; 3] = ["_rowid", "_rowaddr", "_fragid"];

/// Tables that Lance cannot scan, or whose rows its scan gives in another form than it announces; and
/// one that cannot be shown with system columns.
const NOT_COMPARED: [&str; 5] = ["own_fragid", "t1_gone", "t26_tick", "t37_blob", "t37_blob2"];

impl Providers {
    async fn open(tables: &Tables) -> Self {
        let settings = |layout| Setting {
            layout,
            partitions: 4,
            folded: true,
        };
        let flat = settings(Layout::Flat).context();
        let tree = settings(Layout::Tree).context();
        let memory = SessionContext::new();
        let memory_as_lance = SessionContext::new();
        let lance = SessionContext::new();
        for ctx in [&flat, &tree, &memory, &memory_as_lance, &lance] {
            register_schema(ctx, "sys", Arc::new(MemorySchemaProvider::new()));
        }
        let engine = Engine::new();
        engine.register(&flat);
        engine.register(&tree);
        for name in tables.names() {
            if NOT_COMPARED.contains(&name.as_str()) {
                continue;
            }
            let dataset = Dataset::open(&tables.uri(Layout::Flat, &name))
                .await
                .expect("opens");
            let dataset = Arc::new(dataset);
            for system in [false, true] {
                let table = if system {
                    format!("sys.{name}")
                } else {
                    name.clone()
                };
                let provider = LanceTableProvider::new(Arc::clone(&dataset), system, system);
                register(&lance, &table, provider);
                let (all, two) = if system {
                    (&SYSTEM[..], &SYSTEM[..2])
                } else {
                    (&[][..], &[][..])
                };
                register(&memory, &table, in_memory(&dataset, all).await);
                register(&memory_as_lance, &table, in_memory(&dataset, two).await);
                let columns = if system {
                    SystemColumns::ALL
                } else {
                    SystemColumns::default()
                };
                for (layout, ctx) in [(Layout::Flat, &flat), (Layout::Tree, &tree)] {
                    let options = TableOptions {
                        system_columns: columns,
                        ..Default::default()
                    };
                    let uri = tables.uri(layout, &name);
                    let provider = engine.provider(&uri, options).await.expect("opens");
                    register(ctx, &table, provider);
                }
            }
        }
        Self {
            memory,
            memory_as_lance,
            lance,
            flat,
            tree,
        }
    }
}

fn register(ctx: &SessionContext, name: &str, provider: impl TableProvider + 'static) {
    ctx.register_table(name, Arc::new(provider)).expect("free");
}

/// What Lance's plan of a scan of everything gives, and some of the system columns. The plan's batches
/// and not the scan's stream, which turns JSON into text.
async fn in_memory(dataset: &Arc<Dataset>, system: &[&str]) -> MemTable {
    let mut scan = dataset.scan();
    scan.with_row_id().with_row_address();
    let plan = scan.create_plan().await.expect("plans");
    let context = SessionContext::new().task_ctx();
    let batches = datafusion::physical_plan::collect(plan, context).await;
    let plain = Schema::from(dataset.schema());
    let system = system
        .iter()
        .map(|name| Arc::new(Field::new(*name, DataType::UInt64, true)));
    let fields: Vec<_> = plain.fields().iter().cloned().chain(system).collect();
    let schema = Arc::new(Schema::new_with_metadata(fields, plain.metadata().clone()));
    let batches = batches
        .expect("scans")
        .iter()
        .map(|batch| shape(batch, &schema))
        .collect();
    MemTable::try_new(schema, vec![batches]).expect("a table")
}

/// The columns of a schema, from a batch with `_rowid` and `_rowaddr`.
fn shape(batch: &RecordBatch, schema: &Arc<Schema>) -> RecordBatch {
    let column = |name: &str| -> ArrayRef {
        let named = |name: &str| Arc::clone(batch.column_by_name(name).expect("a column"));
        if name != "_fragid" {
            return named(name);
        }
        let addresses = named("_rowaddr");
        let ids: UInt64Array = addresses.as_primitive::<UInt64Type>().unary(|a| a >> 32);
        Arc::new(ids)
    };
    let columns = schema.fields().iter().map(|f| column(f.name())).collect();
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(Arc::clone(schema), columns, &options).expect("a batch")
}

/// Column names and types, and the rows in a fixed order.
type Answer = (Vec<(String, DataType)>, Vec<String>);

async fn answer(ctx: &SessionContext, sql: &str) -> Result<Answer, DataFusionError> {
    let query = ctx.sql(sql).await?;
    let schema = query.schema().as_arrow().clone();
    let batches = query.collect().await?;
    let mut rows = Vec::new();
    for batch in &batches {
        check_announced(&schema, &batch.schema())?;
        rows.extend(cells(batch)?.into_iter().map(|row| row.join(" | ")));
    }
    rows.sort_unstable();
    let fields = schema.fields().iter();
    let columns = fields
        .map(|f| (f.name().clone(), f.data_type().clone()))
        .collect();
    Ok((columns, rows))
}

fn difference(expected: &Answer, found: &Answer) -> Option<String> {
    if expected.0 != found.0 {
        return Some(format!("columns {:?}, expected {:?}", found.0, expected.0));
    }
    if expected.1 == found.1 {
        return None;
    }
    let missing = expected
        .1
        .iter()
        .filter(|row| !found.1.contains(row))
        .take(3);
    let surplus = found
        .1
        .iter()
        .filter(|row| !expected.1.contains(row))
        .take(3);
    Some(format!(
        "{} rows, expected {}; missing {:?}, surplus {:?}",
        found.1.len(),
        expected.1.len(),
        missing.collect::<Vec<_>>(),
        surplus.collect::<Vec<_>>()
    ))
}

async fn problem(ctx: &SessionContext, sql: &str, expected: &Answer) -> Option<String> {
    match answer(ctx, sql).await {
        Ok(found) => difference(expected, &found),
        Err(e) => Some(e.to_string()),
    }
}

async fn run_differential(tables: &Tables) -> Vec<String> {
    let providers = Providers::open(tables).await;
    let mut wrong = Vec::new();
    for query in queries() {
        let place = format!("tests/sqllogic/differential.sql:{}", query.line);
        let expected = match answer(&providers.memory, &query.sql).await {
            Ok(expected) => expected,
            Err(e) => {
                wrong.push(format!("{place}: in memory: {e}\n{}", query.sql));
                continue;
            }
        };
        for (name, ctx) in [("flat", &providers.flat), ("tree", &providers.tree)] {
            let problem = problem(ctx, &query.sql, &expected).await;
            wrong.extend(problem.map(|p| format!("{place}: {name}: {p}\n{}", query.sql)));
        }
        // Lance has no such column.
        if query.sql.contains("_fragid") {
            continue;
        }
        let expected = answer(&providers.memory_as_lance, &query.sql)
            .await
            .expect("as above");
        let problem = problem(&providers.lance, &query.sql, &expected).await;
        wrong.extend(problem.map(|p| format!("{place}: Lance's provider: {p}\n{}", query.sql)));
    }
    wrong.extend(whole_tables(tables, &providers).await);
    wrong
}

/// All rows of every table, with and without system columns, and the provider's schema to the last
/// metadata.
async fn whole_tables(tables: &Tables, providers: &Providers) -> Vec<String> {
    let mut wrong = Vec::new();
    for name in tables.names() {
        if NOT_COMPARED.contains(&name.as_str()) {
            continue;
        }
        for table in [name.clone(), format!("sys.{name}")] {
            let sql = format!("SELECT * FROM {table}");
            let expected = answer(&providers.memory, &sql).await.expect("in memory");
            for (layout, ctx) in [("flat", &providers.flat), ("tree", &providers.tree)] {
                let problem = problem(ctx, &sql, &expected).await;
                wrong.extend(problem.map(|p| format!("{layout}: {sql}: {p}")));
            }
        }
        let lance = providers
            .lance
            .table_provider(name.as_str())
            .await
            .expect("a table")
            .schema();
        for (layout, ctx) in [("flat", &providers.flat), ("tree", &providers.tree)] {
            let schema = ctx
                .table_provider(name.as_str())
                .await
                .expect("a table")
                .schema();
            if schema != lance {
                wrong.push(format!(
                    "{layout}: schema of {name}: {schema:?}, expected {lance:?}"
                ));
            }
        }
    }
    wrong
}

/// Projections that no SQL asks a provider for: repeated, in any order, and empty, with filters.
async fn run_scans(tables: &Tables) -> Vec<String> {
    let mut wrong = Vec::new();
    for layout in [Layout::Flat, Layout::Tree] {
        let options = TableOptions {
            system_columns: SystemColumns::ALL,
            ..Default::default()
        };
        let uri = tables.uri(layout, "t1");
        let provider = Engine::new().provider(&uri, options).await.expect("opens");
        let ctx = SessionContext::new();
        // id, g, _rowid, _rowaddr, _fragid of row 542.
        let row = ["542", "2", "21474836522", "21474836522", "5"];
        for projection in [
            vec![],
            vec![0],
            vec![1, 0, 1],
            vec![4, 4, 3, 0, 2, 0],
            vec![3, 3],
            vec![0, 1, 2, 3, 4],
        ] {
            for filters in [
                vec![col("_fragid").eq(lit(5_u64)), col("id").eq(lit(542_i64))],
                vec![col("_rowaddr").eq(lit(21_474_836_522_u64))],
            ] {
                let plan = provider
                    .scan(&ctx.state(), Some(&projection), &filters, None)
                    .await;
                let plan = plan.expect("plans");
                let batches = datafusion::physical_plan::collect(plan, ctx.task_ctx()).await;
                let batches = batches.expect("scans");
                let count: usize = batches.iter().map(RecordBatch::num_rows).sum();
                let rows: Vec<_> = batches
                    .iter()
                    .flat_map(|b| cells(b).expect("text"))
                    .collect();
                let expected: Vec<_> = projection.iter().map(|i| row[*i].to_string()).collect();
                if count != 1 || rows != [expected] {
                    wrong.push(format!(
                        "{layout}: {projection:?} {filters:?}: {count} {rows:?}"
                    ));
                }
            }
        }
    }
    wrong
}

/// F01 once more, without SQL.
async fn run_dataframes(tables: &Tables) -> Vec<String> {
    let mut wrong = Vec::new();
    for setting in Setting::all() {
        let ctx = setting.session(&tables.folder(setting.layout), true).await;
        for (filter, expected) in [
            (col("g").eq(lit(3)), 100),
            (col("id").lt(lit(250)), 250),
            (col("id").lt(lit(250)).and(col("g").eq(lit(3))), 25),
            (col("id").lt(lit(237)).and(col("g").eq(lit(3))), 24),
            (col("id").lt(lit(250)).or(col("g").eq(lit(3))), 325),
        ] {
            let table = ctx.table("t1").await.expect("a table");
            let filtered = table.filter(filter.clone()).expect("a filter");
            let count = filtered.count().await.expect("counts");
            if count != expected {
                wrong.push(format!(
                    "{}: {filter}: {count}, not {expected}",
                    setting.name()
                ));
            }
        }
    }
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn both_layouts_answer_as_written_and_as_lance_does() {
    let tables = Arc::new(Tables::make().await);
    let mut wrong = tables.problems.clone();
    for (failure, settings) in run_files(&tables).await {
        wrong.push(format!("[{}] {failure}", settings.join(", ")));
    }
    if std::env::var_os("SLT").is_none() {
        wrong.extend(run_dataframes(&tables).await);
        wrong.extend(run_scans(&tables).await);
        wrong.extend(run_differential(&tables).await);
    }
    let scratch = common::text(tables.scratch());
    let report = wrong.join("\n\n").replace(&scratch, "…");
    assert!(
        wrong.is_empty(),
        "{} things are wrong:\n\n{report}",
        wrong.len()
    );
}
