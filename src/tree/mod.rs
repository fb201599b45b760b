//! The fragment metadata tree: the format and nothing else. No DataFusion in here.
//!
//! ```text
//!  object    who owns an object, where it lies, fetching it whole, the cache
//!  node      roots and interiors: child lists, ranges, summaries
//!  leaf      Lance files of records            leaf_write  the way back
//!            leaf_file  bytes to columns       leaf_columns  the short way there
//!            leaf_meta  what a record has besides files
//!  mutation  actions, sequences, replay
//!  record    one fragment's record and its rules
//!  summary   counts and their arithmetic
//!  wire      what only raw protobuf bytes show
//! ```
//!
//! Everything decoded is checked before it is used, against itself when it is decoded and against
//! the place it is found in at each use.

pub(crate) mod leaf;
mod leaf_columns;
mod leaf_file;
mod leaf_meta;
pub(crate) mod leaf_write;
pub(crate) mod mutation;
pub(crate) mod node;
pub(crate) mod object;
pub(crate) mod record;
pub(crate) mod summary;
pub(crate) mod wire;
