//! From "the table at this place, that version" to the location of one manifest.

use std::path::Path as FsPath;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use chrono::{DateTime, NaiveDate, NaiveDateTime, Utc};
use futures::{StreamExt, TryStreamExt};
use lance::dataset::refs::{
    BranchContents, TagContents, base_branches_contents_path, base_tags_path, branch_contents_path,
    check_valid_branch, check_valid_tag, tag_path,
};
use lance_io::object_store::{ObjectStore, uri_to_url};
use lance_table::format::is_detached_version;
use lance_table::io::commit::{
    CommitHandler, ManifestLocation, ManifestNamingScheme, VERSIONS_DIR, uses_version_hint,
};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStoreExt};
use url::Url;

use crate::error::{Error, Result};
use crate::manifest::{TAIL_BYTES, read_manifest, split_manifest};
use crate::tree::object::Limits;

/// The file beside the manifests that names the latest version, on stores where listing is slow.
pub(crate) const VERSION_HINT_FILE: &str = "latest_version_hint.json";

#[derive(serde::Deserialize)]
pub(crate) struct VersionHint {
    pub version: u64,
}

/// Which version of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VersionRef {
    /// The branch; none is the main one (or the one the location itself is in).
    pub branch: Option<String>,
    /// Which version on it.
    pub at: VersionAt,
}

/// Which version on a branch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum VersionAt {
    /// The latest.
    #[default]
    Latest,
    /// This one.
    Version(u64),
    /// The one this tag names. A tag knows its branch.
    Tag(String),
    /// The last one written at or before this time.
    Timestamp(DateTime<Utc>),
}

impl VersionRef {
    /// The latest version of the main branch.
    pub fn latest() -> Self {
        Self::default()
    }

    /// A version of the main branch.
    pub fn version(version: u64) -> Self {
        VersionAt::Version(version).into()
    }

    /// The version a tag names.
    pub fn tag(tag: impl Into<String>) -> Self {
        VersionAt::Tag(tag.into()).into()
    }

    /// The latest version of a branch.
    pub fn branch(branch: impl Into<String>) -> Self {
        Self {
            branch: Some(branch.into()),
            at: VersionAt::Latest,
        }
    }

    /// The last version of the main branch at or before a time.
    pub fn timestamp(time: DateTime<Utc>) -> Self {
        VersionAt::Timestamp(time).into()
    }
}

impl From<VersionAt> for VersionRef {
    fn from(at: VersionAt) -> Self {
        Self { branch: None, at }
    }
}

/// A number is a version, a date or time is a timestamp, anything else is a tag: what follows the
/// `@` in `uri@reference`.
impl FromStr for VersionRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::invalid(
                "an empty version: give a number, a tag or a timestamp",
            ));
        }
        if let Ok(version) = text.parse() {
            return Ok(Self::version(version));
        }
        if let Ok(time) = parse_timestamp(text) {
            return Ok(Self::timestamp(time));
        }
        Ok(Self::tag(text))
    }
}

/// Reads a timestamp: RFC 3339, or a date with or without a time, in UTC when no zone is given. A
/// bare date is its first moment.
///
/// # Errors
/// [`Error::InvalidInput`] with the accepted forms.
pub fn parse_timestamp(text: &str) -> Result<DateTime<Utc>> {
    if let Ok(time) = DateTime::parse_from_rfc3339(text) {
        return Ok(time.to_utc());
    }
    for format in [
        "%Y-%m-%d %H:%M:%S%.f",
        "%Y-%m-%dT%H:%M:%S%.f",
        "%Y-%m-%d %H:%M",
    ] {
        if let Ok(time) = NaiveDateTime::parse_from_str(text, format) {
            return Ok(time.and_utc());
        }
    }
    if let Ok(date) = NaiveDate::parse_from_str(text, "%Y-%m-%d")
        && let Some(time) = date.and_hms_opt(0, 0, 0)
    {
        return Ok(time.and_utc());
    }
    Err(Error::invalid(format!(
        "{text:?} is no timestamp: write 2026-01-31, 2026-01-31 12:00:00 or 2026-01-31T12:00:00Z"
    )))
}

/// Makes a location absolute and unambiguous. Local paths may be relative and hold any character; a
/// location that exists locally is a path even when it looks like a URL (`a:b`).
pub(crate) fn normalize_uri(uri: &str) -> Result<String> {
    if uri.trim().is_empty() {
        return Err(Error::invalid(
            "an empty location: give the path or URL of a table",
        ));
    }
    let is_url = Url::parse(uri).is_ok_and(|url| url.scheme().len() > 1) && uri.contains("://");
    if is_url {
        return Ok(uri.trim_end_matches('/').to_string());
    }
    if uri.contains(':') && !uri.starts_with('/') && FsPath::new(uri).exists() {
        return absolute(uri);
    }
    if Url::parse(uri).is_ok() {
        // A URL without an authority (`file:/x`) or an unknown scheme: Lance decides.
        return Ok(uri.trim_end_matches('/').to_string());
    }
    let home = uri.strip_prefix("~/").zip(std::env::home_dir());
    match home {
        Some((rest, home)) => absolute(&home.join(rest).to_string_lossy()),
        None => absolute(uri),
    }
}

fn absolute(path: &str) -> Result<String> {
    let absolute = std::path::absolute(path)
        .map_err(|e| Error::invalid(format!("{path:?} is no usable path: {e}")))?;
    let mut clean = std::path::PathBuf::new();
    for part in absolute.components() {
        match part {
            std::path::Component::ParentDir => {
                clean.pop();
            }
            std::path::Component::CurDir => {}
            part => clean.push(part),
        }
    }
    let text = clean
        .to_str()
        .ok_or_else(|| Error::invalid(format!("{path:?} is not UTF-8")))?;
    Ok(text.to_string())
}

/// The location of a branch of the table at `uri`. In a URL the branch goes before the query; in a
/// plain path a question mark is a character like any other.
fn branch_uri(uri: &str, branch: &str) -> String {
    match uri.split_once('?') {
        Some((path, query)) if uri.contains("://") => format!("{path}/tree/{branch}?{query}"),
        _ => format!("{uri}/tree/{branch}"),
    }
}

/// Whether a location is on a file system of this machine.
pub(crate) fn is_local(uri: &str) -> bool {
    uri_to_url(uri)
        .is_ok_and(|url| matches!(url.scheme(), "file" | "file-object-store" | "file+uring"))
}

/// A location without anything secret in it, for messages and plans.
pub(crate) fn display_uri(uri: &str) -> String {
    match uri_to_url(uri) {
        Ok(mut url) if url.scheme() != "file" => {
            let _ = url.set_password(None);
            let _ = url.set_username("");
            url.set_query(None);
            url.to_string()
        }
        _ => uri.to_string(),
    }
}

/// A table whose versions can be looked up.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    pub uri: String,
    pub base: Path,
    pub store: Arc<ObjectStore>,
    pub handler: Arc<dyn CommitHandler>,
    pub limits: Limits,
}

/// One version, found.
#[derive(Debug)]
pub(crate) struct Located {
    pub uri: String,
    pub base: Path,
    pub store: Arc<ObjectStore>,
    pub location: ManifestLocation,
    /// The end of the manifest, when finding the version brought it along.
    pub tail: Option<Bytes>,
}

/// A version as it was committed by this process.
#[derive(Debug, Clone)]
pub(crate) struct Written {
    pub location: ManifestLocation,
    /// The manifest file.
    pub file: Bytes,
    /// A moment at which it was not committed yet.
    pub at: Instant,
}

/// One version of the history.
#[derive(Debug, Clone)]
pub(crate) struct VersionEntry {
    pub location: ManifestLocation,
    pub head: lance_table::format::pb::Manifest,
    pub layout: crate::snapshot::Layout,
    /// `FragmentTree.next_action_sequence` of a tree.
    pub next_sequence: Option<u64>,
    pub file_size: u64,
}

impl Table {
    /// Finds the manifest of `reference`.
    ///
    /// # Errors
    /// [`Error::NotFound`] listing what exists nearby.
    pub(crate) async fn locate(self, reference: &VersionRef) -> Result<Located> {
        let (table, version) = match &reference.at {
            VersionAt::Tag(tag) => {
                if reference.branch.is_some() {
                    return Err(Error::invalid(
                        "a tag knows its branch: give a tag or a branch, not both",
                    ));
                }
                let contents = self.tag(tag).await?;
                let table = self.on_branch(contents.branch.as_deref()).await?;
                (table, Some(contents.version))
            }
            VersionAt::Version(version) => (
                self.on_branch(reference.branch.as_deref()).await?,
                Some(*version),
            ),
            VersionAt::Latest => (self.on_branch(reference.branch.as_deref()).await?, None),
            VersionAt::Timestamp(time) => {
                let table = self.on_branch(reference.branch.as_deref()).await?;
                let location = table.at_time(*time).await?;
                return Ok(table.located(location));
            }
        };
        if version.is_none()
            && let Some((location, tail)) = table.latest_by_hint().await
        {
            return Ok(Located {
                tail: Some(tail),
                ..table.located(location)
            });
        }
        let location = match version {
            Some(version) => table.version(version).await?,
            None => table.latest().await?,
        };
        Ok(table.located(location))
    }

    /// A version at `location`, of which nothing was read.
    pub(crate) fn located(self, location: ManifestLocation) -> Located {
        Located {
            uri: self.uri,
            base: self.base,
            store: self.store,
            location,
            tail: None,
        }
    }

    /// The latest version by the hint file, with the end of its manifest: three requests in two
    /// round trips, where following the hint and then reading takes four in four.
    ///
    /// The hint is not trusted: the version it names must be there and the one after it must not.
    /// Nothing is returned in any other case, and the commit handler then looks for itself.
    async fn latest_by_hint(&self) -> Option<(ManifestLocation, Bytes)> {
        let by_hint = uses_version_hint(&self.store)
            && !self.store.has_direct_local_paths()
            && !self.uri.starts_with("s3+ddb:");
        if !by_hint {
            return None;
        }
        let store = &self.store.inner;
        let path = self.base.clone().join(VERSIONS_DIR).join(VERSION_HINT_FILE);
        let hint = store.get(&path).await.ok()?.bytes().await.ok()?;
        let version = serde_json::from_slice::<VersionHint>(&hint).ok()?.version;
        if is_detached_version(version) {
            return None;
        }
        let naming_scheme = ManifestNamingScheme::V2;
        let path = naming_scheme.manifest_path(&self.base, version);
        let next = naming_scheme.manifest_path(&self.base, version.checked_add(1)?);
        let tail = async {
            let options = GetOptions {
                range: Some(GetRange::Suffix(TAIL_BYTES)),
                ..Default::default()
            };
            let found = store.get_opts(&path, options).await.ok()?;
            let (size, e_tag) = (found.meta.size, found.meta.e_tag.clone());
            Some((size, e_tag, found.bytes().await.ok()?))
        };
        let (tail, next) = futures::join!(tail, store.head(&next));
        let (size, e_tag, tail) = tail?;
        if !matches!(next, Err(object_store::Error::NotFound { .. })) {
            return None;
        }
        let location = ManifestLocation {
            version,
            path,
            size: Some(size),
            naming_scheme,
            e_tag,
            identity: None,
        };
        Some((location, tail))
    }

    async fn on_branch(mut self, branch: Option<&str>) -> Result<Self> {
        let Some(branch) = branch.filter(|b| *b != "main") else {
            return Ok(self);
        };
        check_valid_branch(branch)
            .map_err(|e| Error::lance(format!("{branch:?} is no branch name"), e))?;
        let path = branch_contents_path(&self.base, branch);
        if let Err(e) = BranchContents::from_path(&path, &self.store, branch).await {
            return Err(self
                .missing_ref(
                    "branch",
                    branch,
                    &base_branches_contents_path(&self.base),
                    e,
                )
                .await);
        }
        self.uri = branch_uri(&self.uri, branch);
        self.base = branch
            .split('/')
            .fold(self.base.clone().join("tree"), |path, part| path.join(part));
        Ok(self)
    }

    async fn tag(&self, tag: &str) -> Result<TagContents> {
        check_valid_tag(tag).map_err(|e| Error::lance(format!("{tag:?} is no tag name"), e))?;
        match TagContents::from_path(&tag_path(&self.base, tag), &self.store).await {
            Ok(contents) => Ok(contents),
            Err(e) => Err(self
                .missing_ref("tag", tag, &base_tags_path(&self.base), e)
                .await),
        }
    }

    async fn missing_ref(&self, kind: &str, name: &str, dir: &Path, e: lance::Error) -> Error {
        let missing = matches!(
            e,
            lance::Error::NotFound { .. } | lance::Error::RefNotFound { .. }
        );
        if !missing && !e.to_string().contains("not found") {
            return Error::lance(
                format!("cannot read {kind} {name:?} of {}", self.shown()),
                e,
            );
        }
        let names = self.store.read_dir(dir.clone()).await.unwrap_or_default();
        let names: Vec<_> = names
            .iter()
            .filter_map(|n| n.strip_suffix(".json"))
            .map(str::to_string)
            .collect();
        let hint = if names.is_empty() {
            format!("; the table has no {kind}")
        } else {
            format!("; there are: {}", names.join(", "))
        };
        Error::NotFound {
            what: format!("{kind} {name:?} of {}", self.shown()),
            hint,
        }
    }

    fn shown(&self) -> String {
        display_uri(&self.uri)
    }

    async fn latest(&self) -> Result<ManifestLocation> {
        match self
            .handler
            .resolve_latest_location(&self.base, &self.store)
            .await
        {
            Ok(location) => Ok(location),
            Err(e @ (lance::Error::NotFound { .. } | lance::Error::DatasetNotFound { .. })) => {
                tracing::debug!(%e, "no version found");
                Err(self.missing_table().await)
            }
            // A file, and not the directory of a table.
            Err(e) if e.to_string().contains("Not a directory") => Err(self.missing_table().await),
            Err(e) => Err(Error::lance(
                format!("cannot find versions of {}", self.shown()),
                e,
            )),
        }
    }

    /// The error for a location that holds no table, naming the tables in it or beside it.
    async fn missing_table(&self) -> Error {
        let mut parts: Vec<_> = self.base.parts().collect();
        parts.pop();
        let parent: Path = parts.into_iter().collect();
        let mut hint = String::new();
        for (place, folder) in [("in", self.base.clone()), ("beside", parent)] {
            let names = self.store.read_dir(folder).await.unwrap_or_default();
            let mut tables: Vec<_> = names
                .into_iter()
                .filter(|n| n.ends_with(".lance"))
                .collect();
            if tables.is_empty() {
                continue;
            }
            tables.sort();
            let more = match tables.len().saturating_sub(10) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            tables.truncate(10);
            hint = format!("; {place} it there are: {}{more}", tables.join(", "));
            break;
        }
        Error::NotFound {
            what: format!("Lance table {}", self.shown()),
            hint,
        }
    }

    pub(crate) async fn version(&self, version: u64) -> Result<ManifestLocation> {
        let context = || format!("cannot find version {version} of {}", self.shown());
        let location = self
            .handler
            .resolve_version_location(&self.base, version, &self.store.inner)
            .await;
        let location = match location {
            Ok(location) => location,
            Err(lance::Error::NotFound { .. } | lance::Error::VersionNotFound { .. }) => {
                return Err(self.missing_version(version).await);
            }
            Err(e) => return Err(Error::lance(context(), e)),
        };
        if location.size.is_some() {
            return Ok(location);
        }
        match self.store.inner.head(&location.path).await {
            Ok(meta) => Ok(ManifestLocation {
                size: Some(meta.size),
                e_tag: meta.e_tag,
                ..location
            }),
            Err(object_store::Error::NotFound { .. }) => Err(self.missing_version(version).await),
            Err(e) => Err(Error::store(location.path.to_string(), e)),
        }
    }

    async fn missing_version(&self, version: u64) -> Error {
        let mut versions = match self.list().await {
            Ok(list) => list.iter().map(|l| l.version).collect::<Vec<_>>(),
            Err(_) => Vec::new(),
        };
        if versions.is_empty() {
            return self.missing_table().await;
        }
        versions.sort_unstable();
        let at = versions.partition_point(|v| *v < version);
        let near: Vec<_> = versions
            .iter()
            .skip(at.saturating_sub(3))
            .take(6)
            .map(u64::to_string)
            .collect();
        let first = versions.first().copied().unwrap_or_default();
        let last = versions.last().copied().unwrap_or_default();
        // Numbers are given without gaps, from 1 or from where a branch or a clone began.
        let gone = if version > 0 && version < last {
            "; it was cleaned up, or its branch began after it"
        } else {
            ""
        };
        Error::NotFound {
            what: format!("version {version} of {}", self.shown()),
            hint: format!(
                "{gone}; it has {} versions between {first} and {last}, near it: {}",
                versions.len(),
                near.join(", ")
            ),
        }
    }

    /// Every version, the latest first.
    pub(crate) async fn list(&self) -> Result<Vec<ManifestLocation>> {
        let list = self
            .handler
            .list_manifest_locations(&self.base, &self.store, true)
            .try_collect::<Vec<_>>()
            .await
            .map_err(|e| Error::lance(format!("cannot list versions of {}", self.shown()), e))?;
        Ok(list)
    }

    /// The last version written at or before `time`. Manifests are read from the latest backwards:
    /// clocks of several writers need not agree with the order of versions, so no search skips one.
    async fn at_time(&self, time: DateTime<Utc>) -> Result<ManifestLocation> {
        let versions = self.list().await?;
        if versions.is_empty() {
            return Err(self.missing_table().await);
        }
        let mut oldest = None;
        let mut entries = self.entries(versions);
        while let Some(entry) = entries.try_next().await? {
            let written = timestamp(&entry.head);
            if written.is_some_and(|w| w <= time) {
                return Ok(entry.location);
            }
            oldest = written.or(oldest);
        }
        Err(Error::NotFound {
            what: format!("a version of {} at or before {time}", self.shown()),
            hint: oldest.map_or_else(String::new, |o| format!("; the oldest is from {o}")),
        })
    }

    /// Reads the manifests of `versions`, in order, a few at a time.
    pub(crate) fn entries(
        &self,
        versions: Vec<ManifestLocation>,
    ) -> futures::stream::BoxStream<'_, Result<VersionEntry>> {
        futures::stream::iter(versions)
            .map(move |location| async move {
                let file = read_manifest(&self.store, &location, None, &self.limits).await?;
                let split = split_manifest(&file.label, &file.message)?;
                let layout = match &split.tree {
                    Some(_) => crate::snapshot::Layout::Tree,
                    None => crate::snapshot::Layout::Flat,
                };
                let next_sequence = split.tree.map(|tree| tree.next_action_sequence);
                Ok(VersionEntry {
                    location,
                    head: split.head,
                    layout,
                    next_sequence,
                    file_size: file.file_size,
                })
            })
            .buffered(4)
            .boxed()
    }
}

/// When a manifest was written.
pub(crate) fn timestamp(head: &lance_table::format::pb::Manifest) -> Option<DateTime<Utc>> {
    let time = head.timestamp?;
    DateTime::from_timestamp(time.seconds, u32::try_from(time.nanos).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_told_apart() {
        let parse = |s: &str| s.parse::<VersionRef>().expect("valid");
        assert_eq!(parse("7"), VersionRef::version(7));
        assert_eq!(parse("v1"), VersionRef::tag("v1"));
        let day = parse_timestamp("2026-01-31").expect("a date");
        assert_eq!(parse("2026-01-31T00:00:00Z"), VersionRef::timestamp(day));
        assert!("".parse::<VersionRef>().is_err());
    }

    #[test]
    fn locations_become_absolute() {
        let here = std::env::current_dir().expect("a directory");
        let here = here.to_str().expect("UTF-8");
        for (given, expected) in [
            ("t.lance", format!("{here}/t.lance")),
            ("./t.lance/", format!("{here}/t.lance")),
            ("/a/b/../c/", "/a/c".to_string()),
            ("my table", format!("{here}/my table")),
            ("q?x#y", format!("{here}/q?x#y")),
            ("s3://bucket/t.lance/", "s3://bucket/t.lance".to_string()),
            ("file:///a%20b", "file:///a%20b".to_string()),
        ] {
            assert_eq!(normalize_uri(given).expect("usable"), expected);
        }
    }

    #[test]
    fn a_branch_goes_before_the_query_of_a_url_only() {
        for (uri, expected) in [
            ("/a/q?x#y", "/a/q?x#y/tree/dev"),
            ("/a/t.lance", "/a/t.lance/tree/dev"),
            (
                "s3+ddb://b/t?ddbTableName=x",
                "s3+ddb://b/t/tree/dev?ddbTableName=x",
            ),
            ("file:///a/q%3Fx", "file:///a/q%3Fx/tree/dev"),
        ] {
            assert_eq!(branch_uri(uri, "dev"), expected);
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let shown = display_uri("s3://key:secret@bucket/t?token=x");
        assert!(
            !shown.contains("secret") && !shown.contains("token"),
            "{shown}"
        );
    }
}
