//! What metadata costs: Lance's flat manifest against a fragment tree, from a thousand fragments to a
//! million.
//!
//! ```text
//!  tables   fabricate, once: a few real fragments, the rest records only; a copy converted to a tree
//!  child    one cold process for each measurement: open, query, print what it took
//!  matrix   which measurements; the sides take turns, answers must agree
//!  report   medians against the targets, as Markdown, and plots
//! ```
//!
//! With `--writes` it is what commits cost, in the same way: `writes` says which, on copies of the same
//! tables, `writes_child` makes them, `writes_report` tells.
//!
//! `cargo xtask bench --help` lists the options.

mod child;
mod matrix;
mod meter;
mod plan;
mod plot;
mod report;
mod tables;
mod writes;
mod writes_child;
mod writes_plan;
mod writes_plots;
mod writes_report;

use std::path::PathBuf;
use std::process::ExitCode;

use plan::{Result, Task};
use serde::Serialize;
use serde::de::DeserializeOwned;
use writes_plan::{WritePolicy, WriteTask};

const HELP: &str = "\
cargo xtask bench [OPTIONS]

  --quick              small tables and three repetitions: shows that everything runs
  --only TEXT          measurements whose `table/work/store` contains TEXT; may be repeated
  --reps N             repetitions of each measurement (default 5)
  --leaf-bytes N       sizes of the tree that is measured, instead of the default policy's;
  --node-bytes N       trees of different sizes are kept side by side
  --root-bytes N
  --rebuild            make the trees anew, after a change of the writer
  --out DIR            keep every measurement in DIR/results.json; what is measured again is replaced
  --docs               write docs/benchmarks.md and its plots from all that is in --out
  --writes             measure commits, not queries: DIR/writes.json, docs/write-benchmarks.md
  --policy NAME        with --writes, the tree's policy: default, one-sidecar, two-levels, or one of
                       them with sizes of its own (default,buffer_bytes=65536); may be repeated
  --no-run             measure nothing: with --docs, only write

Tables are made once and kept in $FRAGTREE_BENCH_DIR (default: target/tmp of this build), about 5 GB.
";

/// What the command line asks for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    pub quick: bool,
    pub only: Vec<String>,
    pub reps: Option<usize>,
    pub policy: plan::Policy,
    pub rebuild: bool,
    pub out: Option<PathBuf>,
    pub docs: bool,
    pub no_run: bool,
    pub writes: bool,
    pub write_policies: Vec<WritePolicy>,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.first().map(String::as_str) {
        Some("--child") => run_child(|task: Task| async move { child::run(&task).await }),
        Some("--write-child") => {
            run_child(|task: WriteTask| async move { writes_child::run(&task).await })
        }
        _ => run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("metadata bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Vec<String>) -> Result<()> {
    // `cargo test --all-targets` runs benches too, without this argument.
    let benching = args.iter().any(|a| a == "--bench");
    if args.iter().any(|a| a == "--help") {
        print!("{HELP}");
        return Ok(());
    }
    let options = parse(args)?;
    if !benching {
        println!("nothing measured: run with `cargo xtask bench`");
        return Ok(());
    }
    if options.writes {
        return writes::run(&options);
    }
    matrix::run(&options)
}

/// Takes a task from standard input and prints what it gave as one line of JSON.
fn run_child<T, A, F>(run: impl FnOnce(T) -> F) -> Result<()>
where
    T: DeserializeOwned,
    A: Serialize,
    F: Future<Output = Result<A>>,
{
    let task: T = serde_json::from_reader(std::io::stdin().lock())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let answer = runtime.block_on(run(task))?;
    println!("{}", serde_json::to_string(&answer)?);
    Ok(())
}

fn parse(args: Vec<String>) -> Result<Options> {
    let mut options = Options::default();
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--bench" => {}
            "--quick" => options.quick = true,
            "--only" => options.only.push(value()?),
            "--reps" => options.reps = Some(value()?.parse()?),
            "--leaf-bytes" => options.policy.leaf_bytes = value()?.parse()?,
            "--node-bytes" => options.policy.node_bytes = value()?.parse()?,
            "--root-bytes" => options.policy.inline_root_bytes = value()?.parse()?,
            "--rebuild" => options.rebuild = true,
            "--out" => options.out = Some(value()?.into()),
            "--docs" => options.docs = true,
            "--no-run" => options.no_run = true,
            "--writes" => options.writes = true,
            "--policy" => options.write_policies.push(WritePolicy::parse(&value()?)?),
            _ => return Err(format!("unknown option {arg}\n\n{HELP}").into()),
        }
    }
    if options.docs && options.out.is_none() {
        return Err("--docs writes what is in --out: name both".into());
    }
    Ok(options)
}
