//! Plans that write when they are executed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{Array, RecordBatch, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::TableProvider;
use datafusion::common::Result as DFResult;
use datafusion::datasource::sink::{DataSink, DataSinkExec};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::Expr;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricBuilder, MetricsSet};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties, execute_stream,
};
use datafusion::prelude::SessionContext;
use futures::{StreamExt, stream};

use super::{Change, Rows, writable};
use crate::error::{Error, Result};
use crate::live::LiveTable;
use crate::provider::SnapshotProvider;
use crate::resolve::display_uri;
use crate::write::{TreeTable, addresses_in, stored};

/// A plan that appends the rows of `input` to the table of `provider`, or replaces its rows by them.
///
/// # Errors
/// Those of [`writable`]; [`Error::InvalidInput`] for `REPLACE INTO`.
pub(crate) fn insert_plan(
    provider: &SnapshotProvider,
    input: Arc<dyn ExecutionPlan>,
    op: InsertOp,
) -> Result<Arc<dyn ExecutionPlan>> {
    let overwrite = match op {
        InsertOp::Append => false,
        InsertOp::Overwrite => true,
        InsertOp::Replace => {
            return Err(Error::invalid(
                "REPLACE INTO needs a key that a Lance table does not have: use write::TreeTable::merge_insert",
            ));
        }
    };
    let (table, live) = writable(provider)?;
    let wanted = provider.schema();
    let names = |schema: &SchemaRef| -> Vec<String> {
        schema.fields().iter().map(|f| f.name().clone()).collect()
    };
    if names(&input.schema()) != names(&wanted) {
        return Err(Error::invalid(format!(
            "cannot insert columns {:?} into {}, whose columns are {:?}: give them in that order",
            names(&input.schema()),
            display_uri(table.uri()),
            names(&wanted)
        )));
    }
    // DataFusion's own check of NOT NULL knows no names: the sink has a better one.
    let open = wanted.fields().iter();
    let open = open.map(|field| field.as_ref().clone().with_nullable(true));
    let sink = InsertSink {
        table,
        live,
        written: Arc::clone(provider.snapshot().schema()),
        schema: Arc::new(Schema::new(open.collect::<Vec<_>>())),
        overwrite,
    };
    Ok(Arc::new(DataSinkExec::new(input, Arc::new(sink), None)))
}

/// Takes the rows of an `INSERT`.
#[derive(Debug)]
struct InsertSink {
    table: TreeTable,
    live: LiveTable,
    /// Of the rows that are given: columns that say where a row is come after the table's own.
    schema: SchemaRef,
    /// Of the rows that are written.
    written: SchemaRef,
    overwrite: bool,
}

/// Rows as the table stores them. The planner knows which columns may be null; the table says so.
fn fitted(table: &str, schema: &SchemaRef, given: &RecordBatch) -> Result<RecordBatch> {
    let placed = given.columns().iter().zip(given.schema_ref().fields());
    for (column, field) in placed.skip(schema.fields().len()) {
        if column.null_count() < column.len() {
            return Err(Error::invalid(format!(
                "{} is where a row is and not part of it: it cannot be inserted into {table}",
                field.name()
            )));
        }
    }
    let columns = schema.fields().iter().zip(given.columns());
    let columns = columns.map(|(field, column)| stored(table, field, column));
    let columns = columns.collect::<Result<Vec<_>>>()?;
    RecordBatch::try_new(Arc::clone(schema), columns)
        .map_err(|e| Error::datafusion(format!("cannot insert rows into {table}"), e))
}

impl DisplayAs for InsertSink {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.overwrite {
            "overwrite"
        } else {
            "append"
        };
        write!(f, "LanceTable({verb}, {})", display_uri(self.table.uri()))
    }
}

#[async_trait]
impl DataSink for InsertSink {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    async fn write_all(
        &self,
        data: SendableRecordBatchStream,
        _context: &Arc<TaskContext>,
    ) -> DFResult<u64> {
        let rows = Arc::new(AtomicU64::new(0));
        let (counted, schema) = (Arc::clone(&rows), Arc::clone(&self.written));
        let table = display_uri(self.table.uri()).to_string();
        let fitting = data.map(move |batch| {
            let batch = batch?;
            counted.fetch_add(batch.num_rows() as u64, Ordering::Relaxed);
            Ok(fitted(&table, &schema, &batch)?)
        });
        let fitting = RecordBatchStreamAdapter::new(Arc::clone(&self.written), fitting);
        if self.overwrite {
            self.table.overwrite(Box::pin(fitting)).await?;
        } else {
            self.table.append(Box::pin(fitting)).await?;
        }
        self.live.expire();
        Ok(rows.load(Ordering::Relaxed))
    }
}

/// Deletes or updates rows when it is executed, and says how many.
#[derive(Debug, Clone)]
pub(crate) struct ChangeExec {
    table: TreeTable,
    live: LiveTable,
    change: Change,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl ChangeExec {
    /// A plan that makes `change` through `provider`.
    ///
    /// # Errors
    /// Those of [`writable`].
    pub(crate) fn try_new(provider: &SnapshotProvider, change: Change) -> Result<Self> {
        let (table, live) = writable(provider)?;
        let schema = Schema::new(vec![Field::new("count", DataType::UInt64, false)]);
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::new(schema)),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Final,
            Boundedness::Bounded,
        );
        Ok(Self {
            table,
            live,
            change,
            properties: Arc::new(properties),
            metrics: ExecutionPlanMetricsSet::new(),
        })
    }

    async fn run(&self, context: Arc<TaskContext>) -> Result<u64> {
        let Change {
            rows,
            assignments,
            session,
        } = &self.change;
        let session = &SessionContext::new_with_state(session.as_ref().clone());
        let (table, deletes) = (&self.table, assignments.is_empty());
        let report = match rows {
            Rows::Where(filters) if deletes => table.delete_in(session, filters).await?,
            Rows::Where(filters) => table.update_in(session, filters, assignments).await?,
            Rows::Planned(snapshot, plan) => {
                let failed = |e| {
                    let table = display_uri(self.table.uri());
                    Error::datafusion(format!("cannot find the rows of {table} to change"), e)
                };
                let found = execute_stream(Arc::clone(plan), context).map_err(failed)?;
                let addresses = addresses_in(found).await.map_err(failed)?;
                if deletes {
                    table.delete_rows(snapshot, addresses).await?
                } else {
                    let update = table.update_rows(session, snapshot, addresses, assignments);
                    update.await?
                }
            }
        };
        self.live.expire();
        let commit = report.commit;
        for (name, value) in [
            ("rows_changed", report.rows),
            ("lost_races", commit.lost_races),
            ("manifest_bytes", commit.manifest_bytes),
            ("tree_objects_read", commit.objects_read),
            ("tree_objects_written", commit.objects_written),
        ] {
            let counter = MetricBuilder::new(&self.metrics).global_counter(name);
            counter.add(usize::try_from(value).unwrap_or(usize::MAX));
        }
        Ok(report.rows)
    }
}

impl DisplayAs for ChangeExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |filters: &[Expr]| {
            let shown: Vec<_> = filters.iter().map(ToString::to_string).collect();
            shown.join(" AND ")
        };
        let Change {
            rows, assignments, ..
        } = &self.change;
        write!(f, "ChangeExec: {}", display_uri(self.table.uri()))?;
        if assignments.is_empty() {
            write!(f, ", delete")?;
        } else {
            let set: Vec<_> = assignments
                .iter()
                .map(|(column, value)| format!("{column} = {value}"))
                .collect();
            write!(f, ", set [{}]", set.join(", "))?;
        }
        match rows {
            Rows::Where(filters) => write!(f, " where [{}]", list(filters)),
            Rows::Planned(snapshot, _) => write!(f, " rows of version {}", snapshot.version()),
        }
    }
}

impl ExecutionPlan for ChangeExec {
    fn name(&self) -> &'static str {
        "ChangeExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        match &self.change.rows {
            Rows::Where(_) => Vec::new(),
            Rows::Planned(_, plan) => vec![plan],
        }
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        let mut changed = self.as_ref().clone();
        match (&mut changed.change.rows, children.as_slice()) {
            (Rows::Where(_), []) => {}
            (Rows::Planned(_, plan), [child]) => *plan = Arc::clone(child),
            _ => return Err(Error::internal("a change with other children").into()),
        }
        Ok(Arc::new(changed))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> DFResult<SendableRecordBatchStream> {
        if partition != 0 {
            return Err(Error::internal(format!("partition {partition} of a change")).into());
        }
        let this = self.clone();
        let schema = Arc::clone(self.properties.equivalence_properties().schema());
        let result = Arc::clone(&schema);
        let rows = stream::once(async move {
            let rows = this.run(context).await?;
            let counts = UInt64Array::from(vec![rows]);
            Ok(RecordBatch::try_new(result, vec![Arc::new(counts)])?)
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))
    }
}
