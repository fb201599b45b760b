//! Splitting work: ranges into parts of about the same weight, from what is in memory.

use std::ops::Range;

use super::count::scale;
use crate::flat::FlatCatalog;
use crate::ranges::FragmentRanges;
use crate::snapshot::TreeCatalog;
use crate::tree::summary::Counts;

/// What a fragment costs besides its rows, in rows: opening files.
const FRAGMENT_WEIGHT: u64 = 256;

fn weight(counts: Counts) -> u64 {
    counts
        .total_rows
        .saturating_add(counts.fragments.saturating_mul(FRAGMENT_WEIGHT))
}

pub(super) fn flat_weights(flat: &FlatCatalog, wanted: &FragmentRanges) -> Vec<(Range<u64>, u64)> {
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

pub(super) fn tree_weights(
    tree: &TreeCatalog,
    wanted: &FragmentRanges,
    parts: usize,
) -> Vec<(Range<u64>, u64)> {
    let bound = tree.max_fragment_id.map_or(0, |id| u64::from(id) + 1);
    let mut pieces = Vec::new();
    let mut push = |range: &Range<u64>, counts: Counts| {
        // The last child reaches to 2^32, but nothing lives above the greatest allocated id.
        let used = range.start..range.end.min(bound);
        for piece in wanted.clip(range).iter() {
            let inside = piece.start..piece.end.min(bound);
            if inside.is_empty() {
                // Still walked: what a broken tree has there must not be left out in silence.
                pieces.push((piece.clone(), 0));
                continue;
            }
            let share = scale(weight(counts), inside.end - inside.start, &used);
            divide(&inside, share, parts, &mut pieces);
            if let Some((last, _)) = pieces.last_mut() {
                last.end = piece.end;
            }
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
pub(super) fn balance(pieces: Vec<(Range<u64>, u64)>, parts: usize) -> Vec<FragmentRanges> {
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
