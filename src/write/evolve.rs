//! Changes of everything but rows: columns, files, indexes, config, versions.

use std::collections::{HashMap, HashSet};

use lance::Dataset;
use lance::dataset::optimize::{CompactionMetrics, CompactionOptions, compact_files};
use lance::dataset::{ColumnAlteration, NewColumnTransform};
use lance::index::DatasetIndexExt;
use lance_index::optimize::OptimizeOptions;
use lance_index::{IndexParams, IndexType};
use lance_table::format::pb;

use super::commit::CommitReport;
use super::scope;
use super::table::TreeTable;
use crate::error::{Error, Result};
use crate::ranges::FragmentRanges;
use crate::snapshot::Layout;

impl TreeTable {
    /// Adds columns to every fragment. All-null columns change the schema alone and touch no
    /// fragment; the others write a file for each.
    ///
    /// # Errors
    /// Lance's; a stream can be read but once, so a conflict is not tried again.
    pub async fn add_columns(
        &self,
        columns: NewColumnTransform,
        read_columns: Option<Vec<String>>,
        batch_size: Option<u32>,
    ) -> Result<CommitReport> {
        let scope = match &columns {
            NewColumnTransform::AllNulls(_) => FragmentRanges::empty(),
            _ => FragmentRanges::all(),
        };
        let work = move |mut dataset: Dataset| async move {
            dataset.add_columns(columns, read_columns, batch_size).await
        };
        let ((), report) = self.with_dataset(scope, work).await?;
        Ok(report)
    }

    /// Drops columns. Files that hold nothing else leave their fragments' records.
    ///
    /// # Errors
    /// Lance's, for columns that are not there.
    pub async fn drop_columns(&self, columns: &[&str]) -> Result<CommitReport> {
        self.retrying(|| async move {
            let snapshot = self.latest().await?;
            let left = snapshot
                .shell()
                .plan_drop_columns(columns)
                .map_err(|e| Error::lance(format!("cannot drop columns of {}", self.uri()), e))?;
            let left: HashSet<i32> = left.fields_pre_order().map(|f| f.id).collect();
            let scope = match snapshot.layout() {
                Layout::Flat => FragmentRanges::all(),
                Layout::Tree => {
                    scope::of_records(&snapshot, |record| loses_something(record, &left)).await?
                }
            };
            let work =
                move |mut dataset: Dataset| async move { dataset.drop_columns(columns).await };
            let ((), report) = self.on(&snapshot, scope, work).await?;
            Ok(report)
        })
        .await
    }

    /// Renames columns, changes their type or whether they may be null. A rename or a column that may
    /// be null from now on touches no fragment; the others read or rewrite the column everywhere.
    ///
    /// # Errors
    /// Lance's.
    pub async fn alter_columns(&self, alterations: &[ColumnAlteration]) -> Result<CommitReport> {
        let reads = alterations
            .iter()
            .any(|a| a.data_type.is_some() || a.nullable == Some(false));
        let scope = if reads {
            FragmentRanges::all()
        } else {
            FragmentRanges::empty()
        };
        let work =
            move |mut dataset: Dataset| async move { dataset.alter_columns(alterations).await };
        let ((), report) = self.with_dataset(scope, work).await?;
        Ok(report)
    }

    /// Compacts data files: small fragments become larger ones, deleted rows go. Indexes follow.
    /// Considers the fragments in `range`; its dataset holds their records meanwhile.
    ///
    /// # Errors
    /// Lance's; [`Error::Conflict`] when others changed a fragment that was being compacted.
    pub async fn compact(
        &self,
        range: FragmentRanges,
        options: CompactionOptions,
    ) -> Result<(CompactionMetrics, CommitReport)> {
        let work = move |mut dataset: Dataset| async move {
            compact_files(&mut dataset, options, None).await
        };
        self.with_dataset(range, work).await
    }

    /// Builds an index over the whole table.
    ///
    /// # Errors
    /// Lance's.
    pub async fn create_index(
        &self,
        columns: &[&str],
        index_type: IndexType,
        name: Option<String>,
        params: &dyn IndexParams,
        replace: bool,
    ) -> Result<CommitReport> {
        let work = move |mut dataset: Dataset| async move {
            dataset
                .create_index(columns, index_type, name, params, replace)
                .await
                .map(|_| ())
        };
        let ((), report) = self.with_dataset(FragmentRanges::all(), work).await?;
        Ok(report)
    }

    /// Drops an index.
    ///
    /// # Errors
    /// Lance's, for one that is not there.
    pub async fn drop_index(&self, name: &str) -> Result<CommitReport> {
        let work = move |mut dataset: Dataset| async move { dataset.drop_index(name).await };
        let ((), report) = self.with_dataset(FragmentRanges::empty(), work).await?;
        Ok(report)
    }

    /// Brings indexes up to date with rows written since they were built.
    ///
    /// # Errors
    /// Lance's.
    pub async fn optimize_indices(&self, options: &OptimizeOptions) -> Result<CommitReport> {
        let work =
            move |mut dataset: Dataset| async move { dataset.optimize_indices(options).await };
        let ((), report) = self.with_dataset(FragmentRanges::all(), work).await?;
        Ok(report)
    }

    /// Sets keys of the table's config, or removes those without a value.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for sizes of the tree that make no sense; Lance's.
    pub async fn update_config(&self, values: &[(&str, Option<&str>)]) -> Result<CommitReport> {
        self.retrying(|| async move {
            let snapshot = self.latest().await?;
            let mut config: HashMap<String, String> = snapshot.head().config.clone();
            for (key, value) in values {
                match value {
                    Some(value) => config.insert((*key).to_string(), (*value).to_string()),
                    None => config.remove(*key),
                };
            }
            super::policy::TreePolicy::from_config(&config)?;
            let work = move |mut dataset: Dataset| async move {
                dataset
                    .update_config(values.iter().copied())
                    .await
                    .map(|_| ())
            };
            let ((), report) = self.on(&snapshot, FragmentRanges::empty(), work).await?;
            Ok(report)
        })
        .await
    }

    /// Sets keys of the schema's metadata, or removes those without a value.
    ///
    /// # Errors
    /// Lance's.
    pub async fn update_schema_metadata(
        &self,
        values: &[(&str, Option<&str>)],
    ) -> Result<CommitReport> {
        let work = move |mut dataset: Dataset| async move {
            dataset
                .update_schema_metadata(values.iter().copied())
                .await
                .map(|_| ())
        };
        let ((), report) = self.with_dataset(FragmentRanges::empty(), work).await?;
        Ok(report)
    }

    /// Makes an old version the latest again. Its tree objects are shared; fragment ids go on.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a version that is not there.
    pub async fn restore(&self, version: u64) -> Result<CommitReport> {
        let work = move |dataset: Dataset| async move {
            let mut old = dataset.checkout_version(version).await?;
            old.restore().await
        };
        let ((), report) = self.with_dataset(FragmentRanges::empty(), work).await?;
        Ok(report)
    }

    /// Gives a version a name. It is kept by cleanup as long as the tag is there.
    ///
    /// # Errors
    /// Lance's, for a name that is taken or a version that is not there.
    pub async fn create_tag(&self, tag: &str, version: u64) -> Result<()> {
        let snapshot = self.latest().await?;
        let created = snapshot.shell().tags().create(tag, version).await;
        created.map_err(|e| Error::lance(format!("cannot create tag {tag:?}"), e))
    }

    /// Lets a tag name another version.
    ///
    /// # Errors
    /// Lance's, for a tag or version that is not there.
    pub async fn update_tag(&self, tag: &str, version: u64) -> Result<()> {
        let snapshot = self.latest().await?;
        let updated = snapshot.shell().tags().update(tag, version).await;
        updated.map_err(|e| Error::lance(format!("cannot move tag {tag:?}"), e))
    }

    /// Deletes a tag. The version it named stays until it is cleaned up.
    ///
    /// # Errors
    /// Lance's, for a tag that is not there.
    pub async fn delete_tag(&self, tag: &str) -> Result<()> {
        let snapshot = self.latest().await?;
        let deleted = snapshot.shell().tags().delete(tag).await;
        deleted.map_err(|e| Error::lance(format!("cannot delete tag {tag:?}"), e))
    }
}

/// Whether a file or overlay of the record holds no column that stays.
fn loses_something(record: &pb::DataFragment, left: &HashSet<i32>) -> bool {
    let ends = |fields: &[i32]| !fields.iter().any(|f| left.contains(f));
    let overlays = record.overlays.iter().filter_map(|o| o.data_file.as_ref());
    record.files.iter().any(|f| ends(&f.fields))
        || overlays
            .flat_map(|f| &f.fields)
            .any(|f| *f >= 0 && !left.contains(f))
}
