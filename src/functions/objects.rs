//! `fragtree_tree`: one row a tree object.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, SchemaRef};
use datafusion::logical_expr::Expr;
use futures::StreamExt;
use futures::stream::{self, BoxStream};

use super::{allowed_values, batch_of, schema_of, unknown_column};
use crate::error::Result;
use crate::physical::metadata::MetadataSource;
use crate::pruning::AddressDomain;
use crate::ranges::FragmentRanges;
use crate::snapshot::Snapshot;
use crate::tree_scan::{TreeObject, WalkState};

/// Columns of the function.
pub(super) fn schema() -> SchemaRef {
    schema_of(vec![
        Field::new("path", DataType::Utf8, false),
        Field::new("base_id", DataType::UInt32, true),
        Field::new("height", DataType::UInt32, false),
        Field::new("min_key", DataType::UInt64, false),
        Field::new("end_key", DataType::UInt64, false),
        Field::new("num_keys", DataType::UInt64, false),
        Field::new("total_rows", DataType::UInt64, false),
        Field::new("visible_rows", DataType::UInt64, false),
        Field::new("num_children", DataType::UInt32, false),
        Field::new("object_size", DataType::UInt64, true),
        Field::new("buffered_mutations", DataType::UInt64, true),
        Field::new("materialized_through", DataType::UInt64, true),
        Field::new("location", DataType::Utf8, false),
    ])
}

/// The objects of a tree whose ranges overlap what is wanted.
#[derive(Debug)]
pub(super) struct Objects {
    pub snapshot: Arc<Snapshot>,
    pub wanted: FragmentRanges,
}

impl MetadataSource for Objects {
    fn batches(
        &self,
        schema: &SchemaRef,
        state: &WalkState,
    ) -> BoxStream<'static, Result<RecordBatch>> {
        let (snapshot, wanted) = (Arc::clone(&self.snapshot), self.wanted.clone());
        let (schema, state) = (Arc::clone(schema), state.clone());
        stream::once(async move {
            let objects = snapshot.tree_objects(&wanted, &state).await?;
            batch(&schema, &objects)
        })
        .boxed()
    }

    fn describe(&self) -> String {
        format!(
            "tree objects of table={}, version={}, layout={}, fragments={}",
            crate::resolve::display_uri(self.snapshot.uri()),
            self.snapshot.version(),
            self.snapshot.layout(),
            self.wanted
        )
    }
}

/// The ids an object must overlap for `min_key` and `end_key` to satisfy the filters.
///
/// An object with `min_key <= m` and `end_key > k` holds every id of `k..=m` when `k <= m`, and the
/// ids from its start to its end reach from below `m` to above `k` otherwise: either way it overlaps
/// `k.min(m)..=m.max(k)`, and so does every node above it. Checking the filters is DataFusion's.
pub(super) fn wanted(filters: &[Expr]) -> FragmentRanges {
    // Bounds of a range are not ids of fragments: any 32-bit value can be one.
    let domain = AddressDomain::new(Some(u32::MAX));
    let highest_start = match allowed_values(filters, "min_key", &domain) {
        None => None,
        Some(values) => match values.span() {
            Some(span) => Some(span.end - 1),
            None => return FragmentRanges::empty(),
        },
    };
    let lowest_end = allowed_values(filters, "end_key", &domain)
        // 2^32 is an end and outside the domain: with no other value allowed it is the only one.
        .map(|values| values.span().map_or(1 << 32, |span| span.start));
    let m = highest_start.unwrap_or((1 << 32) - 1);
    let k = lowest_end.unwrap_or(1).saturating_sub(1);
    FragmentRanges::from_ranges(std::iter::once(k.min(m)..k.max(m) + 1))
}

fn batch(schema: &SchemaRef, objects: &[TreeObject]) -> Result<RecordBatch> {
    let long = |of: &dyn Fn(&TreeObject) -> Option<u64>| -> ArrayRef {
        Arc::new(objects.iter().map(of).collect::<UInt64Array>())
    };
    let short = |of: &dyn Fn(&TreeObject) -> Option<u32>| -> ArrayRef {
        Arc::new(objects.iter().map(of).collect::<UInt32Array>())
    };
    let text = |of: &dyn Fn(&TreeObject) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(objects.iter().map(of)))
    };
    batch_of(schema, objects.len(), |name| {
        Ok(match name {
            "path" => text(&|o| o.path.clone()),
            "base_id" => short(&|o| o.base_id),
            "height" => short(&|o| Some(o.height)),
            "min_key" => long(&|o| Some(o.range.start)),
            "end_key" => long(&|o| Some(o.range.end)),
            "num_keys" => long(&|o| Some(o.counts.fragments)),
            "total_rows" => long(&|o| Some(o.counts.total_rows)),
            "visible_rows" => long(&|o| Some(o.counts.visible_rows)),
            "num_children" => short(&|o| Some(o.num_children)),
            "object_size" => long(&|o| o.object_size),
            "buffered_mutations" => long(&|o| o.buffered),
            "materialized_through" => long(&|o| o.watermark),
            "location" => text(&|o| o.location.clone()),
            name => return Err(unknown_column(name)),
        })
    })
}
