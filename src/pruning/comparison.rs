//! A chain against a literal: the rows on which a comparison of the two holds.
//!
//! ```text
//!   positions    0 ········ below ········ through ········ end       Cut: below and through
//!                    less          equal           greater            Comparison: which parts hold
//! ```
//!
//! The cuts are found by a search that relies on the chain's order, which `chain.rs` has seen to.

use std::iter::repeat_n;
use std::ops::Range;

use arrow::array::{Array, ArrayRef, BooleanArray, Datum, UInt64Array};
use arrow::compute::kernels::cmp;
use arrow::compute::take;
use arrow::error::ArrowError;
use datafusion::common::ScalarValue;
use datafusion::logical_expr::Operator;

use super::chain::Chain;
use super::fact::Fact;
use crate::ranges::RowAddrSet;

/// How a comparison's two sides may stand for it to hold.
#[derive(Clone, Copy)]
pub(super) struct Comparison {
    less: bool,
    equal: bool,
    greater: bool,
    /// `IS [NOT] DISTINCT FROM`, for which NULL is a value like any other.
    null_is_value: bool,
}

impl Comparison {
    pub(super) const EQ: Self = Self::ordered(false, true, false);
    pub(super) const LT_EQ: Self = Self::ordered(true, true, false);
    pub(super) const GT_EQ: Self = Self::ordered(false, true, true);

    const fn ordered(less: bool, equal: bool, greater: bool) -> Self {
        Self {
            less,
            equal,
            greater,
            null_is_value: false,
        }
    }

    pub(super) const fn of(op: Operator) -> Option<Self> {
        let comparison = match op {
            Operator::Eq | Operator::IsNotDistinctFrom => Self::EQ,
            Operator::NotEq | Operator::IsDistinctFrom => Self::ordered(true, false, true),
            Operator::Lt => Self::ordered(true, false, false),
            Operator::LtEq => Self::LT_EQ,
            Operator::Gt => Self::ordered(false, false, true),
            Operator::GtEq => Self::GT_EQ,
            _ => return None,
        };
        Some(Self {
            null_is_value: matches!(op, Operator::IsDistinctFrom | Operator::IsNotDistinctFrom),
            ..comparison
        })
    }

    /// The same comparison with its sides exchanged.
    pub(super) const fn flipped(self) -> Self {
        Self {
            less: self.greater,
            greater: self.less,
            ..self
        }
    }

    /// The comparison of a value that is never NULL with NULL.
    fn with_null(self) -> Fact {
        if self.null_is_value {
            Fact::constant(!self.equal)
        } else {
            Fact::null()
        }
    }
}

/// Where a chain's values pass a literal: positions before `below` are less, those before `through`
/// at most equal.
#[derive(Clone, Copy)]
struct Cut {
    below: u128,
    through: u128,
}

/// A literal, set against a chain.
enum Against {
    /// Where it cuts is known without looking.
    Cut(Cut),
    /// It has the chain's type; where it cuts is to be searched.
    Search(ScalarValue),
}

/// Positions evaluated at a time, at least. A call of a kernel costs as much as dozens of rows in
/// it, so for few literals it pays to try many positions at once: one literal takes thirteen rounds
/// and not sixty-four.
const PROBES: usize = 32;

/// A comparison kernel, `lt` or `lt_eq`.
type Kernel = fn(&dyn Datum, &dyn Datum) -> Result<BooleanArray, ArrowError>;

impl Chain {
    /// The facts of `chain <comparison> literal`, one for each literal; `None` where it is not
    /// understood.
    pub(super) fn compare(
        &self,
        comparison: Comparison,
        literals: &[ScalarValue],
    ) -> Vec<Option<Fact>> {
        let cuts = self.cuts(literals);
        let facts = literals.iter().zip(cuts).map(|(literal, cut)| {
            if literal.is_null() {
                return self
                    .is_comparable_null(literal)
                    .then(|| comparison.with_null());
            }
            self.cut_fact(comparison, cut?)
        });
        facts.collect()
    }

    /// A NULL of another type than the chain's is not understood: as a bound of BETWEEN it may have
    /// decided in which type the other bound is compared.
    fn is_comparable_null(&self, null: &ScalarValue) -> bool {
        let null_type = null.data_type();
        null_type.is_null()
            || null_type == self.data_type
            || (null_type.is_integer() && self.data_type.is_integer())
    }

    /// The fact of a comparison with a literal that cuts here.
    fn cut_fact(&self, comparison: Comparison, cut: Cut) -> Option<Fact> {
        let parts = [
            (comparison.less, 0..cut.below),
            (comparison.equal, cut.below..cut.through),
            (comparison.greater, cut.through..self.positions),
        ];
        let rows: Option<Vec<(u64, u64)>> = parts
            .into_iter()
            .filter(|(holds, part)| *holds && !part.is_empty())
            .map(|(_, part)| self.addresses(&part))
            .collect();
        Some(Fact::true_in(RowAddrSet::from_inclusive(rows?)))
    }

    /// The first and the last address of a range of positions that is not empty.
    fn addresses(&self, positions: &Range<u128>) -> Option<(u64, u64)> {
        let each = self.column.addresses_per_value();
        let first = positions.start * each;
        let last = (positions.end * each).checked_sub(1)?;
        Some((u64::try_from(first).ok()?, u64::try_from(last).ok()?))
    }

    /// Where each of the literals cuts the positions, all searched at once; `None` where that is
    /// not understood.
    fn cuts(&self, literals: &[ScalarValue]) -> Vec<Option<Cut>> {
        let mut cuts = vec![None; literals.len()];
        let mut slots = Vec::new();
        let mut wanted = Vec::new();
        for (slot, literal) in cuts.iter_mut().zip(literals) {
            match self.against(literal) {
                Some(Against::Cut(cut)) => *slot = Some(cut),
                Some(Against::Search(literal)) => {
                    slots.push(slot);
                    wanted.push(literal);
                }
                None => {}
            }
        }
        let found = self.search(wanted).into_iter().flatten();
        for (slot, cut) in slots.into_iter().zip(found) {
            *slot = Some(cut);
        }
        cuts
    }

    /// Sets a literal against the chain, if the two can be compared.
    fn against(&self, literal: &ScalarValue) -> Option<Against> {
        if literal.is_null() {
            return None;
        }
        if self.steps.is_empty() {
            // The bare column: the value at a position is the position.
            let value = integer(literal)?;
            let clamp = |value: i128| u128::try_from(value).unwrap_or(0).min(self.positions);
            return Some(Against::Cut(Cut {
                below: clamp(value),
                through: clamp(value + 1),
            }));
        }
        if literal.data_type() == self.data_type {
            return Some(Against::Search(literal.clone()));
        }
        let value = integer(literal)?;
        if !self.data_type.is_integer() {
            return None;
        }
        // Integers compare as numbers. One that the chain's type cannot hold lies beyond all values
        // of that type.
        let beyond = if value < 0 { 0 } else { self.positions };
        Some(match literal.cast_to(&self.data_type) {
            Ok(literal) if !literal.is_null() => Against::Search(literal),
            _ => Against::Cut(Cut {
                below: beyond,
                through: beyond,
            }),
        })
    }

    /// Searches for the cuts of literals of the chain's type.
    fn search(&self, literals: Vec<ScalarValue>) -> Option<Vec<Cut>> {
        if literals.is_empty() {
            return None;
        }
        let literals = ScalarValue::iter_to_array(literals).ok()?;
        let below = self.prefixes(&literals, cmp::lt)?.into_iter();
        let through = self.prefixes(&literals, cmp::lt_eq)?.into_iter();
        let cut = |(below, through)| Cut { below, through };
        Some(below.zip(through).map(cut).collect())
    }

    /// For each literal, the length of the prefix of positions on which `kernel(chain, literal)`
    /// holds.
    ///
    /// A binary search for all literals side by side, with more than one probe for each if they are
    /// few.
    fn prefixes(&self, literals: &ArrayRef, kernel: Kernel) -> Option<Vec<u128>> {
        let fan = (PROBES / literals.len()).max(1);
        // Where each prefix may end. Before the range the comparison holds, from its end on it does
        // not.
        let mut open = vec![0..self.positions; literals.len()];
        // Each literal stands opposite each of its probes.
        let opposite = (0_u64..).take(literals.len());
        let opposite = UInt64Array::from_iter_values(opposite.flat_map(|i| repeat_n(i, fan)));
        let literals = take(literals, &opposite, None).ok()?;
        while open.iter().any(|range| !range.is_empty()) {
            let probes = self.probes(&open, fan)?;
            let values = self.evaluate(probes.clone())?;
            let verdicts = kernel(&values, &literals).ok()?;
            if verdicts.len() != probes.len() || verdicts.null_count() > 0 {
                return None;
            }
            let verdicts: Vec<bool> = verdicts.values().iter().collect();
            let verdicts = probes.chunks(fan).zip(verdicts.chunks(fan));
            for (range, (probes, verdicts)) in open.iter_mut().zip(verdicts) {
                narrow(range, probes, verdicts);
            }
        }
        Some(open.into_iter().map(|range| range.start).collect())
    }

    /// The positions to try next: `fan` for each range, ascending and inside it; for an empty range
    /// any at all.
    fn probes(&self, open: &[Range<u128>], fan: usize) -> Option<Vec<u64>> {
        let fan = u128::try_from(fan).ok()?;
        let last = self.positions.checked_sub(1)?;
        let probes = open.iter().flat_map(|range| {
            let width = range.end - range.start;
            (1..=fan).map(move |i| (range.start + width * i / (fan + 1)).min(last))
        });
        probes.map(|probe| u64::try_from(probe).ok()).collect()
    }
}

/// Narrows a range of possible ends of a prefix. Each probe lies inside, so a range that is not
/// empty shrinks.
fn narrow(range: &mut Range<u128>, probes: &[u64], verdicts: &[bool]) {
    if range.is_empty() {
        return;
    }
    for (&probe, &holds) in probes.iter().zip(verdicts) {
        if !holds {
            range.end = u128::from(probe);
            return;
        }
        range.start = u128::from(probe) + 1;
    }
}

/// The value of an integer literal that is not NULL.
fn integer(value: &ScalarValue) -> Option<i128> {
    match value {
        ScalarValue::Int8(value) => value.map(i128::from),
        ScalarValue::Int16(value) => value.map(i128::from),
        ScalarValue::Int32(value) => value.map(i128::from),
        ScalarValue::Int64(value) => value.map(i128::from),
        ScalarValue::UInt8(value) => value.map(i128::from),
        ScalarValue::UInt16(value) => value.map(i128::from),
        ScalarValue::UInt32(value) => value.map(i128::from),
        ScalarValue::UInt64(value) => value.map(i128::from),
        _ => None,
    }
}
