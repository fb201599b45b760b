//! What a walk gives: one fragment, and where its record comes from.

use std::sync::Arc;

use lance_table::format::{Fragment, pb};

use crate::error::{Error, Result};
use crate::flat::FlatEntry;
use crate::snapshot::{Catalog, Snapshot};
use crate::tree::leaf::Leaf;
use crate::tree::object::Owner;
use crate::tree::record::to_fragment;
use crate::tree::summary::Counts;

/// One fragment with everything buffered above it applied.
#[derive(Debug, Clone)]
pub struct ResolvedFragment {
    pub(super) id: u32,
    pub(super) rows: Option<(u64, u64)>,
    pub(super) source: Source,
}

#[derive(Debug, Clone)]
pub(super) enum Source {
    /// As the leaf holds it.
    Leaf {
        leaf: Arc<Leaf>,
        row: u32,
        owner: Owner,
    },
    /// Changed or created by mutations.
    Record(Arc<pb::DataFragment>),
    /// In the list of a flat manifest.
    Flat(Arc<Snapshot>, FlatEntry),
}

impl ResolvedFragment {
    /// The fragment's id.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Physical rows, deleted ones included; nothing when an old flat manifest leaves them out.
    pub fn physical_rows(&self) -> Option<u64> {
        self.rows.map(|(physical, _)| physical)
    }

    /// Deleted rows; nothing when unknown.
    pub fn deleted_rows(&self) -> Option<u64> {
        self.rows.map(|(_, deleted)| deleted)
    }

    /// Its counts; nothing when row counts are unknown.
    pub fn counts(&self) -> Option<Counts> {
        self.rows
            .map(|(physical, deleted)| Counts::of_fragment(physical, deleted))
    }

    /// The complete record, with every file's base named from this version's manifest.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when a flat manifest's record cannot be decoded.
    pub fn record(&self) -> Result<pb::DataFragment> {
        match &self.source {
            Source::Leaf { leaf, row, owner } => leaf.record(*row as usize, *owner),
            Source::Record(record) => Ok(record.as_ref().clone()),
            Source::Flat(snapshot, entry) => match &snapshot.catalog {
                Catalog::Flat(flat) => flat.record(entry),
                Catalog::Tree(_) => Err(Error::internal("a flat record of a tree")),
            },
        }
    }

    /// The record as Lance's own type.
    ///
    /// # Errors
    /// [`Error::Lance`] when Lance cannot take the record.
    pub fn fragment(&self) -> Result<Fragment> {
        match &self.source {
            Source::Leaf { leaf, row, owner } => leaf.fragment(*row as usize, *owner),
            Source::Record(_) | Source::Flat(..) => {
                to_fragment(format_args!("fragment {}", self.id), self.record()?)
            }
        }
    }

    /// Calls `visit` for each data file, without building the record where a leaf holds it.
    pub(crate) fn for_each_file(
        &self,
        mut visit: impl FnMut(&str, &[i32], &[i32], u32, u32, u64, Option<u32>),
    ) -> Result<usize> {
        if let Source::Leaf { leaf, row, owner } = &self.source {
            let files = leaf.file_list(*row as usize)?;
            let owner = owner.base_id();
            files.for_each(|path, fields, columns, major, minor, size, base| {
                visit(path, fields, columns, major, minor, size, base.or(owner));
            });
            return Ok(files.len());
        }
        let record = self.record()?;
        for f in &record.files {
            visit(
                &f.path,
                &f.fields,
                &f.column_indices,
                f.file_major_version,
                f.file_minor_version,
                f.file_size_bytes,
                f.base_id,
            );
        }
        Ok(record.files.len())
    }

    pub(super) fn of_record(record: pb::DataFragment, id: u32) -> Self {
        let deleted = record
            .deletion_file
            .as_ref()
            .map_or(0, |d| d.num_deleted_rows);
        Self {
            id,
            rows: Some((record.physical_rows, deleted)),
            source: Source::Record(Arc::new(record)),
        }
    }
}
