//! Building a whole tree from records in id order.
//!
//! Leaves are cut by their stored size, nodes by their encoded size; the root stays in the manifest
//! while it is small. A record is held only until its leaf is written.

use datafusion::common::runtime::SpawnedTask;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream::FuturesOrdered};
use lance_table::format::pb;
use prost::Message;

pub(crate) use super::policy::TreePolicy;
pub(crate) use super::sink::ObjectSink;

use super::root::publish_root;
use super::sink::ObjectKind;
use crate::error::{Error, Result};
use crate::tree::leaf_write::{INITIAL_RATIO, LEAF_OVERHEAD, LeafBuilder};
use crate::tree::node::{Child, Node, Root};
use crate::tree::record::counts_of;
use crate::tree::summary::{Counts, Tally};

/// Leaves that are encoded and written at once.
const LEAVES_IN_FLIGHT: usize = 4;

/// What a built tree consists of.
#[derive(Debug, Clone, Default)]
pub(crate) struct BuildReport {
    pub counts: Counts,
    pub leaves: u64,
    pub leaf_bytes: u64,
    pub nodes: u64,
    pub node_bytes: u64,
    pub root_bytes: u64,
    pub root_inline: bool,
    pub height: u32,
    /// Objects written, in order.
    pub paths: Vec<String>,
}

type WrittenLeaf = (Child, usize);

/// Builds a tree.
pub(crate) struct TreeBuilder {
    sink: ObjectSink,
    policy: TreePolicy,
    leaf: LeafBuilder,
    counts: Counts,
    first_id: Option<u64>,
    writing: FuturesOrdered<BoxFuture<'static, Result<WrittenLeaf>>>,
    children: Vec<Child>,
    ratio: f64,
}

impl TreeBuilder {
    pub(crate) fn new(sink: ObjectSink, policy: TreePolicy) -> Self {
        Self {
            sink,
            policy,
            leaf: LeafBuilder::new(),
            counts: Counts::default(),
            first_id: None,
            writing: FuturesOrdered::new(),
            children: Vec::new(),
            ratio: INITIAL_RATIO,
        }
    }

    /// Adds the next record. Its row counts must be known and its base ids this dataset's.
    pub(crate) async fn push(&mut self, record: &pb::DataFragment) -> Result<()> {
        let mut tally = Tally::default();
        tally += self.counts;
        tally += counts_of(record);
        self.counts = tally.counts("the new leaf")?;
        self.first_id.get_or_insert(record.id);
        self.leaf.push(record)?;
        if self.estimated_bytes() >= self.policy.leaf_bytes as f64 {
            self.close_leaf().await?;
        }
        Ok(())
    }

    fn estimated_bytes(&self) -> f64 {
        LEAF_OVERHEAD as f64 + self.leaf.proto_bytes() as f64 * self.ratio
    }

    async fn close_leaf(&mut self) -> Result<()> {
        if self.leaf.len() == 0 {
            return Ok(());
        }
        let leaf = std::mem::replace(&mut self.leaf, LeafBuilder::new());
        let counts = std::mem::take(&mut self.counts);
        let first = self.first_id.take().unwrap_or_default();
        // The first child of a root begins at 0, whatever its first id is.
        let is_first = self.children.is_empty() && self.writing.is_empty();
        let min_key = if is_first { 0 } else { first };
        let sink = self.sink.clone();
        let write = async move {
            let proto = leaf.proto_bytes();
            let bytes = leaf.encode().await?;
            let object_size = bytes.len() as u64;
            let path = sink.put(ObjectKind::Leaf, bytes).await?;
            let child = Child {
                path,
                base_id: None,
                min_key,
                counts,
                height: 0,
                num_children: 0,
                object_size,
                watermark: 0,
            };
            Ok((child, proto))
        };
        // On a task of its own, so that leaves are encoded side by side.
        let task = SpawnedTask::spawn(write).map(|joined| {
            joined.unwrap_or_else(|e| Err(Error::internal(format!("a leaf's task ended: {e}"))))
        });
        self.writing.push_back(task.boxed());
        while self.writing.len() >= LEAVES_IN_FLIGHT {
            self.collect_leaf().await?;
        }
        Ok(())
    }

    async fn collect_leaf(&mut self) -> Result<()> {
        if let Some(written) = self.writing.next().await {
            let (child, proto) = written?;
            let records = child.object_size.saturating_sub(LEAF_OVERHEAD) as f64;
            self.ratio = (records / proto.max(1) as f64).max(0.05);
            self.children.push(child);
        }
        Ok(())
    }

    /// Writes what is left and returns the root, inline when it is small.
    pub(crate) async fn finish(mut self) -> Result<(pb::FragmentTree, BuildReport)> {
        self.close_leaf().await?;
        while !self.writing.is_empty() {
            self.collect_leaf().await?;
        }
        let mut report = BuildReport::default();
        let mut tally = Tally::default();
        for leaf in &self.children {
            tally += leaf.counts;
            report.leaves += 1;
            report.leaf_bytes += leaf.object_size;
            report.paths.push(leaf.path.clone());
        }
        report.counts = tally.counts("the new tree")?;
        let mut level = self.children;
        loop {
            let children = level.len();
            if child_list_bytes(&level) <= self.policy.node_bytes || children < 4 {
                let root = root_of(level);
                report.height = root.child_height().map_or(0, |h| h + 1);
                let published = publish_root(&self.sink, &root, &self.policy).await?;
                report.root_bytes = published.bytes;
                report.root_inline = published.path.is_none();
                report.paths.extend(published.path);
                let tree = pb::FragmentTree {
                    root: Some(published.root),
                    mutations_since_root: Vec::new(),
                    next_action_sequence: 1,
                };
                return Ok((tree, report));
            }
            level = write_level(&self.sink, level, &self.policy, &mut report).await?;
        }
    }
}

/// Bytes a child list takes in the node that holds it.
pub(super) fn child_list_bytes(children: &[Child]) -> u64 {
    children.iter().map(Child::stored_bytes).sum()
}

fn root_of(children: Vec<Child>) -> Root {
    Root {
        node: Node {
            children,
            buffer: Vec::new(),
        },
        next_sequence: 1,
    }
}

/// Groups children into nodes of about the target size, each with at least two.
async fn write_level(
    sink: &ObjectSink,
    children: Vec<Child>,
    policy: &TreePolicy,
    report: &mut BuildReport,
) -> Result<Vec<Child>> {
    let bytes = child_list_bytes(&children);
    let per_node = (children.len() as u64)
        .saturating_mul(policy.node_bytes)
        .checked_div(bytes.max(1))
        .map_or(2, |n| usize::try_from(n).unwrap_or(usize::MAX))
        .max(2);
    let nodes = children.len().div_ceil(per_node);
    let mut above = Vec::with_capacity(nodes);
    let mut rest = children.into_iter();
    let mut left = rest.len();
    for index in 0..nodes {
        // Even shares, so that no node is left with a single child.
        let share = left.div_ceil(nodes - index);
        let group: Vec<Child> = rest.by_ref().take(share).collect();
        left -= group.len();
        above.push(write_node(sink, group, report).await?);
    }
    Ok(above)
}

async fn write_node(
    sink: &ObjectSink,
    children: Vec<Child>,
    report: &mut BuildReport,
) -> Result<Child> {
    let first = children
        .first()
        .ok_or_else(|| Error::internal("a node without children"))?;
    let (min_key, height) = (first.min_key, first.height + 1);
    let num_children = u32::try_from(children.len())
        .map_err(|_| Error::internal("a node of more than 2^32 children"))?;
    let node = Node {
        children,
        buffer: Vec::new(),
    };
    let counts = node.tally().counts("the new node")?;
    let bytes = node.encode().encode_to_vec();
    let object_size = bytes.len() as u64;
    let path = sink.put(ObjectKind::Node, bytes.into()).await?;
    report.nodes += 1;
    report.node_bytes += object_size;
    report.paths.push(path.clone());
    Ok(Child {
        path,
        base_id: None,
        min_key,
        counts,
        height,
        num_children,
        object_size,
        watermark: 0,
    })
}
