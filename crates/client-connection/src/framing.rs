//! The framing check of a connection without its socket, for comparisons with other HTTP parsers.

use std::time::Instant;

use crate::wire::{Position, WireCheck};

/// The check that a client's bytes must pass before the HTTP library reads them.
#[derive(Debug, Default)]
pub struct FramingCheck(WireCheck);

/// Bytes that do not pass the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidBytes {
    /// Number of the given bytes that pass: they end before the message with the fault.
    pub good_bytes: usize,
    /// The bytes that the HTTP library reads instead of the rest, before the end of the connection.
    pub invalid_bytes: &'static [u8],
}

impl FramingCheck {
    /// Checks the next bytes.
    ///
    /// # Errors
    /// Not all of them pass. No further bytes may be given after that.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), InvalidBytes> {
        let fed = self.0.feed(bytes, || 0, Instant::now);
        fed.map_err(|refusal| InvalidBytes {
            good_bytes: refusal.good_bytes,
            invalid_bytes: self.0.invalid_bytes(),
        })
    }

    /// Whether the last message is complete and the next one has not begun.
    #[must_use]
    pub fn is_between_messages(&self) -> bool {
        self.0.position() == Position::Between
    }

    /// Number of messages that have begun.
    #[must_use]
    pub fn begun(&self) -> u32 {
        self.0.heads()
    }
}
