//! From a flat version to a tree and back, as the table's next version.

use std::sync::Arc;

use futures::TryStreamExt;
use lance_table::format::pb;
use serde::Serialize;

use super::build::{ObjectSink, TreeBuilder, TreePolicy};
use super::publish::{Commit, Fragments, commit, manifest_file};
use crate::error::{Error, Result};
use crate::manifest::check_writable;
use crate::ranges::FragmentRanges;
use crate::resolve::VersionAt;
use crate::snapshot::{Layout, OpenOptions, Snapshot};
use crate::tree::node::check_allocated;
use crate::tree::record::check_mapping;
use crate::tree::summary::{Counts, Tally};
use crate::tree_scan::{ResolvedFragment, WalkOptions, WalkState};

/// What to convert to, and how.
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// The layout of the new version.
    pub target: Layout,
    /// Sizes of the tree, when it is one.
    pub policy: TreePolicy,
    /// Work out everything and write nothing.
    pub dry_run: bool,
    /// Convert a table with fewer fragments than the policy's minimum.
    pub force: bool,
}

impl ConvertOptions {
    /// To a tree, with the default policy.
    pub fn to_tree() -> Self {
        Self {
            target: Layout::Tree,
            policy: TreePolicy::default(),
            dry_run: false,
            force: false,
        }
    }

    /// To a flat list.
    pub fn to_flat() -> Self {
        Self {
            target: Layout::Flat,
            ..Self::to_tree()
        }
    }
}

/// What a conversion did, or on a dry run would do.
#[derive(Debug, Clone, Serialize)]
pub struct ConvertReport {
    /// The version that was read.
    pub from_version: u64,
    /// The version that was published; none on a dry run.
    pub to_version: Option<u64>,
    /// Layout before.
    pub from: String,
    /// Layout after.
    pub to: String,
    /// Fragments.
    pub fragments: u64,
    /// Physical rows.
    pub total_rows: u64,
    /// Visible rows.
    pub visible_rows: u64,
    /// Size of the manifest that was read.
    pub source_manifest_bytes: u64,
    /// Size of the new manifest, an inline root included.
    pub manifest_bytes: u64,
    /// Leaves written.
    pub leaves: u64,
    /// Bytes of all leaves.
    pub leaf_bytes: u64,
    /// Interior nodes written.
    pub nodes: u64,
    /// Bytes of all interior nodes.
    pub node_bytes: u64,
    /// Whether the root is in the manifest.
    pub root_inline: bool,
    /// Bytes of the root.
    pub root_bytes: u64,
    /// Levels below the root, leaves included.
    pub height: u32,
    /// Fragments whose row counts were read from their files.
    pub rows_recounted: u64,
}

/// Attempts at a version before giving up: each loses only to another writer's success.
const ATTEMPTS: u32 = 10;

/// Publishes the latest version of the table at `uri` again, in the other layout.
///
/// Nothing but the layout changes: rows, row ids, indexes, config, tags and branches are as before.
/// Commits through the table's own commit handler; when another writer is first, the conversion
/// starts over from what that writer left.
///
/// # Errors
/// [`Error::InvalidInput`] when the table has the layout already or too few fragments for one,
/// [`Error::Conflict`] after losing to other writers ten times, [`Error::Unsupported`] for writer
/// features the linked Lance does not know; and those of reading the table.
pub async fn convert(
    uri: &str,
    options: ConvertOptions,
    open: OpenOptions,
) -> Result<ConvertReport> {
    if open.reference.at != VersionAt::Latest {
        return Err(Error::invalid(
            "convert publishes the next version and so starts from the latest: name no version",
        ));
    }
    options.policy.validate()?;
    for attempt in 1..=ATTEMPTS {
        let snapshot = Snapshot::open(uri, open.clone()).await?;
        check_convertible(&snapshot, &options)?;
        if let Some(report) = attempt_conversion(&snapshot, &options).await? {
            return Ok(report);
        }
        tracing::info!(attempt, version = snapshot.version() + 1, "lost a race");
        let pause = u64::from(attempt) * 20 + rand::random_range(0..20);
        tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
    }
    Err(Error::Conflict {
        message: format!(
            "other writers were first {ATTEMPTS} times in a row: pause them, or try again later"
        ),
        retryable: true,
    })
}

fn check_convertible(snapshot: &Snapshot, options: &ConvertOptions) -> Result<()> {
    check_writable(snapshot.location().path.as_ref(), snapshot.head())?;
    if snapshot.layout() == options.target {
        return Err(Error::invalid(format!(
            "version {} of {} is {} already",
            snapshot.version(),
            snapshot.uri(),
            options.target
        )));
    }
    let fragments = snapshot.num_fragments()?;
    let minimum = options.policy.min_fragments;
    if options.target == Layout::Tree && fragments < minimum && !options.force {
        return Err(Error::invalid(format!(
            "{} has {fragments} fragments, fewer than the {minimum} a tree is worth: its manifest is small already (--force converts it all the same)",
            snapshot.uri()
        )));
    }
    Ok(())
}

/// One try; nothing when another writer was first.
async fn attempt_conversion(
    snapshot: &Arc<Snapshot>,
    options: &ConvertOptions,
) -> Result<Option<ConvertReport>> {
    let mut report = ConvertReport {
        from_version: snapshot.version(),
        to_version: None,
        from: snapshot.layout().to_string(),
        to: options.target.to_string(),
        fragments: 0,
        total_rows: 0,
        visible_rows: 0,
        source_manifest_bytes: snapshot.open_cost().manifest_bytes,
        manifest_bytes: 0,
        leaves: 0,
        leaf_bytes: 0,
        nodes: 0,
        node_bytes: 0,
        root_inline: false,
        root_bytes: 0,
        height: 0,
        rows_recounted: 0,
    };
    let sink = sink_of(snapshot, options.dry_run).await?;
    let (fragments, written) = match options.target {
        Layout::Tree => build_tree(snapshot, options, sink.clone(), &mut report).await?,
        Layout::Flat => (build_flat(snapshot, &mut report).await?, Vec::new()),
    };
    let file = manifest_file(snapshot, fragments, &options.policy).await?;
    report.manifest_bytes = file.len() as u64;
    if options.dry_run {
        return Ok(Some(report));
    }
    match commit(snapshot, file).await? {
        Commit::Done(location) => {
            report.to_version = Some(location.version);
            Ok(Some(report))
        }
        Commit::Conflict => {
            sink.discard(&written).await;
            Ok(None)
        }
    }
}

async fn sink_of(snapshot: &Snapshot, dry_run: bool) -> Result<ObjectSink> {
    let shell = snapshot.shell();
    let store = shell
        .object_store(None)
        .await
        .map_err(|e| Error::lance("cannot open the table's object store", e))?;
    Ok(ObjectSink::new(
        store,
        shell.branch_location().path,
        dry_run,
    ))
}

async fn build_tree(
    snapshot: &Arc<Snapshot>,
    options: &ConvertOptions,
    sink: ObjectSink,
    report: &mut ConvertReport,
) -> Result<(Fragments, Vec<String>)> {
    let mut builder = TreeBuilder::new(sink, options.policy);
    let mut fragments = snapshot.fragments(
        FragmentRanges::all(),
        &WalkOptions::default(),
        &WalkState::default(),
    );
    while let Some(batch) = fragments.try_next().await? {
        for record in known_records(snapshot, batch, report).await? {
            check_new_record(snapshot, &record)?;
            builder.push(&record).await?;
        }
    }
    let (tree, built) = builder.finish().await?;
    report.set_counts(built.counts);
    report.leaves = built.leaves;
    report.leaf_bytes = built.leaf_bytes;
    report.nodes = built.nodes;
    report.node_bytes = built.node_bytes;
    report.root_inline = built.root_inline;
    report.root_bytes = built.root_bytes;
    report.height = built.height;
    Ok((Fragments::Tree(tree), built.paths))
}

async fn build_flat(snapshot: &Arc<Snapshot>, report: &mut ConvertReport) -> Result<Fragments> {
    let mut fragments = snapshot.fragments(
        FragmentRanges::all(),
        &WalkOptions::default(),
        &WalkState::default(),
    );
    let mut records = Vec::new();
    let mut tally = Tally::default();
    while let Some(batch) = fragments.try_next().await? {
        for fragment in batch {
            tally += fragment.counts().unwrap_or_default();
            records.push(fragment.record()?);
        }
    }
    report.set_counts(tally.counts("the new manifest")?);
    Ok(Fragments::Flat(records))
}

impl ConvertReport {
    fn set_counts(&mut self, counts: Counts) {
        self.fragments = counts.fragments;
        self.total_rows = counts.total_rows;
        self.visible_rows = counts.visible_rows;
    }
}

/// The rules a leaf's record must keep and a flat manifest's may break.
fn check_new_record(snapshot: &Snapshot, record: &pb::DataFragment) -> Result<()> {
    let label = format!("fragment {}", record.id);
    check_allocated(&label, record.id, snapshot.max_fragment_id())?;
    let overlays = record.overlays.iter().filter_map(|o| o.data_file.as_ref());
    for file in record.files.iter().chain(overlays) {
        check_mapping(
            &format!("{label}, file {}", file.path),
            file.file_major_version,
            file.file_minor_version,
            &file.fields,
            &file.column_indices,
        )?;
    }
    Ok(())
}

/// The records of a batch with their row counts known: read from the files where the manifest leaves
/// them out, or was written by a version known to have written wrong ones.
async fn known_records(
    snapshot: &Arc<Snapshot>,
    batch: Vec<ResolvedFragment>,
    report: &mut ConvertReport,
) -> Result<Vec<pb::DataFragment>> {
    let mut records = Vec::with_capacity(batch.len());
    let mut unknown = Vec::new();
    for fragment in &batch {
        let record = fragment.record()?;
        if fragment.physical_rows().is_none() {
            unknown.push(records.len());
        }
        records.push(record);
    }
    if unknown.is_empty() {
        return Ok(records);
    }
    let of_unknown: Vec<_> = unknown.iter().filter_map(|i| records.get(*i)).collect();
    let dataset = snapshot.dataset_with(of_unknown).await?;
    for index in unknown {
        let Some(record) = records.get_mut(index) else {
            continue;
        };
        recount(&dataset, record).await?;
        report.rows_recounted += 1;
    }
    Ok(records)
}

async fn recount(dataset: &lance::Dataset, record: &mut pb::DataFragment) -> Result<()> {
    let context = || format!("cannot count the rows of fragment {}", record.id);
    let id = usize::try_from(record.id).map_err(|_| Error::internal("a fragment id over usize"))?;
    let fragment = dataset
        .get_fragment(id)
        .ok_or_else(|| Error::internal(format!("fragment {id} vanished")))?;
    let physical = if record.files.is_empty() {
        0
    } else {
        fragment
            .physical_rows()
            .await
            .map_err(|e| Error::lance(context(), e))?
    };
    let deleted = fragment
        .get_deletion_vector()
        .await
        .map_err(|e| Error::lance(context(), e))?
        .map_or(0, |deleted| deleted.len());
    record.physical_rows = physical as u64;
    if deleted == 0 {
        // A deletion file of nothing may not stand in a leaf.
        record.deletion_file = None;
    } else if let Some(file) = &mut record.deletion_file {
        file.num_deleted_rows = deleted as u64;
    }
    Ok(())
}
