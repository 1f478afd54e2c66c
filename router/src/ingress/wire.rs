//! Checks the bytes of a client before the HTTP library reads them.
//!
//! The library reads HTTP leniently in places: it prefers `Transfer-Encoding` to
//! `Content-Length`, accepts bare line feeds, and answers any number of pings. A proxy
//! before this router may read the same bytes differently. So ambiguous bytes are refused, and frames
//! without content have a budget. Bytes that pass are canonical: every parser reads them the same.

use std::time::Instant;

mod h1;
mod h2;

use h1::Heads;
use h2::Frames;

/// What an HTTP/2 client says first; RFC 9113, section 3.4.
pub(super) const PREFACE: [u8; 24] = *b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Why a connection's bytes do not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offence {
    /// They can be read in more than one way.
    Framing,
    /// There is too much of what costs work and carries nothing.
    Flood,
}

/// What does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// How many of the bytes that were shown may still be read: they end before the message
    /// or frame at fault.
    pub(super) good_bytes: usize,
    /// Why.
    pub(super) offence: Offence,
}

/// Where a connection is, as far as its bytes tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Position {
    /// Between messages.
    Between,
    /// In a request's head.
    Head,
    /// In a request's body, or in an HTTP/2 frame that is none.
    Body,
}

/// The bytes of one connection, up to now.
#[derive(Debug)]
pub(super) struct Wire {
    reader: Reader,
    /// Heads that have begun: tells one from the next.
    heads: u32,
}

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

#[derive(Debug)]
enum Reader {
    /// So many bytes of the preface have come, and nothing else.
    Unknown(usize),
    One(Heads),
    Two(Box<Frames>),
}

impl Wire {
    /// A new connection.
    pub(super) fn new() -> Self {
        Self { reader: Reader::Unknown(0), heads: 0 }
    }

    /// Looks at the next bytes.
    ///
    /// # Errors
    /// If not all of them pass; then nothing that follows may be read.
    pub(super) fn feed(&mut self, bytes: &[u8], now: impl Fn() -> Instant) -> Result<(), Refusal> {
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
                // What looked like the preface was the beginning of a first line.
                let mut heads = Heads::default();
                let first = heads.feed(&PREFACE[..seen + same], &mut self.heads);
                self.reader = Reader::One(heads);
                first.map_err(|_| Refusal { good_bytes: 0, offence: Offence::Framing })?;
            }
        }
        let before = bytes.len() - rest.len();
        let (fed, offence) = match &mut self.reader {
            Reader::One(heads) => (heads.feed(rest, &mut self.heads), Offence::Framing),
            Reader::Two(frames) => (frames.feed(rest, &mut self.heads, now), Offence::Flood),
            Reader::Unknown(_) => (Ok(()), Offence::Framing),
        };
        fed.map_err(|good| Refusal {
            good_bytes: if good == 0 { 0 } else { before + good },
            offence,
        })
    }

    /// Bytes that the HTTP library is certain to refuse, each protocol in its own words: a
    /// 400, or a GOAWAY.
    pub(super) fn poison(&self) -> &'static [u8] {
        match &self.reader {
            // No method, header, size or line has a NUL; and what seems to be no end is not
            // looked at.
            Reader::Unknown(_) | Reader::One(_) => b"\0\r\n\r\n",
            // DATA on stream 0 is a connection error; RFC 9113, section 6.1.
            Reader::Two(_) => &[0; 9],
        }
    }

    /// What the client speaks, once that is known.
    pub(super) fn protocol(&self) -> Option<Protocol> {
        match &self.reader {
            Reader::Unknown(_) => None,
            Reader::One(_) => Some(Protocol::Http1),
            Reader::Two(_) => Some(Protocol::Http2),
        }
    }

    /// Where it is.
    pub(super) fn position(&self) -> Position {
        match &self.reader {
            Reader::Unknown(_) => Position::Head,
            Reader::One(heads) => heads.position(),
            Reader::Two(frames) => frames.position(),
        }
    }

    /// Heads that have begun, modulo 2^32.
    pub(super) fn heads(&self) -> u32 {
        self.heads
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_preface_is_known_however_it_is_cut() {
        for cut in 0..PREFACE.len() {
            let mut wire = Wire::new();
            wire.feed(&PREFACE[..cut], Instant::now).unwrap();
            assert_eq!(wire.position(), Position::Head, "{cut}");
            wire.feed(&PREFACE[cut..], Instant::now).unwrap();
            assert_eq!(wire.position(), Position::Between, "{cut}");
            assert_eq!(wire.poison().len(), 9);
        }
    }

    #[test]
    fn what_begins_like_the_preface_may_be_a_request() {
        for cut in 0..5 {
            let mut wire = Wire::new();
            let request = b"PRINT / HTTP/1.1\r\nhost: x\r\n\r\n";
            wire.feed(&request[..cut], Instant::now).unwrap();
            wire.feed(&request[cut..], Instant::now).unwrap();
            assert_eq!((wire.position(), wire.heads()), (Position::Between, 1), "{cut}");
        }
        let mut wire = Wire::new();
        let refused = wire.feed(b"PRI * HTTP/2.0\n\n", Instant::now).unwrap_err();
        assert_eq!(refused, Refusal { good_bytes: 0, offence: Offence::Framing });
    }
}
