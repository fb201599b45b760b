//! `fragtree_fragments`: one row a fragment.

use std::sync::{Arc, LazyLock};

use arrow::array::{
    ArrayRef, Int32Builder, ListBuilder, RecordBatch, StringArray, StringBuilder, StructArray,
    UInt32Array, UInt32Builder, UInt64Array, UInt64Builder,
};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field, Fields, SchemaRef};
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use lance_table::format::pb;

use super::{batch_of, schema_of, unknown_column};
use crate::error::{Error, Result};
use crate::physical::metadata::MetadataSource;
use crate::ranges::FragmentRanges;
use crate::snapshot::Snapshot;
use crate::tree_scan::{ResolvedFragment, WalkOptions, WalkState};

static FILE_FIELDS: LazyLock<Fields> = LazyLock::new(|| {
    let ints = || DataType::List(Arc::new(Field::new_list_field(DataType::Int32, true)));
    Fields::from(vec![
        Field::new("path", DataType::Utf8, false),
        Field::new("fields", ints(), false),
        Field::new("column_indices", ints(), false),
        Field::new("file_major_version", DataType::UInt32, false),
        Field::new("file_minor_version", DataType::UInt32, false),
        Field::new("file_size_bytes", DataType::UInt64, true),
        Field::new("base_id", DataType::UInt32, true),
    ])
});

static DELETION_FIELDS: LazyLock<Fields> = LazyLock::new(|| {
    Fields::from(vec![
        Field::new("path", DataType::Utf8, false),
        Field::new("num_deleted_rows", DataType::UInt64, true),
        Field::new("base_id", DataType::UInt32, true),
    ])
});

/// Columns of the function.
pub(super) fn schema() -> SchemaRef {
    let files = Field::new_list_field(DataType::Struct(FILE_FIELDS.clone()), false);
    schema_of(vec![
        Field::new("fragment_id", DataType::UInt64, false),
        Field::new("physical_rows", DataType::UInt64, true),
        Field::new("deleted_rows", DataType::UInt64, true),
        Field::new("num_files", DataType::UInt64, false),
        Field::new("files", DataType::List(Arc::new(files)), false),
        Field::new(
            "deletion_file",
            DataType::Struct(DELETION_FIELDS.clone()),
            true,
        ),
        Field::new("num_overlays", DataType::UInt64, false),
        Field::new("row_ids", DataType::Utf8, true),
    ])
}

/// The fragments of a snapshot whose ids are wanted.
#[derive(Debug)]
pub(super) struct Fragments {
    pub snapshot: Arc<Snapshot>,
    pub wanted: FragmentRanges,
}

impl MetadataSource for Fragments {
    fn batches(
        &self,
        schema: &SchemaRef,
        state: &WalkState,
    ) -> BoxStream<'static, Result<RecordBatch>> {
        let schema = Arc::clone(schema);
        self.snapshot
            .fragments(self.wanted.clone(), &WalkOptions::default(), state)
            .and_then(move |fragments| std::future::ready(batch(&schema, &fragments)))
            .boxed()
    }

    fn describe(&self) -> String {
        format!(
            "fragments of table={}, version={}, layout={}, fragments={}",
            crate::resolve::display_uri(self.snapshot.uri()),
            self.snapshot.version(),
            self.snapshot.layout(),
            self.wanted
        )
    }
}

fn batch(schema: &SchemaRef, fragments: &[ResolvedFragment]) -> Result<RecordBatch> {
    // Records are built only for columns that need them, and then once for all of those.
    let needs_records = ["deletion_file", "num_overlays", "row_ids"]
        .iter()
        .any(|name| schema.column_with_name(name).is_some());
    let records = if needs_records {
        fragments
            .iter()
            .map(ResolvedFragment::record)
            .collect::<Result<Vec<_>>>()?
    } else {
        Vec::new()
    };
    batch_of(schema, fragments.len(), |name| {
        Ok(match name {
            "fragment_id" => Arc::new(UInt64Array::from_iter_values(
                fragments.iter().map(|f| u64::from(f.id())),
            )),
            "physical_rows" => numbers(fragments, ResolvedFragment::physical_rows),
            "deleted_rows" => numbers(fragments, ResolvedFragment::deleted_rows),
            "num_files" => file_counts(fragments)?,
            "files" => files(fragments)?,
            "deletion_file" => deletion_files(&records)?,
            "num_overlays" => Arc::new(UInt64Array::from_iter_values(
                records.iter().map(|r| r.overlays.len() as u64),
            )),
            "row_ids" => Arc::new(records.iter().map(row_ids).collect::<StringArray>()),
            name => return Err(unknown_column(name)),
        })
    })
}

fn numbers(
    fragments: &[ResolvedFragment],
    of: impl Fn(&ResolvedFragment) -> Option<u64>,
) -> ArrayRef {
    Arc::new(fragments.iter().map(of).collect::<UInt64Array>())
}

fn row_ids(record: &pb::DataFragment) -> Option<&'static str> {
    use pb::data_fragment::RowIdSequence;
    record.row_id_sequence.as_ref().map(|ids| match ids {
        RowIdSequence::InlineRowIds(_) => "inline",
        RowIdSequence::ColumnRowIds(_) => "column",
    })
}

fn file_counts(fragments: &[ResolvedFragment]) -> Result<ArrayRef> {
    let counts = fragments
        .iter()
        .map(|f| f.for_each_file(|_, _, _, _, _, _, _| {}).map(|n| n as u64))
        .collect::<Result<Vec<_>>>()?;
    Ok(Arc::new(UInt64Array::from(counts)))
}

fn files(fragments: &[ResolvedFragment]) -> Result<ArrayRef> {
    let mut path = StringBuilder::new();
    let mut fields = ListBuilder::new(Int32Builder::new());
    let mut columns = ListBuilder::new(Int32Builder::new());
    let mut major = UInt32Builder::new();
    let mut minor = UInt32Builder::new();
    let mut size = UInt64Builder::new();
    let mut base = UInt32Builder::new();
    let mut lengths = Vec::with_capacity(fragments.len());
    for fragment in fragments {
        let files = fragment.for_each_file(|p, f, c, ma, mi, s, b| {
            path.append_value(p);
            fields.append_value(f.iter().map(|v| Some(*v)));
            columns.append_value(c.iter().map(|v| Some(*v)));
            major.append_value(ma);
            minor.append_value(mi);
            // Zero means unknown.
            size.append_option((s > 0).then_some(s));
            base.append_option(b);
        })?;
        lengths.push(files);
    }
    let arrays: Vec<ArrayRef> = vec![
        Arc::new(path.finish()),
        Arc::new(fields.finish()),
        Arc::new(columns.finish()),
        Arc::new(major.finish()),
        Arc::new(minor.finish()),
        Arc::new(size.finish()),
        Arc::new(base.finish()),
    ];
    let arrow = |e| Error::datafusion("cannot build the list of files", e);
    let files = StructArray::try_new(FILE_FIELDS.clone(), arrays, None).map_err(arrow)?;
    let item = Field::new_list_field(files.data_type().clone(), false);
    let list = arrow::array::ListArray::try_new(
        Arc::new(item),
        OffsetBuffer::from_lengths(lengths),
        Arc::new(files),
        None,
    );
    Ok(Arc::new(list.map_err(arrow)?))
}

use arrow::array::Array;

fn deletion_files(records: &[pb::DataFragment]) -> Result<ArrayRef> {
    let deletions: Vec<_> = records
        .iter()
        .map(|r| r.deletion_file.as_ref().map(|d| (r.id, d)))
        .collect();
    let path: StringArray = deletions
        .iter()
        .map(|d| Some(d.map_or_else(String::new, |(id, d)| deletion_path(id, d))))
        .collect();
    let rows: UInt64Array = deletions
        .iter()
        .map(|d| d.map(|(_, d)| d.num_deleted_rows).filter(|n| *n > 0))
        .collect();
    let base: UInt32Array = deletions
        .iter()
        .map(|d| d.and_then(|(_, d)| d.base_id))
        .collect();
    let present = NullBuffer::from_iter(deletions.iter().map(Option::is_some));
    let arrays: Vec<ArrayRef> = vec![Arc::new(path), Arc::new(rows), Arc::new(base)];
    let array = StructArray::try_new(DELETION_FIELDS.clone(), arrays, Some(present))
        .map_err(|e| Error::datafusion("cannot build the deletion files", e))?;
    Ok(Arc::new(array))
}

/// Path of a deletion file, relative to its dataset.
pub(crate) fn deletion_path(fragment_id: u64, file: &pb::DeletionFile) -> String {
    let bitmap = pb::deletion_file::DeletionFileType::Bitmap;
    let extension = if file.file_type == i32::from(bitmap) {
        "bin"
    } else {
        "arrow"
    };
    format!(
        "_deletions/{fragment_id}-{}-{}.{extension}",
        file.read_version, file.id
    )
}
