//! An object store that counts requests by kind of object, and fails, stalls or interferes on
//! demand.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use lance_io::object_store::WrappingObjectStore;
use object_store::list::PaginatedListStore;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};

/// What to do with a request.
pub(crate) enum Act {
    /// Let it pass.
    Pass,
    /// Answer with a passing error.
    Busy,
    /// Do it and answer with an error all the same.
    DoneButFailed,
}

type Hook = dyn Fn(&str, &str) -> BoxFuture<'static, Act> + Send + Sync;

/// Counts and interferes with what passes through every store it wraps.
#[derive(Clone, Default)]
pub(crate) struct Probe {
    counts: Arc<Mutex<BTreeMap<String, u64>>>,
    delay: Duration,
    hook: Option<Arc<Hook>>,
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Probe")
    }
}

impl Probe {
    /// Waits before each request.
    pub(crate) fn slow(delay: Duration) -> Self {
        Self {
            delay,
            ..Default::default()
        }
    }

    /// Asks `hook` with verb and location before each get, put and delete.
    pub(crate) fn hooked(
        hook: impl Fn(&str, &str) -> BoxFuture<'static, Act> + Send + Sync + 'static,
    ) -> Self {
        Self {
            hook: Some(Arc::new(hook)),
            ..Default::default()
        }
    }

    /// Requests whose "verb location" contains `part`.
    pub(crate) fn count(&self, part: &str) -> u64 {
        let counts = self.counts.lock().expect("not poisoned");
        counts
            .iter()
            .filter(|(key, _)| key.contains(part))
            .map(|(_, n)| n)
            .sum()
    }

    /// Forgets what was counted.
    pub(crate) fn reset(&self) {
        self.counts.lock().expect("not poisoned").clear();
    }

    async fn before(&self, verb: &str, location: &Path) -> Act {
        let key = format!("{verb} {location}");
        *self
            .counts
            .lock()
            .expect("not poisoned")
            .entry(key)
            .or_default() += 1;
        if !self.delay.is_zero() {
            tokio::time::sleep(self.delay).await;
        }
        match &self.hook {
            Some(hook) => hook(verb, location.as_ref()).await,
            None => Act::Pass,
        }
    }
}

fn busy() -> object_store::Error {
    object_store::Error::Generic {
        store: "probe",
        source: "503 slow down".into(),
    }
}

impl WrappingObjectStore for Probe {
    fn wrap(&self, _: &str, original: Arc<dyn ObjectStore>) -> Arc<dyn ObjectStore> {
        Arc::new(Probed {
            inner: original,
            probe: self.clone(),
        })
    }

    fn wrap_paginated(
        &self,
        _: &str,
        _: Arc<dyn PaginatedListStore>,
    ) -> Option<Arc<dyn PaginatedListStore>> {
        None
    }
}

#[derive(Debug)]
struct Probed {
    inner: Arc<dyn ObjectStore>,
    probe: Probe,
}

impl fmt::Display for Probed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Probed({})", self.inner)
    }
}

#[async_trait]
impl ObjectStore for Probed {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        match self.probe.before("put", location).await {
            Act::Pass => self.inner.put_opts(location, payload, options).await,
            Act::Busy => Err(busy()),
            Act::DoneButFailed => {
                self.inner.put_opts(location, payload, options).await?;
                Err(busy())
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        match self.probe.before("put", location).await {
            Act::Pass => self.inner.put_multipart_opts(location, options).await,
            Act::Busy | Act::DoneButFailed => Err(busy()),
        }
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let verb = if options.head { "head" } else { "get" };
        match self.probe.before(verb, location).await {
            Act::Pass => self.inner.get_opts(location, options).await,
            Act::Busy | Act::DoneButFailed => Err(busy()),
        }
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (inner, probe) = (Arc::clone(&self.inner), self.probe.clone());
        locations
            .then(move |location| {
                let (inner, probe) = (Arc::clone(&inner), probe.clone());
                async move {
                    let location = location?;
                    match probe.before("delete", &location).await {
                        Act::Pass => inner.delete(&location).await?,
                        Act::Busy => return Err(busy()),
                        Act::DoneButFailed => {
                            inner.delete(&location).await?;
                            return Err(busy());
                        }
                    }
                    Ok(location)
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let key = format!("list {}", prefix.map_or("", Path::as_ref));
        *self
            .probe
            .counts
            .lock()
            .expect("not poisoned")
            .entry(key)
            .or_default() += 1;
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.inner.rename_opts(from, to, options).await
    }
}
