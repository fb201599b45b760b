//! `fragtree verify`: a whole version against every rule; everything that is wrong, listed.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use fragtree::Engine;
use fragtree::verify::{Finding, VerifyOptions, VerifyProgress, VerifyReport, verify};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::{ReportFormat, TargetArgs};
use crate::failure::{Failure, Outcome};
use crate::output;

/// Arguments of `fragtree verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// How to report.
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    format: ReportFormat,
    /// Check the metadata only: do not look whether data and deletion files exist and are as long as
    /// their records say.
    #[arg(long)]
    no_data_files: bool,
}

/// Runs the command.
pub(crate) async fn run(args: VerifyArgs) -> Outcome {
    let engine = Engine::new();
    let open = args.target.open_options(&engine)?;
    let options = VerifyOptions {
        data_files: !args.no_data_files,
    };
    let bar = progress_bar();
    let report = verify(&args.target.uri, options, open, |progress| {
        show(&bar, &progress)
    })
    .await;
    bar.finish_and_clear();
    let report = report?;
    match args.format {
        ReportFormat::Json => output::print_json(&report)?,
        ReportFormat::Text => output::print(&text(&report))?,
    }
    if report.ok() {
        Ok(())
    } else {
        Err(Failure::Reported)
    }
}

/// Drawn on stderr, and only where someone watches.
fn progress_bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(0);
    let template = "{bar:30} {human_pos}/{human_len} objects, {msg} fragments, {elapsed}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn show(bar: &ProgressBar, progress: &VerifyProgress) {
    bar.set_length(progress.objects_known);
    bar.set_position(progress.objects_done);
    bar.set_message(output::grouped(progress.fragments));
}

fn text(report: &VerifyReport) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        let Finding {
            object,
            rule,
            expected,
            found,
        } = finding;
        let object = if object.is_empty() {
            "the table"
        } else {
            object
        };
        text.push_str(&format!(
            "{object}: {rule}: expected {expected}, found {found}\n"
        ));
    }
    let version = report
        .version
        .map_or(String::new(), |version| format!("version {version} of "));
    let layout = report
        .layout
        .as_ref()
        .map_or(String::new(), |layout| format!(" ({layout})"));
    let checked = [
        output::counted(report.objects, "object"),
        output::counted(report.fragments, "fragment"),
        output::counted(report.visible_rows, "row"),
        output::counted(report.files, "file"),
    ];
    let verdict = match report.findings.len() {
        0 => "nothing wrong".to_string(),
        n => output::counted(n as u64, "finding"),
    };
    let checked = checked.join(", ");
    text.push_str(&format!(
        "{verdict}: {version}{}{layout}, {checked}\n",
        report.uri
    ));
    text
}
