//! Tables that follow the commits of others, while one query sees one version.
//!
//! ```text
//!   planner ── SchemaProvider::table("t") ──► LiveSchema                              (session)
//!                                               │  LiveTable::current: still the latest?  (check)
//!                                               ▼  if not: open the latest               (reopen)
//!                                 SnapshotProvider of one version, for this plan
//!   analyzer ── OneVersion: the scans of one table in a plan are of one version          (plan)
//! ```
//!
//! DataFusion looks every table of a statement up by name, once a name, before it plans, and that
//! look-up is the one place that may wait. Everything after it (the schema, which filters are exact,
//! counts, the scan) asks the provider that the look-up returned, so that is a provider of one
//! version, and not one that moves on. A [`LiveTable`] is what stays registered and makes them.

mod check;
mod plan;
mod reopen;
mod session;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::Result as DFResult;
use datafusion::logical_expr::{Expr, TableType};
use datafusion::physical_plan::ExecutionPlan;
use parking_lot::Mutex;

use crate::engine::TableOptions;
use crate::error::{Error, Result};
use crate::provider::{SnapshotProvider, SystemColumns};
use crate::resolve::display_uri;
use crate::snapshot::{OpenOptions, Snapshot};

pub(crate) use plan::OneVersion;
pub(crate) use session::{Unavailable, follow};

/// How often a registered table looks for newer versions.
///
/// A version number, a tag and a timestamp name one version for ever; a table registered with one of
/// them stays at that version whatever is said here.
///
/// Parsed from `always`, `off` or a time such as `500ms`, `5s`, `1m` or `1h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Refresh {
    /// At each planning: a query sees what was committed before it was planned. Costs one round trip
    /// of two small requests a query, three where commits leave a hint of the latest version.
    #[default]
    Always,
    /// At a planning, when the last look is at least this long ago: a query sees what was committed
    /// that long before it was planned.
    Every(Duration),
    /// Never: the table stays at the version it was opened at.
    Off,
}

impl Refresh {
    const UNITS: [(&'static str, u64); 4] =
        [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
}

impl FromStr for Refresh {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        match text.to_ascii_lowercase().as_str() {
            "always" => return Ok(Self::Always),
            "off" => return Ok(Self::Off),
            _ => {}
        }
        let digits = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = Self::UNITS.iter().find(|(name, _)| *name == unit.trim());
        let time = number
            .parse::<u64>()
            .ok()
            .zip(unit)
            .and_then(|(number, (_, milliseconds))| number.checked_mul(*milliseconds))
            .ok_or_else(|| {
                Error::invalid(format!(
                    "refresh: {text:?} is neither always nor off nor a time such as 500ms, 5s, 1m or 1h"
                ))
            })?;
        Ok(Self::Every(Duration::from_millis(time)))
    }
}

impl fmt::Display for Refresh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Always => f.write_str("always"),
            Self::Every(time) => write!(f, "{time:?}"),
            Self::Off => f.write_str("off"),
        }
    }
}

/// After this time a look for newer versions is a full one, as when a table is opened, and not only
/// at the next version. The cheap look can miss versions behind a gap (`Table::is_latest`); this
/// bounds for how long.
const FULL_LOOK: Duration = Duration::from_secs(60);

/// A table at the latest version of its branch, whatever that is by now.
///
/// Register it under a name in a session that [`Engine::register`] has taught; each query there sees
/// the version that was the latest when it was planned, and shows in its plan which that is. Elsewhere,
/// ask for [`LiveTable::current`] once a query. Cheap to clone; clones, and the sessions they are
/// registered in, share what is known.
///
/// # What follows and what does not
///
/// - A plan is of one version for as long as it is kept: a `DataFrame` that is collected twice, and a
///   prepared statement that is executed twice, give the rows of the version they were planned at. Plan
///   them again to see later ones.
/// - A view is brought to the current versions of its tables at each query, with the columns that it
///   was made with, found by name. When one of them is gone or has another type, a query of the view
///   is an error; the view can still be described and dropped.
/// - Two names of one table, a view beside its table, and the metadata functions of a table, are of
///   one version in one query. Tables of other locations have versions of their own, and no order
///   between their commits is promised.
/// - What a pinned table and a planned query read can be cleaned up meanwhile. The error says so.
///
/// [`Engine::register`]: crate::Engine::register
#[derive(Debug, Clone)]
pub struct LiveTable {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Where the table lies, and its branch.
    uri: String,
    open: OpenOptions,
    /// How old what is known may be.
    age: Duration,
    system: SystemColumns,
    known: Mutex<Known>,
    /// Held while looking, so that many queries look once.
    looking: tokio::sync::Mutex<()>,
}

/// The latest version that is known, and since when.
#[derive(Debug, Clone)]
struct Known {
    provider: SnapshotProvider,
    /// When the last look began that found it to be the latest; none when it is known not to be.
    looked: Option<Instant>,
    /// When the last full look began.
    looked_fully: Instant,
}

impl LiveTable {
    /// Whether this is the table at `uri`, opened with these options.
    pub(crate) fn is_at(&self, uri: &str, options: &TableOptions) -> bool {
        let shared = &self.shared;
        let age = match options.refresh {
            Refresh::Always | Refresh::Off => Duration::ZERO,
            Refresh::Every(age) => age,
        };
        shared.uri == uri
            && shared.system == options.system_columns
            && shared.age == age
            && shared.open.storage_options == options.storage_options
    }

    /// A table at the latest version on the branch that `snapshot` is on, opened with `open`.
    pub(crate) fn try_new(
        snapshot: Arc<Snapshot>,
        open: OpenOptions,
        system: SystemColumns,
        age: Duration,
        opened: Instant,
    ) -> Result<Self> {
        let uri = snapshot.uri().to_string();
        let known = Known {
            provider: SnapshotProvider::try_new(snapshot, system)?,
            looked: Some(opened),
            looked_fully: opened,
        };
        Ok(Self {
            shared: Arc::new(Shared {
                uri,
                open,
                age,
                system,
                known: Mutex::new(known),
                looking: tokio::sync::Mutex::default(),
            }),
        })
    }

    /// The table at its latest version, for one query: looks for a newer one when it is time to. One
    /// round trip when there is none; many callers at once look once.
    ///
    /// # Errors
    /// When that cannot be found out or the newer version cannot be opened; see [`Snapshot::open`].
    /// What was known stays known, and the next call looks again.
    pub async fn current(&self) -> Result<SnapshotProvider> {
        // A look that began after this call began sees every commit from before the call.
        let called = Instant::now();
        if let Some(provider) = self.recent(called) {
            return Ok(provider);
        }
        let _turn = self.shared.looking.lock().await;
        if let Some(provider) = self.recent(called) {
            return Ok(provider);
        }
        let known = self.shared.known.lock().clone();
        let known = self.look(known).await?;
        *self.shared.known.lock() = known.clone();
        Ok(known.provider.following(self))
    }

    fn recent(&self, called: Instant) -> Option<SnapshotProvider> {
        let known = self.shared.known.lock();
        // Of a version that was cleaned up there is a later one, whatever the time.
        let gone = known.provider.snapshot().gone.load(Ordering::Relaxed);
        let recent = !gone && known.looked?.checked_add(self.shared.age)? >= called;
        recent.then(|| known.provider.clone().following(self))
    }

    async fn look(&self, known: Known) -> Result<Known> {
        let began = Instant::now();
        let snapshot = known.provider.snapshot();
        let full = began.saturating_duration_since(known.looked_fully) >= FULL_LOOK;
        if !full {
            let table = snapshot.table(self.shared.open.limits).await?;
            if table.is_latest(snapshot.location()).await? {
                return Ok(Known {
                    looked: Some(began),
                    ..known
                });
            }
        }
        let latest = snapshot.latest(&self.shared.open, None).await?;
        let provider = if Arc::ptr_eq(&latest, snapshot) {
            known.provider
        } else {
            SnapshotProvider::try_new(latest, self.shared.system)?
        };
        Ok(Known {
            provider,
            looked: Some(began),
            looked_fully: began,
        })
    }

    /// Makes the next query look for a newer version: this process has just written one.
    pub(crate) fn expire(&self) {
        self.shared.known.lock().looked = None;
    }

    /// How the table is opened.
    pub(crate) fn open_options(&self) -> &OpenOptions {
        &self.shared.open
    }

    /// The latest version that is known, without a look.
    pub(crate) fn known(&self) -> SnapshotProvider {
        self.shared.known.lock().provider.clone()
    }

    /// Whether both follow the same table: the same place, reached in the same way.
    fn follows_same(&self, other: &Self) -> bool {
        let (a, b) = (&self.shared, &other.shared);
        Arc::ptr_eq(a, b) || a.uri == b.uri && a.open.storage_options == b.open.storage_options
    }
}

/// What a session sees of it that looks it up in a way of its own.
#[async_trait]
impl TableProvider for LiveTable {
    fn schema(&self) -> SchemaRef {
        self.known().schema()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    /// Refused. A provider that follows commits would not be of one version from the schema to the
    /// scan, and one that does not would go stale unseen.
    async fn scan(
        &self,
        _state: &dyn Session,
        _projection: Option<&Vec<usize>>,
        _filters: &[Expr],
        _limit: Option<usize>,
    ) -> DFResult<Arc<dyn ExecutionPlan>> {
        let table = display_uri(&self.shared.uri);
        Err(Error::invalid(format!(
            "{table} follows commits, and this session does not look its tables up through fragtree: \
             call Engine::register on the session (after replacing its catalogs), or query \
             LiveTable::current"
        ))
        .into())
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int64Array, RecordBatch};
    use lance::dataset::{InsertBuilder, WriteMode, WriteParams};

    use super::*;

    #[test]
    fn refresh_is_a_word_or_a_time() {
        for (text, expected) in [
            ("always", Refresh::Always),
            ("OFF", Refresh::Off),
            ("0s", Refresh::Every(Duration::ZERO)),
            ("500ms", Refresh::Every(Duration::from_millis(500))),
            (" 5 s", Refresh::Every(Duration::from_secs(5))),
            ("2m", Refresh::Every(Duration::from_secs(120))),
            ("1h", Refresh::Every(Duration::from_secs(3600))),
        ] {
            assert_eq!(text.parse::<Refresh>().expect("known"), expected, "{text}");
        }
        for text in [
            "",
            "5",
            "s",
            "-1s",
            "1.5s",
            "5 days",
            "99999999999999999999s",
            "18446744073709551615h",
        ] {
            let error = text.parse::<Refresh>().expect_err(text).to_string();
            assert!(error.contains("always nor off"), "{error}");
        }
    }

    /// The look that a table without a hint file cannot answer in short: version 1 is kept by a tag,
    /// version 2 is cleaned up, version 3 is the latest.
    #[tokio::test]
    async fn a_full_look_finds_a_version_behind_a_gap() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t.lance");
        let uri = path.to_str().expect("UTF-8");
        let append = || async {
            let ids = Arc::new(Int64Array::from_iter_values(0..3)) as _;
            let batch = RecordBatch::try_from_iter([("id", ids)]).expect("a batch");
            let params = WriteParams {
                mode: WriteMode::Append,
                ..Default::default()
            };
            let written = InsertBuilder::new(uri).with_params(&params);
            written.execute(vec![batch]).await.expect("written")
        };
        let first = append().await;
        first.tags().create("keep", 1).await.expect("tagged");
        let snapshot = Snapshot::open(uri, OpenOptions::default())
            .await
            .expect("opens");
        append().await;
        let last = append().await;
        last.cleanup_old_versions(chrono::TimeDelta::zero(), Some(true), Some(false))
            .await
            .expect("cleaned up");
        std::fs::remove_file(
            path.join("_versions")
                .join(crate::resolve::VERSION_HINT_FILE),
        )
        .expect("removed");
        let now = Instant::now();
        let Some(before) = now.checked_sub(FULL_LOOK) else {
            return;
        };
        for (opened, version) in [(now, 1), (before, 3)] {
            let live = LiveTable::try_new(
                Arc::clone(&snapshot),
                OpenOptions::default(),
                SystemColumns::default(),
                Duration::ZERO,
                opened,
            );
            let current = live.expect("made").current().await.expect("looked up");
            assert_eq!(current.snapshot().version(), version);
        }
    }
}
