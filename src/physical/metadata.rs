//! The plan node of the metadata tables: batches made from a snapshot, without data.

use std::fmt;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::common::{DataFusionError, Result as DFResult};
use datafusion::execution::TaskContext;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::metrics::{BaselineMetrics, MetricsSet, RecordOutput};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties,
    SendableRecordBatchStream,
};
use futures::TryStreamExt;
use futures::stream::BoxStream;

use super::metrics::NodeMetrics;
use super::scan::no_children;
use crate::error::Result;
use crate::tree_scan::WalkState;

/// Where the rows of a metadata table come from.
pub(crate) trait MetadataSource: fmt::Debug + Send + Sync {
    /// Starts producing batches of the given schema. Cheap: work starts with the first poll.
    fn batches(
        &self,
        schema: &SchemaRef,
        state: &WalkState,
    ) -> BoxStream<'static, Result<RecordBatch>>;

    /// What is read, for EXPLAIN.
    fn describe(&self) -> String;
}

/// Runs a [`MetadataSource`].
#[derive(Debug)]
pub(crate) struct MetadataExec {
    source: Arc<dyn MetadataSource>,
    schema: SchemaRef,
    properties: Arc<PlanProperties>,
    metrics: NodeMetrics,
}

impl MetadataExec {
    /// A scan of `source` that gives batches of `schema`.
    pub(crate) fn new(source: Arc<dyn MetadataSource>, schema: SchemaRef) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::clone(&schema)),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self {
            source,
            schema,
            properties: Arc::new(properties),
            metrics: NodeMetrics::default(),
        }
    }
}

impl DisplayAs for MetadataExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if matches!(t, DisplayFormatType::Default | DisplayFormatType::Verbose) {
            write!(f, "MetadataExec: ")?;
        }
        f.write_str(&self.source.describe())
    }
}

impl ExecutionPlan for MetadataExec {
    fn name(&self) -> &'static str {
        "MetadataExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        no_children(self, &children)
    }

    fn execute(
        &self,
        partition: usize,
        _context: Arc<TaskContext>,
    ) -> DFResult<SendableRecordBatchStream> {
        if partition != 0 {
            return Err(DataFusionError::Internal(format!(
                "partition {partition} of a metadata table with 1"
            )));
        }
        let state = WalkState::with_stats(Arc::clone(&self.metrics.tree));
        let baseline = BaselineMetrics::new(&self.metrics.set, partition);
        let batches = self
            .source
            .batches(&self.schema, &state)
            .map_ok(move |batch| batch.record_output(&baseline))
            .map_err(DataFusionError::from);
        Ok(Box::pin(RecordBatchStreamAdapter::new(
            Arc::clone(&self.schema),
            batches,
        )))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.metrics())
    }
}
