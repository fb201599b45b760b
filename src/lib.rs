//! Query Lance tables of any size from DataFusion, at a cost set by what the query touches.
#![allow(dead_code)]
mod catalog;
mod engine;
mod error;
mod flat;
mod functions;
mod manifest;
mod optimizer;
mod physical;
mod provider;
mod pruning;
mod ranges;
mod resolve;
mod snapshot;
mod tree;
mod tree_scan;
pub mod verify;
pub mod write;
pub use catalog::{DirectorySchema, LanceTableFactory};
pub use engine::{Engine, EngineOptions, TableOptions};
pub use error::{Error, Result};
pub use optimizer::CountNonNull;
pub use provider::{SnapshotProvider, SystemColumns};
pub use pruning::{
    AddressColumns, AddressDomain, Pruned, RowAddressPlan, SystemColumn, prune,
};
pub use ranges::{FragmentRanges, RowAddrSet};
pub use resolve::{VersionAt, VersionRef, parse_timestamp};
pub use snapshot::{Layout, OpenCost, OpenOptions, Snapshot};
pub use tree::object::{Limits, ObjectCache, Owner, ReadStats, ReadStatsSnapshot};
pub use tree::summary::Counts;
pub use tree_scan::{FragmentStream, ResolvedFragment, TreeObject, WalkOptions, WalkState};
