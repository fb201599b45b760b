//! Values on their way into a column: cast to what it stores, and text made JSON where it is a column
//! of that.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, LargeBinaryArray};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field};
use lance_arrow::json::{encode_json, is_json_field};

use crate::error::{Error, Result};

/// Values for `field` of `table` as they are stored. A value that the type cannot hold is an error and
/// not NULL.
///
/// Planners that know no more of a JSON column than its stored type make bytes of text; so bytes that
/// are JSON as text are taken as that, too. What is in the stored form already, as a query of another
/// JSON column gives it, stays.
///
/// # Errors
/// [`Error::InvalidInput`] for NULL where there must be none, and for what is no JSON;
/// [`Error::DataFusion`] for a value that does not fit.
pub(crate) fn stored(table: &str, field: &Field, values: &ArrayRef) -> Result<ArrayRef> {
    let name = field.name();
    let options = CastOptions {
        safe: false,
        ..Default::default()
    };
    let cast = |values: &ArrayRef| {
        cast_with_options(values, field.data_type(), &options)
            .map_err(|e| Error::datafusion(format!("a value does not fit {name} of {table}"), e))
    };
    let values = if is_json_field(field) {
        to_json(table, field, values, cast)?
    } else {
        cast(values)?
    };
    if !field.is_nullable() && values.null_count() > 0 {
        return Err(Error::invalid(format!(
            "{name} of {table} is NOT NULL and cannot be left without a value"
        )));
    }
    Ok(values)
}

fn to_json(
    table: &str,
    field: &Field,
    values: &ArrayRef,
    cast: impl Fn(&ArrayRef) -> Result<ArrayRef>,
) -> Result<ArrayRef> {
    let refused = |why: String| {
        Error::invalid(format!(
            "{} of {table} is a JSON column and was given something else: {why}",
            field.name()
        ))
    };
    let is_text = values.data_type().is_string();
    if !is_text && !values.data_type().is_binary() && *values.data_type() != DataType::Null {
        return Err(refused(values.data_type().to_string()));
    }
    let bytes = cast(values)?;
    let bytes = bytes
        .as_binary_opt::<i64>()
        .ok_or_else(|| Error::internal("JSON that is not binary"))?;
    let encoded = bytes.iter().map(|value| {
        let Some(value) = value else {
            return Ok(None);
        };
        if !is_text && is_stored(value) {
            return Ok(Some(value.to_vec()));
        }
        let text = std::str::from_utf8(value).map_err(|e| refused(e.to_string()))?;
        encode_json(text)
            .map(Some)
            .map_err(|e| refused(e.to_string()))
    });
    let encoded = encoded.collect::<Result<Vec<_>>>()?;
    let encoded: LargeBinaryArray = encoded.iter().map(Option::as_deref).collect();
    Ok(Arc::new(encoded))
}

/// Whether these bytes are JSON in the stored form: a word that says array, object or scalar and of how
/// many entries, a word for each entry with its length, and then the entries, with nothing left over.
/// No text is that: its first letters would promise more entries than there are bytes.
fn is_stored(bytes: &[u8]) -> bool {
    let (words, _) = bytes.as_chunks::<4>();
    let mut words = words.iter().map(|word| u32::from_be_bytes(*word));
    let Some(head) = words.next() else {
        return false;
    };
    let count = u64::from(head & 0x1fff_ffff);
    let entries = match head & 0xe000_0000 {
        0x8000_0000 => count,
        0x4000_0000 => count * 2,
        0x2000_0000 if count == 0 => 1,
        _ => return false,
    };
    let length = bytes.len() as u64;
    let start = 4 + 4 * entries;
    if start > length {
        return false;
    }
    let entries = usize::try_from(entries).unwrap_or(usize::MAX);
    let values: u64 = words
        .take(entries)
        .map(|entry| u64::from(entry & 0x0fff_ffff))
        .sum();
    start + values == length
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::{BinaryArray, Int64Array, StringArray};

    fn json_field() -> Field {
        let name = ("ARROW:extension:name".to_string(), "lance.json".to_string());
        Field::new("doc", DataType::LargeBinary, true).with_metadata([name].into())
    }

    #[test]
    fn text_becomes_json_once() {
        let nested = format!("[{}]", "{\"k\": [1, \"two\", {}]}, ".repeat(40) + "-0.5e3");
        for text in [
            r#"{"a":[1,null]}"#,
            "[]",
            "{}",
            " 7",
            "\"x\"",
            "null",
            "true",
            &nested,
        ] {
            let values: ArrayRef = Arc::new(StringArray::from(vec![Some(text), None]));
            let once = stored("t", &json_field(), &values).expect(text);
            assert!(is_stored(once.as_binary::<i64>().value(0)), "{text}");
            assert_eq!(&stored("t", &json_field(), &once).expect(text), &once);
            let bytes: ArrayRef = Arc::new(BinaryArray::from(vec![Some(text.as_bytes()), None]));
            assert_eq!(&stored("t", &json_field(), &bytes).expect(text), &once);
        }
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in ["@", "{", "Hello", "Lima", "@abc", "O\0\0\0", "word"] {
            let values: [ArrayRef; 2] = [
                Arc::new(StringArray::from(vec![text])),
                Arc::new(BinaryArray::from(vec![text.as_bytes()])),
            ];
            for values in values {
                let error = stored("t", &json_field(), &values).expect_err(text);
                assert!(error.to_string().contains("doc of t is a JSON"), "{error}");
            }
        }
        for number in [32, 64, 128] {
            let values: ArrayRef = Arc::new(Int64Array::from(vec![number]));
            stored("t", &json_field(), &values).expect_err("a number");
        }
        for number in [7_i64, 64, 128] {
            let bytes: ArrayRef = Arc::new(BinaryArray::from_vec(vec![&number.to_le_bytes()]));
            stored("t", &json_field(), &bytes).expect_err("bytes of a number");
        }
    }

    #[test]
    fn values_fit_or_are_refused() {
        let values: ArrayRef = Arc::new(Int64Array::from(vec![7, 100_000]));
        let small = Field::new("i", DataType::Int16, true);
        let error = stored("t", &small, &values).expect_err("too large");
        assert!(error.to_string().contains("i of t"), "{error}");
        let values: ArrayRef = Arc::new(Int64Array::from(vec![Some(7), None]));
        assert_eq!(stored("t", &small, &values).expect("fits").null_count(), 1);
        let never = Field::new("i", DataType::Int16, false);
        let error = stored("t", &never, &values).expect_err("a null");
        assert!(error.to_string().contains("NOT NULL"), "{error}");
        let text: ArrayRef = Arc::new(StringArray::from(vec!["{"]));
        let bytes = Field::new("b", DataType::LargeBinary, true);
        let bytes = stored("t", &bytes, &text).expect("bytes");
        assert_eq!(bytes.as_binary::<i64>().value(0), b"{");
    }
}
