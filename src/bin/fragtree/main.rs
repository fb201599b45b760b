//! The `fragtree` command line: a SQL prompt over Lance tables, and the tools that look after them.
//!
//! ```text
//!   main ──► args ──► sql       session ─► statement / script ─► stdout
//!                     inspect   what a version is made of
//!                     verify    every rule of the format, on every object
//!                     convert   flat ◄─► tree
//!                     optimize  a tree whose shape has suffered
//!                     cleanup   versions and files that nobody needs, gone
//!                     demo      the above in a scratch folder
//! ```
//!
//! Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed or found something
//! wrong, 2 the command line makes no sense.

mod args;
mod cleanup;
mod convert;
mod demo;
mod failure;
mod inspect;
mod optimize;
mod output;
mod sql;
mod verify;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::failure::Outcome;

/// Query and look after Lance tables whose fragment metadata is a tree.
#[derive(Debug, Parser)]
#[command(name = "fragtree", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run SQL over Lance tables: a prompt, commands or files.
    Sql(sql::SqlArgs),
    /// Show what a version is made of.
    Inspect(inspect::InspectArgs),
    /// Check a whole version against every rule of the format.
    Verify(verify::VerifyArgs),
    /// Publish a tree version of a flat table, or a flat version of a tree table.
    Convert(convert::ConvertArgs),
    /// Reorganize the tree of a table: drain its buffers, join small objects, divide large ones.
    Optimize(optimize::OptimizeArgs),
    /// Remove old versions, and the files that nothing needs any more.
    Cleanup(cleanup::CleanupArgs),
    /// Make a table in a scratch folder, convert it, and compare what queries cost.
    Demo(demo::DemoArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    failure::exit_quietly_when_stdout_closes();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(run(cli.command)),
        Err(e) => Err(e.into()),
    };
    failure::report(outcome.and_then(|()| Ok(std::io::stdout().flush()?)))
}

async fn run(command: Command) -> Outcome {
    match command {
        Command::Sql(args) => sql::run(args).await,
        Command::Inspect(args) => inspect::run(args).await,
        Command::Verify(args) => verify::run(args).await,
        Command::Convert(args) => convert::run(args).await,
        Command::Optimize(args) => optimize::run(args).await,
        Command::Cleanup(args) => cleanup::run(args).await,
        Command::Demo(args) => demo::run(args).await,
    }
}
