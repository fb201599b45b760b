//! Putting a node's children together again, from left to right.
//!
//! Runs and untouched children arrive in order of their ranges. A run waits as the tail until what
//! follows is known: small ones join it, large ones are divided, and what is of a good size is
//! written while the next is still being read. An untouched child is opened only when a run beside
//! it is too small and the two together make one good object, or when no object can be made of the
//! run alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use datafusion::common::runtime::SpawnedTask;
use prost::Message;

use super::flush::{Grower, Turn};
use super::run::{Content, Item, Run, Sizes, Spot};
use crate::error::{Error, Result};
use crate::tree::leaf_write::LeafBuilder;
use crate::tree::mutation::Mutation;
use crate::tree::node::{Child, Node};
use crate::tree::record::counts_of;
use crate::tree::summary::Tally;
use crate::write::sink::{ObjectKind, ObjectSink};

/// Objects of one node that are encoded and written at once.
const WRITES_AT_ONCE: usize = 4;

/// A child that is done with.
#[derive(Debug)]
enum Done {
    Kept {
        spot: Spot,
        batch: Vec<Arc<Mutation>>,
        last: bool,
    },
    /// On its way; the child is in `written` once it is there.
    Writing,
}

/// A written object, and its bytes where a dry run may want them back.
type Written = (Child, Option<Bytes>);

/// The children of one node, while they are put together.
#[derive(Debug)]
pub(super) struct Weld<'g, 'a> {
    grower: &'g Grower<'a>,
    sizes: Sizes,
    done: Vec<Done>,
    tail: Option<Run>,
    writing: VecDeque<(usize, SpawnedTask<Result<Written>>)>,
    written: BTreeMap<usize, Child>,
}

impl<'g, 'a> Weld<'g, 'a> {
    /// For children of this height.
    pub(super) fn new(grower: &'g Grower<'a>, height: u32) -> Self {
        Self {
            grower,
            sizes: Sizes::of(grower.policy, height),
            done: Vec::new(),
            tail: None,
            writing: VecDeque::new(),
            written: BTreeMap::new(),
        }
    }

    /// Takes the next child.
    pub(super) async fn push(&mut self, turn: Turn) -> Result<()> {
        match turn {
            Turn::Run(run) => self.push_run(run).await,
            Turn::Kept { spot, batch, last } => self.push_kept(spot, batch, last).await,
        }
    }

    async fn push_run(&mut self, run: Run) -> Result<()> {
        let run = match self.tail.take() {
            None => run,
            Some(tail) if tail.should_join(&run, self.sizes) => self.join(tail, run).await?,
            Some(tail) => {
                self.emit(tail).await?;
                run
            }
        };
        self.set_tail(run).await
    }

    async fn push_kept(&mut self, spot: Spot, batch: Vec<Arc<Mutation>>, last: bool) -> Result<()> {
        while let Some(tail) = self.tail.take() {
            let before = self.neighbour_before(&tail).await?;
            let after = self.fitness(&tail, &spot);
            match (before, after) {
                (None, None) => self.emit(tail).await?,
                (Some(size), other) if other.is_none_or(|other| size <= other) => {
                    let joined = self.join_before(tail).await?;
                    self.set_tail(joined).await?;
                }
                _ => {
                    let next = self.grower.open(spot, batch, last).await?;
                    let joined = self.join(tail, next).await?;
                    return self.set_tail(joined).await;
                }
            }
        }
        self.done.push(Done::Kept { spot, batch, last });
        Ok(())
    }

    /// Everything is pushed: the children in order, and what stays buffered above them. When all are
    /// one run it is handed back unwritten, for the node above to find it a place.
    pub(super) async fn finish(mut self) -> Result<(Vec<Item>, Vec<Arc<Mutation>>)> {
        while let Some(tail) = self.tail.take() {
            if self.neighbour_before(&tail).await?.is_some() {
                let joined = self.join_before(tail).await?;
                self.set_tail(joined).await?;
                continue;
            }
            if !self.done.is_empty() {
                self.emit(tail).await?;
                continue;
            }
            let item = match tail.origin {
                Some(spot) => Item::Stored(spot),
                None => Item::Loose(tail),
            };
            return Ok((vec![item], Vec::new()));
        }
        while !self.writing.is_empty() {
            self.collect().await?;
        }
        let mut items = Vec::with_capacity(self.done.len());
        let mut buffer = Vec::new();
        for (index, done) in self.done.into_iter().enumerate() {
            let spot = match done {
                Done::Kept { spot, batch, .. } => {
                    buffer.extend(batch);
                    spot
                }
                Done::Writing => {
                    let child = self.written.remove(&index);
                    fresh(child.ok_or_else(|| Error::internal("a written child vanished"))?)
                }
            };
            items.push(Item::Stored(spot));
        }
        close_ranges(&mut items);
        Ok((items, buffer))
    }

    /// How large the tail and `spot` are together, when they should be one.
    fn fitness(&self, tail: &Run, spot: &Spot) -> Option<u64> {
        if !tail.is_small(self.sizes) {
            return None;
        }
        // What was written just now is opened only where there is no other way.
        if spot.fresh && !tail.must_join() {
            return None;
        }
        let together = tail.bytes().saturating_add(tail.added_by(&spot.child));
        (tail.must_join() || self.sizes.fits(together)).then_some(together)
    }

    /// How large the child before the tail and the tail are together, when they should be one.
    async fn neighbour_before(&mut self, tail: &Run) -> Result<Option<u64>> {
        if tail.must_join() && matches!(self.done.last(), Some(Done::Writing)) {
            self.recall(tail.start).await?;
        }
        Ok(match self.done.last() {
            Some(Done::Kept { spot, .. }) => self.fitness(tail, spot),
            Some(Done::Writing) | None => None,
        })
    }

    /// Makes the last child, which was just written and ends at `end`, one that can be opened.
    async fn recall(&mut self, end: u64) -> Result<()> {
        while !self.writing.is_empty() {
            self.collect().await?;
        }
        let last = self.done.len().checked_sub(1);
        if let Some(child) = last.and_then(|index| self.written.remove(&index)) {
            let checked = child.min_key..end;
            self.done.pop();
            self.done.push(Done::Kept {
                spot: Spot {
                    checked,
                    ..fresh(child)
                },
                batch: Vec::new(),
                last: false,
            });
        }
        Ok(())
    }

    /// The untouched child before the tail and the tail, as one run.
    async fn join_before(&mut self, tail: Run) -> Result<Run> {
        let Some(Done::Kept { spot, batch, last }) = self.done.pop() else {
            return Err(Error::internal("no untouched child before the tail"));
        };
        let before = self.grower.open(spot, batch, last).await?;
        self.join(before, tail).await
    }

    /// Two runs as one. What was loose in either has siblings now.
    async fn join(&self, a: Run, b: Run) -> Result<Run> {
        let run = a.join(b)?;
        let limit = self.grower.policy.buffer_bytes;
        let Content::Node(node) = run.content else {
            return Ok(run);
        };
        let settled = node.stored().is_some() && node.buffer_bytes() <= limit;
        let node = if settled {
            node
        } else {
            self.grower.settle(node, run.start, limit, run.last).await?
        };
        Ok(Run {
            content: Content::Node(node),
            ..run
        })
    }

    /// Makes `run` the tail: what is too large is divided, and only its end waits.
    async fn set_tail(&mut self, run: Run) -> Result<()> {
        let mut pieces = run.divide(self.sizes);
        self.tail = pieces.pop();
        for piece in pieces {
            self.emit(piece).await?;
        }
        Ok(())
    }

    /// Writes a run, unless it is what is stored already.
    async fn emit(&mut self, run: Run) -> Result<()> {
        if let Some(spot) = run.origin {
            self.done.push(Done::Kept {
                spot,
                batch: Vec::new(),
                last: run.last,
            });
            return Ok(());
        }
        while self.writing.len() >= WRITES_AT_ONCE {
            self.collect().await?;
        }
        let task = SpawnedTask::spawn(write(self.grower.sink.clone(), run, self.grower.next - 1));
        self.writing.push_back((self.done.len(), task));
        self.done.push(Done::Writing);
        Ok(())
    }

    async fn collect(&mut self) -> Result<()> {
        let Some((index, task)) = self.writing.pop_front() else {
            return Ok(());
        };
        let (child, bytes) = task
            .await
            .map_err(|e| Error::internal(format!("a writing task ended: {e}")))??;
        self.grower.ledger().enter(&child, bytes);
        self.written.insert(index, child);
        Ok(())
    }
}

/// A child that was just written. Its end is that of its place, which is known when all are.
pub(super) fn fresh(child: Child) -> Spot {
    Spot {
        checked: child.min_key..child.min_key,
        child,
        fresh: true,
    }
}

/// Gives children that were just written the range they are to be found with.
fn close_ranges(items: &mut [Item]) {
    let mut end = crate::tree::node::ID_END;
    for item in items.iter_mut().rev() {
        let start = item.start();
        if let Item::Stored(spot) = item
            && spot.fresh
        {
            spot.checked = start..end;
        }
        end = start;
    }
}

/// Writes a run as an object of the opened dataset.
pub(super) async fn write(sink: ObjectSink, run: Run, watermark: u64) -> Result<Written> {
    let min_key = run.start;
    match run.content {
        Content::Leaf(records) => {
            let mut builder = LeafBuilder::new();
            let mut tally = Tally::default();
            for record in &records.records {
                builder.push(record)?;
                tally += counts_of(record);
            }
            // The columns have it all.
            drop(records);
            let bytes = builder.encode().await?;
            let child = Child {
                path: String::new(),
                base_id: None,
                min_key,
                counts: tally.counts("a new leaf")?,
                height: 0,
                num_children: 0,
                object_size: bytes.len() as u64,
                watermark,
            };
            let path = sink.put(ObjectKind::Leaf, bytes).await?;
            Ok((Child { path, ..child }, None))
        }
        Content::Node(loose) => {
            let children: Option<Vec<Child>> = loose
                .stored()
                .map(|children| children.into_iter().cloned().collect());
            let children = children
                .filter(|children| children.len() >= 2)
                .ok_or_else(|| Error::internal("a node needs two stored children"))?;
            let num_children = u32::try_from(children.len())
                .map_err(|_| Error::internal("a node of more than 2^32 children"))?;
            let node = Node {
                children,
                buffer: loose.buffer,
            };
            let bytes = Bytes::from(node.encode().encode_to_vec());
            let child = Child {
                path: String::new(),
                base_id: None,
                min_key,
                counts: node.tally().counts("a new node")?,
                height: loose.height,
                num_children,
                object_size: bytes.len() as u64,
                watermark: 0,
            };
            let kept = sink.is_dry_run().then(|| bytes.clone());
            let path = sink.put(ObjectKind::Node, bytes).await?;
            Ok((Child { path, ..child }, kept))
        }
    }
}
