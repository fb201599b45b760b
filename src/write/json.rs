//! JSON columns: text on its way in, a binary form where it is stored.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, LargeBinaryArray};
use arrow::compute::cast;
use arrow::datatypes::Field;
use lance_arrow::json::{encode_json, is_json_field};

use crate::error::{Error, Result};

/// Values for `field` as they are stored: cast to its type, and text made JSON where it is a column of
/// that. Planners that know no more than the stored type make bytes of text; what is in the stored form
/// already, as a query of another JSON column gives it, stays.
///
/// # Errors
/// [`Error::InvalidInput`] for bytes that are neither; [`Error::DataFusion`] for a cast that fails.
pub(crate) fn stored(field: &Field, values: &ArrayRef) -> Result<ArrayRef> {
    let values = cast(values, field.data_type())
        .map_err(|e| Error::datafusion(format!("cannot set {}", field.name()), e))?;
    let Some(bytes) = values
        .as_binary_opt::<i64>()
        .filter(|_| is_json_field(field))
    else {
        return Ok(values);
    };
    if bytes.iter().flatten().all(is_stored) {
        return Ok(values);
    }
    let encoded = bytes.iter().map(|value| {
        let Some(value) = value.filter(|value| !is_stored(value)) else {
            return Ok(value.map(<[u8]>::to_vec));
        };
        let text = std::str::from_utf8(value).map_err(|e| e.to_string());
        let json = text.and_then(|text| encode_json(text).map_err(|e| e.to_string()));
        json.map(Some).map_err(|e| {
            Error::invalid(format!(
                "{} is a JSON column and was given something else: {e}",
                field.name()
            ))
        })
    });
    let encoded = encoded.collect::<Result<Vec<_>>>()?;
    let encoded: LargeBinaryArray = encoded.iter().map(Option::as_deref).collect();
    Ok(Arc::new(encoded))
}

/// Whether these bytes are JSON in the stored form. That begins with a word whose upper bits say
/// array, object or scalar; as text it would begin with `@`, with a space and a NUL, or not be text.
fn is_stored(bytes: &[u8]) -> bool {
    match bytes.first_chunk::<4>() {
        Some([first, second, ..]) => match first & 0xf0 {
            0x80 | 0x40 => true,
            0x20 => *first == 0x20 && *second == 0,
            _ => false,
        },
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::StringArray;
    use arrow::datatypes::DataType;

    fn json_field() -> Field {
        let name = ("ARROW:extension:name".to_string(), "lance.json".to_string());
        Field::new("doc", DataType::LargeBinary, true).with_metadata([name].into())
    }

    #[test]
    fn text_becomes_json_once() {
        let texts = [r#"{"a":[1,null]}"#, "[]", " 7", "\"x\"", "null", "@", "{"];
        let (good, bad) = texts.split_at(5);
        let values: ArrayRef = Arc::new(StringArray::from(good.to_vec()));
        let once = stored(&json_field(), &values).expect("JSON");
        assert!(once.as_binary::<i64>().iter().flatten().all(is_stored));
        assert_eq!(&stored(&json_field(), &once).expect("JSON"), &once);
        for text in bad {
            let values: ArrayRef = Arc::new(StringArray::from(vec![*text]));
            let error = stored(&json_field(), &values).expect_err(text);
            assert!(
                error.to_string().contains("doc is a JSON column"),
                "{error}"
            );
        }
    }

    #[test]
    fn other_columns_are_only_cast() {
        let values: ArrayRef = Arc::new(StringArray::from(vec!["{", "7"]));
        let field = Field::new("b", DataType::LargeBinary, true);
        let bytes = stored(&field, &values).expect("bytes");
        assert_eq!(bytes.as_binary::<i64>().value(0), b"{");
    }
}
