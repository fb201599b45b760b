//! A new table that is a tree from its first version.

use std::sync::Arc;

use datafusion::execution::SendableRecordBatchStream;
use lance::dataset::{InsertBuilder, WriteMode, WriteParams};
use lance_file::version::LanceFileVersion;
use lance_io::object_store::ObjectStore;
use lance_table::format::{IndexMetadata, Manifest, Transaction, pb};
use lance_table::io::commit::{
    CommitError, CommitHandler, ManifestLocation, ManifestNamingScheme, ManifestWriter,
    commit_handler_from_url,
};
use object_store::path::Path;
use parking_lot::Mutex;

use super::build::TreeBuilder;
use super::commit::finish_manifest;
use super::diff::check_storable;
use super::policy::TreePolicy;
use super::publish::publish_bytes;
use super::sink::ObjectSink;
use super::table::{TreeTable, WriteOptions};
use crate::error::{Error, Result};
use crate::resolve::{display_uri, normalize_uri};
use crate::snapshot::OpenOptions;

/// What a new table is like.
#[derive(Debug, Clone, Default)]
pub struct CreateOptions {
    /// Row ids that stay with their rows when files are compacted. Default off, as in Lance.
    pub stable_row_ids: bool,
    /// The format of its data files. Default: Lance's.
    pub data_storage_version: Option<LanceFileVersion>,
    /// Sizes of the tree, kept in the table's config where they differ from the defaults.
    pub policy: TreePolicy,
}

impl TreeTable {
    /// Makes a table of `rows` at `uri`. No rows make an empty table with their schema.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] when there is a table already; Lance's, and those of `rows`.
    pub async fn create(
        uri: &str,
        rows: SendableRecordBatchStream,
        create: CreateOptions,
        options: OpenOptions,
        write: WriteOptions,
    ) -> Result<Self> {
        create.policy.validate()?;
        let uri = normalize_uri(uri)?;
        for field in rows.schema().fields() {
            let name = field.name();
            if name.is_empty() || name.contains('`') {
                return Err(Error::invalid(format!(
                    "cannot create {}: Lance could not read a column named {name:?} again, whose name is empty or has a backtick",
                    display_uri(&uri)
                )));
            }
        }
        let params = options.store_params(&uri);
        let context = || format!("cannot create {uri}");
        let inner = commit_handler_from_url(&uri, &Some(params.clone()))
            .await
            .map_err(|e| Error::lance(context(), e))?;
        let handler = Arc::new(CreateHandler {
            inner,
            policy: create.policy,
            failure: Mutex::new(None),
        });
        let params = WriteParams {
            mode: WriteMode::Create,
            store_params: Some(params),
            commit_handler: Some(Arc::clone(&handler) as _),
            session: options.session.clone(),
            enable_stable_row_ids: create.stable_row_ids,
            data_storage_version: create.data_storage_version,
            ..Default::default()
        };
        let written = InsertBuilder::new(uri.as_str())
            .with_params(&params)
            .execute_stream(rows)
            .await;
        match written {
            Ok(_) => {}
            Err(lance::Error::DatasetAlreadyExists { .. }) => {
                return Err(Error::invalid(format!("there is a table at {uri} already")));
            }
            Err(e) => {
                let own = handler.failure.lock().take();
                return Err(own.unwrap_or_else(|| Error::lance(context(), e)));
            }
        }
        Self::open(&uri, options, write).await
    }
}

/// Publishes the first version of a table as a tree.
#[derive(Debug)]
struct CreateHandler {
    inner: Arc<dyn CommitHandler>,
    policy: TreePolicy,
    failure: Mutex<Option<Error>>,
}

impl CreateHandler {
    async fn first_version(
        &self,
        manifest: &mut Manifest,
        indices: Option<Vec<IndexMetadata>>,
        base_path: &Path,
        store: &ObjectStore,
        writer: ManifestWriter,
        transaction: Option<Transaction>,
    ) -> Result<bytes::Bytes> {
        let sink = ObjectSink::new(Arc::new(store.clone()), base_path.clone(), false);
        let mut builder = TreeBuilder::new(sink, self.policy);
        for fragment in manifest.fragments.iter() {
            let record = pb::DataFragment::from(fragment);
            check_storable(&record)?;
            builder.push(&record).await?;
        }
        let (tree, report) = builder.finish().await?;
        if self.policy != TreePolicy::default() {
            manifest.config.extend(self.policy.to_config());
            manifest.writer_feature_flags |= lance_table::feature_flags::FLAG_TABLE_CONFIG;
        }
        let has_deletions = report.counts.total_rows != report.counts.visible_rows;
        finish_manifest(
            manifest,
            indices,
            writer,
            transaction,
            tree,
            0,
            has_deletions,
        )
        .await
    }
}

#[async_trait::async_trait]
impl CommitHandler for CreateHandler {
    fn is_version_not_found_definitive(&self) -> bool {
        self.inner.is_version_not_found_definitive()
    }

    fn propagate_commit_error_after_success(&self) -> bool {
        self.inner.propagate_commit_error_after_success()
    }

    async fn resolve_latest_location(
        &self,
        base_path: &Path,
        object_store: &ObjectStore,
    ) -> lance::Result<ManifestLocation> {
        self.inner
            .resolve_latest_location(base_path, object_store)
            .await
    }

    async fn resolve_version_location(
        &self,
        base_path: &Path,
        version: u64,
        object_store: &dyn object_store::ObjectStore,
    ) -> lance::Result<ManifestLocation> {
        self.inner
            .resolve_version_location(base_path, version, object_store)
            .await
    }

    async fn commit(
        &self,
        manifest: &mut Manifest,
        indices: Option<Vec<IndexMetadata>>,
        base_path: &Path,
        object_store: &ObjectStore,
        manifest_writer: ManifestWriter,
        naming_scheme: ManifestNamingScheme,
        transaction: Option<Transaction>,
    ) -> std::result::Result<ManifestLocation, CommitError> {
        let file = self
            .first_version(
                manifest,
                indices,
                base_path,
                object_store,
                manifest_writer,
                transaction,
            )
            .await
            .map_err(|error| {
                let passed_on = lance::Error::external(Box::new(error.clone()));
                *self.failure.lock() = Some(error);
                CommitError::OtherError(passed_on)
            })?;
        publish_bytes(
            &self.inner,
            object_store,
            base_path,
            naming_scheme,
            manifest,
            file,
        )
        .await
    }
}
