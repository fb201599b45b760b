//! Manifest bytes: reading the tail of the file, splitting the message, and its invariants.
//!
//! A manifest is split in one pass over its raw bytes. Fragment records are indexed in place and not
//! decoded, the tree is set aside, and what is left is small whatever the table holds: it becomes
//! the shell dataset.

use arrow::datatypes::DataType;
use bytes::{BufMut, Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};
use lance_core::datatypes::LogicalType;
use lance_io::object_store::ObjectStore;
use lance_table::feature_flags::{self, FLAG_FRAGMENT_TREE, can_read_dataset, can_write_dataset};
use lance_table::format::pb;
use lance_table::io::commit::ManifestLocation;
use object_store::ObjectStoreExt;
use prost::Message;

use crate::error::{Error, Result};
use crate::flat::FlatCatalog;
use crate::retry::retrying;
use crate::tree::object::Limits;
use crate::tree::wire::{check_stored_mutations, for_each_field};

/// How much of a manifest is read at once: enough for a whole manifest with an inline root.
pub(crate) const TAIL_BYTES: u64 = 128 << 10;
/// The rest of a long manifest is read in pieces of this size, several at a time.
const CHUNK_BYTES: u64 = 8 << 20;
const CHUNKS_IN_FLIGHT: usize = 8;

/// What ends a manifest file: the position of its message, the format's version, the magic.
pub(crate) const FOOTER_BYTES: usize = 16;
const MAGIC: &[u8] = b"LANC";
const MAJOR_VERSION: i16 = 0;
const MINOR_VERSION: i16 = 1;

const FIELD_FRAGMENTS: u32 = 2;
const FIELD_FRAGMENT_TREE: u32 = 22;

/// A manifest as it is stored.
#[derive(Debug, Clone)]
pub(crate) struct ManifestFile {
    /// Where it lies, for messages.
    pub label: String,
    /// The `Manifest` message.
    pub message: Bytes,
    /// GET requests it took.
    pub requests: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Size of the file.
    pub file_size: u64,
    /// Where the message begins: the file's first bytes are its sections.
    pub position: u64,
    /// The sections in front of the message (indexes, transaction, dictionaries), when the read
    /// that found the message brought them along.
    pub sections: Option<Bytes>,
}

/// Reads the manifest at `location`: one request when it fits [`TAIL_BYTES`], none when `tail` is
/// given and holds it.
///
/// # Errors
/// [`Error::NotFound`] when there is no such file, `manifest_footer` when its framing is broken.
pub(crate) async fn read_manifest(
    store: &ObjectStore,
    location: &ManifestLocation,
    tail: Option<Bytes>,
    limits: &Limits,
) -> Result<ManifestFile> {
    let label = location.path.to_string();
    let size = match location.size {
        Some(size) => size,
        None => head(store, location).await?,
    };
    let broken = |found: String| {
        Error::corrupt(
            label.as_str(),
            "manifest_footer",
            "a manifest message followed by its position and the Lance magic",
            found,
        )
    };
    if size > limits.max_manifest_bytes {
        return Err(Error::invalid(format!(
            "{label} has {size} bytes, more than the limit of {} (raise max_manifest_bytes)",
            limits.max_manifest_bytes
        )));
    }
    let tail = match tail {
        Some(tail) => tail,
        None => get_range(store, location, size.saturating_sub(TAIL_BYTES)..size).await?,
    };
    let start = size.saturating_sub(tail.len() as u64);
    let (body, footer) = tail
        .len()
        .checked_sub(FOOTER_BYTES)
        .and_then(|at| tail.split_at_checked(at))
        .ok_or_else(|| broken(format!("{} bytes", tail.len())))?;
    if !footer.ends_with(MAGIC) {
        return Err(broken("no magic".into()));
    }
    let position = footer
        .first_chunk::<8>()
        .map_or(u64::MAX, |b| u64::from_le_bytes(*b));
    let end = start + body.len() as u64;
    let sections = (start == 0)
        .then(|| usize::try_from(position).ok())
        .flatten()
        .filter(|position| *position <= body.len())
        .map(|position| tail.slice(..position));
    if position.checked_add(4).is_none_or(|p| p > end) {
        return Err(broken(format!("position {position} of {size} bytes")));
    }
    let mut requests = 1;
    let mut bytes = tail.len() as u64;
    let framed = if position >= start {
        let skip = usize::try_from(position - start).unwrap_or(usize::MAX);
        tail.slice(skip..body.len())
    } else {
        let head = read_chunks(store, location, position..start).await?;
        requests += (start - position).div_ceil(CHUNK_BYTES);
        bytes += start - position;
        let mut all =
            BytesMut::with_capacity(head.iter().map(Bytes::len).sum::<usize>() + body.len());
        for chunk in head {
            all.extend_from_slice(&chunk);
        }
        all.extend_from_slice(body);
        all.freeze()
    };
    let recorded = framed
        .first_chunk::<4>()
        .map_or(0, |b| u32::from_le_bytes(*b) as usize);
    let message = framed.slice(4..);
    if recorded != message.len() {
        return Err(broken(format!(
            "a recorded length of {recorded} for {} bytes",
            message.len()
        )));
    }
    Ok(ManifestFile {
        label,
        message,
        requests,
        bytes,
        file_size: size,
        position,
        sections,
    })
}

/// Reads the sections in front of the manifest message.
pub(crate) async fn read_sections(
    store: &ObjectStore,
    location: &ManifestLocation,
    position: u64,
) -> Result<Bytes> {
    if position == 0 {
        return Ok(Bytes::new());
    }
    get_range(store, location, 0..position).await
}

/// A manifest file: `sections`, the message, and the framing that finds it.
pub(crate) fn frame_manifest(sections: &[u8], message: &[u8]) -> Result<Bytes> {
    let length = u32::try_from(message.len()).map_err(|_| {
        Error::invalid(format!(
            "a manifest message of {} bytes is more than a manifest file can hold",
            message.len()
        ))
    })?;
    let mut file = BytesMut::with_capacity(sections.len() + 4 + message.len() + FOOTER_BYTES);
    file.extend_from_slice(sections);
    file.put_u32_le(length);
    file.extend_from_slice(message);
    file.put_u64_le(sections.len() as u64);
    file.put_i16_le(MAJOR_VERSION);
    file.put_i16_le(MINOR_VERSION);
    file.put_slice(MAGIC);
    Ok(file.freeze())
}

async fn head(store: &ObjectStore, location: &ManifestLocation) -> Result<u64> {
    retrying(|| async {
        let meta = store.inner.head(&location.path).await;
        meta.map(|meta| meta.size)
            .map_err(|e| missing_version(location, e))
    })
    .await
}

fn missing_version(location: &ManifestLocation, error: object_store::Error) -> Error {
    match error {
        object_store::Error::NotFound { .. } => Error::NotFound {
            what: format!("version {} ({})", location.version, location.path),
            hint: String::new(),
        },
        e => Error::store(location.path.to_string(), e),
    }
}

async fn get_range(
    store: &ObjectStore,
    location: &ManifestLocation,
    range: std::ops::Range<u64>,
) -> Result<Bytes> {
    retrying(|| async {
        let bytes = store.inner.get_range(&location.path, range.clone()).await;
        bytes.map_err(|e| missing_version(location, e))
    })
    .await
}

async fn read_chunks(
    store: &ObjectStore,
    location: &ManifestLocation,
    range: std::ops::Range<u64>,
) -> Result<Vec<Bytes>> {
    let starts =
        (0..(range.end - range.start).div_ceil(CHUNK_BYTES)).map(|i| range.start + i * CHUNK_BYTES);
    futures::stream::iter(starts)
        .map(|start| get_range(store, location, start..range.end.min(start + CHUNK_BYTES)))
        .buffered(CHUNKS_IN_FLIGHT)
        .try_collect()
        .await
}

/// A manifest, taken apart.
#[derive(Debug)]
pub(crate) struct SplitManifest {
    /// Everything but fragments and tree, flags as stored.
    pub head: pb::Manifest,
    /// The tree, when the version has one.
    pub tree: Option<pb::FragmentTree>,
    /// The fragment records of a flat version; empty for a tree.
    pub flat: FlatCatalog,
}

/// Takes a manifest message apart and checks that its parts agree (spec, "Snapshot").
///
/// # Errors
/// `manifest_undecodable`, `flags_disagree`, `flat_fragments_present`, `layout_missing`,
/// `root_both`; [`Error::Unsupported`] for a flag or layout this build does not know, by name.
pub(crate) fn split_manifest(label: &str, message: &Bytes) -> Result<SplitManifest> {
    let mut rest = BytesMut::new();
    let mut tree = None;
    let mut flat = FlatCatalog::builder(label, message.clone());
    for_each_field(label, "manifest_undecodable", message, |field| {
        match field.tag {
            FIELD_FRAGMENTS if field.delimited => flat.push(field.payload)?,
            FIELD_FRAGMENT_TREE if field.delimited => {
                if tree.replace(field.payload).is_some() {
                    return Err(Error::corrupt(
                        label,
                        "root_both",
                        "one fragment_tree",
                        "two",
                    ));
                }
            }
            _ => rest.extend_from_slice(message.get(field.raw).unwrap_or_default()),
        }
        Ok(())
    })?;
    let head = pb::Manifest::decode(rest.freeze()).map_err(|e| {
        Error::corrupt(
            label,
            "manifest_undecodable",
            "a Manifest message",
            e.to_string(),
        )
    })?;
    if head.timestamp.is_some_and(|t| t.seconds < 0 || t.nanos < 0) {
        return Err(Error::corrupt(
            label,
            "manifest_undecodable",
            "a timestamp after 1970",
            "one before",
        ));
    }
    check_types(label, &head)?;
    let flat = flat.finish();
    check_flags(label, &head, tree.is_some(), flat.len())?;
    let tree = tree
        .map(|range| decode_tree(label, &message.slice(range)))
        .transpose()?;
    Ok(SplitManifest { head, tree, flat })
}

/// Refuses columns of types that the linked Lance does not know: it would panic on them.
fn check_types(label: &str, head: &pb::Manifest) -> Result<()> {
    // Those whose type is in their children, of which `arrow` can say nothing by the name.
    const NESTED: [&str; 6] = [
        "list",
        "list.struct",
        "large_list",
        "large_list.struct",
        "struct",
        "map",
    ];
    let unknown = head.fields.iter().find(|field| {
        let name = field.logical_type.as_str();
        let size = name.strip_prefix("fixed_size_list:struct:");
        let known = NESTED.contains(&name)
            || size.is_some_and(|n| n.parse::<i32>().is_ok())
            || DataType::try_from(&LogicalType::from(name)).is_ok();
        !known
    });
    match unknown {
        None => Ok(()),
        Some(field) => Err(Error::Unsupported {
            object: label.to_string(),
            what: format!("type {:?} of column {}", field.logical_type, field.name),
        }),
    }
}

fn check_flags(label: &str, head: &pb::Manifest, has_tree: bool, fragments: usize) -> Result<()> {
    let unknown: Vec<String> = (0..64)
        .map(|bit| 1u64 << bit)
        .filter(|flag| {
            *flag != FLAG_FRAGMENT_TREE
                && head.reader_feature_flags & flag != 0
                && !can_read_dataset(*flag)
        })
        .map(flag_name)
        .collect();
    if !unknown.is_empty() {
        return Err(Error::Unsupported {
            object: label.to_string(),
            what: format!("reader feature {}", unknown.join(", ")),
        });
    }
    let reader = head.reader_feature_flags & FLAG_FRAGMENT_TREE != 0;
    let writer = head.writer_feature_flags & FLAG_FRAGMENT_TREE != 0;
    if reader != writer || reader != has_tree {
        return Err(Error::corrupt(
            label,
            "flags_disagree",
            "flag 4096 in reader and writer flags exactly when fragment_tree is set",
            format!("reader {reader}, writer {writer}, fragment_tree {has_tree}"),
        ));
    }
    if has_tree && fragments > 0 {
        return Err(Error::corrupt(
            label,
            "flat_fragments_present",
            "no fragments beside a tree",
            fragments,
        ));
    }
    Ok(())
}

/// Refuses to write a version whose writer flags the linked Lance does not know.
pub(crate) fn check_writable(label: &str, head: &pb::Manifest) -> Result<()> {
    let flags = head.writer_feature_flags & !FLAG_FRAGMENT_TREE;
    let unknown: Vec<String> = (0..64)
        .map(|bit| 1u64 << bit)
        .filter(|flag| flags & flag != 0 && !can_write_dataset(*flag))
        .map(flag_name)
        .collect();
    if unknown.is_empty() {
        return Ok(());
    }
    Err(Error::Unsupported {
        object: label.to_string(),
        what: format!("writer feature {}", unknown.join(", ")),
    })
}

/// A feature flag's name and number.
pub(crate) fn flag_name(flag: u64) -> String {
    use feature_flags as f;
    let known: [(u64, &str); 18] = [
        (f::FLAG_DELETION_FILES, "deletion files"),
        (f::FLAG_STABLE_ROW_IDS, "stable row ids"),
        (f::FLAG_USE_V2_FORMAT_DEPRECATED, "v2 format"),
        (f::FLAG_TABLE_CONFIG, "table config"),
        (f::FLAG_BASE_PATHS, "base paths"),
        (f::FLAG_DISABLE_TRANSACTION_FILE, "no transaction files"),
        (f::FLAG_UNSTABLE_DATA_OVERLAY_FILES, "data overlay files"),
        (f::FLAG_COVERED_INDEX_METADATA, "covering index columns"),
        (f::FLAG_MIXED_DATA_FILE_VERSIONS, "mixed data file versions"),
        (
            f::FLAG_FRAG_REUSE_WITH_STABLE_ROW_IDS,
            "fragment reuse with stable row ids",
        ),
        (f::FLAG_FRAGMENT_REUSE_INDEX, "fragment reuse index"),
        (f::FLAG_SPILLED_ROW_LINEAGE, "spilled row lineage"),
        (f::FLAG_FRAGMENT_TREE, "fragment tree"),
        (
            f::FLAG_INDEPENDENT_COVERING_FIELDS,
            "independent covering fields",
        ),
        (f::FLAG_MANAGED_BLOBS, "managed blobs"),
        (f::FLAG_NON_REUSABLE_FIELD_IDS, "non-reusable field ids"),
        (f::FLAG_ZONE_WRITE_SEEDS, "zone statistics seeds"),
        (f::FLAG_OBJECT_METADATA, "object metadata"),
    ];
    known.iter().find(|(known, _)| *known == flag).map_or_else(
        || format!("unknown ({flag})"),
        |(_, name)| format!("{name} ({flag})"),
    )
}

/// Decodes the tree of a manifest, after one look at its raw bytes: a decoder keeps the last of two
/// roots and forgets a layout it does not know (`spec/notes.md` 4 and 21).
fn decode_tree(label: &str, metadata: &Bytes) -> Result<pb::FragmentTree> {
    const RULE: &str = "manifest_undecodable";
    let mut layouts = Vec::new();
    for_each_field(label, RULE, metadata, |field| {
        layouts.push((field.tag, field.payload));
        Ok(())
    })?;
    let range = match layouts.as_slice() {
        [(1, range)] => range.clone(),
        [] => {
            return Err(Error::corrupt(
                label,
                "layout_missing",
                "one layout",
                "none",
            ));
        }
        more if more.iter().all(|(tag, _)| *tag == 1) => {
            return Err(Error::corrupt(
                label,
                "layout_missing",
                "exactly one layout",
                format!("{} of them", more.len()),
            ));
        }
        more => {
            let tag = more.iter().map(|(tag, _)| tag).max().copied();
            let tag = tag.unwrap_or_default();
            return Err(Error::Unsupported {
                object: label.to_string(),
                what: format!("fragment tree layout {tag}"),
            });
        }
    };
    let bytes = metadata.slice(range);
    let mut roots = 0;
    for_each_field(label, RULE, &bytes, |field| {
        roots += usize::from(matches!(field.tag, 1 | 2));
        Ok(())
    })?;
    if roots > 1 {
        return Err(Error::corrupt(
            label,
            "root_both",
            "exactly one of inline_root and root_uuid",
            format!("{roots} roots"),
        ));
    }
    for path in [&[1u32, 2][..], &[3]] {
        check_stored_mutations(label, RULE, &bytes, path)?;
    }
    pb::FragmentTree::decode(bytes)
        .map_err(|e| Error::corrupt(label, RULE, "a FragmentTree message", e.to_string()))
}

/// The bytes of a shell manifest: `head` with the tree's flag cleared and no fragments.
pub(crate) fn shell_manifest(head: &pb::Manifest) -> Bytes {
    let mut shell = head.clone();
    shell.reader_feature_flags &= !FLAG_FRAGMENT_TREE;
    shell.writer_feature_flags &= !FLAG_FRAGMENT_TREE;
    shell.fragments.clear();
    shell.fragment_tree = None;
    shell.encode_to_vec().into()
}

/// A shell manifest that lists `fragments`: repeated fields of a message may come in any order, so
/// they are simply appended.
pub(crate) fn manifest_with_fragments<'a>(
    shell: &Bytes,
    fragments: impl IntoIterator<Item = &'a pb::DataFragment>,
) -> Vec<u8> {
    let mut bytes = shell.to_vec();
    for fragment in fragments {
        prost::encoding::message::encode(FIELD_FRAGMENTS, fragment, &mut bytes);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree_manifest(tree: Vec<u8>) -> Bytes {
        let flags = FLAG_FRAGMENT_TREE;
        let mut bytes = pb::Manifest {
            reader_feature_flags: flags,
            writer_feature_flags: flags,
            ..Default::default()
        }
        .encode_to_vec();
        prost::encoding::bytes::encode(FIELD_FRAGMENT_TREE, &tree, &mut bytes);
        bytes.into()
    }

    #[test]
    fn two_roots_are_seen_in_the_raw_bytes() {
        let mut tree = Vec::new();
        prost::encoding::bytes::encode(2, &vec![1u8; 16], &mut tree);
        prost::encoding::bytes::encode(1, &Vec::<u8>::new(), &mut tree);
        let mut metadata = Vec::new();
        prost::encoding::bytes::encode(1, &tree, &mut metadata);
        let error = split_manifest("m", &tree_manifest(metadata)).expect_err("two roots");
        assert_eq!(error.corrupt_rule(), Some("root_both"));
    }

    #[test]
    fn an_unknown_layout_is_named() {
        let mut metadata = Vec::new();
        prost::encoding::bytes::encode(9, &vec![0u8], &mut metadata);
        let error = split_manifest("m", &tree_manifest(metadata)).expect_err("unknown");
        assert!(error.to_string().contains("layout 9"), "{error}");
    }

    #[test]
    fn a_type_that_lance_does_not_know_is_named() {
        let manifest = |logical_type: &str| {
            let field = lance_file::format::pb::Field {
                name: "c".into(),
                logical_type: logical_type.into(),
                ..Default::default()
            };
            let manifest = pb::Manifest {
                fields: vec![field],
                ..Default::default()
            };
            split_manifest("m", &manifest.encode_to_vec().into())
        };
        for known in [
            "double",
            "struct",
            "list.struct",
            "fixed_size_list:float:4",
            "map",
        ] {
            manifest(known).expect(known);
        }
        for unknown in ["doubLe", "", "fixed_size_list:struct:x"] {
            let error = manifest(unknown).expect_err(unknown).to_string();
            assert!(error.contains("column c"), "{error}");
        }
    }

    #[test]
    fn a_message_that_is_no_manifest_is_refused() {
        let before = pb::Manifest {
            timestamp: Some(prost_types::Timestamp {
                seconds: -1,
                nanos: 0,
            }),
            ..Default::default()
        };
        // A field that ends outside, a string that is none, a time before 1970.
        for bytes in [vec![0x12, 9], vec![0x42, 1, 0xff], before.encode_to_vec()] {
            let error = split_manifest("m", &bytes.into()).expect_err("no manifest");
            assert_eq!(error.corrupt_rule(), Some("manifest_undecodable"));
        }
    }

    #[test]
    fn layouts_are_counted_in_the_raw_bytes() {
        let tree = pb::FragmentTree::default().encode_to_vec();
        let layouts = |tags: &[u32]| {
            let mut metadata = Vec::new();
            for tag in tags {
                prost::encoding::bytes::encode(*tag, &tree, &mut metadata);
            }
            split_manifest("m", &tree_manifest(metadata)).expect_err("not one")
        };
        assert_eq!(layouts(&[]).corrupt_rule(), Some("layout_missing"));
        assert_eq!(layouts(&[1, 1]).corrupt_rule(), Some("layout_missing"));
        for tags in [&[1, 9][..], &[9, 1]] {
            let error = layouts(tags).to_string();
            assert!(error.contains("layout 9"), "{error}");
        }
    }

    #[test]
    fn mutations_of_the_manifest_are_looked_at_as_stored() {
        // A removal and a clear in one action.
        let mutation = [0x08, 1, 0x12, 6, 0x10, 7, 0x32, 2, 0x08, 7];
        let mut since_root = Vec::new();
        prost::encoding::bytes::encode(3, &mutation.to_vec(), &mut since_root);
        let mut root = Vec::new();
        prost::encoding::bytes::encode(2, &mutation.to_vec(), &mut root);
        let mut inline = Vec::new();
        prost::encoding::bytes::encode(1, &root, &mut inline);
        for tree in [since_root, inline] {
            let mut metadata = Vec::new();
            prost::encoding::bytes::encode(1, &tree, &mut metadata);
            let error = split_manifest("m", &tree_manifest(metadata)).expect_err("two actions");
            assert_eq!(error.corrupt_rule(), Some("mutation_with_several_actions"));
        }
    }

    #[test]
    fn unknown_flags_are_refused_by_name() {
        for (flag, name) in [
            (feature_flags::FLAG_OBJECT_METADATA, "object metadata"),
            (1 << 40, "unknown (1099511627776)"),
        ] {
            let bytes = pb::Manifest {
                reader_feature_flags: flag,
                ..Default::default()
            }
            .encode_to_vec();
            let error = split_manifest("m", &bytes.into()).expect_err("unknown flag");
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn fragments_are_appended_to_a_shell() {
        let head = pb::Manifest {
            version: 7,
            ..Default::default()
        };
        let fragments = [1u64, 5].map(|id| pb::DataFragment {
            id,
            physical_rows: 3,
            ..Default::default()
        });
        let bytes = manifest_with_fragments(&shell_manifest(&head), &fragments);
        let decoded = pb::Manifest::decode(bytes.as_slice()).expect("valid");
        assert_eq!(decoded.version, 7);
        assert_eq!(decoded.fragments, fragments);
    }
}
