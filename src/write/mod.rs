//! Writing: every change a Lance table can take, as a commit to its tree.
//!
//! ```text
//!  TreeTable ─► view of the touched fragments ─► native Lance ─► commit handler
//!                                                                  │ difference
//!  manifest ◄── root ◄── nodes ◄── leaves ◄── flush ◄── mutations ◄┘
//!      └─► the table's own commit handler: the version, or a conflict that Lance resolves
//!
//!  table, rows, update, merge, evolve, backfill, clone, create   what can be asked for
//!  scope, view, diff, commit                      Lance's work, and what it changed
//!  grow, build, root, policy, sink                the tree: from changes, from records, its sizes, its objects
//!  publish, convert                               the manifest and the commit, from one layout to the other
//! ```
//!
//! Objects are written before the manifest that names them; what a lost race leaves behind is for
//! cleanup.

mod backfill;
mod build;
pub mod cleanup;
mod clone;
mod commit;
mod convert;
mod create;
mod diff;
mod evolve;
mod grow;
mod merge;
mod policy;
mod publish;
mod root;
mod rows;
mod scope;
mod sink;
mod stored;
mod table;
mod update;
mod view;

pub use cleanup::{CleanupOptions, CleanupProgress, CleanupReport, cleanup};
pub use commit::CommitReport;
pub use convert::{ConvertOptions, ConvertReport, convert};
pub use create::CreateOptions;
pub use merge::MergeOptions;
pub(crate) use policy::CONFIG_PREFIX;
pub use policy::TreePolicy;
pub(crate) use publish::DONE;
pub(crate) use rows::addresses_in;
pub(crate) use stored::stored;
pub use table::{RowsReport, TreeTable, WriteOptions};
