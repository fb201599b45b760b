//! Roots: into the manifest while they are small, to an object of their own when they are not.

use lance_table::format::pb;
use prost::Message;
use uuid::Uuid;

use super::policy::TreePolicy;
use super::sink::{ObjectKind, ObjectSink};
use crate::error::{Error, Result};
use crate::tree::node::Root;

/// A root that a manifest can name.
#[derive(Debug)]
pub(super) struct PublishedRoot {
    pub root: pb::fragment_tree::Root,
    /// Bytes of the root.
    pub bytes: u64,
    /// Path of the object it was written to; none when it is inline.
    pub path: Option<String>,
}

/// Encodes a root, and writes it when it is too large for the manifest.
pub(super) async fn publish_root(
    sink: &ObjectSink,
    root: &Root,
    policy: &TreePolicy,
) -> Result<PublishedRoot> {
    let message = root.encode();
    let bytes = message.encoded_len() as u64;
    if bytes <= policy.inline_root_bytes {
        return Ok(PublishedRoot {
            root: pb::fragment_tree::Root::InlineRoot(message),
            bytes,
            path: None,
        });
    }
    let path = sink
        .put(ObjectKind::Root, message.encode_to_vec().into())
        .await?;
    Ok(PublishedRoot {
        root: external(&path)?,
        bytes,
        path: Some(path),
    })
}

/// The reference to an external root (spec, "Snapshot").
pub(super) fn external(path: &str) -> Result<pb::fragment_tree::Root> {
    let uuid = path
        .strip_prefix("_bt/root/")
        .and_then(|p| p.strip_suffix(".root"))
        .and_then(|u| Uuid::parse_str(u).ok())
        .ok_or_else(|| Error::internal(format!("{path} names no root")))?;
    Ok(pb::fragment_tree::Root::RootUuid(uuid.as_bytes().to_vec()))
}
