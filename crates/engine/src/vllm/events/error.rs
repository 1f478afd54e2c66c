//! Why a payload could not be decoded. No error carries payload contents.

/// A payload that does not say what an engine's events say.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV events, byte {offset}, {field}: {problem}")]
pub struct DecodeError {
    /// Where in the payload, in bytes from its start.
    pub offset: usize,
    /// What was being read there.
    pub field: &'static str,
    /// What is wrong with it.
    pub problem: DecodeProblem,
}

impl DecodeError {
    pub(super) fn new(offset: usize, field: &'static str, problem: DecodeProblem) -> Self {
        Self { offset, field, problem }
    }
}

/// The kinds of [`DecodeError`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeProblem {
    /// The payload ends within a value, or names a length that it cannot hold.
    #[error("the payload ends too early")]
    UnexpectedEnd,
    /// A value of another type.
    #[error("expected {expected}")]
    WrongType {
        /// The type that was expected.
        expected: &'static str,
    },
    /// A number that the field cannot hold.
    #[error("the number is out of range")]
    OutOfRange,
    /// A text that is not UTF-8.
    #[error("the text is not UTF-8")]
    NotUtf8,
    /// A field without which the rest means nothing.
    #[error("missing")]
    Missing,
    /// One of [`DecodeLimits`](super::DecodeLimits) is exceeded.
    #[error("more than the limit of {limit}")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// Values are nested deeper than allowed.
    #[error("nested too deeply")]
    TooDeep,
    /// The token list is not one block size for each hash.
    #[error("{tokens} tokens are not {blocks} blocks of {block_size}")]
    TokenCount {
        /// Tokens in the list.
        tokens: usize,
        /// Hashes that came with them.
        blocks: usize,
        /// Tokens per block.
        block_size: usize,
    },
    /// A digest too short to take a hash from.
    #[error("a block hash of {bytes} bytes")]
    HashLength {
        /// Its length.
        bytes: usize,
    },
    /// Something follows the batch.
    #[error("bytes follow the batch")]
    TrailingBytes,
}
