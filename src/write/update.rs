//! Updating rows: written anew as fragments of their own, and deleted where they were.
//!
//! ```text
//!  rows to change ──► Lance scans them in the view ──► new values, all from the row as it was
//!                                                          │
//!        deletion files ◄── their addresses ◄──────────────┴──► new fragments, with their row ids
//!               └──────────────── Operation::Update ───────────────────┘
//! ```
//!
//! Lance's own update takes values as text of its dialect, which says less than an expression does,
//! and computes one after the other from a row that the ones before have changed. So the values are
//! computed here, by DataFusion. What is committed is what Lance commits; tables whose rows only Lance
//! can write anew, with blobs of version 2 or row ids in data files, are refused.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::common::runtime::SpawnedTask;
use datafusion::common::tree_node::TreeNode;
use datafusion::common::{DFSchema, DataFusionError, Result as DFResult};
use datafusion::execution::context::SessionContext;
use datafusion::execution::{SendableRecordBatchStream, SessionState, TaskContext};
use datafusion::logical_expr::simplify::SimplifyContext;
use datafusion::logical_expr::{Cast, Expr, ExprSchemable};
use datafusion::optimizer::simplify_expressions::ExprSimplifier;
use datafusion::physical_expr::create_physical_expr;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{PhysicalExpr, execute_stream};
use futures::StreamExt;
use lance::Dataset;
use lance::dataset::rowids::SPILL_ROW_LINEAGE_CONFIG_KEY;
use lance::dataset::scanner::MaterializationStyle;
use lance::dataset::{InsertBuilder, WriteMode, WriteParams};
use lance_arrow::json::is_json_field;
use lance_core::datatypes::{BlobHandling, Field as LanceField};
use lance_file::version::ConcreteFileVersion;
use lance_select::RowAddrTreeMap;
use lance_table::format::{Fragment, RowIdMeta};
use lance_table::rowids::{RowIdSequence, rechunk_sequences, write_row_ids};
use lance_table::transaction::{Operation, Transaction, UpdateMode};
use roaring::RoaringTreemap;

use super::rows::{Selection, delete_rows};
use super::stored::stored;
use super::table::{RowsReport, TreeTable};
use crate::error::{Error, Result};
use crate::physical::chunk::{fragment_ids, keep_rows, numbers};
use crate::pruning::{FRAG_ID, ROW_ADDR, ROW_ID};
use crate::resolve::display_uri;
use crate::snapshot::Snapshot;

impl TreeTable {
    /// Sets columns of chosen rows of `snapshot` to the values of expressions over the row as it was.
    pub(super) async fn update_on(
        &self,
        session: &SessionContext,
        snapshot: &Arc<Snapshot>,
        selection: Selection,
        assignments: &[(String, Expr)],
    ) -> Result<RowsReport> {
        let values = Arc::new(Values::try_new(session, snapshot, assignments)?);
        let scope = selection.scope();
        let version = snapshot.version();
        let work = move |dataset: Dataset| async move {
            let dataset = Arc::new(dataset);
            let fields = values.fields_set(&dataset);
            let task = session.task_ctx();
            let (mut new_fragments, seen) = rewrite(&dataset, selection, values, task).await?;
            let rest = async {
                give_row_ids(&mut new_fragments, seen.row_ids)?;
                delete_rows(&dataset, &seen.addresses).await
            };
            let (updated_fragments, removed_fragment_ids) = match rest.await {
                Ok(deleted) => deleted,
                Err(e) => {
                    discard(&dataset, &new_fragments).await;
                    return Err(e);
                }
            };
            let rows = seen.addresses;
            let updated = rows.len();
            let operation = Operation::Update {
                removed_fragment_ids,
                updated_fragments,
                new_fragments,
                fields_modified: Vec::new(),
                compacted_sstables: Vec::new(),
                fields_for_preserving_frag_bitmap: fields,
                update_mode: Some(UpdateMode::RewriteRows),
                inserted_rows_filter: None,
                updated_fragment_offsets: None,
            };
            self.committer(dataset)
                .with_affected_rows(RowAddrTreeMap::from(rows))
                .execute(Transaction::new(version, operation, None))
                .await?;
            Ok(updated)
        };
        let (rows, commit) = self.on(snapshot, scope, work).await?;
        Ok(RowsReport { rows, commit })
    }
}

/// Row ids that are put together at a time: batches follow the ranges that were read, and a sequence
/// made of small pieces is longer.
const ROW_IDS_AT_A_TIME: usize = 1 << 16;

/// The rows of a change, as they went by.
#[derive(Default)]
struct Seen {
    addresses: RoaringTreemap,
    /// In order; none of a table without stable row ids.
    row_ids: Option<RowIds>,
}

#[derive(Default)]
struct RowIds {
    sequence: RowIdSequence,
    next: Vec<u64>,
}

impl RowIds {
    fn add(&mut self, ids: &[u64]) {
        self.next.extend_from_slice(ids);
        if self.next.len() >= ROW_IDS_AT_A_TIME {
            self.sequence.extend(self.next.as_slice().into());
            self.next.clear();
        }
    }

    fn finish(mut self) -> RowIdSequence {
        if self.sequence.is_empty() {
            return self.next.as_slice().into();
        }
        self.sequence.extend(self.next.as_slice().into());
        self.sequence
    }
}

/// Writes chosen rows with new values. Returns the new fragments, and which rows they were.
async fn rewrite(
    dataset: &Arc<Dataset>,
    selection: Selection,
    values: Arc<Values>,
    task: Arc<TaskContext>,
) -> lance::Result<(Vec<Fragment>, Seen)> {
    if dataset.get_fragments().is_empty() {
        return Ok((Vec::new(), Seen::default()));
    }
    let stable = dataset.manifest().uses_stable_row_ids();
    let mut scan = dataset.scan();
    scan.blob_handling(BlobHandling::AllBinary);
    scan.with_row_id().with_row_address();
    scan.materialization_style(MaterializationStyle::AllEarly);
    scan.use_scalar_index(false);
    let format = dataset.manifest().data_storage_format.lance_file_format();
    let mut afterwards = None;
    if let Selection::Rows(rows) = selection {
        if format == ConcreteFileVersion::V1 {
            afterwards = Some(Arc::new(rows));
        } else {
            scan.with_physical_row_addr_prefilter(RowAddrTreeMap::from(rows));
        }
    }
    let schema = Arc::clone(&values.written);
    let seen = Arc::new(Mutex::new(Seen {
        row_ids: stable.then(RowIds::default),
        ..Default::default()
    }));
    let noted = Arc::clone(&seen);
    // The plan's own rows: a stream of the scanner's would turn JSON into text.
    let rows = execute_stream(scan.create_plan().await?, task)?;
    let rows = rows.map(move |batch| {
        let (values, wanted) = (Arc::clone(&values), afterwards.clone());
        SpawnedTask::spawn_blocking(move || {
            let mut batch = batch?;
            if let Some(wanted) = wanted {
                batch = keep_rows(&batch, |address| wanted.contains(address))?;
            }
            Ok((values.apply(&batch)?, batch))
        })
    });
    let at_once = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let rows = rows.buffered(at_once).map(move |computed| {
        let computed: DFResult<_> =
            computed.map_err(|e| DataFusionError::ExecutionJoin(Box::new(e)))?;
        let (written, batch) = computed?;
        let mut seen = noted.lock().unwrap_or_else(PoisonError::into_inner);
        let addresses = numbers(&batch, ROW_ADDR)?;
        seen.addresses.extend(addresses.values().iter().copied());
        if let Some(row_ids) = &mut seen.row_ids {
            row_ids.add(numbers(&batch, ROW_ID)?.values());
        }
        Ok(written)
    });
    let params = WriteParams {
        mode: WriteMode::Append,
        ..Default::default()
    };
    let transaction = InsertBuilder::new(Arc::clone(dataset))
        .with_params(&params)
        .execute_uncommitted_stream(
            Box::pin(RecordBatchStreamAdapter::new(schema, rows)) as SendableRecordBatchStream
        )
        .await?;
    let Operation::Append { fragments } = transaction.operation else {
        return Err(lance::Error::internal("an insert that does not append"));
    };
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    Ok((fragments, seen))
}

/// Rows that are written anew keep their ids.
fn give_row_ids(fragments: &mut [Fragment], row_ids: Option<RowIds>) -> lance::Result<()> {
    let Some(row_ids) = row_ids else {
        return Ok(());
    };
    let sizes: Vec<u64> = fragments
        .iter()
        .map(|f| f.physical_rows.unwrap_or_default() as u64)
        .collect();
    let row_ids = rechunk_sequences([row_ids.finish()], sizes, false)?;
    for (fragment, ids) in fragments.iter_mut().zip(&row_ids) {
        fragment.row_id_meta = Some(RowIdMeta::Inline(write_row_ids(ids).into()));
    }
    Ok(())
}

/// Removes the files of fragments that will not be committed. What cannot be removed is an orphan, for
/// a cleanup to take.
async fn discard(dataset: &Dataset, fragments: &[Fragment]) {
    let Ok(store) = dataset.object_store(None).await else {
        return;
    };
    let data = dataset.branch_location().path.join("data");
    for file in fragments.iter().flat_map(|f| &f.files) {
        if file.base_id.is_none()
            && let Err(e) = store.delete(&data.clone().join(file.path.as_str())).await
        {
            tracing::debug!(%e, file = file.path, "a data file of a failed update stays");
        }
    }
}

/// What becomes of each column of a row that is updated.
#[derive(Debug)]
struct Values {
    /// The table, for messages.
    table: String,
    /// What expressions see: the table's columns as they are stored, and where the row is.
    seen: SchemaRef,
    /// The table's columns.
    written: SchemaRef,
    /// A value for each of the table's columns that is set.
    values: Vec<Option<Arc<dyn PhysicalExpr>>>,
}

impl Values {
    fn try_new(
        session: &SessionContext,
        snapshot: &Snapshot,
        assignments: &[(String, Expr)],
    ) -> Result<Self> {
        let table = display_uri(snapshot.uri()).to_string();
        let shell = snapshot.shell();
        if assignments.is_empty() {
            return Err(Error::invalid(format!(
                "an update of {table} that sets no column"
            )));
        }
        if shell
            .schema()
            .fields_pre_order()
            .any(LanceField::is_blob_v2)
        {
            return Err(Error::invalid(format!(
                "{table} has blob columns of version 2, which only Lance can write anew: give its UpdateBuilder a dataset by TreeTable::with_dataset"
            )));
        }
        let spills = shell.config().get(SPILL_ROW_LINEAGE_CONFIG_KEY);
        if snapshot.uses_stable_row_ids() && spills.is_some_and(|v| v.eq_ignore_ascii_case("true"))
        {
            return Err(Error::invalid(format!(
                "{table} keeps row ids in data files ({SPILL_ROW_LINEAGE_CONFIG_KEY}), which only Lance can carry over: give its UpdateBuilder a dataset by TreeTable::with_dataset"
            )));
        }
        let written = Arc::new(Schema::from(shell.schema()));
        let mut fields: Vec<_> = written.fields().iter().cloned().collect();
        for name in [ROW_ID, ROW_ADDR, FRAG_ID] {
            if written.column_with_name(name).is_none() {
                fields.push(Arc::new(Field::new(name, DataType::UInt64, false)));
            }
        }
        let seen = Arc::new(Schema::new(fields));
        let columns = DFSchema::try_from(Arc::clone(&seen))
            .map_err(|e| Error::datafusion(format!("cannot update {table}"), e))?;
        let session = session.state_ref();
        let session = session.read();
        // One context for all values: they agree what time it is.
        let context = SimplifyContext::builder()
            .with_schema(Arc::new(columns.clone()))
            .with_config_options(Arc::clone(session.config_options()));
        let context = match session.execution_props().query_execution_start_time {
            None => context.with_current_time(),
            time => context.with_query_execution_start_time(time),
        };
        let planner = Planner {
            session: &session,
            simplifier: ExprSimplifier::new(context.build()),
            columns: &columns,
        };
        let mut values: Vec<Option<Arc<dyn PhysicalExpr>>> =
            written.fields().iter().map(|_| None).collect();
        for (name, expr) in assignments {
            let blob = |name: &str| shell.schema().field(name).is_some_and(LanceField::is_blob);
            let read = expr.column_refs().into_iter().map(|c| c.name.as_str());
            if let Some(blob) = read.chain([name.as_str()]).find(|name| blob(name)) {
                return Err(Error::invalid(format!(
                    "{blob} of {table} is a blob column: an update leaves blobs as they are, and cannot read or set them"
                )));
            }
            let found = written.index_of(name).ok();
            let place = found.and_then(|index| values.get_mut(index));
            let (Some(place), Ok(field)) = (place, written.field_with_name(name)) else {
                return Err(Error::invalid(format!(
                    "{table} has no column {name} to set"
                )));
            };
            let value = planner.value(field, expr.clone()).map_err(|e| {
                Error::datafusion(format!("cannot set {name} of {table} to {expr}"), e)
            })?;
            if place.replace(value).is_some() {
                return Err(Error::invalid(format!("{name} of {table} is set twice")));
            }
        }
        Ok(Self {
            table,
            seen,
            written,
            values,
        })
    }

    /// Ids of the fields that are set, those inside them included.
    fn fields_set(&self, dataset: &Dataset) -> Vec<u32> {
        fn collect(field: &LanceField, into: &mut Vec<u32>) {
            into.extend(u32::try_from(field.id));
            for child in &field.children {
                collect(child, into);
            }
        }
        let mut ids = Vec::new();
        for (field, value) in dataset.schema().fields.iter().zip(&self.values) {
            if value.is_some() {
                collect(field, &mut ids);
            }
        }
        ids
    }

    /// The new rows for those of a scan.
    fn apply(&self, scanned: &RecordBatch) -> DFResult<RecordBatch> {
        let columns =
            self.seen
                .fields()
                .iter()
                .map(|field| match scanned.column_by_name(field.name()) {
                    Some(column) => Ok(Arc::clone(column)),
                    None => fragment_ids(scanned),
                });
        let rows = RecordBatch::try_new(
            Arc::clone(&self.seen),
            columns.collect::<DFResult<Vec<_>>>()?,
        )?;
        let fields = self.written.fields().iter();
        let columns = fields.zip(rows.columns()).zip(&self.values);
        let columns = columns.map(|((field, old), value)| match value {
            None => Ok(Arc::clone(old)),
            Some(value) => self.compute(value, field, &rows),
        });
        let columns = columns.collect::<Result<Vec<_>>>()?;
        Ok(RecordBatch::try_new(Arc::clone(&self.written), columns)?)
    }

    /// What `value` gives for `rows`, as `field` stores it.
    fn compute(
        &self,
        value: &Arc<dyn PhysicalExpr>,
        field: &Field,
        rows: &RecordBatch,
    ) -> Result<ArrayRef> {
        let failed = |e: DataFusionError| {
            Error::datafusion(format!("cannot set {} of {}", field.name(), self.table), e)
        };
        let value = value.evaluate(rows).map_err(failed)?;
        let value = value.into_array(rows.num_rows()).map_err(failed)?;
        stored(&self.table, field, &value)
    }
}

/// Makes expressions ready to be evaluated.
struct Planner<'a> {
    session: &'a SessionState,
    simplifier: ExprSimplifier,
    columns: &'a DFSchema,
}

impl Planner<'_> {
    fn value(&self, field: &Field, expr: Expr) -> DFResult<Arc<dyn PhysicalExpr>> {
        let expr = match expr {
            // Planners that know the stored form of JSON only make bytes of text, and of numbers.
            Expr::Cast(cast) if is_json_field(field) => *cast.expr,
            expr => expr,
        };
        // What types the parts of an expression are given can change what it is.
        let mut expr = self.simplifier.coerce(expr, self.columns)?;
        if !is_json_field(field) && expr.get_type(self.columns)? != *field.data_type() {
            expr = Expr::Cast(Cast::new(Box::new(expr), field.data_type().clone()));
        }
        self.physical(expr)
    }

    /// What a session makes of an expression in a query: some functions are there for the planner
    /// alone to take away.
    fn physical(&self, mut expr: Expr) -> DFResult<Arc<dyn PhysicalExpr>> {
        for rewrite in self.session.analyzer().function_rewrites() {
            expr = expr
                .transform_up(|e| rewrite.rewrite(e, self.columns, self.session.config_options()))?
                .data;
        }
        let expr = self.simplifier.simplify(expr)?;
        create_physical_expr(&expr, self.columns, self.session.execution_props())
    }
}
