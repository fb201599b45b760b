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
    a.path == b.path && agree(a.size, b.size) && agree(a.e_tag.as_deref(), b.e_tag.as_deref())
}

fn agree<T: PartialEq>(a: Option<T>, b: Option<T>) -> bool {
    a.zip(b).is_none_or(|(a, b)| a == b)
}

/// Whether the file at a location is the one that was there: a table that was removed and made again
/// has versions of the same numbers.
fn unchanged(found: &ObjectMeta, location: &ManifestLocation) -> bool {
    agree(Some(found.size), location.size)
        && agree(found.e_tag.as_deref(), location.e_tag.as_deref())
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

    /// The error for a reader of the version at `location` to whom `error` happened, when that is
    /// because the version was removed. Nothing when it is there, or when that cannot be found out.
    pub(crate) async fn removed(&self, location: &ManifestLocation, error: &str) -> Option<Error> {
        if !says_missing(error) {
            return None;
        }
        let version = location.version;
        let what = format!("version {version} of {}", display_uri(&self.uri));
        let first = error.lines().next().unwrap_or_default();
        let (how, now) = match self.version(version).await {
            Ok(found) if same_manifest(&found, location) => return None,
            Ok(_) => (
                "the table was removed and made again",
                String::from("; open it anew"),
            ),
            Err(Error::NotFound { what, hint }) if what.starts_with("Lance table") => {
                ("the table was removed", hint)
            }
            Err(Error::NotFound { hint, .. }) => (
                "it was removed, as a cleanup of old versions does",
                format!("{hint}; open the latest, or one that a tag keeps"),
            ),
            Err(_) => return None,
        };
        Some(Error::NotFound {
            what,
            hint: format!(" any more: {how}, after it was opened ({first}){now}"),
        })
    }
}

/// Whether an error is about something that is not there. Lance and DataFusion wrap the store's error
/// in ways that only its text survives.
fn says_missing(error: &str) -> bool {
    let error = error.to_lowercase();
    ["not found", "no such file", "object_missing"]
        .iter()
        .any(|words| error.contains(words))
}
