//! Reading the Lance file of a leaf: from bytes in memory to record batches.
//!
//! Decoding a file has a cost for each of its columns that does not depend on the number of rows, and
//! most leaves have no overlay. So one column of the overlays is read first, whose lists say whether
//! there is any; the other seven are read where there is.

use std::ops::Range;
use std::panic::AssertUnwindSafe;
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
use lance_file::reader::{CachedFileMetadata, FileReader, FileReaderOptions, ReaderProjection};
use lance_file::version::ConcreteFileVersion;
use lance_io::ReadBatchParams;
use lance_io::object_store::ObjectStore;
use lance_io::scheduler::{ScanScheduler, SchedulerConfig};
use lance_io::traits::Reader;
use object_store::path::Path;

use super::leaf::LEAF_SCHEMA;
use crate::error::{Error, Result};

/// Rows of a leaf are decoded in batches of this many, so that 32-bit string offsets suffice.
const BATCH_ROWS: u32 = 1 << 16;

/// Columns of a leaf file where only values have a column: Lance 2.1 and later.
const VALUE_COLUMNS: u32 = 17;

/// The leaf schema as Lance writes it, and the projection that leaves out the data files of
/// overlays.
struct Expected {
    schema: LanceSchema,
    without_overlay_files: ReaderProjection,
}

/// Nothing where Lance cannot say the leaf schema; then files are read whole.
static EXPECTED: LazyLock<Option<Expected>> = LazyLock::new(|| {
    let schema = LanceSchema::try_from(LEAF_SCHEMA.as_ref()).ok()?;
    let columns = ["id", "fragment_meta", "files", "overlays.item.overlay_meta"];
    let projected = schema.project(&columns).ok()?;
    let last = VALUE_COLUMNS - 1;
    Some(Expected {
        schema,
        without_overlay_files: ReaderProjection {
            schema: Arc::new(projected),
            // Those before the overlays, and the last, their `overlay_meta`.
            column_indices: (0..VALUE_COLUMNS)
                .filter(|c| *c < 9 || *c == last)
                .collect(),
        },
    })
});

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
    check_footer(location, &bytes)?;
    let unreadable =
        |what: String| Error::corrupt(location, "leaf_unreadable", "a Lance file of records", what);
    // The Lance decoder asserts in places; a leaf it cannot take must be an error all the same.
    let decoded = std::panic::catch_unwind(AssertUnwindSafe(|| decode_file(location, bytes)));
    match decoded {
        Ok(Ok(batches)) => Ok(batches),
        Ok(Err(DecodeError::Schema(schema))) => Err(Error::corrupt(
            location,
            "leaf_schema",
            format!("{:?}", LEAF_SCHEMA.fields()),
            format!("{:?}", schema.fields()),
        )),
        Ok(Err(DecodeError::Lance(e))) => Err(unreadable(e.to_string())),
        Ok(Err(DecodeError::Arrow(e))) => Err(unreadable(e.to_string())),
        Err(_) => Err(unreadable("bytes that stop the Lance decoder".into())),
    }
}

enum DecodeError {
    Schema(Schema),
    Lance(lance_core::Error),
    Arrow(arrow::error::ArrowError),
}

fn decode_file(location: &str, bytes: Bytes) -> std::result::Result<Vec<RecordBatch>, DecodeError> {
    static STORE: LazyLock<Arc<ObjectStore>> = LazyLock::new(|| Arc::new(ObjectStore::memory()));
    static CACHE: LazyLock<LanceCache> = LazyLock::new(LanceCache::no_cache);
    static PLUGINS: LazyLock<Arc<DecoderPlugins>> = LazyLock::new(Arc::default);
    let reader = InMemory {
        bytes,
        path: Path::from(location),
    };
    let io: Arc<dyn EncodingsIo> = Arc::new(reader.clone());
    let config = SchedulerConfig::new(1 << 30).with_lite_scheduler();
    let scheduler = ScanScheduler::new(Arc::clone(&STORE), config);
    let file = scheduler.open_reader(Arc::new(reader.clone()));
    let metadata = block_on(FileReader::read_all_metadata(&file)).map_err(DecodeError::Lance)?;
    let expected = EXPECTED
        .as_ref()
        .filter(|e| same_lance_fields(&metadata.file_schema.fields, &e.schema.fields));
    if expected.is_none() {
        let schema = Schema::from(metadata.file_schema.as_ref());
        if !same_fields(schema.fields(), LEAF_SCHEMA.fields()) {
            return Err(DecodeError::Schema(schema));
        }
    }
    let projection = expected
        .filter(|_| has_value_columns(&metadata))
        .map(|e| e.without_overlay_files.clone());
    let open = FileReader::try_open_with_file_metadata(
        io,
        reader.path,
        None,
        Arc::clone(&PLUGINS),
        Arc::new(metadata),
        &CACHE,
        FileReaderOptions::default(),
    );
    let file = block_on(open).map_err(DecodeError::Lance)?;
    if file.num_rows() == 0 {
        return Ok(Vec::new());
    }
    let partly = projection.is_some();
    let batches = decode_columns(&file, projection)?;
    if partly && batches.iter().any(has_overlays) {
        return decode_columns(&file, None);
    }
    Ok(batches)
}

/// Whether a column index is a place in the list of the schema's values, in order.
fn has_value_columns(metadata: &CachedFileMetadata) -> bool {
    let columns = metadata.column_infos.len();
    metadata.version() != ConcreteFileVersion::V2_0 && columns == VALUE_COLUMNS as usize
}

fn has_overlays(batch: &RecordBatch) -> bool {
    batch
        .column_by_name("overlays")
        .and_then(|c| c.as_list_opt::<i32>())
        .is_none_or(|list| !list.values().is_empty())
}

fn decode_columns(
    file: &FileReader,
    projection: Option<ReaderProjection>,
) -> std::result::Result<Vec<RecordBatch>, DecodeError> {
    let batches = file
        .read_stream_projected_blocking(
            ReadBatchParams::RangeFull,
            BATCH_ROWS,
            projection,
            FilterExpression::no_filter(),
        )
        .map_err(DecodeError::Lance)?;
    batches
        .map(|batch| batch.map_err(DecodeError::Arrow))
        .collect()
}

/// Bytes of the footer of a Lance file, its magic included.
const FOOTER_BYTES: usize = 40;

/// Checks the offsets in the footer before the decoder computes with them.
fn check_footer(location: &str, bytes: &Bytes) -> Result<()> {
    let unreadable = |found: String| {
        Err(Error::corrupt(
            location,
            "leaf_unreadable",
            "a Lance file of records",
            found,
        ))
    };
    let Some((body, footer)) = bytes
        .len()
        .checked_sub(FOOTER_BYTES)
        .and_then(|at| bytes.split_at_checked(at))
    else {
        return unreadable(format!("{} bytes", bytes.len()));
    };
    if !footer.ends_with(b"LANC") {
        return unreadable("no Lance magic at its end".into());
    }
    let word = |at: usize| -> u64 {
        footer
            .get(at..at + 8)
            .and_then(|b| b.try_into().ok())
            .map_or(u64::MAX, u64::from_le_bytes)
    };
    let (columns, column_offsets, buffers) = (word(0), word(8), word(16));
    if columns > column_offsets || column_offsets > buffers || buffers > body.len() as u64 {
        return unreadable("footer offsets outside the file".into());
    }
    let first_buffer = usize::try_from(buffers)
        .ok()
        .and_then(|at| bytes.get(at..at.checked_add(16)?));
    let Some(first_buffer) = first_buffer else {
        return unreadable("no global buffer".into());
    };
    let (position, size) = first_buffer.split_at(8);
    let number = |b: &[u8]| b.try_into().map_or(u64::MAX, u64::from_le_bytes);
    let (position, size) = (number(position), number(size));
    if position > columns || position.checked_add(size).is_none_or(|end| end > buffers) {
        return unreadable("a schema outside the file".into());
    }
    Ok(())
}

/// A file in memory, for the Lance reader: metadata through [`Reader`], pages through
/// [`EncodingsIo`]. Neither copies.
#[derive(Debug, Clone)]
struct InMemory {
    bytes: Bytes,
    path: Path,
}

impl InMemory {
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
