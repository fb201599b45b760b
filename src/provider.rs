//! The table provider: one snapshot as a DataFusion table.
//!
//! ```text
//!  filters ─► row addresses ─► fragment ranges        (pruning, exact or with a residual)
//!         └─► data filters  ─► Lance, in full
//!         └─► the rest      ─► stays above the scan
//! ```

use std::str::FromStr;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Fields, Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::common::{DataFusionError, Result as DFResult, Statistics};
use datafusion::logical_expr::dml::InsertOp;
use datafusion::logical_expr::utils::conjunction;
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown, TableType, Volatility};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::empty::EmptyExec;

use crate::dml::{self, Change, ChangeExec, Request};
use crate::error::{Error, Result};
use crate::live::LiveTable;
use crate::physical::chunk::{OutputColumn, ScanRequest};
use crate::physical::count::FragmentCountExec;
use crate::physical::scan::{FragmentScanExec, ScanPlan};
use crate::pruning::{
    AddressColumns, AddressDomain, FRAG_ID, Pruned, ROW_ADDR, ROW_ID, RowAddressPlan, SystemColumn,
    prune,
};
use crate::ranges::FragmentRanges;
use crate::snapshot::Snapshot;

/// The system columns a provider exposes. When one is on it is an ordinary column, also of
/// `SELECT *`; when off its name is unknown.
///
/// Parsed from a comma-separated list: `_rowaddr,_rowid,_fragid`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SystemColumns {
    /// `_rowid`: the row's id. Equals the address unless the table has stable row ids.
    pub row_id: bool,
    /// `_rowaddr`: fragment id times 2^32 plus offset.
    pub row_addr: bool,
    /// `_fragid`: the fragment's id.
    pub frag_id: bool,
}

impl SystemColumns {
    /// All of them.
    pub const ALL: Self = Self {
        row_id: true,
        row_addr: true,
        frag_id: true,
    };

    fn fields(self) -> impl Iterator<Item = (OutputColumn, FieldRef)> {
        // Lance declares the first two nullable, for scans that show deleted rows; ours never do.
        let field = |name: &str| Arc::new(Field::new(name, DataType::UInt64, false));
        [
            (self.row_id, OutputColumn::RowId, field(ROW_ID)),
            (self.row_addr, OutputColumn::RowAddr, field(ROW_ADDR)),
            (self.frag_id, OutputColumn::FragId, field(FRAG_ID)),
        ]
        .into_iter()
        .filter(|(on, _, _)| *on)
        .map(|(_, column, field)| (column, field))
    }
}

impl FromStr for SystemColumns {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut columns = Self::default();
        for name in text.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            match SystemColumn::from_name(name) {
                Some(SystemColumn::RowId) => columns.row_id = true,
                Some(SystemColumn::RowAddr) => columns.row_addr = true,
                Some(SystemColumn::FragId) => columns.frag_id = true,
                None => {
                    return Err(Error::invalid(format!(
                        "unknown system column {name:?}: there are {ROW_ADDR}, {ROW_ID} and {FRAG_ID}"
                    )));
                }
            }
        }
        Ok(columns)
    }
}

/// One version of a Lance table as a DataFusion table, in either layout.
#[derive(Debug, Clone)]
pub struct SnapshotProvider {
    snapshot: Arc<Snapshot>,
    schema: SchemaRef,
    columns: Arc<[OutputColumn]>,
    system: SystemColumns,
    addresses: AddressColumns,
    domain: AddressDomain,
    /// The table that this is a version of, when it was asked for its latest one.
    followed: Option<LiveTable>,
    /// What the statement that this is the target of asks for, or why it cannot be had.
    asked: Option<Result<Arc<Request>>>,
}

/// What becomes of one filter. Decided once, by [`SnapshotProvider::classify`]; both the answer to
/// the planner and the scan follow from it.
enum FilterUse {
    /// Wholly expressed by row addresses.
    Addresses(Pruned),
    /// Wholly applied by Lance.
    Lance,
    /// Narrows the rows, and is checked above the scan.
    Narrows(Pruned),
    /// Says nothing about addresses and is not for Lance.
    Above,
}

impl SnapshotProvider {
    /// A provider of `snapshot` that exposes `system` columns after the table's own.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] when the table has a column of its own with the name of a requested
    /// system column.
    pub fn try_new(snapshot: Arc<Snapshot>, system: SystemColumns) -> Result<Self> {
        let table = snapshot.schema();
        let mut fields: Vec<FieldRef> = table.fields().iter().cloned().collect();
        let mut columns: Vec<_> = (0..fields.len()).map(OutputColumn::Data).collect();
        for (column, field) in system.fields() {
            if table.column_with_name(field.name()).is_some() {
                return Err(Error::invalid(format!(
                    "{} has a column named {} of its own: leave it out of system_columns to use that",
                    crate::resolve::display_uri(snapshot.uri()),
                    field.name()
                )));
            }
            columns.push(column);
            fields.push(field);
        }
        let schema = Schema::new_with_metadata(Fields::from(fields), table.metadata().clone());
        let addresses = AddressColumns {
            row_addr: system.row_addr,
            // With stable ids a row id says nothing about where the row is.
            row_id: system.row_id && !snapshot.uses_stable_row_ids(),
            frag_id: system.frag_id,
        };
        Ok(Self {
            domain: AddressDomain::new(snapshot.max_fragment_id()),
            snapshot,
            schema: Arc::new(schema),
            columns: columns.into(),
            system,
            addresses,
            followed: None,
            asked: None,
        })
    }

    /// The same table as this one at another version.
    ///
    /// # Errors
    /// Those of [`SnapshotProvider::try_new`].
    pub(crate) fn at(&self, snapshot: Arc<Snapshot>) -> Result<Self> {
        Ok(Self {
            followed: self.followed.clone(),
            ..Self::try_new(snapshot, self.system)?
        })
    }

    /// The same version with the addresses of its rows as a column.
    ///
    /// # Errors
    /// Those of [`SnapshotProvider::try_new`].
    pub(crate) fn with_addresses(&self) -> Result<Self> {
        let system = SystemColumns {
            row_addr: true,
            ..self.system
        };
        Self::try_new(Arc::clone(&self.snapshot), system)
    }

    /// Remembers that this is the version of `live` for one query.
    pub(crate) fn following(mut self, live: &LiveTable) -> Self {
        self.followed = Some(live.clone());
        self
    }

    /// Remembers what a statement asks this table for.
    pub(crate) fn asked(mut self, request: Result<Arc<Request>>) -> Self {
        self.asked = Some(request);
        self
    }

    /// The table whose latest version this was when it was looked up; nothing when this version was
    /// asked for by itself.
    pub fn followed(&self) -> Option<&LiveTable> {
        self.followed.as_ref()
    }

    /// The version this table shows.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// Scans the rows of a row-address plan made elsewhere: by hand, or from an index search.
    ///
    /// `projection` indexes this provider's schema, any order, repeats allowed; none is all columns.
    /// The plan's residual filters must be ones Lance can apply.
    ///
    /// # Errors
    /// A plan whose residual cannot be applied here, or a projection outside the schema.
    pub async fn scan_plan(
        &self,
        state: &dyn Session,
        plan: RowAddressPlan,
        projection: Option<&Vec<usize>>,
        limit: Option<usize>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        for filter in plan.residual() {
            if !self.lance_applies(filter) {
                return Err(Error::invalid(format!(
                    "a row-address plan cannot carry the filter {filter}: check it above the scan"
                ))
                .into());
            }
        }
        let filter = conjunction(plan.residual().to_vec());
        self.plan(state, &plan, filter, Vec::new(), projection, limit)
            .await
    }

    async fn plan(
        &self,
        state: &dyn Session,
        rows: &RowAddressPlan,
        filter: Option<Expr>,
        residual: Vec<String>,
        projection: Option<&Vec<usize>>,
        limit: Option<usize>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        let request = self.request(rows, filter, projection, limit)?;
        let fragments = rows.fragments().intersect(&self.domain.fragments());
        let counts_rows = request.columns.is_empty() && request.filter.is_none();
        if fragments.is_empty() && !counts_rows {
            return Ok(Arc::new(EmptyExec::new(request.schema)));
        }
        // A plan over every fragment there can be is a plan over all: the root answers its count.
        let fragments = if fragments == self.domain.fragments() {
            FragmentRanges::all()
        } else {
            fragments
        };
        let scan = ScanPlan {
            estimate: self.snapshot.estimate(&fragments)?,
            total_fragments: self.snapshot.num_fragments().ok(),
            snapshot: Arc::clone(&self.snapshot),
            pinned: self.followed.is_none(),
            request: Arc::new(request),
            fragments,
            residual,
        };
        if counts_rows && scan.estimate.is_some() {
            let count = FragmentCountExec::count(scan, state.task_ctx()).await?;
            return Ok(Arc::new(count));
        }
        let partitions = state.config().target_partitions();
        Ok(Arc::new(FragmentScanExec::new(scan, partitions)))
    }

    fn request(
        &self,
        rows: &RowAddressPlan,
        filter: Option<Expr>,
        projection: Option<&Vec<usize>>,
        fetch: Option<usize>,
    ) -> DFResult<ScanRequest> {
        let (schema, columns) = match projection {
            None => (Arc::clone(&self.schema), self.columns.to_vec()),
            Some(indices) => {
                let columns = indices
                    .iter()
                    .map(|i| self.columns.get(*i).cloned())
                    .collect::<Option<Vec<_>>>()
                    .ok_or_else(|| {
                        DataFusionError::Plan(format!(
                            "projection {indices:?} of a table with {} columns",
                            self.columns.len()
                        ))
                    })?;
                (Arc::new(self.schema.project(indices)?), columns)
            }
        };
        // Whole fragments need no row selection; that keeps their counts exact.
        let whole = rows.rows().is_all() || rows.rows().cut_fragments().is_empty();
        Ok(ScanRequest {
            schema,
            columns,
            filter,
            rows: (!whole).then(|| Arc::new(rows.rows().clone())),
            fetch,
        })
    }

    fn classify(&self, filter: &Expr) -> FilterUse {
        let pruned = prune(filter, &self.addresses, &self.domain);
        if pruned.is_exact() {
            FilterUse::Addresses(pruned)
        } else if self.lance_applies(filter) {
            FilterUse::Lance
        } else if pruned.may.is_all() {
            FilterUse::Above
        } else {
            FilterUse::Narrows(pruned)
        }
    }

    /// Whether Lance can be given `filter` to apply in full. Only what is known to mean the same
    /// there: deterministic expressions over columns it finds by their plain name. Lance reads dots
    /// and backticks in a name as a path, and gives extension types another form when filtering.
    fn lance_applies(&self, filter: &Expr) -> bool {
        let mut applies = true;
        let walked = filter.apply(|expr| {
            applies &= match expr {
                Expr::Column(column) => self.plain_column(&column.name),
                Expr::ScalarFunction(call) => {
                    call.func.signature().volatility == Volatility::Immutable
                }
                Expr::Literal(..)
                | Expr::BinaryExpr(_)
                | Expr::Not(_)
                | Expr::IsNull(_)
                | Expr::IsNotNull(_)
                | Expr::IsTrue(_)
                | Expr::IsFalse(_)
                | Expr::IsUnknown(_)
                | Expr::IsNotTrue(_)
                | Expr::IsNotFalse(_)
                | Expr::IsNotUnknown(_)
                | Expr::Negative(_)
                | Expr::Between(_)
                | Expr::Case(_)
                | Expr::Cast(_)
                | Expr::TryCast(_)
                | Expr::InList(_)
                | Expr::Like(_) => true,
                _ => false,
            };
            Ok(if applies {
                TreeNodeRecursion::Continue
            } else {
                TreeNodeRecursion::Stop
            })
        });
        walked.is_ok() && applies
    }

    fn plain_column(&self, name: &str) -> bool {
        // Lance has virtual columns of such names, and takes a filter on one as a look-up by row.
        let virtual_name = name.starts_with("_row");
        let plain = !virtual_name
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        let field = self.snapshot.schema().field_with_name(name);
        plain && field.is_ok_and(|f| !has_extension(f))
    }
}

fn has_extension(field: &Field) -> bool {
    let marked = |key: &str| field.metadata().contains_key(key);
    marked("ARROW:extension:name")
        || marked("lance-encoding:blob")
        || match field.data_type() {
            DataType::Struct(fields) => fields.iter().any(|f| has_extension(f)),
            DataType::List(item)
            | DataType::LargeList(item)
            | DataType::FixedSizeList(item, _)
            | DataType::Map(item, _) => has_extension(item),
            _ => false,
        }
}

#[async_trait]
impl TableProvider for SnapshotProvider {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        let mut rows = RowAddressPlan::from_rows(crate::ranges::RowAddrSet::all());
        let mut data = Vec::new();
        let mut residual = Vec::new();
        for filter in filters {
            match self.classify(filter) {
                FilterUse::Addresses(pruned) => rows.intersect_rows(&pruned.may),
                FilterUse::Lance => data.push(filter.clone()),
                FilterUse::Narrows(pruned) => {
                    rows.intersect_rows(&pruned.may);
                    residual.push(filter.to_string());
                }
                FilterUse::Above => residual.push(filter.to_string()),
            }
        }
        // A filter that is still to be checked above must see its rows before a limit does.
        let limit = limit.filter(|_| residual.is_empty());
        self.plan(state, &rows, conjunction(data), residual, projection, limit)
            .await
    }

    fn supports_filters_pushdown(
        &self,
        filters: &[&Expr],
    ) -> DFResult<Vec<TableProviderFilterPushDown>> {
        let answers = filters.iter().map(|filter| match self.classify(filter) {
            FilterUse::Addresses(_) | FilterUse::Lance => TableProviderFilterPushDown::Exact,
            FilterUse::Narrows(_) => TableProviderFilterPushDown::Inexact,
            FilterUse::Above => TableProviderFilterPushDown::Unsupported,
        });
        Ok(answers.collect())
    }

    async fn insert_into(
        &self,
        _state: &dyn Session,
        input: Arc<dyn ExecutionPlan>,
        insert_op: InsertOp,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        Ok(dml::insert_plan(self, input, insert_op)?)
    }

    async fn delete_from(
        &self,
        state: &dyn Session,
        _filters: Vec<Expr>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        let change = dml::change(state, self, self.asked.as_ref()).await?;
        Ok(Arc::new(ChangeExec::try_new(self, change)?))
    }

    async fn update(
        &self,
        state: &dyn Session,
        _assignments: Vec<(String, Expr)>,
        _filters: Vec<Expr>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        let change = dml::change(state, self, self.asked.as_ref()).await?;
        Ok(Arc::new(ChangeExec::try_new(self, change)?))
    }

    async fn truncate(&self, state: &dyn Session) -> DFResult<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(ChangeExec::try_new(
            self,
            Change::truncation(state),
        )?))
    }

    fn statistics(&self) -> Option<Statistics> {
        let counts = self.snapshot.counts().ok().flatten()?;
        let mut statistics = Statistics::new_unknown(&self.schema);
        statistics.num_rows =
            datafusion::common::stats::Precision::Exact(usize::try_from(counts.visible_rows).ok()?);
        Some(statistics)
    }
}
