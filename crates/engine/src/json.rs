//! Reads JSON from untrusted sources without building values that are not needed.

pub mod scan;

use serde::Deserialize;

/// What JSON has for space.
const SPACE: [char; 4] = [' ', '\n', '\r', '\t'];

/// JSON that does not have the expected shape. Names the place and never the
/// content: serde's own message would quote the offending value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the expected JSON, at line {line}, column {column}")]
pub struct ShapeError {
    /// Line within the value, from 1.
    pub line: usize,
    /// Column within the line, from 1; 0 where a whole value is at fault.
    pub column: usize,
}

/// Reads an object; serde by itself would take an array for a struct as well.
pub(crate) fn object<'a, T: Deserialize<'a>>(raw: &'a str) -> Result<T, ShapeError> {
    if !raw.trim_start_matches(SPACE).starts_with('{') {
        return Err(ShapeError { line: 1, column: 1 });
    }
    serde_json::from_str(raw)
        .map_err(|error| ShapeError { line: error.line(), column: error.column() })
}
