//! What comes over an engine's connection as the reply to one request. The first byte chooses where
//! it is cut into reads, and whether the connection ends after it; the rest is what comes.

use bytes::BytesMut;
use splitrail_engine_client::framing::{
    Framing, HEAD_MAX_BYTES, Head, Interim, LINES_MAX_BYTES, Malformed, Piece, begun,
};

pub(crate) fn check(data: &[u8]) {
    let [cuts, stream @ ..] = data else {
        return;
    };
    let whole = read(std::iter::once(stream));
    assert_eq!(read(stream.chunks(1)), whole, "cut after each byte");
    let length = usize::from(*cuts % 61) + 2;
    assert_eq!(read(stream.chunks(length)), whole, "cut each {length} bytes");
    assert_eq!(read(uneven(stream, (*cuts).into())), whole, "cut unevenly by {cuts}");
    whole.is_what_its_head_says(stream);
}

/// Reads of one to 32 bytes, as a number has it.
fn uneven(mut stream: &[u8], mut state: u32) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (part, rest) = stream.split_at(stream.len().min((state >> 27) as usize + 1));
        stream = rest;
        (!part.is_empty()).then_some(part)
    })
}

/// The result of a reply.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The reply ended; the bytes that follow it.
    Whole(Vec<u8>),
    /// The reply is incomplete; whether the connection may end here.
    Open { may_close: bool },
    /// The bytes are not HTTP, or can be read in two ways.
    Refused,
}

#[derive(Debug, PartialEq, Eq)]
struct ReadReply {
    /// Status, and whether the connection may be used again.
    head: Option<(u16, bool)>,
    /// How long the body is, where the head says it.
    length: Option<u64>,
    body: Vec<u8>,
    end: End,
}

/// As a connection reads: it asks for more only if what it has says nothing.
fn read<'a>(parts: impl Iterator<Item = &'a [u8]>) -> ReadReply {
    let mut answer = ReadReply {
        head: None,
        length: None,
        body: Vec::new(),
        end: End::Open { may_close: false },
    };
    let (mut held, mut framing, mut interim) = (BytesMut::new(), None, Interim::default());
    let mut parts = parts.fuse();
    loop {
        match step(&mut held, (&mut interim, &mut framing), &mut answer) {
            Ok(Step::On) => {}
            Ok(Step::More) => {
                let max = if framing.is_none() { HEAD_MAX_BYTES } else { LINES_MAX_BYTES };
                assert!(held.len() <= max, "{} bytes are held", held.len());
                let Some(part) = parts.next() else { break };
                held.extend_from_slice(part);
            }
            Ok(Step::Ended) => {
                parts.for_each(|part| held.extend_from_slice(part));
                return ReadReply { end: End::Whole(held.to_vec()), ..answer };
            }
            Err(_) => return ReadReply { end: End::Refused, ..answer },
        }
    }
    let may_close = framing.is_some_and(|framing| framing.ends_with_connection());
    ReadReply { end: End::Open { may_close }, ..answer }
}

enum Step {
    On,
    More,
    Ended,
}

fn step(
    held: &mut BytesMut,
    (interim, framing): (&mut Interim, &mut Option<Framing>),
    answer: &mut ReadReply,
) -> Result<Step, Malformed> {
    let Some(framing) = framing else {
        let Some(Head { status, framing: found, keeps, .. }) = begun(held, interim)? else {
            return Ok(Step::More);
        };
        answer.head = Some((status.as_u16(), keeps));
        if let Framing::Length(bytes) = found {
            answer.length = Some(bytes);
        }
        *framing = Some(found);
        return Ok(Step::On);
    };
    if framing.has_ended() {
        assert_eq!(framing.next(held), Ok(Piece::End));
        return Ok(Step::Ended);
    }
    Ok(match framing.next(held)? {
        Piece::Data(data) => {
            assert!(!data.is_empty(), "a piece of nothing");
            answer.body.extend_from_slice(&data);
            Step::On
        }
        Piece::More => Step::More,
        Piece::End => Step::Ended,
    })
}

impl ReadReply {
    fn is_what_its_head_says(&self, stream: &[u8]) {
        let Some((status, _)) = self.head else {
            assert!(self.body.is_empty() && !matches!(self.end, End::Whole(_)));
            return;
        };
        assert!(status >= 200, "{status} is not a reply's");
        let rest = match &self.end {
            End::Whole(rest) => rest,
            _ => return assert!(self.length.is_none_or(|bytes| (self.body.len() as u64) < bytes)),
        };
        assert!(stream.ends_with(rest), "what follows a reply is what came");
        match self.length {
            Some(bytes) => {
                assert_eq!(self.body.len() as u64, bytes);
                assert!(stream.ends_with(&[&self.body[..], rest].concat()));
            }
            // Nothing but a last chunk ends what has no length.
            None => {
                let taken = &stream[..stream.len() - rest.len()];
                assert!(taken.ends_with(b"\r\n") && self.body == unchunked(taken), "{self:?}");
            }
        }
    }
}

/// The body before a last chunk, found from the end of the head by the sizes alone.
fn unchunked(taken: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    let mut at = end_of_heads(taken);
    loop {
        let line = taken[at..].iter().position(|byte| *byte == b'\n').expect("a line") + at;
        let size = taken[at..line].split(|byte| *byte == b';').next().unwrap_or_default();
        let size = std::str::from_utf8(size.trim_ascii()).expect("digits");
        let size = usize::from_str_radix(size, 16).expect("a size");
        if size == 0 {
            return body;
        }
        body.extend_from_slice(&taken[line + 1..line + 1 + size]);
        at = line + 1 + size + 2;
    }
}

/// Where the body begins: heads are lines up to an empty one, and interim ones come first.
fn end_of_heads(taken: &[u8]) -> usize {
    let mut at = 0;
    let mut status: Option<Vec<u8>> = None;
    loop {
        let end = taken[at..].iter().position(|byte| *byte == b'\n').expect("a line") + at;
        let line = taken[at..end].trim_ascii_end();
        at = end + 1;
        match &status {
            None if line.is_empty() => {}
            None => status = Some(line.to_vec()),
            Some(first) if line.is_empty() => {
                if !first.starts_with(b"HTTP/1.1 1") && !first.starts_with(b"HTTP/1.0 1") {
                    return at;
                }
                status = None;
            }
            Some(_) => {}
        }
    }
}
