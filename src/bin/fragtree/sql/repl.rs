//! The prompt, and its silent twin for a pipe. Both take SQL over several lines up to a semicolon,
//! and the commands of `datafusion-cli` (`\d`, `\?`, `\pset format csv`, …).
//!
//! An error does not end either; a pipe makes the program exit non-zero after the last line.

use std::io::{self, BufRead};
use std::path::PathBuf;

use datafusion::error::DataFusionError;
use datafusion_cli::command::{Command, OutputFormat};
use datafusion_cli::helper::CliHelper;
use rustyline::Editor;
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;

use super::script;
use super::session::Shell;
use crate::failure::{self, Failure, Outcome};

/// Where earlier lines are kept, in the user's home.
const HISTORY: &str = ".fragtree_history";

/// What a line leads to.
enum Next {
    Continue,
    Quit,
}

/// Reads statements and commands from a terminal.
pub(crate) async fn prompt(shell: &mut Shell) -> Outcome {
    if !shell.print.quiet {
        crate::output::print(&format!("fragtree {}", env!("CARGO_PKG_VERSION")))?;
    }
    let history = std::env::home_dir().map(|home| home.join(HISTORY));
    let mut editor = editor(shell, history.as_ref())?;
    let end = lines(shell, &mut editor).await;
    if let Some(path) = &history
        && let Err(e) = editor.save_history(path)
    {
        eprintln!("cannot save the history in {}: {e}", path.display());
    }
    end
}

fn editor(shell: &Shell, history: Option<&PathBuf>) -> Outcome<Editor<CliHelper, DefaultHistory>> {
    let state = shell.ctx.state();
    let dialect = &state.config_options().sql_parser.dialect;
    let mut editor = Editor::new()?;
    editor.set_helper(Some(CliHelper::new(dialect, shell.print.color)));
    if let Some(path) = history.filter(|path| path.exists()) {
        editor.load_history(path)?;
    }
    Ok(editor)
}

async fn lines(shell: &mut Shell, editor: &mut Editor<CliHelper, DefaultHistory>) -> Outcome {
    loop {
        match editor.readline("> ") {
            Ok(line) => {
                editor.add_history_entry(line.trim_end())?;
                let next = tokio::select! {
                    next = enter(shell, &line) => next,
                    _ = tokio::signal::ctrl_c() => {
                        eprintln!("^C");
                        Ok(Next::Continue)
                    }
                };
                match next {
                    Ok(Next::Continue) => {}
                    Ok(Next::Quit) | Err(Failure::Closed) => return Ok(()),
                    Err(failure) => show(&failure),
                }
                if let Some(helper) = editor.helper_mut() {
                    // A SET may have changed it.
                    let state = shell.ctx.state();
                    helper.set_dialect(&state.config_options().sql_parser.dialect);
                }
            }
            Err(ReadlineError::Interrupted) => {
                if let Some(helper) = editor.helper() {
                    helper.reset_hint();
                }
            }
            Err(ReadlineError::Eof) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Reads statements and commands from a pipe or a file, without a prompt.
pub(crate) async fn piped(shell: &mut Shell) -> Outcome {
    let mut failed = false;
    let mut pending = String::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let dialect = shell.dialect()?;
        let command =
            line.starts_with('\\') && script::split(&pending, dialect.as_ref()).is_empty();
        if command {
            pending.clear();
        }
        pending.push_str(&line);
        pending.push('\n');
        let ends = command || line.contains(';') && script::is_complete(&pending, dialect.as_ref());
        if !ends {
            continue;
        }
        match enter(shell, &std::mem::take(&mut pending)).await {
            Ok(Next::Continue) => {}
            Ok(Next::Quit) => return finish(failed),
            Err(failure) => failed |= survives(failure)?,
        }
    }
    if let Err(failure) = enter(shell, &pending).await {
        failed |= survives(failure)?;
    }
    finish(failed)
}

/// Shows a failure that does not end the input.
fn survives(failure: Failure) -> Outcome<bool> {
    if matches!(failure, Failure::Closed) {
        return Err(failure);
    }
    show(&failure);
    Ok(true)
}

fn finish(failed: bool) -> Outcome {
    if failed {
        Err(Failure::Reported)
    } else {
        Ok(())
    }
}

fn show(failure: &Failure) {
    match failure {
        Failure::Error(error) => failure::print_error(error.as_ref()),
        Failure::Usage(message) => eprintln!("error: {message}"),
        Failure::Reported | Failure::Closed => {}
    }
}

/// Runs a command or some SQL.
async fn enter(shell: &mut Shell, text: &str) -> Outcome<Next> {
    let Some(command) = text.strip_prefix('\\') else {
        shell.run_script(text).await?;
        return Ok(Next::Continue);
    };
    let words = command.split_whitespace().collect::<Vec<_>>().join(" ");
    let unknown = || DataFusionError::Execution(format!("no command \\{words}; \\? lists them"));
    match words.parse::<Command>().map_err(|()| unknown())? {
        Command::Quit => return Ok(Next::Quit),
        Command::Include(Some(path)) => shell.run_file(path.as_ref()).await?,
        Command::OutputFormat(Some(setting)) => {
            let setting: OutputFormat = setting.parse().map_err(|()| unknown())?;
            setting.execute(&mut shell.print).await?;
        }
        Command::OutputFormat(None) => {
            crate::output::print(&format!("Output format is {:?}.", shell.print.format))?;
        }
        command => command.execute(&shell.ctx, &mut shell.print).await?,
    }
    Ok(Next::Continue)
}
