//! Why a text is not the JSON that was expected, and where.

use std::str::Utf8Error;

/// The message of an error for a key that an object has twice.
pub(super) const DUPLICATE: &str = "duplicate key";

/// What the message of an error begins with that says how many members an object may have.
pub(super) const TOO_MANY: &str = "more members than ";

/// JSON that does not have the expected shape. Names the place and never the
/// content: serde's own message would quote the offending value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the expected JSON, at line {line}, column {column}")]
pub struct ShapeError {
    /// What is wrong there.
    pub fault: Fault,
    /// Line within the value, from 1; 0 if the place is not known.
    pub line: usize,
    /// Column within the line, from 1; 0 where a whole value is at fault.
    pub column: usize,
}

/// What is wrong with a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is another kind of value than was expected.
    Kind,
    /// It is not UTF-8.
    NotUtf8,
    /// An object has more members than it may have.
    TooManyMembers {
        /// The most that it may have.
        max: usize,
    },
    /// An object has a key twice. Two parsers on the way could pick different ones.
    DuplicateKey,
    /// Lists and objects are nested more than 127 levels deep.
    TooDeep,
    /// A number does not fit into a float of 64 bits.
    NumberOutOfRange,
    /// It ends before its value does.
    EndsEarly,
    /// It is not JSON.
    Syntax,
}

impl From<Utf8Error> for ShapeError {
    fn from(_: Utf8Error) -> Self {
        Self { fault: Fault::NotUtf8, line: 0, column: 0 }
    }
}

impl From<serde_json::Error> for ShapeError {
    fn from(error: serde_json::Error) -> Self {
        let message = error.to_string();
        let too_many = message.strip_prefix(TOO_MANY);
        let max = too_many.and_then(|rest| rest.split(' ').next()?.parse().ok());
        let fault = if let Some(max) = max {
            Fault::TooManyMembers { max }
        } else if message.starts_with(DUPLICATE) {
            Fault::DuplicateKey
        } else if message.starts_with("recursion limit") {
            Fault::TooDeep
        } else if message.starts_with("number out of range") {
            Fault::NumberOutOfRange
        } else if error.is_eof() {
            Fault::EndsEarly
        } else if error.is_data() {
            Fault::Kind
        } else {
            Fault::Syntax
        };
        Self { fault, line: error.line(), column: error.column() }
    }
}
