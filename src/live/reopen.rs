//! Opening while versions come and go.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lance::session::Session;
use lance_io::object_store::ObjectStoreParams;

use super::check::{Gone, same_manifest, says_missing};
use crate::error::{Error, Result};
use crate::manifest::{read_manifest, split_manifest};
use crate::resolve::{Located, Table, VersionAt, VersionRef, Written};
use crate::snapshot::{OpenOptions, Snapshot};
use crate::tree::object::Limits;

/// How often the latest version is looked up when a cleanup takes it before it is read.
const OPEN_ATTEMPTS: u32 = 3;

impl Snapshot {
    /// The latest version on this one's branch: this very snapshot while there is no other. If it is
    /// the version that was `written`, its manifest is not read.
    ///
    /// # Errors
    /// Those of [`Snapshot::open`].
    pub(crate) async fn latest(
        self: &Arc<Self>,
        options: &OpenOptions,
        written: Option<&Written>,
    ) -> Result<Arc<Self>> {
        let options = options.clone().with_reference(VersionRef::latest());
        let table = self.table(options.limits).await?;
        let mut located = table.clone().locate(&options.reference).await?;
        if same_manifest(&located.location, self.location()) {
            return Ok(Arc::clone(self));
        }
        if let Some(written) = written
            && same_manifest(&located.location, &written.location)
        {
            located.location.size = written.location.size;
            located.tail = Some(written.file.clone());
        }
        let session = self.shell().session();
        Self::open_located(table, located, self.params().clone(), session, &options).await
    }

    /// The version that was committed on this one, without a request unless its root lies apart.
    ///
    /// # Errors
    /// Those of [`Snapshot::open`].
    pub(crate) async fn after(
        &self,
        written: &Written,
        options: &OpenOptions,
    ) -> Result<Arc<Self>> {
        let table = self.table(options.limits).await?;
        let located = Located {
            tail: Some(written.file.clone()),
            ..table.clone().located(written.location.clone())
        };
        let session = self.shell().session();
        Self::open_located(table, located, self.params().clone(), session, options).await
    }

    /// Opens the version that `options.reference` was found to name. If it was removed meanwhile, the
    /// error says so; but the latest version is never removed, only replaced, and is then looked up
    /// again.
    pub(crate) async fn open_located(
        table: Table,
        mut located: Located,
        params: ObjectStoreParams,
        session: Arc<Session>,
        options: &OpenOptions,
    ) -> Result<Arc<Self>> {
        let mut attempts = OPEN_ATTEMPTS;
        loop {
            let on_branch = Table {
                uri: located.uri.clone(),
                base: located.base.clone(),
                ..table.clone()
            };
            let location = located.location.clone();
            let (handler, session) = (Arc::clone(&table.handler), Arc::clone(&session));
            let opened = Self::open_at(located, handler, params.clone(), session, options).await;
            let error = match opened {
                Ok(snapshot) => return Ok(snapshot),
                Err(error) => error,
            };
            let text = error.to_string();
            let gone = match says_missing(&text) {
                true => on_branch.gone(&location).await,
                false => None,
            };
            let Some(gone) = gone else {
                return Err(error);
            };
            attempts -= 1;
            if options.reference.at != VersionAt::Latest || attempts == 0 {
                return Err(gone.into_error(&on_branch.uri, location.version, &text));
            }
            located = table.clone().locate(&options.reference).await?;
        }
    }

    /// This version's table and branch, to look up other versions in.
    pub(crate) async fn table(&self, limits: Limits) -> Result<Table> {
        let store = self
            .shell()
            .object_store(None)
            .await
            .map_err(|e| Error::lance("cannot open the table's object store", e))?;
        Ok(Table {
            uri: self.uri().to_string(),
            base: self.shell().branch_location().path,
            store,
            handler: Arc::clone(self.handler()),
            limits,
        })
    }

    /// What an error while reading this version comes from, when it comes from the version's having
    /// been removed; nothing in any other case. Asks the store only about errors of missing objects.
    pub(crate) async fn removed(&self, error: &str) -> Option<Error> {
        if !says_missing(error) {
            return None;
        }
        let table = self.table(Limits::default()).await.ok()?;
        let gone = table.gone(self.location()).await?;
        if let Gone::Replaced(now) = &gone {
            // A copy of the same file is the same version.
            let file = read_manifest(&table.store, now, None, &table.limits).await;
            let file = file.ok()?;
            let now = split_manifest(&file.label, &file.message).ok()?;
            if now.head == *self.head() {
                return None;
            }
        }
        self.gone.store(true, Ordering::Relaxed);
        Some(gone.into_error(self.uri(), self.version(), error))
    }

    /// The error to report in the place of one that reading this version gave.
    pub(crate) async fn explain(&self, error: Error) -> Error {
        let removed = self.removed(&error.to_string()).await;
        removed.unwrap_or(error)
    }
}
