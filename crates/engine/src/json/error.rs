//! The error for a text that is not the expected JSON, with its position.

use std::str::Utf8Error;

/// The message of the error for a duplicate key.
pub(super) const DUPLICATE: &str = "duplicate key";

/// The prefix of the message of the error for too many members; their maximum follows.
pub(super) const TOO_MANY: &str = "more members than ";

/// JSON that does not have the expected shape. Names the position and never the content: serde's
/// own message would quote the offending value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the expected JSON, at line {line}, column {column}")]
pub struct ShapeError {
    /// What is wrong at the position.
    pub fault: Fault,
    /// Line within the value, from 1; 0 if the position is unknown.
    pub line: usize,
    /// Column within the line, from 1; 0 if a whole value is at fault.
    pub column: usize,
}

/// What is wrong with a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The value is of another type than expected.
    Kind,
    /// The text is not UTF-8.
    NotUtf8,
    /// An object has too many members.
    TooManyMembers {
        /// The maximum number of members.
        max: usize,
    },
    /// An object has a key twice. Two parsers could choose different ones.
    DuplicateKey,
    /// Lists and objects are nested more than 127 levels deep.
    TooDeep,
    /// A number does not fit into a float of 64 bits.
    NumberOutOfRange,
    /// The text ends before its value is complete.
    EndsEarly,
    /// The text is not JSON.
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
