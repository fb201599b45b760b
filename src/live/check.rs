//! Whether a version is still the latest, and whether it is still there at all.

use lance_table::format::is_detached_version;
use lance_table::io::commit::{ManifestLocation, VERSIONS_DIR, uses_version_hint};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt};

use crate::error::{Error, Result};
use crate::resolve::{Table, VERSION_HINT_FILE, VersionHint, display_uri};
use crate::retry::retrying;

/// Whether two locations are of one file, as far as both say.
pub(crate) fn same_manifest(a: &ManifestLocation, b: &ManifestLocation) -> bool {
    a.path == b.path
        && agree(a.size, b.size)
        && agree(a.e_tag.as_deref().map(bare), b.e_tag.as_deref().map(bare))
}

/// Whether the file at a location is the one that was there: a table that was removed and made again
/// has versions of the same numbers.
fn unchanged(found: &ObjectMeta, location: &ManifestLocation) -> bool {
    agree(Some(found.size), location.size)
        && agree(
            found.e_tag.as_deref().map(bare),
            location.e_tag.as_deref().map(bare),
        )
}

fn agree<T: PartialEq>(a: Option<T>, b: Option<T>) -> bool {
    a.zip(b).is_none_or(|(a, b)| a == b)
}

/// An entity tag without its quotes: a list, a request of the object and Lance's own look at a local
/// file do not agree on them.
fn bare(e_tag: &str) -> &str {
    e_tag.trim_start_matches("W/").trim_matches('"')
}

/// Why a version that was there cannot be read any more.
#[derive(Debug)]
pub(crate) enum Gone {
    /// There is a version of this number here, in another file.
    Replaced(ManifestLocation),
    /// There is none; what there is.
    Version(String),
    /// There is no table; what is beside it.
    Table(String),
}

impl Gone {
    /// The error for a reader to whom `error` happened.
    pub(crate) fn into_error(self, uri: &str, version: u64, error: &str) -> Error {
        let (how, now) = match self {
            Self::Replaced(_) => (
                "the table was removed and made again",
                "; open it anew".to_string(),
            ),
            Self::Version(hint) => (
                "it was cleaned up, or removed by hand,",
                format!("{hint}; open the latest, or one that a tag keeps"),
            ),
            Self::Table(hint) => ("the table was removed", hint),
        };
        let first = error.lines().next().unwrap_or_default();
        Error::NotFound {
            what: format!("version {version} of {}", display_uri(uri)),
            hint: format!(" any more: {how} after it was opened ({first}){now}"),
        }
    }
}

impl Table {
    /// Whether the version at `location` is still the latest, in one round trip of two requests: its
    /// manifest is there as it was, and the next one is not. Where commits leave a hint, that must
    /// not name a later version either.
    ///
    /// Versions are numbered without gaps when they are made, so a later version without the next one
    /// is one whose predecessors a cleanup took. It takes this version with them, unless a tag holds
    /// it; only then, and without a hint, is the answer wrong. So nobody relies on it for ever.
    pub(crate) async fn is_latest(&self, location: &ManifestLocation) -> Result<bool> {
        let next = location.version.checked_add(1);
        let Some(next) = next.filter(|next| !self.keeps_versions_elsewhere(*next)) else {
            return Ok(false);
        };
        let next = location.naming_scheme.manifest_path(&self.base, next);
        let (this, next, hint) = futures::try_join!(
            self.stat(&location.path),
            self.stat(&next),
            self.hinted_version(),
        )?;
        let same = this.is_some_and(|found| unchanged(&found, location));
        Ok(same && next.is_none() && hint.is_none_or(|hint| hint <= location.version))
    }

    /// Whether the store's files do not say which versions there are.
    fn keeps_versions_elsewhere(&self, version: u64) -> bool {
        is_detached_version(version) || self.uri.starts_with("s3+ddb:")
    }

    /// The version that the hint names, where commits leave one.
    async fn hinted_version(&self) -> Result<Option<u64>> {
        if !uses_version_hint(&self.store) {
            return Ok(None);
        }
        let path = self.base.clone().join(VERSIONS_DIR).join(VERSION_HINT_FILE);
        // Written after the commit and without a promise: what cannot be read says nothing.
        let Ok(found) = self.store.inner.get(&path).await else {
            return Ok(None);
        };
        let Ok(bytes) = found.bytes().await else {
            return Ok(None);
        };
        let hint = serde_json::from_slice::<VersionHint>(&bytes);
        Ok(hint.ok().map(|hint| hint.version))
    }

    async fn stat(&self, path: &Path) -> Result<Option<ObjectMeta>> {
        retrying(|| async {
            match self.store.inner.head(path).await {
                Ok(meta) => Ok(Some(meta)),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(e) => Err(Error::store(path.to_string(), e)),
            }
        })
        .await
    }

    /// Whether the version at `location`, which was there, is gone. Nothing when it is there, or when
    /// that cannot be found out.
    pub(crate) async fn gone(&self, location: &ManifestLocation) -> Option<Gone> {
        match self.version(location.version).await {
            Ok(found) if same_manifest(&found, location) => None,
            Ok(found) => Some(Gone::Replaced(found)),
            Err(Error::NotFound { what, hint }) if what.starts_with("Lance table") => {
                Some(Gone::Table(hint))
            }
            Err(Error::NotFound { hint, .. }) => Some(Gone::Version(hint)),
            Err(_) => None,
        }
    }
}

/// Whether an error is about something that is not there. Lance and DataFusion wrap the store's error
/// in ways that only its text survives.
pub(crate) fn says_missing(error: &str) -> bool {
    let error = error.to_lowercase();
    ["not found", "no such file", "object_missing"]
        .iter()
        .any(|words| error.contains(words))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, RecordBatch};
    use lance::dataset::{InsertBuilder, WriteMode, WriteParams};

    use super::*;
    use crate::snapshot::{OpenOptions, Snapshot};
    use crate::tree::object::Limits;

    #[test]
    fn entity_tags_are_compared_without_their_quotes() {
        for same in ["\"a-1\"", "a-1", "W/\"a-1\""] {
            assert_eq!(bare(same), "a-1");
        }
        assert!(agree::<u64>(None, Some(1)) && agree(Some(1), Some(1)));
        assert!(!agree(Some(1), Some(2)));
    }

    #[tokio::test]
    async fn the_latest_version_is_known_as_such_however_it_was_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t.lance");
        let path = path.to_str().expect("UTF-8");
        let write = |mode| async move {
            let ids = Arc::new(Int64Array::from_iter_values(0..3)) as _;
            let batch = RecordBatch::try_from_iter([("id", ids)]).expect("a batch");
            let params = WriteParams {
                mode,
                ..Default::default()
            };
            let written = InsertBuilder::new(path).with_params(&params);
            written.execute(vec![batch]).await.expect("written");
        };
        write(WriteMode::Create).await;
        for uri in [path.to_string(), format!("file-object-store://{path}")] {
            let mut snapshots = Vec::new();
            for reference in ["1", "2999-01-01"] {
                let reference = reference.parse().expect("a version");
                let options = OpenOptions::default().with_reference(reference);
                snapshots.push(Snapshot::open(&uri, options).await.expect("opens"));
            }
            let latest = Snapshot::open(&uri, OpenOptions::default()).await;
            snapshots.push(latest.expect("opens"));
            let version = snapshots.last().map(|s| s.version());
            for snapshot in &snapshots {
                let table = snapshot.table(Limits::default()).await.expect("opens");
                let is_latest = table
                    .is_latest(snapshot.location())
                    .await
                    .expect("found out");
                assert_eq!(is_latest, Some(snapshot.version()) == version, "{uri}");
                assert!(table.gone(snapshot.location()).await.is_none(), "{uri}");
                let again = snapshot
                    .latest(&OpenOptions::default(), None)
                    .await
                    .expect("opens");
                assert_eq!(Arc::ptr_eq(&again, snapshot), is_latest, "{uri}");
            }
            write(WriteMode::Append).await;
        }
    }
}
