//! Splits a byte stream into server-sent events of bounded size.

use std::borrow::Cow;

use bytes::{BufMut, Bytes, BytesMut};

/// The next item of a stream of events.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// The data of one event, or all its lines if events have names.
    Data(Bytes),
    /// A comment, which keeps the connection open: one line that begins with `:`.
    Comment(Bytes),
    /// `[DONE]`: the reply is complete.
    Done,
}

/// Maximum number of bytes of a comment; of a longer one, only the colon is left.
const COMMENT_MAX_BYTES: usize = 256;

/// Maximum number of bytes of comments, blank lines and events without data between two events.
/// Engines and proxies send a comment of some bytes every few seconds to keep a connection open.
const PASSED_MAX_BYTES: usize = 64 << 10;

/// Why no event can be read from the pushed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SseError {
    /// An event is longer than the bound.
    TooLong,
    /// There are too many comments between two events.
    Comments,
    /// A line of an event with a name has a carriage return before its end, where clients end a
    /// line as well: they would read other lines than the router.
    CarriageReturn,
}

/// Splits pushed bytes into events.
#[derive(Debug)]
pub struct Splitter {
    buffer: BytesMut,
    /// Bytes at the front that were searched without finding an end.
    searched: usize,
    /// Bytes that were skipped since the last event.
    passed: usize,
    max_bytes: usize,
    /// Whether events are returned with all their lines.
    whole: bool,
}

impl Splitter {
    /// A splitter for events of up to `max_bytes`.
    pub fn new(max_bytes: usize) -> Self {
        Self { buffer: BytesMut::new(), searched: 0, passed: 0, max_bytes, whole: false }
    }

    /// A splitter that returns events with all their lines.
    pub fn of_whole_events(max_bytes: usize) -> Self {
        Self { whole: true, ..Self::new(max_bytes) }
    }

    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Notes that no further bytes follow: the last event is complete, even without a blank line.
    pub fn end(&mut self) {
        self.buffer.extend_from_slice(b"\n\n");
    }

    /// The number of pushed bytes that were not returned yet.
    pub fn held_bytes(&self) -> usize {
        self.buffer.len()
    }

    /// The next complete event or comment, if there is one. If events have no names, fields other
    /// than `data` are skipped, and so are comments within an event.
    ///
    /// # Errors
    /// If an event is longer than the bound, there are too many comments before it, or it is
    /// returned with all its lines and clients would read other lines.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, SseError> {
        loop {
            let Some((end, gap)) = find_end(&self.buffer, self.searched) else {
                self.searched = self.buffer.len().saturating_sub(3);
                return if self.buffer.len() > self.max_bytes.saturating_add(2) {
                    Err(SseError::TooLong)
                } else {
                    Ok(None)
                };
            };
            if end > self.max_bytes {
                return Err(SseError::TooLong);
            }
            let event = self.buffer.split_to(end + gap).freeze();
            self.searched = 0;
            let event = event.slice(..end);
            let Some(data) = data_of(&event) else {
                self.passed += end + gap;
                if self.passed > PASSED_MAX_BYTES {
                    return Err(SseError::Comments);
                }
                if let Some(comment) = comment_of(&event) {
                    return Ok(Some(Piece::Comment(comment)));
                }
                continue;
            };
            self.passed = 0;
            if self.whole && has_lone_return(&event) {
                return Err(SseError::CarriageReturn);
            }
            if data.as_ref() == b"[DONE]" {
                return Ok(Some(Piece::Done));
            }
            let data = match data {
                _ if self.whole => event,
                Cow::Borrowed(data) => event.slice_ref(data),
                Cow::Owned(data) => data.into(),
            };
            return Ok(Some(Piece::Data(data)));
        }
    }
}

/// The first comment among the lines of something without data. It ends before a carriage return,
/// where clients end a line as well.
fn comment_of(event: &Bytes) -> Option<Bytes> {
    let mut lines = event.split(|byte| matches!(byte, b'\n' | b'\r'));
    let comment = lines.find(|line| line.starts_with(b":"))?;
    let fits = comment.len() <= COMMENT_MAX_BYTES && std::str::from_utf8(comment).is_ok();
    Some(event.slice_ref(if fits { comment } else { &comment[..1] }))
}

/// Whether a carriage return stands elsewhere than at the end of a line. The line feed after the
/// last line is not part of the event.
fn has_lone_return(event: &[u8]) -> bool {
    let follows = |at: usize| event.get(at + 1).copied();
    memchr::memchr_iter(b'\r', event).any(|at| follows(at).is_some_and(|byte| byte != b'\n'))
}

/// The place and the length of the blank line that ends an event.
fn find_end(buffer: &[u8], from: usize) -> Option<(usize, usize)> {
    let mut at = from;
    while let Some(found) = memchr::memchr(b'\n', &buffer[at..]) {
        let newline = at + found;
        match buffer.get(newline + 1..) {
            Some([b'\n', ..]) => return Some((newline, 2)),
            Some([b'\r', b'\n', ..]) => return Some((newline, 3)),
            _ => at = newline + 1,
        }
    }
    None
}

/// The value of a line's field, if that is `data`.
fn value_of(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let data = line.strip_prefix(b"data:")?;
    Some(data.strip_prefix(b" ").unwrap_or(data))
}

/// The joined `data` lines of an event; `None` if it has none.
pub fn data_of(event: &[u8]) -> Option<Cow<'_, [u8]>> {
    // Most events have one line.
    if memchr::memchr(b'\n', event).is_none() {
        return value_of(event).map(Cow::Borrowed);
    }
    let mut values = event.split(|byte| *byte == b'\n').filter_map(value_of);
    let first = values.next()?;
    let Some(second) = values.next() else { return Some(Cow::Borrowed(first)) };
    let joined = [first, second].into_iter().chain(values).collect::<Vec<_>>().join(&b'\n');
    Some(Cow::Owned(joined))
}

/// Writes data as the field `data` of an event. Data of several lines gets the field name before
/// each line; clients join the lines again.
pub fn put_data(out: &mut impl BufMut, data: &[u8]) {
    const NAME: &[u8] = b"data: ";
    out.put_slice(NAME);
    let mut rest = data;
    // Most data has one line. A carriage return alone also ends a line.
    while let Some(end) = memchr::memchr2(b'\n', b'\r', rest) {
        let is_pair = rest[end..].starts_with(b"\r\n");
        out.put_slice(&rest[..end]);
        out.put_slice(b"\n");
        out.put_slice(NAME);
        rest = &rest[end + 1 + usize::from(is_pair)..];
    }
    out.put_slice(rest);
}

/// The event with other data; its other lines are unchanged.
pub fn with_data(event: &[u8], data: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(event.len() + data.len());
    let mut placed = false;
    for line in event.split(|byte| *byte == b'\n') {
        let is_data = value_of(line).is_some();
        if is_data && std::mem::replace(&mut placed, true) {
            continue;
        }
        if !out.is_empty() {
            out.extend_from_slice(b"\n");
        }
        match is_data {
            true => put_data(&mut out, data),
            false => out.extend_from_slice(line),
        }
    }
    out.freeze()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(chunks: &[&[u8]]) -> Vec<Piece> {
        let mut splitter = Splitter::new(1 << 20);
        let mut pieces = Vec::new();
        for chunk in chunks {
            splitter.push(chunk);
            while let Some(piece) = splitter.next_piece().unwrap() {
                pieces.push(piece);
            }
        }
        pieces
    }

    #[test]
    fn comments_line_ends_and_joined_lines_are_understood() {
        let pieces = all(&[
            b": ping\n\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:1\ndata: 2\n\ndata: [DONE]\n\n",
        ]);
        let data = |text: &'static str| Piece::Data(Bytes::from_static(text.as_bytes()));
        let ping = Piece::Comment(Bytes::from_static(b": ping"));
        assert_eq!(pieces, [ping, data("{\"a\":1}"), data("1\n2"), Piece::Done]);
    }

    #[test]
    fn whole_events_keep_their_names_and_comments_stand_alone() {
        let mut splitter = Splitter::of_whole_events(1 << 10);
        splitter.push(
            b": ping\n\nevent: a\nid: 1\ndata: {}\n\nevent: b\r\ndata: 2\r\n\r\ndata: [DONE]\n\n",
        );
        let mut next = || splitter.next_piece().unwrap().unwrap();
        let data = |text: &'static str| Piece::Data(Bytes::from_static(text.as_bytes()));
        assert_eq!(next(), Piece::Comment(Bytes::from_static(b": ping")));
        assert_eq!(next(), data("event: a\nid: 1\ndata: {}"));
        assert_eq!(next(), data("event: b\r\ndata: 2\r"));
        assert_eq!(next(), Piece::Done);
    }

    #[test]
    fn a_whole_event_whose_lines_clients_would_read_otherwise_is_refused() {
        for (event, is_refused) in [
            ("event: a\rdata: 1\r\revent: b\ndata: 2\n\n", true),
            ("event: a\ndata: {\r\r}\n\n", true),
            ("event: a\r\r\ndata: 1\n\n", true),
            ("event: a\r\ndata: 1\r\n\r\n", false),
        ] {
            let mut splitter = Splitter::of_whole_events(1 << 10);
            splitter.push(event.as_bytes());
            let refused = splitter.next_piece() == Err(SseError::CarriageReturn);
            assert_eq!(refused, is_refused, "{event:?}");
        }
    }

    #[test]
    fn each_line_of_data_has_its_name() {
        let put = |data: &str| {
            let mut out = Vec::new();
            put_data(&mut out, data.as_bytes());
            String::from_utf8(out).unwrap()
        };
        assert_eq!(put("{}"), "data: {}");
        assert_eq!(put("{\n\"a\":\r1\r\n}"), "data: {\ndata: \"a\":\ndata: 1\ndata: }");
        let event = with_data(b"event: a\ndata: 1\ndata: 2\nid: 3", b"4\n5");
        assert_eq!(event, "event: a\ndata: 4\ndata: 5\nid: 3");
    }

    #[test]
    fn a_comment_is_one_short_line() {
        let long = format!(": {}\n\n", "x".repeat(COMMENT_MAX_BYTES));
        for (bytes, comment) in [
            (": keep-alive\r\n\r\n", Some(": keep-alive")),
            ("retry: 3000\n: a\n: b\n\n", Some(": a")),
            (": a\rdata: {}\n\n", Some(": a")),
            (&long, Some(":")),
            ("retry: 3000\nid: 7\n\n", None),
        ] {
            let comment = comment.map(|text| Piece::Comment(Bytes::from_static(text.as_bytes())));
            assert_eq!(all(&[bytes.as_bytes()]), Vec::from_iter(comment), "{bytes:?}");
        }
    }

    #[test]
    fn the_last_event_needs_no_blank_line() {
        let data = |text: &'static str| Piece::Data(Bytes::from_static(text.as_bytes()));
        for (bytes, pieces) in [
            ("data: 1\n\ndata: [DONE]", vec![data("1"), Piece::Done]),
            ("data: 1\r\n", vec![data("1")]),
            ("data: 1\n\n", vec![data("1")]),
        ] {
            let mut splitter = Splitter::new(100);
            splitter.push(bytes.as_bytes());
            splitter.end();
            let read = std::iter::from_fn(|| splitter.next_piece().unwrap());
            assert_eq!(read.collect::<Vec<_>>(), pieces, "{bytes:?}");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut splitter = Splitter::new(100);
        // An event of exactly the maximum length, and the blank line after it.
        splitter.push(&[b'x'; 103]);
        assert_eq!(splitter.next_piece(), Err(SseError::TooLong));
    }

    #[test]
    fn comments_are_passed_on_but_not_without_end() {
        for filler in [": ping\n\n", "\n\n", "event: x\n\n", ": ping\r\n\r\n"] {
            let mut splitter = Splitter::new(1 << 20);
            let few = filler.repeat(PASSED_MAX_BYTES / filler.len());
            let mut next = |bytes: &[u8]| {
                splitter.push(bytes);
                loop {
                    match splitter.next_piece() {
                        Ok(Some(Piece::Comment(_))) => {}
                        other => return other,
                    }
                }
            };
            for _ in 0..3 {
                assert_eq!(next(few.as_bytes()), Ok(None), "{filler:?}");
                let event = Piece::Data(Bytes::from_static(b"x"));
                assert_eq!(next(b"data: x\n\n"), Ok(Some(event)), "{filler:?}");
            }
            assert_eq!(next(few.as_bytes()), Ok(None), "{filler:?}");
            let more = [filler; 2].concat();
            assert_eq!(next(more.as_bytes()), Err(SseError::Comments), "{filler:?}");
        }
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(
            events in proptest::collection::vec("[a-z{}\":é]{0,20}", 1..6),
            cuts in proptest::collection::vec(0usize..200, 0..8),
        ) {
            let text: String = events.iter().map(|e| format!("data: {e}\n\n")).collect();
            let bytes = text.as_bytes();
            let mut places: Vec<usize> = cuts.iter().map(|c| c % (bytes.len() + 1)).collect();
            places.extend([0, bytes.len()]);
            places.sort_unstable();
            let chunks: Vec<&[u8]> = places.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
            prop_assert_eq!(all(&chunks), all(&[bytes]));
            prop_assert_eq!(all(&[bytes]).len(), events.len());
        }
    }
}
