//! Writing: every change a Lance table can take, as a commit to its tree.
//!
//! ```text
//!  TreeTable ─► view of the touched fragments ─► native Lance ─► commit handler
//!                                                                  │ difference
//!  manifest ◄── root ◄── nodes ◄── leaves ◄── flush ◄── mutations ◄┘
//!      └─► the table's own commit handler: the version, or a conflict that Lance resolves
//!  records ─► leaves ─► nodes ─► root ─► manifest ─► commit handler
//!             objects first, one after another         then the version, or a conflict
//!
//!  policy   the sizes that shape a tree          build    a whole tree from records
//!  sink     where new objects go                 grow     a tree from a tree and changes
//!  root     inline or an object                  publish  the manifest and the commit
//! ```
//!
//! Objects are written before the manifest that names them; what a lost race leaves behind is for
//! cleanup.

mod backfill;
mod build;
mod clone;
mod commit;
mod convert;
mod create;
mod diff;
mod evolve;
#[allow(dead_code, reason = "the commit path that grows trees is not in yet")]
mod grow;
mod policy;
mod publish;
mod root;
mod rows;
mod scope;
mod sink;
mod table;
mod view;

pub use commit::CommitReport;
pub use convert::{ConvertOptions, ConvertReport, convert};
pub use create::CreateOptions;
pub use policy::TreePolicy;
pub use table::{RowsReport, TreeTable, WriteOptions};
