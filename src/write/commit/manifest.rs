//! The manifest of a new version: as Lance writes it, with the tree in place of the fragments, and
//! with what a view does not show put back.

use std::collections::HashSet;

use bytes::Bytes;
use lance_io::object_store::ObjectStore;
use lance_table::feature_flags::{
    FLAG_DELETION_FILES, FLAG_FRAGMENT_TREE, FLAG_MIXED_DATA_FILE_VERSIONS,
    FLAG_SPILLED_ROW_LINEAGE, FLAG_STABLE_ROW_IDS, FLAG_UNSTABLE_DATA_OVERLAY_FILES,
};
use lance_table::format::{IndexMetadata, Manifest, Transaction, pb};
use lance_table::io::commit::ManifestWriter;
use lance_table::system_index::is_system_index;
use object_store::path::Path;
use prost::Message;
use roaring::RoaringBitmap;

use super::kind::Kind;
use crate::error::{Error, Result};
use crate::manifest::{FOOTER_BYTES, frame_manifest};
use crate::write::build::BuildReport;
use crate::write::view::View;

/// Flags that say what some fragment has. A view may not show that fragment.
const FRAGMENT_FLAGS: u64 = FLAG_STABLE_ROW_IDS
    | FLAG_UNSTABLE_DATA_OVERLAY_FILES
    | FLAG_MIXED_DATA_FILE_VERSIONS
    | FLAG_SPILLED_ROW_LINEAGE;

/// The tree of a new version, and what the manifest says about it.
pub(super) struct NewTree {
    pub(super) tree: pb::FragmentTree,
    pub(super) has_deletions: bool,
    pub(super) max_fragment_id: Option<u32>,
    pub(super) flags: u64,
    pub(super) mutations: u64,
    pub(super) mutation_bytes: u64,
    pub(super) objects: u64,
    pub(super) object_bytes: u64,
}

impl NewTree {
    pub(super) fn built(
        (tree, report): (pb::FragmentTree, BuildReport),
        max_fragment_id: Option<u32>,
        flags: u64,
    ) -> Result<Self> {
        Ok(Self {
            tree,
            has_deletions: report.counts.total_rows != report.counts.visible_rows,
            max_fragment_id,
            flags,
            mutations: 0,
            mutation_bytes: 0,
            objects: report.leaves + report.nodes + u64::from(!report.root_inline),
            object_bytes: report.leaf_bytes
                + report.node_bytes
                + if report.root_inline {
                    0
                } else {
                    report.root_bytes
                },
        })
    }
}

fn set_flags(manifest: &mut Manifest, carried: u64, has_deletions: bool) {
    for flags in [
        &mut manifest.reader_feature_flags,
        &mut manifest.writer_feature_flags,
    ] {
        *flags |= carried;
        if has_deletions {
            *flags |= FLAG_DELETION_FILES;
        } else {
            *flags &= !FLAG_DELETION_FILES;
        }
    }
}

/// Now, as a manifest's timestamp.
pub(crate) fn now_nanos() -> Result<u128> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map(|n| n.as_nanos())
        .map_err(|_| Error::invalid("the clock is before 1970"))
}

/// The file of a new version: as Lance writes it, with the tree in place of the fragments. `flags` are
/// those of the version it comes from, of which it keeps what fragments outside the view may have.
pub(crate) async fn finish_manifest(
    manifest: &mut Manifest,
    indices: Option<Vec<IndexMetadata>>,
    writer: ManifestWriter,
    transaction: Option<Transaction>,
    tree: pb::FragmentTree,
    flags: u64,
    has_deletions: bool,
) -> Result<Bytes> {
    set_flags(manifest, flags & FRAGMENT_FLAGS, has_deletions);
    let context = |e| Error::lance("cannot write the manifest", e);
    let memory = ObjectStore::memory();
    let path = Path::from("manifest");
    let fragments = std::mem::take(&mut manifest.fragments);
    let written = writer(&memory, manifest, indices, &path, transaction).await;
    manifest.fragments = fragments;
    written.map_err(context)?;
    let file = memory.read_one_all(&path).await.map_err(context)?;
    let framing = || Error::internal("Lance wrote a manifest without its framing");
    let footer = file.len().checked_sub(FOOTER_BYTES).ok_or_else(framing)?;
    let position = file
        .get(footer..)
        .and_then(|f| f.first_chunk::<8>())
        .map(|b| u64::from_le_bytes(*b))
        .and_then(|p| usize::try_from(p).ok())
        .filter(|p| p.checked_add(4).is_some_and(|start| start <= footer))
        .ok_or_else(framing)?;
    let mut message = pb::Manifest::decode(file.slice(position + 4..footer))
        .map_err(|e| Error::internal(format!("Lance wrote an undecodable manifest: {e}")))?;
    message.fragments.clear();
    message.reader_feature_flags |= FLAG_FRAGMENT_TREE;
    message.writer_feature_flags |= FLAG_FRAGMENT_TREE;
    message.fragment_tree = Some(pb::FragmentTreeMetadata {
        layout: Some(pb::fragment_tree_metadata::Layout::Tree(tree)),
    });
    frame_manifest(&file.slice(..position), &message.encode_to_vec())
}

/// Puts back index segments that Lance left out because the view showed none of their fragments.
///
/// Lance drops a segment of an index with several when no fragment is left of what it covers. What
/// it covers outside the view is still there.
pub(super) fn keep_unseen(
    base: &View,
    mut new: Vec<IndexMetadata>,
    manifest: &Manifest,
    kind: &Kind,
) -> Result<Vec<IndexMetadata>> {
    let none = HashSet::new();
    let replaced = match kind {
        Kind::Overwrite | Kind::Restore(_) | Kind::CreateIndex => return Ok(new),
        Kind::Rewrite { replaced } => replaced,
        Kind::UpdateConfig | Kind::Other => &none,
    };
    let old = base.indices()?;
    let kept: HashSet<_> = new.iter().map(|i| i.uuid).collect();
    let seen: RoaringBitmap = base
        .records
        .keys()
        .filter_map(|id| u32::try_from(*id).ok())
        .collect();
    let fields: HashSet<i32> = manifest.schema.fields_pre_order().map(|f| f.id).collect();
    for mut index in old {
        if kept.contains(&index.uuid)
            || replaced.contains(&index.uuid)
            || is_system_index(&index)
            || !index.fields.iter().all(|f| fields.contains(f))
        {
            continue;
        }
        let Some(bitmap) = &mut index.fragment_bitmap else {
            continue;
        };
        *bitmap -= &seen;
        if !bitmap.is_empty() {
            new.push(index);
        }
    }
    Ok(new)
}
