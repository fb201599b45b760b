//! Sets of fragment ids and of row addresses, kept as sorted intervals.
//!
//! A row address is `(fragment_id << 32) | offset`, so a set of addresses has a shadow on the
//! fragment ids:
//!
//! ```text
//!   addresses    ──[ 1:5 … 4:7 ]───────────[ 6:0 ]──     RowAddrSet
//!   fragments      1   2   3   4             6           touched: [1..5, 6..7]
//!                  cut whole   cut           cut         whole:   [2..4]
//! ```
//!
//! Both types hold a normal form (sorted, disjoint, no two intervals that touch, none empty), so
//! `==` compares the sets themselves and every lookup is a binary search. Operations over many sets
//! gather all intervals and normalise once: folding pairwise would make a list of ten thousand
//! addresses quadratic.
//!
//! This file is plain arithmetic. What a filter says about addresses is `pruning.rs`; which
//! fragments exist is the tree's business.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Range;

/// Bits of a row address below the fragment id.
pub(crate) const OFFSET_BITS: u32 = 32;

/// One past the largest fragment id, and also the number of addresses in a fragment.
const FRAGMENT_END: u64 = 1 << OFFSET_BITS;

/// The offset part of a row address; also the last offset of a fragment.
pub(crate) const OFFSET_MASK: u64 = FRAGMENT_END - 1;

/// Intervals that `Display` writes out before it abbreviates.
const SHOWN: usize = 8;

/// A set of fragment ids: sorted, disjoint, coalesced half-open ranges within `0..2^32`.
///
/// The bounds are `u64` because the end of the range that holds the last fragment id, `2^32`, is
/// not a `u32`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FragmentRanges {
    ranges: Vec<Range<u64>>,
}

impl FragmentRanges {
    /// No fragment.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Every fragment id, `0..2^32`.
    pub fn all() -> Self {
        Self::from_ranges(std::iter::once(0..FRAGMENT_END))
    }

    /// One fragment.
    pub fn single(id: u32) -> Self {
        Self::from_ids([id])
    }

    /// The union of any ranges, in any order. What lies above `2^32` is cut off; empty and reversed
    /// ranges add nothing.
    pub fn from_ranges(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut ranges: Vec<Range<u64>> = ranges
            .into_iter()
            .map(|range| range.start..range.end.min(FRAGMENT_END))
            .filter(|range| !range.is_empty())
            .collect();
        // The stable sort is linear on input that is already sorted, or is a few sorted runs, as in
        // `union`.
        ranges.sort_by_key(|range| range.start);
        ranges.dedup_by(|next, last| {
            let joins = next.start <= last.end;
            if joins {
                last.end = last.end.max(next.end);
            }
            joins
        });
        Self { ranges }
    }

    /// The given fragments, in any order, repeats allowed.
    pub fn from_ids(ids: impl IntoIterator<Item = u32>) -> Self {
        Self::from_ranges(ids.into_iter().map(|id| u64::from(id)..u64::from(id) + 1))
    }

    /// Whether no fragment is in the set.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether every fragment id is in the set.
    pub fn is_all(&self) -> bool {
        self.covers(&(0..FRAGMENT_END))
    }

    /// Whether this fragment id is in the set.
    pub fn contains(&self, id: u64) -> bool {
        self.first_ending_after(id)
            .is_some_and(|range| range.start <= id)
    }

    /// Whether any id of `range` is in the set. An empty range overlaps nothing.
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        !range.is_empty()
            && self
                .first_ending_after(range.start)
                .is_some_and(|found| found.start < range.end)
    }

    /// Whether every id of `range` is in the set. An empty range is covered by any set.
    pub fn covers(&self, range: &Range<u64>) -> bool {
        // The set is coalesced, so an unbroken range lies inside a single interval.
        range.is_empty()
            || self
                .first_ending_after(range.start)
                .is_some_and(|found| found.start <= range.start && range.end <= found.end)
    }

    /// The fragments in both sets.
    #[must_use]
    pub fn intersect(&self, other: &Self) -> Self {
        let overlap = |left: &Range<u64>, right: &Range<u64>| {
            let both = left.start.max(right.start)..left.end.min(right.end);
            (!both.is_empty()).then_some(both)
        };
        Self {
            ranges: intersect_sorted(&self.ranges, &other.ranges, overlap, |range| range.end),
        }
    }

    /// The fragments in either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self::from_ranges(self.iter().chain(other.iter()).cloned())
    }

    /// The part of the set inside `range`.
    #[must_use]
    pub fn clip(&self, range: &Range<u64>) -> Self {
        let from = self
            .ranges
            .partition_point(|found| found.end <= range.start);
        let inside = self.ranges.iter().skip(from);
        Self::from_ranges(
            inside
                .take_while(|found| found.start < range.end)
                .map(|found| found.start.max(range.start)..found.end.min(range.end)),
        )
    }

    /// The ranges, ascending.
    pub fn iter(&self) -> std::slice::Iter<'_, Range<u64>> {
        self.ranges.iter()
    }

    /// The ranges, ascending.
    pub fn as_slice(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// The number of ranges (not of fragments).
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// From the first fragment to one past the last; `None` for the empty set.
    pub fn span(&self) -> Option<Range<u64>> {
        Some(self.ranges.first()?.start..self.ranges.last()?.end)
    }

    /// The fragments not in the set.
    fn complement(&self) -> Self {
        let starts = std::iter::once(0).chain(self.iter().map(|range| range.end));
        let ends = self.iter().map(|range| range.start).chain([FRAGMENT_END]);
        Self::from_ranges(starts.zip(ends).map(|(start, end)| start..end))
    }

    /// The first range that ends after `id`: the only one that can hold it.
    fn first_ending_after(&self, id: u64) -> Option<&Range<u64>> {
        let index = self.ranges.partition_point(|range| range.end <= id);
        self.ranges.get(index)
    }
}

impl fmt::Display for FragmentRanges {
    /// `[0..5, 7..8]`, or `all`. After eight ranges only the number of those left out: `[…, … 12
    /// ranges]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_all() {
            return f.write_str("all");
        }
        write_list(f, &self.ranges, |f, range| {
            write!(f, "{}..{}", range.start, range.end)
        })
    }
}

/// A set of row addresses: sorted, disjoint, coalesced inclusive `(first, last)` pairs over all of
/// `u64`.
///
/// The pairs are inclusive because the last address, `u64::MAX`, has no successor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowAddrSet {
    pairs: Vec<(u64, u64)>,
}

impl RowAddrSet {
    /// No row.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Every address.
    pub fn all() -> Self {
        Self {
            pairs: vec![(0, u64::MAX)],
        }
    }

    /// The union of any `(first, last)` pairs, in any order. A pair with `first > last` adds
    /// nothing.
    pub fn from_inclusive(pairs: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut pairs: Vec<(u64, u64)> = pairs
            .into_iter()
            .filter(|(first, last)| first <= last)
            .collect();
        // The stable sort is linear on input that is already sorted, or is a few sorted runs, as in
        // `union`.
        pairs.sort_by_key(|&(first, _)| first);
        pairs.dedup_by(|next, last| {
            // Saturating is exact: after `u64::MAX` nothing follows, and whatever starts there
            // joins.
            let joins = next.0 <= last.1.saturating_add(1);
            if joins {
                last.1 = last.1.max(next.1);
            }
            joins
        });
        Self { pairs }
    }

    /// The given addresses, in any order, repeats allowed.
    pub fn from_addrs(addrs: impl IntoIterator<Item = u64>) -> Self {
        Self::from_inclusive(addrs.into_iter().map(|addr| (addr, addr)))
    }

    /// Every address of the given fragments.
    pub fn from_fragments(fragments: &FragmentRanges) -> Self {
        // A range is never empty and ends at 2^32 at most, so this neither underflows nor shifts a
        // bit out.
        Self::from_inclusive(fragments.iter().map(|range| {
            let last_fragment = range.end - 1;
            (
                range.start << OFFSET_BITS,
                (last_fragment << OFFSET_BITS) | OFFSET_MASK,
            )
        }))
    }

    /// The rows in any of the sets, normalised once.
    pub fn union_all<S: Borrow<Self>>(sets: impl IntoIterator<Item = S>) -> Self {
        let mut pairs = Vec::new();
        for set in sets {
            pairs.extend_from_slice(&set.borrow().pairs);
        }
        Self::from_inclusive(pairs)
    }

    /// The rows in all of the sets, normalised once; of no sets, every row.
    pub fn intersect_all<S: Borrow<Self>>(sets: impl IntoIterator<Item = S>) -> Self {
        let sets = sets.into_iter();
        Self::union_all(sets.map(|set| set.borrow().complement())).complement()
    }

    /// Whether no row is in the set.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Whether every address is in the set.
    pub fn is_all(&self) -> bool {
        self.pairs.first() == Some(&(0, u64::MAX))
    }

    /// Whether this address is in the set.
    pub fn contains(&self, addr: u64) -> bool {
        self.ending_from(addr)
            .next()
            .is_some_and(|&(first, _)| first <= addr)
    }

    /// Whether every row of this set is in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.intersect(other) == *self
    }

    /// The rows in both sets.
    #[must_use]
    pub fn intersect(&self, other: &Self) -> Self {
        let overlap = |left: &(u64, u64), right: &(u64, u64)| {
            let (first, last) = (left.0.max(right.0), left.1.min(right.1));
            (first <= last).then_some((first, last))
        };
        Self {
            pairs: intersect_sorted(&self.pairs, &other.pairs, overlap, |pair| pair.1),
        }
    }

    /// The rows in either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self::union_all([self, other])
    }

    /// The addresses not in the set.
    #[must_use]
    pub fn complement(&self) -> Self {
        let mut gaps = Vec::with_capacity(self.pairs.len() + 1);
        let mut gap_start = Some(0);
        for &(first, last) in &self.pairs {
            if let Some(start) = gap_start
                && start < first
            {
                gaps.push((start, first - 1));
            }
            gap_start = last.checked_add(1);
        }
        gaps.extend(gap_start.map(|start| (start, u64::MAX)));
        Self { pairs: gaps }
    }

    /// The fragments with at least one address in the set.
    pub fn fragments(&self) -> FragmentRanges {
        FragmentRanges::from_ranges(
            self.iter()
                .map(|(first, last)| first >> OFFSET_BITS..(last >> OFFSET_BITS) + 1),
        )
    }

    /// The fragments all of whose `2^32` addresses are in the set.
    pub fn whole_fragments(&self) -> FragmentRanges {
        // The set is coalesced, so a whole fragment lies inside a single pair.
        FragmentRanges::from_ranges(self.iter().map(|(first, last)| {
            let cut_at_start = u64::from(first & OFFSET_MASK != 0);
            let kept_at_end = u64::from(last & OFFSET_MASK == OFFSET_MASK);
            (first >> OFFSET_BITS) + cut_at_start..(last >> OFFSET_BITS) + kept_at_end
        }))
    }

    /// The fragments with some, but not all, of their addresses in the set.
    pub fn cut_fragments(&self) -> FragmentRanges {
        self.fragments()
            .intersect(&self.whole_fragments().complement())
    }

    /// The offsets within one fragment whose addresses are in the set: half-open ranges within
    /// `0..2^32`, ascending.
    pub fn in_fragment(&self, id: u32) -> Vec<Range<u64>> {
        let base = u64::from(id) << OFFSET_BITS;
        let end = base | OFFSET_MASK;
        self.ending_from(base)
            .take_while(|(first, _)| *first <= end)
            .map(|&(first, last)| first.max(base) - base..last.min(end) - base + 1)
            .collect()
    }

    /// The `(first, last)` pairs, ascending.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u64, u64)> + '_ {
        self.pairs.iter().copied()
    }

    /// The pairs from the first one that ends at `addr` or later: the only one that can hold it.
    fn ending_from(&self, addr: u64) -> impl Iterator<Item = &(u64, u64)> {
        let index = self.pairs.partition_point(|&(_, last)| last < addr);
        self.pairs.iter().skip(index)
    }
}

impl fmt::Display for RowAddrSet {
    /// `[1:5..=1:9, 3:0]` in `fragment:offset` form, or `all`. After eight pairs only the number of
    /// those left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_all() {
            return f.write_str("all");
        }
        let address = |f: &mut fmt::Formatter<'_>, addr: u64| {
            write!(f, "{}:{}", addr >> OFFSET_BITS, addr & OFFSET_MASK)
        };
        write_list(f, &self.pairs, |f, &(first, last)| {
            address(f, first)?;
            if first == last {
                return Ok(());
            }
            f.write_str("..=")?;
            address(f, last)
        })
    }
}

/// Walks two sorted, disjoint lists side by side and collects the overlaps.
///
/// Of coalesced lists the result is coalesced: two neighbours in it that touched would need both
/// lists to hold the two in one interval each, and then they would be one overlap.
fn intersect_sorted<T>(
    left: &[T],
    right: &[T],
    overlap: impl Fn(&T, &T) -> Option<T>,
    end: impl Fn(&T) -> u64,
) -> Vec<T> {
    let (mut lefts, mut rights) = (left.iter().peekable(), right.iter().peekable());
    let mut overlaps = Vec::new();
    while let (Some(left), Some(right)) = (lefts.peek(), rights.peek()) {
        overlaps.extend(overlap(left, right));
        // The interval that ends first can meet nothing further on the other side.
        if end(left) < end(right) {
            lefts.next();
        } else {
            rights.next();
        }
    }
    overlaps
}

/// Writes `[a, b, c]`, abbreviated after [`SHOWN`] items: a plan must stay readable however many
/// there are.
fn write_list<T>(
    f: &mut fmt::Formatter<'_>,
    items: &[T],
    write_item: impl Fn(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    f.write_str("[")?;
    for (index, item) in items.iter().take(SHOWN).enumerate() {
        if index > 0 {
            f.write_str(", ")?;
        }
        write_item(f, item)?;
    }
    match items.len().saturating_sub(SHOWN) {
        0 => f.write_str("]"),
        hidden => write!(f, ", … {hidden} ranges]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Ids the models enumerate: one window at the bottom of the id space, one at its top.
    const WINDOW: u64 = 24;

    fn window_ids() -> impl Iterator<Item = u64> {
        (0..WINDOW).chain(FRAGMENT_END - WINDOW..FRAGMENT_END)
    }

    fn fragment_ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
        let bound = prop_oneof![0..=WINDOW, FRAGMENT_END - WINDOW..=FRAGMENT_END + 2];
        vec(
            (bound.clone(), bound).prop_map(|(start, end)| start..end),
            0..6,
        )
    }

    fn model(ranges: &[Range<u64>]) -> BTreeSet<u64> {
        window_ids()
            .filter(|id| ranges.iter().any(|range| range.contains(id)))
            .collect()
    }

    fn assert_normal(set: &FragmentRanges) {
        assert!(set.iter().all(|range| range.start < range.end));
        assert!(set.iter().all(|range| range.end <= FRAGMENT_END));
        let pairs = set.as_slice().windows(2);
        pairs.for_each(|pair| assert!(pair[0].end < pair[1].start));
    }

    proptest! {
        #[test]
        fn fragment_ranges_match_a_model(left in fragment_ranges(), right in fragment_ranges()) {
            let [a, b] = [&left, &right].map(|ranges| FragmentRanges::from_ranges(ranges.clone()));
            let (in_a, in_b) = (model(&left), model(&right));
            for id in window_ids() {
                let (in_a, in_b) = (in_a.contains(&id), in_b.contains(&id));
                prop_assert_eq!(a.contains(id), in_a);
                prop_assert_eq!(a.union(&b).contains(id), in_a || in_b);
                prop_assert_eq!(a.intersect(&b).contains(id), in_a && in_b);
                prop_assert_eq!(a.complement().contains(id), !in_a);
            }
            for set in [&a, &a.union(&b), &a.intersect(&b), &a.complement()] {
                assert_normal(set);
            }
            prop_assert_eq!(a.complement().complement(), a.clone());
            let ids = in_a.iter().filter_map(|&id| u32::try_from(id).ok());
            // Between the windows the model sees nothing, so only sets inside one window come back
            // from their ids.
            if a.iter().all(|range| range.end - range.start <= WINDOW) {
                prop_assert_eq!(FragmentRanges::from_ids(ids), a);
            }
        }

        #[test]
        fn range_queries_match_a_model(
            ranges in fragment_ranges(),
            start in 0..=WINDOW,
            end in 0..=WINDOW,
        ) {
            let set = FragmentRanges::from_ranges(ranges.clone());
            let ids = model(&ranges);
            let query = start..end;
            prop_assert_eq!(set.overlaps(&query), query.clone().any(|id| ids.contains(&id)));
            prop_assert_eq!(set.covers(&query), query.clone().all(|id| ids.contains(&id)));
            prop_assert_eq!(set.clip(&query), set.intersect(&FragmentRanges::from_ranges([query])));
        }

        #[test]
        fn address_sets_match_a_model(left in addresses(), right in addresses()) {
            let [a, b] = [&left, &right].map(|pairs| RowAddrSet::from_inclusive(pairs.clone()));
            let all_of_them = RowAddrSet::intersect_all([&a, &b, &a]);
            for addr in probes(&left, &right) {
                let (in_a, in_b) = (holds(&left, addr), holds(&right, addr));
                prop_assert_eq!(a.contains(addr), in_a);
                prop_assert_eq!(a.union(&b).contains(addr), in_a || in_b);
                prop_assert_eq!(a.intersect(&b).contains(addr), in_a && in_b);
                prop_assert_eq!(all_of_them.contains(addr), in_a && in_b);
                prop_assert_eq!(a.complement().contains(addr), !in_a);
            }
            for set in [&a, &a.union(&b), &a.intersect(&b), &a.complement()] {
                prop_assert!(set.iter().all(|(first, last)| first <= last));
                let mut neighbours = set.pairs.windows(2);
                prop_assert!(neighbours.all(|pair| pair[0].1.saturating_add(1) < pair[1].0));
            }
            prop_assert_eq!(a.complement().complement(), a.clone());
            prop_assert_eq!(a.is_subset(&b), a.union(&b) == b);
        }

        #[test]
        fn fragments_of_addresses_match_a_model(pairs in addresses()) {
            let set = RowAddrSet::from_inclusive(pairs.clone());
            let around = |id: u32| [id.saturating_sub(1), id, id.saturating_add(1)];
            for id in FRAGMENTS.into_iter().flat_map(around) {
                // Membership changes only at an end of a pair, so these offsets stand for all of
                // the fragment's.
                let base = u64::from(id) << OFFSET_BITS;
                let inside: Vec<bool> = probes(&pairs, &[(base, base | OFFSET_MASK)])
                    .filter(|addr| addr >> OFFSET_BITS == u64::from(id))
                    .map(|addr| holds(&pairs, addr))
                    .collect();
                let (any, whole) = (inside.contains(&true), !inside.contains(&false));
                prop_assert_eq!(set.fragments().contains(u64::from(id)), any);
                prop_assert_eq!(set.whole_fragments().contains(u64::from(id)), whole);
                prop_assert_eq!(set.cut_fragments().contains(u64::from(id)), any && !whole);
                let offsets = set.in_fragment(id).into_iter();
                let pairs = offsets.map(|range| (base + range.start, base + (range.end - 1)));
                let fragment = RowAddrSet::from_fragments(&FragmentRanges::single(id));
                prop_assert_eq!(RowAddrSet::from_inclusive(pairs), set.intersect(&fragment));
            }
            assert_normal(&set.fragments());
            assert_normal(&set.whole_fragments());
        }
    }

    const FRAGMENTS: [u32; 6] = [0, 1, 2, 1 << 31, u32::MAX - 1, u32::MAX];

    fn address() -> impl Strategy<Value = u64> {
        let fragment = proptest::sample::select(FRAGMENTS.as_slice());
        let offset = prop_oneof![0..3_u64, OFFSET_MASK - 2..=OFFSET_MASK, 0..=OFFSET_MASK];
        (fragment, offset).prop_map(|(id, offset)| (u64::from(id) << OFFSET_BITS) | offset)
    }

    fn addresses() -> impl Strategy<Value = Vec<(u64, u64)>> {
        vec((address(), address()), 0..6)
    }

    fn holds(pairs: &[(u64, u64)], addr: u64) -> bool {
        pairs
            .iter()
            .any(|&(first, last)| first <= addr && addr <= last)
    }

    /// Every address at which membership of either list may change, and its neighbours.
    fn probes(left: &[(u64, u64)], right: &[(u64, u64)]) -> impl Iterator<Item = u64> {
        let ends: BTreeSet<u64> = left
            .iter()
            .chain(right)
            .flat_map(|&(first, last)| [first, last])
            .collect();
        ends.into_iter()
            .flat_map(|end| [end.saturating_sub(1), end, end.saturating_add(1)])
            .chain([0, u64::MAX])
    }

    #[test]
    fn touching_ranges_coalesce() {
        let reversed = Range { start: 8, end: 7 };
        let set = FragmentRanges::from_ranges([4..6, 0..2, 2..4, 9..9, reversed]);
        assert_eq!(set.as_slice(), std::slice::from_ref(&(0..6)));
        assert_eq!(
            FragmentRanges::from_ids([2, 1, 2, 5]).as_slice(),
            [1..3, 5..6]
        );
        assert_eq!(
            RowAddrSet::from_addrs([3, 1, 2, 2])
                .iter()
                .collect::<Vec<_>>(),
            [(1, 3)]
        );
    }

    #[test]
    fn the_last_fragment_is_an_ordinary_one() {
        let last = FragmentRanges::single(u32::MAX);
        assert_eq!(
            last.as_slice(),
            std::slice::from_ref(&(FRAGMENT_END - 1..FRAGMENT_END))
        );
        let rows = RowAddrSet::from_fragments(&last);
        assert_eq!(
            rows.iter().collect::<Vec<_>>(),
            [(u64::MAX - OFFSET_MASK, u64::MAX)]
        );
        assert_eq!(rows.whole_fragments(), last);
        assert!(rows.cut_fragments().is_empty());
        assert_eq!(
            rows.in_fragment(u32::MAX),
            std::slice::from_ref(&(0..FRAGMENT_END))
        );
        assert_eq!(RowAddrSet::from_addrs([u64::MAX]).cut_fragments(), last);
        assert_eq!(rows.union(&rows.complement()), RowAddrSet::all());
    }

    #[test]
    fn all_and_empty_are_recognised() {
        assert!(FragmentRanges::all().is_all() && !FragmentRanges::all().is_empty());
        assert!(FragmentRanges::empty().is_empty() && !FragmentRanges::empty().is_all());
        assert!(FragmentRanges::from_ranges([0..7, 5..u64::MAX]).is_all());
        assert_eq!(FragmentRanges::default(), FragmentRanges::empty());
        assert_eq!(FragmentRanges::empty().span(), None);
        assert_eq!(FragmentRanges::from_ids([9, 2]).span(), Some(2..10));
        assert!(RowAddrSet::all().is_all() && RowAddrSet::empty().complement().is_all());
        assert!(RowAddrSet::all().complement().is_empty() && !RowAddrSet::default().is_all());
        assert_eq!(
            RowAddrSet::from_fragments(&FragmentRanges::all()),
            RowAddrSet::all()
        );
        assert!(RowAddrSet::all().whole_fragments().is_all());
        assert!(RowAddrSet::intersect_all::<RowAddrSet>([]).is_all());
        assert!(RowAddrSet::union_all::<RowAddrSet>([]).is_empty());
    }

    #[test]
    fn ids_outside_the_id_space_are_in_no_set() {
        let all = FragmentRanges::all();
        assert!(!all.contains(FRAGMENT_END) && !all.contains(u64::MAX));
        assert!(!all.covers(&(0..FRAGMENT_END + 1)));
        assert!(!all.overlaps(&(FRAGMENT_END..u64::MAX)));
        assert!(all.clip(&(FRAGMENT_END..u64::MAX)).is_empty());
    }

    #[test]
    fn display_is_short_and_names_all() {
        assert_eq!(
            FragmentRanges::from_ranges([7..8, 0..5]).to_string(),
            "[0..5, 7..8]"
        );
        assert_eq!(FragmentRanges::empty().to_string(), "[]");
        assert_eq!(FragmentRanges::all().to_string(), "all");
        let many = FragmentRanges::from_ids((0..20).map(|id| id * 2));
        assert_eq!(
            many.to_string(),
            "[0..1, 2..3, 4..5, 6..7, 8..9, 10..11, 12..13, 14..15, … 12 ranges]"
        );
        let rows = RowAddrSet::from_inclusive([((1 << 32) + 5, (1 << 32) + 9), (3 << 32, 3 << 32)]);
        assert_eq!(rows.to_string(), "[1:5..=1:9, 3:0]");
        assert_eq!(RowAddrSet::all().to_string(), "all");
    }

    #[test]
    fn long_lists_normalise_once() {
        let addrs: Vec<u64> = (0..200_000_u64).rev().map(|n| n * 3).collect();
        let set = RowAddrSet::from_addrs(addrs);
        assert_eq!(set.iter().len(), 200_000);
        let sets: Vec<RowAddrSet> = (0..20_000_u64)
            .map(|n| RowAddrSet::from_addrs([n * 3]))
            .collect();
        assert_eq!(RowAddrSet::union_all(&sets).iter().len(), 20_000);
        let holes = sets.iter().map(RowAddrSet::complement);
        assert_eq!(
            RowAddrSet::intersect_all(holes),
            RowAddrSet::union_all(&sets).complement()
        );
    }
}
