//! `fragtree sql`: the `datafusion-cli` shell with Lance tables in it.
//!
//! ```text
//!   -c text, -f file ─┐
//!   stdin (pipe) ─────┼─ script: one statement at a time ─► statement: plan, run, print
//!   prompt ───────────┘  repl: also \d, \?, \pset, history
//! ```
//!
//! `datafusion-cli` does the printing and knows the commands. Two things are ours: statements are cut
//! where the SQL tokenizer says, so that the first error can stop a script, and `STORED AS LANCE`
//! does not pass through its handling of file formats, which refuses options it does not know.

mod repl;
mod script;
mod session;
mod statement;

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use datafusion_cli::print_format::PrintFormat;
use datafusion_cli::print_options::MaxRows;
use fragtree::{Refresh, SystemColumns};

use crate::args::{NamedTable, StorageArgs};
use crate::failure::{Failure, Outcome};
use session::Shell;

/// Arguments of `fragtree sql`.
#[derive(Debug, Args)]
pub(crate) struct SqlArgs {
    /// A table to register: NAME=URI follows new versions, NAME=URI@REF stays at a version number, a
    /// tag or a timestamp; repeatable.
    #[arg(long = "table", value_name = "NAME=URI[@REF]")]
    tables: Vec<NamedTable>,
    /// Register every table (NAME.lance) of this directory.
    #[arg(long = "dir", value_name = "URI")]
    directory: Option<String>,
    /// System columns to expose, of `_rowaddr,_rowid,_fragid`.
    #[arg(long, value_name = "LIST")]
    system_columns: Option<SystemColumns>,
    /// How often the tables of --table and --dir look for newer versions: `always`, at each query;
    /// `off`, never; or after a time such as 5s.
    #[arg(long, value_name = "WHEN", default_value = "always")]
    refresh: Refresh,
    #[command(flatten)]
    storage: StorageArgs,
    /// Run this SQL and exit; repeatable.
    #[arg(
        short = 'c',
        long = "command",
        value_name = "SQL",
        allow_hyphen_values = true
    )]
    commands: Vec<String>,
    /// Run the SQL in this file and exit; repeatable. Files run before commands.
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How results are printed; `automatic` is a table.
    #[arg(long, value_enum, default_value_t = PrintFormat::Automatic)]
    format: PrintFormat,
    /// Print results only.
    #[arg(short, long)]
    quiet: bool,
    /// Rows a table shows: a number, or `inf`. Other formats print every row.
    #[arg(long, value_name = "N", default_value = "40")]
    maxrows: MaxRows,
}

/// Runs the command.
pub(crate) async fn run(args: SqlArgs) -> Outcome {
    let mut shell = Shell::start(&args).await?;
    if args.commands.is_empty() && args.files.is_empty() {
        return if std::io::stdin().is_terminal() {
            repl::prompt(&mut shell).await
        } else {
            repl::piped(&mut shell).await
        };
    }
    for file in &args.files {
        shell.run_file(file).await?;
    }
    for command in &args.commands {
        if command.trim().is_empty() {
            return Err(Failure::Usage("-c needs a statement".to_string()));
        }
        shell.run_script(command).await?;
    }
    Ok(())
}
