//! Pruning against evaluating the filter on every row.

use super::*;

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch, UInt64Array};
use arrow::compute::kernels::cmp;
use arrow::datatypes::{DataType, Field, Schema};
use datafusion::common::DFSchema;
use datafusion::error::Result as DFResult;
use datafusion::logical_expr::expr::Alias;
use datafusion::logical_expr::simplify::SimplifyContext;
use datafusion::logical_expr::{cast, col, lit, try_cast};
use datafusion::optimizer::simplify_expressions::ExprSimplifier;
use datafusion::prelude::SessionContext;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

const ALL: AddressColumns = AddressColumns {
    row_addr: true,
    row_id: true,
    frag_id: true,
};

static SESSION: LazyLock<SessionContext> = LazyLock::new(SessionContext::new);

/// The system columns, and one column of data.
static SCHEMA: LazyLock<Arc<DFSchema>> = LazyLock::new(|| {
    let fields = [ROW_ADDR, ROW_ID, FRAG_ID].map(|name| Field::new(name, DataType::UInt64, false));
    let fields: Vec<Field> = fields
        .into_iter()
        .chain([Field::new("x", DataType::Int64, true)])
        .collect();
    Arc::new(DFSchema::try_from(Schema::new(fields)).unwrap())
});

fn domain(max_fragment: u32) -> AddressDomain {
    AddressDomain::new(Some(max_fragment))
}

fn simplifier() -> ExprSimplifier {
    ExprSimplifier::new(
        SimplifyContext::builder()
            .with_schema(Arc::clone(&SCHEMA))
            .build(),
    )
}

/// The filter as a provider receives it: parsed, coerced, simplified.
fn sql(text: &str) -> Expr {
    let parsed = SESSION.parse_sql_expr(text, &SCHEMA).unwrap();
    let coerced = simplifier().coerce(parsed, &SCHEMA).unwrap();
    simplifier().simplify(coerced).unwrap()
}

/// The filter as it was written, and as DataFusion rewrites it on the way to a provider.
fn forms(expr: &Expr) -> Vec<Expr> {
    let coerced = simplifier().coerce(expr.clone(), &SCHEMA).ok();
    let simplified = coerced
        .clone()
        .and_then(|expr| simplifier().simplify(expr).ok());
    [Some(expr.clone()), coerced, simplified]
        .into_iter()
        .flatten()
        .collect()
}

/// Rows at the given addresses, each with several values of `x`. System columns that do not
/// denote addresses hold something else.
fn batch(addrs: &BTreeSet<u64>, columns: &AddressColumns) -> RecordBatch {
    let x = [None, Some(-1), Some(0), Some(3), Some(1 << 33)];
    let each = || addrs.iter().flat_map(|&addr| repeat_n(addr, x.len()));
    let column = |denotes: bool, value: fn(u64) -> u64| -> ArrayRef {
        let stored = each().map(|addr| {
            if denotes {
                value(addr)
            } else {
                !addr.rotate_left(7)
            }
        });
        Arc::new(UInt64Array::from_iter_values(stored))
    };
    let arrays: Vec<ArrayRef> = vec![
        column(columns.row_addr, |addr| addr),
        column(columns.row_id, |addr| addr),
        column(columns.frag_id, |addr| addr >> OFFSET_BITS),
        Arc::new(Int64Array::from_iter(addrs.iter().flat_map(|_| x))),
    ];
    RecordBatch::try_new(Arc::clone(SCHEMA.inner()), arrays).unwrap()
}

/// What DataFusion answers for one row; the inner error if it fails on that row.
type Answer = Result<Option<bool>, String>;

/// What DataFusion answers, row by row if it fails on the whole; `None` if it cannot even plan
/// the filter.
fn evaluate(expr: &Expr, batch: &RecordBatch) -> Option<Vec<Answer>> {
    let physical = SESSION.create_physical_expr(expr.clone(), &SCHEMA).ok()?;
    let answers = |batch: &RecordBatch| -> DFResult<Vec<Answer>> {
        let array = physical.evaluate(batch)?.into_array(batch.num_rows())?;
        let array = datafusion::common::cast::as_boolean_array(&array)?;
        Ok(array.iter().map(Ok).collect())
    };
    Some(answers(batch).unwrap_or_else(|_| {
        let rows = (0..batch.num_rows()).map(|row| answers(&batch.slice(row, 1)));
        rows.map(|row| row.map_err(|error| error.to_string())?.swap_remove(0))
            .collect()
    }))
}

/// Addresses worth looking at: around the edges of fragments, and around the edges of the sets
/// under test.
fn interesting(max_fragment: u32, sets: [&RowAddrSet; 2]) -> BTreeSet<u64> {
    let ids = [
        0,
        1,
        2,
        3,
        (1 << 31) - 1,
        1 << 31,
        (1 << 31) + 1,
        u32::MAX,
        max_fragment,
    ];
    let bases = ids.into_iter().map(|id| u64::from(id) << OFFSET_BITS);
    let edges = bases
        .flat_map(|base| [0, 1, 5, 1 << 31, (1 << OFFSET_BITS) - 1].map(|offset| base | offset));
    let ends = sets
        .into_iter()
        .flat_map(|set| set.iter().take(20).flat_map(|(first, last)| [first, last]));
    edges
        .chain(ends.flat_map(|addr| [addr.saturating_sub(1), addr, addr.saturating_add(1)]))
        .filter(|addr| addr >> OFFSET_BITS <= u64::from(max_fragment))
        .collect()
}

/// Prunes, evaluates on interesting rows, and compares. Returns what pruning said, if
/// DataFusion takes the filter, and whether it can be computed on every row.
fn check_rows(expr: &Expr, columns: &AddressColumns, max_fragment: u32) -> Option<(Pruned, bool)> {
    let pruned = prune(expr, columns, &domain(max_fragment));
    let addrs = interesting(max_fragment, [&pruned.may, &pruned.must]);
    let batch = batch(&addrs, columns);
    let answers = evaluate(expr, &batch)?;
    let computed = answers.iter().all(Result::is_ok);
    let each = batch.num_rows() / addrs.len();
    let rows = addrs.iter().flat_map(|&addr| repeat_n(addr, each));
    for (addr, answer) in rows.zip(answers) {
        let at =
            format!("{expr} at {addr:#x} of fragments 0..={max_fragment}: {answer:?}, {pruned:?}");
        match answer {
            Ok(Some(true)) => assert!(pruned.may.contains(addr), "dropped a row: {at}"),
            Ok(_) => assert!(!pruned.must.contains(addr), "kept a row unchecked: {at}"),
            Err(_) => {}
        }
    }
    assert!(pruned.must.is_subset(&pruned.may));
    Some((pruned, computed))
}

fn check(expr: &Expr, columns: &AddressColumns, max_fragment: u32) -> Pruned {
    check_rows(expr, columns, max_fragment).unwrap().0
}

/// Asserts what `filter` may and must select in fragments `0..=5`, and that DataFusion agrees.
#[track_caller]
fn assert_prunes(filter: &str, may: &str, must: &str) {
    let pruned = check(&sql(filter), &ALL, 5);
    let found = (pruned.may.to_string(), pruned.must.to_string());
    assert_eq!(found, (may.to_owned(), must.to_owned()), "{filter}");
}

#[track_caller]
fn assert_exact(filter: &str, rows: &str) {
    assert_prunes(filter, rows, rows);
}

#[track_caller]
fn assert_unknown(filter: &str) {
    assert_prunes(filter, "all", "[]");
}

const FRAG_2: &str = "[2:0..=2:4294967295]";

#[test]
fn compares_bare_columns() {
    assert_exact("_rowaddr = 4294967301", "[1:5]");
    assert_exact("4294967301 = _rowaddr", "[1:5]");
    assert_exact("_rowid = 4294967301", "[1:5]");
    assert_exact("_rowaddr <> 7", "[0:0..=0:6, 0:8..=5:4294967295]");
    assert_exact("_rowaddr < 7", "[0:0..=0:6]");
    assert_exact("_rowaddr <= 7", "[0:0..=0:7]");
    assert_exact("7 > _rowaddr", "[0:0..=0:6]");
    assert_exact("_rowaddr > 7", "[0:8..=5:4294967295]");
    assert_exact("_rowaddr >= 7", "[0:7..=5:4294967295]");
    // DataFusion moves literals to the right; a filter built by hand may have one on the left.
    let flipped = check(&lit(7_u64).gt(col(ROW_ADDR)), &ALL, 5);
    assert_eq!(flipped.may.to_string(), "[0:0..=0:6]");
    assert_exact("_fragid = 2", FRAG_2);
    assert_exact("_fragid > 1 AND _fragid < 3", FRAG_2);
}

#[test]
fn literals_outside_the_domain_select_all_or_nothing() {
    assert_exact("_rowaddr >= 0", "all");
    assert_exact("_rowaddr > -1", "all");
    assert_exact("_rowaddr = -1", "[]");
    assert_exact("_fragid = 6", "[]");
    assert_exact("_fragid <> 6", "all");
    assert_exact("_fragid <= 5", "all");
    assert_exact("_rowaddr <= 18446744073709551615", "all");
}

#[test]
fn understands_between() {
    assert_exact("_rowaddr BETWEEN 3 AND 5", "[0:3..=0:5]");
    assert_exact("_rowaddr BETWEEN 5 AND 3", "[]");
    assert_exact(
        "_fragid NOT BETWEEN 1 AND 4",
        "[0:0..=0:4294967295, 5:0..=5:4294967295]",
    );
    // With a NULL bound the other one can still make it FALSE, and NOT BETWEEN then TRUE.
    assert_exact("_rowaddr BETWEEN 3 AND NULL", "[]");
    assert_exact("_rowaddr NOT BETWEEN 3 AND NULL", "[0:0..=0:2]");
    let between = col(ROW_ADDR).between(lit(3_u64), lit(5_u64));
    assert!(check(&between, &ALL, 5).is_exact());
}

#[test]
fn understands_in_lists() {
    assert_exact("_rowaddr IN (7, 5, 5, 6, 1)", "[0:1, 0:5..=0:7]");
    assert_exact("_rowaddr NOT IN (0, 1)", "[0:2..=5:4294967295]");
    assert_exact("_rowaddr IN (7, NULL)", "[0:7]");
    assert_exact("_rowaddr NOT IN (7, NULL)", "[]");
    assert_exact("NOT (_rowaddr NOT IN (7, NULL))", "[0:7]");
    assert_exact("_fragid IN (2, 17)", FRAG_2);
    let member = |list| prune(&col(ROW_ADDR).in_list(list, false), &ALL, &domain(5));
    assert_eq!(member(vec![]).may, RowAddrSet::empty());
    assert_eq!(
        member(vec![lit(1_u64), col("x")]).must,
        RowAddrSet::from_addrs([1])
    );
    assert!(member(vec![lit(1_u64), col("x")]).may.is_all());
}

#[test]
fn null_is_neither_true_nor_false() {
    assert_exact("_rowaddr = NULL", "[]");
    assert_exact("NOT (_rowaddr = NULL)", "[]");
    assert_exact("(_rowaddr = NULL) IS NULL", "all");
    assert_exact("_rowaddr IS DISTINCT FROM NULL", "all");
    assert_exact("_rowaddr IS NOT DISTINCT FROM NULL", "[]");
    assert_exact("_rowaddr IS NOT DISTINCT FROM 7", "[0:7]");
    assert_exact(
        "_rowaddr IS DISTINCT FROM 7",
        "[0:0..=0:6, 0:8..=5:4294967295]",
    );
    assert_exact("_rowaddr IS NULL", "[]");
    assert_exact("(_rowaddr >> 32) IS NOT NULL", "all");
    assert_exact("(_fragid = 2 AND NULL) IS NOT FALSE", FRAG_2);
    assert_exact("(_fragid = 2 OR NULL) IS TRUE", FRAG_2);
    assert_exact("(_fragid = 2 OR NULL) IS NOT UNKNOWN", FRAG_2);
    assert_exact("(_fragid = 2 AND NULL) IS UNKNOWN", FRAG_2);
    assert_exact("(_fragid = 2) IS NOT FALSE", FRAG_2);
    assert_exact("(_fragid <> 2) IS FALSE", FRAG_2);
    assert_exact("(_fragid <> 2) IS NOT TRUE", FRAG_2);
}

#[test]
fn constants_are_facts() {
    assert_exact("TRUE", "all");
    assert_exact("FALSE", "[]");
    assert_exact("NULL", "[]");
    assert_exact("NOT FALSE", "all");
    let null = lit(ScalarValue::Boolean(None));
    assert!(
        prune(&null.clone().is_null(), &ALL, &domain(5))
            .must
            .is_all()
    );
    assert!(prune(&!null, &ALL, &domain(5)).may.is_empty());
}

#[test]
fn unknown_terms_stay_unknown_under_not() {
    let others = "[0:0..=1:4294967295, 3:0..=5:4294967295]";
    assert_unknown("x > 3");
    assert_unknown("NOT (x > 3)");
    assert_prunes("_fragid = 2 AND x > 3", FRAG_2, "[]");
    assert_prunes("NOT (_fragid = 2 AND x > 3)", "all", others);
    assert_prunes("_fragid = 2 OR x > 3", "all", FRAG_2);
    assert_prunes("NOT (_fragid = 2 OR x > 3)", others, "[]");
    assert_prunes("NOT (NOT (_fragid = 2 AND x > 3))", FRAG_2, "[]");
    assert_prunes("(_fragid = 2 AND x > 3) IS NOT TRUE", "all", others);
    assert_prunes("(_fragid = 2 AND x > 3) IS NULL", FRAG_2, "[]");
    assert_exact("(x > 3) IS NULL AND FALSE", "[]");
    assert_exact("_fragid = 2 AND (x > 3 OR _rowaddr >= 0)", FRAG_2);
}

#[test]
fn follows_monotone_chains() {
    assert_exact("(_rowaddr >> 32) = 2", FRAG_2);
    assert_exact("(_rowaddr >> 33) = 1", "[2:0..=3:4294967295]");
    assert_exact("(_rowaddr >> 64) = 9", "[0:9]");
    assert_exact("_rowaddr / CAST(4294967296 AS BIGINT UNSIGNED) = 2", FRAG_2);
    assert_exact("CAST(_rowaddr AS BIGINT) < 7", "[0:0..=0:6]");
    assert_exact("TRY_CAST(_fragid AS INT) IN (2, 99)", FRAG_2);
    assert_exact("CAST(_fragid AS DOUBLE) BETWEEN 1.5 AND 2.5", FRAG_2);
    assert_exact("CAST(_fragid AS DECIMAL(12, 3)) = 2.000", FRAG_2);
    assert_exact(
        "CAST(CAST(_fragid AS REAL) / 2.0 AS INT) = 1",
        "[2:0..=3:4294967295]",
    );
    assert_exact("_rowaddr = '7'", "[0:7]");
    assert_exact("_rowaddr < 7.5", "[0:0..=0:7]");
    assert_exact(
        "CAST(_rowaddr >> 32 AS BIGINT) IS NOT DISTINCT FROM 2",
        FRAG_2,
    );
    // Division by a signed literal is one of decimals, with four digits after the point.
    assert_exact("_rowaddr / 4294967296 = 2", "[2:0..=2:429496]");
}

#[test]
fn an_equal_float_is_a_range_of_addresses() {
    // Past 2^54 neighbouring doubles are four apart, and ties go to the even one.
    let pruned = check(
        &sql("CAST(_rowaddr AS DOUBLE) = 18014398509481988"),
        &ALL,
        1 << 24,
    );
    assert!(pruned.is_exact());
    let base = 1 << 54;
    assert_eq!(
        pruned.may,
        RowAddrSet::from_inclusive([(base + 3, base + 5)])
    );
}

#[test]
fn floats_follow_the_total_order() {
    let number = |value: f64| cast(col(FRAG_ID), DataType::Float64).lt_eq(lit(value));
    assert!(check(&number(f64::NAN), &ALL, 5).must.is_all());
    assert!(check(&number(-f64::NAN), &ALL, 5).may.is_empty());
    assert!(check(&number(-0.0), &ALL, 5).may.is_empty());
    assert!(check(&number(f64::INFINITY), &ALL, 5).must.is_all());
    assert_eq!(
        check(&number(0.0), &ALL, 5).may.fragments(),
        FragmentRanges::single(0)
    );
}

#[test]
fn casts_that_can_fail_in_the_domain_are_unknown() {
    // Built by hand: DataFusion would take the cast away before a provider sees it.
    let small = cast(col(ROW_ADDR), DataType::Int64).eq(lit(7_i64));
    assert!(check(&small, &ALL, (1 << 31) - 1).is_exact());
    assert!(check(&small, &ALL, 1 << 31).may.is_all());
    let safe = try_cast(col(ROW_ADDR), DataType::Int32).eq(lit(7_i32));
    assert!(prune(&safe, &ALL, &domain(0)).may.is_all());
    assert!(prune(&safe.is_null(), &ALL, &domain(0)).must.is_empty());
}

#[test]
fn casts_that_wrap_around_are_unknown() {
    // Each of these is defined at both ends of the domain, and yet 5 again on offset 5 of every
    // fragment.
    for narrow in [DataType::Decimal32(9, 0), DataType::Decimal64(18, 0)] {
        let five = ScalarValue::from(5_i64).cast_to(&narrow).unwrap();
        let filter = cast(col(ROW_ADDR), narrow).eq(lit(five));
        for max in [0, 3, u32::MAX] {
            assert!(check(&filter, &ALL, max).may.is_all());
        }
    }
}

#[test]
fn functions_that_are_not_monotone_are_unknown() {
    assert_unknown("_rowaddr % 2 = 0");
    assert_unknown("_rowaddr + 1 > 5");
    assert_unknown("(_rowaddr & 7) = 0");
    assert_unknown("_fragid / -1 > -3");
    assert_unknown("CAST(_fragid AS VARCHAR) > '10'");
    assert_unknown("_rowaddr = _rowid + 0");
    assert_unknown("_fragid = x");
    assert_unknown("_fragid = 2 AND x IS NOT NULL OR TRUE AND x > 1");
    assert_unknown("CASE x WHEN 1 THEN _fragid ELSE 3 END = 2");
}

#[test]
fn only_columns_that_denote_addresses_prune() {
    let none = AddressColumns::default();
    let stable = AddressColumns {
        row_id: false,
        ..ALL
    };
    for name in [ROW_ADDR, ROW_ID, FRAG_ID] {
        let filter = col(name).eq(lit(2_u64));
        assert!(check(&filter, &none, 5).may.is_all());
        assert_eq!(check(&filter, &stable, 5).is_exact(), name != ROW_ID);
        assert_eq!(
            SystemColumn::from_name(name).map(SystemColumn::name),
            Some(name)
        );
    }
    assert_eq!(SystemColumn::from_name("x"), None);
    let qualified =
        Expr::Column(datafusion::common::Column::new(Some("t"), FRAG_ID)).eq(lit(2_u64));
    assert_eq!(prune(&qualified, &ALL, &domain(5)).may.to_string(), FRAG_2);
}

#[test]
fn integers_compare_as_numbers_across_types() {
    let shifted = || col(ROW_ADDR) >> lit(32_i32);
    assert_eq!(
        check(&shifted().eq(lit(2_i8)), &ALL, 5).may.to_string(),
        FRAG_2
    );
    assert!(check(&shifted().lt(lit(-1_i64)), &ALL, 5).may.is_empty());
    assert!(check(&shifted().gt(lit(-1_i64)), &ALL, 5).must.is_all());
    let narrow = cast(col(FRAG_ID), DataType::UInt8);
    assert!(
        check(&narrow.clone().lt(lit(300_i64)), &ALL, 5)
            .must
            .is_all()
    );
    assert!(check(&narrow.eq(lit(u64::MAX)), &ALL, 5).may.is_empty());
    // Not coerced, and not integers: what DataFusion would make of it is its business.
    assert!(
        prune(&col(FRAG_ID).eq(lit(2.0)), &ALL, &domain(5))
            .may
            .is_all()
    );
    assert!(
        prune(&col(FRAG_ID).eq(lit("2")), &ALL, &domain(5))
            .may
            .is_all()
    );
}

#[test]
fn a_bound_that_is_not_understood_spoils_the_other() {
    let odd = (1_u64 << 53) + 1;
    for high in [lit(1e300), lit(ScalarValue::Float64(None))] {
        let filter = col(ROW_ADDR).between(lit(odd), high);
        assert!(check(&filter, &ALL, 1 << 22).may.is_all());
    }
}

#[test]
fn an_empty_domain_has_no_rows() {
    for filter in ["x > 3", "_fragid = 2", "CAST(_rowaddr AS INT) = 1", "TRUE"] {
        let pruned = prune(&sql(filter), &ALL, &AddressDomain::new(None));
        assert!(pruned.may.is_empty() && pruned.is_exact());
    }
    assert!(
        RowAddressPlan::from_filters(&[], &ALL, &AddressDomain::new(None))
            .rows()
            .is_empty()
    );
}

#[test]
fn long_lists_are_searched_at_once() {
    let addrs = || (0..10_000_u64).map(|n| n * 1_000_003);
    let bare = addrs()
        .map(|addr| lit(i64::try_from(addr).unwrap()))
        .collect();
    let pruned = prune(&col(ROW_ADDR).in_list(bare, false), &ALL, &domain(u32::MAX));
    assert_eq!(pruned.may, RowAddrSet::from_addrs(addrs()));
    let decimal = DataType::Decimal128(20, 0);
    let list = addrs().map(|addr| lit(ScalarValue::Decimal128(Some(addr.into()), 20, 0)));
    let filter = cast(col(ROW_ADDR), decimal).in_list(list.collect(), true);
    let pruned = prune(&filter, &ALL, &domain(u32::MAX));
    assert_eq!(pruned.must, RowAddrSet::from_addrs(addrs()).complement());
    assert!(pruned.is_exact());
}

/// Runs on a stack too small for recursion. The filter is leaked: dropping it would recurse.
fn prune_on_small_stack(expr: Expr) -> Pruned {
    let expr: &'static Expr = Box::leak(Box::new(expr));
    let prune = move || prune(expr, &ALL, &domain(5));
    let thread = std::thread::Builder::new()
        .stack_size(128 << 10)
        .spawn(prune);
    thread.unwrap().join().unwrap()
}

#[test]
fn deep_expressions_do_not_recurse() {
    let evens = (0..10_000_u64).map(|n| n * 2);
    let equals = || evens.clone().map(|addr| col(ROW_ADDR).eq(lit(addr)));
    let left_deep = equals().reduce(Expr::or).unwrap();
    assert_eq!(
        prune_on_small_stack(left_deep).must,
        RowAddrSet::from_addrs(evens.clone())
    );
    let right_deep = equals().reduce(|list, term| term.or(list)).unwrap();
    assert_eq!(
        prune_on_small_stack(right_deep).may,
        RowAddrSet::from_addrs(evens.clone())
    );
    let differs = equals().map(|equal| !equal).reduce(Expr::and).unwrap();
    assert_eq!(prune_on_small_stack(differs).may.iter().len(), 10_000);
    let casts = (0..10_000).fold(col("x").gt(lit(1_i64)), |term, _| !term);
    assert!(prune_on_small_stack(casts).may.is_all());
    let aliased = (0..10_000).fold(col(FRAG_ID), |term, n| {
        Expr::Alias(Alias::new(term, None::<&str>, format!("a{n}")))
    });
    assert_eq!(
        prune_on_small_stack(aliased.eq(lit(2_u64))).may.to_string(),
        FRAG_2
    );
    let mixed = (0..1_000_u64).fold(lit(true), |term, n| {
        let other = col(ROW_ADDR).eq(lit(n));
        if n % 2 == 0 {
            term.or(other)
        } else {
            term.and(!other)
        }
    });
    assert!(prune_on_small_stack(mixed).is_exact());
}

#[test]
fn long_chains_do_not_recurse() {
    let casts = (0..2_000).fold(col(FRAG_ID), |term, n| {
        let to = if n % 2 == 0 {
            DataType::Int64
        } else {
            DataType::Float64
        };
        cast(term, to)
    });
    assert_eq!(
        prune_on_small_stack(casts.eq(lit(2.0))).may.to_string(),
        FRAG_2
    );
    let quotients = (0..10_000).fold(lit(2_u64), |divisor, _| col(FRAG_ID) / divisor);
    assert!(prune_on_small_stack(quotients.eq(lit(1_u64))).may.is_all());
}

#[test]
fn a_plan_intersects_its_filters() {
    let filters = [
        sql("_fragid IN (1, 2)"),
        sql("x > 3"),
        sql("_rowaddr < 12884901888"),
        sql("_fragid <> 1"),
    ];
    let plan = RowAddressPlan::from_filters(&filters, &ALL, &domain(5));
    assert_eq!(plan.rows().to_string(), FRAG_2);
    assert_eq!(plan.fragments(), &FragmentRanges::single(2));
    assert_eq!(plan.residual(), [sql("x > 3")]);
    assert!(!plan.exact());
    let unfiltered = RowAddressPlan::from_filters(&[], &ALL, &domain(5));
    assert!(unfiltered.rows().is_all() && unfiltered.fragments().is_all() && unfiltered.exact());
    let unknown = RowAddressPlan::from_filters(&[sql("x > 3")], &ALL, &domain(5));
    assert!(unknown.rows().is_all() && !unknown.exact());
}

#[test]
fn a_filter_settled_by_another_is_not_residual() {
    let filters = [sql("_fragid = 2 OR x > 3"), sql("_fragid = 2")];
    assert!(RowAddressPlan::from_filters(&filters, &ALL, &domain(5)).exact());
    let contradiction = [sql("_fragid = 2"), sql("x > 3"), sql("_fragid = 3")];
    let plan = RowAddressPlan::from_filters(&contradiction, &ALL, &domain(5));
    assert!(plan.exact() && plan.rows().is_empty() && plan.fragments().is_empty());
}

#[test]
fn a_plan_only_narrows() {
    let mut plan = RowAddressPlan::from_fragments(FragmentRanges::from_ids([1, 2, 3]));
    plan.intersect_rows(&RowAddrSet::from_inclusive([((2 << 32) + 5, u64::MAX)]));
    assert_eq!(plan.rows().to_string(), "[2:5..=3:4294967295]");
    assert_eq!(plan.fragments().to_string(), "[2..4]");
    plan.intersect_fragments(&FragmentRanges::from_ranges([0..3, 9..12]));
    assert_eq!(plan.rows().to_string(), "[2:5..=2:4294967295]");
    plan.intersect_fragments(&FragmentRanges::all());
    plan.intersect_rows(&RowAddrSet::all());
    assert_eq!(plan.rows().to_string(), "[2:5..=2:4294967295]");
    assert_eq!(plan, RowAddressPlan::from_rows(plan.rows().clone()));
}

#[test]
fn an_index_result_becomes_a_plan() {
    let mut map = RowAddrTreeMap::new();
    map.insert_range(5..8);
    map.insert_fragment(3);
    map.insert(u64::MAX);
    let plan = RowAddressPlan::from_row_addr_map(&map);
    assert_eq!(
        plan.rows().to_string(),
        "[0:5..=0:7, 3:0..=3:4294967295, 4294967295:4294967295]"
    );
    assert_eq!(plan.rows().whole_fragments(), FragmentRanges::single(3));
    assert!(plan.exact());
    assert!(
        RowAddressPlan::from_row_addr_map(&RowAddrTreeMap::new())
            .rows()
            .is_empty()
    );
}

/// Numbers near which something happens.
fn number() -> impl Strategy<Value = i128> + Clone {
    let fragment = select(vec![
        0_i128,
        1,
        2,
        3,
        5,
        (1 << 31) - 1,
        1 << 31,
        (1 << 31) + 1,
        (1 << 32) - 1,
    ]);
    let offset = select(vec![0_i128, 1, 5, (1 << 32) - 1]);
    let edge = select(vec![
        1_i128 << 53,
        1 << 54,
        i128::from(i64::MAX),
        i128::from(u64::MAX),
        1 << 24,
        65_504,
    ]);
    let near = prop_oneof![
        3 => (fragment.clone(), offset).prop_map(|(id, offset)| (id << 32) + offset),
        3 => fragment,
        2 => -2..10_i128,
        1 => edge,
    ];
    (near, -1..=1_i128).prop_map(|(near, delta)| near + delta)
}

fn integer_of(value: i128, kind: u8) -> ScalarValue {
    let decimal = ScalarValue::Decimal128(Some(value), 38, 0);
    let to = match kind {
        0 => DataType::UInt64,
        1 => DataType::Int64,
        2 => DataType::Int32,
        3 => DataType::UInt32,
        _ => DataType::Int8,
    };
    let cast = decimal.cast_to(&to);
    cast.unwrap_or_else(|_| ScalarValue::Decimal128(Some(value), 20, 0))
}

fn integer_literal() -> impl Strategy<Value = ScalarValue> {
    (number(), 0..5_u8).prop_map(|(value, kind)| integer_of(value, kind))
}

/// Literals that have a value in every type coercion may choose.
fn numeric_literal() -> impl Strategy<Value = ScalarValue> {
    let halves = (number(), 0..3_i128).prop_map(|(value, half)| value * 10 + half * 5);
    let float = (halves, select(vec![DataType::Float32, DataType::Float64]));
    let float = float.prop_map(|(tenths, to)| {
        let decimal = ScalarValue::Decimal128(Some(tenths), 38, 1);
        decimal.cast_to(&to).unwrap()
    });
    let decimal = (number(), 0..10_000_i128).prop_map(|(value, part)| value * 10_000 + part);
    prop_oneof![
        6 => integer_literal(),
        3 => float,
        1 => number().prop_map(|value| ScalarValue::Decimal128(Some(value), 20, 0)),
        1 => decimal.prop_map(|value| ScalarValue::Decimal128(Some(value), 24, 4)),
    ]
}

fn literal() -> impl Strategy<Value = ScalarValue> {
    let special = select(vec![
        ScalarValue::Null,
        ScalarValue::UInt64(None),
        ScalarValue::Int32(None),
        ScalarValue::Float64(None),
        ScalarValue::Float64(Some(f64::NAN)),
        ScalarValue::Float64(Some(-f64::NAN)),
        ScalarValue::Float64(Some(-0.0)),
        ScalarValue::Float64(Some(f64::INFINITY)),
        ScalarValue::Float64(Some(f64::NEG_INFINITY)),
        ScalarValue::Float32(Some(1e30)),
    ]);
    let text = number().prop_map(|value| ScalarValue::Utf8(Some(value.to_string())));
    prop_oneof![8 => numeric_literal(), 2 => special, 1 => text]
}

fn address_column() -> impl Strategy<Value = Expr> {
    select(vec![ROW_ADDR, ROW_ID, FRAG_ID]).prop_map(col)
}

fn number_type() -> impl Strategy<Value = DataType> {
    use DataType::*;
    select(vec![
        Int8,
        Int32,
        Int64,
        UInt16,
        UInt32,
        UInt64,
        Float16,
        Float32,
        Float64,
        Decimal128(20, 0),
        Decimal128(38, 4),
        Decimal128(10, 2),
        Decimal32(9, 0),
        Decimal64(18, 0),
        Decimal256(76, 4),
        Utf8,
    ])
}

#[derive(Clone, Debug)]
enum Wrap {
    Cast(DataType, bool),
    Binary(Operator, ScalarValue),
}

impl Wrap {
    fn apply(self, operand: Expr) -> Expr {
        match self {
            Self::Cast(to, false) => cast(operand, to),
            Self::Cast(to, true) => try_cast(operand, to),
            Self::Binary(op, right) => {
                Expr::BinaryExpr(BinaryExpr::new(Box::new(operand), op, Box::new(lit(right))))
            }
        }
    }
}

fn wrap() -> impl Strategy<Value = Wrap> {
    let distance = (select(vec![0, 1, 31, 32, 33, 63, 64, 200]), 0..5_u8)
        .prop_map(|(by, kind)| integer_of(by, kind));
    let divisor = select(vec![
        ScalarValue::UInt64(Some(3)),
        ScalarValue::UInt64(Some(1 << 32)),
        ScalarValue::UInt64(Some(0)),
        ScalarValue::Int64(Some(7)),
        ScalarValue::Int64(Some(-7)),
        ScalarValue::Float64(Some(0.3)),
        ScalarValue::Float64(Some(1e300)),
        ScalarValue::Float64(Some(f64::INFINITY)),
        ScalarValue::Float32(Some(1e9)),
        ScalarValue::Decimal128(Some(25), 4, 2),
        ScalarValue::Decimal128(Some(1), 10, 9),
        ScalarValue::Int64(None),
    ]);
    let other = select(vec![
        Operator::Plus,
        Operator::Multiply,
        Operator::Modulo,
        Operator::BitwiseAnd,
    ]);
    prop_oneof![
        4 => (number_type(), any::<bool>()).prop_map(|(to, safe)| Wrap::Cast(to, safe)),
        3 => distance.prop_map(|by| Wrap::Binary(Operator::BitwiseShiftRight, by)),
        3 => divisor.prop_map(|by| Wrap::Binary(Operator::Divide, by)),
        1 => (other, integer_literal()).prop_map(|(op, by)| Wrap::Binary(op, by)),
    ]
}

/// Any operand, monotone or not.
fn any_operand() -> impl Strategy<Value = Expr> {
    let column = prop_oneof![6 => address_column(), 1 => Just(col("x"))];
    let wraps = prop_oneof![2 => Just(vec![]), 3 => vec(wrap(), 1..4)];
    (column, wraps).prop_map(|(column, wraps)| {
        wraps
            .into_iter()
            .fold(column, |expr, wrap| wrap.apply(expr))
    })
}

/// Operands that are defined on every domain, and must not be given up on.
fn total_operand() -> impl Strategy<Value = Expr> {
    let step = prop_oneof![
        select(vec![0_u64, 1, 31, 32, 40, 64])
            .prop_map(|by| Wrap::Binary(Operator::BitwiseShiftRight, by.into())),
        select(vec![1_u64, 3, 1 << 32]).prop_map(|by| Wrap::Binary(Operator::Divide, by.into())),
    ];
    let to = select(vec![
        DataType::Float64,
        DataType::Float32,
        DataType::Decimal128(24, 4),
    ]);
    (address_column(), vec(step, 0..3), proptest::option::of(to)).prop_map(|(column, steps, to)| {
        let expr = steps
            .into_iter()
            .fold(column, |expr, step| step.apply(expr));
        match to {
            Some(to) => cast(expr, to),
            None => expr,
        }
    })
}

fn comparisons() -> Vec<Operator> {
    use Operator::*;
    vec![
        Eq,
        NotEq,
        Lt,
        LtEq,
        Gt,
        GtEq,
        IsDistinctFrom,
        IsNotDistinctFrom,
    ]
}

fn binary(left: Expr, op: Operator, right: Expr) -> Expr {
    Expr::BinaryExpr(BinaryExpr::new(Box::new(left), op, Box::new(right)))
}

/// Comparisons, BETWEEN, IN and IS NULL over these operands and literals.
fn atom(
    operand: impl Strategy<Value = Expr> + Clone + 'static,
    literal: impl Strategy<Value = ScalarValue> + Clone + 'static,
) -> impl Strategy<Value = Expr> {
    let op = select(comparisons());
    let right = literal.prop_map(lit).boxed();
    let compared = (operand.clone(), op, right.clone(), any::<bool>());
    let bounded = (operand.clone(), right.clone(), right.clone(), any::<bool>());
    let listed = (operand.clone(), vec(right, 0..6), any::<bool>());
    prop_oneof![
        5 => compared.prop_map(|(value, op, literal, flip)| {
            if flip { binary(literal, op, value) } else { binary(value, op, literal) }
        }),
        1 => bounded.prop_map(|(value, low, high, negated)| {
            if negated { value.not_between(low, high) } else { value.between(low, high) }
        }),
        2 => listed.prop_map(|(value, list, negated)| value.in_list(list, negated)),
        1 => operand.clone().prop_map(Expr::is_null),
        1 => operand.prop_map(Expr::is_not_null),
    ]
}

/// Any nesting of connectives over these terms.
fn nested(term: impl Strategy<Value = Expr> + 'static) -> impl Strategy<Value = Expr> {
    term.prop_recursive(4, 16, 2, |inner| {
        let pair = (inner.clone(), inner.clone());
        prop_oneof![
            3 => pair.clone().prop_map(|(left, right)| left.and(right)),
            3 => pair.prop_map(|(left, right)| left.or(right)),
            2 => inner.clone().prop_map(|term| !term),
            2 => (inner, 0..6_u8).prop_map(|(term, test)| match test {
                0 => term.is_true(),
                1 => term.is_not_true(),
                2 => term.is_false(),
                3 => term.is_not_false(),
                4 => term.is_unknown(),
                _ => term.is_not_unknown(),
            }),
        ]
    })
}

fn constant_term() -> impl Strategy<Value = Expr> {
    select(vec![lit(true), lit(false), lit(ScalarValue::Boolean(None))])
}

fn any_filter() -> impl Strategy<Value = Expr> {
    let data =
        (select(comparisons()), -2..5_i64).prop_map(|(op, value)| binary(col("x"), op, lit(value)));
    let mixed =
        (any_operand(), select(comparisons())).prop_map(|(left, op)| binary(left, op, col("x")));
    let term = prop_oneof![
        8 => atom(any_operand().boxed(), literal().boxed()),
        2 => data,
        1 => mixed,
        1 => constant_term(),
    ];
    nested(term.boxed())
}

/// Filters over addresses alone that can be computed everywhere.
fn address_filter() -> impl Strategy<Value = Expr> {
    let atom = atom(total_operand().boxed(), numeric_literal().boxed());
    nested(prop_oneof![8 => atom, 1 => constant_term()].boxed())
}

fn any_columns() -> impl Strategy<Value = AddressColumns> {
    let some = any::<(bool, bool, bool)>().prop_map(|(row_addr, row_id, frag_id)| AddressColumns {
        row_addr,
        row_id,
        frag_id,
    });
    prop_oneof![4 => Just(ALL), 1 => some]
}

fn max_fragment() -> impl Strategy<Value = u32> {
    select(vec![0, 1, 3, 5, 255, (1 << 31) - 1, 1 << 31, u32::MAX])
}

proptest! {
    #[test]
    fn prunes_soundly(
        filter in any_filter(),
        max in max_fragment(),
        columns in any_columns(),
    ) {
        for form in forms(&filter) {
            check_rows(&form, &columns, max);
        }
    }

    #[test]
    fn prunes_address_filters_exactly(filter in address_filter(), max in max_fragment()) {
        // As written, types may differ in ways only coercion resolves.
        for form in forms(&filter).into_iter().skip(1) {
            if let Some((pruned, computed)) = check_rows(&form, &ALL, max) {
                prop_assert!(computed, "{form}");
                prop_assert!(pruned.is_exact(), "{form}: {pruned:?}");
            }
        }
    }

    #[test]
    fn chains_are_monotone_and_total(
        operand in any_operand(),
        max in max_fragment(),
        positions in vec(any::<u64>(), 1..50),
    ) {
        let pruner = Pruner { columns: ALL, domain: domain(max) };
        if let Some(Operand::Address(chain)) = pruner.operand(&operand) {
            let last = u64::try_from(chain.positions - 1).unwrap();
            let inside = positions.into_iter().map(|position| position % last.max(1));
            let positions: BTreeSet<u64> = inside.chain([0, last]).collect();
            let values = chain.evaluate(positions.into_iter().collect());
            prop_assert!(values.is_some(), "{operand} is not total on fragments 0..={max}");
            let values = values.unwrap();
            let rest = values.len() - 1;
            let (lower, upper) = (values.slice(0, rest), values.slice(1, rest));
            let ascending = cmp::lt_eq(&lower, &upper).unwrap();
            prop_assert_eq!(ascending.true_count(), rest, "{} is not monotone", operand);
        }
    }
}
