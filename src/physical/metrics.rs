//! Counters of our plan nodes, as EXPLAIN ANALYZE shows them.
//!
//! A node's counters are shared by its partitions, so they are reported once for the node and not
//! per partition.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::metrics::{
    Count, ExecutionPlanMetricsSet, Metric, MetricValue, MetricsSet,
};

use crate::tree::object::ReadStats;

/// What the Lance scans below a node cost. Counts what Lance's own scheduler reports for data files;
/// deletion files and files smaller than one block are read past it.
#[derive(Debug, Default)]
pub(crate) struct DataStats {
    /// Lance scans started: one for each chunk of fragments.
    pub scans: AtomicU64,
    /// Fragments handed to them.
    pub fragments: AtomicU64,
    /// Requests for data that the store sees: Lance's "iops". What it calls requests are its own, each
    /// of which may read several places of a file.
    pub requests: AtomicU64,
    /// Bytes of data.
    pub bytes: AtomicU64,
}

/// The counters of one node.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeMetrics {
    pub set: ExecutionPlanMetricsSet,
    pub tree: Arc<ReadStats>,
    pub data: Arc<DataStats>,
}

impl NodeMetrics {
    /// Everything counted so far.
    pub(crate) fn metrics(&self) -> MetricsSet {
        let mut metrics = self.set.clone_inner();
        let tree = self.tree.snapshot();
        let data = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        for (name, value) in [
            ("tree_requests", tree.requests),
            ("tree_bytes", tree.bytes),
            ("nodes_opened", tree.nodes_opened),
            ("leaves_opened", tree.leaves_opened),
            ("tree_cache_hits", tree.cache_hits),
            ("children_skipped", tree.children_skipped),
            ("fragments_resolved", tree.fragments_resolved),
            ("data_scans", data(&self.data.scans)),
            ("fragments_scanned", data(&self.data.fragments)),
            ("data_requests", data(&self.data.requests)),
            ("data_bytes", data(&self.data.bytes)),
        ] {
            let count = Count::new();
            count.add(usize::try_from(value).unwrap_or(usize::MAX));
            let value = MetricValue::Count {
                name: name.into(),
                count,
            };
            metrics.push(Arc::new(Metric::new(value, None)));
        }
        metrics
    }
}

/// Adds up what a finished Lance plan reports, when it is dropped: also when its stream is not
/// drained.
#[derive(Debug)]
pub(crate) struct PlanCost {
    pub plan: Arc<dyn ExecutionPlan>,
    pub stats: Arc<DataStats>,
}

impl Drop for PlanCost {
    fn drop(&mut self) {
        let mut below = vec![&self.plan];
        while let Some(plan) = below.pop() {
            if let Some(metrics) = plan.metrics() {
                let sum = |name| metrics.sum_by_name(name).map_or(0, |v| v.as_usize() as u64);
                self.stats
                    .requests
                    .fetch_add(sum("iops"), Ordering::Relaxed);
                self.stats
                    .bytes
                    .fetch_add(sum("bytes_read"), Ordering::Relaxed);
            }
            below.extend(plan.children());
        }
    }
}
