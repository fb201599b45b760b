//! Writing: building a tree from records and publishing a version.
//!
//! ```text
//!  records ─► leaves ─► nodes ─► root ─► manifest ─► commit handler
//!             objects first, one after another         then the version, or a conflict
//! ```

mod build;
mod convert;
mod publish;

pub use build::TreePolicy;
pub use convert::{ConvertOptions, ConvertReport, convert};
