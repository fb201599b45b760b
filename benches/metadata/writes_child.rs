//! One measurement of commits, in a process that has done nothing before.
//!
//! The clock starts with the table unopened. What a commit is made of (names of files, the ids of the
//! fragments it touches) is drawn while the clock stands; what a writer reads from the table to make
//! it is measured.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::datatypes::{DataType, Field, Schema};
use fragtree::write::{CommitReport, TreeTable, WriteOptions};
use fragtree::{FragmentRanges, OpenOptions};
use lance::Dataset;
use lance::dataset::builder::DatasetBuilder;
use lance::dataset::{CommitBuilder, NewColumnTransform};
use lance_io::object_store::{ObjectStoreParams, WrappingObjectStore};
use lance_io::utils::CachedFileSize;
use lance_table::format::{DataFile, DeletionFile, DeletionFileType, Fragment};
use lance_table::transaction::{DataReplacementGroup, Operation, Transaction};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::child::{Clock, milliseconds};
use crate::meter::Meter;
use crate::plan::{Cost, Result, SLOW_MS, Store};
use crate::tables;
use crate::writes_plan::{FILLED, Step, WriteSample, WriteTask, WriteWork};

/// Does what `task` says.
pub(crate) async fn run(task: &WriteTask) -> Result<WriteSample> {
    let run = Run::new(task);
    match (task.work, &task.policy) {
        (WriteWork::AddColumn, _) => run.add_column().await,
        (_, None) => run.flat().await,
        (_, Some(policy)) => {
            let write = WriteOptions {
                policy: Some(policy.tree()?),
                ..Default::default()
            };
            run.tree(write).await
        }
    }
}

/// What one commit is to do.
enum Change {
    Append(Fragment),
    Delete(Vec<u32>),
    Fill(Vec<(u64, DataFile)>),
}

/// Draws the changes, the same for every side.
struct Changes<'a> {
    task: &'a WriteTask,
    /// Fragments in the order they are touched.
    order: Vec<u32>,
    random: StdRng,
    /// The file of the filled column, but for its name.
    file: Option<DataFile>,
}

impl<'a> Changes<'a> {
    fn new(task: &'a WriteTask) -> Result<Self> {
        let mut random = StdRng::seed_from_u64(u64::from(task.fragments) + 1);
        let mut order: Vec<u32> = match task.work {
            WriteWork::Append | WriteWork::Appends | WriteWork::AddColumn => Vec::new(),
            _ => (0..task.fragments).collect(),
        };
        if matches!(
            task.work,
            WriteWork::Delete10 | WriteWork::Delete100 | WriteWork::BackfillScattered
        ) {
            order.shuffle(&mut random);
        }
        let file = if task.work.fills_column() {
            let mut file = task
                .template
                .files
                .last()
                .ok_or("a record without files")?
                .clone();
            // Field ids count up from 0, a column each.
            file.fields = Arc::from([i32::try_from(task.template.files.len())?]);
            file.column_indices = Arc::from([0]);
            Some(file)
        } else {
            None
        };
        Ok(Self {
            task,
            order,
            random,
            file,
        })
    }

    fn change(&mut self, number: u32) -> Result<Change> {
        let each = usize::try_from(self.task.each)?;
        let from = usize::try_from(number)? * each;
        let mut ids: Vec<u32> = self.order.iter().skip(from).take(each).copied().collect();
        ids.sort_unstable();
        Ok(match self.task.work {
            WriteWork::Append | WriteWork::Appends => {
                // Lance gives it its id.
                Change::Append(tables::invent(&self.task.template, 0, &mut self.random))
            }
            WriteWork::Delete10 | WriteWork::Delete100 | WriteWork::DeleteAll => {
                Change::Delete(ids)
            }
            WriteWork::BackfillContiguous | WriteWork::BackfillScattered => {
                let blank = self.file.as_ref().ok_or("no file to fill a column with")?;
                let fill = |id: u32| {
                    let mut file = blank.clone();
                    file.path = tables::file_name(&mut self.random);
                    let size = self.random.random_range(4_000..4_000_000);
                    file.file_size_bytes = CachedFileSize::new(size);
                    (u64::from(id), file)
                };
                Change::Fill(ids.into_iter().map(fill).collect())
            }
            WriteWork::AddColumn => return Err("not a change of fragments".into()),
        })
    }
}

/// The records of `ids`, each with a new deletion file.
fn deletion(dataset: &Dataset, ids: &[u32]) -> Operation {
    let fragments = dataset.fragments();
    let mut updated = Vec::with_capacity(ids.len());
    for id in ids {
        let id = u64::from(*id);
        let Ok(at) = fragments.binary_search_by_key(&id, |f| f.id) else {
            continue;
        };
        let Some(fragment) = fragments.get(at) else {
            continue;
        };
        let mut fragment = fragment.clone();
        let rows = fragment.physical_rows.unwrap_or(100);
        let mut random = StdRng::seed_from_u64(id);
        let before = fragment
            .deletion_file
            .as_ref()
            .and_then(|d| d.num_deleted_rows);
        let more = random.random_range(1..=rows / 8);
        fragment.deletion_file = Some(DeletionFile {
            read_version: 3,
            id: random.random(),
            file_type: DeletionFileType::Bitmap,
            num_deleted_rows: Some(before.unwrap_or_default() + more),
            base_id: None,
        });
        updated.push(fragment);
    }
    Operation::Delete {
        updated_fragments: updated,
        deleted_fragment_ids: Vec::new(),
        predicate: "id % 100 = 1".to_string(),
    }
}

/// Lance's own commit of `operation`.
async fn commit(dataset: Dataset, operation: Operation) -> lance::Result<Dataset> {
    let transaction = Transaction::new(dataset.version().version, operation, None);
    CommitBuilder::new(Arc::new(dataset))
        .execute(transaction)
        .await
}

struct Run<'a> {
    task: &'a WriteTask,
    uri: String,
    meter: Option<Meter>,
}

impl<'a> Run<'a> {
    fn new(task: &'a WriteTask) -> Self {
        let meter = match task.store {
            Store::Local => None,
            Store::Counted | Store::Hinted => Some(Meter::default()),
            Store::Slow => Some(Meter::new(Duration::from_millis(SLOW_MS))),
        };
        // Lance writes plain local files past the object store; this scheme it treats as remote.
        let uri = match meter {
            None => task.table.display().to_string(),
            Some(_) => format!("file-object-store://{}", task.table.display()),
        };
        Self { task, uri, meter }
    }

    fn wrapper(&self) -> Option<Arc<dyn WrappingObjectStore>> {
        self.meter.clone().map(|meter| Arc::new(meter) as _)
    }

    async fn dataset(&self) -> Result<Dataset> {
        let params = ObjectStoreParams {
            object_store_wrapper: self.wrapper(),
            ..Default::default()
        };
        let builder = DatasetBuilder::from_uri(&self.uri).with_store_params(params);
        Ok(builder.load().await?)
    }

    fn costs(&self) -> BTreeMap<String, Cost> {
        self.meter.as_ref().map(Meter::costs).unwrap_or_default()
    }

    async fn add_column(&self) -> Result<WriteSample> {
        let mut dataset = self.dataset().await?;
        let column = Field::new(FILLED, DataType::Float64, true);
        let schema = Arc::new(Schema::new(vec![column]));
        dataset
            .add_columns(NewColumnTransform::AllNulls(schema), None, None)
            .await?;
        let field = dataset.schema().field(FILLED).ok_or("no new column")?;
        if usize::try_from(field.id)? != self.task.template.files.len() {
            return Err(format!("the new column has field id {}", field.id).into());
        }
        Ok(WriteSample::default())
    }

    async fn flat(&self) -> Result<WriteSample> {
        let mut changes = Changes::new(self.task)?;
        let mut steps = Steps::start(self);
        let mut dataset = self.dataset().await?;
        steps.opened();
        for number in 0..self.task.commits {
            let change = changes.change(number)?;
            steps.begin();
            let operation = match change {
                Change::Append(fragment) => Operation::Append {
                    fragments: vec![fragment],
                },
                Change::Delete(ids) => deletion(&dataset, &ids),
                Change::Fill(files) => Operation::DataReplacement {
                    replacements: files
                        .into_iter()
                        .map(|(id, file)| DataReplacementGroup(id, file))
                        .collect(),
                },
            };
            dataset = commit(dataset, operation).await?;
            steps.end(None);
        }
        steps.finish(format!("{} fragments", dataset.fragments().len()))
    }

    async fn tree(&self, write: WriteOptions) -> Result<WriteSample> {
        let options = OpenOptions {
            object_store_wrapper: self.wrapper(),
            ..Default::default()
        };
        let mut changes = Changes::new(self.task)?;
        let mut steps = Steps::start(self);
        let table = TreeTable::open(&self.uri, options.clone(), write).await?;
        let mut version = table.last_seen().ok_or("a table without a version")?;
        let mut held = None;
        steps.opened();
        for number in 0..self.task.commits {
            let change = changes.change(number)?;
            steps.begin();
            let report = match change {
                Change::Append(fragment) => {
                    let fragments = vec![fragment];
                    let operation = Operation::Append { fragments };
                    let transaction = Transaction::new(version, operation, None);
                    table.commit(transaction, None).await?
                }
                Change::Delete(ids) => {
                    let scope = FragmentRanges::from_ids(ids.iter().copied());
                    let work = |dataset: Dataset| {
                        let operation = deletion(&dataset, &ids);
                        commit(dataset, operation)
                    };
                    let (dataset, report) = table.with_dataset(scope, work).await?;
                    // As the other side has its dataset to the end.
                    held = Some(dataset);
                    report
                }
                Change::Fill(files) => table.backfill(files).await?,
            };
            version = report.version;
            steps.end(Some(report));
        }
        let mut sample = steps.finish(String::new())?;
        drop(held);
        let fragments = table.latest().await?.num_fragments()?;
        sample.whole.answer = format!("{fragments} fragments");
        Ok(sample)
    }
}

/// The clock of a run, and what its commits took.
struct Steps<'a> {
    run: &'a Run<'a>,
    clock: Clock,
    open: Duration,
    begun: Instant,
    before: BTreeMap<String, Cost>,
    steps: Vec<Step>,
}

impl<'a> Steps<'a> {
    fn start(run: &'a Run<'a>) -> Self {
        Self {
            run,
            clock: Clock::start(),
            open: Duration::ZERO,
            begun: Instant::now(),
            before: BTreeMap::new(),
            steps: Vec::new(),
        }
    }

    fn opened(&mut self) {
        self.open = self.begun.elapsed();
    }

    fn begin(&mut self) {
        self.before = self.run.costs();
        self.begun = Instant::now();
    }

    fn end(&mut self, report: Option<CommitReport>) {
        let wall = self.begun.elapsed();
        let mut step = Step {
            wall_ms: milliseconds(wall),
            ..Default::default()
        };
        for (kind, after) in self.run.costs() {
            let before = self.before.get(&kind).copied().unwrap_or_default();
            step.requests += after.requests - before.requests;
            let bytes = after.bytes - before.bytes;
            if kind.starts_with("put") {
                step.written += bytes;
            } else {
                step.read += bytes;
            }
        }
        if let Some(report) = report {
            step.mutation_bytes = report.mutation_bytes;
            step.objects_written = report.objects_written;
            step.object_bytes_written = report.object_bytes_written;
            step.objects_read = report.objects_read;
            step.object_bytes_read = report.object_bytes_read;
        }
        self.steps.push(step);
    }

    fn finish(self, answer: String) -> Result<WriteSample> {
        let commits: f64 = self.steps.iter().map(|s| s.wall_ms).sum();
        let open = milliseconds(self.open);
        let mut whole = self.clock.sample(answer)?;
        whole.wall_ms = open + commits;
        whole.phases = [("open".to_string(), open), ("commit".to_string(), commits)].into();
        whole.costs = self.run.costs();
        Ok(WriteSample {
            whole,
            steps: self.steps,
            after: BTreeMap::new(),
        })
    }
}
