#![allow(dead_code)]
mod error;
mod flat;
mod manifest;
mod physical;
mod provider;
mod pruning;
mod ranges;
mod resolve;
mod snapshot;
mod tree;
mod tree_scan;
pub use error::{Error, Result};
