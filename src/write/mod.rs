//! Writing: building a tree from records and publishing a version.
//!
//! ```text
//!  records ─► leaves ─► nodes ─► root ─► manifest ─► commit handler
//!             objects first, one after another         then the version, or a conflict
//!
//!  policy   the sizes that shape a tree          build    a whole tree from records
//!  sink     where new objects go                 grow     a tree from a tree and changes
//!  root     inline or an object                  publish  the manifest and the commit
//! ```

mod build;
mod convert;
#[allow(dead_code, reason = "the commit path that grows trees is not in yet")]
mod grow;
mod policy;
mod publish;
mod root;
mod sink;

pub use convert::{ConvertOptions, ConvertReport, convert};
pub use policy::TreePolicy;
