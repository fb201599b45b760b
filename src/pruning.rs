//! What filters say about row addresses, worked out before anything is read.
//!
//! A filter goes in, two sets of row addresses come out: `may`, a superset of the rows on which it
//! is TRUE, and `must`, a subset of them. Where the two meet the filter needs no checking at all.
//! No I/O, no knowledge of which fragments exist beyond the largest id, and no errors: what is not
//! understood is unknown, and unknown rows are kept.
//!
//! ```text
//!   filter ──> terms of AND, OR, NOT, IS …      Fact: who may be TRUE, FALSE, NULL
//!                 └─> operand op literal        Chain: f(column), f monotone
//!                        └─> two cut points     found by search, f evaluated by DataFusion itself
//!
//!   positions    0 ········ below ········ through ········ end
//!                  f < literal    f = literal    f > literal
//! ```
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
//! Which functions are monotone is decided by `preserves_order` and `Chain::push_arithmetic`; the
//! counter-examples are there.

use std::cmp::Ordering;
use std::iter::repeat_n;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, Datum, RecordBatch, UInt64Array};
use arrow::compute::kernels::cmp;
use arrow::compute::{CastOptions, take};
use arrow::datatypes::{DECIMAL128_MAX_PRECISION, DataType, Field, FieldRef, Schema, SchemaRef};
use arrow::error::ArrowError;
use datafusion::common::ScalarValue;
use datafusion::common::format::DEFAULT_FORMAT_OPTIONS;
use datafusion::error::Result as DFResult;
use datafusion::logical_expr::binary::BinaryTypeCoercer;
use datafusion::logical_expr::expr::InList;
use datafusion::logical_expr::{Between, BinaryExpr, ColumnarValue, Expr, Operator};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{self, Column, Literal};
use lance_select::{RowAddrSelection, RowAddrTreeMap, bitmap_to_ranges};

use crate::ranges::{FragmentRanges, OFFSET_BITS, OFFSET_MASK, RowAddrSet};

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

/// The answers one subexpression may give, by row. In each row of the domain at least one is
/// possible.
///
/// From these follow the rest: a row must be TRUE if it can be neither FALSE nor NULL. For a
/// subexpression that is not boolean only NULL means anything; it counts as both TRUE and FALSE
/// where it can be other than NULL.
#[derive(Clone, Debug)]
struct Fact {
    can_true: RowAddrSet,
    can_false: RowAddrSet,
    can_null: RowAddrSet,
}

impl Fact {
    /// Any answer in any row.
    fn unknown() -> Self {
        Self {
            can_null: RowAddrSet::all(),
            ..Self::not_null()
        }
    }

    /// Some answer other than NULL in any row.
    fn not_null() -> Self {
        Self {
            can_true: RowAddrSet::all(),
            can_false: RowAddrSet::all(),
            can_null: RowAddrSet::empty(),
        }
    }

    /// NULL in every row.
    fn null() -> Self {
        Self {
            can_true: RowAddrSet::empty(),
            can_false: RowAddrSet::empty(),
            can_null: RowAddrSet::all(),
        }
    }

    /// TRUE in these rows and FALSE in all others.
    fn true_in(rows: RowAddrSet) -> Self {
        Self {
            can_false: rows.complement(),
            can_true: rows,
            can_null: RowAddrSet::empty(),
        }
    }

    /// The same answer in every row.
    fn constant(answer: bool) -> Self {
        Self::true_in(if answer {
            RowAddrSet::all()
        } else {
            RowAddrSet::empty()
        })
    }

    /// This value in every row.
    fn of_value(value: &ScalarValue) -> Self {
        match value {
            ScalarValue::Boolean(Some(answer)) => Self::constant(*answer),
            value if value.is_null() => Self::null(),
            _ => Self::not_null(),
        }
    }

    /// The rows in which the answer is TRUE, whatever else is unknown.
    fn must_be_true(&self) -> RowAddrSet {
        let otherwise = self.can_false.union(&self.can_null);
        self.can_true.intersect(&otherwise.complement())
    }

    /// `NOT`.
    fn not(self) -> Self {
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
    fn any(terms: &[Self]) -> Self {
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
    fn every(terms: Vec<Self>) -> Self {
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
enum Connective {
    And(usize),
    Or(usize),
    Not,
    IsNull,
    IsTrue,
}

impl Connective {
    /// Takes the facts of the operands off the stack and makes one of them.
    fn apply(self, facts: &mut Vec<Fact>) -> Option<Fact> {
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

/// The value of a literal under any casts. Coercion leaves such casts behind when nothing has
/// folded them yet.
fn constant(expr: &Expr) -> Option<ScalarValue> {
    let mut casts = Vec::new();
    let mut inner = expr;
    let literal = loop {
        inner = match inner {
            Expr::Literal(value, _) => break value,
            Expr::Alias(alias) => &alias.expr,
            other => {
                let (cast, operand) = Cast::of(other)?;
                casts.push(cast);
                operand
            }
        };
    };
    let mut value = ColumnarValue::Scalar(literal.clone());
    for cast in casts.iter().rev() {
        // The cast of an odd decimal can panic in arrow: see `preserves_order`.
        if !is_plain(&value.data_type()) || !is_plain(cast.to) {
            return None;
        }
        value = cast.apply(&value).ok()?;
    }
    match value {
        ColumnarValue::Scalar(value) => Some(value),
        ColumnarValue::Array(_) => None,
    }
}

/// How a comparison's two sides may stand for it to hold.
#[derive(Clone, Copy)]
struct Comparison {
    less: bool,
    equal: bool,
    greater: bool,
    /// `IS [NOT] DISTINCT FROM`, for which NULL is a value like any other.
    null_is_value: bool,
}

impl Comparison {
    const EQ: Self = Self::ordered(false, true, false);
    const LT_EQ: Self = Self::ordered(true, true, false);
    const GT_EQ: Self = Self::ordered(false, true, true);

    const fn ordered(less: bool, equal: bool, greater: bool) -> Self {
        Self {
            less,
            equal,
            greater,
            null_is_value: false,
        }
    }

    const fn of(op: Operator) -> Option<Self> {
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
    const fn flipped(self) -> Self {
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

/// A `CAST`, or, if `safe`, a `TRY_CAST`.
#[derive(Clone, Copy)]
struct Cast<'e> {
    to: &'e DataType,
    safe: bool,
}

impl<'e> Cast<'e> {
    /// The cast and its operand, if `expr` is a cast. Metadata may name an extension type, whose
    /// casts are not arrow's.
    fn of(expr: &'e Expr) -> Option<(Self, &'e Expr)> {
        let (field, safe, operand): (&FieldRef, bool, &Expr) = match expr {
            Expr::Cast(cast) => (&cast.field, false, &cast.expr),
            Expr::TryCast(cast) => (&cast.field, true, &cast.expr),
            _ => return None,
        };
        let to = field.data_type();
        field
            .metadata()
            .is_empty()
            .then_some((Self { to, safe }, operand))
    }

    /// What DataFusion's cast expressions do.
    fn apply(self, value: &ColumnarValue) -> DFResult<ColumnarValue> {
        let options = CastOptions {
            safe: self.safe,
            format_options: DEFAULT_FORMAT_OPTIONS,
        };
        value.cast_to(self.to, Some(&options))
    }
}

/// One function of a chain, as the filter spells it.
enum Layer<'e> {
    Cast(Cast<'e>),
    Arithmetic(Operator, ScalarValue),
}

/// One function of a chain, ready to run on arrays.
enum Step {
    Cast {
        to: DataType,
        safe: bool,
    },
    Arithmetic {
        schema: SchemaRef,
        expr: Arc<dyn PhysicalExpr>,
    },
}

impl Step {
    fn apply(&self, input: ArrayRef) -> DFResult<ArrayRef> {
        let rows = input.len();
        let output = match self {
            Self::Cast { to, safe } => {
                let cast = Cast { to, safe: *safe };
                cast.apply(&ColumnarValue::Array(input))?
            }
            Self::Arithmetic { schema, expr } => {
                let batch = RecordBatch::try_new(Arc::clone(schema), vec![input])?;
                expr.evaluate(&batch)?
            }
        };
        output.into_array(rows)
    }
}

/// A non-decreasing function of one address column, defined on the whole domain.
///
/// Its argument is called a position: an address, or for `_fragid` a fragment id. Positions run
/// over `0..self.positions`, which is not empty, and `u128` because the last of `2^64` addresses
/// has a successor here.
///
/// The steps are run one after another and not nested into one expression, so that a long chain of
/// casts is no deep recursion.
struct Chain {
    column: SystemColumn,
    positions: u128,
    steps: Vec<Step>,
    data_type: DataType,
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
    /// The operators of [`Self::push_arithmetic`].
    const fn knows(op: Operator) -> bool {
        matches!(op, Operator::BitwiseShiftRight | Operator::Divide)
    }

    /// The chain of these layers, outermost first; `None` if it is not monotone, or not defined on
    /// the whole domain.
    fn build(column: SystemColumn, positions: u128, layers: Vec<Layer<'_>>) -> Option<Self> {
        let last = positions.checked_sub(1)?;
        let mut chain = Self {
            column,
            positions,
            steps: Vec::with_capacity(layers.len()),
            data_type: DataType::UInt64,
        };
        for layer in layers.into_iter().rev() {
            match layer {
                Layer::Cast(cast) => chain.push_cast(cast)?,
                Layer::Arithmetic(op, literal) => chain.push_arithmetic(op, &literal)?,
            }
        }
        if !chain.steps.is_empty() {
            // Defined at both ends means defined everywhere: see the soundness argument at the top.
            chain.evaluate(vec![0, u64::try_from(last).ok()?])?;
        }
        Some(chain)
    }

    /// Appends a cast, unless the values have that type already.
    fn push_cast(&mut self, cast: Cast<'_>) -> Option<()> {
        if *cast.to == self.data_type {
            return Some(());
        }
        if !preserves_order(&self.data_type, cast.to) {
            return None;
        }
        self.steps.push(Step::Cast {
            to: cast.to.clone(),
            safe: cast.safe,
        });
        self.data_type = cast.to.clone();
        Some(())
    }

    /// Appends `>> literal` or `/ literal`.
    ///
    /// Operands get the types coercion gives them, so that a filter means the same before it and
    /// after. Then:
    /// - A right shift of integers by any fixed distance is monotone. The kernel shifts by the
    ///   distance modulo the width, so `>> 64` changes nothing, but it does so in every row.
    /// - Division by a fixed positive number is monotone and so is the rounding after it: integers
    ///   and decimals truncate, floats round to nearest. It fails only on overflow of a decimal, so
    ///   on an interval. A negative divisor reverses the order. An infinite one makes NaN of an
    ///   infinite dividend.
    /// - Other operators are not: `+` and `*` wrap around, `%` and `&` are periodic.
    fn push_arithmetic(&mut self, op: Operator, literal: &ScalarValue) -> Option<()> {
        let literal_type = literal.data_type();
        if !is_number(&literal_type) {
            return None;
        }
        let coercer = BinaryTypeCoercer::new(&self.data_type, &op, &literal_type);
        let (left, right) = coercer.get_input_types().ok()?;
        self.push_cast(Cast {
            to: &left,
            safe: false,
        })?;
        let literal = literal.cast_to(&right).ok()?;
        let monotone = match op {
            Operator::BitwiseShiftRight => {
                // The kernel takes equal types for granted.
                left.is_integer() && left == right && !literal.is_null()
            }
            Operator::Divide => {
                is_number(&left) && is_number(&right) && is_positive_and_finite(&literal)
            }
            _ => false,
        };
        if !monotone {
            return None;
        }
        let schema = Arc::new(Schema::new(vec![Field::new("value", left, true)]));
        let value = Arc::new(Column::new("value", 0));
        let literal = Arc::new(Literal::new(literal));
        let expr = expressions::binary(value, op, literal, &schema).ok()?;
        self.data_type = expr.data_type(&schema).ok()?;
        self.steps.push(Step::Arithmetic { schema, expr });
        is_number(&self.data_type).then_some(())
    }

    /// The values at these positions, if all can be computed and none is NULL.
    fn evaluate(&self, positions: Vec<u64>) -> Option<ArrayRef> {
        let rows = positions.len();
        let mut values: ArrayRef = Arc::new(UInt64Array::from(positions));
        for step in &self.steps {
            values = step.apply(values).ok()?;
        }
        let as_expected = values.len() == rows
            && values.null_count() == 0
            && *values.data_type() == self.data_type;
        as_expected.then_some(values)
    }

    /// The facts of `chain <comparison> literal`, one for each literal; `None` where it is not
    /// understood.
    fn compare(&self, comparison: Comparison, literals: &[ScalarValue]) -> Vec<Option<Fact>> {
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

/// Whether arrow's cast between these types never turns the order of two non-negative numbers
/// around, and fails, if at all, on all numbers above some bound.
///
/// Integers and floats: conversions are range-checked, and rounding and truncation are monotone.
/// `Decimal128`: scaling is checked, rounding monotone, the precision checked. Not so, in arrow 58:
/// - An integer becomes a `Decimal32` or `Decimal64` through Rust's `as`, which wraps around before
///   anything is checked: `CAST(_rowaddr AS Decimal32(9, 0))` is 5 on offset 5 of every fragment,
///   and defined at both ends of some domains.
/// - `Decimal256` adds precision and scale as `i8`. Where the sum overflows, the cast panics in a
///   debug build, and in others multiplies without a check. And it becomes an `Int64` without a
///   look at the second of its four words, so 2^64 + 5 becomes 5.
///
/// Text sorts "10" before "9"; by a boolean or a timestamp nobody orders addresses.
fn preserves_order(from: &DataType, to: &DataType) -> bool {
    is_number(from) && is_number(to)
}

/// The types chains are made of. A decimal's scale is from zero to its precision: beyond that lie
/// corners of arrow's arithmetic that need an argument of their own, and no filter.
fn is_number(data_type: &DataType) -> bool {
    match data_type {
        DataType::Decimal128(precision, scale) => {
            *precision <= DECIMAL128_MAX_PRECISION
                && u8::try_from(*scale).is_ok_and(|scale| scale <= *precision)
        }
        other => other.is_integer() || other.is_floating(),
    }
}

/// The types in whose casts a constant is computed: those of chains, and those filters are written
/// in.
fn is_plain(data_type: &DataType) -> bool {
    use DataType::{Boolean, LargeUtf8, Null, Utf8, Utf8View};
    is_number(data_type) || matches!(data_type, Null | Boolean | Utf8 | LargeUtf8 | Utf8View)
}

fn is_positive_and_finite(value: &ScalarValue) -> bool {
    let finite = match value {
        ScalarValue::Float16(Some(value)) => value.is_finite(),
        ScalarValue::Float32(Some(value)) => value.is_finite(),
        ScalarValue::Float64(Some(value)) => value.is_finite(),
        value => !value.is_null(),
    };
    finite
        && ScalarValue::new_zero(&value.data_type())
            .is_ok_and(|zero| value.partial_cmp(&zero) == Some(Ordering::Greater))
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

#[cfg(test)]
mod tests;
