//! The short way to the columns of a leaf.
//!
//! Lance's reader decodes the schema of a file, then what each of its columns is made of, then the
//! columns, and a leaf is so small that most of the time goes into all but the values. Of a leaf the
//! schema is known, and its bytes are only compared; overlays are not looked at where no record has
//! one; and the file versions, and a base id that is always null, are stored as one value for the
//! whole page, which is copied instead of decoded. The values themselves are decoded by Lance.
//!
//! Nothing here is an error: whatever is unusual is left to Lance's reader, and its verdict counts.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use arrow::array::{
    Array, ArrayRef, AsArray, ListArray, RecordBatch, StructArray, UInt32Array, new_empty_array,
    new_null_array,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Schema};
use bytes::Bytes;
use lance_core::cache::LanceCache;
use lance_core::datatypes::Schema as LanceSchema;
use lance_encoding::EncodingsIo;
use lance_encoding::decoder::{
    ColumnInfo, DecoderConfig, DecoderPlugins, FilterExpression, PageInfo, RequestedRows,
    SchedulerDecoderConfig, schedule_and_decode_blocking,
};
use lance_encoding::format::{pb, pb21};
use lance_file::format::pbfile;
use parking_lot::RwLock;
use prost::{Message, Name};

use super::leaf::{LEAF_SCHEMA, data_file_fields};
use super::leaf_file::{BATCH_ROWS, Footer, InMemory, has_overlays};

/// Columns of a leaf file where only values have a column: Lance 2.1 and later.
const COLUMNS: u32 = 17;
const MAJOR: u32 = 5;
const MINOR: u32 = 6;
const BASE: u32 = 8;
/// The fields of a data file in these columns.
const CONSTANT_FIELDS: [&str; 3] = ["major_version", "minor_version", "base_id"];
/// `overlay_meta`: its lists say whether there is any overlay.
const OVERLAY_META: u32 = COLUMNS - 1;

/// Page buffers begin at multiples of this.
const ALIGNMENT: u64 = 64;

/// Columns to read, as Lance wants to be told.
struct Projection {
    columns: Vec<u32>,
    schema: Arc<LanceSchema>,
}

impl Projection {
    /// What is read of a leaf of which `missing` is filled in.
    fn new(missing: &Missing) -> Option<Self> {
        let whole = LanceSchema::try_from(LEAF_SCHEMA.as_ref()).ok()?;
        let fields = data_file_fields();
        let mut names = vec!["id".to_string(), "fragment_meta".to_string()];
        names.extend(
            fields
                .iter()
                .map(|f| f.name().as_str())
                .filter(|f| !missing.files || !CONSTANT_FIELDS.contains(f))
                .map(|f| format!("files.item.{f}")),
        );
        let mut columns: Vec<_> = (0..=BASE)
            .filter(|c| !missing.files || ![MAJOR, MINOR, BASE].contains(c))
            .collect();
        if !missing.overlays {
            names.push("overlays.item.overlay_meta".into());
            columns.push(OVERLAY_META);
        }
        Some(Self {
            columns,
            schema: Arc::new(whole.project(&names).ok()?),
        })
    }
}

/// What is not read but filled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Missing {
    /// Versions and base ids of data files.
    files: bool,
    /// Overlays.
    overlays: bool,
}

static PROJECTIONS: LazyLock<Option<Vec<(Missing, Projection)>>> = LazyLock::new(|| {
    [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .map(|(files, overlays)| Missing { files, overlays })
        .map(|missing| Some((missing, Projection::new(&missing)?)))
        .collect()
});

/// Schemas, as stored, that Lance's reader read and that were those of leaves, the last one first.
/// Every writer stores the same one each time, so there are as many as there are writers.
static KNOWN_SCHEMAS: RwLock<Vec<Bytes>> = RwLock::new(Vec::new());

/// How many of them are kept, and of which size at most.
const MAX_KNOWN: usize = 8;
const MAX_SCHEMA_BYTES: usize = 16 << 10;

fn is_known(schema: &Bytes) -> bool {
    KNOWN_SCHEMAS.read().contains(schema)
}

/// The start of a Lance file's descriptor, its schema not decoded.
#[derive(Clone, PartialEq, Message)]
struct Descriptor {
    #[prost(bytes = "bytes", tag = "1")]
    schema: Bytes,
    #[prost(uint64, tag = "2")]
    length: u64,
}

/// Remembers the schema of a file that is known to be a leaf's.
pub(super) fn learn(file: &Bytes, footer: &Footer) {
    let Ok(descriptor) = Descriptor::decode(file.slice(footer.schema.clone())) else {
        return;
    };
    let schema = descriptor.schema;
    if schema.len() <= MAX_SCHEMA_BYTES && !is_known(&schema) {
        let mut known = KNOWN_SCHEMAS.write();
        known.truncate(MAX_KNOWN - 1);
        // A copy, so that the file it came from can go.
        known.insert(0, Bytes::copy_from_slice(&schema));
    }
}

/// The records of a leaf, or nothing where Lance's reader must see to it.
pub(super) fn read(file: &InMemory, footer: &Footer) -> Option<Vec<RecordBatch>> {
    if footer.columns != COLUMNS || !matches!(footer.version, (2, 1 | 2)) {
        return None;
    }
    let descriptor = Descriptor::decode(file.bytes().slice(footer.schema.clone())).ok()?;
    if descriptor.length == 0 || !is_known(&descriptor.schema) {
        return None;
    }
    let rows = 0..descriptor.length;
    let column = |c: u32| Column::read(file.bytes(), footer, c, descriptor.length);
    let major = column(MAJOR)?;
    let minor = column(MINOR)?;
    let base = column(BASE)?;
    let overlays = column(OVERLAY_META)?;
    let versions = major.number().zip(minor.number());
    let filled = Filled {
        versions: versions.filter(|_| base.is_null()),
        no_overlays: overlays.is_empty_list(),
    };
    let missing = filled.missing();
    let (_, wanted) = PROJECTIONS.as_ref()?.iter().find(|(m, _)| *m == missing)?;
    let mut looked_at = [
        (MAJOR, major),
        (MINOR, minor),
        (BASE, base),
        (OVERLAY_META, overlays),
    ]
    .map(|(index, column)| (index, Some(column)));
    let columns = wanted
        .columns
        .iter()
        .map(|index| {
            let had = looked_at.iter_mut().find(|(i, _)| i == index);
            let description = had.and_then(|(_, column)| column.take());
            description.or_else(|| column(*index))?.info(*index)
        })
        .collect::<Option<Vec<_>>>()?;
    let batches = decode(file, columns, rows, &wanted.schema)?;
    let batches: Vec<_> = batches
        .iter()
        .map(|b| filled.fill(b))
        .collect::<Option<_>>()?;
    // Their data files were not read.
    (!batches.iter().any(has_overlays)).then_some(batches)
}

fn decode(
    file: &InMemory,
    columns: Vec<Arc<ColumnInfo>>,
    rows: Range<u64>,
    schema: &Arc<LanceSchema>,
) -> Option<Vec<RecordBatch>> {
    static CACHE: LazyLock<Arc<LanceCache>> = LazyLock::new(|| Arc::new(LanceCache::no_cache()));
    static PLUGINS: LazyLock<Arc<DecoderPlugins>> = LazyLock::new(Arc::default);
    let places = (0..).take(columns.len()).collect();
    let io: Arc<dyn EncodingsIo> = Arc::new(file.clone());
    schedule_and_decode_blocking(
        columns,
        RequestedRows::Ranges(vec![rows]),
        FilterExpression::no_filter(),
        places,
        Arc::clone(schema),
        SchedulerDecoderConfig {
            decoder_plugins: Arc::clone(&PLUGINS),
            batch_size: BATCH_ROWS,
            io,
            cache: Arc::clone(&CACHE),
            decoder_config: DecoderConfig::default(),
            batch_size_bytes: None,
        },
    )
    .ok()?
    .collect::<Result<_, _>>()
    .ok()
}

/// What a file says about one of its columns.
struct Column {
    metadata: pbfile::ColumnMetadata,
    layouts: Vec<pb21::PageLayout>,
}

impl Column {
    fn read(file: &Bytes, footer: &Footer, column: u32, rows: u64) -> Option<Self> {
        let metadata = pbfile::ColumnMetadata::decode(file.slice(footer.column(file, column)?));
        let metadata = metadata.ok()?;
        let layouts = metadata
            .pages
            .iter()
            .map(|page| {
                let layout = unpack(page.encoding.as_ref()?)?;
                let aligned = page.buffer_offsets.iter().all(|o| o % ALIGNMENT == 0);
                let complete = page.buffer_offsets.len() == page.buffer_sizes.len();
                (aligned && complete && is_plain(&layout)).then_some(layout)
            })
            .collect::<Option<Vec<_>>>()?;
        let length = metadata
            .pages
            .iter()
            .try_fold(0_u64, |sum, page| sum.checked_add(page.length))?;
        (length == rows && !layouts.is_empty()).then_some(Self { metadata, layouts })
    }

    /// The column for Lance's decoder.
    fn info(self, index: u32) -> Option<Arc<ColumnInfo>> {
        let encoding: pb::ColumnEncoding = unpack(self.metadata.encoding.as_ref()?)?;
        let pages = self.metadata.pages.into_iter().zip(self.layouts);
        let pages = pages.map(|(page, layout)| PageInfo {
            num_rows: page.length,
            priority: page.priority,
            encoding: layout.into(),
            buffer_offsets_and_sizes: page
                .buffer_offsets
                .into_iter()
                .zip(page.buffer_sizes)
                .collect(),
        });
        let info = ColumnInfo::new(index, pages.collect(), Vec::new(), encoding);
        Some(Arc::new(info))
    }

    /// The one value of a column of 32-bit numbers, none of them null.
    fn number(&self) -> Option<u32> {
        let mut values = self.layouts.iter().map(|layout| {
            let constant = as_constant(layout)?;
            let item = *constant.layers.first()?;
            let value = constant.inline_value.as_ref()?.as_ref().try_into().ok()?;
            (item == pb21::RepDefLayer::RepdefAllValidItem as i32)
                .then_some(u32::from_le_bytes(value))
        });
        let first = values.next()??;
        values.all(|v| v == Some(first)).then_some(first)
    }

    /// Whether every value is null: a constant that is neither in the description nor in a buffer.
    fn is_null(&self) -> bool {
        let mut pages = self.layouts.iter().zip(&self.metadata.pages);
        pages.all(|(layout, page)| {
            as_constant(layout).is_some_and(|c| c.inline_value.is_none())
                && !matches!(page.buffer_offsets.len(), 1 | 3)
        })
    }

    /// Whether it is in lists that are all empty: nothing in them or around them may be null, and there
    /// is no value.
    fn is_empty_list(&self) -> bool {
        let empty = [
            pb21::RepDefLayer::RepdefAllValidItem as i32,
            pb21::RepDefLayer::RepdefAllValidItem as i32,
            pb21::RepDefLayer::RepdefEmptyableList as i32,
        ];
        let mut layouts = self.layouts.iter();
        self.is_null() && layouts.all(|l| as_constant(l).is_some_and(|c| c.layers == empty))
    }
}

fn as_constant(layout: &pb21::PageLayout) -> Option<&pb21::ConstantLayout> {
    match layout.layout.as_ref()? {
        pb21::page_layout::Layout::ConstantLayout(constant) => Some(constant),
        _ => None,
    }
}

fn unpack<M: Name + Default>(encoding: &pbfile::Encoding) -> Option<M> {
    match encoding.location.as_ref()? {
        pbfile::encoding::Location::Direct(direct) => {
            prost_types::Any::decode(direct.encoding.as_slice())
                .ok()?
                .to_msg()
                .ok()
        }
        _ => None,
    }
}

/// Whether a page is described in the way leaves are, with nothing missing that the decoder counts
/// on.
fn is_plain(layout: &pb21::PageLayout) -> bool {
    use pb21::page_layout::Layout;
    let plain = |e: &Option<_>| e.as_ref().is_none_or(is_complete);
    match layout.layout.as_ref() {
        Some(Layout::MiniBlockLayout(page)) => {
            page.value_compression.as_ref().is_some_and(is_complete)
                && plain(&page.rep_compression)
                && plain(&page.def_compression)
                && plain(&page.dictionary)
        }
        Some(Layout::ConstantLayout(page)) => {
            plain(&page.rep_compression) && plain(&page.def_compression)
        }
        Some(Layout::FullZipLayout(_) | Layout::BlobLayout(_)) | None => false,
    }
}

fn is_complete(encoding: &pb21::CompressiveEncoding) -> bool {
    use pb21::compressive_encoding::Compression;
    let inner = |e: &Option<Box<_>>| e.as_ref().is_some_and(|e| is_complete(e));
    match encoding.compression.as_ref() {
        Some(
            Compression::Flat(_) | Compression::InlineBitpacking(_) | Compression::Constant(_),
        ) => true,
        Some(Compression::Variable(e)) => inner(&e.offsets),
        Some(Compression::OutOfLineBitpacking(e)) => inner(&e.values),
        Some(Compression::Fsst(e)) => inner(&e.values),
        Some(Compression::Dictionary(e)) => inner(&e.indices) && inner(&e.items),
        Some(Compression::Rle(e)) => inner(&e.values) && inner(&e.run_lengths),
        Some(Compression::General(e)) => inner(&e.values),
        _ => false,
    }
}

/// What a file's descriptions say about columns that need not be read.
struct Filled {
    /// The version of every data file, major and minor, where none has a base id.
    versions: Option<(u32, u32)>,
    no_overlays: bool,
}

impl Filled {
    fn missing(&self) -> Missing {
        Missing {
            files: self.versions.is_some(),
            overlays: self.no_overlays,
        }
    }

    /// Adds to `batch` what was not read.
    fn fill(&self, batch: &RecordBatch) -> Option<RecordBatch> {
        let mut fields: Vec<_> = batch.schema_ref().fields().iter().cloned().collect();
        let mut columns = batch.columns().to_vec();
        if let Some(versions) = self.versions {
            let (place, _) = batch.schema_ref().column_with_name("files")?;
            let files = with_versions(columns.get(place)?.as_list_opt()?, versions)?;
            *fields.get_mut(place)? = Arc::new(LEAF_SCHEMA.field_with_name("files").ok()?.clone());
            *columns.get_mut(place)? = Arc::new(files);
        }
        if self.no_overlays {
            let field = LEAF_SCHEMA.field_with_name("overlays").ok()?;
            let DataType::List(item) = field.data_type() else {
                return None;
            };
            let overlays = ListArray::try_new(
                Arc::clone(item),
                OffsetBuffer::new_zeroed(batch.num_rows()),
                new_empty_array(item.data_type()),
                None,
            );
            columns.push(Arc::new(overlays.ok()?));
            fields.push(Arc::new(field.clone()));
        }
        RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).ok()
    }
}

/// The lists of data files with the columns that were not read.
fn with_versions(list: &ListArray, (major, minor): (u32, u32)) -> Option<ListArray> {
    let read = list.values().as_struct_opt()?;
    let number = |value| Arc::new(UInt32Array::from_value(value, read.len())) as ArrayRef;
    let fields = data_file_fields();
    let columns = fields
        .iter()
        .map(|field| match field.name().as_str() {
            "major_version" => Some(number(major)),
            "minor_version" => Some(number(minor)),
            "base_id" => Some(new_null_array(&DataType::UInt32, read.len())),
            name => read.column_by_name(name).cloned(),
        })
        .collect::<Option<Vec<_>>>()?;
    let item = Arc::new(Field::new("item", DataType::Struct(fields.clone()), false));
    let files = StructArray::try_new(fields, columns, read.nulls().cloned()).ok()?;
    let nulls = list.nulls().cloned();
    ListArray::try_new(item, list.offsets().clone(), Arc::new(files), nulls).ok()
}

#[cfg(test)]
mod tests;
