//! Finds the end of an engine's reply on its connection: RFC 9112, sections 6
//! and 7. Ambiguous framing is refused.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes, BytesMut};
use http::StatusCode;

mod date;

pub use date::HttpDate;

/// Maximum number of header fields of a reply.
const FIELDS_MAX: usize = 100;
/// Maximum size of a reply's head in bytes.
pub const HEAD_MAX_BYTES: usize = 32 << 10;
/// Maximum size in bytes of a chunk-size line, and of all trailers together.
pub const LINES_MAX_BYTES: usize = 8 << 10;

/// Maximum number of interim replies (1xx) before one reply. A proxy that sends one every few
/// seconds while an engine works stays far below.
pub const INTERIM_MAX: u32 = 256;

/// Why bytes are not a valid reply: they are not HTTP, are ambiguous, or have no end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The head of the reply cannot be read.
    #[error("sent a head that is not HTTP")]
    Head,
    /// The head is longer than [`HEAD_MAX_BYTES`], or has more than 100 fields.
    #[error("sent a head of more than 32 KiB or 100 fields")]
    HeadTooLong,
    /// More than [`INTERIM_MAX`] interim replies, or [`HEAD_MAX_BYTES`] of them.
    #[error("sent too many interim responses (1xx)")]
    Interim,
    /// Status 101, which was not asked for.
    #[error("switched to another protocol")]
    Switched,
    /// A transfer coding other than `chunked`.
    #[error("sent its reply in a transfer coding other than chunked")]
    Coding,
    /// The `content-length` is not a number, or two values differ.
    #[error("sent a content-length that cannot be understood")]
    Length,
    /// A chunk size, or the end of a chunk, is invalid.
    #[error("sent a body whose chunks cannot be read")]
    Chunks,
}

/// The head of a reply.
#[derive(Debug)]
pub struct Head {
    /// The status code of the reply.
    pub status: StatusCode,
    /// How the end of the body is found.
    pub framing: Framing,
    /// Whether the connection may serve another request after this reply.
    pub keeps: bool,
    /// The field `date`, if it has the usual form.
    pub date: Option<HttpDate>,
    /// The field `retry-after`, if it is a number of seconds.
    pub retry_after_s: Option<u32>,
}

/// How the end of a reply's body is found.
#[derive(Debug, PartialEq, Eq)]
pub enum Framing {
    /// The body ends after this number of further bytes.
    Length(u64),
    /// The body ends with its last chunk.
    Chunked(Chunks),
    /// The body ends when the connection is closed.
    UntilClose,
}

/// The interim replies (1xx) that came before a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interim {
    count: u32,
    bytes: usize,
}

impl Interim {
    /// Whether no interim reply has been read.
    pub fn is_empty(self) -> bool {
        self.count == 0
    }

    fn take(&mut self, bytes: usize) -> Result<(), Malformed> {
        self.count += 1;
        self.bytes += bytes;
        let fits = self.count <= INTERIM_MAX && self.bytes <= HEAD_MAX_BYTES;
        if fits { Ok(()) } else { Err(Malformed::Interim) }
    }
}

/// Parses the head of a reply, and the interim replies before it, from the bytes read so far;
/// `None` if more bytes are needed. `interim` counts over all calls for one reply.
///
/// # Errors
/// The bytes are not HTTP, switch to another protocol, or are too long.
pub fn begun(read: &mut BytesMut, interim: &mut Interim) -> Result<Option<Head>, Malformed> {
    while !read.is_empty() {
        let found = head(read)?;
        // The limit does not depend on how the bytes were split into reads.
        if found.as_ref().map_or(read.len(), |(bytes, _)| *bytes) > HEAD_MAX_BYTES {
            return Err(Malformed::HeadTooLong);
        }
        let Some((bytes, head)) = found else { break };
        read.advance(bytes);
        match head.status.as_u16() {
            101 => return Err(Malformed::Switched),
            100..200 => interim.take(bytes)?,
            _ => return Ok(Some(head)),
        }
    }
    Ok(None)
}

/// Parses a head; also returns its length in bytes.
fn head(bytes: &[u8]) -> Result<Option<(usize, Head)>, Malformed> {
    let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut response = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let parsed = config.parse_response_with_uninit_headers(&mut response, bytes, &mut fields);
    let httparse::Status::Complete(length) = parsed.map_err(|error| match error {
        httparse::Error::TooManyHeaders => Malformed::HeadTooLong,
        _ => Malformed::Head,
    })?
    else {
        return Ok(None);
    };
    let code = response.code.ok_or(Malformed::Head)?;
    let status = StatusCode::from_u16(code).map_err(|_| Malformed::Head)?;
    let mut head_fields =
        FramingFields { keeps: response.version == Some(1), ..FramingFields::default() };
    for field in response.headers.iter() {
        head_fields.take(field.name, field.value)?;
    }
    let framing = if matches!(status.as_u16(), 100..200 | 204 | 304) {
        Framing::Length(0)
    } else if head_fields.is_chunked {
        // A head with both suggests that a proxy frames the body in another way.
        head_fields.keeps &= head_fields.length.is_none();
        Framing::Chunked(Chunks::default())
    } else {
        head_fields.length.map_or(Framing::UntilClose, Framing::Length)
    };
    let FramingFields { keeps, date, retry_after_s, .. } = head_fields;
    Ok(Some((length, Head { status, framing, keeps, date, retry_after_s })))
}

/// The framing fields of a head.
#[derive(Default)]
struct FramingFields {
    length: Option<u64>,
    is_chunked: bool,
    keeps: bool,
    date: Option<HttpDate>,
    retry_after_s: Option<u32>,
}

impl FramingFields {
    fn take(&mut self, name: &str, value: &[u8]) -> Result<(), Malformed> {
        if name.eq_ignore_ascii_case("content-length") {
            let length = number(value, 10).ok_or(Malformed::Length)?;
            if self.length.is_some_and(|other| other != length) {
                return Err(Malformed::Length);
            }
            self.length = Some(length);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            // The router requested no other coding, and since RFC 9112 `identity` is none: the end
            // of such a body would be a guess. A body is not chunked twice.
            let is_chunked = value.trim_ascii().eq_ignore_ascii_case(b"chunked");
            if !is_chunked || std::mem::replace(&mut self.is_chunked, true) {
                return Err(Malformed::Coding);
            }
        } else if name.eq_ignore_ascii_case("connection") {
            let mut words = value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
            self.keeps &= !words.any(|word| word.eq_ignore_ascii_case(b"close"));
        } else if name.eq_ignore_ascii_case("date") {
            self.date = HttpDate::of(value);
        } else if name.eq_ignore_ascii_case("retry-after") {
            self.retry_after_s = number(value, 10).and_then(|seconds| seconds.try_into().ok());
        }
        Ok(())
    }
}

/// Parses text that has only digits.
fn number(text: &[u8], radix: u32) -> Option<u64> {
    let text = std::str::from_utf8(text.trim_ascii()).ok()?;
    // `from_str_radix` also accepts a sign.
    let is_plain = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_plain.then(|| u64::from_str_radix(text, radix).ok())?
}

/// Decodes a chunked body.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Chunks {
    next: NextPart,
    /// Number of trailer bytes so far.
    trailers: usize,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum NextPart {
    /// The line with the size of the next chunk.
    #[default]
    Size,
    /// This number of bytes of a chunk.
    Data(u64),
    /// The line end after a chunk's data.
    DataEnd,
    Trailer,
    Nothing,
}

/// The result of reading a body.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// Some bytes of the body.
    Data(Bytes),
    /// More bytes must be read from the connection.
    More,
    /// The body has ended.
    End,
}

impl Chunks {
    /// Whether the last chunk and the trailers have been read.
    fn have_ended(&self) -> bool {
        self.next == NextPart::Nothing
    }

    /// The next piece of the bytes that were read.
    fn next(&mut self, read: &mut BytesMut) -> Result<Piece, Malformed> {
        loop {
            match self.next {
                NextPart::Size => {
                    let Some(line) = line(read)? else { return Ok(Piece::More) };
                    let size = line.split(|byte| *byte == b';').next().unwrap_or_default();
                    self.next = match number(size, 16).ok_or(Malformed::Chunks)? {
                        0 => NextPart::Trailer,
                        bytes => NextPart::Data(bytes),
                    };
                }
                NextPart::Data(_) if read.is_empty() => return Ok(Piece::More),
                NextPart::Data(left) => {
                    let data = read.split_to(read.len().min(bounded(left))).freeze();
                    let left = left - data.len() as u64;
                    self.next = if left == 0 { NextPart::DataEnd } else { NextPart::Data(left) };
                    return Ok(Piece::Data(data));
                }
                NextPart::DataEnd => {
                    match read.get(..2) {
                        None if b"\r\n".starts_with(&read[..]) => return Ok(Piece::More),
                        Some(b"\r\n") => read.advance(2),
                        _ => return Err(Malformed::Chunks),
                    }
                    self.next = NextPart::Size;
                }
                NextPart::Trailer => {
                    let Some(line) = line(read)? else { return Ok(Piece::More) };
                    self.trailers += line.len();
                    if line.is_empty() {
                        self.next = NextPart::Nothing;
                    } else if self.trailers > LINES_MAX_BYTES {
                        return Err(Malformed::Chunks);
                    }
                }
                NextPart::Nothing => return Ok(Piece::End),
            }
        }
    }
}

/// A line without its line end; `None` if the line is incomplete.
fn line(read: &mut BytesMut) -> Result<Option<Bytes>, Malformed> {
    let end = memchr::memchr(b'\n', read);
    if end.unwrap_or(read.len()) > LINES_MAX_BYTES {
        return Err(Malformed::Chunks);
    }
    let Some(end) = end else { return Ok(None) };
    let line = read.split_to(end + 1).freeze();
    line.strip_suffix(b"\r\n").map(|text| Some(line.slice_ref(text))).ok_or(Malformed::Chunks)
}

fn bounded(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl Framing {
    /// Whether the body is complete.
    pub fn has_ended(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(chunks) => chunks.have_ended(),
            Self::UntilClose => false,
        }
    }

    /// Whether the body is complete if the connection ends now.
    pub fn ends_with_connection(&self) -> bool {
        self.has_ended() || *self == Self::UntilClose
    }

    /// Number of bytes still missing; 0 if unknown.
    pub fn left(&self) -> usize {
        match self {
            Self::Length(left) => bounded(*left),
            Self::Chunked(_) | Self::UntilClose => 0,
        }
    }

    /// The next piece of the bytes that were read.
    ///
    /// # Errors
    /// The body does not match its head, or is ambiguous.
    pub fn next(&mut self, read: &mut BytesMut) -> Result<Piece, Malformed> {
        match self {
            Self::Length(0) => Ok(Piece::End),
            Self::Chunked(chunks) => chunks.next(read),
            _ if read.is_empty() => Ok(Piece::More),
            Self::UntilClose => Ok(Piece::Data(read.split().freeze())),
            Self::Length(left) => {
                let data = read.split_to(read.len().min(bounded(*left))).freeze();
                *left -= data.len() as u64;
                Ok(Piece::Data(data))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<Option<Head>, Malformed> {
        let text = format!("{}\r\n\r\n", text.replace('\n', "\r\n"));
        begun(&mut text.as_bytes().into(), &mut Interim::default())
    }

    #[test]
    fn a_reply_ends_where_its_head_says() {
        let of = |text| read(text).map(|head| head.map(|head| (head.framing, head.keeps)));
        let chunked = || Framing::Chunked(Chunks::default());
        for (text, framing, keeps) in [
            ("HTTP/1.1 200 OK\nContent-Length: 7", Framing::Length(7), true),
            ("HTTP/1.1 200 OK\ncontent-length: 7\ncontent-length: 7", Framing::Length(7), true),
            ("HTTP/1.1 200 OK\ncontent-length: 7\nconnection: x, Close", Framing::Length(7), false),
            ("HTTP/1.0 200 OK\ncontent-length: 7", Framing::Length(7), false),
            ("HTTP/1.1 204 No\ncontent-length: 7", Framing::Length(0), true),
            ("HTTP/1.1 200 OK\ntransfer-encoding: Chunked", chunked(), true),
            ("HTTP/1.1 200 OK\ntransfer-encoding: chunked\ncontent-length: 3", chunked(), false),
        ] {
            assert_eq!(of(text), Ok(Some((framing, keeps))), "{text}");
        }
        assert_eq!(of("HTTP/1.1 200 OK\nx: y").unwrap().unwrap().0, Framing::UntilClose);
    }

    #[test]
    fn ambiguous_framing_is_refused() {
        for (text, why) in [
            ("HTTP/1.1 200 OK\ncontent-length: 7\ncontent-length: 8", Malformed::Length),
            ("HTTP/1.1 200 OK\ncontent-length: +7", Malformed::Length),
            ("HTTP/1.1 200 OK\ncontent-length: 7, 7", Malformed::Length),
            ("HTTP/1.1 200 OK\ncontent-length:", Malformed::Length),
            ("HTTP/1.1 200 OK\ncontent-length: 99999999999999999999", Malformed::Length),
            ("HTTP/1.1 200 OK\ntransfer-encoding: identity\ncontent-length: 7", Malformed::Coding),
            ("HTTP/1.1 200 OK\ntransfer-encoding: gzip", Malformed::Coding),
            ("HTTP/1.1 200 OK\ntransfer-encoding: gzip, chunked", Malformed::Coding),
            ("HTTP/1.1 200 OK\ntransfer-encoding: chunked, chunked", Malformed::Coding),
            (
                "HTTP/1.1 200 OK\ntransfer-encoding: chunked\ntransfer-encoding: chunked",
                Malformed::Coding,
            ),
            ("HTTP/1.1 101 Switching\nupgrade: x", Malformed::Switched),
            ("HTTP/2 200 OK", Malformed::Head),
            ("HTTP/1.1 000 OK", Malformed::Head),
            ("{}", Malformed::Head),
        ] {
            assert_eq!(read(text).err(), Some(why), "{text}");
        }
        let half = &b"HTTP/1.1 200 OK\r\ncontent-le"[..];
        assert!(begun(&mut half.into(), &mut Interim::default()).unwrap().is_none());
        for body in ["\r\n", "g\r\n", "-1\r\n", "3\r\nabcd\r\n", "3\nabc\r\n", "+3\r\n"] {
            let mut chunks = Chunks::default();
            let mut read = BytesMut::from(body);
            let end = loop {
                match chunks.next(&mut read) {
                    Ok(Piece::Data(_)) => {}
                    end => break end,
                }
            };
            assert_eq!(end, Err(Malformed::Chunks), "{body}");
        }
    }

    #[test]
    fn interim_replies_are_skipped_and_limited() {
        let of = |line: &str, count: usize| {
            let text = format!("HTTP/1.1 102 Processing\r\n{line}\r\n").repeat(count);
            let mut read = (text + "HTTP/1.1 204 No\r\n\r\n").as_bytes().into();
            begun(&mut read, &mut Interim::default()).map(|head| head.map(|head| head.status))
        };
        let no_content = Ok(Some(StatusCode::NO_CONTENT));
        assert_eq!(of("", INTERIM_MAX as usize), no_content);
        assert_eq!(of("", INTERIM_MAX as usize + 1), Err(Malformed::Interim));
        let link = format!("link: {}\r\n", "x".repeat(4 << 10));
        assert_eq!(of(&link, 7), no_content);
        assert_eq!(of(&link, 8), Err(Malformed::Interim));
        // The count covers several reads.
        let mut interim = Interim::default();
        let one = &b"HTTP/1.1 102 Processing\r\n\r\n"[..];
        let read =
            |interim: &mut Interim| begun(&mut one.into(), interim).map(|head| head.is_none());
        for _ in 0..INTERIM_MAX {
            assert_eq!(read(&mut interim), Ok(true));
        }
        assert_eq!(read(&mut interim), Err(Malformed::Interim));
    }

    #[test]
    fn the_limit_of_a_head_does_not_depend_on_the_reads() {
        let of = |bytes: usize| {
            let frame = "HTTP/1.1 204 No\r\nx: \r\n\r\n".len();
            format!("HTTP/1.1 204 No\r\nx: {}\r\n\r\n", "y".repeat(bytes - frame))
        };
        let interim = "HTTP/1.1 102 Processing\r\n\r\n";
        for (bytes, fits) in [(HEAD_MAX_BYTES, true), (HEAD_MAX_BYTES + 1, false)] {
            for step in [1 << 20, 9000, 4096] {
                let text = [interim, &of(bytes), "rest"].concat();
                let (mut read, mut interim) = (BytesMut::new(), Interim::default());
                let mut pieces = text.as_bytes().chunks(step);
                let found = loop {
                    match pieces.next() {
                        Some(piece) => read.extend_from_slice(piece),
                        None => break Ok(None),
                    }
                    match begun(&mut read, &mut interim) {
                        Ok(None) => {}
                        found => break found,
                    }
                };
                assert_eq!(found.is_ok_and(|head| head.is_some()), fits, "{bytes} by {step}");
            }
        }
    }

    proptest! {
        #[test]
        fn a_chunked_body_is_decoded_alike_for_any_split(
            parts in prop::collection::vec("[a-z]{1,40}", 0..6), step in 1_usize..30,
            tail in prop::sample::select(vec!["\r\n", "x: y\r\n\r\n"]),
        ) {
            let mut text = String::new();
            for part in &parts {
                text += &format!("{:X};q=1\r\n{part}\r\n", part.len());
            }
            text += &format!("0\r\n{tail}HTTP/1.1");
            let (mut chunks, mut read, mut found) = (Chunks::default(), BytesMut::new(), Vec::new());
            for piece in text.as_bytes().chunks(step) {
                read.extend_from_slice(piece);
                while let Piece::Data(data) = chunks.next(&mut read).unwrap() {
                    found.extend_from_slice(&data);
                }
            }
            prop_assert!(chunks.have_ended());
            prop_assert_eq!(found, parts.concat().into_bytes());
            prop_assert_eq!(&read[..], b"HTTP/1.1");
        }

        #[test]
        fn no_bytes_cause_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _reply = begun(&mut BytesMut::from(&bytes[..]), &mut Interim::default());
            let (mut chunks, mut read) = (Chunks::default(), BytesMut::from(&bytes[..]));
            while let Ok(Piece::Data(data)) = chunks.next(&mut read) {
                prop_assert!(!data.is_empty());
            }
        }
    }
}
