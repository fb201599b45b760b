//! Which commits are measured, and measuring them: a cold process each, on a copy of the table that
//! is thrown away afterwards; sides take turns.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use crate::Options;
use crate::matrix::{self, load, revision, scratch, wanted};
use crate::plan::{Policy, Result, Sample, Side, Store, Task, Work};
use crate::tables::{self, Spec, Table};
use crate::writes_plan::{FLAT, WriteCell, WritePolicy, WriteSample, WriteTask, WriteWork};
use crate::writes_report;

/// The tables of a full run, smallest first. The first is what rows of appends begin with: one
/// fragment, which is real.
const TABLES: [Spec; 5] = [
    Spec {
        name: "one_x1",
        fragments: 1,
        files: 1,
        real_rows: Some(100),
    },
    tables::fabricated("10k_x1", 10_000, 1),
    tables::fabricated("100k_x1", 100_000, 1),
    tables::fabricated("1m_x1", 1_000_000, 1),
    tables::fabricated("100k_x30", 100_000, 30),
];

const QUICK: [Spec; 3] = [
    TABLES[0],
    tables::fabricated("1k_x1", 1_000, 1),
    tables::fabricated("1k_x30", 1_000, 30),
];

/// One workload to measure.
#[derive(Debug, Clone)]
struct Job {
    work: WriteWork,
    store: Store,
    reps: usize,
    commits: u32,
    each: u32,
    /// Commits measured of a side that writes everything at each, where that takes too long.
    few: u32,
}

impl Job {
    fn name(&self, table: &str) -> String {
        let work = serde_json::to_value(self.work).unwrap_or_default();
        let work = work.as_str().unwrap_or_default();
        format!("{table}/{work}/{:?}", self.store).to_lowercase()
    }

    /// How many commits of this workload are measured.
    fn measured(&self, side: &str) -> u32 {
        let all_at_once = side == FLAT || side.starts_with("one-sidecar");
        if all_at_once { self.few } else { self.commits }
    }
}

/// The workloads of a table.
fn jobs(spec: &Spec, reps: usize) -> Vec<Job> {
    let one = |work, store, each, reps| Job {
        work,
        store,
        reps,
        commits: 1,
        each,
        few: 1,
    };
    if spec.fragments == 1 {
        return vec![Job {
            work: WriteWork::Appends,
            // Where listing ten thousand versions is not part of it.
            store: Store::Hinted,
            reps: 1,
            commits: if reps > 3 { 10_000 } else { 200 },
            each: 1,
            few: if reps > 3 { 10_000 } else { 200 },
        }];
    }
    if spec.files > 1 {
        let works = [WriteWork::BackfillContiguous, WriteWork::BackfillScattered];
        let fill = |work, store| Job {
            work,
            store,
            reps: 1,
            commits: 100,
            each: spec.fragments / 100,
            few: if spec.fragments > 1_000 { 3 } else { 100 },
        };
        return works
            .into_iter()
            .flat_map(|work| [fill(work, Store::Local), fill(work, Store::Counted)])
            .collect();
    }
    let mut jobs = Vec::new();
    let mut single = |work, each, reps: usize| {
        jobs.push(one(work, Store::Counted, each, 1));
        jobs.push(one(work, Store::Local, each, reps));
        jobs.push(one(work, Store::Slow, each, reps.min(3)));
    };
    single(WriteWork::Append, 1, reps);
    if spec.fragments == 1_000 || spec.fragments == 1_000_000 {
        single(WriteWork::Delete10, 10, reps);
        single(WriteWork::Delete100, 100, reps);
        jobs.push(one(WriteWork::DeleteAll, Store::Counted, spec.fragments, 1));
        jobs.push(one(
            WriteWork::DeleteAll,
            Store::Local,
            spec.fragments,
            reps.min(3),
        ));
    }
    jobs
}

/// Everything measured, by place.
#[derive(Debug, Default)]
pub(crate) struct WriteCells {
    cells: Vec<WriteCell>,
    file: Option<PathBuf>,
}

impl WriteCells {
    fn load(out: Option<&Path>) -> Result<Self> {
        let Some(out) = out else {
            return Ok(Self::default());
        };
        fs::create_dir_all(out)?;
        let file = out.join("writes.json");
        let cells = match fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(_) => Vec::new(),
        };
        Ok(Self {
            cells,
            file: Some(file),
        })
    }

    fn put(&mut self, cell: WriteCell) -> Result<()> {
        self.cells.retain(|old| !old.same_place(&cell));
        self.cells.push(cell);
        if let Some(file) = &self.file {
            fs::write(file, serde_json::to_vec(&self.cells)?)?;
        }
        Ok(())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &WriteCell> {
        self.cells.iter()
    }

    pub(crate) fn find(
        &self,
        table: &str,
        work: WriteWork,
        store: Store,
        side: &str,
    ) -> Option<&WriteCell> {
        self.cells
            .iter()
            .find(|c| c.table == table && c.work == work && c.store == store && c.side == side)
    }
}

/// Measures what `options` ask for, prints it, and writes the report.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut cells = WriteCells::load(options.out.as_deref())?;
    if !options.no_run {
        let root = scratch()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?;
        let specs: &[Spec] = if options.quick { &QUICK } else { &TABLES };
        let reps = options.reps.unwrap_or(if options.quick { 3 } else { 5 });
        let policies = match options.write_policies.as_slice() {
            [] => vec![WritePolicy::parse("default")?],
            named => named.to_vec(),
        };
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
                template: runtime.block_on(tables::template(&table))?,
                table: &table,
                policies: &policies,
                work_dir: root.join("scratch"),
                revision: &revision,
                rebuild: options.rebuild,
            };
            for job in jobs {
                bench.measure(&job, &mut cells)?;
            }
        }
    }
    if options.docs {
        writes_report::write(&cells)?;
    }
    Ok(())
}

struct Bench<'a> {
    table: &'a Table,
    template: lance_table::format::Fragment,
    policies: &'a [WritePolicy],
    work_dir: PathBuf,
    revision: &'a str,
    rebuild: bool,
}

impl Bench<'_> {
    fn task(&self, job: &Job, table: PathBuf, policy: Option<&WritePolicy>) -> WriteTask {
        WriteTask {
            table,
            policy: policy.cloned(),
            work: job.work,
            store: job.store,
            fragments: self.table.facts.fragments,
            commits: job.measured(policy.map_or(FLAT, WritePolicy::label)),
            each: job.each,
            template: self.template.clone(),
        }
    }

    /// The flat table a workload begins with.
    fn flat(&self, work: WriteWork) -> Result<PathBuf> {
        if !work.fills_column() {
            return Ok(self.table.flat.clone());
        }
        let filled = self.table.tree("flat-and-column");
        let done = filled.join("made.json");
        if !done.exists() {
            self.table.copy_flat(&filled)?;
            let job = Job {
                work: WriteWork::AddColumn,
                store: Store::Local,
                reps: 1,
                commits: 1,
                each: 0,
                few: 1,
            };
            child(&self.task(&job, filled.clone(), None))?;
            // Beside the table's own folders, where no reader looks.
            fs::write(&done, "{}")?;
        }
        Ok(filled)
    }

    /// The tree a workload begins with: a conversion of the flat table.
    fn tree(&self, work: WriteWork, policy: &WritePolicy) -> Result<PathBuf> {
        let shape = policy.shape()?;
        let label = match work.fills_column() {
            true => format!("column-{}", shape.label()),
            false => shape.label(),
        };
        let tree = self.table.tree(&label);
        let done = tree.join("converted.json");
        if self.rebuild || !done.exists() {
            if tree.exists() {
                fs::remove_dir_all(&tree)?;
            }
            tables::copy_dir(&self.flat(work)?, &tree)?;
            let samples = matrix::child(&self.reading(&tree, Work::Convert, Store::Local, shape))?;
            fs::write(&done, serde_json::to_vec_pretty(&samples)?)?;
        }
        Ok(tree)
    }

    fn reading(&self, table: &Path, work: Work, store: Store, policy: Policy) -> Task {
        Task {
            flat: table.to_path_buf(),
            tree: table.to_path_buf(),
            side: Side::Tree,
            work,
            store,
            policy,
            facts: self.table.facts.clone(),
        }
    }

    fn read(&self, table: &Path, work: Work, store: Store) -> Result<Sample> {
        let samples = matrix::child(&self.reading(table, work, store, Policy::default()))?;
        let sample = samples.into_iter().next();
        sample
            .map(|(_, sample)| sample)
            .ok_or_else(|| "a child without a sample".into())
    }

    fn measure(&self, job: &Job, cells: &mut WriteCells) -> Result<()> {
        let mut sides: Vec<Option<&WritePolicy>> = vec![None];
        sides.extend(self.policies.iter().map(Some));
        let mut samples: BTreeMap<usize, Vec<WriteSample>> = BTreeMap::new();
        let mut answers: HashMap<u32, String> = HashMap::new();
        for rep in 0..job.reps {
            for (index, policy) in sides.iter().enumerate() {
                let sample = self.once(job, *policy, rep, &mut answers)?;
                samples.entry(index).or_default().push(sample);
            }
        }
        println!("{}, load {}", job.name(&self.table.facts.name), load());
        for (index, samples) in samples {
            let policy = sides.get(index).copied().flatten();
            let cell = WriteCell {
                table: self.table.facts.name.clone(),
                work: job.work,
                store: job.store,
                side: policy.map_or(FLAT, WritePolicy::label).to_string(),
                commits: job.commits,
                each: job.each,
                revision: self.revision.to_string(),
                date: chrono::Utc::now().format("%Y-%m-%d").to_string(),
                samples,
            };
            println!("    {:24} {}", cell.side, writes_report::line(&cell));
            cells.put(cell)?;
        }
        Ok(())
    }

    /// One measurement on a copy of the table.
    fn once(
        &self,
        job: &Job,
        policy: Option<&WritePolicy>,
        rep: usize,
        answers: &mut HashMap<u32, String>,
    ) -> Result<WriteSample> {
        let source = match policy {
            None => self.flat(job.work)?,
            Some(policy) => self.tree(job.work, policy)?,
        };
        let copy = self.work_dir.join("table.lance");
        if self.work_dir.exists() {
            fs::remove_dir_all(&self.work_dir)?;
        }
        tables::copy_dir(&source, &copy)?;
        let task = self.task(job, copy.clone(), policy);
        let mut sample = child(&task)?;
        if rep == 0 && matches!(job.store, Store::Counted | Store::Hinted) {
            // Every record, whatever the layout and whoever wrote it.
            let answer = self.read(&copy, Work::Verify, Store::Local)?.answer;
            let expected = answers
                .entry(task.commits)
                .or_insert_with(|| answer.clone());
            if *expected != answer {
                return Err(format!(
                    "{}: {} leaves\n{answer}\nwhere another side leaves\n{expected}",
                    job.name(&self.table.facts.name),
                    policy.map_or(FLAT, WritePolicy::label)
                )
                .into());
            }
            sample.whole.answer = answer;
        }
        if job.work == WriteWork::Appends {
            self.read_after(&copy, policy, &mut sample)?;
        }
        fs::remove_dir_all(&self.work_dir)?;
        Ok(sample)
    }

    /// What a look-up takes after a row of appends, and after a conversion of the same fragments.
    fn read_after(
        &self,
        copy: &Path,
        policy: Option<&WritePolicy>,
        sample: &mut WriteSample,
    ) -> Result<()> {
        let mut keep = |name: &str, work| -> Result<()> {
            let read = self.read(copy, work, Store::Counted)?;
            sample.after.insert(name.to_string(), read);
            Ok(())
        };
        keep("one row", Work::Point)?;
        keep("every record", Work::Records)?;
        if policy.is_none() {
            self.read(copy, Work::Convert, Store::Local)?;
            keep("one row, converted", Work::Point)?;
            keep("every record, converted", Work::Records)?;
        }
        Ok(())
    }
}

/// Runs a task in a process of its own.
fn child(task: &WriteTask) -> Result<WriteSample> {
    let what = format!(
        "{:?} by {} on {} ({:?})",
        task.work,
        task.policy.as_ref().map_or(FLAT, WritePolicy::label),
        task.table.display(),
        task.store
    );
    matrix::spawn("--write-child", task, task.store, &what)
}
