//! An object store that counts requests and bytes by kind of object, and can be slow.
//!
//! Counted are requests as a remote store would bill them: every get, head, put, list, copy and
//! delete, and of an upload in parts its start, each part and its end. Bytes are those asked for, whether or not the caller reads them to the end. Not counted is
//! what bypasses object stores; `file-object-store://` locations bypass nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use lance_io::object_store::WrappingObjectStore;
use object_store::list::PaginatedListStore;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart,
};
use parking_lot::Mutex;

use crate::plan::Cost;

/// Counts what passes through every store it wraps.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meter {
    costs: Arc<Mutex<BTreeMap<String, Cost>>>,
    delay: Duration,
}

impl Meter {
    pub(crate) fn new(delay: Duration) -> Self {
        Self {
            costs: Arc::default(),
            delay,
        }
    }

    /// What was counted so far.
    pub(crate) fn costs(&self) -> BTreeMap<String, Cost> {
        self.costs.lock().clone()
    }

    fn count(&self, verb: &str, location: &str, bytes: u64) {
        let mut costs = self.costs.lock();
        let cost = costs
            .entry(format!("{verb} {}", kind(location)))
            .or_default();
        cost.requests += 1;
        cost.bytes += bytes;
    }

    async fn wait(&self) {
        if !self.delay.is_zero() {
            tokio::time::sleep(self.delay).await;
        }
    }
}

/// What an object is, from its place in a Lance table.
fn kind(location: &str) -> &'static str {
    let kinds = [
        ("latest_version_hint", "version hint"),
        ("_transactions", "transaction file"),
        ("_versions", "manifest"),
        ("_bt/root/", "tree root"),
        ("_bt/node/", "tree node"),
        ("_bt/leaf/", "tree leaf"),
        ("_deletions/", "deletion file"),
        ("/data/", "data file"),
    ];
    let found = kinds.iter().find(|(part, _)| location.contains(part));
    found.map_or("other", |(_, kind)| kind)
}

impl WrappingObjectStore for Meter {
    fn wrap(&self, _: &str, original: Arc<dyn ObjectStore>) -> Arc<dyn ObjectStore> {
        Arc::new(Metered {
            inner: original,
            meter: self.clone(),
        })
    }

    fn wrap_paginated(
        &self,
        _: &str,
        _: Arc<dyn PaginatedListStore>,
    ) -> Option<Arc<dyn PaginatedListStore>> {
        // Listings then go through `wrap`, where they are counted.
        None
    }
}

#[derive(Debug)]
struct Metered {
    inner: Arc<dyn ObjectStore>,
    meter: Meter,
}

impl fmt::Display for Metered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Metered({})", self.inner)
    }
}

#[async_trait]
impl ObjectStore for Metered {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.meter.wait().await;
        self.meter
            .count("put", location.as_ref(), payload.content_length() as u64);
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.meter.wait().await;
        self.meter.count("put", location.as_ref(), 0);
        let inner = self.inner.put_multipart_opts(location, options).await?;
        Ok(Box::new(MeteredUpload {
            inner,
            location: location.clone(),
            meter: self.meter.clone(),
        }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.meter.wait().await;
        let verb = if options.head { "head" } else { "get" };
        match self.inner.get_opts(location, options).await {
            Ok(result) => {
                let bytes = match verb {
                    "head" => 0,
                    _ => result.range.end - result.range.start,
                };
                self.meter.count(verb, location.as_ref(), bytes);
                Ok(result)
            }
            Err(error) => {
                self.meter.count(verb, location.as_ref(), 0);
                Err(error)
            }
        }
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let meter = self.meter.clone();
        let counted = locations.inspect(move |location| {
            if let Ok(location) = location {
                meter.count("delete", location.as_ref(), 0);
            }
        });
        self.inner.delete_stream(counted.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.meter.count("list", prefix.map_or("", Path::as_ref), 0);
        let listed = self.inner.list(prefix);
        let meter = self.meter.clone();
        async move {
            meter.wait().await;
            listed
        }
        .flatten_stream()
        .boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.meter.wait().await;
        self.meter.count("list", prefix.map_or("", Path::as_ref), 0);
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.meter.wait().await;
        self.meter.count("copy", to.as_ref(), 0);
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.meter.wait().await;
        self.meter.count("rename", to.as_ref(), 0);
        self.inner.rename_opts(from, to, options).await
    }
}

/// An upload whose parts are counted.
#[derive(Debug)]
struct MeteredUpload {
    inner: Box<dyn MultipartUpload>,
    location: Path,
    meter: Meter,
}

#[async_trait]
impl MultipartUpload for MeteredUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let bytes = data.content_length() as u64;
        self.meter.count("put", self.location.as_ref(), bytes);
        let part = self.inner.put_part(data);
        let meter = self.meter.clone();
        async move {
            meter.wait().await;
            part.await
        }
        .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.meter.wait().await;
        self.meter.count("put", self.location.as_ref(), 0);
        self.inner.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}
