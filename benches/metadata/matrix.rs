//! Which measurements are made, and making them: a cold process each, sides taking turns.

use std::collections::{BTreeMap, HashMap};
use std::env;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Options;
use crate::plan::{Policy, Result, Sample, Side, Store, Task, Work};
use crate::report;
use crate::tables::{self, QUICK, Spec, TABLES, Table};

/// Measurements of one side of one workload.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Cell {
    pub table: String,
    pub work: Work,
    pub store: Store,
    pub side: Side,
    /// Sizes of the tree.
    pub policy: String,
    /// The revision measured.
    pub revision: String,
    pub date: String,
    pub samples: Vec<Sample>,
}

impl Cell {
    fn same_place(&self, other: &Self) -> bool {
        self.table == other.table
            && self.work == other.work
            && self.store == other.store
            && self.side == other.side
            && self.policy == other.policy
    }
}

/// One workload to measure.
#[derive(Debug, Clone)]
struct Job {
    work: Work,
    store: Store,
    sides: Vec<Side>,
    reps: usize,
}

impl Job {
    fn name(&self, table: &str) -> String {
        format!("{table}/{:?}/{:?}", self.work, self.store).to_lowercase()
    }
}

/// The workloads of a table.
fn jobs(spec: &Spec, reps: usize) -> Vec<Job> {
    let job = |work, store, sides: &[Side], reps| Job {
        work,
        store,
        sides: sides.to_vec(),
        reps,
    };
    let all = Side::MAIN;
    let ours = [Side::Flat, Side::Tree];
    let slow_reps = reps.min(3);
    if spec.real_rows.is_some() {
        return vec![
            job(Work::Scan, Store::Local, &Side::ALL, reps),
            job(Work::WarmScan, Store::Local, &[Side::Tree], 1),
            job(Work::Scan, Store::Counted, &Side::ALL, 1),
            job(Work::Scan, Store::Slow, &Side::ALL, slow_reps),
            job(Work::Limit, Store::Local, &Side::ALL, reps),
            job(Work::Limit, Store::Counted, &Side::ALL, 1),
            job(Work::Limit, Store::Slow, &Side::ALL, slow_reps),
            job(Work::PointsInTurn, Store::Local, &all, reps),
            job(Work::PointsAtOnce, Store::Local, &all, reps),
            job(Work::PointsInTurn, Store::Slow, &all, slow_reps),
            job(Work::PointsAtOnce, Store::Slow, &all, slow_reps),
        ];
    }
    let mut jobs = Vec::new();
    if spec.fragments <= 1_000 {
        jobs.push(job(Work::Nothing, Store::Local, &[Side::Tree], reps));
    }
    jobs.push(job(Work::Verify, Store::Local, &all, 1));
    let queries = [Work::Count, Work::Point, Work::Range, Work::Record];
    for work in queries.into_iter().chain([Work::Handles, Work::Records]) {
        jobs.push(job(work, Store::Local, &all, reps));
    }
    for work in queries.into_iter().chain([Work::Records]) {
        jobs.push(job(work, Store::Counted, &all, 1));
        jobs.push(job(work, Store::Slow, &all, slow_reps));
    }
    jobs.push(job(Work::Count, Store::Hinted, &all, 1));
    if spec.fragments >= 100_000 {
        for store in [Store::Local, Store::Slow] {
            jobs.push(job(Work::CountsInTurn, store, &ours, slow_reps));
            jobs.push(job(Work::CountsAtOnce, store, &ours, slow_reps));
        }
    }
    jobs
}

/// Everything measured, by place.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    cells: Vec<Cell>,
    file: Option<PathBuf>,
}

impl Cells {
    fn load(out: Option<&Path>) -> Result<Self> {
        let Some(out) = out else {
            return Ok(Self::default());
        };
        fs::create_dir_all(out)?;
        let file = out.join("results.json");
        let cells = match fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(_) => Vec::new(),
        };
        Ok(Self {
            cells,
            file: Some(file),
        })
    }

    fn put(&mut self, cell: Cell) -> Result<()> {
        self.cells.retain(|old| !old.same_place(&cell));
        self.cells.push(cell);
        if let Some(file) = &self.file {
            fs::write(file, serde_json::to_vec_pretty(&self.cells)?)?;
        }
        Ok(())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Cell> {
        self.cells.iter()
    }

    pub(crate) fn find(
        &self,
        table: &str,
        work: Work,
        store: Store,
        side: Side,
        policy: &str,
    ) -> Option<&Cell> {
        self.cells.iter().find(|c| {
            c.table == table
                && c.work == work
                && c.store == store
                && c.side == side
                && c.policy == policy
        })
    }
}

/// Measures what `options` ask for, prints it, and writes the report.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut cells = Cells::load(options.out.as_deref())?;
    if !options.no_run {
        let root = scratch()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?;
        let specs: &[Spec] = if options.quick { &QUICK } else { &TABLES };
        let reps = options.reps.unwrap_or(if options.quick { 3 } else { 5 });
        let revision = revision();
        for spec in specs {
            let jobs: Vec<Job> = jobs(spec, reps)
                .into_iter()
                .filter(|job| wanted(options, &job.name(spec.name)))
                .collect();
            if jobs.is_empty() {
                continue;
            }
            let table = runtime.block_on(tables::prepare(&root, spec))?;
            let bench = Bench {
                table: &table,
                policy: options.policy,
                revision: &revision,
            };
            bench.convert(options.rebuild, &mut cells)?;
            bench.measure(&jobs, &mut cells)?;
        }
    }
    if options.docs {
        report::write(&cells, options.policy)?;
    }
    Ok(())
}

pub(crate) fn wanted(options: &Options, name: &str) -> bool {
    options.only.is_empty()
        || options
            .only
            .iter()
            .any(|o| name.contains(&o.to_lowercase()))
}

/// Where tables are kept.
pub(crate) fn scratch() -> Result<PathBuf> {
    let dir = env::var_os("FRAGTREE_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let dir = dir.join("metadata-bench");
    fs::create_dir_all(&dir)?;
    Ok(fs::canonicalize(dir)?)
}

pub(crate) fn revision() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let hash = git(&["rev-parse", "--short", "HEAD"]).unwrap_or_else(|| "unknown".into());
    let changed = git(&["status", "--porcelain", "--", "src"]).is_some_and(|s| !s.is_empty());
    if changed {
        format!("{hash} with changes")
    } else {
        hash
    }
}

struct Bench<'a> {
    table: &'a Table,
    policy: Policy,
    revision: &'a str,
}

impl Bench<'_> {
    fn task(&self, side: Side, work: Work, store: Store) -> Task {
        Task {
            flat: self.table.flat.clone(),
            tree: self.table.tree(&self.policy.label()),
            side,
            work,
            store,
            policy: self.policy,
            facts: self.table.facts.clone(),
        }
    }

    fn cell(&self, work: Work, store: Store, side: Side, samples: Vec<Sample>) -> Cell {
        Cell {
            table: self.table.facts.name.clone(),
            work,
            store,
            side,
            policy: self.policy.label(),
            revision: self.revision.to_string(),
            date: chrono::Utc::now().format("%Y-%m-%d").to_string(),
            samples,
        }
    }

    /// Makes the tree, unless there is one.
    fn convert(&self, rebuild: bool, cells: &mut Cells) -> Result<()> {
        let task = self.task(Side::Tree, Work::Convert, Store::Local);
        let done = task.tree.join("converted.json");
        if rebuild || !done.exists() {
            self.table.copy_flat(&task.tree)?;
            let samples = child(&task)?;
            // Beside the table's own folders, where no reader looks.
            fs::write(&done, serde_json::to_vec_pretty(&samples)?)?;
        }
        let samples: Vec<(Side, Sample)> = serde_json::from_slice(&fs::read(&done)?)?;
        let samples: Vec<Sample> = samples.into_iter().map(|(_, sample)| sample).collect();
        if let Some(sample) = samples.first() {
            println!(
                "{}: converted in {:.0} ms, {} MiB peak: {}",
                self.table.facts.name,
                sample.wall_ms,
                sample.peak_kb >> 10,
                sample.answer
            );
        }
        cells.put(self.cell(Work::Convert, Store::Local, Side::Tree, samples))
    }

    fn measure(&self, jobs: &[Job], cells: &mut Cells) -> Result<()> {
        let mut answers: HashMap<Work, String> = HashMap::new();
        for job in jobs {
            let mut samples: BTreeMap<Side, Vec<Sample>> = BTreeMap::new();
            for _ in 0..job.reps {
                for side in &job.sides {
                    for (side, sample) in child(&self.task(*side, job.work, job.store))? {
                        self.agree(job.work, side, &sample.answer, &mut answers)?;
                        samples.entry(side).or_default().push(sample);
                    }
                }
            }
            println!("{}, load {}", job.name(&self.table.facts.name), load());
            for (side, samples) in samples {
                let cell = self.cell(job.work, job.store, side, samples);
                println!("    {:24} {}", side.title(), report::line(&cell));
                cells.put(cell)?;
            }
        }
        Ok(())
    }

    /// Sides must give the same answer; so must any repetition through any store.
    fn agree(
        &self,
        work: Work,
        side: Side,
        answer: &str,
        answers: &mut HashMap<Work, String>,
    ) -> Result<()> {
        let same = match work {
            Work::PointsAtOnce => Work::PointsInTurn,
            Work::CountsAtOnce => Work::CountsInTurn,
            Work::WarmScan => Work::Scan,
            work => work,
        };
        let expected = answers.entry(same).or_insert_with(|| answer.to_string());
        if expected == answer {
            return Ok(());
        }
        Err(format!(
            "{}: {side:?} answers {work:?} with\n{answer}\nwhere the answer was\n{expected}",
            self.table.facts.name
        )
        .into())
    }
}

/// The machine's load over the last minute: measurements beside other work are worth less.
pub(crate) fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("?").to_string()
}

/// Runs a task in a process of its own.
pub(crate) fn child(task: &Task) -> Result<Vec<(Side, Sample)>> {
    let what = format!(
        "{:?} {:?} on {} ({:?})",
        task.side, task.work, task.facts.name, task.store
    );
    spawn("--child", task, task.store, &what)
}

/// Starts this program again with `role`, gives it `task` and takes its answer.
pub(crate) fn spawn<T: Serialize, A: DeserializeOwned>(
    role: &str,
    task: &T,
    store: Store,
    what: &str,
) -> Result<A> {
    let mut command = Command::new(env::current_exe()?);
    command.arg(role);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if matches!(store, Store::Counted | Store::Slow) {
        // Latest versions are then listed, as where listings come in order.
        command.env("LANCE_USE_VERSION_HINT", "0");
    }
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(&serde_json::to_vec(task)?)?;
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(format!("{what} failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().ok_or("a child that says nothing")?;
    Ok(serde_json::from_str(line)?)
}
