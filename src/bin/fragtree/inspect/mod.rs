//! `fragtree inspect`: what a version is made of, from its manifest, its root and its interior nodes.
//! No leaf and no data file is opened.

mod text;

use std::collections::BTreeMap;
use std::sync::Arc;

use clap::Args;
use fragtree::{Counts, Engine, FragmentRanges, Layout, OpenCost, Snapshot, TreeObject, WalkState};
use lance::Dataset;
use lance::index::DatasetIndexExt;
use serde::Serialize;

use crate::args::{ReportFormat, TargetArgs};
use crate::failure::Outcome;
use crate::output;

/// Arguments of `fragtree inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// How to report.
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    format: ReportFormat,
}

/// Runs the command.
pub(crate) async fn run(args: InspectArgs) -> Outcome {
    let engine = Engine::new();
    let (reference, storage) = (args.target.reference()?, args.target.storage_options()?);
    let snapshot = engine.open(&args.target.uri, reference, storage).await?;
    let report = Report::of(&snapshot).await?;
    match args.format {
        ReportFormat::Json => output::print_json(&report),
        ReportFormat::Text => output::print(&report.text()),
    }
}

#[derive(Debug, Serialize)]
struct Report {
    uri: String,
    version: u64,
    branch: Option<String>,
    timestamp: String,
    layout: String,
    fragments: u64,
    max_fragment_id: Option<u32>,
    total_rows: Option<u64>,
    visible_rows: Option<u64>,
    columns: usize,
    data_file_version: String,
    stable_row_ids: bool,
    tree: Option<Tree>,
    indexes: Vec<Index>,
    config: BTreeMap<String, String>,
    base_paths: Vec<Base>,
    opened: Opened,
}

/// What was read to open the version, and then to walk its interior nodes.
#[derive(Debug, Serialize)]
struct Opened {
    manifest_bytes: u64,
    requests: u64,
    bytes: u64,
    walk_requests: u64,
    walk_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Tree {
    /// `inline`, or the path of the root object.
    root: String,
    height: u32,
    levels: Vec<Level>,
}

/// The objects of one height, leaves last.
#[derive(Debug, Serialize)]
struct Level {
    height: u32,
    kind: &'static str,
    objects: u64,
    /// Stored bytes; nothing for a root, whose size no parent records.
    bytes: Option<u64>,
    children: u64,
    fragments: u64,
    visible_rows: u64,
    buffered: u64,
}

#[derive(Debug, Serialize)]
struct Index {
    name: String,
    columns: Vec<String>,
    kind: String,
    version: u64,
    /// Fragments it covers, when it says so.
    fragments: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Base {
    id: u32,
    name: Option<String>,
    path: String,
    is_dataset_root: bool,
}

impl Report {
    async fn of(snapshot: &Arc<Snapshot>) -> Outcome<Self> {
        let walk = WalkState::default();
        let objects = snapshot.tree_objects(&FragmentRanges::all(), &walk).await?;
        let walked = walk.stats().snapshot();
        let shell = snapshot.shell();
        let manifest = shell.manifest();
        let counts: Option<Counts> = snapshot.counts()?;
        let OpenCost {
            requests,
            bytes,
            manifest_bytes,
            ..
        } = snapshot.open_cost();
        Ok(Self {
            uri: snapshot.uri().to_string(),
            version: snapshot.version(),
            branch: manifest.branch.clone(),
            timestamp: snapshot.timestamp().to_rfc3339(),
            layout: snapshot.layout().to_string(),
            fragments: snapshot.num_fragments()?,
            max_fragment_id: snapshot.max_fragment_id(),
            total_rows: counts.map(|c| c.total_rows),
            visible_rows: counts.map(|c| c.visible_rows),
            columns: snapshot.schema().fields().len(),
            data_file_version: manifest.data_storage_format.version.to_string(),
            stable_row_ids: snapshot.uses_stable_row_ids(),
            tree: (snapshot.layout() == Layout::Tree).then(|| Tree::of(&objects)),
            indexes: indexes(shell).await?,
            config: manifest.config.clone().into_iter().collect(),
            base_paths: base_paths(shell),
            opened: Opened {
                manifest_bytes,
                requests,
                bytes,
                walk_requests: walked.requests,
                walk_bytes: walked.bytes,
            },
        })
    }
}

impl Tree {
    fn of(objects: &[TreeObject]) -> Self {
        let (root, below) = objects
            .split_first()
            .map_or((None, objects), |(r, b)| (Some(r), b));
        let mut levels: Vec<Level> = root
            .map(|root| Level::new(root, "root"))
            .into_iter()
            .collect();
        for object in below {
            let kind = if object.height == 0 { "leaf" } else { "node" };
            match levels
                .last_mut()
                .filter(|l| l.kind == kind && l.height == object.height)
            {
                Some(level) => level.add(object),
                None => levels.push(Level::new(object, kind)),
            }
        }
        Self {
            root: root.map_or(String::new(), |root| root.path.clone()),
            height: root.map_or(0, |root| root.height),
            levels,
        }
    }
}

impl Level {
    fn new(first: &TreeObject, kind: &'static str) -> Self {
        let mut level = Self {
            height: first.height,
            kind,
            objects: 0,
            bytes: Some(0),
            children: 0,
            fragments: 0,
            visible_rows: 0,
            buffered: 0,
        };
        level.add(first);
        level
    }

    fn add(&mut self, object: &TreeObject) {
        self.objects += 1;
        self.bytes = self
            .bytes
            .zip(object.object_size)
            .map(|(a, b)| a.saturating_add(b));
        self.children += u64::from(object.num_children);
        self.fragments = self.fragments.saturating_add(object.counts.fragments);
        self.visible_rows = self.visible_rows.saturating_add(object.counts.visible_rows);
        self.buffered += object.buffered.unwrap_or(0);
    }
}

async fn indexes(shell: &Dataset) -> Outcome<Vec<Index>> {
    let indexes = shell.load_indices().await?;
    let name_of = |id: &i32| {
        let field = shell.schema().field_by_id(*id);
        field.map_or_else(|| format!("field {id}"), |field| field.name.clone())
    };
    Ok(indexes
        .iter()
        .map(|index| Index {
            name: index.name.clone(),
            columns: index.fields.iter().map(name_of).collect(),
            kind: index
                .index_details
                .as_ref()
                .map_or("unknown".to_string(), |details| {
                    let name = details
                        .type_url
                        .rsplit(['.', '/'])
                        .next()
                        .unwrap_or_default();
                    name.strip_suffix("IndexDetails")
                        .unwrap_or(name)
                        .to_string()
                }),
            version: index.dataset_version,
            fragments: index
                .fragment_bitmap
                .as_ref()
                .map(roaring::RoaringBitmap::len),
        })
        .collect())
}

fn base_paths(shell: &Dataset) -> Vec<Base> {
    let mut bases: Vec<_> = shell
        .manifest()
        .base_paths
        .values()
        .map(|base| Base {
            id: base.id,
            name: base.name.clone(),
            path: base.path.clone(),
            is_dataset_root: base.is_dataset_root,
        })
        .collect();
    bases.sort_unstable_by_key(|base| base.id);
    bases
}
