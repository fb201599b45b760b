//! What a growth took, and what it wrote.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::tree::node::Child;
use crate::tree::summary::Counts;

/// What making a tree took.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GrowthReport {
    /// Counts of the new version.
    pub counts: Counts,
    /// Mutations that were added.
    pub mutations: u64,
    /// Their bytes as stored.
    pub mutation_bytes: u64,
    /// New leaves that the tree names.
    pub leaves: u64,
    /// Bytes of those.
    pub leaf_bytes: u64,
    /// New interior nodes that the tree names.
    pub nodes: u64,
    /// Bytes of those.
    pub node_bytes: u64,
    /// New external roots: one or none.
    pub roots: u64,
    /// Bytes of the root, wherever it is; none when an external root was used again.
    pub root_bytes: u64,
    /// Bytes of the tree in the manifest: an inline root, or the changes beside an external one.
    pub manifest_bytes: u64,
    /// Whether the root is in the manifest.
    pub root_inline: bool,
    /// Requests for tree objects.
    pub requests: u64,
    /// Bytes they gave.
    pub request_bytes: u64,
    /// Levels below the root, leaves included.
    pub height: u32,
    /// Mutations in the root and beside it. How many the nodes hold only they know.
    pub buffered: u64,
}

#[derive(Debug)]
struct Entry {
    height: u32,
    bytes: u64,
    /// The object itself, on a dry run.
    object: Option<Bytes>,
}

/// Objects written for one growth, by path.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    written: BTreeMap<String, Entry>,
}

impl Ledger {
    /// Enters a written object.
    pub(super) fn enter(&mut self, child: &Child, object: Option<Bytes>) {
        let entry = Entry {
            height: child.height,
            bytes: child.object_size,
            object,
        };
        self.written.insert(child.path.clone(), entry);
    }

    /// Whether this growth wrote the object.
    pub(super) fn wrote(&self, path: &str) -> bool {
        self.written.contains_key(path)
    }

    /// Strikes out an object whose content goes into another; its bytes where they were kept.
    pub(super) fn take_back(&mut self, path: &str) -> Option<Bytes> {
        self.written.remove(path).and_then(|entry| entry.object)
    }

    /// Adds the objects to a report.
    pub(super) fn add_to(&self, report: &mut GrowthReport) {
        for entry in self.written.values() {
            let (objects, bytes) = if entry.height == 0 {
                (&mut report.leaves, &mut report.leaf_bytes)
            } else {
                (&mut report.nodes, &mut report.node_bytes)
            };
            *objects += 1;
            *bytes += entry.bytes;
        }
    }

    /// Paths of the objects.
    pub(super) fn into_paths(self) -> Vec<String> {
        self.written.into_keys().collect()
    }
}
