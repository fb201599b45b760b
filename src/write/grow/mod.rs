//! The tree after a change: a Bε-tree's way of writing little for each commit.
//!
//! ```text
//!   changes ─► mutations ─┬─► mutations_since_root        the external root stays as it is
//!                         └─► root buffer ─► node buffers ─► leaves
//!                              a batch moves on whole, when there is too much above it
//!
//!  squash   fewer mutations that do the same
//!  flush    which batches move down, and what their children become
//!  weld     joining, dividing and writing what was opened
//!  run      content between two objects, and the arithmetic of sizes
//!  report   what it took
//! ```
//!
//! New mutations get sequences above all others. What does not fit where it is moves down by whole
//! batches: a child that gets anything gets everything its parent holds for the child's range. So
//! whatever is buffered for a fragment is older the lower it lies, and nothing above a leaf that is
//! written remains to be applied to it: its watermark is the highest sequence there is. In a tree of
//! another writer a newer mutation may lie below an older one; as batches are whole and sorted where
//! they arrive, that is set right on the way.

mod flush;
mod report;
mod run;
mod squash;
mod weld;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use lance_table::format::pb;
use prost::Message;

pub(crate) use report::GrowthReport;

use self::flush::{Grower, Turn};
use self::report::Ledger;
use self::run::{Content, Item, Loose, Records, Run, Spot};
use self::squash::squash;
use self::weld::{Weld, fresh, write};
use super::policy::TreePolicy;
use super::root::{external, publish_root};
use super::sink::ObjectSink;
use crate::error::{Error, Result};
use crate::snapshot::TreeCatalog;
use crate::tree::mutation::{Action, Mutation, Pending, replay};
use crate::tree::node::{Child, Node, Root, check_allocated};
use crate::tree::object::{Owner, ReadStats};
use crate::tree::summary::{Counts, Delta, Tally};
use crate::tree_scan::WalkState;

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
    /// What it took.
    pub report: GrowthReport,
    /// New objects the tree names. Those an earlier attempt wrote to the same sink are among them;
    /// what else the sink wrote ([`ObjectSink::paths`]) no version needs.
    pub paths: Vec<String>,
}

/// The tree after `changes`, which apply in the order given, on top of `base`.
///
/// `max_fragment_id` is that of the new manifest. Objects are read through the base's cache and
/// checked as a reader checks them; what they cost is added to `stats`.
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
    stats: &ReadStats,
) -> Result<Growth> {
    policy.validate()?;
    let mut report = GrowthReport::default();
    let mut tally = Tally::default();
    tally += base.counts()?;
    let mut next = base.next_sequence;
    let mut new = Vec::with_capacity(changes.len());
    for change in changes {
        let mutation = Mutation {
            sequence: next,
            target: change.target,
            action: change.action,
            delta: change.delta,
        };
        mutation.check_new()?;
        check_allocated(
            &format!("a change of fragment {}", mutation.target),
            u64::from(mutation.target),
            max_fragment_id,
        )?;
        next = next
            .checked_add(1)
            .ok_or_else(|| Error::invalid("the tree has used up its action sequences"))?;
        tally += mutation.delta;
        report.mutations += 1;
        report.mutation_bytes += mutation.stored_bytes();
        new.push(Arc::new(mutation));
    }
    report.counts = tally.counts("the new tree")?;
    if let Some(growth) = beside_root(base, &new, next, policy, &report)? {
        return Ok(growth);
    }
    let grower = Grower {
        base,
        sink,
        policy,
        next,
        fresh: base.root.next_sequence,
        max_fragment_id,
        drain: false,
        state: WalkState::default(),
        ledger: Mutex::default(),
    };
    let mut buffer = pending(base);
    buffer.extend(new);
    buffer.sort_unstable_by_key(|m| m.key());
    let root = grower.root(buffer).await;
    publish(grower, root, report, stats).await
}

/// Rewrites a version's tree for the better: empties every buffer, joins what is too small and
/// divides what is too large, and leaves alone what is neither. Nothing when nothing would change.
///
/// # Errors
/// Those of [`grow`].
pub(crate) async fn optimize(
    base: &TreeCatalog,
    sink: &ObjectSink,
    policy: &TreePolicy,
    stats: &ReadStats,
) -> Result<Option<Growth>> {
    policy.validate()?;
    let grower = Grower {
        base,
        sink,
        policy,
        next: base.next_sequence,
        fresh: base.root.next_sequence,
        max_fragment_id: base.max_fragment_id,
        drain: true,
        state: WalkState::default(),
        ledger: Mutex::default(),
    };
    let root = grower.root(pending(base)).await;
    if let Ok(root) = &root
        && root.node.children == base.root.node.children
        && root.node.buffer == pending(base)
        && base.since_root.is_empty()
        && base.root_path.is_none()
            == (root.encode().encoded_len() as u64 <= policy.inline_root_bytes)
    {
        grower.count(stats, &mut GrowthReport::default());
        return Ok(None);
    }
    let report = GrowthReport {
        counts: base.counts()?,
        ..Default::default()
    };
    publish(grower, root, report, stats).await.map(Some)
}

/// Everything buffered in the root and beside it, by fragment and sequence.
fn pending(base: &TreeCatalog) -> Vec<Arc<Mutation>> {
    base.pending
        .iter()
        .map(|p| Arc::clone(&p.mutation))
        .collect()
}

/// The tree with the changes beside its external root, when there is one and they fit.
fn beside_root(
    base: &TreeCatalog,
    new: &[Arc<Mutation>],
    next: u64,
    policy: &TreePolicy,
    report: &GrowthReport,
) -> Result<Option<Growth>> {
    let Some(path) = &base.root_path else {
        return Ok(None);
    };
    // A tree without records is a root without children.
    if report.counts.fragments == 0 && !base.root.node.children.is_empty() {
        return Ok(None);
    }
    let mut since: Vec<_> = base.since_root.iter().chain(new).cloned().collect();
    since.sort_unstable_by_key(|m| m.key());
    // All of these are newer than anything in the tree, so nothing lies between two of them.
    let since = squash(&base.label, since, 0)?;
    let bytes: u64 = since.iter().map(|m| m.stored_bytes()).sum();
    if bytes > policy.since_root_bytes {
        return Ok(None);
    }
    let mut tally = base.root.node.tally();
    for mutation in &since {
        tally += mutation.delta;
    }
    check_total(report.counts, tally)?;
    Ok(Some(Growth {
        tree: pb::FragmentTree {
            root: Some(external(path)?),
            mutations_since_root: since.iter().map(|m| m.encode()).collect(),
            next_action_sequence: next,
        },
        report: GrowthReport {
            manifest_bytes: bytes,
            height: base.root.child_height().map_or(0, |h| h + 1),
            buffered: (base.root.node.buffer.len() + since.len()) as u64,
            ..report.clone()
        },
        paths: Vec::new(),
    }))
}

/// Spec, "Mutations": what is published must derive the counts it is known to have.
fn check_total(expected: Counts, tally: Tally) -> Result<()> {
    let found = tally.counts("the new tree")?;
    if found == expected {
        return Ok(());
    }
    Err(Error::internal(format!(
        "the new tree derives {found:?}, where {expected:?} is right"
    )))
}

/// Publishes a root and says what all of it took.
async fn publish(
    grower: Grower<'_>,
    root: Result<Root>,
    mut report: GrowthReport,
    stats: &ReadStats,
) -> Result<Growth> {
    grower.count(stats, &mut report);
    let root = root?;
    check_total(report.counts, root.node.tally())?;
    let published = publish_root(grower.sink, &root, grower.policy).await?;
    report.root_bytes = published.bytes;
    report.root_inline = published.path.is_none();
    report.roots = u64::from(!report.root_inline);
    report.height = root.child_height().map_or(0, |h| h + 1);
    report.buffered = root.node.buffer.len() as u64;
    let ledger: Ledger = std::mem::take(&mut *grower.ledger());
    ledger.add_to(&mut report);
    let mut paths = ledger.into_paths();
    paths.extend(published.path);
    let tree = pb::FragmentTree {
        root: Some(published.root),
        mutations_since_root: Vec::new(),
        next_action_sequence: grower.next,
    };
    report.manifest_bytes = tree.encoded_len() as u64;
    Ok(Growth {
        tree,
        report,
        paths,
    })
}

impl Grower<'_> {
    /// Adds what was read to `stats` and to a report.
    fn count(&self, stats: &ReadStats, report: &mut GrowthReport) {
        let own = self.state.stats().snapshot();
        for (counter, value) in [
            (&stats.requests, own.requests),
            (&stats.bytes, own.bytes),
            (&stats.nodes_opened, own.nodes_opened),
            (&stats.leaves_opened, own.leaves_opened),
            (&stats.cache_hits, own.cache_hits),
        ] {
            counter.fetch_add(value, Ordering::Relaxed);
        }
        report.requests = own.requests;
        report.request_bytes = own.bytes;
    }

    /// The new root, with everything in `buffer` in it or below it.
    async fn root(&self, buffer: Vec<Arc<Mutation>>) -> Result<Root> {
        let base = &self.base.root;
        let ranges = base.node.child_ranges(&(0..crate::tree::node::ID_END));
        let items = base
            .node
            .children
            .iter()
            .zip(ranges)
            .map(|(child, checked)| {
                Item::Stored(Spot {
                    child: child.clone(),
                    checked,
                    fresh: false,
                })
            })
            .collect();
        let mut node = Loose {
            height: base.child_height().map_or(0, |h| h + 1),
            items,
            buffer,
        };
        loop {
            if node.items.is_empty() {
                node = self.plant(node.buffer).await?;
                break;
            }
            node = self
                .settle(node, 0, self.policy.root_buffer_bytes, true)
                .await?;
            if node.items.len() > 1 {
                break;
            }
            // An only child that is an interior leaves the root its place.
            node = match node.items.pop() {
                None => continue,
                Some(Item::Stored(spot)) if spot.child.height == 0 => {
                    node.items.push(Item::Stored(spot));
                    break;
                }
                Some(Item::Stored(spot)) => {
                    self.open(spot, node.buffer, true).await?.into_node()?
                }
                Some(Item::Loose(run)) if node.height == 1 => {
                    node.items.push(self.store(run).await?);
                    break;
                }
                Some(Item::Loose(run)) => run.into_node()?,
            };
        }
        self.raise(node).await
    }

    /// A root that had no children: its first leaves, once it buffers too much.
    async fn plant(&self, buffer: Vec<Arc<Mutation>>) -> Result<Loose> {
        let buffer = self.squash(0, buffer)?;
        let bytes: u64 = buffer.iter().map(|m| m.stored_bytes()).sum();
        if bytes <= self.policy.root_buffer_bytes {
            return Ok(Loose {
                buffer,
                ..Default::default()
            });
        }
        let mut records = Vec::new();
        for group in buffer.chunk_by(|a, b| a.target == b.target) {
            let steps: Vec<_> = group
                .iter()
                .map(|m| Pending::new(m, Owner::Current))
                .collect();
            records.extend(replay(&self.base.label, None, &steps)?);
        }
        if records.is_empty() {
            return Ok(Loose::default());
        }
        let mut weld = Weld::new(self, 0);
        weld.push(Turn::Run(Run {
            start: 0,
            last: true,
            origin: None,
            content: Content::Leaf(Records::new(records)),
        }))
        .await?;
        let (items, buffer) = weld.finish().await?;
        let mut stored = Vec::with_capacity(items.len());
        for item in items {
            stored.push(match item {
                Item::Loose(run) => self.store(run).await?,
                stored => stored,
            });
        }
        Ok(Loose {
            height: 1,
            items: stored,
            buffer,
        })
    }

    /// Gives a root more levels while its child list is too large.
    async fn raise(&self, mut node: Loose) -> Result<Root> {
        while node.list_bytes() > self.policy.node_bytes && node.items.len() >= 4 {
            let buffer = std::mem::take(&mut node.buffer);
            let height = node.height;
            let mut items = Vec::new();
            for piece in node.divide_evenly(self.policy.node_bytes) {
                let run = Run {
                    start: piece.items.first().map_or(0, Item::start),
                    last: false,
                    origin: None,
                    content: Content::Node(piece),
                };
                items.push(self.store(run).await?);
            }
            node = Loose {
                height: height + 1,
                items,
                buffer,
            };
        }
        let children: Option<Vec<Child>> = node
            .stored()
            .map(|children| children.into_iter().cloned().collect());
        Ok(Root {
            node: Node {
                children: children.ok_or_else(|| Error::internal("a root with loose content"))?,
                buffer: node.buffer,
            },
            next_sequence: self.next,
        })
    }

    /// Writes a run at once.
    async fn store(&self, run: Run) -> Result<Item> {
        let (child, object) = write(self.sink.clone(), run, self.next - 1).await?;
        self.ledger().enter(&child, object);
        Ok(Item::Stored(fresh(child)))
    }
}

#[cfg(test)]
mod tests;
