//! What is known of a term's answers, and how connectives pass it on.
//!
//! Plain sets of rows: `comparison.rs` makes them of comparisons, and the walk over an expression
//! is in `pruning.rs`. So is the argument why the true answer is never lost, under "Terms".

use datafusion::common::ScalarValue;

use crate::ranges::RowAddrSet;

/// The answers one subexpression may give, by row. In each row of the domain at least one is
/// possible.
///
/// From these follow the rest: a row must be TRUE if it can be neither FALSE nor NULL. For a
/// subexpression that is not boolean only NULL means anything; it counts as both TRUE and FALSE
/// where it can be other than NULL.
#[derive(Clone, Debug)]
pub(super) struct Fact {
    pub(super) can_true: RowAddrSet,
    can_false: RowAddrSet,
    can_null: RowAddrSet,
}

impl Fact {
    /// Any answer in any row.
    pub(super) fn unknown() -> Self {
        Self {
            can_null: RowAddrSet::all(),
            ..Self::not_null()
        }
    }

    /// Some answer other than NULL in any row.
    pub(super) fn not_null() -> Self {
        Self {
            can_true: RowAddrSet::all(),
            can_false: RowAddrSet::all(),
            can_null: RowAddrSet::empty(),
        }
    }

    /// NULL in every row.
    pub(super) fn null() -> Self {
        Self {
            can_true: RowAddrSet::empty(),
            can_false: RowAddrSet::empty(),
            can_null: RowAddrSet::all(),
        }
    }

    /// TRUE in these rows and FALSE in all others.
    pub(super) fn true_in(rows: RowAddrSet) -> Self {
        Self {
            can_false: rows.complement(),
            can_true: rows,
            can_null: RowAddrSet::empty(),
        }
    }

    /// The same answer in every row.
    pub(super) fn constant(answer: bool) -> Self {
        Self::true_in(if answer {
            RowAddrSet::all()
        } else {
            RowAddrSet::empty()
        })
    }

    /// This value in every row.
    pub(super) fn of_value(value: &ScalarValue) -> Self {
        match value {
            ScalarValue::Boolean(Some(answer)) => Self::constant(*answer),
            value if value.is_null() => Self::null(),
            _ => Self::not_null(),
        }
    }

    /// The rows in which the answer is TRUE, whatever else is unknown.
    pub(super) fn must_be_true(&self) -> RowAddrSet {
        let otherwise = self.can_false.union(&self.can_null);
        self.can_true.intersect(&otherwise.complement())
    }

    /// `NOT`.
    pub(super) fn not(self) -> Self {
        Self {
            can_true: self.can_false,
            can_false: self.can_true,
            can_null: self.can_null,
        }
    }

    /// OR of any number of terms: TRUE if one is, FALSE if all are, NULL if none is TRUE and one is
    /// NULL.
    ///
    /// All terms at once, because ten thousand of them in pairs would copy ever larger sets ten
    /// thousand times.
    pub(super) fn any(terms: &[Self]) -> Self {
        let can_null = RowAddrSet::union_all(terms.iter().map(|term| &term.can_null));
        let no_term_true = terms
            .iter()
            .map(|term| term.can_false.union(&term.can_null));
        Self {
            can_true: RowAddrSet::union_all(terms.iter().map(|term| &term.can_true)),
            can_false: RowAddrSet::intersect_all(terms.iter().map(|term| &term.can_false)),
            can_null: if can_null.is_empty() {
                can_null
            } else {
                can_null.intersect(&RowAddrSet::intersect_all(no_term_true))
            },
        }
    }

    /// AND of any number of terms, by De Morgan: Kleene's tables are each other's mirror image.
    pub(super) fn every(terms: Vec<Self>) -> Self {
        let negated: Vec<Self> = terms.into_iter().map(Self::not).collect();
        Self::any(&negated).not()
    }

    /// `IS NULL`.
    fn null_test(self) -> Self {
        Self {
            can_false: self.can_true.union(&self.can_false),
            can_true: self.can_null,
            can_null: RowAddrSet::empty(),
        }
    }

    /// `IS TRUE`.
    fn true_test(self) -> Self {
        Self {
            can_false: self.can_false.union(&self.can_null),
            can_true: self.can_true,
            can_null: RowAddrSet::empty(),
        }
    }
}

/// A connective that waits for the facts of its operands.
#[derive(Clone, Copy)]
pub(super) enum Connective {
    And(usize),
    Or(usize),
    Not,
    IsNull,
    IsTrue,
}

impl Connective {
    /// Takes the facts of the operands off the stack and makes one of them.
    pub(super) fn apply(self, facts: &mut Vec<Fact>) -> Option<Fact> {
        let mut last = |count: usize| facts.split_off(facts.len().saturating_sub(count));
        match self {
            Self::And(terms) => Some(Fact::every(last(terms))),
            Self::Or(terms) => Some(Fact::any(&last(terms))),
            Self::Not => facts.pop().map(Fact::not),
            Self::IsNull => facts.pop().map(Fact::null_test),
            Self::IsTrue => facts.pop().map(Fact::true_test),
        }
    }
}
