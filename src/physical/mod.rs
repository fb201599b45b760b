//! Execution plans: scanning fragments, counting them, and listing metadata.
//!
//! ```text
//!  FragmentScanExec    rows      walk ─► chunks of fragments ─► Lance scans ─► batches
//!  FragmentCountExec   no column walk ─► counts                            ─► batches of rows without columns
//!  MetadataExec        metadata  one row a fragment, tree object or version
//! ```

pub(crate) mod chunk;
pub(crate) mod count;
pub(crate) mod metadata;
pub(crate) mod metrics;
pub(crate) mod scan;
