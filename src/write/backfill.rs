//! Backfills: columns whose values come later, fragment by fragment, in commits of their own.
//!
//! ```text
//!   add_columns(all null) ──► write_columns(fragment, rows) … ──► backfill(files) ──► one commit
//!      the schema alone          a data file each, no commit         add_data_file for each
//! ```

use std::num::NonZero;
use std::sync::Arc;

use datafusion::execution::SendableRecordBatchStream;
use futures::TryStreamExt;
use lance::Dataset;
use lance_file::versions::{create_writer, data_file_columns};
use lance_file::writer::FileWriterOptions;
use lance_table::format::DataFile;
use lance_table::transaction::{DataReplacementGroup, Operation, Transaction};
use uuid::Uuid;

use super::commit::CommitReport;
use super::scope;
use super::table::TreeTable;
use crate::error::{Error, Result};

impl TreeTable {
    /// Writes the values of some columns for every row of a fragment, in the order of its rows and
    /// deleted ones included, as a data file for [`Self::backfill`]. Commits nothing.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for columns that the table does not have, another number of rows than
    /// the fragment's, or a fragment that is not there; Lance's, and those of `rows`.
    pub async fn write_columns(
        &self,
        fragment: u32,
        mut rows: SendableRecordBatchStream,
    ) -> Result<(u64, DataFile)> {
        let snapshot = self.latest().await?;
        let missing = || {
            Error::invalid(format!(
                "version {} of {} has no fragment {fragment}",
                snapshot.version(),
                self.uri()
            ))
        };
        let record = snapshot.fragment(fragment).await?.ok_or_else(missing)?;
        let expected = record.record()?.physical_rows;
        let context = |e| {
            Error::lance(
                format!(
                    "cannot write columns of fragment {fragment} of {}",
                    self.uri()
                ),
                e,
            )
        };
        let given = rows.schema();
        let names: Vec<&str> = given.fields().iter().map(|f| f.name().as_str()).collect();
        let shell = snapshot.shell();
        let schema = shell.schema().project(&names).map_err(context)?;
        let version = shell.manifest().data_storage_format.lance_file_format();
        let store = shell.object_store(None).await.map_err(context)?;
        let name = format!("{}.lance", Uuid::new_v4());
        let path = shell
            .branch_location()
            .path
            .join("data")
            .join(name.as_str());
        let (fields, columns) = data_file_columns(version, &schema);
        let writer = store.create(&path).await.map_err(context)?;
        let options = FileWriterOptions::default();
        let mut writer = create_writer(version, writer, schema, options).map_err(context)?;
        let mut written = 0;
        let failed =
            |e| Error::datafusion(format!("cannot read the rows of fragment {fragment}"), e);
        while let Some(batch) = rows.try_next().await.map_err(failed)? {
            written += batch.num_rows() as u64;
            writer.write_batch(&batch).await.map_err(context)?;
        }
        if written != expected {
            // What is written so far is an orphan, for cleanup to take.
            return Err(Error::invalid(format!(
                "fragment {fragment} has {expected} rows, deleted ones included, and was given {written}: a column file has a value for each"
            )));
        }
        writer.finish().await.map_err(context)?;
        let size = store.size(&path).await.map_err(context)?;
        let file = DataFile::new(name, fields, columns, version, NonZero::new(size), None);
        Ok((u64::from(fragment), file))
    }

    /// Gives fragments new data files for the same columns: the backfill of a column that is all null
    /// so far, or its replacement. Each file holds the same fields and its fragment's rows in order.
    /// Backfills of different fragments may be committed by different writers at once.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another change replaced the same columns of the same fragments;
    /// Lance's, for files that do not fit.
    pub async fn backfill(&self, files: Vec<(u64, DataFile)>) -> Result<CommitReport> {
        if files.is_empty() {
            return Err(Error::invalid("a backfill of no fragments"));
        }
        let replacements = files
            .into_iter()
            .map(|(fragment, file)| DataReplacementGroup(fragment, file))
            .collect();
        let snapshot = self.latest().await?;
        let operation = Operation::DataReplacement { replacements };
        let scope = scope::of_operation(&operation)?;
        let transaction = Transaction::new(snapshot.version(), operation, None);
        let work = move |dataset: Dataset| async move {
            let committer = self.committer(Arc::new(dataset));
            committer.execute(transaction).await.map(|_| ())
        };
        let ((), report) = self.on(&snapshot, scope, work).await?;
        Ok(report)
    }
}
