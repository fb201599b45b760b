//! The words of the write benchmark: what is committed, by whom, under which policy, and what one
//! measurement gives.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use fragtree::write::TreePolicy;
use lance_table::format::Fragment;
use serde::{Deserialize, Serialize};

use crate::plan::{Policy, Result, Sample, Store};

/// What is committed. All of it is made by hand: no data is written, and none is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WriteWork {
    /// One new fragment.
    Append,
    /// One new fragment a commit, many times.
    Appends,
    /// New deletion files for ten fragments all over the table.
    #[serde(rename = "delete_10")]
    Delete10,
    /// New deletion files for a hundred fragments all over the table.
    #[serde(rename = "delete_100")]
    Delete100,
    /// A new deletion file for every fragment.
    DeleteAll,
    /// Data files for a column that was all null, neighbouring fragments a commit.
    BackfillContiguous,
    /// The same, for fragments all over the table.
    BackfillScattered,
    /// Adds the column to fill. Not measured.
    AddColumn,
}

impl WriteWork {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Append => "append of one fragment",
            Self::Appends => "one-fragment appends in a row",
            Self::Delete10 => "deletion files for 10 scattered fragments",
            Self::Delete100 => "deletion files for 100 scattered fragments",
            Self::DeleteAll => "a deletion file for every fragment",
            Self::BackfillContiguous => "backfill of a column, neighbouring fragments",
            Self::BackfillScattered => "backfill of a column, scattered fragments",
            Self::AddColumn => "an all-null column",
        }
    }

    /// Whether it begins with a table whose last column is all null.
    pub(crate) fn fills_column(self) -> bool {
        matches!(self, Self::BackfillContiguous | Self::BackfillScattered)
    }
}

/// Name of the column that is filled.
pub(crate) const FILLED: &str = "filled";

/// A tree policy by name, with some of its sizes set otherwise: `default,buffer_bytes=65536`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WritePolicy {
    label: String,
}

impl WritePolicy {
    pub(crate) fn parse(label: &str) -> Result<Self> {
        let policy = Self {
            label: label.to_string(),
        };
        policy.tree()?;
        Ok(policy)
    }

    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    pub(crate) fn tree(&self) -> Result<TreePolicy> {
        let mut parts = self.label.split(',');
        let named = match parts.next().unwrap_or_default() {
            "default" => TreePolicy::default(),
            "one-sidecar" => TreePolicy::one_sidecar(),
            "two-levels" => TreePolicy::two_levels(),
            other => {
                return Err(format!(
                    "no policy {other:?}: there are default, one-sidecar and two-levels"
                )
                .into());
            }
        };
        let mut config: HashMap<String, String> = named.to_config().into_iter().collect();
        for part in parts {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| format!("{part:?} is not SIZE=BYTES"))?;
            config.insert(format!("fragtree.{name}"), value.to_string());
        }
        Ok(TreePolicy::from_config(&config)?)
    }

    /// The sizes that matter to a conversion.
    pub(crate) fn shape(&self) -> Result<Policy> {
        let policy = self.tree()?;
        Ok(Policy {
            leaf_bytes: policy.leaf_bytes,
            node_bytes: policy.node_bytes,
            inline_root_bytes: policy.inline_root_bytes,
        })
    }
}

/// One measurement to make, in a process of its own, on a table that is its own.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WriteTask {
    pub table: PathBuf,
    /// None: Lance, on the flat table.
    pub policy: Option<WritePolicy>,
    pub work: WriteWork,
    pub store: Store,
    /// Fragments of the table.
    pub fragments: u32,
    /// Commits, one after another.
    pub commits: u32,
    /// Fragments each commit touches.
    pub each: u32,
    /// What new records look like.
    pub template: Fragment,
}

/// What one commit took.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Step {
    pub wall_ms: f64,
    pub requests: u64,
    /// Bytes of everything written: manifest, transaction, tree objects.
    pub written: u64,
    /// Bytes of everything read.
    pub read: u64,
    /// Bytes of mutations, encoded; none on the flat side.
    pub mutation_bytes: u64,
    pub objects_written: u64,
    pub object_bytes_written: u64,
    pub objects_read: u64,
    pub object_bytes_read: u64,
}

/// What one measurement gave.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct WriteSample {
    /// All of it: opening the table and every commit.
    pub whole: Sample,
    pub steps: Vec<Step>,
    /// What reading the table takes afterwards.
    pub after: BTreeMap<String, Sample>,
}

impl WriteSample {
    /// The sum of a number over all commits.
    pub(crate) fn sum(&self, number: impl Fn(&Step) -> u64) -> u64 {
        self.steps.iter().map(number).sum()
    }
}

/// Measurements of one side of one workload.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WriteCell {
    pub table: String,
    pub work: WriteWork,
    pub store: Store,
    /// The tree's policy, or [`FLAT`].
    pub side: String,
    /// Commits of the workload: more than those measured, where each costs the same.
    pub commits: u32,
    /// Fragments each commit touches.
    pub each: u32,
    /// The revision measured.
    pub revision: String,
    pub date: String,
    pub samples: Vec<WriteSample>,
}

/// The side of Lance on a flat table.
pub(crate) const FLAT: &str = "flat";

impl WriteCell {
    pub(crate) fn same_place(&self, other: &Self) -> bool {
        self.table == other.table
            && self.work == other.work
            && self.store == other.store
            && self.side == other.side
    }
}
