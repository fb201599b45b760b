//! The fragment list of a flat version, indexed in the manifest's own bytes.
//!
//! Lance decodes every record of a flat manifest when it opens it. Here a record is only located,
//! with its id and row counts; it is decoded when somebody asks for it. That keeps a flat table of a
//! million fragments at its manifest's size in memory.

use std::ops::Range;

use bytes::Bytes;
use lance_table::format::pb;
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};

use crate::error::{Error, Result};
use crate::ranges::FragmentRanges;
use crate::tree::summary::{Counts, Tally};
use crate::tree::wire::for_each_field;

const RULE: &str = "manifest_undecodable";

/// One record, located.
#[derive(Debug, Clone)]
pub(crate) struct FlatEntry {
    pub id: u32,
    bytes: Range<usize>,
    /// Physical rows and deleted rows, or nothing when an old writer left one of them out.
    pub rows: Option<(u64, u64)>,
}

/// The fragments of a flat version, in order of their ids.
#[derive(Debug, Clone)]
pub(crate) struct FlatCatalog {
    message: Bytes,
    entries: Vec<FlatEntry>,
}

/// Collects the records of a manifest on a pass over it.
pub(crate) struct FlatBuilder<'a> {
    label: &'a str,
    catalog: FlatCatalog,
}

impl FlatBuilder<'_> {
    /// Adds the record at `range` of the manifest message.
    pub(crate) fn push(&mut self, range: Range<usize>) -> Result<()> {
        let bytes = self
            .catalog
            .message
            .get(range.clone())
            .ok_or_else(|| Error::internal("a field outside its message"))?;
        let entry = scan_record(self.label, bytes, range)?;
        self.catalog.entries.push(entry);
        Ok(())
    }

    pub(crate) fn finish(mut self) -> FlatCatalog {
        // Lance writes them in order; nothing says it must.
        if !self.catalog.entries.is_sorted_by_key(|e| e.id) {
            self.catalog.entries.sort_by_key(|e| e.id);
        }
        self.catalog.entries.shrink_to_fit();
        self.catalog
    }
}

/// Reads id and row counts of a `DataFragment` without decoding its files.
fn scan_record(label: &str, bytes: &[u8], range: Range<usize>) -> Result<FlatEntry> {
    let (mut id, mut physical, mut deletion) = (0, 0, None);
    let number = |payload: Range<usize>| -> Result<u64> {
        let mut payload = bytes.get(payload).unwrap_or_default();
        decode_varint(&mut payload)
            .map_err(|e| Error::corrupt(label, RULE, "a number", e.to_string()))
    };
    for_each_field(label, RULE, bytes, |field| {
        match field.tag {
            1 => id = number(field.payload)?,
            4 => physical = number(field.payload)?,
            3 if field.delimited => {
                let payload = bytes.get(field.payload).unwrap_or_default();
                deletion = Some(deleted_rows(label, payload)?);
            }
            _ => {}
        }
        Ok(())
    })?;
    let id = u32::try_from(id).map_err(|_| {
        Error::corrupt(
            label,
            "id_over_u32",
            "a fragment id of at most 2^32 - 1",
            id,
        )
    })?;
    // In a flat manifest a count of zero means unknown (`spec/notes.md` 6).
    let deleted = match deletion {
        None => Some(0),
        Some(0) => None,
        Some(deleted) => Some(deleted),
    };
    let rows = deleted
        .filter(|deleted| physical > 0 && *deleted <= physical)
        .map(|deleted| (physical, deleted));
    Ok(FlatEntry {
        id,
        bytes: range,
        rows,
    })
}

fn deleted_rows(label: &str, mut bytes: &[u8]) -> Result<u64> {
    let broken =
        |e: prost::DecodeError| Error::corrupt(label, RULE, "a DeletionFile", e.to_string());
    let mut deleted = 0;
    while !bytes.is_empty() {
        let (tag, wire_type) = decode_key(&mut bytes).map_err(broken)?;
        if tag == 4 && wire_type == WireType::Varint {
            deleted = decode_varint(&mut bytes).map_err(broken)?;
        } else {
            prost::encoding::skip_field(wire_type, tag, &mut bytes, Default::default())
                .map_err(broken)?;
        }
    }
    Ok(deleted)
}

impl FlatCatalog {
    /// Starts collecting the records of the manifest `message`.
    pub(crate) fn builder(label: &str, message: Bytes) -> FlatBuilder<'_> {
        FlatBuilder {
            label,
            catalog: Self {
                message,
                entries: Vec::new(),
            },
        }
    }

    /// Forgets the row counts, which then are unknown.
    pub(crate) fn distrust_row_counts(&mut self) {
        for entry in &mut self.entries {
            entry.rows = None;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The greatest fragment id.
    pub(crate) fn max_id(&self) -> Option<u32> {
        self.entries.last().map(|e| e.id)
    }

    /// The entries whose ids lie in `range`.
    pub(crate) fn entries_in(&self, range: &Range<u64>) -> &[FlatEntry] {
        let at = |bound: u64| self.entries.partition_point(|e| u64::from(e.id) < bound);
        self.entries
            .get(at(range.start)..at(range.end))
            .unwrap_or_default()
    }

    /// Counts over `ranges`, or nothing when a row count in them is unknown.
    pub(crate) fn counts(&self, ranges: &FragmentRanges) -> Option<Counts> {
        let mut tally = Tally::default();
        for range in ranges.iter() {
            for entry in self.entries_in(range) {
                let (physical, deleted) = entry.rows?;
                tally += Counts::of_fragment(physical, deleted);
            }
        }
        tally.counts("manifest").ok()
    }

    /// The complete record of an entry.
    pub(crate) fn record(&self, entry: &FlatEntry) -> Result<pb::DataFragment> {
        pb::DataFragment::decode(self.message.slice(entry.bytes.clone())).map_err(|e| {
            Error::corrupt(
                format!("fragment {}", entry.id),
                RULE,
                "a DataFragment message",
                e.to_string(),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn catalog(fragments: &[pb::DataFragment]) -> FlatCatalog {
        let manifest = pb::Manifest {
            fragments: fragments.to_vec(),
            ..Default::default()
        };
        crate::manifest::split_manifest("m", &manifest.encode_to_vec().into())
            .expect("valid")
            .flat
    }

    fn fragment(id: u64, rows: u64, deleted: Option<u64>) -> pb::DataFragment {
        pb::DataFragment {
            id,
            physical_rows: rows,
            deletion_file: deleted.map(|num_deleted_rows| pb::DeletionFile {
                num_deleted_rows,
                ..Default::default()
            }),
            files: vec![pb::DataFile {
                path: "a.lance".into(),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn records_are_found_without_decoding_the_list() {
        let fragments = [fragment(9, 4, None), fragment(2, 10, Some(3))];
        let catalog = catalog(&fragments);
        assert_eq!(catalog.max_id(), Some(9));
        let [first] = catalog.entries_in(&(0..9)) else {
            panic!("one entry")
        };
        assert_eq!((first.id, first.rows), (2, Some((10, 3))));
        assert_eq!(catalog.record(first).expect("valid"), fragments[1]);
        let counts = catalog.counts(&FragmentRanges::all()).expect("known");
        assert_eq!(
            counts,
            Counts {
                fragments: 2,
                total_rows: 14,
                visible_rows: 11
            }
        );
    }

    #[test]
    fn unknown_row_counts_are_not_guessed() {
        for fragment in [fragment(0, 0, None), fragment(0, 5, Some(0))] {
            assert_eq!(catalog(&[fragment]).counts(&FragmentRanges::all()), None);
        }
    }
}
