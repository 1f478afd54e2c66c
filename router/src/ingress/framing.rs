//! The framing check of a connection without its socket, for comparisons with other parsers of HTTP.

use std::time::Instant;

use super::wire::{Position, Wire};

/// What a client's bytes must pass before the HTTP library reads them.
#[derive(Debug)]
pub struct FramingCheck(Wire);

/// Bytes that do not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// How many of the bytes that were fed do pass: they end before the message at fault.
    pub good_bytes: usize,
    /// What the HTTP library reads instead of the others, before the end of the connection.
    pub poison: &'static [u8],
}

impl Default for FramingCheck {
    fn default() -> Self {
        Self::new()
    }
}

impl FramingCheck {
    /// A new connection.
    #[must_use]
    pub fn new() -> Self {
        Self(Wire::new())
    }

    /// Looks at the next bytes.
    ///
    /// # Errors
    /// If not all of them pass. No bytes may be fed after that.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        let fed = self.0.feed(bytes, Instant::now);
        fed.map_err(|refusal| Refused { good_bytes: refusal.good_bytes, poison: self.0.poison() })
    }

    /// Whether the last message is whole and the next one has not begun.
    #[must_use]
    pub fn is_between_messages(&self) -> bool {
        self.0.position() == Position::Between
    }

    /// Messages that have begun.
    #[must_use]
    pub fn begun(&self) -> u32 {
        self.0.heads()
    }
}
