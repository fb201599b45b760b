//! The versions of a table, or of one of its branches: finding them and reading what each consists
//! of, without what a query needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use lance::Dataset;
use lance::dataset::refs::BranchContents;
use lance::session::Session;
use lance_io::object_store::{ObjectStore, ObjectStoreParams};
use lance_table::format::{is_detached_version, pb};
use lance_table::io::commit::{CommitHandler, ManifestLocation};
use object_store::path::Path;
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Error, Result};
use crate::flat::FlatCatalog;
use crate::manifest::{
    ManifestFile, SplitManifest, check_writable, read_manifest, shell_manifest, split_manifest,
};
use crate::snapshot::{OpenOptions, Snapshot, TreeCatalog, base_table, load_dataset, open_tree};
use crate::tree::object::{
    BaseTable, DEFAULT_CACHE_BYTES, Limits, ObjectCache, ReadStats, TreeObjects,
};
use crate::write::publish::section_of;

/// Manifests read ahead, if they are small.
const MANIFESTS_AHEAD: usize = 16;
/// MiB of manifests in memory at once. A larger one is read alone.
const MANIFEST_MIB: u32 = 256;

/// A table, or one of its branches: everything at one location.
pub(super) struct Lineage {
    pub uri: String,
    pub base: Path,
    pub store: Arc<ObjectStore>,
    pub handler: Arc<dyn CommitHandler>,
    /// The branch; none is the main one.
    pub branch: Option<String>,
    /// The latest version when it was opened. It stays, and so do later ones.
    pub latest: u64,
    shell: Arc<Dataset>,
    params: ObjectStoreParams,
    session: Arc<Session>,
    cache: ObjectCache,
    limits: Limits,
    /// A shell for each set of base paths: all that tree objects ask of one is where bases lie.
    shells: Mutex<Vec<(Vec<pb::BasePath>, Arc<Dataset>)>>,
}

/// One version, read.
pub(super) struct Version {
    pub location: ManifestLocation,
    pub head: pb::Manifest,
    pub file_size: u64,
    pub fragments: Fragments,
    pub indices: Vec<pb::IndexMetadata>,
    pub bases: BaseTable,
    file: ManifestFile,
}

/// Where a version's fragments are.
pub(super) enum Fragments {
    Flat(FlatCatalog),
    Tree(pb::FragmentTree),
}

impl Version {
    pub(super) fn number(&self) -> u64 {
        self.head.version
    }
}

/// A version being handed on, with its share of the memory for manifests.
pub(super) struct Read {
    pub location: ManifestLocation,
    /// Nothing when the manifest went away since it was listed.
    pub version: Result<Option<Version>>,
    _permit: Option<OwnedSemaphorePermit>,
}

/// What refers to versions of a lineage.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct References {
    /// Tagged versions, with their tags.
    pub tags: BTreeMap<u64, BTreeSet<String>>,
    /// Branches that began here or further down, and the version of this lineage they go back to;
    /// those further down first.
    pub branches: Vec<(String, u64)>,
}

impl Lineage {
    /// The lineage that `snapshot` is the latest version of.
    pub(super) async fn of(snapshot: &Snapshot, open: &OpenOptions) -> Result<Self> {
        let shell = snapshot.shell();
        let location = shell.branch_location();
        let store = shell
            .object_store(None)
            .await
            .map_err(|e| Error::lance("cannot open the table's object store", e))?;
        Ok(Self {
            uri: location.uri,
            base: location.path,
            store,
            handler: Arc::clone(snapshot.handler()),
            branch: location.branch,
            latest: snapshot.version(),
            shell: Arc::clone(shell),
            params: snapshot.params().clone(),
            session: shell.session(),
            cache: open
                .cache
                .clone()
                .unwrap_or_else(|| ObjectCache::new(DEFAULT_CACHE_BYTES)),
            limits: open.limits,
            shells: Mutex::default(),
        })
    }

    /// A branch of the same table, as it lies there; nothing of it is read.
    pub(super) fn sibling(&self, branch: &str) -> Result<Self> {
        let location = self
            .shell
            .branch_location()
            .find_branch(Some(branch))
            .map_err(|e| Error::lance(format!("cannot find branch {branch:?}"), e))?;
        Ok(Self {
            uri: location.uri,
            base: location.path,
            store: Arc::clone(&self.store),
            handler: Arc::clone(&self.handler),
            branch: Some(branch.to_string()),
            latest: 0,
            shell: Arc::clone(&self.shell),
            params: self.params.clone(),
            session: Arc::clone(&self.session),
            cache: self.cache.clone(),
            limits: self.limits,
            shells: Mutex::default(),
        })
    }

    /// The resolved location of the root, as that of a base path is written.
    pub(super) fn location(&self) -> String {
        format!("{}/{}", self.store.store_prefix, self.base)
    }

    fn context(&self, what: &str) -> String {
        format!(
            "cannot {what} of {}",
            crate::resolve::display_uri(&self.uri)
        )
    }

    /// Every version, the latest first, and every detached one after them.
    pub(super) async fn versions(&self) -> Result<Vec<ManifestLocation>> {
        let listed = |e| Error::lance(self.context("list the versions"), e);
        let history = self
            .handler
            .list_manifest_locations(&self.base, &self.store, true)
            .try_collect::<Vec<_>>()
            .await;
        let detached = self
            .handler
            .list_detached_manifest_locations(&self.base, &self.store)
            .try_collect::<Vec<_>>()
            .await;
        let mut versions = or_empty(history).map_err(listed)?;
        versions.retain(|location| !is_detached_version(location.version));
        versions.sort_unstable_by_key(|location| std::cmp::Reverse(location.version));
        versions.extend(or_empty(detached).map_err(listed)?);
        Ok(versions)
    }

    /// Versions above `version`.
    pub(super) async fn versions_since(&self, version: u64) -> Result<Vec<ManifestLocation>> {
        self.handler
            .list_manifest_locations_since(&self.base, &self.store, version)
            .try_filter(|location| std::future::ready(!is_detached_version(location.version)))
            .try_collect()
            .await
            .map_err(|e| Error::lance(self.context("list the versions"), e))
    }

    /// Where a version lies, if it is there.
    pub(super) async fn locate(&self, version: u64) -> Result<Option<ManifestLocation>> {
        let found = self
            .handler
            .resolve_version_location(&self.base, version, &self.store.inner)
            .await;
        match found {
            Ok(location) => Ok(Some(location)),
            Err(e) if e.is_not_found() => Ok(None),
            Err(lance::Error::VersionNotFound { .. }) => Ok(None),
            Err(e) => Err(Error::lance(self.context("find versions"), e)),
        }
    }

    /// Reads versions in order, some ahead, bounded by their bytes.
    pub(super) fn read_all(&self, locations: Vec<ManifestLocation>) -> BoxStream<'_, Read> {
        let budget = Arc::new(Semaphore::new(MANIFEST_MIB as usize));
        stream::iter(locations)
            // In order, so that the one that is waited for never waits for those behind it.
            .then(move |location| {
                let budget = Arc::clone(&budget);
                async move {
                    let mib = location.size.unwrap_or(0).div_ceil(1 << 20);
                    let share = u32::try_from(mib)
                        .unwrap_or(MANIFEST_MIB)
                        .clamp(1, MANIFEST_MIB);
                    (location, budget.acquire_many_owned(share).await.ok())
                }
            })
            .map(move |(location, permit)| async move {
                Read {
                    version: self.read(&location).await,
                    location,
                    _permit: permit,
                }
            })
            .buffered(MANIFESTS_AHEAD)
            .boxed()
    }

    /// Reads a version. Nothing when its manifest is not there.
    ///
    /// # Errors
    /// Those of a manifest that breaks a rule; [`Error::Unsupported`] for features this build does
    /// not know: such a version may name files in a way it cannot see.
    pub(super) async fn read(&self, location: &ManifestLocation) -> Result<Option<Version>> {
        let file = match read_manifest(&self.store, location, None, &self.limits).await {
            Ok(file) => file,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(e) => return Err(e),
        };
        let SplitManifest { head, tree, flat } = split_manifest(&file.label, &file.message)?;
        check_writable(&file.label, &head)?;
        if head.version != location.version {
            return Err(Error::corrupt(
                file.label.as_str(),
                "manifest_version",
                format!("version {}, as the file is named", location.version),
                head.version,
            ));
        }
        let bases = base_table(&file, &head, self.location(), &self.session, &self.params)?;
        let indices = self.indices(location, &head, &file).await;
        let indices = match indices {
            // Went away between two requests.
            Err(e) if e.corrupt_rule() == Some("object_missing") => return Ok(None),
            indices => indices?,
        };
        Ok(Some(Version {
            location: location.clone(),
            file_size: file.file_size,
            fragments: match tree {
                None => Fragments::Flat(flat),
                Some(tree) => Fragments::Tree(tree),
            },
            indices,
            bases,
            head,
            file,
        }))
    }

    async fn indices(
        &self,
        location: &ManifestLocation,
        head: &pb::Manifest,
        file: &ManifestFile,
    ) -> Result<Vec<pb::IndexMetadata>> {
        let Some(at) = head.index_section else {
            return Ok(Vec::new());
        };
        // Most often it came with the manifest.
        let section = match file.sections.as_ref().and_then(|s| section_in(s, at)) {
            Some(section) => section,
            None => section_of(&self.store, &location.path, file.file_size, at).await?,
        };
        let section = pb::IndexSection::decode(section).map_err(|e| {
            Error::corrupt(
                file.label.as_str(),
                "index_section",
                "an IndexSection message",
                e.to_string(),
            )
        })?;
        Ok(section.indices)
    }

    /// Opens the tree of a version: at most one request, for its root.
    pub(super) async fn tree(
        &self,
        version: &Version,
        tree: &pb::FragmentTree,
        stats: &ReadStats,
    ) -> Result<TreeCatalog> {
        let shell = self.shell_of(version).await?;
        let objects = TreeObjects::new(
            shell,
            version.bases.clone(),
            self.cache.clone(),
            self.limits,
        );
        open_tree(&version.file, &version.head, tree.clone(), objects, stats).await
    }

    async fn shell_of(&self, version: &Version) -> Result<Arc<Dataset>> {
        let bases = &version.head.base_paths;
        let known = |shells: &[(Vec<pb::BasePath>, Arc<Dataset>)]| {
            let found = shells.iter().find(|(known, _)| known == bases);
            found.map(|(_, shell)| Arc::clone(shell))
        };
        if let Some(shell) = known(&self.shells.lock()) {
            return Ok(shell);
        }
        let shell = load_dataset(
            &self.uri,
            &shell_manifest(&version.head),
            &version.location,
            &self.handler,
            &self.params,
            &self.session,
        )
        .await
        .map_err(|e| Error::lance(self.context("open a version"), e))?;
        let shell = Arc::new(shell);
        self.shells.lock().push((bases.clone(), Arc::clone(&shell)));
        Ok(shell)
    }

    /// The tags and branches that refer to this lineage, as they are now.
    pub(super) async fn references(&self) -> Result<References> {
        let tags = self.shell.tags().list().await;
        let tags = tags.map_err(|e| Error::lance(self.context("read the tags"), e))?;
        let own = self.branch.as_deref();
        let mut references = References::default();
        for (name, tag) in tags {
            if tag.branch.as_deref().filter(|b| *b != "main") == own {
                let names = references.tags.entry(tag.version).or_default();
                names.insert(name);
            }
        }
        let context = || self.context("read the branches");
        let branches = self.shell.branches();
        let all = branches.list().await;
        let all = all.map_err(|e| Error::lance(context(), e))?;
        let identifier = branches
            .get_identifier(own)
            .await
            .map_err(|e| Error::lance(context(), e))?;
        references.branches = identifier.collect_referenced_versions(&all);
        // Those of before branches had identifiers say at least what they began from.
        let mut others: Vec<_> = all
            .iter()
            .filter(|(name, branch)| began_here(branch, own) && !references.has_branch(name))
            .map(|(name, branch)| (name.clone(), branch.parent_version))
            .collect();
        others.sort_unstable();
        references.branches.extend(others);
        Ok(references)
    }
}

impl References {
    fn has_branch(&self, name: &str) -> bool {
        self.branches.iter().any(|(known, _)| known == name)
    }
}

fn began_here(branch: &BranchContents, own: Option<&str>) -> bool {
    branch.parent_branch.as_deref().filter(|b| *b != "main") == own
}

/// A folder that is not there has nothing in it.
fn or_empty<T: Default>(listed: lance::Result<T>) -> lance::Result<T> {
    match listed {
        Err(e) if e.is_not_found() => Ok(T::default()),
        listed => listed,
    }
}

/// The section that begins at `at`, when `sections` has all of it.
fn section_in(sections: &Bytes, at: u64) -> Option<Bytes> {
    let start = usize::try_from(at).ok()?;
    let length = u32::from_le_bytes(*sections.get(start..)?.first_chunk::<4>()?);
    let from = start.checked_add(4)?;
    let to = from.checked_add(usize::try_from(length).ok()?)?;
    (to <= sections.len()).then(|| sections.slice(from..to))
}
