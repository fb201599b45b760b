//! Moving batches down: which, and what the children become.
//!
//! ```text
//!   node        [ child  child  child  child  child ]
//!   its buffer     a       bbbb          c     dddddd       by child: whole batches
//!                           │                     │
//!                           ▼                     ▼         the heaviest first
//!               [ child  ~~~~~~  child  child  ~~~~~~ ]     opened: runs, to be welded
//! ```
//!
//! A child that gets anything gets its whole batch. A leaf is replayed; an interior takes the batch
//! into its buffer, and passes on what is too much for it in the same way.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use datafusion::common::runtime::SpawnedTask;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use lance_table::format::pb;
use prost::Message;

use super::report::Ledger;
use super::run::{Content, Item, Loose, Records, Run, Sizes, Spot, divide_buffer};
use super::squash::squash;
use super::weld::Weld;
use crate::error::{Error, Result};
use crate::ranges::FragmentRanges;
use crate::snapshot::TreeCatalog;
use crate::tree::leaf::Leaf;
use crate::tree::mutation::{Mutation, Pending};
use crate::tree::node::{Child, Node, NodeContext};
use crate::tree::object::Owner;
use crate::tree::summary::Tally;
use crate::tree_scan::{WalkState, Work, resolve_leaf};
use crate::write::policy::TreePolicy;
use crate::write::sink::ObjectSink;

/// Children of one node that are opened at once.
const AT_ONCE: usize = 4;

/// One growth: what all its parts share.
#[derive(Debug)]
pub(super) struct Grower<'a> {
    pub base: &'a TreeCatalog,
    pub sink: &'a ObjectSink,
    pub policy: &'a TreePolicy,
    /// `next_action_sequence` of the new tree: what is written has everything below it applied.
    pub next: u64,
    /// The least sequence above everything buffered below the root of the version that was read.
    pub fresh: u64,
    /// `max_fragment_id` of the new version.
    pub max_fragment_id: Option<u32>,
    /// Empty every buffer, and mend what is too small or too large.
    pub drain: bool,
    pub state: WalkState,
    pub ledger: Mutex<Ledger>,
}

/// A child with what its parent holds for it.
#[derive(Debug)]
struct Slot {
    item: Item,
    batch: Vec<Arc<Mutation>>,
    /// Whether the child is to be opened.
    open: bool,
}

/// A child after its turn: opened, or as it was with its batch still above it.
#[derive(Debug)]
pub(super) enum Turn {
    Run(Run),
    Kept {
        spot: Spot,
        batch: Vec<Arc<Mutation>>,
        last: bool,
    },
}

impl<'a> Grower<'a> {
    pub(super) fn ledger(&self) -> std::sync::MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Squashes the buffer of a node of this height. Below a node over leaves nothing is buffered
    /// any more, and above it nothing remains for its range once it is opened: there all may go.
    /// Elsewhere others may hold what lies between two old mutations; not so between new ones.
    pub(super) fn squash(
        &self,
        height: u32,
        buffer: Vec<Arc<Mutation>>,
    ) -> Result<Vec<Arc<Mutation>>> {
        let from = if height <= 1 { 0 } else { self.fresh };
        squash(&self.base.label, buffer, from)
    }

    /// Brings a node in order: drops children that are emptied, moves batches down while its buffer
    /// has more than `limit` bytes, and joins or divides the children this touches.
    ///
    /// `start` is the lower bound of its range. In the result all children are stored, or there is a
    /// single loose one.
    pub(super) fn settle<'b>(
        &'b self,
        node: Loose,
        start: u64,
        limit: u64,
        last: bool,
    ) -> BoxFuture<'b, Result<Loose>> {
        async move {
            let height = node.height;
            let below = height
                .checked_sub(1)
                .ok_or_else(|| Error::internal("a leaf cannot be settled as a node"))?;
            let mut slots = self.slots(node)?;
            self.drop_emptied(&mut slots)?;
            lower_first(&mut slots, start)?;
            self.choose(&mut slots, below, limit);
            // Where children have children of their own, those are many enough.
            let at_once = if below < 2 { AT_ONCE } else { 1 };
            let final_slot = slots.len();
            let turns: Vec<_> = slots
                .into_iter()
                .enumerate()
                .map(|(index, slot)| self.turn(slot, last && index + 1 == final_slot))
                .collect();
            let mut turns = stream::iter(turns).buffered(at_once);
            let mut weld = Weld::new(self, below);
            while let Some(turn) = turns.try_next().await? {
                weld.push(turn).await?;
            }
            drop(turns);
            let (items, buffer) = weld.finish().await?;
            Ok(Loose {
                height,
                items,
                buffer,
            })
        }
        .boxed()
    }

    /// The children of a node, each with its share of the buffer.
    fn slots(&self, node: Loose) -> Result<Vec<Slot>> {
        let buffer = self.squash(node.height, node.buffer)?;
        let starts: Vec<u64> = node.items.iter().map(Item::start).collect();
        let batches = divide_buffer(buffer, &starts);
        Ok(node
            .items
            .into_iter()
            .zip(batches)
            .map(|(item, batch)| Slot {
                item,
                batch,
                open: false,
            })
            .collect())
    }

    /// Drops children in which nothing is left once their batch is applied: summaries and deltas say
    /// so without opening them. The sibling before a dropped child takes over its range.
    fn drop_emptied(&self, slots: &mut Vec<Slot>) -> Result<()> {
        let mut failed = None;
        slots.retain(|slot| {
            let Item::Stored(spot) = &slot.item else {
                return true;
            };
            let mut tally = Tally::default();
            tally += spot.child.counts;
            for mutation in &slot.batch {
                tally += mutation.delta;
            }
            let (fragments, total, visible) = tally.raw();
            if fragments == 0 && (total, visible) != (0, 0) {
                failed = Some(Error::corrupt(
                    format!("{}, child {}", self.base.label, spot.child.path),
                    "total_rows_mismatch",
                    "no rows where no fragment is left",
                    format!("{total} rows, {visible} visible"),
                ));
            }
            fragments != 0
        });
        failed.map_or(Ok(()), Err)
    }

    /// Marks the children to open.
    fn choose(&self, slots: &mut [Slot], height: u32, limit: u64) {
        let mut weights: Vec<(u64, usize)> = slots
            .iter()
            .enumerate()
            .map(|(index, slot)| (slot.batch.iter().map(|m| m.stored_bytes()).sum(), index))
            .collect();
        if self.drain {
            self.choose_all(slots, height);
            return;
        }
        let mut held: u64 = weights.iter().map(|(bytes, _)| bytes).sum();
        let over = held > limit;
        // A batch that is worth a leaf does not wait, or bulk work would fill every buffer first.
        let heavy = if height == 0 {
            (self.policy.leaf_bytes / 4).max(1)
        } else {
            u64::MAX
        };
        weights.sort_unstable_by(|a, b| b.cmp(a));
        for (bytes, index) in weights {
            let wanted = bytes >= heavy || (over && held > limit / 2);
            if bytes == 0 || !wanted {
                break;
            }
            held -= bytes;
            if let Some(slot) = slots.get_mut(index) {
                slot.open = true;
            }
        }
    }

    /// Marks the children to open so that nothing stays buffered, nothing too small, and nothing too
    /// large: every interior, as only it knows what it holds.
    fn choose_all(&self, slots: &mut [Slot], height: u32) {
        let sizes = Sizes::of(self.policy, height);
        let wanted: Vec<bool> = slots
            .iter()
            .enumerate()
            .map(|(index, slot)| {
                let Item::Stored(spot) = &slot.item else {
                    return true;
                };
                if spot.fresh {
                    return false;
                }
                let beside = |at: Option<usize>| {
                    let other = at.and_then(|at| slots.get(at));
                    matches!(other.map(|s| &s.item), Some(Item::Stored(other))
                        if !other.fresh && sizes.fit_leaves(&spot.child, &other.child))
                };
                height > 0
                    || !slot.batch.is_empty()
                    || sizes.is_large_leaf(&spot.child)
                    || beside(index.checked_sub(1))
                    || beside(index.checked_add(1))
            })
            .collect();
        for (slot, wanted) in slots.iter_mut().zip(wanted) {
            slot.open |= wanted;
        }
    }

    fn turn<'b>(&'b self, slot: Slot, last: bool) -> BoxFuture<'b, Result<Turn>> {
        async move {
            match slot.item {
                Item::Stored(spot) if slot.open => {
                    let run = self.open(spot, slot.batch, last).await?;
                    Ok(Turn::Run(run))
                }
                Item::Stored(spot) => Ok(Turn::Kept {
                    spot,
                    batch: slot.batch,
                    last,
                }),
                Item::Loose(run) if slot.batch.is_empty() => Ok(Turn::Run(run)),
                Item::Loose(_) => Err(Error::internal("a batch for what was opened already")),
            }
        }
        .boxed()
    }

    /// Opens a child and gives it everything its parent holds for it.
    pub(super) fn open<'b>(
        &'b self,
        spot: Spot,
        batch: Vec<Arc<Mutation>>,
        last: bool,
    ) -> BoxFuture<'b, Result<Run>> {
        if spot.child.height == 0 {
            self.open_leaf(spot, batch, last).boxed()
        } else {
            self.open_node(spot, batch, last).boxed()
        }
    }

    fn work(spot: &Spot, batch: &[Arc<Mutation>]) -> Work {
        Work {
            owner: Owner::Current.of_reference(spot.child.base_id),
            child: spot.child.clone(),
            range: spot.checked.clone(),
            pending: batch
                .iter()
                .map(|m| Pending::new(m, Owner::Current))
                .collect(),
        }
    }

    async fn open_leaf(&self, spot: Spot, batch: Vec<Arc<Mutation>>, last: bool) -> Result<Run> {
        if spot.fresh {
            return Err(Error::internal("a leaf is written once"));
        }
        let work = Self::work(&spot, &batch);
        let leaf = self.base.open_leaf(&work, &self.state).await?;
        let replay = SpawnedTask::spawn_blocking(move || apply_batch(&leaf, &work));
        let records = replay
            .await
            .map_err(|e| Error::internal(format!("a leaf's task ended: {e}")))??;
        Ok(Run {
            start: spot.child.min_key,
            last,
            origin: batch.is_empty().then_some(spot),
            content: Content::Leaf(records),
        })
    }

    async fn open_node(&self, spot: Spot, batch: Vec<Arc<Mutation>>, last: bool) -> Result<Run> {
        let work = Self::work(&spot, &batch);
        let (node, pending) = if spot.fresh {
            self.reopen_node(&work, &batch).await?
        } else {
            self.base.open_node(&work, &self.state).await?
        };
        let items: Vec<Item> = node
            .children
            .iter()
            .zip(node.child_ranges(&spot.checked))
            .map(|(child, checked)| {
                Item::Stored(Spot {
                    // In an object of this dataset a reference inherits this dataset.
                    child: Child {
                        base_id: work.owner.of_reference(child.base_id).base_id(),
                        ..child.clone()
                    },
                    checked,
                    fresh: spot.fresh && self.ledger().wrote(&child.path),
                })
            })
            .collect();
        let buffer: Vec<_> = pending
            .into_iter()
            .map(|p| Mutation::adopt(p.mutation, p.owner))
            .collect();
        let before = Loose {
            height: spot.child.height,
            items,
            buffer,
        };
        let children: Vec<Child> = before
            .stored()
            .unwrap_or_default()
            .into_iter()
            .cloned()
            .collect();
        let unchanged = batch.is_empty() && spot.child.min_key == spot.checked.start;
        let held = unchanged.then(|| before.buffer.clone());
        let start = spot.child.min_key;
        let node = self
            .settle(before, start, self.policy.buffer_bytes, last)
            .await?;
        let same = held.is_some_and(|held| held == node.buffer)
            && node
                .stored()
                .is_some_and(|now| now.into_iter().eq(children.iter()));
        Ok(Run {
            start,
            last,
            origin: same.then_some(spot),
            content: Content::Node(node),
        })
    }

    /// Reads back an interior this growth wrote: rare, when what is left of its neighbour cannot
    /// stand alone.
    async fn reopen_node(
        &self,
        work: &Work,
        batch: &[Arc<Mutation>],
    ) -> Result<(Arc<Node>, Vec<Pending>)> {
        if !batch.is_empty() {
            return Err(Error::internal("a batch for what was written just now"));
        }
        let objects = &self.base.objects;
        let path = &work.child.path;
        let object = objects.bases.location(Owner::Current, path)?;
        let kept = self.ledger().take_back(path);
        let bytes: Bytes = match kept {
            Some(bytes) => bytes,
            None => {
                let size = Some(work.child.object_size);
                objects
                    .fetch(Owner::Current, path, size, &self.state.stats)
                    .await?
            }
        };
        let node = Node::decode(&object, &bytes)?;
        node.check_reference(&object, &work.child)?;
        node.check(&NodeContext {
            object: &object,
            owner: Owner::Current,
            range: work.range.clone(),
            bases: &objects.bases,
            max_fragment_id: self.max_fragment_id,
            next_sequence: self.next,
        })?;
        let mut pending: Vec<_> = node
            .buffer
            .iter()
            .map(|m| Pending::new(m, Owner::Current))
            .collect();
        pending.sort_unstable_by_key(Pending::key);
        Ok((Arc::new(node), pending))
    }
}

/// Gives the first child the lower bound of its node. An interior must pass it on to its own first
/// child, and so is opened.
fn lower_first(slots: &mut [Slot], start: u64) -> Result<()> {
    let Some(first) = slots.first_mut() else {
        return Ok(());
    };
    if first.item.start() == start {
        return Ok(());
    }
    match &mut first.item {
        Item::Stored(spot) => {
            spot.child.min_key = start;
            first.open |= spot.child.height > 0;
            Ok(())
        }
        Item::Loose(_) => Err(Error::internal("what is opened has its place already")),
    }
}

/// The records of a leaf with everything buffered above it applied. CPU work.
fn apply_batch(leaf: &Arc<Leaf>, work: &Work) -> Result<Records> {
    let resolved = resolve_leaf(leaf, work, &FragmentRanges::all())?;
    let mut records = Vec::with_capacity(resolved.len());
    let mut proto_bytes = 0;
    for fragment in resolved {
        let record: pb::DataFragment = fragment.record()?;
        proto_bytes += record.encoded_len() as u64;
        records.push(record);
    }
    // What the leaf stored is what is there now, but for the records the batch is about.
    let mut stored_bytes = proto_bytes;
    for group in work
        .pending
        .chunk_by(|a, b| a.mutation.target == b.mutation.target)
    {
        let target = group.first().map_or(0, |p| p.mutation.target);
        if let Ok(at) = records.binary_search_by_key(&u64::from(target), |r| r.id)
            && let Some(now) = records.get(at)
        {
            stored_bytes -= now.encoded_len() as u64;
        }
        if let Ok(row) = leaf.ids().binary_search(&target) {
            stored_bytes += leaf.record(row, work.owner)?.encoded_len() as u64;
        }
    }
    Ok(Records::of_leaf(
        records,
        proto_bytes,
        work.child.object_size,
        stored_bytes,
    ))
}
