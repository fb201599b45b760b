//! Root and interior nodes: decoding them, and the rules of routing.
//!
//! Two kinds of check, kept apart because decoded nodes are cached and shared: what an object says
//! by itself is checked once in `decode`; what depends on who refers to it ([`NodeContext`]: range,
//! parent reference, manifest, sequences) is checked at each use in [`Node::check`].
//!
//! ```text
//!   root            children [0, 2^32)          buffer
//!    ├─ node  h=1   [min_key, next min_key)     buffer
//!    │   ├─ leaf h=0
//!    │   └─ leaf
//!    └─ node
//! ```

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use lance_table::format::pb;
use prost::Message;

use super::mutation::{Action, Mutation};
use super::object::{BaseTable, Owner, check_tree_path};
use super::summary::{Counts, Tally};
use super::wire::{check_stored_mutations, framed};
use crate::error::{Error, Result};

/// One past the greatest fragment id.
pub(crate) const ID_END: u64 = 1 << 32;

/// A reference to a tree object, as its parent stores it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Child {
    pub path: String,
    pub base_id: Option<u32>,
    pub min_key: u64,
    pub counts: Counts,
    pub height: u32,
    pub num_children: u32,
    pub object_size: u64,
    pub watermark: u64,
}

impl Child {
    /// Decodes a reference and checks what it says by itself (spec, "Routing").
    fn decode(object: &str, index: usize, message: pb::FragmentTreeChild) -> Result<Self> {
        let label = || format!("{object}, child {index} ({})", message.path);
        check_tree_path(&format!("{object}, child {index}"), &message.path)?;
        let broken = |rule, expected: &str, found: String| {
            Err(Error::corrupt(label(), rule, expected, found))
        };
        if message.min_key >= ID_END {
            return broken(
                "min_key_over_u32",
                "a min_key of at most 2^32 - 1",
                message.min_key.to_string(),
            );
        }
        if message.object_size == 0 {
            return broken("object_size_zero", "a nonzero object_size", "0".into());
        }
        if message.visible_rows > message.total_rows {
            return broken(
                "visible_over_total",
                &format!("at most {} visible rows", message.total_rows),
                message.visible_rows.to_string(),
            );
        }
        if message.height == 0 {
            if message.num_children != 0 {
                return broken(
                    "num_children_mismatch",
                    "num_children 0 for a leaf",
                    message.num_children.to_string(),
                );
            }
            if message.num_keys == 0 {
                return broken("empty_leaf", "at least one record in a leaf", "0".into());
            }
        } else {
            if message.num_children < 2 {
                return broken(
                    "interior_too_few_children",
                    "at least 2 children in an interior",
                    message.num_children.to_string(),
                );
            }
            if message.materialized_through_action_sequence != 0 {
                return broken(
                    "watermark_on_interior",
                    "a watermark of 0 for an interior",
                    message.materialized_through_action_sequence.to_string(),
                );
            }
        }
        Ok(Self {
            counts: Counts {
                fragments: message.num_keys,
                total_rows: message.total_rows,
                visible_rows: message.visible_rows,
            },
            path: message.path,
            base_id: message.base_id,
            min_key: message.min_key,
            height: message.height,
            num_children: message.num_children,
            object_size: message.object_size,
            watermark: message.materialized_through_action_sequence,
        })
    }

    /// Bytes the reference takes in the child list that holds it.
    pub(crate) fn stored_bytes(&self) -> u64 {
        framed(self.encode().encoded_len())
    }

    /// The message this reference is stored as.
    pub(crate) fn encode(&self) -> pb::FragmentTreeChild {
        pb::FragmentTreeChild {
            path: self.path.clone(),
            base_id: self.base_id,
            min_key: self.min_key,
            num_keys: self.counts.fragments,
            height: self.height,
            num_children: self.num_children,
            total_rows: self.counts.total_rows,
            object_size: self.object_size,
            materialized_through_action_sequence: self.watermark,
            visible_rows: self.counts.visible_rows,
        }
    }
}

/// A child list with its buffer: the content of an interior, and most of a root.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Node {
    pub children: Vec<Child>,
    pub buffer: Vec<Arc<Mutation>>,
}

/// What a node must agree with, from the place it is used in.
#[derive(Debug)]
pub(crate) struct NodeContext<'a> {
    /// The object, for messages.
    pub object: &'a str,
    /// The dataset that owns the object.
    pub owner: Owner,
    /// The inherited range of fragment ids.
    pub range: Range<u64>,
    /// The manifest's base paths.
    pub bases: &'a BaseTable,
    /// The manifest's `max_fragment_id`.
    pub max_fragment_id: Option<u32>,
    /// `next_action_sequence` of the root above.
    pub next_sequence: u64,
}

impl Node {
    /// Decodes a `.node` object.
    ///
    /// # Errors
    /// `node_undecodable`, and the rules an interior can break by itself.
    pub(crate) fn decode(object: &str, bytes: &Bytes) -> Result<Self> {
        let message = pb::FragmentTreeNode::decode(bytes.clone()).map_err(|e| {
            Error::corrupt(
                object,
                "node_undecodable",
                "a FragmentTreeNode",
                e.to_string(),
            )
        })?;
        check_stored_mutations(object, "node_undecodable", bytes, &[2])?;
        let node = Self::from_parts(object, message.children, message.buffer)?;
        if node.children.len() < 2 {
            return Err(Error::corrupt(
                object,
                "interior_too_few_children",
                "at least 2 children in an interior",
                node.children.len(),
            ));
        }
        Ok(node)
    }

    fn from_parts(
        object: &str,
        children: Vec<pb::FragmentTreeChild>,
        buffer: Vec<pb::FragmentTreeMutation>,
    ) -> Result<Self> {
        let children = children
            .into_iter()
            .enumerate()
            .map(|(i, c)| Child::decode(object, i, c))
            .collect::<Result<Vec<_>>>()?;
        for (i, pair) in children.windows(2).enumerate() {
            let [left, right] = pair else { continue };
            if right.min_key <= left.min_key {
                return Err(Error::corrupt(
                    format!("{object}, child {}", i + 1),
                    "children_out_of_order",
                    format!("a min_key above {}", left.min_key),
                    right.min_key,
                ));
            }
            if right.height != left.height {
                return Err(Error::corrupt(
                    format!("{object}, child {}", i + 1),
                    "height_mismatch",
                    format!("height {}, as its siblings", left.height),
                    right.height,
                ));
            }
        }
        let buffer = decode_mutations(object, buffer)?;
        Ok(Self { children, buffer })
    }

    /// Checks the node against the place it is used in.
    ///
    /// # Errors
    /// `first_min_key`, `child_range_outside_parent`, `unknown_base_id`, `base_not_dataset_root`,
    /// `duplicate_child_location`, `watermark_not_below_next`, and those of [`check_mutations`].
    pub(crate) fn check(&self, context: &NodeContext<'_>) -> Result<()> {
        let object = context.object;
        if let Some(first) = self.children.first()
            && first.min_key != context.range.start
        {
            return Err(Error::corrupt(
                format!("{object}, child 0"),
                "first_min_key",
                format!(
                    "min_key {}, the lower bound of the node",
                    context.range.start
                ),
                first.min_key,
            ));
        }
        let mut locations = HashSet::with_capacity(self.children.len());
        for (index, child) in self.children.iter().enumerate() {
            let label = || format!("{object}, child {index} ({})", child.path);
            if child.min_key >= context.range.end {
                return Err(Error::corrupt(
                    label(),
                    "child_range_outside_parent",
                    format!("a min_key below {}", context.range.end),
                    child.min_key,
                ));
            }
            context
                .bases
                .require_dataset_root(&label(), child.base_id)?;
            let owner = context.owner.of_reference(child.base_id);
            if !locations.insert(context.bases.location(owner, &child.path)?) {
                return Err(Error::corrupt(
                    label(),
                    "duplicate_child_location",
                    "child locations that are unique",
                    "the location of another child",
                ));
            }
            if child.watermark >= context.next_sequence {
                return Err(Error::corrupt(
                    label(),
                    "watermark_not_below_next",
                    format!("a watermark below {}", context.next_sequence),
                    child.watermark,
                ));
            }
        }
        check_mutations(&self.buffer, context, 1..context.next_sequence)
    }

    /// Checks a decoded interior against its parent's reference (spec, "Routing").
    ///
    /// # Errors
    /// `height_mismatch`, `num_children_mismatch`, `num_keys_mismatch`, `total_rows_mismatch`,
    /// `visible_rows_mismatch`.
    pub(crate) fn check_reference(&self, object: &str, child: &Child) -> Result<()> {
        for (index, below) in self.children.iter().enumerate() {
            if Some(below.height) != child.height.checked_sub(1) {
                return Err(Error::corrupt(
                    format!("{object}, child {index}"),
                    "height_mismatch",
                    format!("one less than the node's height {}", child.height),
                    below.height,
                ));
            }
        }
        if self.children.len() as u64 != u64::from(child.num_children) {
            return Err(Error::corrupt(
                object,
                "num_children_mismatch",
                format!("{} children, as the parent says", child.num_children),
                self.children.len(),
            ));
        }
        check_counts(object, child.counts, self.tally())
    }

    /// The sum of the children's summaries and the buffer's deltas.
    pub(crate) fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        for child in &self.children {
            tally += child.counts;
        }
        for mutation in &self.buffer {
            tally += mutation.delta;
        }
        tally
    }

    /// The inherited ranges of the children, given the node's own.
    pub(crate) fn child_ranges(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let ends = self
            .children
            .iter()
            .skip(1)
            .map(|c| c.min_key)
            .chain([range.end]);
        self.children
            .iter()
            .zip(ends)
            .map(|(c, end)| c.min_key..end)
    }

    /// The message a `.node` object holds.
    pub(crate) fn encode(&self) -> pb::FragmentTreeNode {
        pb::FragmentTreeNode {
            children: self.children.iter().map(Child::encode).collect(),
            buffer: self.buffer.iter().map(|m| m.encode()).collect(),
        }
    }

    /// Bytes this node takes in memory, about.
    pub(crate) fn memory_bytes(&self) -> usize {
        let children: usize = self.children.iter().map(|c| c.path.len()).sum();
        children
            + self.children.len() * size_of::<Child>()
            + self.buffer.iter().map(|m| mutation_bytes(m)).sum::<usize>()
    }
}

fn mutation_bytes(mutation: &Mutation) -> usize {
    size_of::<Mutation>()
        + match &mutation.action {
            Action::Upsert(record) => record.encoded_len() * 3,
            Action::AddDataFile(file) => file.encoded_len() * 2,
            Action::RemoveDataFile(path) => path.len(),
            Action::ReplaceDataFile {
                expected_path,
                path,
                ..
            } => expected_path.len() + path.len(),
            Action::Remove | Action::AddDeletionFile(_) | Action::ClearDeletionFile => 0,
        }
}

/// Compares recomputed aggregates with those a parent stores.
pub(crate) fn check_counts(object: &str, stored: Counts, computed: Tally) -> Result<()> {
    let (fragments, total, visible) = computed.raw();
    for (rule, stored, computed) in [
        ("num_keys_mismatch", stored.fragments, fragments),
        ("total_rows_mismatch", stored.total_rows, total),
        ("visible_rows_mismatch", stored.visible_rows, visible),
    ] {
        if i128::from(stored) != computed {
            return Err(Error::corrupt(
                object,
                rule,
                format!("{stored}, as the parent says"),
                computed,
            ));
        }
    }
    Ok(())
}

/// Decodes a list of mutations.
pub(crate) fn decode_mutations(
    object: &str,
    messages: Vec<pb::FragmentTreeMutation>,
) -> Result<Vec<Arc<Mutation>>> {
    messages
        .into_iter()
        .map(|m| Mutation::decode(object, m).map(Arc::new))
        .collect()
}

/// Checks a list of mutations against the place it is found in: sequences within `sequences` and
/// unique in the list, targets in range and at most the greatest allocated id, payloads valid.
///
/// # Errors
/// `sequence_not_below_next`, `sequence_below_root_next`, `sequence_duplicate`,
/// `mutation_out_of_range`, `max_fragment_id_absent`, `id_over_max_fragment_id` and those of the
/// payloads.
pub(crate) fn check_mutations(
    mutations: &[Arc<Mutation>],
    context: &NodeContext<'_>,
    sequences: Range<u64>,
) -> Result<()> {
    let object = context.object;
    let mut seen = HashSet::with_capacity(mutations.len());
    for mutation in mutations {
        let label = || format!("{object}, mutation {}", mutation.sequence);
        if mutation.sequence >= sequences.end {
            return Err(Error::corrupt(
                label(),
                "sequence_not_below_next",
                format!("a sequence below {}", sequences.end),
                mutation.sequence,
            ));
        }
        if mutation.sequence < sequences.start {
            return Err(Error::corrupt(
                label(),
                "sequence_below_root_next",
                format!("a sequence of at least {}", sequences.start),
                mutation.sequence,
            ));
        }
        if !seen.insert(mutation.sequence) {
            return Err(Error::corrupt(
                label(),
                "sequence_duplicate",
                "sequences that are unique",
                "another mutation with this sequence",
            ));
        }
        let target = u64::from(mutation.target);
        check_allocated(&label(), target, context.max_fragment_id)?;
        if !context.range.contains(&target) {
            return Err(Error::corrupt(
                label(),
                "mutation_out_of_range",
                format!("a target in {:?}", context.range),
                target,
            ));
        }
        mutation.check_payload(object, context.bases)?;
    }
    Ok(())
}

/// Checks that a stored or targeted fragment id was ever allocated (spec, "Fragment IDs").
pub(crate) fn check_allocated(object: &str, id: u64, max_fragment_id: Option<u32>) -> Result<()> {
    match max_fragment_id {
        None => Err(Error::corrupt(
            object,
            "max_fragment_id_absent",
            "no fragment while max_fragment_id is absent",
            format!("fragment {id}"),
        )),
        Some(max) if id > u64::from(max) => Err(Error::corrupt(
            object,
            "id_over_max_fragment_id",
            format!("a fragment id of at most {max}"),
            id,
        )),
        Some(_) => Ok(()),
    }
}

/// A root, inline or external.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Root {
    pub node: Node,
    pub next_sequence: u64,
}

impl Root {
    /// Decodes a `.root` object. A root of zero bytes decodes to all defaults and is caught by its
    /// `next_action_sequence` (`spec/notes.md` 14).
    ///
    /// # Errors
    /// `root_undecodable`, `next_sequence_zero`, and the rules a root can break by itself.
    pub(crate) fn decode(object: &str, bytes: &Bytes) -> Result<Self> {
        let message = pb::FragmentTreeRoot::decode(bytes.clone()).map_err(|e| {
            Error::corrupt(
                object,
                "root_undecodable",
                "a FragmentTreeRoot",
                e.to_string(),
            )
        })?;
        check_stored_mutations(object, "root_undecodable", bytes, &[2])?;
        Self::from_message(object, message)
    }

    /// Checks a decoded root message.
    pub(crate) fn from_message(object: &str, message: pb::FragmentTreeRoot) -> Result<Self> {
        if message.next_action_sequence == 0 {
            return Err(Error::corrupt(
                object,
                "next_sequence_zero",
                "a root with a next_action_sequence of at least 1",
                0,
            ));
        }
        Ok(Self {
            node: Node::from_parts(object, message.children, message.buffer)?,
            next_sequence: message.next_action_sequence,
        })
    }

    /// Height of the root's children; none without children.
    pub(crate) fn child_height(&self) -> Option<u32> {
        self.node.children.first().map(|c| c.height)
    }

    /// The message a `.root` object holds.
    pub(crate) fn encode(&self) -> pb::FragmentTreeRoot {
        let node = self.node.encode();
        pb::FragmentTreeRoot {
            children: node.children,
            buffer: node.buffer,
            next_action_sequence: self.next_sequence,
        }
    }

    /// Bytes this root takes in memory, about.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.node.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn child(min_key: u64) -> pb::FragmentTreeChild {
        pb::FragmentTreeChild {
            path: format!("_bt/leaf/{min_key}.lance"),
            min_key,
            num_keys: 1,
            total_rows: 5,
            visible_rows: 4,
            object_size: 100,
            ..Default::default()
        }
    }

    fn removal(sequence: u64, target: u64) -> pb::FragmentTreeMutation {
        use pb::fragment_action::Action;
        pb::FragmentTreeMutation {
            action_sequence: sequence,
            action: Some(pb::FragmentAction {
                action: Some(Action::RemoveFragment(target)),
            }),
            ..Default::default()
        }
    }

    fn bases() -> BaseTable {
        let base = |id, path: &str| pb::BasePath {
            id,
            path: path.into(),
            is_dataset_root: true,
            ..Default::default()
        };
        let bases = [base(1, "/own"), base(2, "/a"), base(3, "/a/")];
        BaseTable::try_new("m", "file/own".into(), &bases, |p| {
            Ok(format!("file{}", p.trim_end_matches('/')))
        })
        .expect("unique ids")
    }

    /// Decodes and checks a node in the range 10..20 under a root whose next sequence is 7.
    fn rule(
        children: Vec<pb::FragmentTreeChild>,
        buffer: Vec<pb::FragmentTreeMutation>,
    ) -> Option<&'static str> {
        let bases = bases();
        let message = pb::FragmentTreeNode { children, buffer };
        let context = NodeContext {
            object: "n",
            owner: Owner::Current,
            range: 10..20,
            bases: &bases,
            max_fragment_id: Some(18),
            next_sequence: 7,
        };
        let checked = Node::decode("n", &message.encode_to_vec().into())
            .and_then(|node| node.check(&context));
        checked.err().map(|e| e.corrupt_rule().unwrap_or("other"))
    }

    fn change(
        index: usize,
        change: impl FnOnce(&mut pb::FragmentTreeChild),
    ) -> Vec<pb::FragmentTreeChild> {
        let mut children = vec![child(10), child(15)];
        if let Some(child) = children.get_mut(index) {
            change(child);
        }
        children
    }

    #[test]
    fn every_rule_of_a_child_list_is_checked() {
        assert_eq!(rule(change(0, |_| {}), vec![removal(6, 18)]), None);
        let broken: Vec<(&str, Vec<_>)> = vec![
            ("interior_too_few_children", vec![child(10)]),
            ("interior_too_few_children", vec![]),
            ("first_min_key", change(0, |c| c.min_key = 11)),
            ("first_min_key", change(0, |c| c.min_key = 9)),
            ("children_out_of_order", change(1, |c| c.min_key = 10)),
            ("children_out_of_order", change(1, |c| c.min_key = 3)),
            ("child_range_outside_parent", change(1, |c| c.min_key = 20)),
            ("min_key_over_u32", change(1, |c| c.min_key = 1 << 32)),
            ("object_size_zero", change(1, |c| c.object_size = 0)),
            ("visible_over_total", change(1, |c| c.visible_rows = 6)),
            ("num_children_mismatch", change(1, |c| c.num_children = 2)),
            ("empty_leaf", change(1, |c| c.num_keys = 0)),
            (
                "height_mismatch",
                change(1, |c| {
                    c.height = 1;
                    c.num_children = 2;
                }),
            ),
            ("path_empty", change(1, |c| c.path = String::new())),
            ("path_absolute", change(1, |c| c.path = "/_bt/x".into())),
            ("path_outside_bt", change(1, |c| c.path = "data/x".into())),
            ("unknown_base_id", change(1, |c| c.base_id = Some(9))),
            (
                "duplicate_child_location",
                change(1, |c| c.path = child(10).path),
            ),
            (
                "duplicate_child_location",
                change(1, |c| {
                    c.path = child(10).path;
                    c.base_id = Some(1);
                }),
            ),
            (
                "watermark_not_below_next",
                change(1, |c| {
                    c.materialized_through_action_sequence = 7;
                }),
            ),
        ];
        for (expected, children) in broken {
            assert_eq!(rule(children, vec![]), Some(expected));
        }
        let both = change(0, |c| c.base_id = Some(2));
        let mut both = both;
        if let Some(second) = both.get_mut(1) {
            second.path = child(10).path;
            second.base_id = Some(3);
        }
        assert_eq!(rule(both, vec![]), Some("duplicate_child_location"));
    }

    #[test]
    fn every_rule_of_a_buffer_is_checked() {
        let broken = vec![
            ("sequence_zero", vec![removal(0, 12)]),
            ("sequence_not_below_next", vec![removal(7, 12)]),
            ("sequence_duplicate", vec![removal(2, 12), removal(2, 13)]),
            ("mutation_out_of_range", vec![removal(2, 9)]),
            ("id_over_max_fragment_id", vec![removal(2, 19)]),
            ("id_over_u32", vec![removal(2, (1 << 32) + 12)]),
            (
                "mutation_without_action",
                vec![pb::FragmentTreeMutation {
                    action_sequence: 1,
                    ..Default::default()
                }],
            ),
            (
                "delta_mismatch",
                vec![pb::FragmentTreeMutation {
                    fragment_count_delta: 1,
                    ..removal(2, 12)
                }],
            ),
        ];
        for (expected, buffer) in broken {
            assert_eq!(rule(change(0, |_| {}), buffer), Some(expected));
        }
    }

    #[test]
    fn aggregates_are_compared_with_the_parent() {
        let message = pb::FragmentTreeNode {
            children: vec![child(10), child(15)],
            buffer: vec![pb::FragmentTreeMutation {
                fragment_count_delta: -1,
                total_rows_delta: -5,
                visible_rows_delta: -4,
                ..removal(2, 12)
            }],
        };
        let node = Node::decode("n", &message.encode_to_vec().into()).expect("valid");
        let reference = Child {
            path: "_bt/node/n.node".into(),
            base_id: None,
            min_key: 10,
            counts: Counts {
                fragments: 1,
                total_rows: 5,
                visible_rows: 4,
            },
            height: 1,
            num_children: 2,
            object_size: 1,
            watermark: 0,
        };
        assert!(node.check_reference("n", &reference).is_ok());
        type Change = fn(&mut Child);
        let broken: [(&str, Change); 5] = [
            ("height_mismatch", |c| c.height = 2),
            ("num_children_mismatch", |c| c.num_children = 3),
            ("num_keys_mismatch", |c| c.counts.fragments = 2),
            ("total_rows_mismatch", |c| c.counts.total_rows = 6),
            ("visible_rows_mismatch", |c| c.counts.visible_rows = 5),
        ];
        for (expected, change) in broken {
            let mut reference = reference.clone();
            change(&mut reference);
            let error = node.check_reference("n", &reference).expect_err("broken");
            assert_eq!(error.corrupt_rule(), Some(expected));
        }
    }

    #[test]
    fn an_empty_root_file_is_not_an_empty_table() {
        let error = Root::decode("r", &Bytes::new()).expect_err("no next sequence");
        assert_eq!(error.corrupt_rule(), Some("next_sequence_zero"));
    }

    #[test]
    fn nothing_is_allowed_before_an_id_was_allocated() {
        assert_eq!(
            check_allocated("x", 0, None)
                .expect_err("none")
                .corrupt_rule(),
            Some("max_fragment_id_absent")
        );
        assert!(check_allocated("x", 3, Some(3)).is_ok());
    }
}
