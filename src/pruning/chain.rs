//! Functions of an address column that keep its order, and the constants they are compared with.
//!
//! ```text
//!   CAST(_rowaddr >> 32 AS DOUBLE)     layers, from the outside in, as the filter spells them
//!   _rowaddr ──> >> 32 ──> CAST        steps, in the order they run
//! ```
//!
//! Which casts and operators keep order is decided here, with the counter-examples. Why that is
//! enough is argued in `pruning.rs`, and what a chain says about rows is `comparison.rs`.

use std::cmp::Ordering;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, UInt64Array};
use arrow::compute::CastOptions;
use arrow::datatypes::{DECIMAL128_MAX_PRECISION, DataType, Field, FieldRef, Schema, SchemaRef};
use datafusion::common::ScalarValue;
use datafusion::common::format::DEFAULT_FORMAT_OPTIONS;
use datafusion::error::Result as DFResult;
use datafusion::logical_expr::binary::BinaryTypeCoercer;
use datafusion::logical_expr::{ColumnarValue, Expr, Operator};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{self, Column, Literal};

use super::SystemColumn;

/// A `CAST`, or, if `safe`, a `TRY_CAST`.
#[derive(Clone, Copy)]
pub(super) struct Cast<'e> {
    to: &'e DataType,
    safe: bool,
}

impl<'e> Cast<'e> {
    /// The cast and its operand, if `expr` is a cast. Metadata may name an extension type, whose
    /// casts are not arrow's.
    pub(super) fn of(expr: &'e Expr) -> Option<(Self, &'e Expr)> {
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

/// The value of a literal under any casts. Coercion leaves such casts behind when nothing has
/// folded them yet.
pub(super) fn constant(expr: &Expr) -> Option<ScalarValue> {
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

/// One function of a chain, as the filter spells it.
pub(super) enum Layer<'e> {
    Cast(Cast<'e>),
    Arithmetic(Operator, ScalarValue),
}

/// One function of a chain, ready to run on arrays.
pub(super) enum Step {
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
pub(super) struct Chain {
    pub(super) column: SystemColumn,
    pub(super) positions: u128,
    pub(super) steps: Vec<Step>,
    pub(super) data_type: DataType,
}

impl Chain {
    /// The operators of [`Self::push_arithmetic`].
    pub(super) const fn knows(op: Operator) -> bool {
        matches!(op, Operator::BitwiseShiftRight | Operator::Divide)
    }

    /// The chain of these layers, outermost first; `None` if it is not monotone, or not defined on
    /// the whole domain.
    pub(super) fn build(
        column: SystemColumn,
        positions: u128,
        layers: Vec<Layer<'_>>,
    ) -> Option<Self> {
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
            // Defined at both ends means defined everywhere: see the soundness argument at the top
            // of `pruning.rs`.
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
    pub(super) fn evaluate(&self, positions: Vec<u64>) -> Option<ArrayRef> {
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
