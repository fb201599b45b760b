//! Reading the Lance file of a leaf: from bytes in memory to record batches.
//!
//! [`leaf_columns`](super::leaf_columns) knows a short way. What it does not take is read here, whole,
//! by Lance's reader; so is what is broken, and the error is that reader's.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Fields, Schema};
use bytes::Bytes;
use futures::executor::block_on;
use futures::future::BoxFuture;
use lance_core::cache::LanceCache;
use lance_core::datatypes::{Field as LanceField, Schema as LanceSchema};
use lance_core::deepsize::{Context, DeepSizeOf};
use lance_encoding::EncodingsIo;
use lance_encoding::decoder::{DecoderPlugins, FilterExpression};
use lance_file::reader::{FileReader, FileReaderOptions};
use lance_io::ReadBatchParams;
use lance_io::object_store::ObjectStore;
use lance_io::scheduler::{ScanScheduler, SchedulerConfig};
use lance_io::traits::Reader;
use object_store::path::Path;

use super::leaf::LEAF_SCHEMA;
use super::leaf_columns;
use crate::error::{Error, Result};
use crate::panics::caught;

/// Rows of a leaf are decoded in batches of this many, so that 32-bit string offsets suffice.
pub(super) const BATCH_ROWS: u32 = 1 << 16;

/// Whether two Lance fields are the same down to the way they are stored; ids do not matter.
fn same_lance_field(a: &LanceField, b: &LanceField) -> bool {
    a.name == b.name
        && a.logical_type == b.logical_type
        && a.nullable == b.nullable
        && a.metadata == b.metadata
        && a.dictionary == b.dictionary
        && same_lance_fields(&a.children, &b.children)
}

fn same_lance_fields(a: &[LanceField], b: &[LanceField]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_lance_field(a, b))
}

/// Whether two fields agree in name, type and nullability, nested fields included. Metadata is not
/// part of the leaf schema.
fn same_field(a: &Field, b: &Field) -> bool {
    a.name() == b.name()
        && a.is_nullable() == b.is_nullable()
        && match (a.data_type(), b.data_type()) {
            (DataType::Struct(a), DataType::Struct(b)) => same_fields(a, b),
            (DataType::List(a), DataType::List(b)) => same_field(a, b),
            (a, b) => a == b,
        }
}

fn same_fields(a: &Fields, b: &Fields) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_field(a, b))
}

/// Reads a Lance file that is wholly in memory.
///
/// # Errors
/// `leaf_unreadable`, `leaf_schema`.
pub(crate) fn read_batches(location: &str, bytes: Bytes) -> Result<Vec<RecordBatch>> {
    let footer = Footer::read(location, &bytes)?;
    let file = InMemory::new(location, bytes);
    match caught(|| leaf_columns::read(&file, &footer)).flatten() {
        Some(batches) => Ok(batches),
        None => read_file(file, &footer, location),
    }
}

/// The same with Lance's reader alone, which looks at every column.
///
/// # Errors
/// Those of [`read_batches`].
pub(crate) fn read_every_column(location: &str, bytes: Bytes) -> Result<Vec<RecordBatch>> {
    let footer = Footer::read(location, &bytes)?;
    read_file(InMemory::new(location, bytes), &footer, location)
}

fn read_file(file: InMemory, footer: &Footer, location: &str) -> Result<Vec<RecordBatch>> {
    let unreadable =
        |what: String| Error::corrupt(location, "leaf_unreadable", "a Lance file of records", what);
    match caught(|| decode_file(file, footer)) {
        Some(Ok(batches)) => Ok(batches),
        Some(Err(DecodeError::Schema(schema))) => Err(Error::corrupt(
            location,
            "leaf_schema",
            format!("{:?}", LEAF_SCHEMA.fields()),
            format!("{:?}", schema.fields()),
        )),
        Some(Err(DecodeError::Lance(e))) => Err(unreadable(e.to_string())),
        Some(Err(DecodeError::Arrow(e))) => Err(unreadable(e.to_string())),
        None => Err(unreadable("bytes that stop the Lance decoder".into())),
    }
}

#[derive(Debug)]
pub(super) enum DecodeError {
    Schema(Schema),
    Lance(lance_core::Error),
    Arrow(arrow::error::ArrowError),
}

/// Reads all of a file with Lance's reader.
pub(super) fn decode_file(
    file: InMemory,
    footer: &Footer,
) -> std::result::Result<Vec<RecordBatch>, DecodeError> {
    static STORE: LazyLock<Arc<ObjectStore>> = LazyLock::new(|| Arc::new(ObjectStore::memory()));
    static CACHE: LazyLock<LanceCache> = LazyLock::new(LanceCache::no_cache);
    static PLUGINS: LazyLock<Arc<DecoderPlugins>> = LazyLock::new(Arc::default);
    /// The leaf schema as Lance writes it; nothing where Lance cannot say it.
    static STORED: LazyLock<Option<LanceSchema>> =
        LazyLock::new(|| LanceSchema::try_from(LEAF_SCHEMA.as_ref()).ok());
    let io: Arc<dyn EncodingsIo> = Arc::new(file.clone());
    let config = SchedulerConfig::new(1 << 30).with_lite_scheduler();
    let scheduler = ScanScheduler::new(Arc::clone(&STORE), config);
    let reader = scheduler.open_reader(Arc::new(file.clone()));
    let metadata = block_on(FileReader::read_all_metadata(&reader)).map_err(DecodeError::Lance)?;
    let stored = &metadata.file_schema.fields;
    if STORED
        .as_ref()
        .is_some_and(|s| same_lance_fields(stored, &s.fields))
    {
        leaf_columns::learn(&file.bytes, footer);
    } else {
        let schema = Schema::from(metadata.file_schema.as_ref());
        if !same_fields(schema.fields(), LEAF_SCHEMA.fields()) {
            return Err(DecodeError::Schema(schema));
        }
    }
    let open = FileReader::try_open_with_file_metadata(
        io,
        file.path,
        None,
        Arc::clone(&PLUGINS),
        Arc::new(metadata),
        &CACHE,
        FileReaderOptions::default(),
    );
    let reader = block_on(open).map_err(DecodeError::Lance)?;
    if reader.num_rows() == 0 {
        return Ok(Vec::new());
    }
    let batches = reader.read_stream_projected_blocking(
        ReadBatchParams::RangeFull,
        BATCH_ROWS,
        None,
        FilterExpression::no_filter(),
    );
    batches
        .map_err(DecodeError::Lance)?
        .map(|batch| batch.map_err(DecodeError::Arrow))
        .collect()
}

/// Whether any record has an overlay.
pub(super) fn has_overlays(batch: &RecordBatch) -> bool {
    batch
        .column_by_name("overlays")
        .and_then(|c| c.as_list_opt::<i32>())
        .is_none_or(|list| !list.values().is_empty())
}

/// Bytes of the footer of a Lance file, its magic included.
const FOOTER_BYTES: usize = 40;

/// The end of a Lance file, its offsets checked before anybody computes with them.
pub(super) struct Footer {
    /// Where the table of the columns' places lies.
    column_offsets: usize,
    /// Number of columns.
    pub columns: u32,
    /// Major and minor.
    pub version: (u16, u16),
    /// The descriptor, which holds the schema.
    pub schema: Range<usize>,
}

impl Footer {
    pub(super) fn read(location: &str, bytes: &Bytes) -> Result<Self> {
        Self::parse(bytes).map_err(|found| {
            Error::corrupt(
                location,
                "leaf_unreadable",
                "a Lance file of records",
                found,
            )
        })
    }

    fn parse(bytes: &Bytes) -> std::result::Result<Self, String> {
        let (body, footer) = bytes
            .len()
            .checked_sub(FOOTER_BYTES)
            .and_then(|at| bytes.split_at_checked(at))
            .ok_or_else(|| format!("{} bytes", bytes.len()))?;
        if !footer.ends_with(b"LANC") {
            return Err("no Lance magic at its end".into());
        }
        let (columns, column_offsets, buffers) =
            (word(footer, 0), word(footer, 8), word(footer, 16));
        if columns > column_offsets || column_offsets > buffers || buffers > body.len() {
            return Err("footer offsets outside the file".into());
        }
        if bytes.len() - buffers < 16 {
            return Err("no global buffer".into());
        }
        let (position, size) = (word(bytes, buffers), word(bytes, buffers + 8));
        let schema = position..position.saturating_add(size);
        if position > columns || schema.end > buffers {
            return Err("a schema outside the file".into());
        }
        let number = |at| -> u32 {
            let number = footer.get(at..at + 4).and_then(|b| b.try_into().ok());
            number.map_or(u32::MAX, u32::from_le_bytes)
        };
        let short = |at| -> u16 {
            let number = footer.get(at..at + 2).and_then(|b| b.try_into().ok());
            number.map_or(u16::MAX, u16::from_le_bytes)
        };
        Ok(Self {
            column_offsets,
            columns: number(28),
            version: (short(32), short(34)),
            schema,
        })
    }

    /// Where the description of a column lies in `file`.
    pub(super) fn column(&self, file: &Bytes, column: u32) -> Option<Range<usize>> {
        let entry = usize::try_from(column).ok()?.checked_mul(16)?;
        let entry = self.column_offsets.checked_add(entry)?;
        let (start, size) = (word(file, entry), word(file, entry.checked_add(8)?));
        let end = start.checked_add(size)?;
        (end <= file.len()).then_some(start..end)
    }
}

/// The eight bytes at `at` as a number; the greatest where there are none.
fn word(bytes: &[u8], at: usize) -> usize {
    at.checked_add(8)
        .and_then(|end| bytes.get(at..end)?.try_into().ok())
        .map_or(u64::MAX, u64::from_le_bytes)
        .try_into()
        .unwrap_or(usize::MAX)
}

/// A file in memory, for the Lance reader: metadata through [`Reader`], pages through
/// [`EncodingsIo`]. Neither copies.
#[derive(Debug, Clone)]
pub(super) struct InMemory {
    bytes: Bytes,
    path: Path,
}

impl InMemory {
    pub(super) fn new(location: &str, bytes: Bytes) -> Self {
        let path = Path::from(location);
        Self { bytes, path }
    }

    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    fn slice(&self, range: Range<usize>) -> std::result::Result<Bytes, String> {
        if range.start <= range.end && range.end <= self.bytes.len() {
            return Ok(self.bytes.slice(range));
        }
        Err(format!(
            "{range:?} is outside the {} bytes of the leaf",
            self.bytes.len()
        ))
    }
}

impl DeepSizeOf for InMemory {
    fn deep_size_of_children(&self, _: &mut Context) -> usize {
        self.bytes.len()
    }
}

impl Reader for InMemory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn block_size(&self) -> usize {
        64 << 10
    }

    fn io_parallelism(&self) -> usize {
        1
    }

    fn size(&self) -> BoxFuture<'_, object_store::Result<usize>> {
        Box::pin(std::future::ready(Ok(self.bytes.len())))
    }

    fn get_range(&self, range: Range<usize>) -> BoxFuture<'static, object_store::Result<Bytes>> {
        let result = self.slice(range).map_err(|e| object_store::Error::Generic {
            store: "leaf",
            source: e.into(),
        });
        Box::pin(std::future::ready(result))
    }

    fn get_all(&self) -> BoxFuture<'_, object_store::Result<Bytes>> {
        Box::pin(std::future::ready(Ok(self.bytes.clone())))
    }
}

impl EncodingsIo for InMemory {
    fn submit_request(
        &self,
        ranges: Vec<Range<u64>>,
        _priority: u64,
    ) -> BoxFuture<'static, lance_core::Result<Vec<Bytes>>> {
        let result = ranges
            .into_iter()
            .map(|range| {
                let bound = |b: u64| usize::try_from(b).unwrap_or(usize::MAX);
                self.slice(bound(range.start)..bound(range.end))
                    .map_err(lance_core::Error::invalid_input)
            })
            .collect();
        Box::pin(std::future::ready(result))
    }
}
