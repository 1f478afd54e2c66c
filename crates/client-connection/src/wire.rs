//! Checks the bytes of a client before the HTTP library reads them.
//!
//! The library is lenient in places: it prefers `Transfer-Encoding` to `Content-Length`, accepts
//! bare line feeds, and answers any number of pings. A proxy in front of this router may parse the
//! same bytes differently. So ambiguous bytes are refused, and frames without content have a
//! budget. Bytes that pass are canonical: every parser reads them in the same way.

use std::time::Instant;

mod h1;
mod h2;

use h1::Http1Framing;
use h2::Frames;

/// The first bytes of an HTTP/2 client; RFC 9113, section 3.4.
pub const PREFACE: [u8; 24] = *b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Why a connection's bytes are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offence {
    /// The bytes are ambiguous.
    Framing,
    /// There are too many frames that cost work and carry nothing.
    Flood,
}

/// A refusal of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireRefusal {
    /// Number of the given bytes that may still be read: they end before the message or frame with
    /// the fault.
    pub good_bytes: usize,
    /// The reason for the refusal.
    pub offence: Offence,
}

/// The position of a connection's bytes within its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// Between messages.
    Between,
    /// In a request's head.
    Head,
    /// In a request's body, or in an HTTP/2 frame other than a header block.
    Body,
}

/// The checked bytes of one connection.
#[derive(Debug)]
pub struct WireCheck {
    reader: Reader,
    /// Number of heads that have begun; distinguishes one from the next.
    heads: u32,
}

/// The protocol of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1, or HTTP/1.0.
    Http1,
    /// HTTP/2.
    Http2,
}

#[derive(Debug)]
enum Reader {
    /// Only this many bytes of the preface have arrived.
    Unknown(usize),
    One(Http1Framing),
    Two(Box<Frames>),
}

/// The check of a new connection.
impl Default for WireCheck {
    fn default() -> Self {
        Self { reader: Reader::Unknown(0), heads: 0 }
    }
}

impl WireCheck {
    /// Checks the next bytes. `work` is the number of requests for engines that are being answered,
    /// or have been to their end.
    ///
    /// # Errors
    /// Not all of them pass; the following ones must not be read.
    pub fn feed(
        &mut self,
        bytes: &[u8],
        work: impl Fn() -> u32,
        now: impl Fn() -> Instant,
    ) -> Result<(), WireRefusal> {
        let mut rest = bytes;
        if let Reader::Unknown(seen) = self.reader {
            let expected = &PREFACE[seen..];
            let same = expected.iter().zip(bytes).take_while(|(a, b)| a == b).count();
            rest = &bytes[same..];
            if same == expected.len() {
                self.reader = Reader::Two(Box::default());
            } else if rest.is_empty() {
                self.reader = Reader::Unknown(seen + same);
                return Ok(());
            } else {
                // The bytes that looked like the preface were the start of a first line.
                let mut heads = Http1Framing::default();
                let first = heads.feed(&PREFACE[..seen + same], &mut self.heads);
                self.reader = Reader::One(heads);
                first.map_err(|_| WireRefusal { good_bytes: 0, offence: Offence::Framing })?;
            }
        }
        let before = bytes.len() - rest.len();
        let (fed, offence) = match &mut self.reader {
            Reader::One(heads) => (heads.feed(rest, &mut self.heads), Offence::Framing),
            Reader::Two(frames) => (frames.feed(rest, &mut self.heads, work, now), Offence::Flood),
            Reader::Unknown(_) => (Ok(()), Offence::Framing),
        };
        fed.map_err(|good| WireRefusal {
            good_bytes: if good == 0 { 0 } else { before + good },
            offence,
        })
    }

    /// Bytes that the HTTP library certainly refuses, in the way of each protocol: with a 400, or
    /// with a GOAWAY.
    pub fn invalid_bytes(&self) -> &'static [u8] {
        match &self.reader {
            // No method, header, size or line contains a NUL. The empty line makes the library
            // parse what it has.
            Reader::Unknown(_) | Reader::One(_) => b"\0\r\n\r\n",
            // DATA on stream 0 is a connection error; RFC 9113, section 6.1.
            Reader::Two(_) => &[0; 9],
        }
    }

    /// The protocol of the client, once it is known.
    pub fn protocol(&self) -> Option<Protocol> {
        match &self.reader {
            Reader::Unknown(_) => None,
            Reader::One(_) => Some(Protocol::Http1),
            Reader::Two(_) => Some(Protocol::Http2),
        }
    }

    /// The current position.
    pub fn position(&self) -> Position {
        match &self.reader {
            Reader::Unknown(_) => Position::Head,
            Reader::One(heads) => heads.position(),
            Reader::Two(frames) => frames.position(),
        }
    }

    /// Number of heads that have begun, modulo 2^32.
    pub fn heads(&self) -> u32 {
        self.heads
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_http2_preface_is_recognized_in_any_pieces() {
        for cut in 0..PREFACE.len() {
            let mut wire = WireCheck::default();
            wire.feed(&PREFACE[..cut], || 0, Instant::now).unwrap();
            assert_eq!(wire.position(), Position::Head, "{cut}");
            wire.feed(&PREFACE[cut..], || 0, Instant::now).unwrap();
            assert_eq!(wire.position(), Position::Between, "{cut}");
            assert_eq!(wire.invalid_bytes().len(), 9);
        }
    }

    #[test]
    fn an_http1_request_may_begin_like_the_http2_preface() {
        for cut in 0..5 {
            let mut wire = WireCheck::default();
            let request = b"PRINT / HTTP/1.1\r\nhost: x\r\n\r\n";
            wire.feed(&request[..cut], || 0, Instant::now).unwrap();
            wire.feed(&request[cut..], || 0, Instant::now).unwrap();
            assert_eq!((wire.position(), wire.heads()), (Position::Between, 1), "{cut}");
        }
        let mut wire = WireCheck::default();
        let refused = wire.feed(b"PRI * HTTP/2.0\n\n", || 0, Instant::now).unwrap_err();
        assert_eq!(refused, WireRefusal { good_bytes: 0, offence: Offence::Framing });
    }
}
