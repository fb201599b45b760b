//! Counts of fragments and rows: what summaries store, and the arithmetic over them.
//!
//! Summaries add, deltas add and subtract, and both meet in a [`Tally`]. A tally is wide (`i128`)
//! because a running sum may dip below zero half-way or exceed 64 bits in a corrupt table; only its
//! end result has to be a valid [`Counts`] (`spec/notes.md` 13 and 20).

use std::ops::AddAssign;

use crate::error::{Error, Result};

/// Fragments, physical rows and visible rows of a set of fragments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of fragment records.
    pub fragments: u64,
    /// Physical rows, deleted ones included.
    pub total_rows: u64,
    /// Physical rows minus deleted rows.
    pub visible_rows: u64,
}

impl Counts {
    /// The counts of one fragment.
    pub fn of_fragment(physical_rows: u64, deleted_rows: u64) -> Self {
        Self {
            fragments: 1,
            total_rows: physical_rows,
            visible_rows: physical_rows.saturating_sub(deleted_rows),
        }
    }
}

/// The after-minus-before deltas of one mutation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Delta {
    /// 1 when the mutation creates a record, -1 when it removes one, else 0.
    pub fragments: i64,
    /// Change of the physical rows.
    pub total_rows: i64,
    /// Change of the visible rows.
    pub visible_rows: i64,
}

impl Delta {
    /// `after` minus `before`, where an absent record counts as zero.
    pub(crate) fn between(before: Option<Counts>, after: Option<Counts>) -> Option<Self> {
        let before = before.unwrap_or_default();
        let after = after.unwrap_or_default();
        let diff = |a: u64, b: u64| i64::try_from(i128::from(a) - i128::from(b)).ok();
        Some(Self {
            fragments: diff(after.fragments, before.fragments)?,
            total_rows: diff(after.total_rows, before.total_rows)?,
            visible_rows: diff(after.visible_rows, before.visible_rows)?,
        })
    }
}

/// A running sum of counts and deltas.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    fragments: i128,
    total_rows: i128,
    visible_rows: i128,
}

impl AddAssign<Counts> for Tally {
    fn add_assign(&mut self, counts: Counts) {
        self.fragments += i128::from(counts.fragments);
        self.total_rows += i128::from(counts.total_rows);
        self.visible_rows += i128::from(counts.visible_rows);
    }
}

impl AddAssign<Delta> for Tally {
    fn add_assign(&mut self, delta: Delta) {
        self.fragments += i128::from(delta.fragments);
        self.total_rows += i128::from(delta.total_rows);
        self.visible_rows += i128::from(delta.visible_rows);
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.fragments += other.fragments;
        self.total_rows += other.total_rows;
        self.visible_rows += other.visible_rows;
    }
}

impl Tally {
    /// The sum as counts of `object`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when a sum is negative or over 64 bits (`count_overflow`), or when more
    /// rows are visible than exist (`visible_over_total`): spec, "Mutations", last paragraph.
    pub(crate) fn counts(&self, object: &str) -> Result<Counts> {
        let part = |name: &str, value: i128| {
            u64::try_from(value).map_err(|_| {
                Error::corrupt(
                    object,
                    "count_overflow",
                    format!("{name} between 0 and 2^64 - 1"),
                    value,
                )
            })
        };
        let counts = Counts {
            fragments: part("a fragment count", self.fragments)?,
            total_rows: part("a row count", self.total_rows)?,
            visible_rows: part("a visible row count", self.visible_rows)?,
        };
        if counts.visible_rows > counts.total_rows {
            return Err(Error::corrupt(
                object,
                "visible_over_total",
                format!("at most {} visible rows", counts.total_rows),
                counts.visible_rows,
            ));
        }
        Ok(counts)
    }

    /// The sum of the fragment counts alone, unchecked.
    pub(crate) fn raw(&self) -> (i128, i128, i128) {
        (self.fragments, self.total_rows, self.visible_rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_may_dip_below_zero_half_way() {
        let mut tally = Tally::default();
        tally += Delta {
            fragments: -1,
            total_rows: -4,
            visible_rows: -4,
        };
        assert!(tally.counts("x").is_err());
        tally += Counts::of_fragment(10, 3);
        tally += Counts::of_fragment(4, 0);
        let counts = tally.counts("x").expect("positive in the end");
        assert_eq!(counts, Counts::of_fragment(10, 3));
    }

    #[test]
    fn more_visible_than_total_is_corrupt() {
        let mut tally = Tally::default();
        tally += Delta {
            fragments: 1,
            total_rows: 1,
            visible_rows: 2,
        };
        let error = tally.counts("x").expect_err("invalid");
        assert_eq!(error.corrupt_rule(), Some("visible_over_total"));
    }
}
