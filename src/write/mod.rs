//! Writing: building a tree from records and publishing a version.
//!
//! ```text
//!  records ─► leaves ─► nodes ─► root ─► manifest ─► commit handler
//!             objects first, one after another         then the version, or a conflict
//! ```

mod build;
mod convert;
mod grow;
mod policy;
mod publish;
mod root;
mod sink;

pub use convert::{ConvertOptions, ConvertReport, convert};
pub use policy::TreePolicy;
