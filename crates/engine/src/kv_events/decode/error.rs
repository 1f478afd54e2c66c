//! Why a payload could not be decoded. No error carries payload contents.

/// A payload that is not a valid batch of KV events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV events, byte {offset}, {field}: {problem}")]
pub struct DecodeError {
    /// Position in the payload, in bytes from its start.
    pub offset: usize,
    /// The field that was being read.
    pub field: &'static str,
    /// What is wrong with the field.
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
    /// The payload ends within a value, or claims a length that does not fit.
    #[error("the payload ends too early")]
    UnexpectedEnd,
    /// The value has another type.
    #[error("expected {expected}")]
    WrongType {
        /// The type that was expected.
        expected: &'static str,
    },
    /// The number does not fit the field.
    #[error("the number is out of range")]
    OutOfRange,
    /// The text is not UTF-8.
    #[error("the text is not UTF-8")]
    NotUtf8,
    /// A required field is missing.
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
    /// A digest is too short to contain a hash.
    #[error("a block hash of {bytes} bytes")]
    HashLength {
        /// Its length.
        bytes: usize,
    },
    /// Bytes follow the batch.
    #[error("bytes follow the batch")]
    TrailingBytes,
}

impl DecodeProblem {
    /// Whether the problem is what one value says, so that what follows it can still be read.
    pub(super) fn is_of_one_value(&self) -> bool {
        !matches!(
            self,
            Self::UnexpectedEnd | Self::TooMany { .. } | Self::TooDeep | Self::TrailingBytes
        )
    }
}
