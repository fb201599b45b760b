//! What filters say about row addresses, worked out before anything is read.
//!
//! A filter goes in, two sets of row addresses come out: `may`, a superset of the rows on which it
//! is TRUE, and `must`, a subset of them. Where the two meet the filter needs no checking at all.
//! No I/O, no knowledge of which fragments exist beyond the largest id, and no errors: what is not
//! understood is unknown, and unknown rows are kept.
//!
//! ```text
//!   filter ──> terms of AND, OR, NOT, IS …    Fact: who may be TRUE, FALSE, NULL          (fact)
//!                 └─> operand op literal      Chain: f(column), f monotone               (chain)
//!                        └─> two cut points   found by search, f run by DataFusion  (comparison)
//!
//!   positions    0 ········ below ········ through ········ end
//!                  f < literal    f = literal    f > literal
//! ```
//!
//! This file has the answers, [`Pruned`] and [`RowAddressPlan`], and the walk over an expression
//! that leads to them.
//!
//! # Why it is sound
//!
//! **Terms.** For each subexpression and each row a `Fact` holds the answers the row may give, a
//! non-empty subset of {TRUE, FALSE, NULL}, stored as one set of rows per answer. A connective maps
//! the possible answers of its operands to every answer that some combination of them yields, by
//! its own truth table, so the true answer is never lost. NOT is that table too, a swap of TRUE and
//! FALSE. It is not pushed down, and nothing is weakened beneath it: an unknown term keeps all
//! three answers, under any number of NOTs. (Two sets, "may be TRUE" and its complement, would not
//! do. `NOT (_fragid = NULL)` is NULL, never TRUE, and so is `NOT (_rowaddr NOT IN (1, NULL))`
//! except on row 1.)
//!
//! **Comparisons.** A `Chain` is a composition `f` of functions that are each non-decreasing, and
//! defined on an interval of their inputs. So `f` is non-decreasing where it is defined, and if it
//! is defined at both ends of the domain then everywhere between: `f(x)` stays inside what the ends
//! have shown to be accepted at each step. Hence `f(x) < literal` holds on a prefix of the domain,
//! and so does `f(x) <= literal`; the ends of the two prefixes split the domain into less, equal
//! and greater, and each operator is a union of these. Monotone need not mean strict:
//! `CAST(_rowaddr AS DOUBLE) = 1e18` holds on a range of rows, and the equal part is that range.
//!
//! **Evaluation.** `f` and the comparisons are computed by the kernels DataFusion runs, so
//! rounding, truncation and the total order of floats (NaN greatest, -0.0 below 0.0) are theirs by
//! construction. Only integers of different types are compared here, as numbers, which is what
//! DataFusion's coercion of them amounts to.
//!
//! **Errors.** An expression that fails on some rows makes no claim about them: `must` says "TRUE,
//! if it can be computed". Pruning may hide an error of a row it drops, as any reordering of
//! conjuncts may.
//!
//! Which functions are monotone is decided in `chain.rs`, by `preserves_order` and
//! `Chain::push_arithmetic`; the counter-examples are there.

mod chain;
mod comparison;
mod fact;

use std::iter::repeat_n;

use datafusion::common::ScalarValue;
use datafusion::logical_expr::expr::InList;
use datafusion::logical_expr::{Between, BinaryExpr, Expr, Operator};
use lance_select::{RowAddrSelection, RowAddrTreeMap, bitmap_to_ranges};

use crate::ranges::{FragmentRanges, OFFSET_BITS, OFFSET_MASK, RowAddrSet};

use chain::{Cast, Chain, Layer, constant};
use comparison::Comparison;
use fact::{Connective, Fact};

/// Name of the column that holds a row's address, `(fragment_id << 32) | offset`.
pub(crate) const ROW_ADDR: &str = "_rowaddr";

/// Name of the column that holds a row's id: its address, unless the table has stable row ids.
pub(crate) const ROW_ID: &str = "_rowid";

/// Name of the column that holds the id of a row's fragment.
pub(crate) const FRAG_ID: &str = "_fragid";

/// The columns every table can expose beyond its own. All are `UInt64` and never NULL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SystemColumn {
    /// `_rowaddr`
    RowAddr,
    /// `_rowid`
    RowId,
    /// `_fragid`
    FragId,
}

impl SystemColumn {
    /// The column's name in SQL.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RowAddr => ROW_ADDR,
            Self::RowId => ROW_ID,
            Self::FragId => FRAG_ID,
        }
    }

    /// The system column of this name. The name alone does not say that it denotes addresses: see
    /// [`AddressColumns`].
    pub fn from_name(name: &str) -> Option<Self> {
        let columns = [Self::RowAddr, Self::RowId, Self::FragId];
        columns.into_iter().find(|column| column.name() == name)
    }

    /// How many addresses share one value of the column.
    const fn addresses_per_value(self) -> u128 {
        match self {
            Self::RowAddr | Self::RowId => 1,
            Self::FragId => 1 << OFFSET_BITS,
        }
    }
}

/// Which column names denote row addresses in a table.
///
/// A name that is off is an ordinary column, about which nothing is known: the table may have a
/// column of its own by that name, or its row ids may be stable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressColumns {
    /// `_rowaddr` is the row address.
    pub row_addr: bool,
    /// `_rowid` is the row address. True only without stable row ids; a stable row id is opaque,
    /// and stays with the row when it moves to another address.
    pub row_id: bool,
    /// `_fragid` is the fragment id, `_rowaddr >> 32`.
    pub frag_id: bool,
}

impl AddressColumns {
    /// What a column of this name denotes, if it denotes addresses.
    fn resolve(self, name: &str) -> Option<SystemColumn> {
        let column = SystemColumn::from_name(name)?;
        let denotes_addresses = match column {
            SystemColumn::RowAddr => self.row_addr,
            SystemColumn::RowId => self.row_id,
            SystemColumn::FragId => self.frag_id,
        };
        denotes_addresses.then_some(column)
    }
}

/// The addresses rows of a table can have: those of fragments `0..=max`.
///
/// It bounds the searches, and it decides whether a cast can fail: `CAST(_rowaddr AS BIGINT)` does
/// on fragment `2^31`, so it prunes only where no fragment id is that large. Nothing is claimed
/// about addresses outside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressDomain {
    max_fragment: Option<u32>,
}

impl AddressDomain {
    /// The domain of a table whose largest fragment id, ever, is `max_fragment`; `None` if it never
    /// had a fragment.
    pub const fn new(max_fragment: Option<u32>) -> Self {
        Self { max_fragment }
    }

    /// The fragment ids of the domain.
    pub fn fragments(&self) -> FragmentRanges {
        FragmentRanges::from_ranges(self.max_fragment.map(|max| 0..u64::from(max) + 1))
    }

    /// The row addresses of the domain.
    pub fn rows(&self) -> RowAddrSet {
        RowAddrSet::from_fragments(&self.fragments())
    }

    /// The number of different values a column can take.
    fn positions(&self, column: SystemColumn) -> u128 {
        let fragments = self.max_fragment.map_or(0, |max| u128::from(max) + 1);
        (fragments << OFFSET_BITS) / column.addresses_per_value()
    }

    /// The one set that stands for all sets with these rows of the domain, so that `==` asks about
    /// the domain only.
    ///
    /// Of all rows that is [`RowAddrSet::all`], which a plan can tell from a set that narrows; of
    /// others the part inside the domain. In an empty domain every set is empty.
    fn canonical(&self, rows: &RowAddrSet) -> RowAddrSet {
        let domain = self.rows();
        let inside = rows.intersect(&domain);
        if inside == domain && !domain.is_empty() {
            RowAddrSet::all()
        } else {
            inside
        }
    }
}

/// What one filter says about row addresses.
///
/// Both sets are `all` if they hold every row of the domain, and otherwise hold rows of the domain
/// only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pruned {
    /// A superset of the rows on which the filter is TRUE.
    pub may: RowAddrSet,
    /// A subset of the rows on which the filter is TRUE.
    pub must: RowAddrSet,
}

impl Pruned {
    /// Whether the filter is TRUE on exactly the rows of `may`, so that it need not be evaluated.
    pub fn is_exact(&self) -> bool {
        self.may == self.must
    }
}

/// Works out on which rows `expr` may be, and on which it must be, TRUE.
///
/// `expr` is a filter as DataFusion hands it to a table provider, with types coerced. Column
/// references are matched by name; that they mean this table is up to the caller. Of literals that
/// do not have their operand's type only integers are understood, since the type a comparison takes
/// place in depends on more than the two of them.
pub fn prune(expr: &Expr, columns: &AddressColumns, domain: &AddressDomain) -> Pruned {
    let pruner = Pruner {
        columns: *columns,
        domain: *domain,
    };
    let fact = pruner.fact(expr);
    Pruned {
        may: domain.canonical(&fact.can_true),
        must: domain.canonical(&fact.must_be_true()),
    }
}

/// The rows a scan has to look at, and the filters it still has to check on them.
///
/// Rows can be taken out of a plan and never put back: whoever adds what they know, an index result
/// say, cannot undo what others have ruled out.
#[derive(Clone, Debug, PartialEq)]
pub struct RowAddressPlan {
    rows: RowAddrSet,
    fragments: FragmentRanges,
    residual: Vec<Expr>,
}

impl RowAddressPlan {
    /// The plan for the conjunction of `filters`.
    pub fn from_filters(
        filters: &[Expr],
        columns: &AddressColumns,
        domain: &AddressDomain,
    ) -> Self {
        let pruned: Vec<Pruned> = filters
            .iter()
            .map(|filter| prune(filter, columns, domain))
            .collect();
        let may = RowAddrSet::intersect_all(pruned.iter().map(|pruned| &pruned.may));
        let rows = domain.canonical(&may);
        // Inside the rows that are left, a filter that must be TRUE on all of them has nothing more
        // to say. That is so for every exact filter, and for others once another filter has
        // narrowed the rows.
        let is_settled = |pruned: &Pruned| pruned.is_exact() || rows.is_subset(&pruned.must);
        let residual = filters
            .iter()
            .zip(&pruned)
            .filter(|(_, pruned)| !is_settled(pruned))
            .map(|(filter, _)| filter.clone())
            .collect();
        Self {
            residual,
            ..Self::from_rows(rows)
        }
    }

    /// The plan that reads all rows of these fragments.
    pub fn from_fragments(fragments: FragmentRanges) -> Self {
        Self {
            rows: RowAddrSet::from_fragments(&fragments),
            fragments,
            residual: Vec::new(),
        }
    }

    /// The plan that reads these rows.
    pub fn from_rows(rows: RowAddrSet) -> Self {
        Self {
            fragments: rows.fragments(),
            rows,
            residual: Vec::new(),
        }
    }

    /// The plan that reads the rows of an index result. The map must hold addresses, not stable row
    /// ids.
    pub fn from_row_addr_map(map: &RowAddrTreeMap) -> Self {
        let mut rows = Vec::new();
        for (&fragment, selection) in map.iter() {
            let base = u64::from(fragment) << OFFSET_BITS;
            match selection {
                RowAddrSelection::Full => rows.push((base, base | OFFSET_MASK)),
                RowAddrSelection::Partial(bitmap) => {
                    let runs = bitmap_to_ranges(bitmap).into_iter();
                    rows.extend(runs.map(|run| (base | run.start, base | (run.end - 1))));
                }
            }
        }
        Self::from_rows(RowAddrSet::from_inclusive(rows))
    }

    /// The rows that may satisfy the filters: `all`, unless something was ruled out.
    pub fn rows(&self) -> &RowAddrSet {
        &self.rows
    }

    /// The fragments with such rows.
    pub fn fragments(&self) -> &FragmentRanges {
        &self.fragments
    }

    /// The filters that are not known to be TRUE on all of these rows, in the order given.
    pub fn residual(&self) -> &[Expr] {
        &self.residual
    }

    /// Whether the rows of the plan are the answer, with nothing left to check.
    pub fn exact(&self) -> bool {
        self.residual.is_empty()
    }

    /// Keeps only rows that are also in `rows`.
    pub fn intersect_rows(&mut self, rows: &RowAddrSet) {
        self.rows = self.rows.intersect(rows);
        self.fragments = self.rows.fragments();
    }

    /// Keeps only rows of these fragments.
    pub fn intersect_fragments(&mut self, fragments: &FragmentRanges) {
        self.intersect_rows(&RowAddrSet::from_fragments(fragments));
    }
}

/// A step of the walk over an expression.
enum Task<'e> {
    Visit(&'e Expr),
    Apply(Connective),
}

/// One side of a comparison, where it is understood.
enum Operand {
    Address(Chain),
    Constant(ScalarValue),
}

/// Walks expressions of one table.
struct Pruner {
    columns: AddressColumns,
    domain: AddressDomain,
}

impl Pruner {
    /// The fact of a whole expression.
    ///
    /// The stacks are explicit: a filter of ten thousand terms is a tree ten thousand levels deep,
    /// too deep to recurse into.
    fn fact(&self, expr: &Expr) -> Fact {
        let mut tasks = vec![Task::Visit(expr)];
        let mut facts: Vec<Fact> = Vec::new();
        while let Some(task) = tasks.pop() {
            let fact = match task {
                Task::Visit(expr) => self.visit(expr, &mut tasks),
                Task::Apply(connective) => connective.apply(&mut facts),
            };
            facts.extend(fact);
        }
        facts.pop().unwrap_or_else(Fact::unknown)
    }

    /// The fact of an expression without connectives; of others, schedules the connectives and
    /// their operands.
    fn visit<'e>(&self, expr: &'e Expr, tasks: &mut Vec<Task<'e>>) -> Option<Fact> {
        // Outermost first: the stack runs them in reverse.
        let (connectives, operand): (&[Connective], &Expr) = match expr {
            Expr::Alias(alias) => (&[], &alias.expr),
            Expr::Not(operand) => (&[Connective::Not], operand),
            Expr::IsNull(operand) | Expr::IsUnknown(operand) => (&[Connective::IsNull], operand),
            Expr::IsNotNull(operand) | Expr::IsNotUnknown(operand) => {
                (&[Connective::Not, Connective::IsNull], operand)
            }
            Expr::IsTrue(operand) => (&[Connective::IsTrue], operand),
            Expr::IsNotTrue(operand) => (&[Connective::Not, Connective::IsTrue], operand),
            // FALSE is the TRUE of the negation, and only that.
            Expr::IsFalse(operand) => (&[Connective::IsTrue, Connective::Not], operand),
            Expr::IsNotFalse(operand) => (
                &[Connective::Not, Connective::IsTrue, Connective::Not],
                operand,
            ),
            Expr::BinaryExpr(binary) if matches!(binary.op, Operator::And | Operator::Or) => {
                let terms = terms_of(binary);
                tasks.push(Task::Apply(match binary.op {
                    Operator::And => Connective::And(terms.len()),
                    _ => Connective::Or(terms.len()),
                }));
                tasks.extend(terms.into_iter().map(Task::Visit));
                return None;
            }
            leaf => return Some(self.leaf(leaf).unwrap_or_else(Fact::unknown)),
        };
        tasks.extend(connectives.iter().copied().map(Task::Apply));
        tasks.push(Task::Visit(operand));
        None
    }

    /// The fact of an expression without connectives, if it is understood.
    fn leaf(&self, expr: &Expr) -> Option<Fact> {
        match expr {
            Expr::Between(between) => return self.between(between),
            Expr::InList(list) => return self.in_list(list),
            Expr::BinaryExpr(binary) => {
                if let Some(comparison) = Comparison::of(binary.op) {
                    return self.compare(&binary.left, comparison, &binary.right);
                }
            }
            _ => {}
        }
        Some(match self.operand(expr)? {
            Operand::Constant(value) => Fact::of_value(&value),
            // A chain is defined on the whole domain.
            Operand::Address(_) => Fact::not_null(),
        })
    }

    /// The fact of a comparison of a chain and a constant, on either side.
    fn compare(&self, left: &Expr, comparison: Comparison, right: &Expr) -> Option<Fact> {
        let (chain, comparison, literal) = match (self.operand(left)?, self.operand(right)?) {
            (Operand::Address(chain), Operand::Constant(literal)) => (chain, comparison, literal),
            (Operand::Constant(literal), Operand::Address(chain)) => {
                (chain, comparison.flipped(), literal)
            }
            _ => return None,
        };
        chain.compare(comparison, &[literal]).pop().flatten()
    }

    /// `value BETWEEN low AND high` is `value >= low AND value <= high`, NULL bounds included.
    ///
    /// It is unknown if either half is. Coercion makes one type of all three, so a bound that is
    /// not understood may have changed what the other one means: in `_rowaddr BETWEEN
    /// 9007199254740993 AND 1e300`, not yet coerced, the comparisons are of floats, and
    /// 9007199254740992 is inside.
    fn between(&self, between: &Between) -> Option<Fact> {
        let low = self.compare(&between.expr, Comparison::GT_EQ, &between.low)?;
        let high = self.compare(&between.expr, Comparison::LT_EQ, &between.high)?;
        let inside = Fact::every(vec![low, high]);
        Some(if between.negated {
            inside.not()
        } else {
            inside
        })
    }

    /// `value IN (a, b, …)` is `value = a OR value = b OR …`, NULL members included.
    ///
    /// A member that is not understood becomes an unknown term. The others may stay although
    /// coercion makes one type of the list: with an unknown term around, an equal member still
    /// makes the list TRUE, in whatever type, and an unequal one says nothing.
    fn in_list(&self, list: &InList) -> Option<Fact> {
        let Operand::Address(chain) = self.operand(&list.expr)? else {
            return None;
        };
        let members: Vec<ScalarValue> = list.list.iter().filter_map(constant).collect();
        let known = chain.compare(Comparison::EQ, &members).into_iter();
        let others = repeat_n(None, list.list.len() - members.len());
        let terms: Vec<Fact> = known
            .chain(others)
            .map(|term| term.unwrap_or_else(Fact::unknown))
            .collect();
        let member = Fact::any(&terms);
        Some(if list.negated { member.not() } else { member })
    }

    /// One side of a comparison, unwrapped from the outside in, if it is a constant or a chain.
    fn operand(&self, expr: &Expr) -> Option<Operand> {
        if let Some(value) = constant(expr) {
            return Some(Operand::Constant(value));
        }
        let mut layers = Vec::new();
        let mut inner = expr;
        let column = loop {
            inner = match inner {
                Expr::Alias(alias) => &alias.expr,
                Expr::BinaryExpr(binary) if Chain::knows(binary.op) => {
                    layers.push(Layer::Arithmetic(binary.op, constant(&binary.right)?));
                    &binary.left
                }
                Expr::Column(column) => break self.columns.resolve(&column.name)?,
                cast => {
                    let (cast, operand) = Cast::of(cast)?;
                    layers.push(Layer::Cast(cast));
                    operand
                }
            };
        };
        Chain::build(column, self.domain.positions(column), layers).map(Operand::Address)
    }
}

/// The terms of a chain of one operator, however it is nested.
fn terms_of(root: &BinaryExpr) -> Vec<&Expr> {
    let mut pending = vec![root.right.as_ref(), root.left.as_ref()];
    let mut terms = Vec::new();
    while let Some(expr) = pending.pop() {
        match expr {
            Expr::BinaryExpr(inner) if inner.op == root.op => {
                pending.extend([inner.right.as_ref(), inner.left.as_ref()]);
            }
            term => terms.push(term),
        }
    }
    terms
}

#[cfg(test)]
mod tests;
