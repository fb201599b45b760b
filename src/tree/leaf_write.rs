//! Writing leaves: records to the bytes of a Lance file.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryBuilder, BinaryDictionaryBuilder, ListArray, RecordBatch, StringBuilder,
    StructArray, UInt32Builder, UInt64Builder,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, FieldRef, Int32Type};
use bytes::Bytes;
use lance_core::datatypes::Schema as LanceSchema;
use lance_file::writer::FileWriterOptions;
use lance_io::object_store::ObjectStore;
use lance_table::format::pb;
use object_store::path::Path;
use prost::Message;

use super::leaf::{LEAF_SCHEMA, data_file_fields};
use super::record::encode_mapping;
use crate::error::{Error, Result};

/// Builds the columns of a list of data files.
struct FileBuilder {
    path: StringBuilder,
    field_ids: BinaryDictionaryBuilder<Int32Type>,
    column_indices: BinaryDictionaryBuilder<Int32Type>,
    major: UInt32Builder,
    minor: UInt32Builder,
    size: UInt64Builder,
    base_id: UInt32Builder,
}

impl FileBuilder {
    fn new() -> Self {
        Self {
            path: StringBuilder::new(),
            field_ids: BinaryDictionaryBuilder::new(),
            column_indices: BinaryDictionaryBuilder::new(),
            major: UInt32Builder::new(),
            minor: UInt32Builder::new(),
            size: UInt64Builder::new(),
            base_id: UInt32Builder::new(),
        }
    }

    fn push(&mut self, file: &pb::DataFile) -> Result<()> {
        let arrow = |e| Error::datafusion("cannot encode a file mapping", e);
        self.path.append_value(&file.path);
        self.field_ids
            .append(encode_mapping(&file.fields))
            .map_err(arrow)?;
        self.column_indices
            .append(encode_mapping(&file.column_indices))
            .map_err(arrow)?;
        self.major.append_value(file.file_major_version);
        self.minor.append_value(file.file_minor_version);
        self.size.append_value(file.file_size_bytes);
        self.base_id.append_option(file.base_id);
        Ok(())
    }

    fn finish(mut self) -> Result<StructArray> {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(self.path.finish()),
            Arc::new(self.field_ids.finish()),
            Arc::new(self.column_indices.finish()),
            Arc::new(self.major.finish()),
            Arc::new(self.minor.finish()),
            Arc::new(self.size.finish()),
            Arc::new(self.base_id.finish()),
        ];
        StructArray::try_new(data_file_fields(), columns, None)
            .map_err(|e| Error::datafusion("cannot build the files of a leaf", e))
    }
}

/// Bytes of a leaf that do not depend on its records: schema, column metadata, footer.
pub(crate) const LEAF_OVERHEAD: u64 = 4096;

/// Stored bytes of records for each byte of their protobuf, before a leaf of the table has shown
/// its own.
pub(crate) const INITIAL_RATIO: f64 = 0.6;

/// Collects records into one leaf. Records must come in order of strictly increasing id.
pub(crate) struct LeafBuilder {
    ids: UInt64Builder,
    meta: BinaryBuilder,
    files: FileBuilder,
    file_lengths: Vec<usize>,
    overlay_files: FileBuilder,
    overlay_meta: BinaryBuilder,
    overlay_lengths: Vec<usize>,
    last: Option<u64>,
    /// Bytes of the records as protobuf: what a leaf's stored size is estimated from.
    proto_bytes: usize,
}

impl LeafBuilder {
    pub(crate) fn new() -> Self {
        Self {
            ids: UInt64Builder::new(),
            meta: BinaryBuilder::new(),
            files: FileBuilder::new(),
            file_lengths: Vec::new(),
            overlay_files: FileBuilder::new(),
            overlay_meta: BinaryBuilder::new(),
            overlay_lengths: Vec::new(),
            last: None,
            proto_bytes: 0,
        }
    }

    /// Records so far.
    pub(crate) fn len(&self) -> usize {
        self.file_lengths.len()
    }

    /// Bytes of the records so far as protobuf.
    pub(crate) fn proto_bytes(&self) -> usize {
        self.proto_bytes
    }

    /// Adds a record. Its base ids must already be those of the dataset the leaf is for.
    pub(crate) fn push(&mut self, record: &pb::DataFragment) -> Result<()> {
        if self.last.is_some_and(|last| last >= record.id) {
            return Err(Error::internal(format!(
                "fragment {} does not follow {:?} in a leaf",
                record.id, self.last
            )));
        }
        self.last = Some(record.id);
        self.proto_bytes += record.encoded_len();
        self.ids.append_value(record.id);
        self.meta.append_value(encode_meta(record));
        for file in &record.files {
            self.files.push(file)?;
        }
        self.file_lengths.push(record.files.len());
        for overlay in &record.overlays {
            let file = overlay.data_file.as_ref().ok_or_else(|| {
                Error::invalid(format!(
                    "fragment {} has an overlay without a file",
                    record.id
                ))
            })?;
            self.overlay_files.push(file)?;
            let meta = pb::DataOverlayFile {
                data_file: None,
                ..overlay.clone()
            };
            self.overlay_meta.append_value(meta.encode_to_vec());
        }
        self.overlay_lengths.push(record.overlays.len());
        Ok(())
    }

    /// The records as a leaf stores them.
    pub(super) fn finish(mut self) -> Result<RecordBatch> {
        let arrow = |e| Error::datafusion("cannot build a leaf", e);
        let item = |name: &str| -> Result<FieldRef> {
            let field = LEAF_SCHEMA.field_with_name(name).map_err(arrow)?;
            match field.data_type() {
                DataType::List(item) => Ok(Arc::clone(item)),
                other => Err(Error::internal(format!("{name} is {other}"))),
            }
        };
        let list = |name: &str, lengths: Vec<usize>, values: StructArray| {
            let offsets = OffsetBuffer::from_lengths(lengths);
            ListArray::try_new(item(name)?, offsets, Arc::new(values), None).map_err(arrow)
        };
        let overlay_fields = match item("overlays")?.data_type() {
            DataType::Struct(fields) => fields.clone(),
            other => return Err(Error::internal(format!("overlays hold {other}"))),
        };
        let overlays = StructArray::try_new(
            overlay_fields,
            vec![
                Arc::new(self.overlay_files.finish()?),
                Arc::new(self.overlay_meta.finish()),
            ],
            None,
        )
        .map_err(arrow)?;
        RecordBatch::try_new(
            Arc::clone(&LEAF_SCHEMA),
            vec![
                Arc::new(self.ids.finish()),
                Arc::new(self.meta.finish()),
                Arc::new(list("files", self.file_lengths, self.files.finish()?)?),
                Arc::new(list("overlays", self.overlay_lengths, overlays)?),
            ],
        )
        .map_err(arrow)
    }

    /// The bytes of the leaf, as a Lance 2.2 file: its records take half of their protobuf size.
    pub(crate) async fn encode(self) -> Result<Bytes> {
        encode_batch(&self.finish()?).await
    }
}

/// A Lance file of the records in `batch`.
pub(super) async fn encode_batch(batch: &RecordBatch) -> Result<Bytes> {
    let lance = |e| Error::lance("cannot write a leaf", e);
    let schema = LanceSchema::try_from(LEAF_SCHEMA.as_ref()).map_err(lance)?;
    let store = ObjectStore::memory();
    let path = Path::from("leaf.lance");
    let writer = store.create(&path).await.map_err(lance)?;
    let mut writer =
        lance_file::versions::v2_2::create_writer(writer, schema, FileWriterOptions::default())
            .map_err(lance)?;
    writer.write_batch(batch).await.map_err(lance)?;
    writer.finish().await.map_err(lance)?;
    store.read_one_all(&path).await.map_err(lance)
}

/// The `fragment_meta` of a record (spec, "Leaf format"). The same record gives the same bytes, so
/// that a leaf which was written before is recognised.
fn encode_meta(record: &pb::DataFragment) -> Vec<u8> {
    let meta = pb::DataFragment {
        id: 0,
        files: Vec::new(),
        overlays: Vec::new(),
        deletion_file: record.deletion_file,
        row_id_sequence: record.row_id_sequence.clone(),
        physical_rows: record.physical_rows,
        clustering_id: record.clustering_id,
        metadata: HashMap::new(),
        last_updated_at_version_sequence: record.last_updated_at_version_sequence.clone(),
        created_at_version_sequence: record.created_at_version_sequence.clone(),
    };
    let mut bytes = meta.encode_to_vec();
    let mut metadata: Vec<_> = record.metadata.iter().collect();
    metadata.sort_unstable();
    for (key, value) in metadata {
        // A map has no order of its own, but messages put one after another are one message.
        let entry = pb::DataFragment {
            metadata: HashMap::from([(key.clone(), value.clone())]),
            ..Default::default()
        };
        bytes.extend(entry.encode_to_vec());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::leaf::Leaf;
    use crate::tree::object::Owner;

    fn file(path: &str, base_id: Option<u32>) -> pb::DataFile {
        pb::DataFile {
            path: path.into(),
            fields: vec![0, 1, -2],
            column_indices: vec![0, -1, 4],
            file_major_version: 2,
            file_minor_version: 1,
            file_size_bytes: 77,
            base_id,
        }
    }

    /// Decoding blocks, and must not on an async thread.
    #[expect(clippy::disallowed_methods, reason = "a test waits for it")]
    async fn decode(bytes: Bytes) -> Result<Leaf> {
        tokio::task::spawn_blocking(move || Leaf::decode("x", bytes))
            .await
            .expect("no panic")
    }

    fn records() -> Vec<pb::DataFragment> {
        let overlay = pb::DataOverlayFile {
            data_file: Some(file("o", None)),
            committed_version: 3,
            coverage: None,
        };
        vec![
            pb::DataFragment {
                id: 0,
                files: vec![file("a", None), file("a", Some(0)), file("b", None)],
                physical_rows: 10,
                deletion_file: Some(pb::DeletionFile {
                    num_deleted_rows: 3,
                    id: 9,
                    ..Default::default()
                }),
                metadata: [("k".to_string(), "v".to_string())].into(),
                ..Default::default()
            },
            pb::DataFragment {
                id: 4_294_967_295,
                overlays: vec![overlay],
                clustering_id: Some(2),
                ..Default::default()
            },
        ]
    }

    #[tokio::test]
    async fn records_survive_a_round_trip() {
        let mut builder = LeafBuilder::new();
        for record in records() {
            builder.push(&record).expect("in order");
        }
        let bytes = builder.encode().await.expect("encodes");
        let leaf = decode(bytes).await.expect("valid");
        for (row, expected) in records().into_iter().enumerate() {
            let found = leaf.record(row, Owner::Current).expect("present");
            assert_eq!(found, expected);
        }
        assert_eq!(leaf.row_counts(0), (10, 3));
        assert_eq!(leaf.rows_in(&(1..1 << 32)), 1..2);
        let owned = leaf.record(0, Owner::Base(7)).expect("present");
        let bases: Vec<_> = owned.files.iter().map(|f| f.base_id).collect();
        assert_eq!(bases, [Some(7), Some(0), Some(7)]);
    }

    #[tokio::test]
    async fn the_same_records_give_the_same_bytes() {
        let mut encoded = Vec::new();
        for _ in 0..4 {
            let mut builder = LeafBuilder::new();
            for id in 0..300u64 {
                let metadata = (0..5).map(|i| (format!("key {i}"), format!("{id}")));
                let record = pb::DataFragment {
                    id,
                    metadata: metadata.collect(),
                    ..records().swap_remove(0)
                };
                builder.push(&record).expect("in order");
            }
            encoded.push(builder.encode().await.expect("encodes"));
        }
        assert!(encoded.iter().all(|bytes| *bytes == encoded[0]));
        let leaf = decode(encoded.swap_remove(0)).await.expect("valid");
        let found = leaf.record(7, Owner::Current).expect("present");
        assert_eq!(found.metadata.len(), 5);
        assert_eq!(found.metadata["key 3"], "7");
    }

    #[tokio::test]
    async fn every_truncation_is_an_error() {
        let mut builder = LeafBuilder::new();
        for record in records() {
            builder.push(&record).expect("in order");
        }
        let bytes = builder.encode().await.expect("encodes");
        for end in (0..bytes.len()).step_by(13) {
            assert!(decode(bytes.slice(..end)).await.is_err());
        }
    }
}
