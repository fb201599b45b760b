//! The tables: fabricated once and kept.
//!
//! A fabricated table starts as a real one that Lance writes: twenty fragments of a hundred rows, some
//! rows deleted. The next version lists as many fragments as wanted. The twenty lie side by side among
//! them, and queries touch no others: the rest are records of files that do not exist, each with names
//! of its own as Lance draws them, so that nothing compresses better than it would in life. Lance's own
//! commit writes that version too.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use arrow::array::{
    ArrayRef, Float64Array, Int32Array, Int64Array, RecordBatch, RecordBatchIterator, StringArray,
    TimestampMicrosecondArray,
};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use arrow::error::ArrowError;
use lance::Dataset;
use lance::dataset::builder::DatasetBuilder;
use lance::dataset::{NewColumnTransform, WriteParams};
use lance_io::utils::CachedFileSize;
use lance_table::feature_flags::apply_feature_flags;
use lance_table::format::{DeletionFile, DeletionFileType, Fragment, Manifest};
use lance_table::io::commit::{commit_handler_from_url, write_manifest_file_to_path};
use lance_table::io::deletion::relative_deletion_file_path;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::plan::{Facts, Result};

/// Changes when tables are made differently.
const FORMAT: u32 = 2;

/// Fragments of a fabricated table that have data.
const REAL_FRAGMENTS: u32 = 20;
/// Rows of each. Few, which is kind to the flat side: it names each row of a range.
const REAL_ROWS: u32 = 100;
/// Of the real fragments, the two that lose every tenth row.
const WITH_DELETIONS: Range<u32> = 4..6;
/// Of the real fragments, those a range query asks for.
const RANGE: Range<u32> = 2..12;
/// The row a look-up asks for.
const POINT: (u32, u32) = (15, 42);

/// One table to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spec {
    pub name: &'static str,
    pub fragments: u32,
    /// Data files of each fragment.
    pub files: usize,
    /// Rows of each fragment, when all are real.
    pub real_rows: Option<u32>,
}

/// A table of invented records.
pub(crate) const fn fabricated(name: &'static str, fragments: u32, files: usize) -> Spec {
    Spec {
        name,
        fragments,
        files,
        real_rows: None,
    }
}

/// The tables of a full run, smallest first.
pub(crate) const TABLES: [Spec; 6] = [
    fabricated("1k_x1", 1_000, 1),
    fabricated("10k_x1", 10_000, 1),
    fabricated("100k_x1", 100_000, 1),
    fabricated("1m_x1", 1_000_000, 1),
    fabricated("100k_x30", 100_000, 30),
    Spec {
        name: "real_2000",
        fragments: 2_000,
        files: 1,
        real_rows: Some(4_000),
    },
];

/// The tables of a quick run.
pub(crate) const QUICK: [Spec; 3] = [
    fabricated("1k_x1", 1_000, 1),
    fabricated("1k_x30", 1_000, 30),
    Spec {
        name: "real_200",
        fragments: 200,
        files: 1,
        real_rows: Some(1_000),
    },
];

/// Where a table lies.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    pub facts: Facts,
    pub flat: PathBuf,
    dir: PathBuf,
}

impl Table {
    /// The place of the table's tree of this policy.
    pub(crate) fn tree(&self, label: &str) -> PathBuf {
        self.dir.join(format!("{label}.lance"))
    }

    /// Copies the flat table to where a tree is to be. Files are linked: both tables then read the
    /// same bytes from the same page cache.
    pub(crate) fn copy_flat(&self, to: &Path) -> Result<()> {
        if to.exists() {
            fs::remove_dir_all(to)?;
        }
        copy_dir(&self.flat, to)
    }
}

/// Copies a folder; its files are linked.
pub(crate) fn copy_dir(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else if fs::hard_link(entry.path(), &target).is_err() {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

/// Finds a table or makes it.
pub(crate) async fn prepare(root: &Path, spec: &Spec) -> Result<Table> {
    let dir = root.join(spec.name);
    let flat = dir.join("flat.lance");
    let facts_file = dir.join("facts.json");
    let known = fs::read(&facts_file)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Facts>(&bytes).ok())
        .filter(|facts| facts.format == FORMAT);
    if let Some(facts) = known {
        return Ok(Table { facts, flat, dir });
    }
    println!("making {} in {}", spec.name, dir.display());
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    fs::create_dir_all(&dir)?;
    let facts = match spec.real_rows {
        Some(rows) => write_real(&flat, spec, rows).await?,
        None => fabricate(&flat, spec).await?,
    };
    // Last, so that a table that was given up half made is not taken for one.
    fs::write(facts_file, serde_json::to_vec_pretty(&facts)?)?;
    Ok(Table { facts, flat, dir })
}

/// A record of the flat table as its last real version has them.
pub(crate) async fn template(table: &Table) -> Result<Fragment> {
    // The first versions are small; the last one is the fabricated one.
    let versions = match table.facts.files {
        1 => 1,
        files => u64::try_from(files)?,
    };
    let builder = DatasetBuilder::from_uri(utf8(&table.flat)?).with_version(versions);
    let dataset = builder.load().await?;
    let first = dataset.fragments().first().cloned();
    first.ok_or_else(|| "a table without fragments".into())
}

fn utf8(path: &Path) -> Result<&str> {
    path.to_str()
        .ok_or_else(|| format!("{} is not UTF-8", path.display()).into())
}

fn address(fragment: u32, offset: u32) -> u64 {
    (u64::from(fragment) << 32) | u64::from(offset)
}

// ---- a table whose fragments all have rows

async fn write_real(flat: &Path, spec: &Spec, rows: u32) -> Result<Facts> {
    write_rows(flat, spec.fragments, rows).await?;
    let step = spec.fragments / 64;
    let mut random = StdRng::seed_from_u64(64);
    let points = (0..64)
        .map(|i| {
            address(
                i * step + random.random_range(0..step.max(1)),
                random.random_range(0..rows),
            )
        })
        .collect();
    let (first, last) = (spec.fragments / 2, spec.fragments / 2 + 9);
    Ok(Facts {
        format: FORMAT,
        name: spec.name.to_string(),
        fragments: spec.fragments,
        files: 1,
        columns: names(&["id", "k", "v", "s", "at"]),
        range_columns: names(&["id", "v"]),
        point: address(spec.fragments / 2, 42),
        range: (first, last),
        range_rows: Vec::new(),
        points,
        // Values are multiples of a quarter, so that sums do not depend on their order.
        scan: Some(
            "SELECT COUNT(*), SUM(id), SUM(k), SUM(v), MIN(s), MAX(s), MAX(at) FROM t".into(),
        ),
        real: true,
    })
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| (*n).to_string()).collect()
}

fn row_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("k", DataType::Int32, true),
        Field::new("v", DataType::Float64, true),
        Field::new("s", DataType::Utf8, true),
        Field::new("at", DataType::Timestamp(TimeUnit::Microsecond, None), true),
    ]))
}

fn row_batch(schema: &SchemaRef, ids: Range<i64>) -> std::result::Result<RecordBatch, ArrowError> {
    let mut random = StdRng::seed_from_u64(ids.start.unsigned_abs());
    let words: Vec<u64> = ids.clone().map(|_| random.random()).collect();
    let small = |word: &u64| i32::try_from(word % 1000).unwrap_or_default();
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(ids.clone())),
        Arc::new(Int32Array::from_iter_values(words.iter().map(small))),
        Arc::new(Float64Array::from_iter_values(
            words.iter().map(|w| f64::from(small(&(w >> 20))) / 4.0),
        )),
        Arc::new(StringArray::from_iter_values(
            words.iter().map(|w| format!("item-{w:016x}")),
        )),
        Arc::new(TimestampMicrosecondArray::from_iter_values(
            ids.map(|id| 1_700_000_000_000_000 + id * 1_000),
        )),
    ];
    RecordBatch::try_new(Arc::clone(schema), columns)
}

async fn write_rows(flat: &Path, fragments: u32, rows: u32) -> Result<Dataset> {
    let schema = row_schema();
    let step = i64::from(rows);
    let in_batches = Arc::clone(&schema);
    let batches =
        (0..i64::from(fragments)).map(move |f| row_batch(&in_batches, f * step..(f + 1) * step));
    let params = WriteParams {
        max_rows_per_file: usize::try_from(rows)?,
        ..Default::default()
    };
    let reader = RecordBatchIterator::new(batches, schema);
    Ok(Dataset::write(reader, utf8(flat)?, Some(params)).await?)
}

// ---- a table that is mostly records

async fn fabricate(flat: &Path, spec: &Spec) -> Result<Facts> {
    let (dataset, columns, range_columns) = match spec.files {
        1 => {
            let dataset = write_rows(flat, REAL_FRAGMENTS, REAL_ROWS).await?;
            (
                dataset,
                names(&["id", "k", "v", "s", "at"]),
                names(&["id", "v"]),
            )
        }
        files => {
            let dataset = write_wide(flat, files).await?;
            let columns = (0..files).map(wide_column).collect();
            (dataset, columns, names(&["id", "v1"]))
        }
    };
    let dataset = delete_some(dataset).await?;
    let base = spec.fragments / 8 * 5;
    let fragments = fragment_list(&dataset, flat, spec, base)?;
    commit_fragments(&dataset, flat, fragments).await?;
    let rows_of = |fragment: u32| {
        (0..REAL_ROWS)
            .filter(move |o| !(WITH_DELETIONS.contains(&fragment) && o % 10 == 3))
            .map(move |o| address(base + fragment, o))
    };
    Ok(Facts {
        format: FORMAT,
        name: spec.name.to_string(),
        fragments: spec.fragments,
        files: spec.files,
        columns,
        range_columns,
        point: address(base + POINT.0, POINT.1),
        range: (base + RANGE.start, base + RANGE.end - 1),
        range_rows: RANGE.flat_map(rows_of).collect(),
        points: Vec::new(),
        scan: None,
        real: false,
    })
}

fn wide_column(index: usize) -> String {
    match index {
        0 => "id".to_string(),
        i => format!("v{i}"),
    }
}

/// A table of `files` columns that were added one by one, each in a data file of its own.
async fn write_wide(flat: &Path, files: usize) -> Result<Dataset> {
    let schema = Arc::new(Schema::new(vec![Field::new("id", DataType::Int64, false)]));
    let rows = i64::from(REAL_FRAGMENTS) * i64::from(REAL_ROWS);
    let ids = RecordBatch::try_new(
        Arc::clone(&schema),
        vec![Arc::new(Int64Array::from_iter_values(0..rows))],
    )?;
    let params = WriteParams {
        max_rows_per_file: usize::try_from(REAL_ROWS)?,
        ..Default::default()
    };
    let reader = RecordBatchIterator::new([Ok(ids)], schema);
    let mut dataset = Dataset::write(reader, utf8(flat)?, Some(params)).await?;
    for file in 1..files {
        let column = (wide_column(file), format!("CAST(id * {file} AS DOUBLE)"));
        let transform = NewColumnTransform::SqlExpressions(vec![column]);
        dataset.add_columns(transform, None, None).await?;
    }
    Ok(dataset)
}

async fn delete_some(mut dataset: Dataset) -> Result<Dataset> {
    let first = WITH_DELETIONS.start * REAL_ROWS;
    let end = WITH_DELETIONS.end * REAL_ROWS;
    dataset
        .delete(&format!("id >= {first} AND id < {end} AND id % 10 = 3"))
        .await?;
    Ok(dataset)
}

/// The fragments of the fabricated version, the real ones from id `base` on.
fn fragment_list(dataset: &Dataset, flat: &Path, spec: &Spec, base: u32) -> Result<Vec<Fragment>> {
    let real = dataset.fragments();
    let template = real.first().ok_or("a table without fragments")?;
    let mut random = StdRng::seed_from_u64(u64::from(spec.fragments));
    let mut fragments = Vec::with_capacity(usize::try_from(spec.fragments)?);
    for id in 0..spec.fragments {
        let place = id.checked_sub(base).and_then(|i| usize::try_from(i).ok());
        let fragment = match place.and_then(|i| real.get(i)) {
            Some(real) => {
                let mut moved = real.clone();
                moved.id = u64::from(id);
                if let Some(deletion) = &moved.deletion_file {
                    // A deletion file is named after its fragment.
                    let old = relative_deletion_file_path(real.id, deletion);
                    let new = relative_deletion_file_path(moved.id, deletion);
                    fs::rename(flat.join(old), flat.join(new))?;
                }
                moved
            }
            None => invent(template, id, &mut random),
        };
        fragments.push(fragment);
    }
    Ok(fragments)
}

/// A record like `template`, of files that do not exist.
pub(crate) fn invent(template: &Fragment, id: u32, random: &mut StdRng) -> Fragment {
    let mut fragment = template.clone();
    fragment.id = u64::from(id);
    let rows = random.random_range(1_000..=1_048_576);
    fragment.physical_rows = Some(rows);
    for file in &mut fragment.files {
        file.path = file_name(random);
        let size = rows as u64 * random.random_range(4..64) + random.random_range(0..4096);
        file.file_size_bytes = CachedFileSize::new(size);
    }
    // One in twenty has deletions.
    if random.random_ratio(1, 20) {
        fragment.deletion_file = Some(DeletionFile {
            read_version: random.random_range(1..1_000),
            id: random.random(),
            file_type: if random.random() {
                DeletionFileType::Array
            } else {
                DeletionFileType::Bitmap
            },
            num_deleted_rows: Some(random.random_range(1..=rows / 2)),
            base_id: None,
        });
    }
    fragment
}

/// A data file's name as Lance draws it: a UUID, three bytes in binary and thirteen in hex.
pub(crate) fn file_name(random: &mut StdRng) -> String {
    let id = uuid::Builder::from_random_bytes(random.random()).into_uuid();
    let (binary, hex) = id.as_bytes().split_at(3);
    let binary: String = binary.iter().map(|b| format!("{b:08b}")).collect();
    let hex: String = hex.iter().map(|b| format!("{b:02x}")).collect();
    format!("{binary}{hex}.lance")
}

/// Publishes the next version as Lance would.
async fn commit_fragments(dataset: &Dataset, flat: &Path, fragments: Vec<Fragment>) -> Result<()> {
    let previous = dataset.manifest();
    let schema = previous.schema.clone();
    let mut manifest = Manifest::new_from_previous(previous, schema, Arc::new(fragments));
    manifest.update_max_fragment_id();
    manifest.set_timestamp(
        SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)?
            .as_nanos(),
    );
    apply_feature_flags(&mut manifest, false, false)?;
    let handler = commit_handler_from_url(utf8(flat)?, &None).await?;
    let store = dataset.object_store(None).await?;
    handler
        .commit(
            &mut manifest,
            None,
            &dataset.branch_location().path,
            &store,
            write_manifest_file_to_path,
            dataset.manifest_location().naming_scheme,
            None,
        )
        .await
        .map_err(|e| format!("cannot commit the fabricated version: {e:?}"))?;
    Ok(())
}
