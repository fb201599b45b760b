//! `fragtree convert`: from a flat version to a tree version and back.

use clap::{Args, ValueEnum};
use fragtree::write::{ConvertOptions, ConvertReport, TreePolicy, convert};
use fragtree::{Engine, Layout, VersionRef};

use crate::args::{ReportFormat, StorageArgs, parse_bytes};
use crate::failure::{Failure, Outcome};
use crate::output::{self, Facts};

/// Arguments of `fragtree convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// Path or URL of the table. Its latest version is converted.
    uri: String,
    /// A branch, instead of the main one.
    #[arg(long)]
    branch: Option<String>,
    /// The layout of the new version.
    #[arg(long, value_enum, default_value_t = Target::Tree)]
    to: Target,
    /// Work out the sizes and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Convert even when the table has too few fragments to gain from it.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    policy: PolicyArgs,
    #[command(flatten)]
    storage: StorageArgs,
    /// How to report.
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    format: ReportFormat,
}

/// The layouts, as they are written on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// Fragment records in a tree.
    Tree,
    /// Fragment records in the manifest, as released Lance reads them.
    Flat,
}

/// The shape of a tree. Sizes are bytes, or 64KiB, 2MiB.
#[derive(Debug, Clone, Args)]
struct PolicyArgs {
    /// Size a leaf should have.
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    leaf_bytes: Option<u64>,
    /// Size an interior node should have.
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    node_bytes: Option<u64>,
    /// A root up to this size goes into the manifest.
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    inline_root_bytes: Option<u64>,
    /// Changes that later commits may gather in an interior node.
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    buffer_bytes: Option<u64>,
    /// Changes that later commits may gather in the root.
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    root_buffer_bytes: Option<u64>,
    /// Changes that later commits may gather beside a root that is not in the manifest.
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    since_root_bytes: Option<u64>,
    /// Fewer fragments than this stay flat.
    #[arg(long, value_name = "N")]
    min_fragments: Option<u64>,
}

impl PolicyArgs {
    fn is_given(&self) -> bool {
        let sizes = [
            self.leaf_bytes,
            self.node_bytes,
            self.inline_root_bytes,
            self.buffer_bytes,
            self.root_buffer_bytes,
            self.since_root_bytes,
            self.min_fragments,
        ];
        sizes.iter().any(Option::is_some)
    }

    fn shape(&self, policy: &mut TreePolicy) {
        for (given, size) in [
            (self.leaf_bytes, &mut policy.leaf_bytes),
            (self.node_bytes, &mut policy.node_bytes),
            (self.inline_root_bytes, &mut policy.inline_root_bytes),
            (self.buffer_bytes, &mut policy.buffer_bytes),
            (self.root_buffer_bytes, &mut policy.root_buffer_bytes),
            (self.since_root_bytes, &mut policy.since_root_bytes),
            (self.min_fragments, &mut policy.min_fragments),
        ] {
            *size = given.unwrap_or(*size);
        }
    }
}

/// Runs the command.
pub(crate) async fn run(args: ConvertArgs) -> Outcome {
    let options = options(&args)?;
    let reference = VersionRef {
        branch: args.branch.clone(),
        ..VersionRef::latest()
    };
    let open = Engine::new()
        .open_options()
        .with_storage_options(args.storage.of(&args.uri)?);
    let open = open.with_reference(reference);
    let report = convert(&args.uri, options, open).await?;
    match args.format {
        ReportFormat::Json => output::print_json(&report),
        ReportFormat::Text => output::print(&text(&args.uri, &report)),
    }
}

fn options(args: &ConvertArgs) -> Outcome<ConvertOptions> {
    let mut options = match args.to {
        Target::Tree => ConvertOptions::to_tree(),
        Target::Flat if args.policy.is_given() => {
            return Err(Failure::Usage(
                "a flat version has no tree to shape: --to flat takes none of --leaf-bytes, \
                 --node-bytes, --inline-root-bytes, --buffer-bytes, --root-buffer-bytes, \
                 --since-root-bytes, --min-fragments"
                    .to_string(),
            ));
        }
        Target::Flat => ConvertOptions::to_flat(),
    };
    options.dry_run = args.dry_run;
    options.force = args.force;
    args.policy.shape(&mut options.policy);
    Ok(options)
}

fn text(uri: &str, report: &ConvertReport) -> String {
    let mut facts = Facts::default();
    facts.add("table", uri);
    facts.add(
        "from",
        format!("version {}, {}", report.from_version, report.from),
    );
    facts.add(
        "to",
        match report.to_version {
            Some(version) => format!("version {version}, {}", report.to),
            None => format!("{} (dry run, nothing written)", report.to),
        },
    );
    let fragments = output::counted(report.fragments, "fragment");
    let rows = output::counted(report.visible_rows, "row");
    facts.add("holds", format!("{fragments}, {rows}"));
    facts.add(
        "manifest",
        format!(
            "{} -> {}",
            output::bytes(report.source_manifest_bytes),
            output::bytes(report.manifest_bytes)
        ),
    );
    if report.to == Layout::Tree.to_string() {
        let place = if report.root_inline {
            "in the manifest"
        } else {
            "an object"
        };
        facts.add(
            "root",
            format!("{}, {place}", output::bytes(report.root_bytes)),
        );
        facts.add("nodes", sized(report.nodes, report.node_bytes));
        facts.add("leaves", sized(report.leaves, report.leaf_bytes));
        facts.add("height", report.height.to_string());
    }
    if report.rows_recounted > 0 {
        let recounted = output::counted(report.rows_recounted, "fragment");
        facts.add("recounted", format!("{recounted}, from their data files"));
    }
    facts.to_string()
}

fn sized(number: u64, bytes: u64) -> String {
    format!("{}, {}", output::grouped(number), output::bytes(bytes))
}
