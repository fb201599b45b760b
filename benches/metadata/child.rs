//! One measurement, in a process that has done nothing before.
//!
//! The clock starts with a session ready and the table unopened, and stops when the answer is there.
//! A session is made once in a service's life; sides get the same one.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::catalog::TableProvider;
use datafusion::physical_plan::collect;
use datafusion::prelude::SessionContext;
use fragtree::write::{ConvertOptions, convert};
use fragtree::{
    Engine, EngineOptions, FragmentRanges, OpenOptions, Snapshot, SystemColumns, TableOptions,
    WalkOptions, WalkState,
};
use futures::TryStreamExt;
use lance::Dataset;
use lance::datafusion::LanceTableProvider;
use lance::dataset::builder::DatasetBuilder;
use lance_io::object_store::{ObjectStoreParams, WrappingObjectStore};
use lance_table::format::{Fragment, pb};
use prost::Message;
use tokio::task::JoinSet;

use crate::meter::Meter;
use crate::plan::{Result, SLOW_MS, Sample, Side, Store, Task, Work};

/// Bytes of the object cache that queries share: fewer than the objects they touch.
const SHARED_CACHE: u64 = 8 << 20;

/// Rounds of a scan that alternates between sides.
const WARM_ROUNDS: usize = 7;

/// Does what `task` says. One sample but for works that alternate between sides.
pub(crate) async fn run(task: &Task) -> Result<Vec<(Side, Sample)>> {
    if task.work == Work::WarmScan {
        return warm_scan(task).await;
    }
    let run = Run::new(task);
    let sample = match task.work {
        Work::Nothing => run.finish(Clock::start(), "nothing".into()),
        Work::Open => run.open().await,
        Work::Count => run.sql("SELECT COUNT(*) FROM t").await,
        Work::Point => run.sql(&row_query(task, task.facts.point)).await,
        Work::Range => run.sql(&range_query(task)).await,
        Work::Limit => run.limit().await,
        Work::Scan => {
            run.sql(task.facts.scan.as_deref().ok_or("nothing to scan")?)
                .await
        }
        Work::Record => run.record().await,
        Work::Handles => run.walk(Touch::Counts).await,
        Work::Records => run.walk(Touch::Records).await,
        Work::Verify => run.walk(Touch::Hash).await,
        Work::Convert => run.convert().await,
        Work::PointsInTurn => run.queries(points(task), false).await,
        Work::PointsAtOnce => run.queries(points(task), true).await,
        Work::CountsInTurn => run.queries(counts(task), false).await,
        Work::CountsAtOnce => run.queries(counts(task), true).await,
        Work::WarmScan => return Err("not one sample".into()),
    };
    Ok(vec![(task.side, sample?)])
}

fn row_query(task: &Task, address: u64) -> String {
    let columns = task.facts.columns.join(", ");
    format!("SELECT {columns} FROM t WHERE _rowaddr = {address}")
}

/// Each side gets the form it does best: Lance scans every fragment for a range of addresses, and
/// takes rows for a list of them.
fn range_query(task: &Task) -> String {
    let columns = task.facts.range_columns.join(", ");
    let (first, last) = task.facts.range;
    match task.side {
        Side::Lance | Side::LanceUnordered => {
            let rows: Vec<_> = task.facts.range_rows.iter().map(u64::to_string).collect();
            format!(
                "SELECT {columns} FROM t WHERE _rowaddr IN ({})",
                rows.join(", ")
            )
        }
        Side::Flat | Side::Tree => {
            format!("SELECT {columns} FROM t WHERE _fragid BETWEEN {first} AND {last}")
        }
    }
}

fn points(task: &Task) -> Vec<String> {
    task.facts
        .points
        .iter()
        .map(|p| row_query(task, *p))
        .collect()
}

/// Counts whose edges fall inside leaves, all over the table.
fn counts(task: &Task) -> Vec<String> {
    let all = u64::from(task.facts.fragments);
    (0..64)
        .map(|i| {
            let first = all * i / 64 + all / 200;
            let last = (first + all / 3).min(all - 1 - all / 1000);
            format!("SELECT COUNT(*) FROM t WHERE _fragid BETWEEN {first} AND {last}")
        })
        .collect()
}

/// Wall time and its parts.
pub(crate) struct Clock {
    cpu: f64,
    start: Instant,
    lap: Instant,
    phases: BTreeMap<String, f64>,
}

pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Clock {
    pub(crate) fn start() -> Self {
        let cpu = cpu_ms();
        let now = Instant::now();
        Self {
            cpu,
            start: now,
            lap: now,
            phases: BTreeMap::new(),
        }
    }

    fn lap(&mut self, phase: &str) {
        let now = Instant::now();
        self.phases
            .insert(phase.to_string(), milliseconds(now - self.lap));
        self.lap = now;
    }

    /// What the process took, up to the last lap.
    pub(crate) fn sample(mut self, answer: String) -> Result<Sample> {
        let wall = self.lap - self.start;
        let cpu_ms = cpu_ms() - self.cpu;
        self.phases.retain(|_, ms| *ms > 0.0);
        Ok(Sample {
            wall_ms: milliseconds(wall),
            cpu_ms,
            phases: self.phases,
            costs: BTreeMap::new(),
            peak_kb: status_kb("VmHWM:")?,
            own_kb: status_kb("RssAnon:")?,
            answer,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Touch {
    Counts,
    Records,
    Hash,
}

/// Sums over the fragments seen, equal on all sides.
#[derive(Default)]
struct Seen {
    fragments: u64,
    ids: u64,
    rows: u64,
    deleted: u64,
    files: usize,
    hash: DefaultHasher,
}

impl Seen {
    fn counts(&mut self, id: u64, rows: u64, deleted: u64) {
        self.fragments += 1;
        self.ids = self.ids.wrapping_add(id);
        self.rows += rows;
        self.deleted += deleted;
    }

    fn fragment(&mut self, fragment: &Fragment) {
        self.files += fragment.files.len();
    }

    fn record(&mut self, record: &pb::DataFragment) {
        self.files += record.files.len();
        record.encode_to_vec().hash(&mut self.hash);
    }

    fn answer(&self) -> String {
        format!(
            "{} fragments, ids {}, rows {}, deleted {}, files {}, hash {:x}",
            self.fragments,
            self.ids,
            self.rows,
            self.deleted,
            self.files,
            self.hash.finish()
        )
    }
}

/// Everything about one measurement that is ready before its clock starts.
struct Run<'a> {
    task: &'a Task,
    side: Side,
    uri: String,
    meter: Option<Meter>,
    session: SessionContext,
}

impl<'a> Run<'a> {
    fn new(task: &'a Task) -> Self {
        Self::on_side(task, task.side)
    }

    fn on_side(task: &'a Task, side: Side) -> Self {
        let path = match side {
            Side::Tree => &task.tree,
            _ => &task.flat,
        };
        let meter = match task.store {
            Store::Local => None,
            Store::Counted | Store::Hinted => Some(Meter::default()),
            Store::Slow => Some(Meter::new(Duration::from_millis(SLOW_MS))),
        };
        // Lance reads plain local files past the object store; this scheme it treats as remote.
        let uri = match meter {
            None => path.display().to_string(),
            Some(_) => format!("file-object-store://{}", path.display()),
        };
        let session = SessionContext::new();
        Self {
            task,
            side,
            uri,
            meter,
            session,
        }
    }

    fn wrapper(&self) -> Option<Arc<dyn WrappingObjectStore>> {
        self.meter.clone().map(|meter| Arc::new(meter) as _)
    }

    fn engine(&self, cache_bytes: u64) -> Engine {
        Engine::with_options(EngineOptions {
            cache_bytes,
            object_store_wrapper: self.wrapper(),
            ..Default::default()
        })
    }

    async fn dataset(&self) -> Result<Dataset> {
        let params = ObjectStoreParams {
            object_store_wrapper: self.wrapper(),
            ..Default::default()
        };
        let builder = DatasetBuilder::from_uri(&self.uri).with_store_params(params);
        Ok(builder.load().await?)
    }

    async fn snapshot(&self) -> Result<Arc<Snapshot>> {
        let options = OpenOptions {
            object_store_wrapper: self.wrapper(),
            ..Default::default()
        };
        Ok(Snapshot::open(&self.uri, options).await?)
    }

    async fn provider(&self, cache_bytes: u64) -> Result<Arc<dyn TableProvider>> {
        match self.side {
            Side::Lance | Side::LanceUnordered => {
                let dataset = Arc::new(self.dataset().await?);
                let ordered = self.side == Side::Lance;
                let provider = LanceTableProvider::new_with_ordering(dataset, false, true, ordered);
                Ok(Arc::new(provider))
            }
            Side::Flat | Side::Tree => {
                let engine = self.engine(cache_bytes);
                engine.register(&self.session);
                let options = TableOptions {
                    system_columns: SystemColumns::ALL,
                    ..Default::default()
                };
                Ok(Arc::new(engine.provider(&self.uri, options).await?))
            }
        }
    }

    fn finish(&self, clock: Clock, answer: String) -> Result<Sample> {
        Ok(Sample {
            costs: self.meter.as_ref().map(Meter::costs).unwrap_or_default(),
            ..clock.sample(answer)?
        })
    }

    async fn open(&self) -> Result<Sample> {
        let mut clock = Clock::start();
        let provider = self.provider(EngineOptions::default().cache_bytes).await?;
        clock.lap("open");
        let columns = self.task.facts.columns.len();
        let has = provider.schema().fields().len() >= columns;
        self.finish(clock, format!("{columns} columns: {has}"))
    }

    async fn sql(&self, sql: &str) -> Result<Sample> {
        let mut clock = Clock::start();
        let provider = self.provider(EngineOptions::default().cache_bytes).await?;
        self.session.register_table("t", provider)?;
        clock.lap("open");
        let plan = self.session.sql(sql).await?.create_physical_plan().await?;
        clock.lap("plan");
        let batches = collect(plan, self.session.task_ctx()).await?;
        clock.lap("run");
        self.finish(clock, digest(&batches)?)
    }

    /// Which ten rows is anybody's choice; that there are ten is not.
    async fn limit(&self) -> Result<Sample> {
        let columns = self.task.facts.columns.join(", ");
        let mut sample = self
            .sql(&format!("SELECT {columns} FROM t LIMIT 10"))
            .await?;
        let rows = sample
            .answer
            .split_once(',')
            .map(|(rows, _)| rows.to_string());
        sample.answer = rows.ok_or("fewer than ten rows")?;
        Ok(sample)
    }

    async fn record(&self) -> Result<Sample> {
        let id = self.task.facts.point >> 32;
        let mut clock = Clock::start();
        let record = match self.side {
            Side::Lance | Side::LanceUnordered => {
                let dataset = self.dataset().await?;
                clock.lap("open");
                let fragment = dataset
                    .get_fragment(usize::try_from(id)?)
                    .ok_or("no fragment")?;
                pb::DataFragment::from(fragment.metadata())
            }
            Side::Flat | Side::Tree => {
                let snapshot = self.snapshot().await?;
                clock.lap("open");
                let fragment = snapshot.fragment(u32::try_from(id)?).await?;
                fragment.ok_or("no fragment")?.record()?
            }
        };
        clock.lap("record");
        self.finish(clock, format!("{record:?}"))
    }

    /// For Lance the clock stops at the open: it then has every record.
    async fn walk(&self, touch: Touch) -> Result<Sample> {
        let mut seen = Seen::default();
        let mut clock = Clock::start();
        match self.side {
            Side::Lance | Side::LanceUnordered => {
                let dataset = self.dataset().await?;
                clock.lap("open");
                for fragment in dataset.fragments().iter() {
                    let deleted = fragment
                        .deletion_file
                        .as_ref()
                        .and_then(|d| d.num_deleted_rows);
                    let rows = fragment.physical_rows.unwrap_or_default() as u64;
                    seen.counts(fragment.id, rows, deleted.unwrap_or_default() as u64);
                    match touch {
                        Touch::Counts => {}
                        Touch::Records => seen.fragment(fragment),
                        Touch::Hash => seen.record(&pb::DataFragment::from(fragment)),
                    }
                }
            }
            Side::Flat | Side::Tree => {
                let snapshot = self.snapshot().await?;
                clock.lap("open");
                let (options, state) = (WalkOptions::default(), WalkState::default());
                let mut fragments = snapshot.fragments(FragmentRanges::all(), &options, &state);
                while let Some(batch) = fragments.try_next().await? {
                    for fragment in &batch {
                        let rows = fragment.physical_rows().unwrap_or_default();
                        let deleted = fragment.deleted_rows().unwrap_or_default();
                        seen.counts(u64::from(fragment.id()), rows, deleted);
                        match touch {
                            Touch::Counts => {}
                            Touch::Records => seen.fragment(&fragment.fragment()?),
                            Touch::Hash => seen.record(&fragment.record()?),
                        }
                    }
                }
                clock.lap("walk");
            }
        }
        self.finish(clock, seen.answer())
    }

    async fn convert(&self) -> Result<Sample> {
        let mut clock = Clock::start();
        let options = ConvertOptions {
            policy: self.task.policy.tree(),
            force: true,
            ..ConvertOptions::to_tree()
        };
        let report = convert(&self.uri, options, OpenOptions::default()).await?;
        clock.lap("convert");
        self.finish(clock, serde_json::to_string(&report)?)
    }

    /// Many queries on one provider that is open already.
    async fn queries(&self, queries: Vec<String>, at_once: bool) -> Result<Sample> {
        let provider = self.provider(SHARED_CACHE).await?;
        self.session.register_table("t", provider)?;
        let mut answers = vec![String::new(); queries.len()];
        let mut clock = Clock::start();
        let mut running = JoinSet::new();
        for (index, sql) in queries.into_iter().enumerate() {
            let session = self.session.clone();
            running.spawn(async move {
                let batches = session.sql(&sql).await?.collect().await?;
                Ok::<_, datafusion::error::DataFusionError>((index, batches))
            });
            let wait_for = if at_once { 0 } else { running.len() };
            for _ in 0..wait_for {
                store_answer(&mut running, &mut answers).await?;
            }
        }
        while !running.is_empty() {
            store_answer(&mut running, &mut answers).await?;
        }
        clock.lap("queries");
        self.finish(clock, answers.join("\n"))
    }
}

type Answers = JoinSet<datafusion::error::Result<(usize, Vec<RecordBatch>)>>;

async fn store_answer(running: &mut Answers, answers: &mut [String]) -> Result<()> {
    let Some(done) = running.join_next().await else {
        return Ok(());
    };
    let (index, batches) = done??;
    let answer = answers.get_mut(index).ok_or("an answer to no query")?;
    *answer = digest(&batches)?;
    Ok(())
}

/// Sides take turns in one process; each has had one round before the clock starts.
async fn warm_scan(task: &Task) -> Result<Vec<(Side, Sample)>> {
    let sql = task.facts.scan.as_deref().ok_or("nothing to scan")?;
    let mut sides = Vec::new();
    for side in Side::ALL {
        let run = Run::on_side(task, side);
        let provider = run.provider(EngineOptions::default().cache_bytes).await?;
        run.session.register_table("t", provider)?;
        sides.push(run);
    }
    let mut samples = Vec::new();
    for round in 0..=WARM_ROUNDS {
        for run in &sides {
            let mut clock = Clock::start();
            let batches = run.session.sql(sql).await?.collect().await?;
            clock.lap("scan");
            if round > 0 {
                samples.push((run.side, run.finish(clock, digest(&batches)?)?));
            }
        }
    }
    Ok(samples)
}

/// Rows as text, in an order of their own; many of them as their number and a hash.
fn digest(batches: &[RecordBatch]) -> Result<String> {
    let table = pretty_format_batches(batches)?.to_string();
    let mut lines: Vec<&str> = table
        .lines()
        .filter(|l| l.starts_with('|'))
        .skip(1)
        .collect();
    lines.sort_unstable();
    if lines.len() <= 4 {
        return Ok(lines.join("\n"));
    }
    let mut hash = DefaultHasher::new();
    lines.hash(&mut hash);
    Ok(format!("{} rows, hash {:x}", lines.len(), hash.finish()))
}

/// Time this process's threads have been running, in milliseconds; zero where it is not known.
fn cpu_ms() -> f64 {
    let Ok(threads) = fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    let nanoseconds = |thread: fs::DirEntry| -> Option<f64> {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    threads.flatten().filter_map(nanoseconds).sum::<f64>() / 1e6
}

/// A figure of this process's memory, in KiB: `VmHWM:` is the greatest there was.
fn status_kb(name: &str) -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix(name))
        .ok_or_else(|| format!("no {name} in /proc/self/status"))?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
