//! From ranges of fragment ids to fragments: the walk, and what is asked of it.
//!
//! ```text
//!  wanted ranges ─► root children that overlap ─► nodes ─► leaves ─► resolved fragments, in id order
//!                        │ pending mutations travel down with each child
//!                        └ a child wholly wanted answers a count with its summary
//!
//!  resolved  one fragment with everything buffered above it applied
//!  count     counts over ranges, and estimates
//!  split     ranges into parts of about the same weight
//!  objects   the objects of the tree, listed
//!  state     what the parts of one operation share
//! ```

mod count;
mod objects;
mod resolved;
mod split;
mod state;

use std::ops::Range;
use std::sync::Arc;

use datafusion::common::runtime::SpawnedTask;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};

pub use objects::TreeObject;
pub use resolved::ResolvedFragment;
pub use state::WalkState;

use self::count::{count_tree, estimate_tree};
use self::resolved::Source;
use self::split::{balance, flat_weights, tree_weights};
use crate::error::{Error, Result};
use crate::flat::FlatCatalog;
use crate::ranges::FragmentRanges;
use crate::snapshot::{Catalog, Snapshot, TreeCatalog};
use crate::tree::leaf::Leaf;
use crate::tree::mutation::{Pending, replay};
use crate::tree::node::{Child, ID_END, Node, NodeContext};
use crate::tree::object::{Owner, ReadStats};
use crate::tree::summary::Counts;

/// Settings of a walk.
#[derive(Debug, Clone)]
pub struct WalkOptions {
    /// Tree objects read ahead of the consumer, in order. Bounds memory: at most this many leaves
    /// are decoded and waiting.
    pub window: usize,
}

impl Default for WalkOptions {
    fn default() -> Self {
        Self { window: 16 }
    }
}

/// Objects of a level that are opened at once where the whole level is.
const CONCURRENT_OPENS: usize = 8;

/// Fragments of a flat list handed on at a time.
const FLAT_BATCH: usize = 1024;

/// Fragments in id order, a batch at a time.
pub type FragmentStream = BoxStream<'static, Result<Vec<ResolvedFragment>>>;

/// A child about to be opened, with what its ancestors know about it.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub child: Child,
    pub owner: Owner,
    pub range: Range<u64>,
    /// Mutations buffered above, for this range, by fragment and sequence.
    pub pending: Vec<Pending>,
}

/// An interior that was opened, and everything pending for its children.
type Opened = (Work, Arc<Node>, Vec<Pending>);

impl TreeCatalog {
    fn enter_root(&self, state: &WalkState) -> Result<()> {
        state.ledger.enter("root", &self.root.node.buffer)?;
        state.ledger.enter("mutations_since_root", &self.since_root)
    }

    /// The root's children, each with what is buffered above it.
    fn root_spans(&self) -> impl Iterator<Item = Span<'_>> {
        spans(&self.root.node, &(0..ID_END), &self.pending)
    }

    /// The root's children that `wanted` touches.
    pub(crate) fn root_work(&self, wanted: &FragmentRanges, stats: &ReadStats) -> Vec<Work> {
        select(self.root_spans(), Owner::Current, wanted, stats)
    }

    /// Opens an interior: the node, and everything pending for its children.
    pub(crate) async fn open_node(
        &self,
        work: &Work,
        state: &WalkState,
    ) -> Result<(Arc<Node>, Vec<Pending>)> {
        let object = self.objects.bases.location(work.owner, &work.child.path)?;
        let node = self
            .objects
            .node(
                work.owner,
                &work.child.path,
                work.child.object_size,
                &state.stats,
            )
            .await?;
        node.check_reference(&object, &work.child)?;
        node.check(&self.context(&object, work))?;
        self.enter_root(state)?;
        state.ledger.enter(&object, &node.buffer)?;
        let mut pending = work.pending.clone();
        pending.extend(node.buffer.iter().map(|m| Pending::new(m, work.owner)));
        pending.sort_unstable_by_key(Pending::key);
        Ok((node, pending))
    }

    /// Opens the interiors of one level, in order.
    async fn open_level(&self, level: Vec<Work>, state: &WalkState) -> Result<Vec<Opened>> {
        stream::iter(level)
            .map(|work| async move {
                let (node, pending) = self.open_node(&work, state).await?;
                Ok((work, node, pending))
            })
            .buffered(CONCURRENT_OPENS)
            .try_collect()
            .await
    }

    /// Opens a leaf and checks it.
    pub(crate) async fn open_leaf(&self, work: &Work, state: &WalkState) -> Result<Arc<Leaf>> {
        let object = self.objects.bases.location(work.owner, &work.child.path)?;
        let leaf = self
            .objects
            .leaf(
                work.owner,
                &work.child.path,
                work.child.object_size,
                &state.stats,
                &state.reading,
            )
            .await?;
        leaf.check(&work.child, &self.context(&object, work))?;
        Ok(leaf)
    }

    fn context<'a>(&'a self, object: &'a str, work: &Work) -> NodeContext<'a> {
        NodeContext {
            object,
            owner: work.owner,
            range: work.range.clone(),
            bases: &self.objects.bases,
            max_fragment_id: self.max_fragment_id,
            next_sequence: self.root.next_sequence,
        }
    }
}

/// A child of an opened node, in place: its range and what is pending for it.
struct Span<'a> {
    child: &'a Child,
    range: Range<u64>,
    pending: &'a [Pending],
}

impl Span<'_> {
    /// The child as work that outlives its parent, which `owner` owns.
    fn to_work(&self, owner: Owner) -> Work {
        Work {
            owner: owner.of_reference(self.child.base_id),
            child: self.child.clone(),
            range: self.range.clone(),
            pending: self.pending.to_vec(),
        }
    }
}

/// The children of a node, each with its share of `pending`.
fn spans<'a>(
    node: &'a Node,
    range: &Range<u64>,
    pending: &'a [Pending],
) -> impl Iterator<Item = Span<'a>> {
    let ranges = node.child_ranges(range);
    node.children.iter().zip(ranges).map(|(child, range)| Span {
        child,
        pending: pending_in(pending, &range),
        range,
    })
}

/// The part of `pending` that targets `range`.
fn pending_in<'a>(pending: &'a [Pending], range: &Range<u64>) -> &'a [Pending] {
    let at = |bound: u64| pending.partition_point(|p| u64::from(p.mutation.target) < bound);
    pending
        .get(at(range.start)..at(range.end))
        .unwrap_or_default()
}

/// The children of an opened node that `wanted` touches.
pub(crate) fn overlapping(
    node: &Node,
    work: &Work,
    pending: &[Pending],
    wanted: &FragmentRanges,
    stats: &ReadStats,
) -> Vec<Work> {
    select(spans(node, &work.range, pending), work.owner, wanted, stats)
}

/// Those of a node's children that `wanted` touches; counts the others as skipped.
fn select<'a>(
    spans: impl Iterator<Item = Span<'a>>,
    owner: Owner,
    wanted: &FragmentRanges,
    stats: &ReadStats,
) -> Vec<Work> {
    let mut skipped = 0;
    let selected = spans
        .filter(|span| {
            let overlaps = wanted.overlaps(&span.range);
            skipped += u64::from(!overlaps);
            overlaps
        })
        .map(|span| span.to_work(owner))
        .collect();
    ReadStats::add(&stats.children_skipped, skipped);
    selected
}

/// Merges the rows of a leaf in `wanted` with what is pending above it.
pub(crate) fn resolve_leaf(
    leaf: &Arc<Leaf>,
    work: &Work,
    wanted: &FragmentRanges,
) -> Result<Vec<ResolvedFragment>> {
    let mut resolved = Vec::new();
    for range in wanted.clip(&work.range).iter() {
        let rows = leaf.rows_in(range);
        let mut pending = pending_in(&work.pending, range);
        check_watermark(leaf.location(), work.child.watermark, pending)?;
        resolved.reserve(rows.len());
        let ids = leaf.ids().get(rows.clone()).unwrap_or_default();
        for (row, id) in rows.zip(ids) {
            // Fragments that only mutations know come first where their ids are lower.
            let new = pending.partition_point(|p| p.mutation.target < *id);
            let (before, rest) = pending.split_at(new);
            resolve_pending(leaf.location(), before, &mut resolved)?;
            let own = rest.partition_point(|p| p.mutation.target == *id);
            let (own, rest) = rest.split_at(own);
            pending = rest;
            if own.is_empty() {
                let row_index = u32::try_from(row)
                    .map_err(|_| Error::internal("a leaf of more than 2^32 rows"))?;
                resolved.push(ResolvedFragment {
                    id: *id,
                    rows: Some(leaf.row_counts(row)),
                    source: Source::Leaf {
                        leaf: Arc::clone(leaf),
                        row: row_index,
                        owner: work.owner,
                    },
                });
            } else {
                let record = leaf.record(row, work.owner)?;
                let record = replay(leaf.location(), Some(record), own)?;
                resolved.extend(record.map(|r| ResolvedFragment::of_record(r, *id)));
            }
        }
        resolve_pending(leaf.location(), pending, &mut resolved)?;
    }
    Ok(resolved)
}

/// Checks the mutations collected for the operation against the leaf's watermark, also those whose
/// fragment has no record in the leaf (spec, "Sequence numbers"; `spec/notes.md` 8).
fn check_watermark(object: &str, watermark: u64, pending: &[Pending]) -> Result<()> {
    match pending.iter().find(|p| p.mutation.sequence <= watermark) {
        None => Ok(()),
        Some(item) => Err(Error::corrupt(
            format!("{object}, mutation {}", item.mutation.sequence),
            "mutation_at_or_below_watermark",
            format!("a sequence above the leaf's watermark {watermark}"),
            item.mutation.sequence,
        )),
    }
}

/// Resolves fragments that no leaf knows.
fn resolve_pending(
    object: &str,
    pending: &[Pending],
    into: &mut Vec<ResolvedFragment>,
) -> Result<()> {
    for group in pending.chunk_by(|a, b| a.mutation.target == b.mutation.target) {
        let id = group.first().map_or(0, |p| p.mutation.target);
        let record = replay(object, None, group)?;
        into.extend(record.map(|r| ResolvedFragment::of_record(r, id)));
    }
    Ok(())
}

impl Snapshot {
    /// The fragments whose ids are in `wanted`, in order. Only overlapping paths of a tree are
    /// opened, `options.window` objects ahead; dropping the stream stops the work.
    ///
    /// # Errors
    /// The stream ends with the first error; a batch is never partial. [`Error::NotFound`] when the
    /// version was removed since it was opened.
    pub fn fragments(
        self: &Arc<Self>,
        wanted: FragmentRanges,
        options: &WalkOptions,
        state: &WalkState,
    ) -> FragmentStream {
        let fragments = match &self.catalog {
            Catalog::Flat(flat) => flat_stream(self, flat, &wanted, state),
            Catalog::Tree(_) => tree_stream(self, wanted, options, state),
        };
        let snapshot = Arc::clone(self);
        let explained = fragments.or_else(move |e| {
            let snapshot = Arc::clone(&snapshot);
            async move { Err(snapshot.explain(e).await) }
        });
        explained.boxed()
    }

    /// One fragment, or nothing when there is none with this id. Opens one path.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when anything on the path breaks a rule.
    pub async fn fragment(self: &Arc<Self>, id: u32) -> Result<Option<ResolvedFragment>> {
        let batches: Vec<_> = self
            .fragments(
                FragmentRanges::single(id),
                &WalkOptions::default(),
                &WalkState::default(),
            )
            .try_collect()
            .await?;
        Ok(batches.into_iter().flatten().next())
    }

    /// Exact counts over `wanted`: opens only what an edge of a range cuts. Nothing when a flat
    /// manifest leaves out row counts.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when anything opened breaks a rule or the counts are impossible.
    pub async fn count(
        self: &Arc<Self>,
        wanted: &FragmentRanges,
        state: &WalkState,
    ) -> Result<Option<Counts>> {
        match &self.catalog {
            Catalog::Flat(flat) => Ok(flat.counts(wanted)),
            Catalog::Tree(tree) => match count_tree(tree, wanted, state).await {
                Ok(counts) => Ok(Some(counts)),
                Err(e) => Err(self.explain(e).await),
            },
        }
    }

    /// Counts over `wanted` from what is in memory, and whether they are exact. Nothing when row
    /// counts are unknown. Never reads.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the counts are impossible.
    pub fn estimate(&self, wanted: &FragmentRanges) -> Result<Option<(Counts, bool)>> {
        match &self.catalog {
            Catalog::Flat(flat) => Ok(flat.counts(wanted).map(|c| (c, true))),
            Catalog::Tree(tree) => estimate_tree(tree, wanted).map(Some),
        }
    }

    /// Divides `wanted` into at most `parts` pieces of about the same number of rows, in id order,
    /// from summaries alone. Never reads.
    pub fn split(&self, wanted: &FragmentRanges, parts: usize) -> Vec<FragmentRanges> {
        let weights = match &self.catalog {
            Catalog::Flat(flat) => flat_weights(flat, wanted),
            Catalog::Tree(tree) => tree_weights(tree, wanted, parts),
        };
        balance(weights, parts)
    }
}

fn flat_stream(
    snapshot: &Arc<Snapshot>,
    flat: &FlatCatalog,
    wanted: &FragmentRanges,
    state: &WalkState,
) -> FragmentStream {
    // Positions and not entries: the list stays where it is.
    let spans: Vec<Range<u64>> = wanted
        .iter()
        .flat_map(|range| {
            let ids: Vec<_> = flat
                .entries_in(range)
                .chunks(FLAT_BATCH)
                .filter_map(|c| Some(u64::from(c.first()?.id)..u64::from(c.last()?.id) + 1))
                .collect();
            ids
        })
        .collect();
    let snapshot = Arc::clone(snapshot);
    let stats = Arc::clone(&state.stats);
    stream::iter(spans)
        .map(move |span| {
            let Catalog::Flat(flat) = &snapshot.catalog else {
                return Err(Error::internal("a flat walk of a tree"));
            };
            let batch: Vec<_> = flat
                .entries_in(&span)
                .iter()
                .map(|entry| ResolvedFragment {
                    id: entry.id,
                    rows: entry.rows,
                    source: Source::Flat(Arc::clone(&snapshot), entry.clone()),
                })
                .collect();
            ReadStats::add(&stats.fragments_resolved, batch.len() as u64);
            Ok(batch)
        })
        .boxed()
}

fn tree_of(snapshot: &Snapshot) -> Result<&TreeCatalog> {
    match &snapshot.catalog {
        Catalog::Tree(tree) => Ok(tree),
        Catalog::Flat(_) => Err(Error::internal("a tree walk of a flat version")),
    }
}

fn tree_stream(
    snapshot: &Arc<Snapshot>,
    wanted: FragmentRanges,
    options: &WalkOptions,
    state: &WalkState,
) -> FragmentStream {
    let tree = match tree_of(snapshot) {
        Ok(tree) => tree,
        Err(e) => return stream::once(async { Err(e) }).boxed(),
    };
    let Some(height) = tree.root.child_height() else {
        return stream::once(std::future::ready(childless(tree, &wanted, state))).boxed();
    };
    let wanted = Arc::new(wanted);
    let work = tree.root_work(&wanted, &state.stats);
    let window = options.window.max(1);
    let mut level: BoxStream<'static, Result<Work>> =
        stream::iter(work.into_iter().map(Ok)).boxed();
    // One stage a level: the depth comes from the root and is bounded when it is opened.
    for _ in 0..height {
        let (snapshot, wanted, state) = (Arc::clone(snapshot), Arc::clone(&wanted), state.clone());
        level = level
            .map(move |work| {
                let (snapshot, wanted, state) =
                    (Arc::clone(&snapshot), Arc::clone(&wanted), state.clone());
                async move {
                    let work = work?;
                    let (node, pending) = tree_of(&snapshot)?.open_node(&work, &state).await?;
                    let below = overlapping(&node, &work, &pending, &wanted, &state.stats);
                    Ok(stream::iter(below.into_iter().map(Ok)))
                }
            })
            .buffered(window)
            .try_flatten()
            .boxed();
    }
    let (snapshot, state) = (Arc::clone(snapshot), state.clone());
    level
        .map(move |work| {
            let (snapshot, wanted, state) =
                (Arc::clone(&snapshot), Arc::clone(&wanted), state.clone());
            // A task of its own, so that reading goes on, and what was read is ready, while the
            // consumer works.
            let task = work.map(|work| {
                SpawnedTask::spawn(async move {
                    let leaf = tree_of(&snapshot)?.open_leaf(&work, &state).await?;
                    let resolved = resolve_leaf(&leaf, &work, &wanted)?;
                    ReadStats::add(&state.stats.fragments_resolved, resolved.len() as u64);
                    Ok(resolved)
                })
            });
            async move {
                task?
                    .await
                    .map_err(|e| Error::internal(format!("a walk task ended: {e}")))?
            }
        })
        .buffered(window)
        .boxed()
}

pub(crate) fn childless(
    tree: &TreeCatalog,
    wanted: &FragmentRanges,
    state: &WalkState,
) -> Result<Vec<ResolvedFragment>> {
    tree.enter_root(state)?;
    let mut resolved = Vec::new();
    for range in wanted.iter() {
        resolve_pending(&tree.label, pending_in(&tree.pending, range), &mut resolved)?;
    }
    ReadStats::add(&state.stats.fragments_resolved, resolved.len() as u64);
    Ok(resolved)
}

#[cfg(test)]
mod tests;
