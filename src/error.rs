//! The one error type of the crate, and its conversions.
//!
//! The kinds are chosen by what the reader of the message would do next: fix the request
//! ([`Error::InvalidInput`], [`Error::NotFound`]), repair the table ([`Error::Corrupt`]), upgrade
//! ([`Error::Unsupported`]), try again ([`Error::Conflict`], [`Error::Store`]) or report a bug
//! ([`Error::Internal`]). Conversions from and to DataFusion live here and nowhere else.

use std::sync::Arc;

use datafusion::error::DataFusionError;

/// Result with the crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in fragtree.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request itself cannot be served: a bad option, an impossible combination.
    #[error("{message}")]
    InvalidInput {
        /// What is wrong and what to do instead.
        message: String,
    },
    /// A table, version, tag or branch that was asked for does not exist.
    #[error("{what} not found{hint}")]
    NotFound {
        /// The thing that was asked for, with its location.
        what: String,
        /// What exists nearby, starting with a separator, or nothing.
        hint: String,
    },
    /// A stored object breaks a rule of the format: the snapshot cannot be trusted.
    #[error("corrupt snapshot: {object}: {rule}: expected {expected}, found {found}")]
    Corrupt {
        /// The object that breaks the rule: its location, with a row or mutation where known.
        object: String,
        /// Short name of the rule, stable enough to match on in tests.
        rule: &'static str,
        /// What the rule asks for.
        expected: String,
        /// What the object holds.
        found: String,
    },
    /// The table uses something this build does not know.
    #[error("{object}: unsupported by this version: {what}")]
    Unsupported {
        /// The object that needs it.
        object: String,
        /// The feature, by name and number.
        what: String,
    },
    /// Another writer got there first and the change could not be carried over.
    #[error("conflict: {message}")]
    Conflict {
        /// The versions involved and what to do.
        message: String,
        /// Whether doing the change over, from reading on, can succeed.
        retryable: bool,
    },
    /// The object store failed.
    #[error("cannot read {object}: {source}")]
    Store {
        /// The object that was being read or written.
        object: String,
        /// The store's own error.
        source: Arc<object_store::Error>,
    },
    /// Lance failed.
    #[error("{context}: {}", plain_message(&.source.to_string()))]
    Lance {
        /// What was being done, with the object.
        context: String,
        /// Lance's own error.
        source: Arc<lance::Error>,
    },
    /// DataFusion or Arrow failed.
    #[error("{context}: {}", plain_message(&.source.to_string()))]
    DataFusion {
        /// What was being done.
        context: String,
        /// DataFusion's own error.
        source: Arc<DataFusionError>,
    },
    /// A bug in fragtree.
    #[error("internal error (please report it): {message}")]
    Internal {
        /// What was assumed and did not hold.
        message: String,
    },
}

impl Error {
    /// A request that cannot be served.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::InvalidInput {
            message: message.into(),
        }
    }

    /// A broken rule of the format.
    pub fn corrupt(
        object: impl Into<String>,
        rule: &'static str,
        expected: impl Into<String>,
        found: impl ToString,
    ) -> Self {
        Self::Corrupt {
            object: object.into(),
            rule,
            expected: expected.into(),
            found: found.to_string(),
        }
    }

    /// A failure of the object store while working on `object`. An object that is named by a
    /// snapshot and is not there makes the snapshot corrupt; everything else is the store's.
    pub(crate) fn store(object: impl Into<String>, source: object_store::Error) -> Self {
        let object = object.into();
        match source {
            object_store::Error::NotFound { .. } => Self::corrupt(
                object,
                "object_missing",
                "an object at this location",
                "none",
            ),
            source => Self::Store {
                object,
                source: Arc::new(source),
            },
        }
    }

    /// A failure of Lance while doing `context`.
    pub(crate) fn lance(context: impl Into<String>, source: lance::Error) -> Self {
        let context = context.into();
        let text = source.to_string();
        if text.contains("No object store provider found for scheme") {
            return Self::invalid(format!(
                "{context}: this build has no client for that kind of store. Cargo features add them: \
                 s3 (s3://), gcs (gs://), azure (az://, abfss://)"
            ));
        }
        Self::Lance {
            context,
            source: Arc::new(source),
        }
    }

    /// A failure of DataFusion or Arrow while doing `context`.
    pub(crate) fn datafusion(
        context: impl Into<String>,
        source: impl Into<DataFusionError>,
    ) -> Self {
        Self::DataFusion {
            context: context.into(),
            source: Arc::new(source.into()),
        }
    }

    /// A broken assumption of ours.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::Internal {
            message: message.into(),
        }
    }

    /// The name of the broken rule, when this is a corrupt snapshot.
    pub fn corrupt_rule(&self) -> Option<&'static str> {
        match self {
            Self::Corrupt { rule, .. } => Some(rule),
            Self::InvalidInput { .. }
            | Self::NotFound { .. }
            | Self::Unsupported { .. }
            | Self::Conflict { .. }
            | Self::Store { .. }
            | Self::Lance { .. }
            | Self::DataFusion { .. }
            | Self::Internal { .. } => None,
        }
    }
}

/// A message without what Lance adds for its own developers: after each level of an error the place
/// in the source it was built from, a path on another machine; and a kind that two levels both name.
///
/// The errors of this crate are shown like this already. It is for those that come through DataFusion
/// from Lance directly, as those of a running scan do.
pub fn plain_message(message: &str) -> String {
    const KIND: &str = "Invalid user input: ";
    let mut message = message.to_string();
    let mut from = 0;
    while let Some(found) = message[from..].find(".rs:") {
        let end = from + found + ".rs".len();
        let Some(place) = place_after(&message[end..]) else {
            from = end;
            continue;
        };
        let path = message[from..end].rsplit(char::is_whitespace).next();
        let path = end - path.map_or(0, str::len);
        let before = message[..path].trim_end();
        let before = before.strip_suffix("location:").unwrap_or(before);
        let before = before.trim_end().strip_suffix(',');
        match before.filter(|_| message[path..end].contains(['/', '\\'])) {
            Some(before) => {
                from = before.len();
                message.replace_range(from..end + place, "");
            }
            None => from = end,
        }
    }
    while let Some(at) = message.find(&KIND.repeat(2)) {
        message.replace_range(at..at + KIND.len(), "");
    }
    message
}

/// The length of `:line:column` at the start of `text`, if that is there.
fn place_after(text: &str) -> Option<usize> {
    let number = |text: &str| {
        let rest = text.strip_prefix(':')?;
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        (digits > 0).then_some(1 + digits)
    };
    let line = number(text)?;
    Some(line + number(&text[line..])?)
}

impl From<Error> for DataFusionError {
    fn from(error: Error) -> Self {
        Self::External(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_nothing_of_the_machine_that_built_them() {
        let inner = lance::Error::invalid_input("no column x/y.rs:name, or y");
        let outer = lance::Error::invalid_input_source(Box::new(inner));
        assert!(outer.to_string().contains(".rs:"), "{outer}");
        let error = Error::lance("cannot update t", outer);
        assert_eq!(
            error.to_string(),
            "cannot update t: Invalid user input: no column x/y.rs:name, or y"
        );
    }

    #[test]
    fn messages_lose_nothing_else() {
        for (given, shown) in [
            ("columns a, x/y.rs:name", "columns a, x/y.rs:name"),
            (
                "expected a, found b/c in x.rs:3",
                "expected a, found b/c in x.rs:3",
            ),
            ("in /a/x.rs:3:4 it is", "in /a/x.rs:3:4 it is"),
            ("bad, /a/x.rs:3:4", "bad"),
            ("bad, location: C:\\a\\x.rs:3:4: worse", "bad: worse"),
            ("a, /a/x.rs:3:4, /b/y.rs:5:6", "a"),
            ("表,\u{3000}/a/x.rs:3:4", "表"),
        ] {
            assert_eq!(plain_message(given), shown);
        }
    }
}
