//! From what a native write did to fragments to the mutations that say so.
//!
//! Lance hands over whole records. The narrowest actions that lead from the record before to the
//! record after are found and tried out; where they do not lead there exactly, the whole record is
//! written ([`Action::Upsert`]).

use std::collections::BTreeMap;

use lance_table::format::{Fragment, pb};

use super::grow::Change;
use crate::error::{Error, Result};
use crate::tree::mutation::{Action, Mutation, apply};
use crate::tree::object::Owner;
use crate::tree::record::{check_deletion_file, counts_of, to_fragment};
use crate::tree::summary::{Counts, Delta};

/// What leads from `before` to `after`, in the order it applies.
///
/// `before` are the complete records that the write could see. A fragment it could not see and that
/// is in `after` is new.
///
/// # Errors
/// [`Error::InvalidInput`] for a record a leaf cannot hold, [`Error::Lance`] when Lance cannot take a
/// record.
pub(crate) fn changes(
    before: &BTreeMap<u64, pb::DataFragment>,
    after: &[Fragment],
) -> Result<Vec<Change>> {
    let mut new: Vec<&Fragment> = after.iter().collect();
    new.sort_by_key(|f| f.id);
    if new
        .windows(2)
        .any(|pair| matches!(pair, [a, b] if a.id == b.id))
    {
        return Err(Error::invalid("a write lists a fragment twice"));
    }
    let mut pairs: Vec<Pair<'_>> = Vec::with_capacity(before.len().max(new.len()));
    let mut created = Vec::new();
    let mut new = new.into_iter().peekable();
    for (id, old) in before {
        while let Some(unknown) = new.next_if(|f| f.id < *id) {
            created.push((None, Some(unknown)));
        }
        pairs.push((Some(old), new.next_if(|f| f.id == *id)));
    }
    pairs.extend(created);
    pairs.extend(new.map(|unknown| (None, Some(unknown))));

    // A write of a whole table compares a million records.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = pairs.len().div_ceil(threads).max(LEAST_SHARE);
    let Some((first, others)) = pairs.split_at_checked(share) else {
        return changes_of(&pairs);
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = others
            .chunks(share)
            .map(|pairs| scope.spawn(|| changes_of(pairs)))
            .collect();
        let mut changes = changes_of(first)?;
        for thread in running {
            let more = thread.join();
            changes.extend(more.map_err(|_| Error::internal("comparing records ended early"))??);
        }
        Ok(changes)
    })
}

/// A fragment's record before and after. One of them is there.
type Pair<'a> = (Option<&'a pb::DataFragment>, Option<&'a Fragment>);

/// Fewest records that are worth a thread.
const LEAST_SHARE: usize = 4096;

fn changes_of(pairs: &[Pair<'_>]) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    for pair in pairs {
        match *pair {
            (Some(old), None) => push(&mut changes, old.id, Some(old), Action::Remove)?,
            (Some(old), Some(new)) => {
                // Compared as Lance sees both: what its type leaves out did not change.
                let label = format!("fragment {}", old.id);
                if to_fragment(&label, old.clone())? != *new {
                    let new = complete(pb::DataFragment::from(new), Some(old));
                    check_storable(&new)?;
                    modify(&mut changes, old, &new)?;
                }
            }
            (None, Some(new)) => {
                let new = complete(pb::DataFragment::from(new), None);
                check_storable(&new)?;
                push(&mut changes, new.id, None, Action::Upsert(Box::new(new)))?;
            }
            (None, None) => {}
        }
    }
    Ok(changes)
}

/// Puts back what Lance's type leaves out of a record (`spec/notes.md` 19).
fn complete(mut new: pb::DataFragment, old: Option<&pb::DataFragment>) -> pb::DataFragment {
    if let Some(old) = old {
        new.clustering_id = old.clustering_id;
        new.metadata.clone_from(&old.metadata);
    }
    new
}

/// The rules for counts in a tree (spec, "Leaf format"): they are known.
pub(crate) fn check_storable(record: &pb::DataFragment) -> Result<()> {
    let label = format!("fragment {}", record.id);
    if let Some(deletion) = &record.deletion_file {
        check_deletion_file(&label, deletion, Some(record.physical_rows))?;
    }
    let overlays = record.overlays.iter().filter_map(|o| o.data_file.as_ref());
    for file in record.files.iter().chain(overlays) {
        crate::tree::record::check_mapping(
            &format!("{label}, file {}", file.path),
            file.file_major_version,
            file.file_minor_version,
            &file.fields,
            &file.column_indices,
        )?;
    }
    Ok(())
}

fn modify(changes: &mut Vec<Change>, old: &pb::DataFragment, new: &pb::DataFragment) -> Result<()> {
    let narrow = narrow_actions(old, new);
    let mut record = old.clone();
    let mut steps = Vec::with_capacity(narrow.len());
    for action in narrow {
        push(&mut steps, old.id, Some(&record), action)?;
        if let Some(step) = steps.last() {
            record = applied(&record, step)?;
        }
    }
    if record == *new {
        changes.append(&mut steps);
        return Ok(());
    }
    push(
        changes,
        old.id,
        Some(old),
        Action::Upsert(Box::new(new.clone())),
    )
}

/// The narrow actions that would lead from `old` to `new` if nothing else changed.
fn narrow_actions(old: &pb::DataFragment, new: &pb::DataFragment) -> Vec<Action> {
    let mut actions = Vec::new();
    let common = old.files.len().min(new.files.len());
    let slots = old.files.iter().zip(&new.files);
    if new.files.len() < old.files.len() {
        let mut gone: Vec<&str> = old
            .files
            .iter()
            .map(|f| f.path.as_str())
            .filter(|path| !new.files.iter().any(|f| f.path == *path))
            .collect();
        gone.dedup();
        actions.extend(gone.iter().map(|p| Action::RemoveDataFile(p.to_string())));
    } else {
        for (from, to) in slots {
            if from != to {
                actions.push(Action::ReplaceDataFile {
                    expected_path: from.path.clone(),
                    path: to.path.clone(),
                    file_size_bytes: to.file_size_bytes,
                    base_id: to.base_id,
                });
            }
        }
        let added = new.files.iter().skip(common);
        actions.extend(added.map(|file| Action::AddDataFile(file.clone())));
    }
    match (&old.deletion_file, new.deletion_file) {
        (was, Some(is)) if was.as_ref() != Some(&is) => actions.push(Action::AddDeletionFile(is)),
        (Some(_), None) => actions.push(Action::ClearDeletionFile),
        (Some(_) | None, Some(_)) | (None, None) => {}
    }
    actions
}

fn applied(record: &pb::DataFragment, change: &Change) -> Result<pb::DataFragment> {
    let mutation = Mutation {
        sequence: 1,
        target: change.target,
        action: change.action.clone(),
        delta: change.delta,
    };
    apply("a write", Some(record.clone()), &mutation, Owner::Current)?
        .ok_or_else(|| Error::internal("a change of a fragment removed it"))
}

fn push(
    changes: &mut Vec<Change>,
    id: u64,
    before: Option<&pb::DataFragment>,
    action: Action,
) -> Result<()> {
    let target = u32::try_from(id).map_err(|_| {
        Error::invalid(format!(
            "fragment id {id} is over the greatest possible, 2^32 - 1"
        ))
    })?;
    let before_counts = before.map(counts_of);
    let after_counts = counts_after(before, &action);
    let delta = Delta::between(before_counts, after_counts)
        .ok_or_else(|| Error::invalid(format!("fragment {id} has more than 2^63 rows")))?;
    changes.push(Change {
        target,
        action,
        delta,
    });
    Ok(())
}

fn counts_after(before: Option<&pb::DataFragment>, action: &Action) -> Option<Counts> {
    match action {
        Action::Upsert(record) => Some(counts_of(record)),
        Action::Remove => None,
        Action::AddDeletionFile(file) => {
            before.map(|b| Counts::of_fragment(b.physical_rows, file.num_deleted_rows))
        }
        Action::ClearDeletionFile => before.map(|b| Counts::of_fragment(b.physical_rows, 0)),
        Action::AddDataFile(_) | Action::RemoveDataFile(_) | Action::ReplaceDataFile { .. } => {
            before.map(counts_of)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> pb::DataFile {
        pb::DataFile {
            path: path.into(),
            fields: vec![0],
            column_indices: vec![0],
            file_major_version: 2,
            ..Default::default()
        }
    }

    fn record(id: u64, files: &[&str]) -> pb::DataFragment {
        pb::DataFragment {
            id,
            files: files.iter().map(|p| file(p)).collect(),
            physical_rows: 10,
            metadata: [("kept".to_string(), "yes".to_string())].into(),
            ..Default::default()
        }
    }

    fn deletion(rows: u64) -> pb::DeletionFile {
        pb::DeletionFile {
            id: rows,
            num_deleted_rows: rows,
            ..Default::default()
        }
    }

    /// The actions found, after checking that they lead where they should.
    fn actions(old: &pb::DataFragment, new: &pb::DataFragment) -> Vec<&'static str> {
        let before = BTreeMap::from([(old.id, old.clone())]);
        let after = to_fragment("x", new.clone()).expect("valid");
        let found = changes(&before, &[after]).expect("valid");
        let mut state = old.clone();
        for change in &found {
            let next = applied(&state, change).expect("applies");
            let delta = Delta::between(Some(counts_of(&state)), Some(counts_of(&next)));
            assert_eq!(delta, Some(change.delta));
            state = next;
        }
        assert_eq!(state, *new);
        found.iter().map(|c| c.action.name()).collect()
    }

    #[test]
    fn the_narrowest_actions_are_found() {
        let old = record(7, &["a", "b"]);
        assert!(actions(&old, &old).is_empty());
        let mut more = old.clone();
        more.files.push(file("c"));
        assert_eq!(actions(&old, &more), ["add_data_file"]);
        assert_eq!(actions(&more, &old), ["remove_data_file"]);
        let mut other = old.clone();
        other.files[1].path = "z".into();
        other.files[1].file_size_bytes = 9;
        assert_eq!(actions(&old, &other), ["replace_data_file"]);
        let mut deleted = old.clone();
        deleted.deletion_file = Some(deletion(3));
        assert_eq!(actions(&old, &deleted), ["add_deletion_file"]);
        assert_eq!(actions(&deleted, &old), ["clear_deletion_file"]);
        let mut both = deleted.clone();
        both.files.push(file("c"));
        assert_eq!(actions(&old, &both), ["add_data_file", "add_deletion_file"]);
    }

    #[test]
    fn what_they_cannot_say_is_a_whole_record() {
        let old = record(7, &["a", "b"]);
        let mut tombstoned = old.clone();
        tombstoned.files[0].fields = vec![-2];
        assert_eq!(actions(&old, &tombstoned), ["upsert_fragment"]);
        let mut swapped = old.clone();
        swapped.files.reverse();
        assert_eq!(actions(&old, &swapped), ["upsert_fragment"]);
        // The second slot of a repeated path cannot be named.
        let twice = record(7, &["a", "a"]);
        let mut second = twice.clone();
        second.files[1].path = "b".into();
        assert_eq!(actions(&twice, &second), ["upsert_fragment"]);
        let mut fewer = twice.clone();
        fewer.files.pop();
        assert_eq!(actions(&twice, &fewer), ["upsert_fragment"]);
        let mut rows = old.clone();
        rows.physical_rows = 11;
        assert_eq!(actions(&old, &rows), ["upsert_fragment"]);
    }

    #[test]
    fn unseen_fragments_are_new_and_missing_ones_removed() {
        let before = BTreeMap::from([(1, record(1, &["a"])), (2, record(2, &["b"]))]);
        let after = [
            to_fragment("x", record(2, &["b"])).expect("valid"),
            to_fragment("x", record(9, &["c"])).expect("valid"),
        ];
        let found = changes(&before, &after).expect("valid");
        let shown: Vec<_> = found
            .iter()
            .map(|c| (c.target, c.action.name(), c.delta.visible_rows))
            .collect();
        assert_eq!(
            shown,
            [(1, "remove_fragment", -10), (9, "upsert_fragment", 10)]
        );
    }

    #[test]
    fn a_deletion_file_of_nothing_is_refused() {
        let old = record(1, &["a"]);
        let mut new = old.clone();
        new.deletion_file = Some(deletion(0));
        let after = [to_fragment("x", new).expect("valid")];
        assert!(changes(&BTreeMap::from([(1, old)]), &after).is_err());
    }
}
