//! Versions in plans: every scan of a table in a plan is of one version, and a view is of the
//! current one.

use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use datafusion::catalog::TableProvider;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{DataFusionError, Result as DFResult};
use datafusion::datasource::{ViewTable, provider_as_source, source_as_provider};
use datafusion::logical_expr::LogicalPlan;
use datafusion::logical_expr::logical_plan::TableScan;
use datafusion::optimizer::AnalyzerRule;

use super::LiveTable;
use super::check::same_manifest;
use crate::error::{Error, Result};
use crate::functions;
use crate::provider::SnapshotProvider;
use crate::resolve::display_uri;
use crate::snapshot::Snapshot;

/// Makes the scans of one live table in one plan agree on a version.
///
/// A statement looks a name up once, but the same table may have two names, or come in through a view
/// as well; then a commit between the look-ups gives two versions. The later one is taken for all. It
/// runs before anything is pushed into a scan, so that what is pushed is judged by the version that
/// is read. The metadata functions of a statement follow its scans.
#[derive(Debug)]
pub(crate) struct OneVersion;

impl AnalyzerRule for OneVersion {
    fn name(&self) -> &'static str {
        "fragtree_one_version"
    }

    fn analyze(&self, plan: LogicalPlan, config: &ConfigOptions) -> DFResult<LogicalPlan> {
        let mut tables: Vec<Versions> = Vec::new();
        for scan in live_scans(&plan)? {
            match tables.iter_mut().find(|t| t.live.follows_same(&scan.live)) {
                Some(table) => table.add(scan),
                None => tables.push(Versions::new(scan)),
            }
        }
        tables.retain(|table| table.snapshots.len() > 1);
        let chosen = tables
            .iter()
            .map(|table| Ok((&table.live, table.choose()?)))
            .collect::<Result<Vec<_>>>()?;
        let plan = replace(plan, |scan| {
            let (_, snapshot) = chosen.iter().find(|(l, _)| l.follows_same(&scan.live))?;
            Some(Arc::clone(snapshot))
        })?;
        functions::agree(plan, &config.catalog)
    }
}

/// A view as it is now: its scans of live tables at their current versions. Nothing when they are.
///
/// A view keeps the columns that it was made with, whatever columns its tables gain.
///
/// # Errors
/// When a table's version cannot be had, or has lost or changed a column since the view was made.
pub(super) async fn current_view(view: &ViewTable) -> Result<Option<ViewTable>> {
    let failed = |e| Error::datafusion("cannot bring a view up to date", e);
    let scans = live_scans(view.logical_plan()).map_err(failed)?;
    let mut current: Vec<(LiveTable, Arc<Snapshot>)> = Vec::new();
    let mut stale = false;
    for scan in &scans {
        if current.iter().any(|(l, _)| l.follows_same(&scan.live)) {
            continue;
        }
        let provider = scan.live.current().await?;
        let snapshot = Arc::clone(provider.snapshot());
        for scan in &scans {
            if scan.live.follows_same(&live_of(&provider)?) && !scan.is_of(&snapshot) {
                scan.at(&snapshot)?;
                stale = true;
            }
        }
        current.push((scan.live.clone(), snapshot));
    }
    if !stale {
        return Ok(None);
    }
    let plan = replace(view.logical_plan().clone(), |scan| {
        let (_, snapshot) = current.iter().find(|(l, _)| l.follows_same(&scan.live))?;
        Some(Arc::clone(snapshot))
    });
    let plan = plan.map_err(failed)?;
    Ok(Some(ViewTable::new(plan, view.definition().cloned())))
}

/// A scan in a plan of a version of a live table.
struct LiveScan {
    scan: TableScan,
    provider: SnapshotProvider,
    live: LiveTable,
}

impl LiveScan {
    fn of(scan: &TableScan) -> Option<Self> {
        let provider = source_as_provider(&scan.source).ok()?;
        let provider = provider.downcast_ref::<SnapshotProvider>()?.clone();
        let live = provider.followed()?.clone();
        Some(Self {
            scan: scan.clone(),
            provider,
            live,
        })
    }

    fn is_of(&self, snapshot: &Arc<Snapshot>) -> bool {
        same_version(self.provider.snapshot(), snapshot)
    }

    /// The same scan of another version: the same columns, by name.
    fn at(&self, snapshot: &Arc<Snapshot>) -> Result<TableScan> {
        let provider = self.provider.at(Arc::clone(snapshot))?;
        let schema = provider.schema();
        let projection = if schema.fields() == self.provider.schema().fields() {
            self.scan.projection.clone()
        } else {
            Some(self.columns_in(&schema, snapshot)?)
        };
        TableScan::try_new(
            self.scan.table_name.clone(),
            provider_as_source(Arc::new(provider)),
            projection,
            self.scan.filters.clone(),
            self.scan.fetch,
        )
        .map_err(|e| Error::datafusion("cannot plan a scan of another version", e))
    }

    /// Where this scan's columns are in the schema of another version. What was planned over them
    /// holds for columns of the same type that are null in no more cases.
    fn columns_in(&self, schema: &SchemaRef, snapshot: &Snapshot) -> Result<Vec<usize>> {
        let indices = self.scan.projected_schema.fields().iter().map(|wanted| {
            let found = schema.column_with_name(wanted.name());
            match found {
                Some((index, field))
                    if field.data_type() == wanted.data_type()
                        && (wanted.is_nullable() || !field.is_nullable()) =>
                {
                    Ok(index)
                }
                found => Err(Error::invalid(format!(
                    "column {} of {} was {} when this was planned, and version {} has {}: make the \
                     view or the plan anew",
                    wanted.name(),
                    display_uri(snapshot.uri()),
                    described(wanted),
                    snapshot.version(),
                    found.map_or_else(|| "none".to_string(), |(_, field)| described(field)),
                ))),
            }
        });
        indices.collect()
    }
}

fn described(field: &arrow::datatypes::Field) -> String {
    let null = if field.is_nullable() { "" } else { " NOT NULL" };
    format!("{}{null}", field.data_type())
}

fn live_of(provider: &SnapshotProvider) -> Result<LiveTable> {
    let live = provider.followed().cloned();
    live.ok_or_else(|| Error::internal("a current version that follows nothing"))
}

/// The scans of one table in a plan, and their versions.
struct Versions {
    live: LiveTable,
    scans: Vec<LiveScan>,
    /// Each version once.
    snapshots: Vec<Arc<Snapshot>>,
}

impl Versions {
    fn new(scan: LiveScan) -> Self {
        Self {
            live: scan.live.clone(),
            snapshots: vec![Arc::clone(scan.provider.snapshot())],
            scans: vec![scan],
        }
    }

    fn add(&mut self, scan: LiveScan) {
        if !self.snapshots.iter().any(|s| scan.is_of(s)) {
            self.snapshots.push(Arc::clone(scan.provider.snapshot()));
        }
        self.scans.push(scan);
    }

    /// The version for all: the latest that every scan can be of.
    fn choose(&self) -> Result<Arc<Snapshot>> {
        let mut candidates: Vec<_> = self.snapshots.iter().collect();
        candidates.sort_by_key(|s| std::cmp::Reverse(s.version()));
        let serves = |snapshot: &Arc<Snapshot>| {
            let mut others = self.scans.iter().filter(|s| !s.is_of(snapshot));
            others.all(|s| s.at(snapshot).is_ok())
        };
        if let Some(snapshot) = candidates.iter().copied().find(|s| serves(s)) {
            return Ok(Arc::clone(snapshot));
        }
        let versions: Vec<_> = candidates.iter().map(|s| s.version().to_string()).collect();
        Err(Error::Conflict {
            message: format!(
                "versions {} of {} came together in one query, and their columns differ: a commit \
                 changed them while the query was planned; run it again",
                versions.join(" and "),
                display_uri(self.snapshots.first().map_or("", |s| s.uri()))
            ),
            retryable: true,
        })
    }
}

fn same_version(a: &Arc<Snapshot>, b: &Arc<Snapshot>) -> bool {
    Arc::ptr_eq(a, b) || same_manifest(a.location(), b.location())
}

fn live_scans(plan: &LogicalPlan) -> DFResult<Vec<LiveScan>> {
    let mut scans = Vec::new();
    plan.apply_with_subqueries(|node| {
        if let LogicalPlan::TableScan(scan) = node {
            scans.extend(LiveScan::of(scan));
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(scans)
}

/// Puts other versions into a plan: those that `version` gives for its scans of live tables.
fn replace(
    plan: LogicalPlan,
    version: impl Fn(&LiveScan) -> Option<Arc<Snapshot>>,
) -> DFResult<LogicalPlan> {
    let replaced = plan.transform_up_with_subqueries(|node| {
        let LogicalPlan::TableScan(scan) = &node else {
            return Ok(Transformed::no(node));
        };
        let Some(live) = LiveScan::of(scan) else {
            return Ok(Transformed::no(node));
        };
        match version(&live) {
            Some(snapshot) if !live.is_of(&snapshot) => {
                let scan = live.at(&snapshot).map_err(DataFusionError::from)?;
                Ok(Transformed::yes(LogicalPlan::TableScan(scan)))
            }
            _ => Ok(Transformed::no(node)),
        }
    })?;
    if !replaced.transformed {
        return Ok(replaced.data);
    }
    // Metadata of a schema, and of columns, goes up through the plan.
    let plan = replaced
        .data
        .transform_up_with_subqueries(|node| Ok(Transformed::yes(node.recompute_schema()?)))?;
    Ok(plan.data)
}
