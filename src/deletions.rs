//! Deletion files, read for their own sake: does one say what its record says of it.

use arrow::ipc::{root_as_footer, root_as_message};
use bytes::Bytes;
use futures::executor::block_on;
use lance_core::utils::deletion::DeletionVector;
use lance_io::object_store::ObjectStore;
use lance_table::format::{DeletionFile, DeletionFileType, pb};
use lance_table::io::deletion::{deletion_file_path, read_deletion_file};
use object_store::ObjectStoreExt;
use object_store::path::Path;

use crate::error::{Error, Result};
use crate::panics::caught;

/// Checks the bytes of the deletion file of fragment `id`, which messages call `object`.
///
/// # Errors
/// `deletion_file_undecodable`, `deletion_count_mismatch`, `deletion_out_of_range`.
pub(crate) fn check_deletions(
    object: &str,
    id: u64,
    file: &pb::DeletionFile,
    physical_rows: u64,
    bytes: &Bytes,
) -> Result<()> {
    let undecodable = |why: String| {
        let expected = "a deletion file that Lance can read";
        Error::corrupt(object, "deletion_file_undecodable", expected, why)
    };
    // Old flat manifests leave the numbers out.
    let known = |number: u64| number > 0;
    let lance = DeletionFile::try_from(*file).map_err(|e| undecodable(e.to_string()))?;
    if lance.file_type == DeletionFileType::Array {
        let rows = [physical_rows, file.num_deleted_rows];
        let rows = rows.into_iter().find(|n| known(*n));
        check_blocks(bytes, rows.unwrap_or(1 << 32)).map_err(undecodable)?;
    }
    let offsets = caught(|| block_on(read(id, &lance, bytes)))
        .ok_or_else(|| undecodable("bytes that stop the decoder".into()))?
        .map_err(|e| undecodable(e.to_string()))?;
    if known(file.num_deleted_rows) && offsets.len() as u64 != file.num_deleted_rows {
        return Err(Error::corrupt(
            object,
            "deletion_count_mismatch",
            format!("{} deleted rows, as the record says", file.num_deleted_rows),
            offsets.len(),
        ));
    }
    match offsets.iter().max() {
        Some(last) if known(physical_rows) && u64::from(last) >= physical_rows => {
            Err(Error::corrupt(
                object,
                "deletion_out_of_range",
                format!("offsets below the fragment's {physical_rows} rows"),
                last,
            ))
        }
        _ => Ok(()),
    }
}

/// Lance reads deletion files from a store.
async fn read(id: u64, file: &DeletionFile, bytes: &Bytes) -> lance::Result<DeletionVector> {
    let (store, base) = (ObjectStore::memory(), Path::default());
    let path = deletion_file_path(&base, id, file);
    store.inner.put(&path, bytes.clone().into()).await?;
    read_deletion_file(id, file, &base, &store).await
}

/// Whether the parts of an Arrow file lie in it and hold no more than `rows`: its reader allocates what
/// they ask for.
fn check_blocks(bytes: &[u8], rows: u64) -> std::result::Result<(), String> {
    const TRAILER: usize = 10;
    let (rest, trailer) = bytes
        .len()
        .checked_sub(TRAILER)
        .and_then(|at| bytes.split_at_checked(at))
        .ok_or_else(|| format!("a file of {} bytes", bytes.len()))?;
    let length = match trailer.split_first_chunk::<4>() {
        Some((length, b"ARROW1")) => i32::from_le_bytes(*length),
        _ => return Err("no Arrow magic at its end".into()),
    };
    let footer = usize::try_from(length)
        .ok()
        .and_then(|length| rest.len().checked_sub(length))
        .and_then(|at| rest.get(at..))
        .ok_or_else(|| format!("a footer of {length} bytes"))?;
    let footer = root_as_footer(footer).map_err(|e| e.to_string())?;
    let size = i128::try_from(bytes.len()).unwrap_or(i128::MAX);
    let blocks = footer.recordBatches().into_iter().flatten();
    for block in blocks.chain(footer.dictionaries().into_iter().flatten()) {
        let parts = [
            i128::from(block.offset()),
            i128::from(block.metaDataLength()),
            i128::from(block.bodyLength()),
        ];
        if parts.iter().any(|part| *part < 0) || parts.iter().sum::<i128>() > size {
            return Err(format!("a batch at {parts:?} of {size} bytes"));
        }
        let at = |part: i128| usize::try_from(part).unwrap_or(usize::MAX);
        let [start, metadata, body] = parts.map(at);
        let (metadata, body) = bytes
            .get(start..start + metadata + body)
            .and_then(|block| block.split_at_checked(metadata))
            .ok_or_else(|| format!("a batch at {parts:?} of {size} bytes"))?;
        check_batch(metadata, body, rows)?;
    }
    Ok(())
}

/// Checks the numbers of one batch: its rows, and how large its buffers say that they become.
fn check_batch(metadata: &[u8], body: &[u8], rows: u64) -> std::result::Result<(), String> {
    // A marker and the length, or the length alone.
    let prefix = if metadata.starts_with(&[0xff; 4]) {
        8
    } else {
        4
    };
    let message = root_as_message(metadata.get(prefix..).unwrap_or_default());
    let message = message.map_err(|e| e.to_string())?;
    let batch = message
        .header_as_record_batch()
        .ok_or("something else than a batch of rows")?;
    let too_many = |n: i64| u64::try_from(n).map_or(true, |n| n > rows);
    let nodes = batch.nodes().into_iter().flatten();
    let mut lengths = nodes.map(|n| n.length()).chain([batch.length()]);
    if let Some(length) = lengths.find(|n| too_many(*n)) {
        return Err(format!("{length} rows where there can be {rows}"));
    }
    for buffer in batch.buffers().into_iter().flatten() {
        let place = usize::try_from(buffer.offset())
            .ok()
            .zip(usize::try_from(buffer.length()).ok())
            .and_then(|(start, length)| body.get(start..start.checked_add(length)?))
            .ok_or("a buffer outside its batch")?;
        // A compressed buffer begins with its length, or -1 for one that is stored as it is.
        if batch.compression().is_some()
            && let Some(length) = place.first_chunk::<8>().map(|b| i64::from_le_bytes(*b))
            && length != -1
            && u64::try_from(length).map_or(true, |n| n > rows.saturating_mul(4) + 64)
        {
            return Err(format!("a buffer of {length} bytes for {rows} rows"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use lance_table::io::deletion::write_deletion_file;

    /// The file of these deletions, and what a record says of it.
    async fn file(deletions: DeletionVector) -> (pb::DeletionFile, Bytes) {
        let (store, base) = (ObjectStore::memory(), Path::default());
        let written = write_deletion_file(&base, 7, 3, &deletions, &store).await;
        let written = written.expect("written").expect("some deletions");
        let path = deletion_file_path(&base, 7, &written);
        let bytes = store.read_one_all(&path).await.expect("there");
        let stored = pb::DeletionFile {
            file_type: match written.file_type {
                DeletionFileType::Array => 0,
                DeletionFileType::Bitmap => 1,
            },
            read_version: written.read_version,
            id: written.id,
            num_deleted_rows: deletions.len() as u64,
            base_id: None,
        };
        (stored, bytes)
    }

    #[tokio::test]
    async fn a_deletion_file_says_what_its_record_says() {
        let set = DeletionVector::Set(HashSet::from([1, 4, 9]));
        let bitmap = DeletionVector::Bitmap((0..3000).collect());
        for (deletions, rows) in [(set, 10), (bitmap, 3000)] {
            let (stored, bytes) = file(deletions).await;
            let check = |stored: &pb::DeletionFile, rows, bytes: &Bytes| {
                let checked = check_deletions("x", 7, stored, rows, bytes);
                checked.err().and_then(|e| e.corrupt_rule())
            };
            assert_eq!(check(&stored, rows, &bytes), None);
            assert_eq!(
                check(&stored, rows - 1, &bytes),
                Some("deletion_out_of_range")
            );
            let more = pb::DeletionFile {
                num_deleted_rows: stored.num_deleted_rows + 1,
                ..stored
            };
            let fewer = pb::DeletionFile {
                num_deleted_rows: 1,
                ..stored
            };
            assert_eq!(check(&fewer, rows, &bytes), Some("deletion_count_mismatch"));
            assert_eq!(check(&more, rows, &bytes), Some("deletion_count_mismatch"));
            for broken in [Bytes::new(), Bytes::from_static(b"hello world")] {
                let found = check(&stored, rows, &broken);
                assert_eq!(found, Some("deletion_file_undecodable"));
            }
            // Whatever is changed: an answer, and no more memory than the file asks for.
            for at in (0..bytes.len()).step_by(3) {
                for bit in [0x01, 0x10, 0x80] {
                    let mut broken = bytes.to_vec();
                    broken[at] ^= bit;
                    check(&stored, rows, &broken.into());
                }
            }
        }
    }
}
