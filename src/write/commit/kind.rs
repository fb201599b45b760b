//! What a transaction is, and how to know it from the first bytes of a stored one.

use std::collections::HashSet;

use lance_table::format::pb;
use prost::encoding::{DecodeContext, decode_key, skip_field};

/// What a commit does, as far as the next version of a tree depends on it.
#[derive(Debug)]
pub(super) enum Kind {
    Overwrite,
    /// To this version.
    Restore(u64),
    CreateIndex,
    Rewrite {
        /// Index segments that others take the place of.
        replaced: HashSet<uuid::Uuid>,
    },
    UpdateConfig,
    Other,
}

/// How much of a transaction file holds what comes before its operation: a version and an id.
pub(super) const TRANSACTION_HEAD: u64 = 1 << 10;

impl Kind {
    /// Field numbers of the operations, in a `Transaction`, that are no [`Kind::Other`].
    pub(super) const NOT_OTHER: [u32; 5] = [102, 103, 104, 106, 110];

    pub(super) fn of(operation: &pb::transaction::Operation) -> Self {
        use pb::transaction::Operation as Op;
        match operation {
            Op::Overwrite(_) => Self::Overwrite,
            Op::Restore(restore) => Self::Restore(restore.version),
            Op::CreateIndex(_) => Self::CreateIndex,
            Op::Rewrite(rewrite) => Self::Rewrite {
                replaced: rewrite
                    .rewritten_indices
                    .iter()
                    .filter_map(|r| r.old_id.as_ref())
                    .filter_map(|id| uuid::Uuid::from_slice(&id.uuid).ok())
                    .collect(),
            },
            Op::UpdateConfig(_) => Self::UpdateConfig,
            _ => Self::Other,
        }
    }
}

/// The field number of the operation in the first bytes of a `Transaction`, whose fields are in the
/// order of their numbers. Nothing when it does not begin in them.
pub(super) fn operation_tag(head: &[u8]) -> Option<u32> {
    let mut rest = head;
    loop {
        let (tag, wire_type) = decode_key(&mut rest).ok()?;
        if (100..200).contains(&tag) {
            return Some(tag);
        }
        skip_field(wire_type, tag, &mut rest, DecodeContext::default()).ok()?;
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    #[test]
    fn the_kind_of_a_stored_transaction_is_known_from_its_first_bytes() {
        use pb::transaction::Operation as Op;
        let operations = [
            Op::Append(Default::default()),
            Op::Delete(Default::default()),
            Op::Overwrite(Default::default()),
            Op::CreateIndex(Default::default()),
            Op::Rewrite(Default::default()),
            Op::Merge(Default::default()),
            Op::Restore(Default::default()),
            Op::ReserveFragments(Default::default()),
            Op::Update(Default::default()),
            Op::Project(Default::default()),
            Op::UpdateConfig(Default::default()),
            Op::DataReplacement(Default::default()),
        ];
        for operation in operations {
            let other = matches!(Kind::of(&operation), Kind::Other);
            let transaction = pb::Transaction {
                read_version: u64::MAX,
                uuid: uuid::Uuid::new_v4().to_string(),
                operation: Some(operation),
                ..Default::default()
            };
            let file = transaction.encode_to_vec();
            let tag = operation_tag(&file).expect("an operation");
            assert_eq!(other, !Kind::NOT_OTHER.contains(&tag), "{tag}");
            assert_eq!(operation_tag(file.get(..20).expect("long")), None);
        }
    }
}
