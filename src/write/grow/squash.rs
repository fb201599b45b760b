//! Fewer mutations that do the same.
//!
//! A buffer need not hold what a later mutation of the same fragment makes void. The delta of what
//! is left out goes into the one that voids it, so each delta is still the record after the
//! mutation minus the record before it.
//!
//! Two replacements of data files are never made one, and nothing moves across them: they edit slots
//! of a list by a path that another may have put there (spec, "Mutations").

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::tree::mutation::{Action, Mutation, Pending, replay};
use crate::tree::object::Owner;
use crate::tree::summary::Delta;

/// Squashes `mutations`, which are sorted by fragment and sequence, and of which nobody else holds
/// any that belongs between two of them. Only those with a sequence of at least `from` are touched.
///
/// # Errors
/// [`Error::Corrupt`] when a mutation cannot follow the one before it.
pub(super) fn squash(
    object: &str,
    mutations: Vec<Arc<Mutation>>,
    from: u64,
) -> Result<Vec<Arc<Mutation>>> {
    let mut kept = Vec::with_capacity(mutations.len());
    let mut rest = mutations.into_iter().peekable();
    let mut group = Vec::new();
    while let Some(first) = rest.next() {
        let target = first.target;
        add(object, &mut group, first, from)?;
        while let Some(next) = rest.next_if(|m| m.target == target) {
            add(object, &mut group, next, from)?;
        }
        kept.append(&mut group);
    }
    Ok(kept)
}

/// Adds the next mutation of a fragment to those before it.
fn add(object: &str, group: &mut Vec<Arc<Mutation>>, next: Arc<Mutation>, from: u64) -> Result<()> {
    let fixed = group.partition_point(|m| m.sequence < from);
    if next.sequence < from {
        group.push(next);
        return Ok(());
    }
    match &next.action {
        Action::Upsert(_) => {
            let sum = void(object, group.drain(fixed..), &next)?;
            group.push(with_delta(next, sum));
        }
        Action::Remove => {
            let sum = void(object, group.drain(fixed..), &next)?;
            // Absent before and absent after: nothing happened.
            if sum != Delta::default() {
                group.push(with_delta(next, sum));
            }
        }
        Action::AddDataFile(_) | Action::RemoveDataFile(_) | Action::ReplaceDataFile { .. } => {
            match foldable(group, fixed) {
                Some(upsert) => fold(object, group, &upsert, &next)?,
                None => group.push(next),
            }
        }
        Action::AddDeletionFile(_) | Action::ClearDeletionFile => {
            if let Some(upsert) = foldable(group, fixed) {
                return fold(object, group, &upsert, &next);
            }
            // What becomes of the deletion file is nothing to the data files, so one may lie between.
            let earlier = group
                .iter()
                .skip(fixed)
                .position(|m| is_deletion(&m.action));
            let sum = match earlier {
                Some(at) => void(object, [group.remove(fixed + at)], &next)?,
                None => next.delta,
            };
            group.push(with_delta(next, sum));
        }
    }
    Ok(())
}

fn is_deletion(action: &Action) -> bool {
    matches!(
        action,
        Action::AddDeletionFile(_) | Action::ClearDeletionFile
    )
}

/// The last mutation, when it installs a whole record that the next can be applied to.
fn foldable(group: &[Arc<Mutation>], fixed: usize) -> Option<Arc<Mutation>> {
    let last = group.get(fixed..)?.last()?;
    matches!(last.action, Action::Upsert(_)).then(|| Arc::clone(last))
}

/// Puts an upsert and what follows it into one upsert.
fn fold(
    object: &str,
    group: &mut Vec<Arc<Mutation>>,
    upsert: &Mutation,
    next: &Arc<Mutation>,
) -> Result<()> {
    let Action::Upsert(record) = &upsert.action else {
        return Err(Error::internal("only an upsert can be folded into"));
    };
    let step = Pending::new(next, Owner::Current);
    let record = replay(object, Some(record.as_ref().clone()), &[step])?
        .ok_or_else(|| Error::internal("a record vanished by a change of its files"))?;
    let delta = sum(object, upsert.delta, next.delta)?;
    group.pop();
    group.push(Arc::new(Mutation {
        sequence: next.sequence,
        target: next.target,
        action: Action::Upsert(Box::new(record)),
        delta,
    }));
    Ok(())
}

/// The delta of `next` once everything in `gone` is left out before it.
fn void(
    object: &str,
    gone: impl IntoIterator<Item = Arc<Mutation>>,
    next: &Mutation,
) -> Result<Delta> {
    gone.into_iter()
        .try_fold(next.delta, |total, m| sum(object, m.delta, total))
}

fn sum(object: &str, a: Delta, b: Delta) -> Result<Delta> {
    let add = |a: i64, b: i64| a.checked_add(b);
    let sum = (|| {
        Some(Delta {
            fragments: add(a.fragments, b.fragments)?,
            total_rows: add(a.total_rows, b.total_rows)?,
            visible_rows: add(a.visible_rows, b.visible_rows)?,
        })
    })();
    sum.ok_or_else(|| {
        Error::corrupt(
            object,
            "delta_mismatch",
            "deltas of one fragment that add up",
            format!("{a:?} and {b:?}"),
        )
    })
}

fn with_delta(mutation: Arc<Mutation>, delta: Delta) -> Arc<Mutation> {
    if mutation.delta == delta {
        return mutation;
    }
    Arc::new(Mutation {
        delta,
        ..mutation.as_ref().clone()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use lance_table::format::pb;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::tree::mutation::apply;
    use crate::tree::record::counts_of;

    fn file(path: &str) -> pb::DataFile {
        pb::DataFile {
            path: path.into(),
            ..Default::default()
        }
    }

    fn record(files: &[&str]) -> pb::DataFragment {
        pb::DataFragment {
            id: 7,
            files: files.iter().map(|p| file(p)).collect(),
            physical_rows: 10,
            ..Default::default()
        }
    }

    fn upsert(files: &[&str]) -> Action {
        Action::Upsert(Box::new(record(files)))
    }

    fn deletion(rows: u64) -> Action {
        Action::AddDeletionFile(pb::DeletionFile {
            num_deleted_rows: rows,
            ..Default::default()
        })
    }

    fn replace(from: &str, to: &str) -> Action {
        Action::ReplaceDataFile {
            expected_path: from.into(),
            path: to.into(),
            file_size_bytes: 1,
            base_id: None,
        }
    }

    /// The actions as a history of a fragment that starts with `start`, with true deltas.
    fn history(start: Option<&pb::DataFragment>, actions: Vec<Action>) -> Vec<Arc<Mutation>> {
        let mut now = start.cloned();
        let mut sequence = 0;
        let step = |action| {
            sequence += 1;
            let mut mutation = Mutation {
                sequence,
                target: 7,
                action,
                delta: Delta::default(),
            };
            let before = now.as_ref().map(counts_of);
            now = apply("x", now.take(), &mutation, Owner::Current).expect("allowed");
            let after = now.as_ref().map(counts_of);
            mutation.delta = Delta::between(before, after).expect("small");
            Arc::new(mutation)
        };
        actions.into_iter().map(step).collect()
    }

    fn play(
        start: Option<&pb::DataFragment>,
        mutations: &[Arc<Mutation>],
    ) -> Option<pb::DataFragment> {
        let steps: Vec<_> = mutations
            .iter()
            .map(|m| Pending::new(m, Owner::Current))
            .collect();
        replay("x", start.cloned(), &steps).expect("deltas are still right")
    }

    /// Squashes a history and checks that it does the same with right deltas.
    fn check(start: Option<&pb::DataFragment>, actions: Vec<Action>) -> Vec<(u64, &'static str)> {
        let all = history(start, actions);
        let some = squash("x", all.clone(), 1).expect("valid");
        assert_eq!(play(start, &some), play(start, &all), "{all:?} {some:?}");
        some.iter().map(|m| (m.sequence, m.action.name())).collect()
    }

    #[test]
    fn an_upsert_voids_all_before_it() {
        let start = record(&["A"]);
        for first in [Action::Remove, deletion(3), Action::AddDataFile(file("B"))] {
            let left = check(Some(&start), vec![first, upsert(&["Z"])]);
            assert_eq!(left, [(2, "upsert_fragment")]);
        }
        let left = check(None, vec![upsert(&["Y"]), Action::Remove, upsert(&["Z"])]);
        assert_eq!(left, [(3, "upsert_fragment")]);
    }

    #[test]
    fn narrow_actions_fold_into_the_upsert_before_them() {
        let actions = vec![
            upsert(&["A", "B"]),
            deletion(2),
            Action::AddDataFile(file("C")),
            replace("B", "A"),
            replace("A", "D"),
            Action::RemoveDataFile("A".into()),
        ];
        assert_eq!(check(None, actions), [(6, "upsert_fragment")]);
    }

    #[test]
    fn a_removal_voids_all_before_it_and_itself_where_nothing_was() {
        let start = record(&["A"]);
        let changed = vec![deletion(2), Action::AddDataFile(file("B")), Action::Remove];
        assert_eq!(check(Some(&start), changed), [(3, "remove_fragment")]);
        let twice = vec![Action::Remove, Action::Remove];
        assert_eq!(check(Some(&start), twice), [(2, "remove_fragment")]);
        assert!(check(None, vec![upsert(&["A"]), Action::Remove]).is_empty());
        assert!(check(None, vec![Action::Remove]).is_empty());
    }

    #[test]
    fn the_last_deletion_file_counts() {
        let start = record(&["A"]);
        let actions = vec![
            deletion(2),
            deletion(4),
            Action::AddDataFile(file("B")),
            Action::ClearDeletionFile,
            replace("A", "C"),
            deletion(5),
        ];
        let left = check(Some(&start), actions);
        let expected = [
            (3, "add_data_file"),
            (5, "replace_data_file"),
            (6, "add_deletion_file"),
        ];
        assert_eq!(left, expected);
    }

    #[test]
    fn replacements_that_chain_through_a_renamed_path_stay_two() {
        let start = record(&["A", "B"]);
        let chain = vec![replace("B", "A"), replace("A", "C")];
        let left = check(Some(&start), chain.clone());
        assert_eq!(left, [(1, "replace_data_file"), (2, "replace_data_file")]);
        let after = play(Some(&start), &history(Some(&start), chain)).expect("present");
        let paths: Vec<_> = after.files.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(paths, ["C", "A"]);
        let removed = vec![
            replace("B", "A"),
            Action::RemoveDataFile("A".into()),
            Action::AddDataFile(file("A")),
        ];
        assert_eq!(check(Some(&start), removed).len(), 3);
    }

    #[test]
    fn older_mutations_are_left_alone_when_others_may_lie_between() {
        let start = record(&["A"]);
        let all = history(
            Some(&start),
            vec![deletion(1), deletion(2), deletion(3), deletion(4)],
        );
        let some = squash("x", all, 3).expect("valid");
        let sequences: Vec<_> = some.iter().map(|m| m.sequence).collect();
        assert_eq!(sequences, [1, 2, 4]);
        play(Some(&start), &some).expect("present");
    }

    #[test]
    fn a_random_history_means_the_same() {
        let mut rng = StdRng::seed_from_u64(3);
        let paths = ["A", "B", "C"];
        let mut seen = HashMap::new();
        for _ in 0..3000 {
            let start = rng.random_bool(0.7).then(|| record(&["A", "B"]));
            let mut now = start.clone();
            let mut actions = Vec::new();
            for _ in 0..rng.random_range(0..9) {
                let path = paths[rng.random_range(0..3)];
                let action = match rng.random_range(0..9) {
                    _ if now.is_none() && rng.random_bool(0.6) => upsert(&["C", path]),
                    0 => upsert(&[path]),
                    1 | 2 => Action::Remove,
                    _ if now.is_none() => continue,
                    3 => Action::AddDataFile(file(path)),
                    4 => Action::RemoveDataFile(path.into()),
                    5 => deletion(rng.random_range(1..=10)),
                    6 => Action::ClearDeletionFile,
                    _ => replace(path, paths[rng.random_range(0..3)]),
                };
                let mutation = Mutation {
                    sequence: 1,
                    target: 7,
                    action: action.clone(),
                    delta: Delta::default(),
                };
                let Ok(next) = apply("x", now.clone(), &mutation, Owner::Current) else {
                    continue;
                };
                now = next;
                actions.push(action);
            }
            let before = actions.len();
            let left = check(start.as_ref(), actions).len();
            *seen.entry(before - left).or_insert(0) += 1;
        }
        assert!(seen.len() > 5, "{seen:?}");
    }
}
