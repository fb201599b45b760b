//! Cleanup after commits, by the `lance.auto_cleanup.*` settings in a table's config.
//!
//! Lance runs its own from inside a commit. On a view it would take the few fragments it sees for the
//! whole table, so those settings are hidden from it, and this runs in its place.

use std::collections::{BTreeMap, HashMap};

use super::CleanupOptions;
use super::duration::parse_duration;
use super::run;
use crate::error::{Error, Result};
use crate::write::table::TreeTable;

/// What the keys of all these settings begin with.
pub(crate) const SETTINGS: &str = "lance.auto_cleanup.";

/// The settings in a config, without their prefix.
pub(super) fn settings(config: &HashMap<String, String>) -> BTreeMap<String, String> {
    let own = config
        .iter()
        .filter_map(|(key, value)| Some((key.strip_prefix(SETTINGS)?.to_string(), value.clone())));
    own.collect()
}

/// The cleanup that is due after `version` was committed with these settings, if any: one every
/// `interval` versions, by `older_than`, `retain_versions`, `referenced_branch`, `delete_rate_limit`
/// and `delete_concurrency`. Tagged versions are left out.
///
/// # Errors
/// [`Error::InvalidInput`] naming the setting that cannot be read.
pub(super) fn due(
    settings: &BTreeMap<String, String>,
    version: u64,
) -> Result<Option<CleanupOptions>> {
    let Some(interval) = read::<u64>(settings, "interval")? else {
        return Ok(None);
    };
    if interval != 0 && !version.is_multiple_of(interval) {
        return Ok(None);
    }
    let older_than = settings.get("older_than").map(|text| parse_duration(text));
    let options = CleanupOptions {
        older_than: older_than
            .transpose()
            .map_err(|e| unreadable("older_than", &e))?,
        keep: read(settings, "retain_versions")?,
        clean_referenced_branches: read(settings, "referenced_branch")?.unwrap_or(false),
        delete_rate_limit: read(settings, "delete_rate_limit")?,
        delete_concurrency: read(settings, "delete_concurrency")?,
        error_if_tagged: false,
        ..CleanupOptions::default()
    };
    options.validate()?;
    Ok(Some(options))
}

fn read<T: std::str::FromStr<Err: std::fmt::Display>>(
    settings: &BTreeMap<String, String>,
    key: &str,
) -> Result<Option<T>> {
    let value = settings.get(key).map(|text| text.parse::<T>());
    value.transpose().map_err(|e| unreadable(key, &e))
}

fn unreadable(key: &str, error: &dyn std::fmt::Display) -> Error {
    Error::invalid(format!("the table's config {SETTINGS}{key}: {error}"))
}

/// Runs the cleanup that is due after a write, if any. `commits` are the versions it published, each
/// with its settings.
///
/// The write is done, and stays so: what goes wrong here is logged.
pub(crate) async fn after_commit(table: &TreeTable, commits: Vec<(u64, HashMap<String, String>)>) {
    // The last one that is due sees everything the others would have.
    for (version, config) in commits.into_iter().rev() {
        let options = match due(&settings(&config), version) {
            Ok(Some(options)) => options,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(version, %error, "no cleanup after a commit");
                return;
            }
        };
        let cleaned = async {
            let latest = table.latest().await?;
            // As Lance, which looks at the table as the commit found it: the version before stays.
            let stay_from = Some(version.saturating_sub(1));
            let open = table.options();
            run::cleanup(&latest, &options, stay_from, open, &|_| {}).await
        };
        match cleaned.await {
            Ok(report) => {
                let total = report.total();
                tracing::info!(
                    version,
                    versions = report.removed_versions.len(),
                    files = total.files,
                    bytes = total.bytes,
                    failures = report.failures,
                    "cleaned up after a commit"
                );
            }
            Err(error) => tracing::warn!(version, %error, "the cleanup after a commit failed"),
        }
        return;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn of(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let config = pairs
            .iter()
            .map(|(key, value)| (format!("{SETTINGS}{key}"), (*value).to_string()));
        settings(&config.chain([("other".into(), "x".into())]).collect())
    }

    #[test]
    fn it_is_due_every_so_many_versions() {
        let each = of(&[("interval", "3"), ("older_than", "14days")]);
        assert!(due(&each, 4).expect("readable").is_none());
        let options = due(&each, 6).expect("readable").expect("due");
        assert_eq!(options.older_than, Some(Duration::from_secs(14 * 86_400)));
        assert!(!options.error_if_tagged && !options.delete_unverified);
        assert!(
            due(&of(&[("interval", "0")]), 5)
                .expect("readable")
                .is_some()
        );
        assert!(
            due(&of(&[("older_than", "1d")]), 5)
                .expect("readable")
                .is_none()
        );
    }

    #[test]
    fn without_an_age_all_versions_are_old() {
        let options = due(&of(&[("interval", "1"), ("retain_versions", "2")]), 5);
        let options = options.expect("readable").expect("due");
        assert_eq!((options.older_than, options.keep), (None, Some(2)));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for key in [
            "interval",
            "older_than",
            "retain_versions",
            "referenced_branch",
            "delete_rate_limit",
            "delete_concurrency",
        ] {
            let error = due(&of(&[("interval", "1"), (key, "often")]), 1).expect_err("no number");
            assert!(error.to_string().contains(key), "{error}");
        }
        assert!(due(&of(&[("interval", "1"), ("retain_versions", "0")]), 1).is_err());
    }
}
