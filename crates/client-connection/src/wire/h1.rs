//! Strict HTTP/1 framing (RFC 9112): lines end with CRLF, a request has one length or plain chunked
//! coding, and chunks have sizes and no extensions.
//!
//! Only the framing is checked here; everything else is left to the HTTP library. A line is
//! buffered only if it is divided by the end of a read.

use std::io::BufRead;

use super::Position;

/// Maximum length of a buffered line in bytes. The library refuses far shorter ones.
const LINE_MAX_BYTES: usize = 1 << 20;

/// Maximum number of empty lines before a request, which RFC 9112 (2.2) tells servers to ignore.
const EMPTY_LINES_MAX: u8 = 2;

const CONTENT_LENGTH: &[u8] = b"content-length";
const TRANSFER_ENCODING: &[u8] = b"transfer-encoding";

/// The heads and bodies of a connection's requests.
#[derive(Debug, Default)]
pub(super) struct Http1Framing {
    state: FramingState,
    /// The part of the current line that arrived with earlier reads.
    cut: Vec<u8>,
    head: Head,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FramingState {
    /// Before a request, or in its first line.
    #[default]
    First,
    /// In header lines.
    Fields,
    /// In a body of which this many bytes are missing.
    Body(u64),
    /// In a chunk's size: its value and its number of digits so far.
    Size(u64, u8),
    /// Before the line feed after a size.
    SizeEnd(u64),
    /// In a chunk of which this many bytes are missing.
    Chunk(u64),
    /// At CR and LF after a chunk's data.
    ChunkEnd(u8),
    /// In the lines after the last chunk.
    Trailers,
}

/// The fields of a head that determine its body's length.
#[derive(Clone, Copy, Debug, Default)]
struct Head {
    empty_lines: u8,
    length: Option<u64>,
    chunked: bool,
}

/// The bytes are ambiguous.
#[derive(Debug)]
struct AmbiguousBytes;

impl Http1Framing {
    /// Checks the next bytes, and counts the heads that begin.
    ///
    /// # Errors
    /// A message among them does not pass: the number of bytes before it.
    pub(super) fn feed(&mut self, bytes: &[u8], heads: &mut u32) -> Result<(), usize> {
        let mut rest = bytes;
        let mut begun_at = 0;
        while !rest.is_empty() {
            if self.position() == Position::Between {
                begun_at = bytes.len() - rest.len();
                *heads = heads.wrapping_add(1);
            }
            let taken = self.step(rest).map_err(|AmbiguousBytes| begun_at)?;
            rest = &rest[taken..];
        }
        Ok(())
    }

    pub(super) fn position(&self) -> Position {
        match self.state {
            FramingState::First if self.cut.is_empty() && self.head.empty_lines == 0 => {
                Position::Between
            }
            FramingState::First | FramingState::Fields => Position::Head,
            _ => Position::Body,
        }
    }

    /// Takes at least one byte.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, AmbiguousBytes> {
        match self.state {
            FramingState::First | FramingState::Fields | FramingState::Trailers => {
                return self.line(bytes);
            }
            FramingState::Body(left) => {
                let taken = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                match left - taken as u64 {
                    0 => self.state = FramingState::First,
                    left => self.state = FramingState::Body(left),
                }
                return Ok(taken);
            }
            FramingState::Chunk(left) => {
                let taken = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                match left - taken as u64 {
                    0 => self.state = FramingState::ChunkEnd(b'\r'),
                    left => self.state = FramingState::Chunk(left),
                }
                return Ok(taken);
            }
            FramingState::Size(size, digits) => {
                self.state = match (bytes[0], digits) {
                    (b'\r', 1..) => FramingState::SizeEnd(size),
                    // 15 digits are an exabyte, so no count overflows.
                    (digit, 0..15) => {
                        let digit = char::from(digit).to_digit(16).ok_or(AmbiguousBytes)?;
                        FramingState::Size(size << 4 | u64::from(digit), digits + 1)
                    }
                    _ => return Err(AmbiguousBytes),
                }
            }
            FramingState::SizeEnd(size) => {
                self.state = match (bytes[0], size) {
                    (b'\n', 0) => FramingState::Trailers,
                    (b'\n', size) => FramingState::Chunk(size),
                    _ => return Err(AmbiguousBytes),
                }
            }
            FramingState::ChunkEnd(expected) => {
                self.state = match (bytes[0], expected) {
                    (b'\r', b'\r') => FramingState::ChunkEnd(b'\n'),
                    (b'\n', b'\n') => FramingState::Size(0, 0),
                    _ => return Err(AmbiguousBytes),
                }
            }
        }
        Ok(1)
    }

    /// Takes bytes up to the end of a line, or all bytes.
    fn line(&mut self, bytes: &[u8]) -> Result<usize, AmbiguousBytes> {
        // As fast a search as the standard library offers; reading from memory cannot fail.
        let mut after = bytes;
        let taken = after.skip_until(b'\n').map_err(|_| AmbiguousBytes)?;
        let (piece, ended) = (&bytes[..taken], bytes[taken - 1] == b'\n');
        if !ended || !self.cut.is_empty() {
            if self.cut.len() + taken > LINE_MAX_BYTES {
                return Err(AmbiguousBytes);
            }
            self.cut.extend_from_slice(piece);
        }
        if ended {
            let cut = std::mem::take(&mut self.cut);
            let line = if cut.is_empty() { piece } else { &cut };
            self.ended(line.strip_suffix(b"\r\n").ok_or(AmbiguousBytes)?)?;
        }
        Ok(taken)
    }

    fn ended(&mut self, line: &[u8]) -> Result<(), AmbiguousBytes> {
        match (self.state, line) {
            (FramingState::First, []) => {
                self.head.empty_lines += 1;
                if self.head.empty_lines > EMPTY_LINES_MAX {
                    return Err(AmbiguousBytes);
                }
            }
            (FramingState::First, _) => self.state = FramingState::Fields,
            (FramingState::Trailers, []) => self.next_message(FramingState::First),
            (FramingState::Trailers, _) => {}
            (_, []) => {
                let body = match (self.head.length, self.head.chunked) {
                    (Some(_), true) => return Err(AmbiguousBytes),
                    (None, true) => FramingState::Size(0, 0),
                    (None | Some(0), false) => FramingState::First,
                    (Some(length), false) => FramingState::Body(length),
                };
                self.next_message(body);
            }
            (_, field) => self.head.field(field)?,
        }
        Ok(())
    }

    fn next_message(&mut self, state: FramingState) {
        self.state = state;
        self.head = Head::default();
    }
}

impl Head {
    fn field(&mut self, field: &[u8]) -> Result<(), AmbiguousBytes> {
        if field[0] == b' ' || field[0] == b'\t' {
            // A folded line is a part of the previous one, or a field of its own.
            return Err(AmbiguousBytes);
        }
        if let Some(value) = value_of(field, CONTENT_LENGTH)? {
            let digits = value.trim_ascii();
            let text = std::str::from_utf8(digits)
                .ok()
                .filter(|_| self.length.is_none() && digits.iter().all(u8::is_ascii_digit));
            self.length = Some(text.and_then(|text| text.parse().ok()).ok_or(AmbiguousBytes)?);
        } else if let Some(value) = value_of(field, TRANSFER_ENCODING)? {
            if self.chunked || !value.trim_ascii().eq_ignore_ascii_case(b"chunked") {
                return Err(AmbiguousBytes);
            }
            self.chunked = true;
        }
        Ok(())
    }
}

/// The value of a field with this name. A name that continues with neither a colon nor a character
/// of a name is invalid.
fn value_of<'a>(field: &'a [u8], name: &[u8]) -> Result<Option<&'a [u8]>, AmbiguousBytes> {
    match field.split_at_checked(name.len()) {
        Some((start, rest)) if start.eq_ignore_ascii_case(name) => match rest.first() {
            Some(b':') => Ok(Some(&rest[1..])),
            Some(other) if other.is_ascii_graphic() => Ok(None),
            _ => Err(AmbiguousBytes),
        },
        _ => Ok(None),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn feed(pieces: &[&[u8]]) -> Result<(Position, u32), (usize, usize)> {
        let mut heads = Http1Framing::default();
        let mut begun = 0;
        for (index, piece) in pieces.iter().enumerate() {
            heads.feed(piece, &mut begun).map_err(|good| (index, good))?;
        }
        Ok((heads.position(), begun))
    }

    fn post(fields: &str, body: &str) -> Vec<u8> {
        format!("POST / HTTP/1.1\r\nhost: x\r\n{fields}\r\n{body}").into_bytes()
    }

    #[test]
    fn valid_framing_is_accepted_and_its_end_is_found() {
        for (fields, body) in [
            ("", ""),
            ("content-length: 0\r\n", ""),
            ("Content-Length:5\r\n", "hello"),
            ("content-length-hint: 5, 6\r\ntransfer-encodings: x\r\n", ""),
            ("TRANSFER-ENCODING: Chunked\r\n", "5\r\nhello\r\n0\r\n\r\n"),
            (
                "transfer-encoding:chunked\r\n",
                "00000A\r\n0123456789\r\n1\r\n\n\r\n0\r\na: b\r\n\r\n",
            ),
        ] {
            let request = post(fields, body);
            assert_eq!(feed(&[&request]), Ok((Position::Between, 1)), "{fields}{body}");
            let twice = [request.clone(), request.clone()].concat();
            assert_eq!(feed(&[&twice]), Ok((Position::Between, 2)), "{fields}{body}");
            let cut = &request[..request.len() - 1];
            assert_ne!(feed(&[cut]).unwrap().0, Position::Between);
        }
        assert_eq!(feed(&[b"\r\nGET / HTTP/1.1\r\n\r\n"]), Ok((Position::Between, 1)));
    }

    #[test]
    fn ambiguous_framing_is_refused() {
        for (fields, body) in [
            ("content-length: 5\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"),
            ("transfer-encoding: chunked\r\ncontent-length: 5\r\n", "0\r\n\r\n"),
            ("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"),
            ("transfer-encoding: gzip, chunked\r\n", "0\r\n\r\n"),
            ("transfer-encoding: identity\r\n", ""),
            ("transfer-encoding: \x0bchunked\r\n", "0\r\n\r\n"),
            ("transfer-encoding : chunked\r\n", "0\r\n\r\n"),
            ("transfer-encoding\r\n", ""),
            ("content-length: 5\r\ncontent-length: 5\r\n", "hello"),
            ("content-length: 5\r\ncontent-length: 6\r\n", "hello"),
            ("content-length: 5, 5\r\n", "hello"),
            ("content-length: +5\r\n", "hello"),
            ("content-length: 0x5\r\n", "hello"),
            ("content-length:\r\n", "hello"),
            ("content-length: 18446744073709551616\r\n", "hello"),
            ("content-length : 5\r\n", "hello"),
            ("a: b\n", ""),
            ("a: b\r\n c\r\n", ""),
            ("a: b\r\n\tcontent-length: 5\r\n", ""),
            ("\n", ""),
            ("transfer-encoding: chunked\r\n", "5;a=b\r\nhello\r\n0\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", "5 \r\nhello\r\n0\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", "5\nhello\r\n0\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", "5\r\nhello\n0\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", "5\r\nhelloX0\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", "\r\nhello\r\n0\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", "-5\r\nhello\r\n0\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", "0000000000000005\r\nhello\r\n0\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", "0\r\na: b\n\r\n"),
        ] {
            let good = post("", "");
            let bad = post(fields, body);
            assert_eq!(feed(&[&bad]), Err((0, 0)), "{fields:?} {body:?}");
            let both = [good.clone(), bad].concat();
            assert_eq!(feed(&[&both]), Err((0, good.len())), "what precedes it passes");
        }
        assert!(feed(&[b"\n"]).is_err());
        assert!(feed(&[b"\r\n\r\n\r\nGET / HTTP/1.1\r\n\r\n"]).is_err());
    }

    proptest! {
        /// The result does not depend on how a connection's bytes are divided into reads.
        #[test]
        fn the_result_does_not_depend_on_how_bytes_are_split(
            parts in prop::collection::vec(prop::sample::select(vec![
                "GET / HTTP/1.1\r\n", "a: b\r\n", "\r\n", "content-length: 3\r\n", "abc", "\n",
                "transfer-encoding: chunked\r\n", "3\r\nabc\r\n", "0\r\n\r\n", "0\r\n", " ", "\r",
            ]), 0..12),
            cuts in prop::collection::vec(1_usize..9, 1..40),
        ) {
            let bytes = parts.concat().into_bytes();
            let mut pieces = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break }
                let (piece, after) = rest.split_at((*cut).min(rest.len()));
                pieces.push(piece);
                rest = after;
            }
            match (feed(&[&bytes]), feed(&pieces)) {
                (Ok(whole), Ok(cut)) => prop_assert_eq!(whole, cut),
                (whole, cut) => prop_assert!(whole.is_err() && cut.is_err(), "{whole:?} {cut:?}"),
            }
        }
    }
}
