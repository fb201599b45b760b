//! The `fragment_meta` of a leaf record: row counts and what else is not a file or an overlay.
//!
//! Nearly every record has a row count and perhaps a deletion file, and a leaf has thousands of
//! records. Those are read here, field by field; everything else, and everything odd, is left to the
//! protobuf decoder, so that there is one place that says what is wrong.

use lance_table::format::pb;
use prost::Message;

use super::record::check_deletion_file;
use super::wire::reject_external_sequences;
use crate::error::{Error, Result};

/// What every reader of a record wants to know of its `fragment_meta`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RowCounts {
    pub physical_rows: u64,
    pub deletion_file: Option<pb::DeletionFile>,
}

impl RowCounts {
    pub(crate) fn deleted_rows(&self) -> u64 {
        self.deletion_file.map_or(0, |d| d.num_deleted_rows)
    }
}

/// Decodes and checks the `fragment_meta` of fragment `id`.
///
/// # Errors
/// `fragment_meta_undecodable`, `fragment_meta_id`, `fragment_meta_files`, `deletion_*`.
pub(crate) fn check_meta(location: &str, id: u32, bytes: &[u8]) -> Result<RowCounts> {
    let label = || format!("{location}, fragment {id}");
    let counts = match plain_meta(bytes) {
        Some(counts) => counts,
        None => {
            let meta = decode_checked(location, label, bytes)?;
            RowCounts {
                physical_rows: meta.physical_rows,
                deletion_file: meta.deletion_file,
            }
        }
    };
    if let Some(deletion) = &counts.deletion_file {
        check_deletion_file(&label(), deletion, Some(counts.physical_rows))?;
    }
    Ok(counts)
}

fn decode_checked(
    location: &str,
    label: impl Fn() -> String,
    bytes: &[u8],
) -> Result<pb::DataFragment> {
    let meta = pb::DataFragment::decode(bytes).map_err(|e| {
        Error::corrupt(
            label(),
            "fragment_meta_undecodable",
            "a DataFragment message",
            e.to_string(),
        )
    })?;
    reject_external_sequences(location, "fragment_meta_undecodable", bytes)?;
    if meta.id != 0 {
        return Err(Error::corrupt(
            label(),
            "fragment_meta_id",
            "id 0 in fragment_meta",
            meta.id,
        ));
    }
    if !meta.files.is_empty() || !meta.overlays.is_empty() {
        return Err(Error::corrupt(
            label(),
            "fragment_meta_files",
            "no files and overlays in fragment_meta",
            meta.files.len() + meta.overlays.len(),
        ));
    }
    Ok(meta)
}

/// The record that a `fragment_meta` begins, without id, files and overlays.
///
/// # Errors
/// A message that [`check_meta`] did not take.
pub(crate) fn record_of_meta(
    bytes: &[u8],
) -> std::result::Result<pb::DataFragment, prost::DecodeError> {
    match plain_meta(bytes) {
        Some(counts) => Ok(pb::DataFragment {
            physical_rows: counts.physical_rows,
            deletion_file: counts.deletion_file,
            ..Default::default()
        }),
        None => pb::DataFragment::decode(bytes),
    }
}

// Keys of protobuf fields: the number shifted by three, and the wire type.
const DELETION_FILE: u8 = 3 << 3 | 2;
const PHYSICAL_ROWS: u8 = 4 << 3;
const FILE_TYPE: u8 = 1 << 3;
const READ_VERSION: u8 = 2 << 3;
const DELETION_ID: u8 = 3 << 3;
const DELETED_ROWS: u8 = 4 << 3;
const DELETION_BASE_ID: u8 = 7 << 3;

/// A `DataFragment` message of nothing but a row count and a deletion file. Nothing where it has
/// anything else, an empty message, or a form that a decoder might read in another way.
fn plain_meta(mut bytes: &[u8]) -> Option<RowCounts> {
    let mut counts = RowCounts::default();
    while let Some((key, rest)) = bytes.split_first() {
        bytes = rest;
        match *key {
            PHYSICAL_ROWS => counts.physical_rows = varint(&mut bytes)?,
            // A second one would be merged into the first.
            DELETION_FILE if counts.deletion_file.is_none() => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                let (message, rest) = bytes.split_at_checked(length)?;
                counts.deletion_file = Some(plain_deletion(message)?);
                bytes = rest;
            }
            _ => return None,
        }
    }
    Some(counts)
}

fn plain_deletion(mut bytes: &[u8]) -> Option<pb::DeletionFile> {
    let mut file = pb::DeletionFile::default();
    while let Some((key, rest)) = bytes.split_first() {
        bytes = rest;
        let value = varint(&mut bytes)?;
        match *key {
            FILE_TYPE => file.file_type = i32::try_from(value).ok()?,
            READ_VERSION => file.read_version = value,
            DELETION_ID => file.id = value,
            DELETED_ROWS => file.num_deleted_rows = value,
            DELETION_BASE_ID => file.base_id = Some(u32::try_from(value).ok()?),
            _ => return None,
        }
    }
    Some(file)
}

/// A varint of at most nine bytes: a tenth may hold bits that do not fit.
fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for (index, byte) in bytes.iter().take(9).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            *bytes = bytes.get(index + 1..)?;
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn deletion() -> impl Strategy<Value = pb::DeletionFile> {
        let any_i32 = prop_oneof![0..3i32, any::<i32>()];
        (any_i32, any::<(u64, u64, u64, Option<u32>)>()).prop_map(
            |(file_type, (read_version, id, num_deleted_rows, base_id))| pb::DeletionFile {
                file_type,
                read_version,
                id,
                num_deleted_rows,
                base_id,
            },
        )
    }

    proptest! {
        /// Whatever is read here is what the decoder reads, also from bytes that are no message.
        #[test]
        fn agrees_with_the_decoder(
            rows in prop_oneof![0..300u64, any::<u64>()],
            deletion_file in proptest::option::of(deletion()),
            clustering_id in proptest::option::weighted(0.2, any::<u32>()),
            damage in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..3),
            cut in proptest::option::weighted(0.3, any::<usize>()),
        ) {
            let mut bytes = pb::DataFragment {
                physical_rows: rows,
                deletion_file,
                clustering_id,
                ..Default::default()
            }
            .encode_to_vec();
            for (at, value) in damage {
                let len = bytes.len().max(1);
                if let Some(byte) = bytes.get_mut(at % len) {
                    *byte = value;
                }
            }
            if let Some(cut) = cut {
                bytes.truncate(cut % (bytes.len() + 1));
            }
            if let Some(found) = plain_meta(&bytes) {
                let expected = pb::DataFragment {
                    physical_rows: found.physical_rows,
                    deletion_file: found.deletion_file,
                    ..Default::default()
                };
                prop_assert_eq!(pb::DataFragment::decode(bytes.as_slice()), Ok(expected));
            }
        }
    }

    #[test]
    fn usual_records_are_plain() {
        let bytes = pb::DataFragment {
            physical_rows: 1_000_000,
            deletion_file: Some(pb::DeletionFile {
                file_type: 1,
                read_version: 7,
                id: 1 << 55,
                num_deleted_rows: 12,
                base_id: None,
            }),
            ..Default::default()
        }
        .encode_to_vec();
        assert!(plain_meta(&bytes).is_some());
        assert!(plain_meta(&[]).is_some());
    }
}
