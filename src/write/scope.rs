//! Which fragments a change has to see.

use futures::TryStreamExt;
use lance_table::format::pb;
use lance_table::transaction::Operation;

use crate::error::{Error, Result};
use crate::ranges::FragmentRanges;
use crate::snapshot::Snapshot;
use crate::tree_scan::{WalkOptions, WalkState};

/// The fragments that a transaction made elsewhere can touch.
///
/// # Errors
/// [`Error::InvalidInput`] for operations that no table takes.
pub(crate) fn of_operation(operation: &Operation) -> Result<FragmentRanges> {
    let ids = |ids: &mut dyn Iterator<Item = u64>| {
        FragmentRanges::from_ranges(ids.map(|id| id..id.saturating_add(1)))
    };
    Ok(match operation {
        Operation::Append { .. }
        | Operation::Overwrite { .. }
        | Operation::ReserveFragments { .. }
        | Operation::Restore { .. }
        | Operation::UpdateBases { .. }
        | Operation::UpdateConfig { .. }
        | Operation::UpdateMemWalState { .. } => FragmentRanges::empty(),
        Operation::Delete {
            updated_fragments,
            deleted_fragment_ids: removed,
            ..
        }
        | Operation::Update {
            updated_fragments,
            removed_fragment_ids: removed,
            ..
        } => ids(&mut updated_fragments
            .iter()
            .map(|f| f.id)
            .chain(removed.iter().copied())),
        Operation::Rewrite { groups, .. } => ids(&mut groups
            .iter()
            .flat_map(|g| g.old_fragments.iter().map(|f| f.id))),
        Operation::DataReplacement { replacements } => ids(&mut replacements.iter().map(|r| r.0)),
        Operation::DataOverlay { groups } => ids(&mut groups.iter().map(|g| g.fragment_id)),
        // A merge names every fragment that stays, an index what it covers of all there are, a
        // projection may end files anywhere.
        Operation::Merge { .. } | Operation::CreateIndex { .. } | Operation::Project { .. } => {
            FragmentRanges::all()
        }
        Operation::Clone { .. } => {
            return Err(Error::invalid(
                "a clone makes a new table and cannot be committed to one: use shallow_clone",
            ));
        }
        Operation::Unknown { .. } => {
            return Err(Error::invalid(
                "this transaction has an operation that the linked Lance does not know",
            ));
        }
    })
}

/// The fragments whose record `wanted` picks. Reads every record of the version, a window at a time.
pub(crate) async fn of_records(
    snapshot: &std::sync::Arc<Snapshot>,
    mut wanted: impl FnMut(&pb::DataFragment) -> bool,
) -> Result<FragmentRanges> {
    let mut ids = Vec::new();
    let mut fragments = snapshot.fragments(
        FragmentRanges::all(),
        &WalkOptions::default(),
        &WalkState::default(),
    );
    while let Some(batch) = fragments.try_next().await? {
        for fragment in batch {
            if wanted(&fragment.record()?) {
                ids.push(fragment.id());
            }
        }
    }
    Ok(FragmentRanges::from_ids(ids))
}
