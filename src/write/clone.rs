//! Clones and branches: new tables that begin as a version of another.
//!
//! A shallow clone owns nothing but its root. The root's references, and the files that its buffered
//! mutations name, get the id of the base path that leads to the source; everything below is shared
//! (spec, "Object references").

use std::collections::HashMap;
use std::sync::Arc;

use lance::Dataset;
use lance::dataset::refs::{
    BranchContents, BranchIdentifier, branch_contents_path, check_valid_branch,
};
use lance_io::object_store::{ObjectStore, ObjectStoreParams, StorageOptionsAccessor};
use lance_table::feature_flags::apply_feature_flags;
use lance_table::format::{BasePath, IndexMetadata, Transaction as StoredTransaction, pb};
use lance_table::io::commit::{
    CommitError, CommitHandler, commit_handler_from_url, write_manifest_file_to_path,
};
use lance_table::system_index::frag_reuse::metadata::is_tagged;
use lance_table::transaction::{Operation, Transaction};
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutMode, PutOptions};
use prost::Message;

use super::commit::{finish_manifest, now_nanos};
use super::policy::TreePolicy;
use super::publish::publish_bytes;
use super::sink::{ObjectKind, ObjectSink};
use super::table::TreeTable;
use super::view::indices_of;
use crate::error::{Error, Result};
use crate::ranges::FragmentRanges;
use crate::resolve::{VersionRef, normalize_uri};
use crate::snapshot::{Catalog, Snapshot, TreeCatalog, root_uuid};
use crate::tree::mutation::{Action, Mutation, Pending};
use crate::tree::node::{Node, Root};
use crate::tree::object::Owner;
use crate::tree::record::resolve_owner;

/// Where a new table goes.
pub(crate) struct Target {
    pub uri: String,
    pub store: Arc<ObjectStore>,
    pub base: Path,
    pub handler: Arc<dyn CommitHandler>,
}

impl TreeTable {
    /// Makes a table at `target` that shares this version's files. `storage_options` are those of the
    /// target's store; none are taken from this table.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] when there is a table at `target` already.
    pub async fn shallow_clone(
        &self,
        target: &str,
        version: VersionRef,
        storage_options: HashMap<String, String>,
    ) -> Result<()> {
        let source = self.version(version).await?;
        let target = self.target(target, storage_options).await?;
        if let Catalog::Flat(_) = source.catalog {
            let mut dataset = self.flat_version(&source).await?;
            let params = Some(self.options().store_params(&target.uri));
            let version = source.version();
            let cloned = dataset.shallow_clone(&target.uri, version, params).await;
            return cloned
                .map(|_| ())
                .map_err(|e| Error::lance(format!("cannot clone {}", self.uri()), e));
        }
        clone_version(&source, &target, None, self.write_options().policy).await
    }

    /// Makes a branch of a version, with files of its own from there on.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for a name that is taken or no branch name.
    pub async fn create_branch(&self, branch: &str, version: VersionRef) -> Result<()> {
        check_valid_branch(branch)
            .map_err(|e| Error::lance(format!("{branch:?} is no branch name"), e))?;
        let source = self.version(version).await?;
        if let Catalog::Flat(_) = source.catalog {
            let mut dataset = self.flat_version(&source).await?;
            return dataset
                .create_branch(branch, source.version(), None)
                .await
                .map(|_| ())
                .map_err(|e| Error::lance(format!("cannot branch {}", self.uri()), e));
        }
        let shell = source.shell();
        let location = shell
            .branch_location()
            .find_branch(Some(branch))
            .map_err(|e| Error::lance(format!("cannot place branch {branch:?}"), e))?;
        let root = shell
            .branch_location()
            .find_main()
            .map_err(|e| Error::lance("cannot find the table of a branch", e))?;
        let store = store_of(&source).await?;
        let target = Target {
            uri: location.uri,
            store: Arc::clone(&store),
            base: location.path,
            handler: Arc::clone(source.handler()),
        };
        check_absent(&target).await?;
        clone_version(&source, &target, Some(branch), self.write_options().policy).await?;
        register_branch(&source, &store, &root.path, branch).await
    }

    /// Deletes a branch with all its versions.
    ///
    /// # Errors
    /// Lance's, for a branch that is not there or that others were made from.
    pub async fn delete_branch(&self, branch: &str) -> Result<()> {
        let snapshot = self.latest().await?;
        let mut dataset = snapshot.shell().as_ref().clone();
        dataset
            .delete_branch(branch)
            .await
            .map_err(|e| Error::lance(format!("cannot delete branch {branch:?}"), e))
    }

    /// Copies a version with all its files to a new table at `target`, which is a tree too.
    ///
    /// Lance copies the files; its dataset holds every fragment's record meanwhile.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] when there is a table at `target` already; Lance's for the copying.
    pub async fn deep_clone(
        &self,
        target: &str,
        version: VersionRef,
        storage_options: HashMap<String, String>,
    ) -> Result<()> {
        let source = self.version(version).await?;
        let target = self.target(target, storage_options.clone()).await?;
        let number = source.version();
        let uri = target.uri.clone();
        let params = params_of(storage_options);
        let work = move |mut dataset: Dataset| async move {
            dataset
                .deep_clone(&uri, number, Some(params))
                .await
                .map(|_| ())
        };
        self.on_target(&source, FragmentRanges::all(), Some(target.handler), work)
            .await?;
        Ok(())
    }

    async fn version(&self, version: VersionRef) -> Result<Arc<Snapshot>> {
        Snapshot::open(self.uri(), self.options().clone().with_reference(version)).await
    }

    async fn target(&self, uri: &str, options: HashMap<String, String>) -> Result<Target> {
        let uri = normalize_uri(uri)?;
        let params = params_of(options);
        let context = || format!("cannot write to {uri}");
        let session = self.write_session();
        let (store, base) =
            ObjectStore::from_uri_and_params(session.store_registry(), &uri, &params)
                .await
                .map_err(|e| Error::lance(context(), e))?;
        let handler = commit_handler_from_url(&uri, &Some(params))
            .await
            .map_err(|e| Error::lance(context(), e))?;
        let target = Target {
            uri,
            store,
            base,
            handler,
        };
        check_absent(&target).await?;
        Ok(target)
    }
}

fn params_of(options: HashMap<String, String>) -> ObjectStoreParams {
    let accessor = (!options.is_empty())
        .then(|| Arc::new(StorageOptionsAccessor::with_static_options(options)));
    ObjectStoreParams {
        storage_options_accessor: accessor,
        ..Default::default()
    }
}

async fn store_of(snapshot: &Snapshot) -> Result<Arc<ObjectStore>> {
    snapshot
        .shell()
        .object_store(None)
        .await
        .map_err(|e| Error::lance("cannot open the table's object store", e))
}

pub(crate) async fn check_absent(target: &Target) -> Result<()> {
    let found = target
        .handler
        .resolve_latest_location(&target.base, &target.store)
        .await;
    match found {
        Err(lance::Error::NotFound { .. } | lance::Error::DatasetNotFound { .. }) => Ok(()),
        Err(e) => Err(Error::lance(format!("cannot look at {}", target.uri), e)),
        Ok(_) => Err(Error::invalid(format!(
            "there is a table at {} already",
            target.uri
        ))),
    }
}

/// Publishes `source` as the first version of `target`.
async fn clone_version(
    source: &Snapshot,
    target: &Target,
    branch: Option<&str>,
    policy: Option<TreePolicy>,
) -> Result<()> {
    let Catalog::Tree(tree) = &source.catalog else {
        return Err(Error::internal("a flat version cloned as a tree"));
    };
    let shell = source.shell();
    let from = shell.manifest();
    let context = |e| Error::lance(format!("cannot clone {}", source.uri()), e);
    let base_id = BasePath::unused_id(from.base_paths.keys().copied()).map_err(context)?;
    let operation = Operation::Clone {
        is_shallow: true,
        ref_name: from.branch.clone(),
        ref_version: source.version(),
        ref_path: source.uri().to_string(),
        branch_name: branch.map(str::to_string),
    };
    let transaction = Transaction::new(source.version(), operation, None);
    let stored = StoredTransaction::try_from(&transaction).map_err(context)?;
    let name = write_transaction(target, stored.as_pb()).await?;
    let mut manifest = from.shallow_clone(
        from.branch.clone(),
        source.uri().to_string(),
        base_id,
        branch.map(str::to_string),
        name,
    );
    apply_feature_flags(&mut manifest, from.uses_stable_row_ids(), false).map_err(context)?;
    manifest.set_timestamp(now_nanos()?);
    let mut indices = indices_of(source).await?;
    share_indices(source, &mut indices, base_id)?;
    let policy = match policy {
        Some(policy) => policy,
        None => TreePolicy::from_config(&from.config)?,
    };
    let sink = ObjectSink::new(Arc::clone(&target.store), target.base.clone(), false);
    let new = shared_tree(tree, base_id, &policy, &sink).await?;
    let counts = tree.counts()?;
    let file = finish_manifest(
        &mut manifest,
        (!indices.is_empty()).then_some(indices),
        write_manifest_file_to_path,
        Some(stored),
        new,
        source.head().reader_feature_flags,
        counts.total_rows != counts.visible_rows,
    )
    .await?;
    let naming = source.location().naming_scheme;
    let published = publish_bytes(
        &target.handler,
        &target.store,
        &target.base,
        naming,
        &manifest,
        file,
    )
    .await;
    match published {
        Ok(_) => Ok(()),
        Err(CommitError::CommitConflict) => Err(Error::invalid(format!(
            "another writer made a table at {} meanwhile",
            target.uri
        ))),
        Err(CommitError::OtherError(e)) => Err(context(e)),
    }
}

async fn write_transaction(target: &Target, transaction: &pb::Transaction) -> Result<String> {
    let name = format!("{}-{}.txn", transaction.read_version, transaction.uuid);
    let path = target
        .base
        .clone()
        .join("_transactions")
        .join(name.as_str());
    target
        .store
        .inner
        .put(&path, transaction.encode_to_vec().into())
        .await
        .map_err(|e| Error::store(path.to_string(), e))?;
    Ok(name)
}

fn share_indices(source: &Snapshot, indices: &mut [IndexMetadata], base_id: u32) -> Result<()> {
    for index in indices {
        if is_tagged(index) {
            return Err(Error::invalid(format!(
                "{} cannot be cloned: its fragment reuse index {} has a history that only Lance can move; trim it by remapping the indexes first",
                source.uri(),
                index.name
            )));
        }
        index.base_id.get_or_insert(base_id);
    }
    Ok(())
}

/// The root of a clone: the source's, with everything it inherited named.
async fn shared_tree(
    tree: &TreeCatalog,
    base_id: u32,
    policy: &TreePolicy,
    sink: &ObjectSink,
) -> Result<pb::FragmentTree> {
    let owner = Owner::Base(base_id);
    let mut children = tree.root.node.children.clone();
    for child in &mut children {
        child.base_id.get_or_insert(base_id);
    }
    let buffer = tree.pending.iter().map(|item| shared(item, owner));
    let root = Root {
        node: Node {
            children,
            buffer: buffer.collect(),
        },
        next_sequence: tree.next_sequence,
    };
    let message = root.encode();
    let root = if message.encoded_len() as u64 <= policy.inline_root_bytes {
        pb::fragment_tree::Root::InlineRoot(message)
    } else {
        let path = sink
            .put(ObjectKind::Root, message.encode_to_vec().into())
            .await?;
        pb::fragment_tree::Root::RootUuid(root_uuid(&path)?)
    };
    Ok(pb::FragmentTree {
        root: Some(root),
        mutations_since_root: Vec::new(),
        next_action_sequence: tree.next_sequence,
    })
}

/// A mutation that means the same in the clone.
fn shared(item: &Pending, owner: Owner) -> Arc<Mutation> {
    let mut mutation = item.mutation.as_ref().clone();
    match &mut mutation.action {
        Action::Upsert(record) => resolve_owner(record, owner),
        Action::AddDataFile(file) => file.base_id = file.base_id.or(owner.base_id()),
        Action::AddDeletionFile(file) => file.base_id = file.base_id.or(owner.base_id()),
        Action::ReplaceDataFile { base_id, .. } => *base_id = base_id.or(owner.base_id()),
        Action::Remove | Action::RemoveDataFile(_) | Action::ClearDeletionFile => {}
    }
    Arc::new(mutation)
}

/// Enters a branch in the table's list, as Lance does.
async fn register_branch(
    source: &Snapshot,
    store: &ObjectStore,
    root: &Path,
    branch: &str,
) -> Result<()> {
    let context = |e| Error::lance(format!("cannot register branch {branch:?}"), e);
    let parent = source.shell().manifest().branch.clone();
    let identifier = match &parent {
        None => BranchIdentifier::main(),
        Some(parent) => {
            let path = branch_contents_path(root, parent);
            let contents = BranchContents::from_path(&path, store, parent).await;
            contents.map_err(context)?.identifier
        }
    };
    let now = chrono::Utc::now().timestamp();
    let contents = BranchContents {
        parent_branch: parent,
        identifier: BranchIdentifier::new(&identifier, source.version()),
        parent_version: source.version(),
        create_at: u64::try_from(now).unwrap_or_default(),
        manifest_size: usize::try_from(source.open_cost().manifest_bytes).unwrap_or(usize::MAX),
        metadata: HashMap::new(),
    };
    let bytes = serde_json::to_vec_pretty(&contents)
        .map_err(|e| Error::internal(format!("a branch cannot be written down: {e}")))?;
    let path = branch_contents_path(root, branch);
    let options = PutOptions {
        mode: PutMode::Create,
        ..Default::default()
    };
    match store.inner.put_opts(&path, bytes.into(), options).await {
        Ok(_) => Ok(()),
        Err(object_store::Error::AlreadyExists { .. }) => {
            Err(Error::invalid(format!("branch {branch:?} exists already")))
        }
        Err(e) => Err(Error::store(path.to_string(), e)),
    }
}
