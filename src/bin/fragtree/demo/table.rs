//! The demo's table, written by Lance itself.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float64Array, Int64Array, RecordBatch, RecordBatchIterator, StringArray,
};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use lance::Dataset;
use lance::dataset::WriteParams;

use crate::failure::Outcome;

/// Rows of each fragment: few, because the demo is about fragments.
pub(crate) const ROWS_PER_FRAGMENT: u64 = 16;

const CITIES: [&str; 5] = [FIRST_CITY, "Lima", "Kyoto", "Accra", "Quito"];

/// A value of `city`, in a fifth of the rows.
pub(crate) const FIRST_CITY: &str = "Oslo";

/// Writes the table and returns its version.
pub(crate) async fn write(uri: &str, fragments: u32) -> Outcome<u64> {
    let schema = schema();
    let of_batches = Arc::clone(&schema);
    let batches = (0..i64::from(fragments)).map(move |fragment| batch(&of_batches, fragment));
    let params = WriteParams {
        max_rows_per_file: usize::try_from(ROWS_PER_FRAGMENT)?,
        ..Default::default()
    };
    let reader = RecordBatchIterator::new(batches, schema);
    let dataset = Dataset::write(reader, uri, Some(params)).await?;
    Ok(dataset.manifest().version)
}

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("city", DataType::Utf8, true),
        Field::new("amount", DataType::Float64, true),
    ]))
}

/// The rows of one fragment.
fn batch(schema: &SchemaRef, fragment: i64) -> Result<RecordBatch, ArrowError> {
    let rows = i64::try_from(ROWS_PER_FRAGMENT).unwrap_or(i64::MAX);
    let ids = fragment * rows..(fragment + 1) * rows;
    let cities = ids
        .clone()
        .zip(CITIES.iter().cycle())
        .map(|(_, city)| Some(*city));
    // Quarters add up exactly, in whatever order they are read.
    let amounts = ids.clone().map(|id| (id % 400) as f64 / 4.0);
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(ids.clone())),
        Arc::new(cities.collect::<StringArray>()),
        Arc::new(Float64Array::from_iter_values(amounts)),
    ];
    RecordBatch::try_new(Arc::clone(schema), columns)
}
