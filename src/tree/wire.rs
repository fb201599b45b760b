//! One pass over raw protobuf bytes, for what a decoded message cannot show any more.
//!
//! A decoder keeps the last member of a oneof and drops fields it does not know. Both hide corrupt
//! tables from us (`spec/notes.md` 4 and 18), and a flat manifest is better indexed than decoded.
//! This module splits a message into its top-level fields without copying.

use std::ops::Range;

use bytes::Buf;
use prost::encoding::{
    DecodeContext, WireType, decode_key, decode_varint, encoded_len_varint, skip_field,
};

use crate::error::{Error, Result};

/// Where one top-level field of a message lies.
#[derive(Debug, Clone)]
pub(crate) struct WireField {
    /// The field number.
    pub tag: u32,
    /// The payload of a length-delimited field; the raw value bytes of any other.
    pub payload: Range<usize>,
    /// The whole field as stored, key included: can be copied to another message.
    pub raw: Range<usize>,
    /// Whether the field is length-delimited.
    pub delimited: bool,
}

/// Bytes of a nested message of `length` bytes in the message around it, under a field number below
/// 16 as all repeated fields of a tree have.
pub(crate) fn framed(length: usize) -> u64 {
    let length = length as u64;
    1 + encoded_len_varint(length) as u64 + length
}

/// Calls `visit` for each top-level field of the message in `bytes`, in stored order.
///
/// # Errors
/// [`Error::Corrupt`] with `rule` when the bytes are not a protobuf message.
pub(crate) fn for_each_field(
    object: &str,
    rule: &'static str,
    bytes: &[u8],
    mut visit: impl FnMut(WireField) -> Result<()>,
) -> Result<()> {
    let broken =
        |e: prost::DecodeError| Error::corrupt(object, rule, "a protobuf message", e.to_string());
    let mut rest = bytes;
    while rest.has_remaining() {
        let start = bytes.len() - rest.remaining();
        let (tag, wire_type) = decode_key(&mut rest).map_err(broken)?;
        let delimited = wire_type == WireType::LengthDelimited;
        let value_start;
        if delimited {
            let len = decode_varint(&mut rest).map_err(broken)?;
            let left = rest.remaining();
            let Some(len) = usize::try_from(len).ok().filter(|len| *len <= left) else {
                return Err(Error::corrupt(
                    object,
                    rule,
                    "a field that ends inside its message",
                    format!("field {tag} longer than the {left} bytes left"),
                ));
            };
            value_start = bytes.len() - rest.remaining();
            rest.advance(len);
        } else {
            value_start = bytes.len() - rest.remaining();
            skip_field(wire_type, tag, &mut rest, DecodeContext::default()).map_err(broken)?;
        }
        let end = bytes.len() - rest.remaining();
        visit(WireField {
            tag,
            payload: value_start..end,
            raw: start..end,
            delimited,
        })?;
    }
    Ok(())
}

/// The fields of `DataFragment` that named external files in drafts of the format and are reserved
/// now. The linked Lance cannot keep them, so a record that has one must be refused.
const EXTERNAL_FILE_FIELDS: [u32; 3] = [6, 8, 10];

/// Refuses a `DataFragment` message whose row-id or version sequence lies in an external file.
///
/// # Errors
/// [`Error::Unsupported`] naming the field, or [`Error::Corrupt`] when the bytes are no message.
pub(crate) fn reject_external_sequences(
    object: &str,
    rule: &'static str,
    fragment: &[u8],
) -> Result<()> {
    for_each_field(object, rule, fragment, |field| {
        if EXTERNAL_FILE_FIELDS.contains(&field.tag) {
            return Err(Error::Unsupported {
                object: object.to_string(),
                what: format!(
                    "DataFragment field {}: a row-id or version sequence in an external file",
                    field.tag
                ),
            });
        }
        Ok(())
    })
}

/// The variants of a `FragmentAction` that this version knows, by field number.
const KNOWN_ACTIONS: std::ops::RangeInclusive<u32> = 1..=7;
/// Of a `FragmentTreeMutation`.
const FIELD_ACTION: u32 = 2;
/// Of a `FragmentAction`.
const FIELD_UPSERT: u32 = 1;

/// Looks at the mutations at `path` below `message` as they are stored: a decoder keeps the last of
/// two actions and forgets one it does not know (spec, "Mutations"; `spec/notes.md` 4 and 21).
///
/// # Errors
/// `mutation_with_several_actions`, [`Error::Unsupported`] for an action this version does not know,
/// and those of [`reject_external_sequences`].
pub(crate) fn check_stored_mutations(
    object: &str,
    rule: &'static str,
    message: &[u8],
    path: &[u32],
) -> Result<()> {
    for_each_nested(object, rule, message, path, &mut |mutation| {
        let mut known = 0;
        for_each_nested(object, rule, mutation, &[FIELD_ACTION], &mut |action| {
            for_each_field(object, rule, action, |field| {
                if !KNOWN_ACTIONS.contains(&field.tag) {
                    return Err(Error::Unsupported {
                        object: object.to_string(),
                        what: format!("fragment action {}", field.tag),
                    });
                }
                known += 1;
                if field.tag == FIELD_UPSERT && field.delimited {
                    let fragment = action.get(field.payload).unwrap_or_default();
                    reject_external_sequences(object, rule, fragment)?;
                }
                Ok(())
            })
        })?;
        if known > 1 {
            return Err(Error::corrupt(
                object,
                "mutation_with_several_actions",
                "exactly one action in a mutation",
                format!("{known} of them"),
            ));
        }
        Ok(())
    })
}

/// Walks `path` (field numbers of nested messages) below `message` and calls `visit` with the
/// payload of every match.
pub(crate) fn for_each_nested(
    object: &str,
    rule: &'static str,
    message: &[u8],
    path: &[u32],
    visit: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    // The depth is the length of `path`, a constant of the caller, and not of the data.
    let Some((first, rest)) = path.split_first() else {
        return visit(message);
    };
    for_each_field(object, rule, message, |field| {
        if field.tag == *first && field.delimited {
            let payload = message.get(field.payload).unwrap_or_default();
            for_each_nested(object, rule, payload, rest, visit)
        } else {
            Ok(())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_fields_without_losing_bytes() {
        // field 1 varint 150, field 2 bytes "ab", field 3 fixed32.
        let bytes = [0x08, 0x96, 0x01, 0x12, 2, b'a', b'b', 0x1d, 1, 2, 3, 4];
        let mut raw = Vec::new();
        let mut tags = Vec::new();
        for_each_field("x", "r", &bytes, |f| {
            raw.extend_from_slice(&bytes[f.raw]);
            tags.push((f.tag, f.payload.len(), f.delimited));
            Ok(())
        })
        .expect("valid");
        assert_eq!(raw, bytes);
        assert_eq!(tags, [(1, 2, false), (2, 2, true), (3, 4, false)]);
    }

    #[test]
    fn refuses_truncated_fields() {
        for bytes in [&[0x12u8, 5, b'a'][..], &[0x12], &[0xff, 0xff], &[0x00]] {
            assert!(for_each_field("x", "r", bytes, |_| Ok(())).is_err());
        }
    }

    /// A buffer of one mutation, its actions as given.
    fn buffer(actions: &[&[u8]]) -> Vec<u8> {
        let mut mutation = vec![0x08, 1];
        for action in actions {
            prost::encoding::bytes::encode(FIELD_ACTION, &action.to_vec(), &mut mutation);
        }
        let mut node = Vec::new();
        prost::encoding::bytes::encode(2, &mutation, &mut node);
        node
    }

    #[test]
    fn sees_the_actions_that_a_decoder_drops() {
        let check = |actions: &[&[u8]]| check_stored_mutations("x", "r", &buffer(actions), &[2]);
        let (remove, clear): (&[u8], &[u8]) = (&[0x10, 7], &[0x32, 2, 0x08, 7]);
        check(&[remove]).expect("one");
        check(&[clear]).expect("one");
        // The decoder says that there is none.
        check(&[]).expect("none");
        check(&[&[]]).expect("none");
        for two in [
            &[&[remove, clear].concat()[..]][..],
            &[remove, clear],
            &[remove, remove],
        ] {
            let error = check(two).expect_err("two");
            assert_eq!(error.corrupt_rule(), Some("mutation_with_several_actions"));
        }
        for unknown in [&[0x4a, 0][..], &[0x10, 7, 0x4a, 0]] {
            let error = check(&[unknown]).expect_err("field 9").to_string();
            assert!(error.contains("fragment action 9"), "{error}");
        }
        let external: &[u8] = &[0x0a, 2, 0x32, 0];
        let error = check(&[external]).expect_err("an upsert with row ids elsewhere");
        assert!(matches!(error, Error::Unsupported { .. }));
    }

    #[test]
    fn refuses_external_row_ids() {
        let error = reject_external_sequences("x", "r", &[0x32, 0]).expect_err("reserved");
        assert!(matches!(error, Error::Unsupported { .. }));
    }
}
