//! `fragtree optimize`: reorganize the tree of a table.

use clap::Args;
use fragtree::write::{CommitReport, TreeTable, WriteOptions};
use fragtree::{Engine, VersionRef};
use serde::Serialize;

use crate::args::{ReportFormat, StorageArgs};
use crate::failure::Outcome;
use crate::output::{self, Facts};

/// Arguments of `fragtree optimize`.
#[derive(Debug, Args)]
pub(crate) struct OptimizeArgs {
    /// Path or URL of the table.
    uri: String,
    /// A branch, instead of the main one.
    #[arg(long)]
    branch: Option<String>,
    #[command(flatten)]
    storage: StorageArgs,
    /// How to report.
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    format: ReportFormat,
}

#[derive(Serialize)]
struct Report<'a> {
    table: &'a str,
    /// The commit; none when there was nothing to gain.
    commit: Option<CommitReport>,
}

/// Runs the command.
pub(crate) async fn run(args: OptimizeArgs) -> Outcome {
    let reference = VersionRef {
        branch: args.branch.clone(),
        ..VersionRef::latest()
    };
    let open = Engine::new()
        .open_options()
        .with_storage_options(args.storage.of(&args.uri)?)
        .with_reference(reference);
    let table = TreeTable::open(&args.uri, open, WriteOptions::default()).await?;
    let report = Report {
        table: &args.uri,
        commit: table.optimize_tree().await?,
    };
    match args.format {
        ReportFormat::Json => output::print_json(&report),
        ReportFormat::Text => output::print(&text(&report)),
    }
}

fn text(report: &Report<'_>) -> String {
    let mut facts = Facts::default();
    facts.add("table", report.table);
    let Some(commit) = &report.commit else {
        facts.add("tree", "in good shape, nothing written");
        return facts.to_string();
    };
    let sized = |objects, bytes| {
        let objects = output::counted(objects, "object");
        format!("{objects}, {}", output::bytes(bytes))
    };
    facts.add("to", format!("version {}", commit.version));
    facts.add("read", sized(commit.objects_read, commit.object_bytes_read));
    facts.add(
        "written",
        sized(commit.objects_written, commit.object_bytes_written),
    );
    facts.add("manifest", output::bytes(commit.manifest_bytes));
    facts.to_string()
}
