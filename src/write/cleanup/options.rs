//! Which versions go: Lance's policy, field by field.

use std::collections::BTreeSet;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use lance_table::format::{is_detached_version, pb};

use crate::error::{Error, Result};
use crate::resolve::timestamp;

/// Files that no version names are left alone for this long, as Lance does: a commit may be about to
/// name them.
pub(super) const UNVERIFIED_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// What to clean up. A version goes when it meets every condition that is given; without any, all go
/// but the latest. Whatever the conditions, these stay: the latest version and later ones, tagged
/// ones, and those that a branch needs.
#[derive(Debug, Clone)]
pub struct CleanupOptions {
    /// Versions written longer ago than this. Default: 7 days.
    pub older_than: Option<Duration>,
    /// Versions written before this moment.
    pub before: Option<DateTime<Utc>>,
    /// All versions but this many, the last ones. Not zero.
    pub keep: Option<usize>,
    /// Versions below this number.
    pub before_version: Option<u64>,
    /// These versions. The only way to remove a detached one.
    pub versions: Option<BTreeSet<u64>>,
    /// Also remove files that no version names and that are less than 7 days old. Only when nobody
    /// writes to the table: it takes the files of a commit in progress.
    pub delete_unverified: bool,
    /// Refuse when a version that would go is tagged, instead of leaving it out. Default on.
    pub error_if_tagged: bool,
    /// First clean the branches that began from a version that would go, each by the
    /// `lance.auto_cleanup.*` settings in its own config; one without them is left as it is.
    pub clean_referenced_branches: bool,
    /// Removals in a second, at most. Default: as fast as the store takes them.
    pub delete_rate_limit: Option<u64>,
    /// Removals at once. Default: what suits the store.
    pub delete_concurrency: Option<usize>,
    /// Remove nothing, report what would go.
    pub dry_run: bool,
    /// Files to name in the report; all are counted. Default 1,000.
    pub list_files: usize,
}

impl Default for CleanupOptions {
    fn default() -> Self {
        Self {
            older_than: Some(UNVERIFIED_AGE),
            before: None,
            keep: None,
            before_version: None,
            versions: None,
            delete_unverified: false,
            error_if_tagged: true,
            clean_referenced_branches: false,
            delete_rate_limit: None,
            delete_concurrency: None,
            dry_run: false,
            list_files: 1000,
        }
    }
}

impl CleanupOptions {
    pub(super) fn validate(&self) -> Result<()> {
        let zero = |what: &str| Err(Error::invalid(format!("{what} must be at least 1, not 0")));
        if self.keep == Some(0) {
            return zero("the number of versions to keep");
        }
        if self.versions.as_ref().is_some_and(BTreeSet::is_empty) {
            return Err(Error::invalid(
                "an empty list of versions to remove: name some, or leave the list out",
            ));
        }
        if self.delete_rate_limit == Some(0) {
            return zero("the limit of removals in a second");
        }
        if self.delete_concurrency == Some(0) {
            return zero("the number of removals at once");
        }
        Ok(())
    }

    /// The conditions, at the moment `now` and for a lineage of these versions.
    pub(super) fn policy(&self, now: DateTime<Utc>, versions: &[u64]) -> Policy {
        let age = self.older_than.map(|age| before(now, age));
        let kept = self.keep.and_then(|keep| {
            let mut versions = versions.to_vec();
            versions.sort_unstable();
            let first = versions.len().saturating_sub(keep);
            versions.get(first).copied()
        });
        Policy {
            before: earlier(age, self.before),
            before_version: earlier(kept, self.before_version),
            versions: self.versions.clone(),
        }
    }
}

/// The moment `age` before `now`, or the first there is.
pub(super) fn before(now: DateTime<Utc>, age: Duration) -> DateTime<Utc> {
    TimeDelta::from_std(age)
        .ok()
        .and_then(|age| now.checked_sub_signed(age))
        .unwrap_or(DateTime::<Utc>::MIN_UTC)
}

/// The stricter of two upper bounds.
fn earlier<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// The conditions a version must meet to go.
#[derive(Debug, Clone)]
pub(super) struct Policy {
    before: Option<DateTime<Utc>>,
    before_version: Option<u64>,
    versions: Option<BTreeSet<u64>>,
}

impl Policy {
    /// Adds a version from which on all stay.
    pub(super) fn limit(&mut self, stay_from: Option<u64>) {
        self.before_version = earlier(self.before_version, stay_from);
    }

    /// Whether the version with this manifest meets them all. A manifest without a time is the oldest
    /// there can be.
    pub(super) fn cleans(&self, head: &pb::Manifest) -> bool {
        let named = |versions: &BTreeSet<u64>| versions.contains(&head.version);
        if is_detached_version(head.version) {
            // Outside the history: its age and number mean nothing there.
            return self.versions.as_ref().is_some_and(named);
        }
        let written = timestamp(head).unwrap_or(DateTime::UNIX_EPOCH);
        self.before.is_none_or(|before| written < before)
            && self.before_version.is_none_or(|v| head.version < v)
            && self.versions.as_ref().is_none_or(named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(version: u64, seconds: i64) -> pb::Manifest {
        pb::Manifest {
            version,
            timestamp: Some(prost_types::Timestamp { seconds, nanos: 0 }),
            ..Default::default()
        }
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).expect("a moment")
    }

    fn nothing() -> CleanupOptions {
        CleanupOptions {
            older_than: None,
            ..Default::default()
        }
    }

    #[test]
    fn every_condition_must_be_met() {
        let options = CleanupOptions {
            older_than: Some(Duration::from_secs(10)),
            keep: Some(2),
            ..nothing()
        };
        let policy = options.policy(at(100), &[5, 1, 3, 4]);
        assert!(policy.cleans(&head(3, 89)));
        assert!(!policy.cleans(&head(3, 90)), "young");
        assert!(!policy.cleans(&head(4, 1)), "one of the last two");
        assert!(nothing().policy(at(0), &[1]).cleans(&head(1, 1)));
    }

    #[test]
    fn fewer_versions_than_are_kept_all_stay() {
        let options = CleanupOptions {
            keep: Some(9),
            ..nothing()
        };
        let policy = options.policy(at(0), &[4, 5]);
        assert!(!policy.cleans(&head(4, 0)));
    }

    #[test]
    fn detached_versions_go_by_name_only() {
        let detached = (1 << 63) | 7;
        assert!(!nothing().policy(at(9), &[]).cleans(&head(detached, 0)));
        let options = CleanupOptions {
            versions: Some([detached].into()),
            ..nothing()
        };
        assert!(options.policy(at(9), &[]).cleans(&head(detached, 0)));
        assert!(!options.policy(at(9), &[]).cleans(&head(3, 0)));
    }

    #[test]
    fn a_span_longer_than_time_removes_nothing() {
        let options = CleanupOptions {
            older_than: Some(Duration::MAX),
            ..nothing()
        };
        let policy = options.policy(at(9), &[]);
        let mut oldest = head(1, 0);
        oldest.timestamp = None;
        assert!(!policy.cleans(&oldest));
    }

    #[test]
    fn zeros_and_empty_lists_are_refused() {
        let wrong: [fn(&mut CleanupOptions); 4] = [
            |o| o.keep = Some(0),
            |o| o.versions = Some(BTreeSet::new()),
            |o| o.delete_rate_limit = Some(0),
            |o| o.delete_concurrency = Some(0),
        ];
        for change in wrong {
            let mut options = CleanupOptions::default();
            change(&mut options);
            assert!(options.validate().is_err());
        }
    }
}
