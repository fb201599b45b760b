//! The words of the benchmark: tables, sides, workloads, stores, and what one measurement gives.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

use fragtree::write::TreePolicy;
use serde::{Deserialize, Serialize};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Who answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Side {
    /// Lance's `Dataset` and `LanceTableProvider` on the flat table.
    Lance,
    /// The same, free to give rows in any order.
    LanceUnordered,
    /// fragtree on the flat table.
    Flat,
    /// fragtree on the tree table.
    Tree,
}

impl Side {
    pub(crate) const MAIN: [Self; 3] = [Self::Lance, Self::Flat, Self::Tree];
    pub(crate) const ALL: [Self; 4] = [Self::Lance, Self::LanceUnordered, Self::Flat, Self::Tree];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Lance => "Lance, flat",
            Self::LanceUnordered => "Lance, flat, unordered",
            Self::Flat => "fragtree, flat",
            Self::Tree => "fragtree, tree",
        }
    }
}

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    /// Nothing: what a process with a session costs before it touches a table.
    Nothing,
    /// Open the table.
    Open,
    /// Open and `SELECT COUNT(*)`.
    Count,
    /// Open and one row by address.
    Point,
    /// Open and the rows of ten neighbouring fragments.
    Range,
    /// Open and one fragment's record.
    Record,
    /// Open and every fragment's id and row counts.
    Handles,
    /// Open and every fragment's complete record.
    Records,
    /// Every record, hashed: run once, so that answers are known to agree. Not timed.
    Verify,
    /// Convert the flat table.
    Convert,
    /// Open and aggregate every column of every row.
    Scan,
    /// Aggregate every column of every row, sides taking turns in one process.
    WarmScan,
    /// Open and `LIMIT 10`.
    Limit,
    /// 64 row look-ups on an open table, one after another.
    PointsInTurn,
    /// 64 row look-ups on an open table, at once.
    PointsAtOnce,
    /// 64 counts of ranges that cut fragments' leaves, one after another.
    CountsInTurn,
    /// 64 counts of ranges that cut fragments' leaves, at once.
    CountsAtOnce,
}

impl Work {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Open => "open",
            Self::Count => "open and `COUNT(*)`",
            Self::Point => "open and one row by address",
            Self::Range => "open and a range of 10 fragments",
            Self::Record => "open and one fragment record",
            Self::Handles => "every fragment, id and row counts",
            Self::Records => "every fragment record",
            Self::Verify => "every record, compared",
            Self::Convert => "convert",
            Self::Scan => "open and full scan",
            Self::WarmScan => "full scan, warm",
            Self::Limit => "open and `LIMIT 10`",
            Self::PointsInTurn => "64 row look-ups, one after another",
            Self::PointsAtOnce => "64 row look-ups, at once",
            Self::CountsInTurn => "64 range counts, one after another",
            Self::CountsAtOnce => "64 range counts, at once",
        }
    }
}

/// How storage is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Store {
    /// Plain local paths, as anybody uses them: for times and memory.
    Local,
    /// Every byte through a counting object store that finds the latest version by listing, as S3,
    /// GCS and Azure do: for requests and bytes.
    Counted,
    /// The same, but the latest version is found by Lance's version hint, as on S3 Express.
    Hinted,
    /// As `Counted`, with 30 ms added to each request.
    Slow,
}

/// Added to each request of [`Store::Slow`], in milliseconds.
pub(crate) const SLOW_MS: u64 = 30;

/// Sizes of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Policy {
    pub leaf_bytes: u64,
    pub node_bytes: u64,
    pub inline_root_bytes: u64,
}

impl Default for Policy {
    fn default() -> Self {
        let policy = TreePolicy::default();
        Self {
            leaf_bytes: policy.leaf_bytes,
            node_bytes: policy.node_bytes,
            inline_root_bytes: policy.inline_root_bytes,
        }
    }
}

impl Policy {
    pub(crate) fn tree(self) -> TreePolicy {
        TreePolicy {
            leaf_bytes: self.leaf_bytes,
            node_bytes: self.node_bytes,
            inline_root_bytes: self.inline_root_bytes,
            ..Default::default()
        }
    }

    pub(crate) fn label(self) -> String {
        format!(
            "tree-{}-{}-{}",
            self.leaf_bytes, self.node_bytes, self.inline_root_bytes
        )
    }
}

/// What queries need to know about a table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Facts {
    /// Changes when tables are made differently, so that old ones are made anew.
    pub format: u32,
    pub name: String,
    pub fragments: u32,
    pub files: usize,
    pub columns: Vec<String>,
    /// The columns a range query reads.
    pub range_columns: Vec<String>,
    /// Address of the row that look-ups ask for.
    pub point: u64,
    /// First and last fragment of the range.
    pub range: (u32, u32),
    /// Addresses of the rows in the range that are not deleted.
    pub range_rows: Vec<u64>,
    /// Addresses of 64 rows in fragments far apart; empty where most fragments have no data.
    pub points: Vec<u64>,
    /// An aggregate over every column, when every fragment has data.
    pub scan: Option<String>,
    /// Whether every fragment is real: then Lance itself wrote the table.
    pub real: bool,
}

/// One measurement to make, in a process of its own.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Task {
    pub flat: PathBuf,
    pub tree: PathBuf,
    pub side: Side,
    pub work: Work,
    pub store: Store,
    pub policy: Policy,
    pub facts: Facts,
}

/// Requests of one kind and the bytes they gave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cost {
    pub requests: u64,
    pub bytes: u64,
}

/// What one measurement gave.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub wall_ms: f64,
    /// Processor time of all threads, checking the answer included: says what a busy machine did to
    /// the wall time.
    pub cpu_ms: f64,
    /// Parts of the wall time.
    pub phases: BTreeMap<String, f64>,
    /// Requests by verb and kind of object; empty for plain local paths.
    pub costs: BTreeMap<String, Cost>,
    /// Greatest resident memory of the process, in KiB.
    pub peak_kb: u64,
    /// Resident memory at the end that is not mapped from files as the program is, in KiB.
    #[serde(default)]
    pub own_kb: u64,
    /// Equal on all sides.
    pub answer: String,
}

impl Sample {
    pub(crate) fn total(&self) -> Cost {
        self.sum(|_| true)
    }

    pub(crate) fn sum(&self, wanted: impl Fn(&str) -> bool) -> Cost {
        let mut total = Cost::default();
        for (_, cost) in self.costs.iter().filter(|(kind, _)| wanted(kind)) {
            total.requests += cost.requests;
            total.bytes += cost.bytes;
        }
        total
    }
}
