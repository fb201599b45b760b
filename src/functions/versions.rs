//! `fragtree_versions`: one row a version, the latest first.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, ListBuilder, RecordBatch, StringArray, StringBuilder, TimestampMicrosecondArray,
    UInt64Array,
};
use arrow::datatypes::{DataType, Field, SchemaRef, TimeUnit};
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use lance_table::format::pb;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use prost::Message;

use super::{batch_of, schema_of, unknown_column};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::physical::metadata::MetadataSource;
use crate::resolve::{Table, VersionEntry, VersionRef, timestamp};
use crate::snapshot::Snapshot;
use crate::tree::object::Limits;
use crate::tree::summary::Counts;
use crate::tree_scan::WalkState;
use crate::write::DONE;

/// Columns of the function.
pub(super) fn schema() -> SchemaRef {
    let time = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    let tags = DataType::List(Arc::new(Field::new_list_field(DataType::Utf8, true)));
    schema_of(vec![
        Field::new("version", DataType::UInt64, false),
        Field::new("timestamp", time, true),
        Field::new("layout", DataType::Utf8, false),
        Field::new("operation", DataType::Utf8, true),
        Field::new("manifest_bytes", DataType::UInt64, false),
        Field::new("transaction_bytes", DataType::UInt64, true),
        Field::new("mutations", DataType::UInt64, true),
        Field::new("num_fragments", DataType::UInt64, true),
        Field::new("total_rows", DataType::UInt64, true),
        Field::new("visible_rows", DataType::UInt64, true),
        Field::new("tags", tags, false),
    ])
}

/// The versions of a snapshot's branch.
#[derive(Debug)]
pub(super) struct Versions {
    pub snapshot: Arc<Snapshot>,
    pub engine: Engine,
    /// Rows wanted at most.
    pub limit: Option<usize>,
}

/// One version with what the asked-for columns need.
struct Row {
    entry: VersionEntry,
    operation: Option<String>,
    /// Length of the transaction's record, in a file of its own or inside the manifest file.
    transaction_bytes: Option<u64>,
    /// Changes of fragment records that the version adds to the one before, when both are trees.
    mutations: Option<u64>,
    counts: Option<Counts>,
    fragments: Option<u64>,
    tags: Vec<String>,
}

impl MetadataSource for Versions {
    fn batches(
        &self,
        schema: &SchemaRef,
        _state: &WalkState,
    ) -> BoxStream<'static, Result<RecordBatch>> {
        let reader = Reader {
            snapshot: Arc::clone(&self.snapshot),
            engine: self.engine.clone(),
            schema: Arc::clone(schema),
            limit: self.limit.unwrap_or(usize::MAX),
        };
        stream::once(async move { reader.read().await }).boxed()
    }

    fn describe(&self) -> String {
        format!(
            "versions of table={}",
            crate::resolve::display_uri(self.snapshot.uri())
        )
    }
}

struct Reader {
    snapshot: Arc<Snapshot>,
    engine: Engine,
    schema: SchemaRef,
    limit: usize,
}

impl Reader {
    fn asks(&self, columns: &[&str]) -> bool {
        columns
            .iter()
            .any(|c| self.schema.column_with_name(c).is_some())
    }

    async fn read(&self) -> Result<RecordBatch> {
        let table = self.snapshot.table(Limits::default()).await?;
        let mut locations = table.list().await?;
        // What a version adds is seen against the one before.
        let before = usize::from(self.asks(&["mutations"]));
        locations.truncate(self.limit.saturating_add(before));
        let tags = if self.asks(&["tags"]) {
            self.tags().await?
        } else {
            Vec::new()
        };
        let mut rows = Vec::with_capacity(locations.len());
        let mut entries = table.entries(locations);
        let mut next = entries.try_next().await?;
        while let Some(entry) = next.take().filter(|_| rows.len() < self.limit) {
            next = entries.try_next().await?;
            let mutations = next.as_ref().and_then(|before| mutations(before, &entry));
            let mut row = self.row(&table, entry, &tags).await?;
            row.mutations = mutations;
            rows.push(row);
        }
        self.batch(&rows)
    }

    async fn row(&self, table: &Table, entry: VersionEntry, tags: &[(String, u64)]) -> Result<Row> {
        let (mut operation, mut transaction_bytes) = (None, None);
        if self.asks(&["operation", "transaction_bytes"])
            && let Some((name, size)) = transaction(table, &entry).await?
        {
            (operation, transaction_bytes) = (name, Some(size));
        }
        let (mut counts, mut fragments) = (None, None);
        if self.asks(&["num_fragments", "total_rows", "visible_rows"]) {
            let options = self
                .engine
                .open_options()
                .with_reference(VersionRef::version(entry.location.version))
                .with_storage_options(self.storage_options());
            let version = Snapshot::open(self.snapshot.uri(), options).await?;
            counts = version.counts()?;
            fragments = Some(version.num_fragments()?);
        }
        let version = entry.location.version;
        let tags = tags.iter().filter(|(_, v)| *v == version);
        Ok(Row {
            tags: tags.map(|(name, _)| name.clone()).collect(),
            entry,
            operation,
            transaction_bytes,
            mutations: None,
            counts,
            fragments,
        })
    }

    fn storage_options(&self) -> std::collections::HashMap<String, String> {
        let options = self.snapshot.params().storage_options();
        options.cloned().unwrap_or_default()
    }

    /// The tags on this snapshot's branch.
    async fn tags(&self) -> Result<Vec<(String, u64)>> {
        let shell = self.snapshot.shell();
        let branch = shell.manifest().branch.clone();
        let tags = shell
            .tags()
            .list()
            .await
            .map_err(|e| Error::lance("cannot list the table's tags", e))?;
        let mut tags: Vec<_> = tags
            .into_iter()
            .filter(|(_, contents)| contents.branch == branch)
            .map(|(name, contents)| (name, contents.version))
            .collect();
        tags.sort_unstable();
        Ok(tags)
    }

    fn batch(&self, rows: &[Row]) -> Result<RecordBatch> {
        let number = |of: &dyn Fn(&Row) -> Option<u64>| -> ArrayRef {
            Arc::new(rows.iter().map(of).collect::<UInt64Array>())
        };
        batch_of(&self.schema, rows.len(), |name| {
            Ok(match name {
                "version" => number(&|r| Some(r.entry.location.version)),
                "timestamp" => {
                    let times: TimestampMicrosecondArray = rows
                        .iter()
                        .map(|r| timestamp(&r.entry.head).map(|t| t.timestamp_micros()))
                        .collect();
                    Arc::new(times.with_timezone("UTC"))
                }
                "layout" => Arc::new(StringArray::from_iter_values(
                    rows.iter().map(|r| r.entry.layout.to_string()),
                )),
                "operation" => Arc::new(
                    rows.iter()
                        .map(|r| r.operation.as_deref())
                        .collect::<StringArray>(),
                ),
                "manifest_bytes" => number(&|r| Some(r.entry.file_size)),
                "transaction_bytes" => number(&|r| r.transaction_bytes),
                "mutations" => number(&|r| r.mutations),
                "num_fragments" => number(&|r| r.fragments),
                "total_rows" => number(&|r| r.counts.map(|c| c.total_rows)),
                "visible_rows" => number(&|r| r.counts.map(|c| c.visible_rows)),
                "tags" => {
                    let mut list = ListBuilder::new(StringBuilder::new());
                    for row in rows {
                        list.append_value(row.tags.iter().map(Some));
                    }
                    Arc::new(list.finish())
                }
                name => return Err(unknown_column(name)),
            })
        })
    }
}

/// Sequences given out between two versions: each mutation takes one (spec, "Sequence numbers").
/// Nothing when one is flat or they do not follow each other, as in a tree that was made anew.
fn mutations(before: &VersionEntry, after: &VersionEntry) -> Option<u64> {
    let follows = before.location.version.checked_add(1)? == after.location.version;
    let (before, after) = before.next_sequence.zip(after.next_sequence)?;
    after.checked_sub(before).filter(|_| follows)
}

/// The operation of the transaction that made a version and the length of its record, when the
/// version has one.
async fn transaction(table: &Table, entry: &VersionEntry) -> Result<Option<(Option<String>, u64)>> {
    let head = &entry.head;
    let (path, bytes) = if head.transaction_file.is_empty() {
        let Some(at) = head
            .transaction_section
            .or(head.transaction_section_deprecated)
        else {
            return Ok(None);
        };
        let path = entry.location.path.clone();
        (
            path.clone(),
            read_section(table, &path, at, entry.file_size).await?,
        )
    } else {
        let path = table
            .base
            .clone()
            .join("_transactions")
            .join(head.transaction_file.as_str());
        match table.store.inner.get(&path).await {
            Ok(result) => {
                let bytes = result.bytes().await;
                (
                    path.clone(),
                    bytes.map_err(|e| Error::store(path.to_string(), e))?,
                )
            }
            // Cleanup may take it, and a version is whole without.
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(e) => return Err(Error::store(path.to_string(), e)),
        }
    };
    let size = bytes.len() as u64;
    let transaction = pb::Transaction::decode(bytes).map_err(|e| {
        Error::corrupt(
            path.to_string(),
            "transaction",
            "a Transaction message",
            e.to_string(),
        )
    })?;
    // A conversion changes nothing in Lance's terms, and says itself what it is.
    let done = transaction.transaction_properties.get(DONE).cloned();
    let operation = done.or_else(|| transaction.operation.as_ref().map(operation_name));
    Ok(Some((operation, size)))
}

async fn read_section(table: &Table, path: &Path, at: u64, size: u64) -> Result<Bytes> {
    let error = |e| Error::store(path.to_string(), e);
    let outside = || {
        Error::corrupt(
            path.to_string(),
            "transaction",
            "a section inside the file",
            at,
        )
    };
    let end = at
        .checked_add(4)
        .filter(|e| *e <= size)
        .ok_or_else(outside)?;
    let length = table
        .store
        .inner
        .get_range(path, at..end)
        .await
        .map_err(error)?;
    let length = length
        .first_chunk::<4>()
        .map_or(0, |b| u32::from_le_bytes(*b));
    let stop = end
        .checked_add(u64::from(length))
        .filter(|e| *e <= size)
        .ok_or_else(outside)?;
    table
        .store
        .inner
        .get_range(path, end..stop)
        .await
        .map_err(error)
}

fn operation_name(operation: &pb::transaction::Operation) -> String {
    use pb::transaction::Operation;
    match operation {
        Operation::Append(_) => "Append",
        Operation::Delete(_) => "Delete",
        Operation::Overwrite(_) => "Overwrite",
        Operation::CreateIndex(_) => "CreateIndex",
        Operation::Rewrite(_) => "Rewrite",
        Operation::Merge(_) => "Merge",
        Operation::Restore(_) => "Restore",
        Operation::ReserveFragments(_) => "ReserveFragments",
        Operation::Update(_) => "Update",
        Operation::Project(_) => "Project",
        Operation::UpdateConfig(_) => "UpdateConfig",
        Operation::DataReplacement(_) => "DataReplacement",
        Operation::UpdateMemWalState(_) => "UpdateMemWalState",
        Operation::Clone(_) => "Clone",
        Operation::UpdateBases(_) => "UpdateBases",
        Operation::DataOverlay(_) => "DataOverlay",
    }
    .to_string()
}
