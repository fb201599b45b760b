//! Leaves: Lance files of complete fragment records, decoded once and kept as columns.
//!
//! A record becomes a protobuf message only when somebody asks for it; counting and merging read
//! the id and row-count columns alone. Decoding checks every rule a leaf can break by itself
//! (spec, "Leaf format"); what depends on the reference is checked by [`Leaf::check`].

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use arrow::array::{
    Array, AsArray, BinaryArray, DictionaryArray, ListArray, PrimitiveArray, RecordBatch,
    StringArray, StructArray, UInt32Array, UInt64Array,
};
use arrow::datatypes::{
    DataType, Field, Fields, Int32Type, Schema, SchemaRef, UInt32Type, UInt64Type,
};
use bytes::Bytes;
use lance_io::utils::CachedFileSize;
use lance_table::format::{DataFile, Fragment, pb};
use prost::Message;

use super::leaf_file::{read_batches, read_every_column};
use super::leaf_meta::{check_meta, record_of_meta};
use super::node::{Child, NodeContext, check_allocated, check_counts};
use super::object::{BaseTable, Owner};
use super::record::{check_mapping, decode_mapping, resolve_owner, to_fragment};
use super::summary::{Counts, Tally};
use crate::error::{Error, Result};

/// The schema of every leaf (spec, "Leaf format").
pub(crate) static LEAF_SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| {
    let list =
        |item: Fields| DataType::List(Arc::new(Field::new("item", DataType::Struct(item), false)));
    let overlay = Fields::from(vec![
        Field::new("data_file", DataType::Struct(data_file_fields()), false),
        Field::new("overlay_meta", DataType::Binary, false),
    ]);
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::UInt64, false),
        Field::new("fragment_meta", DataType::Binary, false),
        Field::new("files", list(data_file_fields()), false),
        Field::new("overlays", list(overlay), false),
    ]))
});

/// The fields of one data file in a leaf.
pub(crate) fn data_file_fields() -> Fields {
    let mapping = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Binary));
    Fields::from(vec![
        Field::new("path", DataType::Utf8, false),
        Field::new("field_ids", mapping.clone(), false),
        Field::new("column_indices", mapping, false),
        Field::new("major_version", DataType::UInt32, false),
        Field::new("minor_version", DataType::UInt32, false),
        Field::new("file_size_bytes", DataType::UInt64, false),
        Field::new("base_id", DataType::UInt32, true),
    ])
}

/// A decoded leaf.
#[derive(Debug)]
pub(crate) struct Leaf {
    location: String,
    batches: Vec<LeafBatch>,
    ids: Vec<u32>,
    physical_rows: Vec<u64>,
    deleted_rows: Vec<u64>,
    tally: Tally,
    /// Every base id a record names; looked up again for each manifest that refers to the leaf.
    base_ids: BTreeSet<u32>,
    memory_bytes: usize,
}

impl Leaf {
    /// Decodes a leaf. CPU work: call it on a blocking thread.
    ///
    /// # Errors
    /// `leaf_unreadable`, `leaf_schema`, `leaf_null`, `leaf_rows_out_of_order`, `id_over_u32`,
    /// `empty_leaf`, `fragment_meta_*`, `overlay_meta_*`, `mapping_*`, `dictionary_*`,
    /// `deletion_*`.
    pub(crate) fn decode(location: &str, bytes: Bytes) -> Result<Self> {
        Self::of_batches(location, read_batches(location, bytes)?)
    }

    /// The same, without leaving out columns that hold nothing: for those who look for what is broken.
    ///
    /// # Errors
    /// Those of [`decode`](Self::decode).
    pub(crate) fn decode_whole(location: &str, bytes: Bytes) -> Result<Self> {
        Self::of_batches(location, read_every_column(location, bytes)?)
    }

    fn of_batches(location: &str, batches: Vec<RecordBatch>) -> Result<Self> {
        let mut leaf = Self {
            location: location.to_string(),
            batches: Vec::with_capacity(batches.len()),
            ids: Vec::new(),
            physical_rows: Vec::new(),
            deleted_rows: Vec::new(),
            tally: Tally::default(),
            base_ids: BTreeSet::new(),
            memory_bytes: 0,
        };
        for batch in batches {
            leaf.push(&batch)?;
        }
        if leaf.ids.is_empty() {
            return Err(Error::corrupt(
                location,
                "empty_leaf",
                "at least one record in a leaf",
                0,
            ));
        }
        let rows = leaf.ids.len();
        leaf.memory_bytes += rows * (size_of::<u32>() + 2 * size_of::<u64>());
        Ok(leaf)
    }

    fn push(&mut self, batch: &RecordBatch) -> Result<()> {
        let decoded = LeafBatch::try_new(&self.location, batch, self.ids.len())?;
        for row in 0..batch.num_rows() {
            let id = decoded.ids.value(row);
            let id = u32::try_from(id).map_err(|_| {
                Error::corrupt(
                    self.location.as_str(),
                    "id_over_u32",
                    "a fragment id of at most 2^32 - 1",
                    id,
                )
            })?;
            if let Some(last) = self.ids.last()
                && *last >= id
            {
                return Err(Error::corrupt(
                    self.location.as_str(),
                    "leaf_rows_out_of_order",
                    format!("an id above {last}"),
                    id,
                ));
            }
            let meta = check_meta(&self.location, id, decoded.meta.value(row))?;
            let deleted = meta.deleted_rows();
            self.base_ids
                .extend(meta.deletion_file.and_then(|d| d.base_id));
            self.ids.push(id);
            self.physical_rows.push(meta.physical_rows);
            self.deleted_rows.push(deleted);
            self.tally += Counts::of_fragment(meta.physical_rows, deleted);
        }
        decoded.files.collect_base_ids(&mut self.base_ids);
        if let Some(files) = &decoded.overlay_files {
            files.collect_base_ids(&mut self.base_ids);
        }
        self.memory_bytes += batch.get_array_memory_size() + decoded.mapping_bytes();
        self.batches.push(decoded);
        Ok(())
    }

    /// Checks the leaf against the reference it was reached by and the place that reference is in.
    ///
    /// # Errors
    /// `num_keys_mismatch`, `total_rows_mismatch`, `visible_rows_mismatch`,
    /// `leaf_id_out_of_range`, `id_over_max_fragment_id`, `unknown_base_id`.
    pub(crate) fn check(&self, child: &Child, context: &NodeContext<'_>) -> Result<()> {
        check_counts(context.object, child.counts, self.tally)?;
        if let (Some(first), Some(last)) = (self.ids.first(), self.ids.last()) {
            for id in [u64::from(*first), u64::from(*last)] {
                if !context.range.contains(&id) {
                    return Err(Error::corrupt(
                        context.object,
                        "leaf_id_out_of_range",
                        format!("fragment ids in {:?}", context.range),
                        id,
                    ));
                }
            }
            check_allocated(context.object, u64::from(*last), context.max_fragment_id)?;
        }
        self.check_bases(context.object, context.bases)
    }

    fn check_bases(&self, object: &str, bases: &BaseTable) -> Result<()> {
        self.base_ids
            .iter()
            .try_for_each(|id| bases.require(object, Some(*id)))
    }

    /// Fragment ids of the records, strictly increasing.
    pub(crate) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Physical and deleted rows of a record.
    pub(crate) fn row_counts(&self, row: usize) -> (u64, u64) {
        let get = |values: &[u64]| values.get(row).copied().unwrap_or_default();
        (get(&self.physical_rows), get(&self.deleted_rows))
    }

    /// The rows whose ids lie in `range`.
    pub(crate) fn rows_in(&self, range: &Range<u64>) -> Range<usize> {
        let at = |bound: u64| self.ids.partition_point(|id| u64::from(*id) < bound);
        at(range.start)..at(range.end)
    }

    /// The complete record of a row, its owner resolved.
    pub(crate) fn record(&self, row: usize, owner: Owner) -> Result<pb::DataFragment> {
        let (batch, row) = self.locate(row)?;
        let mut record = batch.record(&self.location, row)?;
        resolve_owner(&mut record, owner);
        Ok(record)
    }

    /// The same record as Lance's own type, which shares the mappings of files that have the same.
    pub(crate) fn fragment(&self, row: usize, owner: Owner) -> Result<Fragment> {
        let (batch, row) = self.locate(row)?;
        let mut rest = batch.record_without_files(&self.location, row)?;
        resolve_owner(&mut rest, owner);
        let id = rest.id;
        let object = format_args!("fragment {id} of {}", self.location);
        let mut fragment = to_fragment(object, rest)?;
        let files = batch.file_range(row);
        fragment.files = files
            .map(|i| batch.files.lance_file(i, owner.base_id()))
            .collect();
        Ok(fragment)
    }

    /// The data files of a row, as columns: for readers that want files and not records.
    pub(crate) fn file_list(&self, row: usize) -> Result<FileList<'_>> {
        let (batch, row) = self.locate(row)?;
        Ok(FileList {
            files: &batch.files,
            range: batch.file_range(row),
        })
    }

    fn locate(&self, row: usize) -> Result<(&LeafBatch, usize)> {
        let index = self.batches.partition_point(|b| b.first_row <= row);
        index
            .checked_sub(1)
            .and_then(|i| self.batches.get(i))
            .filter(|b| row - b.first_row < b.ids.len())
            .map(|b| (b, row - b.first_row))
            .ok_or_else(|| Error::internal(format!("row {row} is outside {}", self.location)))
    }

    /// Where the leaf lies, for messages.
    pub(crate) fn location(&self) -> &str {
        &self.location
    }

    /// Bytes this leaf takes in memory, about.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }
}

/// The files of one record, borrowed from its leaf.
#[derive(Debug)]
pub(crate) struct FileList<'a> {
    files: &'a FileColumns,
    range: Range<usize>,
}

impl FileList<'_> {
    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }

    /// Calls `visit` with path, major, minor, size and base id of each file.
    pub(crate) fn for_each(
        &self,
        mut visit: impl FnMut(&str, &[i32], &[i32], u32, u32, u64, Option<u32>),
    ) {
        let f = self.files;
        for i in self.range.clone() {
            visit(
                f.path.value(i),
                f.field_ids.get(i),
                f.column_indices.get(i),
                f.major.value(i),
                f.minor.value(i),
                f.size.value(i),
                f.base_id(i),
            );
        }
    }
}

/// A column of mapping vectors: keys into distinct decoded vectors.
#[derive(Debug)]
struct MappingColumn {
    keys: PrimitiveArray<Int32Type>,
    values: Vec<Arc<[i32]>>,
}

impl MappingColumn {
    fn try_new(object: &str, name: &str, array: &dyn Array) -> Result<Self> {
        let broken = |rule, expected: &str, found: String| {
            Error::corrupt(format!("{object}, column {name}"), rule, expected, found)
        };
        let dictionary: &DictionaryArray<Int32Type> = array
            .as_dictionary_opt()
            .ok_or_else(|| schema_error(object, name, array.data_type()))?;
        let stored = dictionary.values();
        // A null value that no key points to is not visible in the column (`spec/notes.md` 16).
        if stored.null_count() > 0 {
            return Err(broken(
                "dictionary_null_value",
                "dictionary values that are not null",
                format!("{} nulls", stored.null_count()),
            ));
        }
        let keys = dictionary.keys().clone();
        if keys.null_count() > 0 {
            return Err(broken(
                "leaf_null",
                "no nulls",
                format!("{} nulls", keys.null_count()),
            ));
        }
        let stored: &BinaryArray = stored
            .as_binary_opt()
            .ok_or_else(|| schema_error(object, name, array.data_type()))?;
        let bad = keys
            .values()
            .iter()
            .find(|k| usize::try_from(**k).map_or(true, |k| k >= stored.len()));
        if let Some(key) = bad {
            return Err(broken(
                "dictionary_key",
                "dictionary keys within the dictionary",
                format!("{key} of {}", stored.len()),
            ));
        }
        let label = format!("{object}, column {name}");
        let values = stored
            .iter()
            .map(|v| Ok(decode_mapping(&label, v.unwrap_or_default())?.into()))
            .collect::<Result<_>>()?;
        Ok(Self { keys, values })
    }

    fn key(&self, row: usize) -> i32 {
        self.keys.value(row)
    }

    fn at(&self, row: usize) -> Option<&Arc<[i32]>> {
        let key = usize::try_from(self.key(row)).ok()?;
        self.values.get(key)
    }

    fn get(&self, row: usize) -> &[i32] {
        self.at(row).map_or(&[], AsRef::as_ref)
    }

    fn shared(&self, row: usize) -> Arc<[i32]> {
        self.at(row).cloned().unwrap_or_default()
    }
}

/// Combinations of mappings that are found again without a hash.
const CHECKED_MAPPINGS: u32 = 1 << 10;

/// The columns of a list of data files.
#[derive(Debug)]
struct FileColumns {
    path: StringArray,
    field_ids: MappingColumn,
    column_indices: MappingColumn,
    major: UInt32Array,
    minor: UInt32Array,
    size: UInt64Array,
    base: UInt32Array,
}

impl FileColumns {
    fn try_new(object: &str, name: &str, array: &StructArray) -> Result<Self> {
        let column = |field: &str| required(object, &format!("{name}.{field}"), array, field);
        let columns = Self {
            path: column("path")?
                .as_string_opt::<i32>()
                .cloned()
                .ok_or_else(|| schema_error(object, name, array.data_type()))?,
            field_ids: MappingColumn::try_new(
                object,
                &format!("{name}.field_ids"),
                column("field_ids")?,
            )?,
            column_indices: MappingColumn::try_new(
                object,
                &format!("{name}.column_indices"),
                column("column_indices")?,
            )?,
            major: primitive::<UInt32Type>(object, name, column("major_version")?)?,
            minor: primitive::<UInt32Type>(object, name, column("minor_version")?)?,
            size: primitive::<UInt64Type>(object, name, column("file_size_bytes")?)?,
            base: primitive::<UInt32Type>(
                object,
                name,
                array
                    .column_by_name("base_id")
                    .map(AsRef::as_ref)
                    .ok_or_else(|| schema_error(object, name, array.data_type()))?,
            )?,
        };
        columns.check_mappings(object, name)?;
        Ok(columns)
    }

    /// Checks the mapping rules once per distinct combination. There are as many as a fragment has
    /// files, thousands of times over, so those met of late are found without a hash.
    fn check_mappings(&self, object: &str, name: &str) -> Result<()> {
        let mut checked = HashSet::new();
        let mut recent = [None; CHECKED_MAPPINGS as usize];
        for row in 0..self.path.len() {
            let key = (
                self.field_ids.key(row),
                self.column_indices.key(row),
                self.major.value(row),
                self.minor.value(row),
            );
            // Keys are never negative.
            let place = key.0.unsigned_abs() ^ key.1.unsigned_abs().rotate_left(5);
            let place = usize::try_from(place % CHECKED_MAPPINGS).unwrap_or_default();
            let Some(last) = recent.get_mut(place) else {
                return Err(Error::internal("a place outside its table"));
            };
            if last.replace(key) == Some(key) || !checked.insert(key) {
                continue;
            }
            check_mapping(
                &format!("{object}, {name} entry {row}"),
                key.2,
                key.3,
                self.field_ids.get(row),
                self.column_indices.get(row),
            )?;
        }
        Ok(())
    }

    fn base_id(&self, row: usize) -> Option<u32> {
        self.base.is_valid(row).then(|| self.base.value(row))
    }

    fn collect_base_ids(&self, into: &mut BTreeSet<u32>) {
        if self.base.null_count() < self.base.len() {
            into.extend(self.base.iter().flatten());
        }
    }

    fn file(&self, row: usize) -> pb::DataFile {
        pb::DataFile {
            path: self.path.value(row).to_string(),
            fields: self.field_ids.get(row).to_vec(),
            column_indices: self.column_indices.get(row).to_vec(),
            file_major_version: self.major.value(row),
            file_minor_version: self.minor.value(row),
            file_size_bytes: self.size.value(row),
            base_id: self.base_id(row),
        }
    }

    fn lance_file(&self, row: usize, owner: Option<u32>) -> DataFile {
        DataFile {
            path: self.path.value(row).to_string(),
            fields: self.field_ids.shared(row),
            column_indices: self.column_indices.shared(row),
            file_major_version: self.major.value(row),
            file_minor_version: self.minor.value(row),
            file_size_bytes: CachedFileSize::new(self.size.value(row)),
            base_id: self.base_id(row).or(owner),
        }
    }

    fn mapping_bytes(&self) -> usize {
        [&self.field_ids, &self.column_indices]
            .iter()
            .flat_map(|m| &m.values)
            .map(|v| size_of::<Arc<[i32]>>() + v.len() * size_of::<i32>())
            .sum()
    }
}

/// One decoded batch of a leaf.
#[derive(Debug)]
struct LeafBatch {
    first_row: usize,
    ids: UInt64Array,
    meta: BinaryArray,
    file_offsets: ListArray,
    files: FileColumns,
    overlay_offsets: ListArray,
    /// None where there is no overlay.
    overlay_files: Option<FileColumns>,
    overlay_meta: BinaryArray,
}

impl LeafBatch {
    fn try_new(object: &str, batch: &RecordBatch, first_row: usize) -> Result<Self> {
        let root = StructArray::from(batch.clone());
        let column = |name: &str| required(object, name, &root, name);
        let list = |name: &str| -> Result<ListArray> {
            let list = column(name)?
                .as_list_opt::<i32>()
                .ok_or_else(|| schema_error(object, name, root.data_type()))?;
            Ok(list.clone())
        };
        let items = |name: &str, list: &ListArray| -> Result<StructArray> {
            no_nulls(object, name, list.values())?;
            list.values()
                .as_struct_opt()
                .cloned()
                .ok_or_else(|| schema_error(object, name, list.data_type()))
        };
        let binary = |name: &str, array: &dyn Array| -> Result<BinaryArray> {
            array
                .as_binary_opt::<i32>()
                .cloned()
                .ok_or_else(|| schema_error(object, name, array.data_type()))
        };
        let file_offsets = list("files")?;
        let files = items("files", &file_offsets)?;
        let overlay_offsets = list("overlays")?;
        let overlays = items("overlays", &overlay_offsets)?;
        let overlay_files = match overlays.len() {
            0 => None,
            _ => {
                let files = required(object, "overlays.data_file", &overlays, "data_file")?
                    .as_struct_opt()
                    .ok_or_else(|| schema_error(object, "overlays", overlays.data_type()))?;
                Some(FileColumns::try_new(object, "overlays", files)?)
            }
        };
        let leaf = Self {
            first_row,
            ids: primitive::<UInt64Type>(object, "id", column("id")?)?,
            meta: binary("fragment_meta", column("fragment_meta")?)?,
            files: FileColumns::try_new(object, "files", &files)?,
            file_offsets,
            overlay_files,
            overlay_meta: binary(
                "overlay_meta",
                required(object, "overlays.overlay_meta", &overlays, "overlay_meta")?,
            )?,
            overlay_offsets,
        };
        for row in 0..leaf.overlay_meta.len() {
            leaf.decode_overlay(object, row)?;
        }
        Ok(leaf)
    }

    fn decode_overlay(&self, location: &str, row: usize) -> Result<pb::DataOverlayFile> {
        let overlay = pb::DataOverlayFile::decode(self.overlay_meta.value(row)).map_err(|e| {
            Error::corrupt(
                location,
                "overlay_meta_undecodable",
                "a DataOverlayFile message",
                e.to_string(),
            )
        })?;
        if overlay.data_file.is_some() {
            return Err(Error::corrupt(
                location,
                "overlay_meta_data_file",
                "no data_file in overlay_meta",
                "one",
            ));
        }
        Ok(overlay)
    }

    fn file_range(&self, row: usize) -> Range<usize> {
        list_range(&self.file_offsets, row)
    }

    fn record(&self, location: &str, row: usize) -> Result<pb::DataFragment> {
        let mut record = self.record_without_files(location, row)?;
        record.files = self.file_range(row).map(|i| self.files.file(i)).collect();
        Ok(record)
    }

    fn record_without_files(&self, location: &str, row: usize) -> Result<pb::DataFragment> {
        let id = self.ids.value(row);
        let mut record = record_of_meta(self.meta.value(row)).map_err(|e| {
            Error::internal(format!(
                "{location}, fragment {id}: decoded before, now {e}"
            ))
        })?;
        record.id = id;
        record.overlays = list_range(&self.overlay_offsets, row)
            .map(|i| {
                let mut overlay = self.decode_overlay(location, i)?;
                overlay.data_file = self.overlay_files.as_ref().map(|f| f.file(i));
                Ok(overlay)
            })
            .collect::<Result<_>>()?;
        Ok(record)
    }

    fn mapping_bytes(&self) -> usize {
        let overlays = self.overlay_files.as_ref();
        self.files.mapping_bytes() + overlays.map_or(0, FileColumns::mapping_bytes)
    }
}

fn list_range(list: &ListArray, row: usize) -> Range<usize> {
    let at = |i: usize| {
        list.value_offsets()
            .get(i)
            .and_then(|o| usize::try_from(*o).ok())
            .unwrap_or_default()
    };
    at(row)..at(row + 1)
}

fn schema_error(object: &str, name: &str, found: &DataType) -> Error {
    Error::corrupt(
        format!("{object}, column {name}"),
        "leaf_schema",
        "the leaf schema",
        found,
    )
}

fn no_nulls(object: &str, name: &str, array: &dyn Array) -> Result<()> {
    if array.null_count() == 0 {
        return Ok(());
    }
    Err(Error::corrupt(
        format!("{object}, column {name}"),
        "leaf_null",
        "no nulls",
        format!("{} nulls", array.null_count()),
    ))
}

fn required<'a>(
    object: &str,
    name: &str,
    parent: &'a StructArray,
    field: &str,
) -> Result<&'a dyn Array> {
    let column = parent
        .column_by_name(field)
        .ok_or_else(|| schema_error(object, name, parent.data_type()))?;
    no_nulls(object, name, column)?;
    Ok(column)
}

fn primitive<T: arrow::datatypes::ArrowPrimitiveType>(
    object: &str,
    name: &str,
    array: &dyn Array,
) -> Result<PrimitiveArray<T>> {
    array
        .as_primitive_opt::<T>()
        .cloned()
        .ok_or_else(|| schema_error(object, name, array.data_type()))
}

#[cfg(test)]
mod tests;
