//! `fragtree demo`: a real table of a few thousand fragments in a scratch folder, converted, and the
//! same three queries on both layouts with what each opened and what it could skip.

mod measure;
mod table;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use fragtree::write::{ConvertOptions, ConvertReport, convert};
use fragtree::{Engine, VersionRef};

use crate::failure::{Failure, Outcome};
use crate::output::{self, Align, Grid};
use measure::{Cost, Query};
use table::{FIRST_CITY, ROWS_PER_FRAGMENT};

/// Leaves of the demo's tree. A real tree has far larger ones; a table this small would then have a
/// single leaf, with nothing to skip.
const LEAF_BYTES: u64 = 8 << 10;

/// Arguments of `fragtree demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Fragments of the table that is made.
    #[arg(long, value_name = "N", default_value_t = 3000, value_parser = clap::value_parser!(u32).range(20..=200_000))]
    fragments: u32,
}

/// Runs the command.
pub(crate) async fn run(args: DemoArgs) -> Outcome {
    let id = uuid::Uuid::new_v4().simple().to_string();
    let folder = std::env::temp_dir().join(format!("fragtree-demo-{}", &id[..8]));
    let uri = folder.join("demo.lance");
    let uri = uri.to_str().ok_or_else(|| {
        Failure::Usage(format!(
            "the folder for scratch files is not UTF-8: {}",
            uri.display()
        ))
    })?;

    let start = Instant::now();
    let fragments = u64::from(args.fragments);
    let (shown, rows) = (output::grouped(fragments), fragments * ROWS_PER_FRAGMENT);
    output::print(&format!("Writing {shown} fragments with Lance: {uri}"))?;
    let flat = table::write(uri, args.fragments).await?;
    let seconds = start.elapsed().as_secs_f64();
    output::print(&format!(
        "  {} rows in {seconds:.1} s\n\n",
        output::grouped(rows)
    ))?;

    let start = Instant::now();
    let report = to_tree(uri).await?;
    output::print(&converted(&report, start.elapsed().as_secs_f64()))?;

    let tree = report.to_version.unwrap_or(flat);
    let queries = queries(args.fragments);
    let mut grid = grid();
    for query in &queries {
        let on_flat = measure::run(uri, VersionRef::version(flat), query).await?;
        let on_tree = measure::run(uri, VersionRef::version(tree), query).await?;
        if on_flat.answer != on_tree.answer {
            return Err(Failure::Error(
                format!(
                    "{}: the layouts disagree: {on_flat:?}, {on_tree:?}",
                    query.sql
                )
                .into(),
            ));
        }
        output::print(&format!("{}\n  {}\n\n", query.sql, on_tree.answer))?;
        row(&mut grid, query.name, "flat", &on_flat, fragments);
        row(&mut grid, "", "tree", &on_tree, fragments);
    }
    output::print("What each read, from opening the table on, with nothing cached:\n\n")?;
    output::print(&grid.to_string())?;
    output::print(&farewell(&folder, uri, flat))
}

async fn to_tree(uri: &str) -> Outcome<ConvertReport> {
    let mut options = ConvertOptions::to_tree();
    options.policy.leaf_bytes = LEAF_BYTES;
    options.force = true;
    Ok(convert(uri, options, Engine::new().open_options()).await?)
}

fn converted(report: &ConvertReport, seconds: f64) -> String {
    let root = if report.root_inline {
        "in the manifest"
    } else {
        "an object of its own"
    };
    format!(
        "Converting it to a tree, with leaves of {} to have something to skip\n  \
         {}, {}, root {root}; manifest {} -> {}; {seconds:.1} s\n\n",
        output::bytes(LEAF_BYTES),
        plural(report.leaves, "leaf", "leaves"),
        plural(report.nodes, "node", "nodes"),
        output::bytes(report.source_manifest_bytes),
        output::bytes(report.manifest_bytes),
    )
}

fn plural(number: u64, one: &str, more: &str) -> String {
    format!(
        "{} {}",
        output::grouped(number),
        if number == 1 { one } else { more }
    )
}

fn queries(fragments: u32) -> [Query; 3] {
    let wanted = fragments / 3 * 2;
    let address = (u64::from(wanted) << 32) + 7;
    let last = wanted + 9;
    [
        Query {
            name: "count",
            sql: "SELECT COUNT(*) FROM t".to_string(),
        },
        Query {
            name: "one row by address",
            sql: format!("SELECT id, city, amount FROM t WHERE _rowaddr = {address}"),
        },
        Query {
            name: "ten fragments, filtered",
            sql: format!(
                "SELECT COUNT(*), SUM(amount) FROM t \
                 WHERE _fragid BETWEEN {wanted} AND {last} AND city = '{FIRST_CITY}'"
            ),
        },
    ]
}

fn grid() -> Grid {
    let right = |name| (name, Align::Right);
    Grid::new(&[
        ("query", Align::Left),
        ("layout", Align::Left),
        right("time"),
        right("requests"),
        right("bytes"),
        right("tree objects"),
        right("skipped"),
        right("fragments scanned"),
    ])
}

fn row(grid: &mut Grid, name: &str, layout: &str, cost: &Cost, fragments: u64) {
    // The list of a flat version is read whole and opens no tree objects.
    let tree = |number: u64| {
        if layout == "tree" {
            output::grouped(number)
        } else {
            "-".to_string()
        }
    };
    grid.row([
        name.to_string(),
        layout.to_string(),
        format!("{:.1} ms", cost.seconds * 1000.0),
        output::grouped(cost.requests),
        output::bytes(cost.bytes),
        tree(cost.opened),
        tree(cost.skipped),
        format!(
            "{} of {}",
            output::grouped(cost.fragments),
            output::grouped(fragments)
        ),
    ]);
}

fn farewell(folder: &Path, uri: &str, flat: u64) -> String {
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("fragtree"));
    let program = program.display();
    format!(
        "
A flat manifest lists every fragment, and whoever opens the table reads all of it. Of a tree a query
reads the root and the paths it needs, however many fragments there are.

Look around:
  {program} sql --table t={uri} --table flat={uri}@{flat} --system-columns _rowaddr,_fragid
  {program} inspect {uri}
  {program} verify {uri}
  {program} convert {uri} --to flat
Clean up:
  rm -r {}
",
        folder.display()
    )
}
