//! One fragment's record: the rules it must obey, its counts, and who owns its files.
//!
//! Records stay protobuf (`pb::DataFragment`) through the tree: Lance's own `Fragment` drops fields
//! and reorders overlays, so it is made only where somebody asks for it, or a scan or a native write
//! needs it (`spec/notes.md` 19).

use std::collections::HashSet;
use std::fmt::Display;

use bytes::Bytes;
use lance_table::format::{Fragment, pb};

use super::object::{BaseTable, Owner};
use super::summary::Counts;
use crate::error::{Error, Result};

/// Field id of a column that is no longer in use.
const TOMBSTONE: i32 = -2;

/// Whether a data file version is Lance v1 (`spec/notes.md` 15).
fn is_v1(major: u32, minor: u32) -> bool {
    major == 0 && minor <= 2
}

/// Checks the mapping rules of a `DataFile` (`spec/notes.md` 15).
///
/// # Errors
/// [`Error::Corrupt`], rule `mapping_rules`.
pub(crate) fn check_mapping(
    object: &str,
    major: u32,
    minor: u32,
    fields: &[i32],
    columns: &[i32],
) -> Result<()> {
    let broken = |expected: &str, found: String| {
        Err(Error::corrupt(object, "mapping_rules", expected, found))
    };
    if fields.contains(&-1) {
        return broken("no stored field id of -1", format!("{fields:?}"));
    }
    if is_v1(major, minor) {
        if !columns.is_empty() {
            return broken("no column indices in a v1 file", format!("{columns:?}"));
        }
        let mut live = fields.iter().filter(|f| **f != TOMBSTONE);
        let mut last = live.next();
        for field in live {
            if last >= Some(field) {
                return broken("strictly increasing field ids", format!("{fields:?}"));
            }
            last = Some(field);
        }
        return Ok(());
    }
    if columns.len() < fields.len() {
        return broken(
            "a column index for every field id",
            format!("{} for {}", columns.len(), fields.len()),
        );
    }
    let mut seen = HashSet::with_capacity(columns.len());
    for column in columns {
        if *column < -1 {
            return broken("no column index below -1", column.to_string());
        }
        if *column != -1 && !seen.insert(*column) {
            return broken("no repeated column index", column.to_string());
        }
    }
    Ok(())
}

/// Checks one data file of a record or a mutation: its mapping and its base.
pub(crate) fn check_data_file(object: &str, file: &pb::DataFile, bases: &BaseTable) -> Result<()> {
    check_mapping(
        object,
        file.file_major_version,
        file.file_minor_version,
        &file.fields,
        &file.column_indices,
    )?;
    bases.require(object, file.base_id)
}

/// Checks one deletion file against the rows it deletes from, when they are known.
///
/// # Errors
/// `deletion_count_missing` and `deletion_exceeds_rows` (spec, "Leaf format"); an unknown file type
/// is [`Error::Unsupported`] (`spec/notes.md` 21).
pub(crate) fn check_deletion_file(
    object: &str,
    file: &pb::DeletionFile,
    physical_rows: Option<u64>,
) -> Result<()> {
    if pb::deletion_file::DeletionFileType::try_from(file.file_type).is_err() {
        return Err(Error::Unsupported {
            object: object.to_string(),
            what: format!("deletion file type {}", file.file_type),
        });
    }
    if file.num_deleted_rows == 0 {
        return Err(Error::corrupt(
            object,
            "deletion_count_missing",
            "a deletion file with num_deleted_rows",
            0,
        ));
    }
    match physical_rows {
        Some(rows) if file.num_deleted_rows > rows => Err(Error::corrupt(
            object,
            "deletion_exceeds_rows",
            format!("at most {rows} deleted rows"),
            file.num_deleted_rows,
        )),
        _ => Ok(()),
    }
}

/// The counts of a record whose row counts are known (leaf records and mutations).
pub(crate) fn counts_of(record: &pb::DataFragment) -> Counts {
    let deleted = record
        .deletion_file
        .as_ref()
        .map_or(0, |d| d.num_deleted_rows);
    Counts::of_fragment(record.physical_rows, deleted)
}

/// Checks a whole record that is about to be used: files, overlays, deletion file and bases.
pub(crate) fn check_record(
    object: &str,
    record: &pb::DataFragment,
    bases: &BaseTable,
) -> Result<()> {
    for file in &record.files {
        check_data_file(object, file, bases)?;
    }
    for overlay in &record.overlays {
        let Some(file) = &overlay.data_file else {
            return Err(Error::corrupt(
                object,
                "overlay_without_file",
                "an overlay with its data file",
                "none",
            ));
        };
        check_data_file(object, file, bases)?;
    }
    if let Some(deletion) = &record.deletion_file {
        check_deletion_file(object, deletion, Some(record.physical_rows))?;
        bases.require(object, deletion.base_id)?;
    }
    Ok(())
}

/// Checks a data file that is about to be stored, but for its base.
pub(crate) fn check_new_file(object: &str, file: &pb::DataFile) -> Result<()> {
    check_mapping(
        object,
        file.file_major_version,
        file.file_minor_version,
        &file.fields,
        &file.column_indices,
    )
}

/// Checks a whole record that is about to be stored, but for its bases.
pub(crate) fn check_new_record(object: &str, record: &pb::DataFragment) -> Result<()> {
    let overlays = record.overlays.iter().map(|o| o.data_file.as_ref());
    for file in record.files.iter().map(Some).chain(overlays) {
        let file = file.ok_or_else(|| {
            Error::corrupt(
                object,
                "overlay_without_file",
                "an overlay with its data file",
                "none",
            )
        })?;
        check_new_file(&format!("{object}, file {}", file.path), file)?;
    }
    match &record.deletion_file {
        Some(deletion) => check_deletion_file(object, deletion, Some(record.physical_rows)),
        None => Ok(()),
    }
}

/// Gives every file of `record` that names no base the base of `owner` (spec, "Object references";
/// `spec/notes.md` 10). After this the record means the same wherever it is kept, as long as it
/// stays under the same manifest.
pub(crate) fn resolve_owner(record: &mut pb::DataFragment, owner: Owner) {
    let Some(base_id) = owner.base_id() else {
        return;
    };
    let overlay_files = record
        .overlays
        .iter_mut()
        .filter_map(|o| o.data_file.as_mut());
    for file in record.files.iter_mut().chain(overlay_files) {
        file.base_id.get_or_insert(base_id);
    }
    if let Some(deletion) = &mut record.deletion_file {
        deletion.base_id.get_or_insert(base_id);
    }
}

/// Rebuilds a mapping vector from its stored bytes (spec, "Leaf format").
///
/// # Errors
/// `mapping_length` when the length is not divisible by 4.
pub(crate) fn decode_mapping(object: &str, bytes: &[u8]) -> Result<Vec<i32>> {
    let (chunks, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(Error::corrupt(
            object,
            "mapping_length",
            "a length divisible by 4",
            bytes.len(),
        ));
    }
    Ok(chunks.iter().map(|c| i32::from_le_bytes(*c)).collect())
}

/// The stored bytes of a mapping vector.
pub(crate) fn encode_mapping(values: &[i32]) -> Bytes {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Lance's own fragment for a record. Overlays keep their precedence, a row count of zero becomes
/// unknown: that is Lance's reading, and a scan leaves fragments without rows out before it asks.
pub(crate) fn to_fragment(object: impl Display, record: pb::DataFragment) -> Result<Fragment> {
    Fragment::try_from(record)
        .map_err(|e| Error::lance(format!("cannot use the record of {object}"), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(major: u32, minor: u32, fields: &[i32], columns: &[i32]) -> Result<()> {
        check_mapping("x", major, minor, fields, columns)
    }

    #[test]
    fn v1_files_have_increasing_fields_and_no_columns() {
        assert!(mapping(0, 2, &[0, 3, 4], &[]).is_ok());
        assert!(mapping(0, 2, &[-2, 0, -2, 4], &[]).is_ok());
        assert!(mapping(0, 2, &[0, 0], &[]).is_err());
        assert!(mapping(0, 1, &[1, 0], &[]).is_err());
        assert!(mapping(0, 2, &[0], &[0]).is_err());
        assert!(mapping(0, 0, &[-1], &[]).is_err());
    }

    #[test]
    fn v2_files_have_a_column_for_every_field() {
        assert!(mapping(2, 0, &[4, 1], &[0, 1]).is_ok());
        assert!(mapping(2, 1, &[4, 1], &[0, -1, 5, -1]).is_ok());
        assert!(mapping(0, 3, &[0], &[0]).is_ok());
        assert!(mapping(2, 1, &[4, 1], &[0]).is_err());
        assert!(mapping(2, 1, &[4, 1], &[0, 0]).is_err());
        assert!(mapping(2, 1, &[4], &[-2]).is_err());
        assert!(mapping(2, 1, &[-1], &[0]).is_err());
        assert!(mapping(2, 1, &[-2, -3], &[0, 1]).is_ok());
    }

    #[test]
    fn mapping_bytes_round_trip() {
        let values = vec![0, -1, i32::MAX, i32::MIN];
        assert_eq!(
            decode_mapping("x", &encode_mapping(&values)).expect("valid"),
            values
        );
        assert_eq!(
            decode_mapping("x", &[1, 2, 3])
                .expect_err("odd")
                .corrupt_rule(),
            Some("mapping_length")
        );
    }
}
