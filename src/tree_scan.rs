//! From ranges of fragment ids to fragments: the walk, counts over ranges, and splitting work.
//!
//! ```text
//!  wanted ranges ─► root children that overlap ─► nodes ─► leaves ─► resolved fragments, in id order
//!                        │ pending mutations travel down with each child
//!                        └ a child wholly wanted answers a count with its summary
//! ```
//!
//! A mutation buffered above a child is not in the child's summary; a node's own buffer is in its
//! own. So a count is: summaries of whole children, plus the deltas of every pending mutation above
//! them that targets them, plus the records of leaves cut by an edge of a range.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use datafusion::common::runtime::SpawnedTask;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use lance_table::format::{Fragment, pb};
use roaring::RoaringTreemap;

use crate::error::{Error, Result};
use crate::flat::{FlatCatalog, FlatEntry};
use crate::ranges::FragmentRanges;
use crate::snapshot::{Catalog, Snapshot, TreeCatalog};
use crate::tree::leaf::Leaf;
use crate::tree::mutation::{Mutation, Pending, replay};
use crate::tree::node::{Child, ID_END, Node, NodeContext};
use crate::tree::object::{Owner, ReadStats};
use crate::tree::record::to_fragment;
use crate::tree::summary::{Counts, Tally};

/// Settings of a walk.
#[derive(Debug, Clone)]
pub struct WalkOptions {
    /// Tree objects read ahead of the consumer, in order. Bounds memory: at most this many leaves
    /// are decoded and waiting.
    pub window: usize,
}

impl Default for WalkOptions {
    fn default() -> Self {
        Self { window: 8 }
    }
}

/// Fragments of a flat list handed on at a time.
const FLAT_BATCH: usize = 1024;

/// Mutation sequences seen by one operation. Each object is entered once, however many partitions
/// of the operation open it (spec, "Sequence numbers").
#[derive(Debug, Default)]
pub(crate) struct SequenceLedger {
    inner: Mutex<Ledger>,
}

#[derive(Debug, Default)]
struct Ledger {
    objects: HashSet<String>,
    sequences: RoaringTreemap,
}

impl SequenceLedger {
    /// Enters the mutations of `object`.
    ///
    /// # Errors
    /// `sequence_duplicate` when one was seen in another object.
    pub(crate) fn enter(&self, object: &str, mutations: &[Arc<Mutation>]) -> Result<()> {
        if mutations.is_empty() {
            return Ok(());
        }
        let mut ledger = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if !ledger.objects.insert(object.to_string()) {
            return Ok(());
        }
        for mutation in mutations {
            if !ledger.sequences.insert(mutation.sequence) {
                return Err(Error::corrupt(
                    format!("{object}, mutation {}", mutation.sequence),
                    "sequence_duplicate",
                    "sequences that are unique in the tree",
                    "another object's mutation with this sequence",
                ));
            }
        }
        Ok(())
    }
}

/// What the parts of one operation share: counters, the sequences seen, and its share of the cache.
/// One for each operation: what is used again keeps no more leaves.
#[derive(Debug, Clone, Default)]
pub struct WalkState {
    pub(crate) stats: Arc<ReadStats>,
    pub(crate) ledger: Arc<SequenceLedger>,
    /// Bytes of leaves that the operation added to the cache.
    pub(crate) kept: Arc<AtomicU64>,
}

impl WalkState {
    /// Counts into `stats`.
    pub fn with_stats(stats: Arc<ReadStats>) -> Self {
        Self {
            stats,
            ..Self::default()
        }
    }

    /// What the operation read so far.
    pub fn stats(&self) -> &Arc<ReadStats> {
        &self.stats
    }
}

/// One fragment with everything buffered above it applied.
#[derive(Debug, Clone)]
pub struct ResolvedFragment {
    id: u32,
    rows: Option<(u64, u64)>,
    source: Source,
}

#[derive(Debug, Clone)]
enum Source {
    /// As the leaf holds it.
    Leaf {
        leaf: Arc<Leaf>,
        row: u32,
        owner: Owner,
    },
    /// Changed or created by mutations.
    Record(Arc<pb::DataFragment>),
    /// In the list of a flat manifest.
    Flat(Arc<Snapshot>, FlatEntry),
}

impl ResolvedFragment {
    /// The fragment's id.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Physical rows, deleted ones included; nothing when an old flat manifest leaves them out.
    pub fn physical_rows(&self) -> Option<u64> {
        self.rows.map(|(physical, _)| physical)
    }

    /// Deleted rows; nothing when unknown.
    pub fn deleted_rows(&self) -> Option<u64> {
        self.rows.map(|(_, deleted)| deleted)
    }

    /// Its counts; nothing when row counts are unknown.
    pub fn counts(&self) -> Option<Counts> {
        self.rows
            .map(|(physical, deleted)| Counts::of_fragment(physical, deleted))
    }

    /// The complete record, with every file's base named from this version's manifest.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when a flat manifest's record cannot be decoded.
    pub fn record(&self) -> Result<pb::DataFragment> {
        match &self.source {
            Source::Leaf { leaf, row, owner } => leaf.record(*row as usize, *owner),
            Source::Record(record) => Ok(record.as_ref().clone()),
            Source::Flat(snapshot, entry) => match &snapshot.catalog {
                Catalog::Flat(flat) => flat.record(entry),
                Catalog::Tree(_) => Err(Error::internal("a flat record of a tree")),
            },
        }
    }

    /// The record as Lance's own type.
    ///
    /// # Errors
    /// [`Error::Lance`] when Lance cannot take the record.
    pub fn fragment(&self) -> Result<Fragment> {
        match &self.source {
            Source::Leaf { leaf, row, owner } => leaf.fragment(*row as usize, *owner),
            Source::Record(_) | Source::Flat(..) => {
                to_fragment(format_args!("fragment {}", self.id), self.record()?)
            }
        }
    }

    /// Calls `visit` for each data file, without building the record where a leaf holds it.
    pub(crate) fn for_each_file(
        &self,
        mut visit: impl FnMut(&str, &[i32], &[i32], u32, u32, u64, Option<u32>),
    ) -> Result<usize> {
        if let Source::Leaf { leaf, row, owner } = &self.source {
            let files = leaf.file_list(*row as usize)?;
            let owner = owner.base_id();
            files.for_each(|path, fields, columns, major, minor, size, base| {
                visit(path, fields, columns, major, minor, size, base.or(owner));
            });
            return Ok(files.len());
        }
        let record = self.record()?;
        for f in &record.files {
            visit(
                &f.path,
                &f.fields,
                &f.column_indices,
                f.file_major_version,
                f.file_minor_version,
                f.file_size_bytes,
                f.base_id,
            );
        }
        Ok(record.files.len())
    }

    fn of_record(record: pb::DataFragment, id: u32) -> Self {
        let deleted = record
            .deletion_file
            .as_ref()
            .map_or(0, |d| d.num_deleted_rows);
        Self {
            id,
            rows: Some((record.physical_rows, deleted)),
            source: Source::Record(Arc::new(record)),
        }
    }
}

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
                &state.kept,
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

    /// Whether an edge of `wanted` cuts the child. If not, its share is added to `tally`: the summary
    /// and the deltas of everything pending above it when it is wholly wanted, nothing otherwise.
    fn is_cut(&self, wanted: &FragmentRanges, tally: &mut Tally, stats: &ReadStats) -> bool {
        if wanted.covers(&self.range) {
            *tally += self.child.counts;
            for item in self.pending {
                *tally += item.mutation.delta;
            }
        } else if wanted.overlaps(&self.range) {
            return true;
        }
        ReadStats::add(&stats.children_skipped, 1);
        false
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
            // A task of its own, so that reading goes on while the consumer works.
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

/// Cut paths followed at once by a count.
const COUNT_CONCURRENCY: usize = 8;

async fn count_tree(
    tree: &TreeCatalog,
    wanted: &FragmentRanges,
    state: &WalkState,
) -> Result<Counts> {
    if wanted.is_all() {
        return tree.counts();
    }
    let mut tally = Tally::default();
    let Some(height) = tree.root.child_height() else {
        add_pending(&tree.pending, wanted, &mut tally);
        return tally.counts(&tree.label);
    };
    let mut level: Vec<Work> = tree
        .root_spans()
        .filter(|span| span.is_cut(wanted, &mut tally, &state.stats))
        .map(|span| span.to_work(Owner::Current))
        .collect();
    for _ in 0..height {
        let opened: Vec<_> = stream::iter(level)
            .map(|work| async move {
                let (node, pending) = tree.open_node(&work, state).await?;
                Ok::<_, Error>((node, pending, work))
            })
            .buffer_unordered(COUNT_CONCURRENCY)
            .try_collect()
            .await?;
        level = Vec::new();
        for (node, pending, work) in opened {
            let cut = spans(&node, &work.range, &pending)
                .filter(|span| span.is_cut(wanted, &mut tally, &state.stats))
                .map(|span| span.to_work(work.owner));
            level.extend(cut);
        }
    }
    let mut leaves = stream::iter(level)
        .map(|work| async move {
            let leaf = tree.open_leaf(&work, state).await?;
            resolve_leaf(&leaf, &work, wanted)
        })
        .buffer_unordered(COUNT_CONCURRENCY);
    while let Some(resolved) = leaves.try_next().await? {
        ReadStats::add(&state.stats.fragments_resolved, resolved.len() as u64);
        for fragment in resolved {
            tally += fragment.counts().unwrap_or_default();
        }
    }
    tally.counts(&tree.label)
}

fn add_pending(pending: &[Pending], wanted: &FragmentRanges, tally: &mut Tally) {
    for range in wanted.iter() {
        for item in pending_in(pending, range) {
            *tally += item.mutation.delta;
        }
    }
}

fn estimate_tree(tree: &TreeCatalog, wanted: &FragmentRanges) -> Result<(Counts, bool)> {
    if wanted.is_all() {
        return Ok((tree.counts()?, true));
    }
    let mut tally = Tally::default();
    if tree.root.child_height().is_none() {
        add_pending(&tree.pending, wanted, &mut tally);
        return Ok((tally.counts(&tree.label)?, true));
    }
    let mut guessed = Counts::default();
    let mut exact = true;
    let stats = ReadStats::default();
    for cut in tree.root_spans() {
        if cut.is_cut(wanted, &mut tally, &stats) {
            exact = false;
            let share = |n: u64| scale(n, covered(wanted, &cut.range), &cut.range);
            guessed.fragments += share(cut.child.counts.fragments);
            guessed.total_rows += share(cut.child.counts.total_rows);
            guessed.visible_rows += share(cut.child.counts.visible_rows);
        }
    }
    tally += guessed;
    match tally.counts(&tree.label) {
        Ok(counts) => Ok((counts, exact)),
        Err(_) if !exact => Ok((guessed, false)),
        Err(e) => Err(e),
    }
}

/// How many ids of `range` are wanted.
fn covered(wanted: &FragmentRanges, range: &Range<u64>) -> u64 {
    wanted.clip(range).iter().map(|r| r.end - r.start).sum()
}

fn scale(value: u64, part: u64, whole: &Range<u64>) -> u64 {
    let whole = u128::from(whole.end - whole.start).max(1);
    let scaled = (u128::from(value) * u128::from(part)).div_ceil(whole);
    u64::try_from(scaled).unwrap_or(value).min(value)
}

/// What a fragment costs besides its rows, in rows: opening files.
const FRAGMENT_WEIGHT: u64 = 256;

fn weight(counts: Counts) -> u64 {
    counts
        .total_rows
        .saturating_add(counts.fragments.saturating_mul(FRAGMENT_WEIGHT))
}

fn flat_weights(flat: &FlatCatalog, wanted: &FragmentRanges) -> Vec<(Range<u64>, u64)> {
    let mut pieces = Vec::new();
    for range in wanted.iter() {
        for entry in flat.entries_in(range) {
            let (physical, deleted) = entry.rows.unwrap_or((FRAGMENT_WEIGHT, 0));
            let id = u64::from(entry.id);
            pieces.push((id..id + 1, weight(Counts::of_fragment(physical, deleted))));
        }
    }
    pieces
}

fn tree_weights(
    tree: &TreeCatalog,
    wanted: &FragmentRanges,
    parts: usize,
) -> Vec<(Range<u64>, u64)> {
    let bound = tree.max_fragment_id.map_or(0, |id| u64::from(id) + 1);
    let mut pieces = Vec::new();
    let mut push = |range: &Range<u64>, counts: Counts| {
        // The last child reaches to 2^32, but nothing lives above the greatest allocated id.
        let range = range.start..range.end.min(bound);
        if range.is_empty() {
            return;
        }
        for piece in wanted.clip(&range).iter() {
            let share = scale(weight(counts), piece.end - piece.start, &range);
            divide(piece, share, parts, &mut pieces);
        }
    };
    if tree.root.child_height().is_none() {
        for group in tree
            .pending
            .chunk_by(|a, b| a.mutation.target == b.mutation.target)
        {
            let id = group.first().map_or(0, |p| u64::from(p.mutation.target));
            push(&(id..id + 1), Counts::of_fragment(1, 0));
        }
        return pieces;
    }
    for span in tree.root_spans() {
        push(&span.range, span.child.counts);
    }
    pieces
}

/// Cuts a range into `parts` even pieces, as a child's fragments are taken to be spread evenly.
fn divide(range: &Range<u64>, weight: u64, parts: usize, into: &mut Vec<(Range<u64>, u64)>) {
    let parts = (parts.max(1) as u64).min(range.end - range.start);
    let step = (range.end - range.start).div_ceil(parts);
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + step);
        into.push((start..end, weight / parts));
        start = end;
    }
}

/// Groups consecutive pieces into at most `parts` of about the same weight.
fn balance(pieces: Vec<(Range<u64>, u64)>, parts: usize) -> Vec<FragmentRanges> {
    let parts = parts.max(1);
    let total: u64 = pieces.iter().fold(0u64, |sum, p| sum.saturating_add(p.1));
    let target = (total / parts as u64).max(1);
    let mut result = Vec::new();
    let (mut group, mut sum, mut done) = (Vec::new(), 0u64, 0u64);
    for (range, weight) in pieces {
        group.push(range);
        sum = sum.saturating_add(weight);
        let reached = (result.len() as u64 + 1).saturating_mul(target);
        if done.saturating_add(sum) >= reached && result.len() + 1 < parts {
            done = done.saturating_add(sum);
            sum = 0;
            result.push(FragmentRanges::from_ranges(std::mem::take(&mut group)));
        }
    }
    if !group.is_empty() {
        result.push(FragmentRanges::from_ranges(group));
    }
    result
}

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
    /// [`Error::Corrupt`] when an opened node breaks a rule.
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
        let opened: Vec<_> = stream::iter(level)
            .map(|work| async move {
                let (node, pending) = tree.open_node(&work, state).await?;
                Ok::<_, Error>((node, pending, work))
            })
            .buffered(COUNT_CONCURRENCY)
            .try_collect()
            .await?;
        level = Vec::new();
        for (node, pending, work) in opened {
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

#[cfg(test)]
mod tests;
