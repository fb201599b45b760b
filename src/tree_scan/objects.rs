//! The listing of a tree: its objects, and what their parents say about them.

use std::ops::Range;
use std::sync::Arc;

use super::state::WalkState;
use super::{Work, overlapping};
use crate::error::Result;
use crate::ranges::FragmentRanges;
use crate::snapshot::{Catalog, Snapshot, TreeCatalog};
use crate::tree::node::ID_END;
use crate::tree::object::Owner;
use crate::tree::summary::Counts;

/// One object of a tree, as its parent describes it.
#[derive(Debug, Clone)]
pub struct TreeObject {
    /// Resolved location.
    pub location: String,
    /// Path relative to its dataset.
    pub path: String,
    /// The base that names its dataset; none for the opened one.
    pub base_id: Option<u32>,
    /// Edges to its leaves.
    pub height: u32,
    /// Inherited range of fragment ids.
    pub range: Range<u64>,
    /// The stored summary.
    pub counts: Counts,
    /// Direct children.
    pub num_children: u32,
    /// Stored bytes.
    pub object_size: Option<u64>,
    /// Mutations in its own buffer; nothing for a leaf.
    pub buffered: Option<u64>,
    /// The leaf's watermark; nothing for a node.
    pub watermark: Option<u64>,
}

impl Snapshot {
    /// The objects of the tree whose ranges overlap `wanted`, level by level and in order, starting
    /// with the root. Opens interior nodes and no leaf; a flat version has none.
    ///
    /// # Errors
    /// [`Corrupt`](crate::Error::Corrupt) when an opened node breaks a rule.
    pub async fn tree_objects(
        self: &Arc<Self>,
        wanted: &FragmentRanges,
        state: &WalkState,
    ) -> Result<Vec<TreeObject>> {
        let Catalog::Tree(tree) = &self.catalog else {
            return Ok(Vec::new());
        };
        match objects_of(tree, wanted, state).await {
            Ok(objects) => Ok(objects),
            Err(e) => Err(self.explain(e).await),
        }
    }
}

async fn objects_of(
    tree: &TreeCatalog,
    wanted: &FragmentRanges,
    state: &WalkState,
) -> Result<Vec<TreeObject>> {
    let counts = tree.counts()?;
    let path = tree.root_path.clone();
    let location = match &path {
        Some(path) => tree.objects.bases.location(Owner::Current, path)?,
        None => format!("{} (inline)", tree.label),
    };
    let height = tree.root.child_height().map_or(0, |h| h + 1);
    let mut objects = vec![TreeObject {
        location,
        path: path.unwrap_or_else(|| "(inline root)".to_string()),
        base_id: None,
        height,
        range: 0..ID_END,
        counts,
        num_children: u32::try_from(tree.root.node.children.len()).unwrap_or(u32::MAX),
        object_size: None,
        buffered: Some((tree.root.node.buffer.len() + tree.since_root.len()) as u64),
        watermark: None,
    }];
    let mut level = tree.root_work(wanted, &state.stats);
    for _ in 1..height {
        let opened = tree.open_level(std::mem::take(&mut level), state).await?;
        for (work, node, pending) in opened {
            objects.push(tree_object(tree, &work, Some(node.buffer.len() as u64))?);
            level.extend(overlapping(&node, &work, &pending, wanted, &state.stats));
        }
    }
    for work in level {
        objects.push(tree_object(tree, &work, None)?);
    }
    Ok(objects)
}

fn tree_object(tree: &TreeCatalog, work: &Work, buffered: Option<u64>) -> Result<TreeObject> {
    let child = &work.child;
    Ok(TreeObject {
        location: tree.objects.bases.location(work.owner, &child.path)?,
        path: child.path.clone(),
        base_id: work.owner.base_id(),
        height: child.height,
        range: work.range.clone(),
        counts: child.counts,
        num_children: child.num_children,
        object_size: Some(child.object_size),
        buffered,
        watermark: (child.height == 0).then_some(child.watermark),
    })
}
