//! Counts over ranges: exact ones, which open what an edge of a range cuts, and estimates, which open
//! nothing.
//!
//! A mutation buffered above a child is not in the child's summary; a node's own buffer is in its
//! own. So a count is: summaries of whole children, plus the deltas of every pending mutation above
//! them that targets them, plus the records of leaves cut by an edge of a range.

use std::ops::Range;

use futures::{StreamExt, TryStreamExt, stream};

use super::state::WalkState;
use super::{CONCURRENT_OPENS, Span, Work, check_watermark, pending_in, resolve_leaf, spans};
use crate::error::Result;
use crate::ranges::FragmentRanges;
use crate::snapshot::TreeCatalog;
use crate::tree::mutation::Pending;
use crate::tree::object::{Owner, ReadStats};
use crate::tree::summary::{Counts, Tally};

impl Span<'_> {
    /// Whether an edge of `wanted` cuts the child. If not, its share is added to `tally`: the summary
    /// and the deltas of everything pending above it when it is wholly wanted, nothing otherwise.
    ///
    /// # Errors
    /// `mutation_at_or_below_watermark`: what is pending is in the summary already.
    fn is_cut(
        &self,
        wanted: &FragmentRanges,
        tally: &mut Tally,
        stats: &ReadStats,
    ) -> Result<bool> {
        if wanted.covers(&self.range) {
            if self.child.height == 0 {
                check_watermark(&self.child.path, self.child.watermark, self.pending)?;
            }
            *tally += self.child.counts;
            for item in self.pending {
                *tally += item.mutation.delta;
            }
        } else if wanted.overlaps(&self.range) {
            return Ok(true);
        }
        ReadStats::add(&stats.children_skipped, 1);
        Ok(false)
    }
}

pub(super) async fn count_tree(
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
    let mut level: Vec<Work> = Vec::new();
    for span in tree.root_spans() {
        if span.is_cut(wanted, &mut tally, &state.stats)? {
            level.push(span.to_work(Owner::Current));
        }
    }
    for _ in 0..height {
        let opened = tree.open_level(std::mem::take(&mut level), state).await?;
        for (work, node, pending) in opened {
            for span in spans(&node, &work.range, &pending) {
                if span.is_cut(wanted, &mut tally, &state.stats)? {
                    level.push(span.to_work(work.owner));
                }
            }
        }
    }
    let mut leaves = stream::iter(level)
        .map(|work| async move {
            let leaf = tree.open_leaf(&work, state).await?;
            resolve_leaf(&leaf, &work, wanted)
        })
        .buffer_unordered(CONCURRENT_OPENS);
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

pub(super) fn estimate_tree(tree: &TreeCatalog, wanted: &FragmentRanges) -> Result<(Counts, bool)> {
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
        if cut.is_cut(wanted, &mut tally, &stats)? {
            exact = false;
            let share = |n: u64| scale(n, covered(wanted, &cut.range), &cut.range);
            let counts = cut.child.counts;
            for (guess, count) in [
                (&mut guessed.fragments, counts.fragments),
                (&mut guessed.total_rows, counts.total_rows),
                (&mut guessed.visible_rows, counts.visible_rows),
            ] {
                *guess = guess.saturating_add(share(count));
            }
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

pub(super) fn scale(value: u64, part: u64, whole: &Range<u64>) -> u64 {
    let whole = u128::from(whole.end - whole.start).max(1);
    let scaled = (u128::from(value) * u128::from(part)).div_ceil(whole);
    u64::try_from(scaled).unwrap_or(value).min(value)
}
