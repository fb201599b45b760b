//! Content between two objects: taken out of one, not yet in another.
//!
//! A [`Run`] is what a child of a node holds once it was opened: the records of a leaf, or the
//! children and the buffer of a node. Runs are joined and divided by their size as stored, and only
//! then written. This file is the arithmetic of that; nothing here reads or writes.

use std::ops::Range;
use std::sync::Arc;

use lance_table::format::pb;
use prost::Message;

use crate::error::{Error, Result};
use crate::tree::mutation::Mutation;
use crate::tree::node::Child;
use crate::write::policy::TreePolicy;

/// A stored child, where it is found now.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Spot {
    /// The reference as the opened dataset's own objects hold it; its `min_key` may have dropped.
    pub child: Child,
    /// The range it had in the version that was read, which it is checked against when it is opened.
    pub checked: Range<u64>,
    /// Written just now, and so unknown to that version.
    pub fresh: bool,
}

/// A child of a node that is not written yet.
#[derive(Debug)]
pub(super) enum Item {
    Stored(Spot),
    /// Content too small for an object that found no sibling to join: always the only child.
    Loose(Run),
}

impl Item {
    /// Lower bound of the child's range.
    pub(super) fn start(&self) -> u64 {
        match self {
            Self::Stored(spot) => spot.child.min_key,
            Self::Loose(run) => run.start,
        }
    }
}

/// A node that is not written yet.
#[derive(Debug, Default)]
pub(super) struct Loose {
    /// Height of the node: at least 1.
    pub height: u32,
    pub items: Vec<Item>,
    /// Sorted by fragment and sequence.
    pub buffer: Vec<Arc<Mutation>>,
}

/// Records of a leaf that is not written yet.
#[derive(Debug)]
pub(super) struct Records {
    /// In order of strictly increasing id.
    pub records: Vec<pb::DataFragment>,
    /// Bytes of the records as protobuf.
    pub proto_bytes: u64,
    /// Bytes they take in a leaf, without its frame: about, as the leaf they come from has shown.
    pub content: u64,
}

/// Hundredths of a stored byte for each byte of protobuf, before a leaf has shown its own.
const INITIAL_PERCENT: u64 = 60;

impl Records {
    /// Records that no leaf held before.
    pub(super) fn new(records: Vec<pb::DataFragment>) -> Self {
        let proto_bytes = records.iter().map(|r| r.encoded_len() as u64).sum();
        Self {
            records,
            proto_bytes,
            content: scaled(proto_bytes, INITIAL_PERCENT),
        }
    }

    /// Records of a leaf that stored `old_proto_bytes` of them in `object_size`.
    pub(super) fn of_leaf(
        records: Vec<pb::DataFragment>,
        proto_bytes: u64,
        object_size: u64,
        old_proto_bytes: u64,
    ) -> Self {
        let stored = leaf_content(object_size);
        // A leaf of few records says little about others: most of it is its frame.
        let percent = stored.saturating_mul(100) / old_proto_bytes.max(1);
        Self {
            records,
            proto_bytes,
            content: if proto_bytes == old_proto_bytes {
                stored
            } else {
                scaled(proto_bytes, percent.clamp(5, 300))
            },
        }
    }

    fn join(mut self, other: Self) -> Self {
        self.proto_bytes += other.proto_bytes;
        self.content += other.content;
        self.records.extend(other.records);
        self
    }

    /// The records in pieces of about `share` bytes of content: each goes where its middle lies.
    fn divide(self, share: u64) -> Vec<Self> {
        let percent = self.content.saturating_mul(100) / self.proto_bytes.max(1);
        let mut pieces: Vec<Self> = Vec::new();
        let (mut before, mut place) = (0, None);
        for record in self.records {
            let bytes = record.encoded_len() as u64;
            let middle = scaled(before + bytes / 2, percent);
            before += bytes;
            let here = middle / share.max(1);
            if place != Some(here) {
                place = Some(here);
                pieces.push(Self {
                    records: Vec::new(),
                    proto_bytes: 0,
                    content: 0,
                });
            }
            if let Some(piece) = pieces.last_mut() {
                piece.proto_bytes += bytes;
                piece.content = scaled(piece.proto_bytes, percent);
                piece.records.push(record);
            }
        }
        pieces
    }
}

fn scaled(bytes: u64, percent: u64) -> u64 {
    bytes.saturating_mul(percent) / 100
}

/// What a run is made of.
#[derive(Debug)]
pub(super) enum Content {
    Leaf(Records),
    Node(Loose),
}

/// The content of a child, in hand.
#[derive(Debug)]
pub(super) struct Run {
    /// Lower bound of its range.
    pub start: u64,
    /// Whether it ends the tree: what grows there grows by appends, and is cut full.
    pub last: bool,
    /// The stored child this still is, to the byte.
    pub origin: Option<Spot>,
    pub content: Content,
}

/// Where an object should be cut, and when it is too small or too large. Of a leaf its records count
/// and not its frame, so that leaves hardly larger than that are told apart too; of a node its child
/// list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    target: u64,
}

/// Bytes of a leaf of one record: nearly all of it frame, and so what tells small leaves apart.
const LEAF_FRAME: u64 = 5000;

/// Least content of a leaf, whatever the policy: about three records of one file.
const LEAST_CONTENT: u64 = 300;

/// Bytes of a stored leaf that its records take.
fn leaf_content(object_size: u64) -> u64 {
    object_size.saturating_sub(LEAF_FRAME)
}

impl Sizes {
    /// The sizes of objects of this height.
    pub(super) fn of(policy: &TreePolicy, height: u32) -> Self {
        let target = if height == 0 {
            leaf_content(policy.leaf_bytes).max(LEAST_CONTENT)
        } else {
            policy.node_bytes
        };
        Self { target }
    }

    fn too_large(self, bytes: u64) -> bool {
        bytes > self.target + self.target / 4
    }

    fn too_small(self, bytes: u64) -> bool {
        bytes < self.target / 4
    }

    /// Whether two together are one good object.
    pub(super) fn fits(self, bytes: u64) -> bool {
        bytes <= self.target
    }

    /// Whether a stored leaf is worth dividing for its size alone: well above what is divided when
    /// it is written anyway, so that what was just divided is not looked at again.
    pub(super) fn is_large_leaf(self, leaf: &Child) -> bool {
        leaf.counts.fragments > 1 && leaf_content(leaf.object_size) > self.target + self.target / 2
    }

    /// Whether two stored leaves are worth making one: well below the size at which they would be
    /// when both are written anyway.
    pub(super) fn fit_leaves(self, a: &Child, b: &Child) -> bool {
        let together = leaf_content(a.object_size).saturating_add(leaf_content(b.object_size));
        together <= self.target - self.target / 4
    }
}

impl Run {
    /// Bytes that count in the object this would be.
    pub(super) fn bytes(&self) -> u64 {
        match &self.content {
            Content::Leaf(records) => records.content,
            Content::Node(node) => node.list_bytes(),
        }
    }

    /// Bytes `neighbour` would add to this run.
    pub(super) fn added_by(&self, neighbour: &Child) -> u64 {
        match &self.content {
            Content::Leaf(_) => leaf_content(neighbour.object_size),
            Content::Node(node) => {
                let each = self.bytes() / (node.items.len() as u64).max(1);
                u64::from(neighbour.num_children).saturating_mul(each)
            }
        }
    }

    /// The node this is the content of.
    pub(super) fn into_node(self) -> Result<Loose> {
        match self.content {
            Content::Node(node) => Ok(node),
            Content::Leaf(_) => Err(Error::internal("a leaf is no node")),
        }
    }

    /// Whether no object can be made of this run alone: an interior has at least two children.
    pub(super) fn must_join(&self) -> bool {
        matches!(&self.content, Content::Node(node) if node.items.len() < 2)
    }

    /// Whether this run should join a neighbour.
    pub(super) fn is_small(&self, sizes: Sizes) -> bool {
        self.must_join() || sizes.too_small(self.bytes())
    }

    /// Whether this run and the one after it should be one, to be divided again if that is large.
    pub(super) fn should_join(&self, next: &Self, sizes: Sizes) -> bool {
        self.is_small(sizes)
            || next.is_small(sizes)
            || sizes.fits(self.bytes().saturating_add(next.bytes()))
    }

    /// This run and the one after it.
    pub(super) fn join(self, next: Self) -> Result<Self> {
        let content = match (self.content, next.content) {
            (Content::Leaf(a), Content::Leaf(b)) => Content::Leaf(a.join(b)),
            (Content::Node(mut a), Content::Node(b)) if a.height == b.height => {
                a.items.extend(b.items);
                a.buffer.extend(b.buffer);
                Content::Node(a)
            }
            _ => return Err(Error::internal("runs of two heights cannot be joined")),
        };
        Ok(Self {
            start: self.start,
            last: next.last,
            origin: None,
            content,
        })
    }

    /// The run in pieces of a good size; one piece when it is not large. At least one.
    pub(super) fn divide(self, sizes: Sizes) -> Vec<Self> {
        if !sizes.too_large(self.bytes()) {
            return vec![self];
        }
        let (start, last, origin) = (self.start, self.last, self.origin);
        let mut pieces = match self.content {
            Content::Leaf(records) => {
                let share = if last {
                    sizes.target
                } else {
                    records.content / records.content.div_ceil(sizes.target).max(1)
                };
                let pieces = records.divide(share).into_iter();
                number(start, last, pieces.map(Content::Leaf))
            }
            Content::Node(node) => {
                let counts = shares(&node, sizes.target, last);
                number(start, last, node.divide(counts).map(Content::Node))
            }
        };
        // What cannot be divided stays what it is: one record, or three children.
        if let [whole] = pieces.as_mut_slice() {
            whole.origin = origin;
        }
        pieces
    }
}

/// How many children go to each piece of a node: at least two.
fn shares(node: &Loose, target: u64, last: bool) -> Vec<usize> {
    let (children, bytes) = (node.items.len(), node.list_bytes());
    let mut left = children;
    let mut counts = Vec::new();
    if last {
        // Full ones, and what is left.
        let each = (children as u64).saturating_mul(target) / bytes.max(1);
        let each = usize::try_from(each).unwrap_or(usize::MAX).max(2);
        while left >= each.saturating_add(2) {
            counts.push(each);
            left -= each;
        }
        counts.push(left);
        return counts;
    }
    let pieces = usize::try_from(bytes.div_ceil(target.max(1))).unwrap_or(usize::MAX);
    let pieces = pieces.clamp(1, (children / 2).max(1));
    for index in 0..pieces {
        let share = left.div_ceil(pieces - index);
        counts.push(share);
        left -= share;
    }
    counts
}

/// Pieces of one run: the first begins where the run did, the others where their content does.
fn number(start: u64, last: bool, pieces: impl Iterator<Item = Content>) -> Vec<Run> {
    let mut runs: Vec<Run> = pieces
        .enumerate()
        .map(|(index, content)| {
            let first = match &content {
                Content::Leaf(records) => records.records.first().map(|r| r.id),
                Content::Node(node) => node.items.first().map(Item::start),
            };
            Run {
                start: if index == 0 {
                    start
                } else {
                    first.unwrap_or(start)
                },
                last: false,
                origin: None,
                content,
            }
        })
        .collect();
    if let Some(run) = runs.last_mut() {
        run.last = last;
    }
    runs
}

impl Loose {
    /// Bytes of the child list. A child that is not stored yet is about as large as any.
    pub(super) fn list_bytes(&self) -> u64 {
        self.items
            .iter()
            .map(|item| match item {
                Item::Stored(spot) => spot.child.stored_bytes(),
                Item::Loose(_) => TYPICAL_CHILD_BYTES,
            })
            .sum()
    }

    /// Bytes of the buffer.
    pub(super) fn buffer_bytes(&self) -> u64 {
        self.buffer.iter().map(|m| m.stored_bytes()).sum()
    }

    /// The stored children, when all are.
    pub(super) fn stored(&self) -> Option<Vec<&Child>> {
        self.items
            .iter()
            .map(|item| match item {
                Item::Stored(spot) => Some(&spot.child),
                Item::Loose(_) => None,
            })
            .collect()
    }

    /// The node in pieces of so many children each, the buffer divided by their ranges.
    fn divide(self, counts: Vec<usize>) -> impl Iterator<Item = Self> {
        let height = self.height;
        let mut items = self.items.into_iter();
        let groups: Vec<Vec<Item>> = counts
            .into_iter()
            .map(|count| items.by_ref().take(count).collect())
            .collect();
        let starts: Vec<u64> = groups
            .iter()
            .map(|g| g.first().map_or(0, Item::start))
            .collect();
        let buffers = divide_buffer(self.buffer, &starts);
        groups
            .into_iter()
            .zip(buffers)
            .map(move |(items, buffer)| Self {
                height,
                items,
                buffer,
            })
    }

    /// The node in even pieces, as many as its child list needs.
    pub(super) fn divide_evenly(self, target: u64) -> impl Iterator<Item = Self> {
        let counts = shares(&self, target, false);
        self.divide(counts)
    }
}

/// Bytes of a reference to an object of this dataset.
const TYPICAL_CHILD_BYTES: u64 = 80;

/// Divides a sorted buffer among children that begin at `starts`.
pub(super) fn divide_buffer(buffer: Vec<Arc<Mutation>>, starts: &[u64]) -> Vec<Vec<Arc<Mutation>>> {
    let mut rest = buffer.into_iter().peekable();
    let ends = starts.iter().skip(1).copied().chain([u64::MAX]);
    ends.take(starts.len())
        .map(|end| {
            let mut batch = Vec::new();
            while let Some(mutation) = rest.next_if(|m| u64::from(m.target) < end) {
                batch.push(mutation);
            }
            batch
        })
        .collect()
}
