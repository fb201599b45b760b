//! `fragtree cleanup`: remove versions nobody needs, and the files that nothing needs any more.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::Args;
use fragtree::write::cleanup::{RemovedKind, parse_duration};
use fragtree::write::{CleanupOptions, CleanupProgress, CleanupReport, cleanup};
use fragtree::{Engine, VersionRef, parse_timestamp};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::{ReportFormat, StorageArgs};
use crate::failure::{Failure, Outcome};
use crate::output::{self, Align, Facts, Grid};

/// Arguments of `fragtree cleanup`.
#[derive(Debug, Args)]
#[command(after_help = "\
A version goes when it meets every condition given. Without --older-than, --before, --keep,
--before-version or --version, those older than 7 days go. The latest version, tagged and detached
ones and those that a branch needs stay. Files that no version names go when they are 7 days old: a
commit may be about to name younger ones.")]
pub(crate) struct CleanupArgs {
    /// Path or URL of the table.
    uri: String,
    /// A branch, instead of the main one.
    #[arg(long)]
    branch: Option<String>,
    #[command(flatten)]
    which: WhichArgs,
    /// Remove nothing, report what would go.
    #[arg(long)]
    dry_run: bool,
    /// Clean up around tagged versions instead of refusing when one would go.
    #[arg(long)]
    keep_tagged: bool,
    /// First clean the branches that began from a version that would go, each by the
    /// lance.auto_cleanup settings in its own config.
    #[arg(long)]
    clean_branches: bool,
    /// Also remove files that no version names and that are less than 7 days old. Only when nobody
    /// writes to the table.
    #[arg(long)]
    delete_unverified: bool,
    /// Removals in a second, at most.
    #[arg(long, value_name = "N")]
    rate: Option<u64>,
    /// Removals at once.
    #[arg(long, value_name = "N")]
    concurrency: Option<usize>,
    /// Files to name in the report; all are counted. Text names none unless this is given.
    #[arg(long, value_name = "N")]
    list: Option<usize>,
    #[command(flatten)]
    storage: StorageArgs,
    /// How to report.
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    format: ReportFormat,
}

/// Which versions go.
#[derive(Debug, Args)]
struct WhichArgs {
    /// Versions written longer ago than this: 7d, 12h, 2weeks.
    #[arg(long, value_name = "SPAN", value_parser = parse_duration)]
    older_than: Option<Duration>,
    /// Versions written before this moment.
    #[arg(long, value_name = "TIME", value_parser = parse_timestamp)]
    before: Option<DateTime<Utc>>,
    /// All versions but the last N.
    #[arg(long, value_name = "N")]
    keep: Option<usize>,
    /// Versions below this number.
    #[arg(long, value_name = "N")]
    before_version: Option<u64>,
    /// This version; repeatable. The only way to remove a detached one.
    #[arg(long = "version", value_name = "N")]
    versions: Vec<u64>,
}

/// Runs the command.
pub(crate) async fn run(args: CleanupArgs) -> Outcome {
    let options = options(&args);
    let reference = VersionRef {
        branch: args.branch.clone(),
        ..VersionRef::latest()
    };
    let open = Engine::new()
        .open_options()
        .with_storage_options(args.storage.of(&args.uri)?)
        .with_reference(reference);
    let bar = progress_bar();
    let report = cleanup(&args.uri, options, open, |progress| show(&bar, &progress)).await;
    bar.finish_and_clear();
    let report = report?;
    match args.format {
        ReportFormat::Json => output::print_json(&report)?,
        ReportFormat::Text => output::print(&text(&report))?,
    }
    let gone = |version: &&u64| report.removed_versions.contains(version);
    let kept = args.which.versions.iter().filter(|v| !gone(v));
    let kept: Vec<_> = kept.map(u64::to_string).collect();
    if !kept.is_empty() {
        eprintln!(
            "error: not removed: version {} (not there, the latest, tagged, needed by a branch, or not meeting every condition)",
            kept.join(", ")
        );
        return Err(Failure::Reported);
    }
    if report.failures == 0 {
        Ok(())
    } else {
        Err(Failure::Reported)
    }
}

fn options(args: &CleanupArgs) -> CleanupOptions {
    let which = &args.which;
    let versions: BTreeSet<u64> = which.versions.iter().copied().collect();
    let versions = (!versions.is_empty()).then_some(versions);
    let given = which.older_than.is_some()
        || which.before.is_some()
        || which.keep.is_some()
        || which.before_version.is_some()
        || versions.is_some();
    let defaults = CleanupOptions::default();
    CleanupOptions {
        older_than: if given {
            which.older_than
        } else {
            defaults.older_than
        },
        before: which.before,
        keep: which.keep,
        before_version: which.before_version,
        versions,
        delete_unverified: args.delete_unverified,
        error_if_tagged: !args.keep_tagged,
        clean_referenced_branches: args.clean_branches,
        delete_rate_limit: args.rate,
        delete_concurrency: args.concurrency,
        dry_run: args.dry_run,
        list_files: match (args.list, args.format) {
            (Some(list), _) => list,
            (None, ReportFormat::Json) => defaults.list_files,
            (None, ReportFormat::Text) => 0,
        },
    }
}

/// Drawn on stderr, and only where someone watches.
fn progress_bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(0);
    let template = "{bar:30} {human_pos}/{human_len} versions, {msg}, {elapsed}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn show(bar: &ProgressBar, progress: &CleanupProgress) {
    bar.set_length(progress.versions_known);
    bar.set_position(progress.versions_done);
    bar.set_message(format!(
        "{} read, {} looked at, {} removed",
        output::counted(progress.objects, "object"),
        output::counted(progress.files_listed, "file"),
        output::grouped(progress.files_removed)
    ));
}

fn text(report: &CleanupReport) -> String {
    let mut text = String::new();
    for file in &report.files {
        text.push_str(&format!(
            "{}  {}, {}\n",
            file.path,
            file.why,
            output::bytes(file.bytes)
        ));
    }
    for failed in &report.failed {
        text.push_str(&format!("not removed: {}: {}\n", failed.path, failed.error));
    }
    for warning in &report.warnings {
        text.push_str(&format!("warning: {warning}\n"));
    }
    if !report.removed.is_empty() {
        text.push_str(&grid(&report.removed));
    }
    let total = report.total();
    let mut facts = Facts::default();
    facts.add("table", &report.uri);
    let went = if report.dry_run {
        "would go"
    } else {
        "removed"
    };
    facts.add(
        went,
        format!(
            "{}, {} ({})",
            output::counted(report.removed_versions.len() as u64, "version"),
            output::counted(total.files, "file"),
            output::bytes(total.bytes)
        ),
    );
    facts.add("kept", output::counted(report.kept_versions, "version"));
    if report.in_progress.files > 0 {
        facts.add(
            "too young",
            format!(
                "{} that no version names ({})",
                output::counted(report.in_progress.files, "file"),
                output::bytes(report.in_progress.bytes)
            ),
        );
    }
    for branch in &report.branches {
        let kept = if branch.keeps_version {
            ", kept for it"
        } else {
            ""
        };
        let cleaned = if branch.cleaned { ", cleaned too" } else { "" };
        let began = format!("from version {}{kept}{cleaned}", branch.version);
        facts.add(&format!("branch {}", branch.name), began);
    }
    if report.failures > 0 {
        facts.add("not removed", output::counted(report.failures, "file"));
    }
    text.push_str(&facts.to_string());
    text
}

fn grid(removed: &[RemovedKind]) -> String {
    let mut grid = Grid::new(&[
        ("what", Align::Left),
        ("why", Align::Left),
        ("files", Align::Right),
        ("bytes", Align::Right),
    ]);
    for removed in removed {
        grid.row([
            removed.kind.to_string(),
            removed.why.to_string(),
            output::grouped(removed.tally.files),
            output::bytes(removed.tally.bytes),
        ]);
    }
    grid.to_string()
}
