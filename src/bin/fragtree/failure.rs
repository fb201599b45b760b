//! How a command ends badly: one line on stderr, and an exit code.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use datafusion::common::SchemaError;
use datafusion::error::DataFusionError;
use fragtree::{SystemColumn, plain_message};

/// Why a command stopped.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something went wrong; reported as one line.
    Error(Box<dyn Error + Send + Sync>),
    /// The arguments contradict each other.
    Usage(String),
    /// Already reported in the output: findings, or a statement of a script.
    Reported,
    /// Whoever read stdout went away, as `head` does. Not an error.
    Closed,
}

/// What a command returns.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl<E: Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        if is_broken_pipe(&error) && stdout_is_closed() {
            Self::Closed
        } else {
            Self::Error(Box::new(error))
        }
    }
}

/// Prints what there is to print and chooses the exit code.
pub(crate) fn report(outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(()) | Err(Failure::Closed) => ExitCode::SUCCESS,
        Err(Failure::Reported) => ExitCode::FAILURE,
        Err(Failure::Error(error)) => {
            print_error(error.as_ref());
            ExitCode::FAILURE
        }
        Err(Failure::Usage(message)) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}

/// Prints an error as one line on stderr.
pub(crate) fn print_error(error: &(dyn Error + 'static)) {
    eprintln!("error: {}", describe(error));
}

/// An error and its sources in one line. Many errors repeat their source in their own text; a source
/// is added only where it says something new.
pub(crate) fn describe(error: &(dyn Error + 'static)) -> String {
    let mut text = one_line(unwrapped(error));
    // Envelopes that were looked through do not come up again.
    let mut source = unwrapped(error).source();
    while let Some(error) = source {
        let more = one_line(unwrapped(error));
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    match missing_system_column(error) {
        Some(column) => format!(
            "{text} A table has {column} where it shows its system columns: start with \
             --system-columns {column}, or give it the option system_columns '{column}'."
        ),
        None => text,
    }
}

/// The system column a statement names that its table does not show.
fn missing_system_column(error: &(dyn Error + 'static)) -> Option<&'static str> {
    let DataFusionError::SchemaError(schema, _) =
        error.downcast_ref::<DataFusionError>()?.find_root()
    else {
        return None;
    };
    let SchemaError::FieldNotFound { field, .. } = schema.as_ref() else {
        return None;
    };
    SystemColumn::from_name(field.name()).map(SystemColumn::name)
}

/// Looks through DataFusion's envelopes around another's error, which add only a word.
fn unwrapped<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    match error.downcast_ref::<DataFusionError>() {
        Some(DataFusionError::External(inner)) => unwrapped(inner.as_ref()),
        Some(DataFusionError::SQL(inner, _)) => inner.as_ref(),
        // Which statement was running, when the error says it better.
        Some(DataFusionError::Context(_, inner)) if is_ours(inner.as_ref()) => {
            unwrapped(inner.as_ref())
        }
        _ => error,
    }
}

fn is_ours(error: &(dyn Error + 'static)) -> bool {
    unwrapped(error).is::<fragtree::Error>()
}

fn one_line(error: &(dyn Error + 'static)) -> String {
    let text = plain_message(&error.to_string());
    let lines: Vec<_> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    lines.join(" ")
}

/// Writers in between may have turned the operating system's error into text, as CSV does.
fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>()
            && io.kind() == io::ErrorKind::BrokenPipe
        {
            return true;
        }
        next = error.source();
    }
    error.to_string().contains("Broken pipe")
}

/// The pipe that broke may be a connection to a store: only stdout itself knows.
fn stdout_is_closed() -> bool {
    let mut out = io::stdout().lock();
    let probe = out.write_all(b"\n").and_then(|()| out.flush());
    probe.is_err_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// `datafusion-cli` answers some commands with `println!`, which panics when stdout is closed. That
/// panic, and no other, ends the program quietly. Tasks of Lance that are cancelled when a query has
/// failed panic too, and so does its decoder when a leaf is broken; of those nothing is said, since
/// the error of the query is.
pub(crate) fn exit_quietly_when_stdout_closes() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload_as_str().unwrap_or_default();
        if text.starts_with("failed printing to stdout") && text.contains("Broken pipe") {
            std::process::exit(0);
        }
        if fragtree::panic_is_caught() {
            return;
        }
        let of_lance = info
            .location()
            .is_some_and(|place| place.file().contains("lance"));
        if of_lance && text.contains("JoinError::Cancelled") {
            return;
        }
        default(info);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_each_thing_once() {
        let inner = fragtree::Error::invalid("no such\n  column");
        let outer = DataFusionError::External(Box::new(inner));
        assert_eq!(describe(&outer), "no such column");
    }

    #[test]
    fn says_what_is_wrong_and_not_where_it_passed() {
        let inner = DataFusionError::External(Box::new(fragtree::Error::invalid("no such thing")));
        let outer = inner.context("UPDATE operation on table 't'");
        assert_eq!(describe(&outer), "no such thing");
    }

    #[test]
    fn says_how_to_see_a_system_column() {
        let error = |name| {
            let missing = datafusion::common::Column::new(Some("t"), name);
            datafusion::common::DFSchema::empty()
                .index_of_column(&missing)
                .expect_err("no such column")
        };
        let text = describe(&error("_rowaddr"));
        assert!(text.contains("--system-columns _rowaddr"), "{text}");
        assert!(!describe(&error("_row")).contains("--system-columns"));
    }

    #[test]
    fn finds_a_broken_pipe_below_other_errors() {
        let pipe = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_broken_pipe(&DataFusionError::IoError(pipe)));
        assert!(!is_broken_pipe(&io::Error::from(io::ErrorKind::NotFound)));
    }
}
