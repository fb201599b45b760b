//! What one operation keeps while it walks, whatever the number of its partitions.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use roaring::RoaringTreemap;

use crate::error::{Error, Result};
use crate::tree::mutation::Mutation;
use crate::tree::object::{LeafReading, ReadStats};

/// Mutation sequences seen by one operation. Each object is entered once, however many partitions
/// of the operation open it (spec, "Sequence numbers").
#[derive(Debug, Default)]
pub(crate) struct SequenceLedger {
    inner: Mutex<Ledger>,
}

#[derive(Debug, Default)]
struct Ledger {
    objects: HashSet<String>,
    sequences: RoaringTreemap,
}

impl SequenceLedger {
    /// Enters the mutations of `object`.
    ///
    /// # Errors
    /// `sequence_duplicate` when one was seen in another object.
    pub(crate) fn enter(&self, object: &str, mutations: &[Arc<Mutation>]) -> Result<()> {
        if mutations.is_empty() {
            return Ok(());
        }
        let mut ledger = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if !ledger.objects.insert(object.to_string()) {
            return Ok(());
        }
        for mutation in mutations {
            if !ledger.sequences.insert(mutation.sequence) {
                return Err(Error::corrupt(
                    format!("{object}, mutation {}", mutation.sequence),
                    "sequence_duplicate",
                    "sequences that are unique in the tree",
                    "another object's mutation with this sequence",
                ));
            }
        }
        Ok(())
    }
}

/// What the parts of one operation share: counters, the sequences seen, and its share of the cache.
/// One for each operation: what is used again keeps no more leaves.
#[derive(Debug, Clone, Default)]
pub struct WalkState {
    pub(crate) stats: Arc<ReadStats>,
    pub(crate) ledger: Arc<SequenceLedger>,
    pub(crate) reading: Arc<LeafReading>,
}

impl WalkState {
    /// Counts into `stats`.
    pub fn with_stats(stats: Arc<ReadStats>) -> Self {
        Self {
            stats,
            ..Self::default()
        }
    }

    /// For an operation that looks for what is broken: leaves are decoded to the last column.
    pub(crate) fn of_every_column() -> Self {
        let reading = LeafReading {
            whole: true,
            ..Default::default()
        };
        Self {
            reading: Arc::new(reading),
            ..Self::default()
        }
    }

    /// What the operation read so far.
    pub fn stats(&self) -> &Arc<ReadStats> {
        &self.stats
    }
}
