//! Query Lance tables of any size from DataFusion, at a cost set by what the query touches and not
//! by what the table holds.
//!
//! A Lance version lists every fragment of its table in one manifest. With a million fragments, or
//! thirty data files a fragment, every open decodes and every commit rewrites hundreds of megabytes.
//! The *fragment metadata tree* keeps those records in immutable leaves under a small root; fragtree
//! reads and writes such versions, and flat ones through the same types.
//!
//! ```text
//!            SQL, a service, a tool
//!                     │
//!   Engine ── tables, functions, caches ─── catalog, functions
//!                     │
//!   LiveTable ── the latest version at each planning, one for a query    (live)
//!                     │
//!   SnapshotProvider ─┴─ filters ─► row addresses ─► fragment ranges     (provider, pruning)
//!                     │
//!   FragmentScanExec, FragmentCountExec                                  (physical)
//!                     │
//!   walk ── only the paths that overlap; counts from summaries           (tree_scan)
//!                     │
//!   root ─► nodes ─► leaves, each checked when it is decoded             (tree)
//!                     │
//!   Snapshot ── one version: a shell dataset and a fragment catalog      (snapshot, manifest)
//! ```
//!
//! Writing goes the other way: [`write::TreeTable`] shows native Lance a view of the fragments that a
//! change touches, turns what Lance commits there into mutations, and publishes them as the next
//! version of the tree. See [`mod@write`].
//!
//! # From SQL
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use datafusion::prelude::SessionContext;
//!
//! let ctx = SessionContext::new();
//! fragtree::Engine::new().register(&ctx);
//! ctx.sql("CREATE EXTERNAL TABLE t STORED AS LANCE LOCATION '/data/t.lance'").await?;
//! ctx.sql("SELECT COUNT(*) FROM t").await?.show().await?;
//! ctx.sql("SELECT * FROM fragtree_tree('t')").await?.show().await?;
//! # Ok(())
//! # }
//! ```
//!
//! Tables follow new versions: each query sees the one that was the latest when it was planned.
//! `OPTIONS (version '7')`, a tag or a timestamp pins a table, and so does `OPTIONS (refresh 'off')`.
//!
//! # Without a query engine
//!
//! ```no_run
//! # async fn example() -> fragtree::Result<()> {
//! use fragtree::{Engine, FragmentRanges, VersionRef, WalkState};
//!
//! let engine = Engine::new();
//! let snapshot = engine
//!     .open("/data/t.lance", VersionRef::latest(), Default::default())
//!     .await?;
//! println!("{:?}", snapshot.counts()?);
//! let some = FragmentRanges::from_ranges([100..200]);
//! println!("{:?}", snapshot.count(&some, &WalkState::default()).await?);
//! # Ok(())
//! # }
//! ```
//!
//! # Writing
//!
//! ```no_run
//! # async fn example() -> fragtree::Result<()> {
//! use fragtree::write::{TreeTable, WriteOptions};
//!
//! let table = TreeTable::open("/data/t.lance", Default::default(), WriteOptions::default()).await?;
//! let report = table.delete("amount < 0").await?;
//! println!("{} rows in {} bytes of metadata", report.rows, report.commit.manifest_bytes);
//! # Ok(())
//! # }
//! ```
//!
//! # Cargo features
//!
//! `cli` (default): the `fragtree` program. `s3`, `gcs`, `azure`: the cloud stores.

mod catalog;
mod deletions;
mod dml;
mod engine;
mod error;
mod flat;
mod functions;
mod live;
mod manifest;
mod optimizer;
mod panics;
mod physical;
mod provider;
mod pruning;
mod ranges;
mod resolve;
mod retry;
mod snapshot;
mod tree;
mod tree_scan;
pub mod verify;
pub mod write;

// Asked for in Cargo.toml for their features alone.
use {getrandom_0_2 as _, md5 as _};

pub use catalog::{DirectorySchema, LanceTableFactory, storage_option};
pub use engine::{Engine, EngineOptions, TableOptions};
pub use error::{Error, Result, plain_message};
pub use live::{LiveTable, Refresh};
pub use optimizer::CountNonNull;
pub use panics::panic_is_caught;
pub use provider::{SnapshotProvider, SystemColumns};
pub use pruning::{AddressColumns, AddressDomain, Pruned, RowAddressPlan, SystemColumn, prune};
pub use ranges::{FragmentRanges, RowAddrSet};
pub use resolve::{VersionAt, VersionRef, parse_timestamp};
pub use snapshot::{Layout, OpenCost, OpenOptions, Snapshot};
pub use tree::object::{Limits, ObjectCache, Owner, ReadStats, ReadStatsSnapshot};
pub use tree::summary::Counts;
pub use tree_scan::{FragmentStream, ResolvedFragment, TreeObject, WalkOptions, WalkState};
