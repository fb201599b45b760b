//! Buffered changes: decoding them, checking them, and replaying them on a record.
//!
//! A mutation is an action on one fragment with a sequence number and the deltas it causes. The
//! rules here are those of the spec's "Mutations" and "Sequence numbers" and of the action table in
//! `DESIGN.md`.

use std::sync::Arc;

use lance_table::format::pb;
use pb::fragment_action::Action as PbAction;
use prost::Message;

use super::object::{BaseTable, Owner};
use super::record::{
    check_data_file, check_deletion_file, check_new_file, check_new_record, check_record,
    counts_of, resolve_owner,
};
use super::summary::{Counts, Delta};
use super::wire::framed;
use crate::error::{Error, Result};

/// What a mutation does to its fragment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Install the complete record, replacing any.
    Upsert(Box<pb::DataFragment>),
    /// Remove the record; an absent one is a no-op.
    Remove,
    /// Append a file to the list.
    AddDataFile(pb::DataFile),
    /// Remove every file with this path.
    RemoveDataFile(String),
    /// Set the deletion file, replacing any.
    AddDeletionFile(pb::DeletionFile),
    /// Clear the deletion file.
    ClearDeletionFile,
    /// On the first file with `expected_path`, replace path, size and base.
    ReplaceDataFile {
        expected_path: String,
        path: String,
        file_size_bytes: u64,
        base_id: Option<u32>,
    },
}

impl Action {
    /// The action's name in the format.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Upsert(_) => "upsert_fragment",
            Self::Remove => "remove_fragment",
            Self::AddDataFile(_) => "add_data_file",
            Self::RemoveDataFile(_) => "remove_data_file",
            Self::AddDeletionFile(_) => "add_deletion_file",
            Self::ClearDeletionFile => "clear_deletion_file",
            Self::ReplaceDataFile { .. } => "replace_data_file",
        }
    }

    /// The values `fragment_count_delta` can have for this action, whatever the prior record is.
    fn possible_count_deltas(&self) -> &'static [i64] {
        match self {
            Self::Upsert(_) => &[0, 1],
            Self::Remove => &[0, -1],
            Self::AddDataFile(_)
            | Self::RemoveDataFile(_)
            | Self::AddDeletionFile(_)
            | Self::ClearDeletionFile
            | Self::ReplaceDataFile { .. } => &[0],
        }
    }
}

/// One decoded mutation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mutation {
    /// Its place in the tree's one order; never zero.
    pub sequence: u64,
    /// The fragment it changes.
    pub target: u32,
    /// What it does.
    pub action: Action,
    /// What it changes in the counts.
    pub delta: Delta,
}

impl Mutation {
    /// Decodes one mutation and checks what is visible in it alone.
    ///
    /// # Errors
    /// `mutation_without_action`, `action_payload_missing`, `id_over_u32`, `sequence_zero`,
    /// `delta_mismatch` for a count delta its action can never have (`spec/notes.md` 7).
    pub(crate) fn decode(object: &str, message: pb::FragmentTreeMutation) -> Result<Self> {
        let sequence = message.action_sequence;
        if sequence == 0 {
            return Err(Error::corrupt(
                object,
                "sequence_zero",
                "a mutation sequence of at least 1",
                0,
            ));
        }
        let label = || format!("{object}, mutation {sequence}");
        let action = message.action.and_then(|a| a.action).ok_or_else(|| {
            Error::corrupt(
                label(),
                "mutation_without_action",
                "exactly one recognized action",
                "none (or one this version does not know)",
            )
        })?;
        let (target, action) = decode_action(&label, action)?;
        let target = u32::try_from(target).map_err(|_| {
            Error::corrupt(
                label(),
                "id_over_u32",
                "a fragment id of at most 2^32 - 1",
                target,
            )
        })?;
        let delta = Delta {
            fragments: message.fragment_count_delta,
            total_rows: message.total_rows_delta,
            visible_rows: message.visible_rows_delta,
        };
        let possible = action.possible_count_deltas();
        if !possible.contains(&delta.fragments) {
            return Err(Error::corrupt(
                label(),
                "delta_mismatch",
                format!(
                    "a fragment_count_delta in {possible:?} for {}",
                    action.name()
                ),
                delta.fragments,
            ));
        }
        Ok(Self {
            sequence,
            target,
            action,
            delta,
        })
    }

    /// Checks the payload against the manifest: mapping rules, deletion counts, known bases.
    pub(crate) fn check_payload(&self, object: &str, bases: &BaseTable) -> Result<()> {
        let label = format!("{object}, mutation {}", self.sequence);
        match &self.action {
            Action::Upsert(record) => check_record(&label, record, bases),
            Action::AddDataFile(file) => check_data_file(&label, file, bases),
            Action::AddDeletionFile(file) => {
                check_deletion_file(&label, file, None)?;
                bases.require(&label, file.base_id)
            }
            Action::ReplaceDataFile { base_id, .. } => bases.require(&label, *base_id),
            Action::Remove | Action::RemoveDataFile(_) | Action::ClearDeletionFile => Ok(()),
        }
    }

    /// Checks a mutation that is about to be stored, as far as it shows by itself. Whether its bases
    /// are known is for those who have the new manifest.
    ///
    /// # Errors
    /// [`Error::InvalidInput`]: no tree can hold it.
    pub(crate) fn check_new(&self) -> Result<()> {
        let label = format!("{} of fragment {}", self.action.name(), self.target);
        let broken = |why: String| Err(Error::invalid(format!("cannot store {label}: {why}")));
        let possible = self.action.possible_count_deltas();
        if !possible.contains(&self.delta.fragments) {
            return broken(format!(
                "its count delta is {} and must be in {possible:?}",
                self.delta.fragments
            ));
        }
        let checked = match &self.action {
            Action::Upsert(record) if record.id != u64::from(self.target) => {
                return broken(format!("its record is of fragment {}", record.id));
            }
            Action::Upsert(record) => check_new_record(&label, record),
            Action::AddDataFile(file) => check_new_file(&label, file),
            Action::AddDeletionFile(file) => check_deletion_file(&label, file, None),
            Action::Remove
            | Action::RemoveDataFile(_)
            | Action::ClearDeletionFile
            | Action::ReplaceDataFile { .. } => Ok(()),
        };
        checked.or_else(|e| broken(e.to_string()))
    }

    /// The mutation as the opened dataset's own objects hold it: files that inherited another
    /// dataset from the object they were found in name it now.
    pub(crate) fn adopt(mutation: Arc<Self>, owner: Owner) -> Arc<Self> {
        let Some(base_id) = owner.base_id() else {
            return mutation;
        };
        let mut own = mutation.as_ref().clone();
        match &mut own.action {
            Action::Upsert(record) => resolve_owner(record, owner),
            Action::AddDataFile(file) => {
                file.base_id.get_or_insert(base_id);
            }
            Action::AddDeletionFile(file) => {
                file.base_id.get_or_insert(base_id);
            }
            Action::ReplaceDataFile { base_id: own, .. } => {
                own.get_or_insert(base_id);
            }
            Action::Remove | Action::RemoveDataFile(_) | Action::ClearDeletionFile => {}
        }
        Arc::new(own)
    }

    /// The order in which mutations are kept: by fragment, then by sequence.
    pub(crate) fn key(&self) -> (u32, u64) {
        (self.target, self.sequence)
    }

    /// Bytes the mutation takes in the buffer that holds it.
    pub(crate) fn stored_bytes(&self) -> u64 {
        framed(self.encode().encoded_len())
    }

    /// The message this mutation is stored as.
    pub(crate) fn encode(&self) -> pb::FragmentTreeMutation {
        let frag_id = u64::from(self.target);
        let action = match &self.action {
            Action::Upsert(record) => PbAction::UpsertFragment(record.as_ref().clone()),
            Action::Remove => PbAction::RemoveFragment(frag_id),
            Action::AddDataFile(file) => PbAction::AddDataFile(pb::AddDataFile {
                frag_id,
                file: Some(file.clone()),
            }),
            Action::RemoveDataFile(path) => PbAction::RemoveDataFile(pb::RemoveDataFile {
                frag_id,
                path: path.clone(),
            }),
            Action::AddDeletionFile(file) => PbAction::AddDeletionFile(pb::AddDeletionFile {
                frag_id,
                deletion_file: Some(*file),
            }),
            Action::ClearDeletionFile => {
                PbAction::ClearDeletionFile(pb::ClearDeletionFile { frag_id })
            }
            Action::ReplaceDataFile {
                expected_path,
                path,
                file_size_bytes,
                base_id,
            } => PbAction::ReplaceDataFile(pb::ReplaceDataFile {
                frag_id,
                expected_path: expected_path.clone(),
                path: path.clone(),
                file_size_bytes: *file_size_bytes,
                base_id: *base_id,
            }),
        };
        pb::FragmentTreeMutation {
            action_sequence: self.sequence,
            action: Some(pb::FragmentAction {
                action: Some(action),
            }),
            fragment_count_delta: self.delta.fragments,
            total_rows_delta: self.delta.total_rows,
            visible_rows_delta: self.delta.visible_rows,
        }
    }
}

fn decode_action(label: &dyn Fn() -> String, action: PbAction) -> Result<(u64, Action)> {
    let missing = |what: &str| {
        Error::corrupt(
            label(),
            "action_payload_missing",
            format!("the {what} that the action requires"),
            "none",
        )
    };
    Ok(match action {
        PbAction::UpsertFragment(record) => (record.id, Action::Upsert(Box::new(record))),
        PbAction::RemoveFragment(id) => (id, Action::Remove),
        PbAction::AddDataFile(a) => (
            a.frag_id,
            Action::AddDataFile(a.file.ok_or_else(|| missing("data file"))?),
        ),
        PbAction::RemoveDataFile(a) => (a.frag_id, Action::RemoveDataFile(a.path)),
        PbAction::AddDeletionFile(a) => (
            a.frag_id,
            Action::AddDeletionFile(a.deletion_file.ok_or_else(|| missing("deletion file"))?),
        ),
        PbAction::ClearDeletionFile(a) => (a.frag_id, Action::ClearDeletionFile),
        PbAction::ReplaceDataFile(a) => (
            a.frag_id,
            Action::ReplaceDataFile {
                expected_path: a.expected_path,
                path: a.path,
                file_size_bytes: a.file_size_bytes,
                base_id: a.base_id,
            },
        ),
    })
}

/// A mutation collected on the way down, with the dataset that owns the object it was found in.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    pub mutation: Arc<Mutation>,
    pub owner: Owner,
}

impl Pending {
    pub(crate) fn new(mutation: &Arc<Mutation>, owner: Owner) -> Self {
        Self {
            mutation: Arc::clone(mutation),
            owner,
        }
    }

    /// The order in which pending mutations are kept: by fragment, then by sequence.
    pub(crate) fn key(&self) -> (u32, u64) {
        self.mutation.key()
    }
}

/// Applies `pending` (all of one fragment, in sequence order) to `record` and returns what is left.
///
/// `record` must already have its owner resolved. Every delta is recomputed: the prior record is at
/// hand, or is known to be absent.
///
/// # Errors
/// `modify_absent_fragment`, `replace_without_match`, `deletion_exceeds_rows`, `delta_mismatch`.
pub(crate) fn replay(
    object: &str,
    mut record: Option<pb::DataFragment>,
    pending: &[Pending],
) -> Result<Option<pb::DataFragment>> {
    for item in pending {
        let mutation = &item.mutation;
        let before = record.as_ref().map(counts_of);
        record = apply(object, record, mutation, item.owner)?;
        let after = record.as_ref().map(counts_of);
        check_delta(object, mutation, before, after)?;
    }
    Ok(record)
}

fn check_delta(
    object: &str,
    mutation: &Mutation,
    before: Option<Counts>,
    after: Option<Counts>,
) -> Result<()> {
    let expected = Delta::between(before, after);
    if expected == Some(mutation.delta) {
        return Ok(());
    }
    Err(Error::corrupt(
        format!(
            "{object}, mutation {} ({} of fragment {})",
            mutation.sequence,
            mutation.action.name(),
            mutation.target
        ),
        "delta_mismatch",
        format!("{expected:?}"),
        format!("{:?}", mutation.delta),
    ))
}

/// Applies one action, without looking at its deltas.
pub(crate) fn apply(
    object: &str,
    record: Option<pb::DataFragment>,
    mutation: &Mutation,
    owner: Owner,
) -> Result<Option<pb::DataFragment>> {
    let present = |record: Option<pb::DataFragment>| {
        record.ok_or_else(|| {
            Error::corrupt(
                format!("{object}, mutation {}", mutation.sequence),
                "modify_absent_fragment",
                format!(
                    "a record of fragment {} for {}",
                    mutation.target,
                    mutation.action.name()
                ),
                "none",
            )
        })
    };
    match &mutation.action {
        Action::Upsert(new) => {
            let mut new = new.as_ref().clone();
            resolve_owner(&mut new, owner);
            Ok(Some(new))
        }
        Action::Remove => Ok(None),
        Action::AddDataFile(file) => {
            let mut record = present(record)?;
            let mut file = file.clone();
            file.base_id = file.base_id.or(owner.base_id());
            record.files.push(file);
            Ok(Some(record))
        }
        Action::RemoveDataFile(path) => {
            let mut record = present(record)?;
            record.files.retain(|f| f.path != *path);
            Ok(Some(record))
        }
        Action::AddDeletionFile(file) => {
            let mut record = present(record)?;
            let mut file = *file;
            file.base_id = file.base_id.or(owner.base_id());
            let label = format!("{object}, mutation {}", mutation.sequence);
            check_deletion_file(&label, &file, Some(record.physical_rows))?;
            record.deletion_file = Some(file);
            Ok(Some(record))
        }
        Action::ClearDeletionFile => {
            let mut record = present(record)?;
            record.deletion_file = None;
            Ok(Some(record))
        }
        Action::ReplaceDataFile {
            expected_path,
            path,
            file_size_bytes,
            base_id,
        } => {
            let mut record = present(record)?;
            let slot = record.files.iter_mut().find(|f| f.path == *expected_path);
            let Some(slot) = slot else {
                return Err(Error::corrupt(
                    format!("{object}, mutation {}", mutation.sequence),
                    "replace_without_match",
                    format!("a file {expected_path:?} in fragment {}", mutation.target),
                    "none",
                ));
            };
            slot.path.clone_from(path);
            slot.file_size_bytes = *file_size_bytes;
            // An absent base id resets the slot to the mutation's owner (`spec/notes.md` 11).
            slot.base_id = base_id.or(owner.base_id());
            Ok(Some(record))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> pb::DataFile {
        pb::DataFile {
            path: path.into(),
            ..Default::default()
        }
    }

    fn record(files: &[&str], rows: u64) -> pb::DataFragment {
        pb::DataFragment {
            id: 7,
            files: files.iter().map(|p| file(p)).collect(),
            physical_rows: rows,
            ..Default::default()
        }
    }

    fn pending(sequence: u64, action: Action, delta: (i64, i64, i64)) -> Pending {
        Pending {
            mutation: Arc::new(Mutation {
                sequence,
                target: 7,
                action,
                delta: Delta {
                    fragments: delta.0,
                    total_rows: delta.1,
                    visible_rows: delta.2,
                },
            }),
            owner: Owner::Current,
        }
    }

    fn replace(sequence: u64, from: &str, to: &str) -> Pending {
        pending(
            sequence,
            Action::ReplaceDataFile {
                expected_path: from.into(),
                path: to.into(),
                file_size_bytes: 1,
                base_id: None,
            },
            (0, 0, 0),
        )
    }

    #[test]
    fn replacing_edits_a_slot_and_not_a_path() {
        let chain = [replace(1, "B", "A"), replace(2, "A", "C")];
        let result = replay("x", Some(record(&["A", "B"], 3)), &chain)
            .expect("valid")
            .expect("present");
        let paths: Vec<_> = result.files.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(paths, ["C", "A"]);
    }

    #[test]
    fn a_removed_fragment_cannot_be_modified() {
        let steps = [
            pending(1, Action::Remove, (-1, -3, -3)),
            pending(2, Action::AddDataFile(file("Z")), (0, 0, 0)),
        ];
        let error = replay("x", Some(record(&["A"], 3)), &steps).expect_err("absent");
        assert_eq!(error.corrupt_rule(), Some("modify_absent_fragment"));
    }

    #[test]
    fn a_second_removal_is_a_no_op_with_zero_deltas() {
        let steps = [
            pending(1, Action::Remove, (-1, -3, -3)),
            pending(2, Action::Remove, (0, 0, 0)),
        ];
        assert!(
            replay("x", Some(record(&["A"], 3)), &steps)
                .expect("valid")
                .is_none()
        );
    }

    #[test]
    fn a_wrong_delta_is_noticed() {
        let deletion = pb::DeletionFile {
            num_deleted_rows: 2,
            ..Default::default()
        };
        for (delta, ok) in [
            ((0, 0, -2), true),
            ((0, 0, -1), false),
            ((0, -2, -2), false),
        ] {
            let steps = [pending(1, Action::AddDeletionFile(deletion), delta)];
            assert_eq!(replay("x", Some(record(&["A"], 3)), &steps).is_ok(), ok);
        }
    }

    #[test]
    fn foreign_mutations_name_their_dataset() {
        let mut step = pending(1, Action::AddDataFile(file("Z")), (0, 0, 0));
        step.owner = Owner::Base(4);
        let result = replay("x", Some(record(&["A"], 3)), &[step])
            .expect("valid")
            .expect("present");
        let bases: Vec<_> = result.files.iter().map(|f| f.base_id).collect();
        assert_eq!(bases, [None, Some(4)]);
    }

    #[test]
    fn encoding_round_trips() {
        let original = pending(9, Action::Upsert(Box::new(record(&["A"], 3))), (1, 3, 3));
        let decoded = Mutation::decode("x", original.mutation.encode()).expect("valid");
        assert_eq!(decoded, *original.mutation);
    }
}
