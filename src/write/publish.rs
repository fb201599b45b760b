//! Publishing a version: the manifest file's bytes, and the commit handler that makes it visible.
//!
//! Lance's manifest type cannot carry a tree, so the message is built here; but the commit itself,
//! with its conditional put or rename and its version hint, is the table's own commit handler.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::{BufMut, Bytes, BytesMut};
use futures::FutureExt;
use futures::future::BoxFuture;
use lance_file::datatypes::FieldsWithMeta;
use lance_file::versions::v1::encoding::write_schema_dictionaries;
use lance_io::object_store::ObjectStore;
use lance_io::object_writer::WriteResult;
use lance_io::traits::Writer;
use lance_table::feature_flags::{
    FLAG_BASE_PATHS, FLAG_DELETION_FILES, FLAG_FRAGMENT_TREE, FLAG_TABLE_CONFIG,
};
use lance_table::format::{IndexMetadata, Manifest, Transaction, pb};
use lance_table::io::commit::{CommitError, CommitHandler, ManifestLocation, ManifestNamingScheme};
use lance_table::transaction::{Operation, TransactionBuilder};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use prost::Message;

use super::policy::{CONFIG_PREFIX, TreePolicy};
use crate::error::{Error, Result};
use crate::manifest::frame_manifest;
use crate::retry::retrying;
use crate::snapshot::Snapshot;

/// How a new version keeps its fragments.
pub(crate) enum Fragments {
    Tree(pb::FragmentTree),
    Flat(Vec<pb::DataFragment>),
}

/// The file of the version after `snapshot` that differs from it only in its layout.
///
/// Indexes and the dictionaries of v1 columns lie beside the manifest message in the same file and
/// are copied with it; the record of the transaction that made the old version is not
/// (`spec/notes.md` 12). The new version's own transaction changes nothing, so that other writers
/// rebase over it. `policy` is kept in the config of a tree.
pub(crate) async fn manifest_file(
    snapshot: &Snapshot,
    fragments: Fragments,
    policy: &TreePolicy,
) -> Result<Bytes> {
    let mut head = snapshot.head().clone();
    head.config.retain(|key, _| !key.starts_with(CONFIG_PREFIX));
    let (converted, config) = match &fragments {
        Fragments::Tree(_) => ("convert to tree", policy.to_config()),
        Fragments::Flat(_) => ("convert to flat", Vec::new()),
    };
    head.config.extend(config);
    if head.config.is_empty() {
        head.writer_feature_flags &= !FLAG_TABLE_CONFIG;
    } else {
        head.writer_feature_flags |= FLAG_TABLE_CONFIG;
    }
    head.version += 1;
    head.timestamp = Some(now()?);
    head.transaction_file.clear();
    head.transaction_section = None;
    head.transaction_section_deprecated = None;
    head.version_aux_data = 0;
    head.tag.clear();
    // A version without a writer is one whose row counts nobody trusts; ours are checked.
    head.writer_version.get_or_insert_with(linked_lance);
    let mut file = BytesMut::new();
    copy_dictionaries(snapshot, &mut head.fields, &mut file).await?;
    if let Some(at) = head.index_section {
        let section = read_section(snapshot, at).await?;
        head.index_section = Some(append_section(&mut file, &section)?);
    }
    let transaction = unchanging(snapshot.version(), converted)?;
    head.transaction_section = Some(append_section(&mut file, &transaction.encode_to_vec())?);
    let has_deletions = match &fragments {
        Fragments::Tree(_) => None,
        Fragments::Flat(list) => Some(list.iter().any(|f| f.deletion_file.is_some())),
    };
    match fragments {
        Fragments::Tree(tree) => {
            set_flag(&mut head, FLAG_FRAGMENT_TREE, true);
            head.fragment_tree = Some(pb::FragmentTreeMetadata {
                layout: Some(pb::fragment_tree_metadata::Layout::Tree(tree)),
            });
        }
        Fragments::Flat(list) => {
            set_flag(&mut head, FLAG_FRAGMENT_TREE, false);
            head.fragments = list;
        }
    }
    if let Some(has_deletions) = has_deletions {
        set_flag(&mut head, FLAG_DELETION_FILES, has_deletions);
    }
    let has_bases = !head.base_paths.is_empty();
    set_flag(&mut head, FLAG_BASE_PATHS, has_bases);
    frame_manifest(&file, &head.encode_to_vec())
}

/// A transaction that changes nothing and conflicts with nothing, named by what was done.
pub(crate) fn unchanging_operation() -> Operation {
    Operation::UpdateConfig {
        config_updates: None,
        table_metadata_updates: None,
        schema_metadata_updates: None,
        field_metadata_updates: HashMap::new(),
    }
}

/// The property of a transaction that says what fragtree did.
pub(crate) const DONE: &str = "fragtree.operation";

fn unchanging(read_version: u64, done: &str) -> Result<pb::Transaction> {
    let properties = HashMap::from([(DONE.to_string(), done.to_string())]);
    let transaction = TransactionBuilder::new(read_version, unchanging_operation())
        .transaction_properties(Some(Arc::new(properties)))
        .build();
    pb::Transaction::try_from(&transaction)
        .map_err(|e| Error::lance("cannot write down the transaction", e))
}

fn set_flag(head: &mut pb::Manifest, flag: u64, on: bool) {
    for flags in [
        &mut head.reader_feature_flags,
        &mut head.writer_feature_flags,
    ] {
        if on {
            *flags |= flag;
        } else {
            *flags &= !flag;
        }
    }
}

fn linked_lance() -> pb::manifest::WriterVersion {
    let version = lance_table::format::WriterVersion::default();
    pb::manifest::WriterVersion {
        library: version.library,
        version: version.version,
        prerelease: version.prerelease,
        build_metadata: version.build_metadata,
    }
}

fn now() -> Result<prost_types::Timestamp> {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_err(|_| Error::invalid("the clock is before 1970"))?;
    Ok(prost_types::Timestamp {
        seconds: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(now.subsec_nanos()).unwrap_or_default(),
    })
}

fn append_section(file: &mut BytesMut, section: &[u8]) -> Result<u64> {
    let position = file.len() as u64;
    let length = u32::try_from(section.len()).map_err(|_| {
        Error::invalid(format!(
            "a manifest section of {} bytes is more than a manifest can hold",
            section.len()
        ))
    })?;
    file.put_u32_le(length);
    file.put_slice(section);
    Ok(position)
}

/// Copies the dictionaries that v1 files keep in the manifest, and points the fields at the copies.
async fn copy_dictionaries(
    snapshot: &Snapshot,
    fields: &mut Vec<lance_file::format::pb::Field>,
    file: &mut BytesMut,
) -> Result<()> {
    let stored =
        |f: &lance_file::format::pb::Field| f.dictionary.as_ref().is_some_and(|d| d.length > 0);
    if !fields.iter().any(stored) {
        return Ok(());
    }
    let context = |e| Error::lance("cannot copy the dictionaries of the schema", e);
    let memory = ObjectStore::memory();
    let path = Path::from("dictionaries");
    let mut writer = memory.create(&path).await.map_err(context)?;
    // The shell was opened with the dictionaries' values.
    let mut schema = snapshot.shell().manifest().schema.clone();
    write_schema_dictionaries(writer.as_mut(), &mut schema)
        .await
        .map_err(context)?;
    Writer::shutdown(writer.as_mut()).await.map_err(context)?;
    file.extend_from_slice(&memory.read_one_all(&path).await.map_err(context)?);
    *fields = FieldsWithMeta::from(&schema).fields.0;
    Ok(())
}

/// Reads a section of the snapshot's manifest file.
async fn read_section(snapshot: &Snapshot, at: u64) -> Result<Bytes> {
    let store = snapshot
        .shell()
        .object_store(None)
        .await
        .map_err(|e| Error::lance("cannot open the table's object store", e))?;
    let size = snapshot.open_cost().manifest_bytes;
    section_of(&store, &snapshot.location().path, size, at).await
}

/// Reads the section that begins at `at` of the manifest file `path` of `size` bytes.
///
/// # Errors
/// `index_section` when it is not inside the file.
pub(crate) async fn section_of(
    store: &ObjectStore,
    path: &Path,
    size: u64,
    at: u64,
) -> Result<Bytes> {
    let outside = || {
        Error::corrupt(
            path.to_string(),
            "index_section",
            "a section inside the file",
            at,
        )
    };
    let end = at
        .checked_add(4)
        .filter(|e| *e <= size)
        .ok_or_else(outside)?;
    let get = |range: Range<u64>| {
        retrying(move || {
            let range = range.clone();
            async move {
                let bytes = store.inner.get_range(path, range).await;
                bytes.map_err(|e| Error::store(path.to_string(), e))
            }
        })
    };
    let length = get(at..end).await?;
    let length = length
        .first_chunk::<4>()
        .map_or(0, |b| u32::from_le_bytes(*b));
    let stop = end
        .checked_add(u64::from(length))
        .filter(|e| *e <= size)
        .ok_or_else(outside)?;
    get(end..stop).await
}

tokio::task_local! {
    /// The manifest file being committed by this task. A commit handler takes a plain function to
    /// write it, so the bytes cannot be captured.
    static COMMITTING: Bytes;
}

fn write_committing<'a>(
    store: &'a ObjectStore,
    _manifest: &'a mut Manifest,
    _indices: Option<Vec<IndexMetadata>>,
    path: &'a Path,
    _transaction: Option<Transaction>,
) -> BoxFuture<'a, lance::Result<WriteResult>> {
    async move {
        let bytes = COMMITTING.try_with(Bytes::clone).map_err(|_| {
            lance::Error::internal("no manifest to commit in this task".to_string())
        })?;
        let size = bytes.len();
        let put = store.inner.put(path, bytes.into()).await?;
        Ok(WriteResult {
            size,
            e_tag: put.e_tag,
        })
    }
    .boxed()
}

/// What became of a commit.
pub(crate) enum Commit {
    /// The version is visible.
    Done(ManifestLocation),
    /// Another writer has this version; ours is not visible.
    Conflict,
}

/// Commits `file` as the version after `snapshot`.
///
/// # Errors
/// Anything but a conflict. Whether the version became visible is then looked up: if it did, that is
/// a success.
pub(crate) async fn commit(snapshot: &Snapshot, file: Bytes) -> Result<Commit> {
    let shell = snapshot.shell();
    let handler: &Arc<dyn CommitHandler> = snapshot.handler();
    let store = shell
        .object_store(None)
        .await
        .map_err(|e| Error::lance("cannot open the table's object store", e))?;
    let base = shell.branch_location().path;
    let mut manifest = shell.manifest().clone();
    manifest.version = snapshot.version() + 1;
    let naming = snapshot.location().naming_scheme;
    let outcome = publish_bytes(handler, &store, &base, naming, &manifest, file.clone()).await;
    match outcome {
        Ok(location) => Ok(Commit::Done(location)),
        Err(CommitError::CommitConflict) => Ok(Commit::Conflict),
        Err(CommitError::OtherError(error)) => {
            read_back(snapshot, &base, &store, manifest.version, &file, error).await
        }
    }
}

/// Commits `file` as `manifest.version`, through the table's own handler.
pub(crate) async fn publish_bytes(
    handler: &Arc<dyn CommitHandler>,
    store: &ObjectStore,
    base: &Path,
    naming_scheme: ManifestNamingScheme,
    manifest: &Manifest,
    file: Bytes,
) -> std::result::Result<ManifestLocation, CommitError> {
    // The handler reads the version off the manifest and writes what the task is committing.
    let mut manifest = manifest.clone();
    let attempt = handler.commit(
        &mut manifest,
        None,
        base,
        store,
        write_committing,
        naming_scheme,
        None,
    );
    COMMITTING.scope(file, attempt).await
}

/// Settles a commit whose answer was an error: the version may be there all the same.
async fn read_back(
    snapshot: &Snapshot,
    base: &Path,
    store: &ObjectStore,
    version: u64,
    file: &Bytes,
    error: lance::Error,
) -> Result<Commit> {
    let context = format!("cannot commit version {version} of {}", snapshot.uri());
    let found = snapshot
        .handler()
        .resolve_version_location(base, version, &store.inner)
        .await;
    if let Ok(location) = found
        && let Ok(result) = store.inner.get(&location.path).await
        && let Ok(bytes) = result.bytes().await
    {
        return Ok(if bytes == *file {
            Commit::Done(location)
        } else {
            Commit::Conflict
        });
    }
    Err(Error::lance(context, error))
}
