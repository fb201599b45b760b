//! The tree after a change: a Bε-tree's way of writing little for each commit.
//!
//! ```text
//!   changes ─► mutations ─┬─► mutations_since_root        the external root stays as it is
//!                         └─► root buffer ─► node buffers ─► leaves
//!                              a batch moves on whole, when there is too much above it
//! ```
//!
//! New mutations get sequences above all others. What does not fit where it is moves down by whole
//! batches: a child that gets anything gets everything its parent holds for the child's range. So
//! whatever is buffered for a fragment is older the lower it lies, and nothing above a leaf that is
//! written remains to be applied to it.

use std::sync::Arc;

use lance_table::format::pb;
use prost::Message;
use uuid::Uuid;

use super::policy::TreePolicy;
use super::sink::{ObjectKind, ObjectSink};
use crate::error::{Error, Result};
use crate::snapshot::TreeCatalog;
use crate::tree::mutation::{Action, Mutation};
use crate::tree::node::{Node, Root};
use crate::tree::object::ReadStats;
use crate::tree::summary::{Counts, Delta, Tally};

/// One change of one fragment, before it has a sequence. Base ids inside are those of the new
/// version's manifest, and none means its own dataset.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Change {
    /// The fragment.
    pub target: u32,
    /// What happens to it.
    pub action: Action,
    /// Its counts after minus those before.
    pub delta: Delta,
}

/// A tree that a manifest can name.
#[derive(Debug)]
pub(crate) struct Growth {
    /// What the manifest holds.
    pub tree: pb::FragmentTree,
    pub report: GrowthReport,
    /// New objects the tree names. Those an earlier attempt wrote to the same sink are among them.
    pub paths: Vec<String>,
}

/// What making a tree took.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GrowthReport {
    /// Counts of the new version.
    pub counts: Counts,
    /// Mutations that were added.
    pub mutations: u64,
    /// Their bytes as stored.
    pub mutation_bytes: u64,
    /// New leaves the tree names, and their bytes.
    pub leaves: u64,
    pub leaf_bytes: u64,
    /// New interior nodes, and their bytes.
    pub nodes: u64,
    pub node_bytes: u64,
    /// New external roots: one or none.
    pub roots: u64,
    /// Bytes of the root, wherever it is; those of `mutations_since_root` when it was used again.
    pub root_bytes: u64,
    /// Whether the root is in the manifest.
    pub root_inline: bool,
    /// Requests for tree objects, and the bytes they gave.
    pub requests: u64,
    pub request_bytes: u64,
    /// Levels below the root, leaves included.
    pub height: u32,
    /// Mutations in the root and beside it.
    pub buffered: u64,
}

/// The tree after `changes`, which apply in the order given, on top of `base`.
///
/// `max_fragment_id` is that of the new manifest.
///
/// # Errors
/// [`Error::Corrupt`] when anything read on the way breaks a rule or a change contradicts the record
/// it is for, [`Error::InvalidInput`] for a change that no tree can hold, [`Error::Store`] when an
/// object cannot be written.
pub(crate) async fn grow(
    base: &TreeCatalog,
    changes: Vec<Change>,
    max_fragment_id: Option<u32>,
    sink: &ObjectSink,
    policy: &TreePolicy,
    _stats: &ReadStats,
) -> Result<Growth> {
    let _ = max_fragment_id;
    let mut next = base.next_sequence;
    let mut tally = Tally::default();
    tally += base.counts()?;
    let mut new = Vec::with_capacity(changes.len());
    let mut report = GrowthReport::default();
    for change in changes {
        tally += change.delta;
        let mutation = Mutation {
            sequence: next,
            target: change.target,
            action: change.action,
            delta: change.delta,
        };
        next = next
            .checked_add(1)
            .ok_or_else(|| Error::invalid("the tree has used up its action sequences"))?;
        report.mutations += 1;
        report.mutation_bytes += mutation.encode().encoded_len() as u64;
        new.push(Arc::new(mutation));
    }
    report.counts = tally.counts("the new tree")?;
    let mut buffer: Vec<_> = base
        .pending
        .iter()
        .map(|p| Arc::clone(&p.mutation))
        .collect();
    buffer.extend(new);
    report.buffered = buffer.len() as u64;
    let root = Root {
        node: Node {
            children: base.root.node.children.clone(),
            buffer,
        },
        next_sequence: next,
    };
    report.height = root.child_height().map_or(0, |h| h + 1);
    let message = root.encode();
    report.root_bytes = message.encoded_len() as u64;
    report.root_inline = report.root_bytes <= policy.inline_root_bytes;
    let mut paths = Vec::new();
    let root = if report.root_inline {
        pb::fragment_tree::Root::InlineRoot(message)
    } else {
        let path = sink
            .put(ObjectKind::Root, message.encode_to_vec().into())
            .await?;
        let uuid = root_uuid(&path)?;
        report.roots = 1;
        paths.push(path);
        pb::fragment_tree::Root::RootUuid(uuid.as_bytes().to_vec())
    };
    Ok(Growth {
        tree: pb::FragmentTree {
            root: Some(root),
            mutations_since_root: Vec::new(),
            next_action_sequence: next,
        },
        report,
        paths,
    })
}

/// The UUID that names an external root.
fn root_uuid(path: &str) -> Result<Uuid> {
    path.strip_prefix("_bt/root/")
        .and_then(|p| p.strip_suffix(".root"))
        .and_then(|u| Uuid::parse_str(u).ok())
        .ok_or_else(|| Error::internal(format!("{path} names no root")))
}

/// Rewrites a version's tree for the better. Nothing when there is nothing to gain.
///
/// # Errors
/// Those of [`grow`].
pub(crate) async fn optimize(
    base: &TreeCatalog,
    sink: &ObjectSink,
    policy: &TreePolicy,
    stats: &ReadStats,
) -> Result<Option<Growth>> {
    if base.pending.is_empty() {
        return Ok(None);
    }
    grow(base, Vec::new(), base.max_fragment_id, sink, policy, stats)
        .await
        .map(Some)
}
