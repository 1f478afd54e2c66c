//! Counts HTTP/2 frames (RFC 9113, section 4.1); only their nine-byte headers are read.
//!
//! The HTTP library bounds header blocks, their continuations, empty and small DATA frames, and
//! streams that are reset before their request or because of a protocol error. Two floods remain
//! that cost the router more than the client: requests that are cancelled after they began, and
//! frames that need a reply or have no effect.

use std::time::{Duration, Instant};

use super::Position;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
const END_STREAM: u8 = 1;

const FRAME_HEADER_BYTES: usize = 9;

/// Number of resets that a client may send in any case. Beyond them, it may cancel as many requests as
/// engines answer for it to the end. Requests that cost nothing, such as those for health, buy none.
const RESETS_FREE: u32 = 100;

/// The period in which a client may spend one budget on frames that carry nothing.
const PERIOD: Duration = Duration::from_secs(10);

/// The budget: 1,000 such frames, or 1,000,000 window updates, of which a careful client sends two
/// for every event of a stream.
const BUDGET: u32 = 1_000_000;
const IDLE_FRAME_COST: u32 = 1_000;
const WINDOW_UPDATE_COST: u32 = 1;

/// The frames of a connection.
#[derive(Debug, Default)]
pub(super) struct Frames {
    /// The part of the current frame's header that has arrived.
    header: [u8; FRAME_HEADER_BYTES],
    header_bytes: usize,
    /// Number of missing bytes of the current frame's payload.
    payload_left: usize,
    /// Whether a header block is open, so that only its continuation may follow.
    in_block: bool,
    /// The highest stream on which a request has begun.
    last_stream: u32,
    resets: u32,
    cost: u32,
    /// When the current budget began.
    since: Option<Instant>,
    /// Whether the current frame is the last one.
    flooded: bool,
}

impl Frames {
    /// Checks the next bytes, and counts the header blocks that begin. `work` is the number of requests
    /// for engines that are being answered, or have been to their end.
    ///
    /// # Errors
    /// A limit is exceeded: the number of bytes up to the end of a frame. It is possible that all
    /// given bytes pass and the first of the next bytes does not.
    pub(super) fn feed(
        &mut self,
        bytes: &[u8],
        heads: &mut u32,
        work: impl Fn() -> u32,
        now: impl Fn() -> Instant,
    ) -> Result<(), usize> {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            if self.payload_left > 0 {
                let taken = self.payload_left.min(rest.len());
                self.payload_left -= taken;
                at += taken;
                continue;
            }
            if self.flooded && self.header_bytes == 0 {
                return Err(at);
            }
            let taken = (FRAME_HEADER_BYTES - self.header_bytes).min(rest.len());
            self.header[self.header_bytes..][..taken].copy_from_slice(&rest[..taken]);
            self.header_bytes += taken;
            at += taken;
            if self.header_bytes == FRAME_HEADER_BYTES {
                self.header_bytes = 0;
                self.begun(heads, &work, &now);
            }
        }
        match self.flooded && self.payload_left == 0 && self.header_bytes == 0 {
            true => Err(bytes.len()),
            false => Ok(()),
        }
    }

    fn begun(&mut self, heads: &mut u32, work: impl Fn() -> u32, now: impl Fn() -> Instant) {
        let [a, b, c, kind, flags, s, t, u, v] = self.header;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        self.payload_left = length;
        match kind {
            HEADERS => {
                *heads = heads.wrapping_add(1);
                self.in_block = flags & END_HEADERS == 0;
                self.headers_on(u32::from_be_bytes([s & 0x7f, t, u, v]));
            }
            CONTINUATION => self.in_block &= flags & END_HEADERS == 0,
            DATA if length > 0 || flags & END_STREAM != 0 => {}
            WINDOW_UPDATE => self.spend(WINDOW_UPDATE_COST, now),
            RST_STREAM => {
                self.resets = self.resets.saturating_add(1);
                self.flooded |= self.resets > RESETS_FREE.saturating_add(work());
            }
            _ => self.spend(IDLE_FRAME_COST, now),
        }
    }

    /// A header block begins on a stream: a request, or its trailers, which do not add to the
    /// budget.
    fn headers_on(&mut self, stream: u32) {
        let is_new = stream % 2 == 1 && stream > self.last_stream;
        if is_new {
            self.last_stream = stream;
            // A request may come with a priority and a window update or two.
            self.cost = self.cost.saturating_sub(IDLE_FRAME_COST);
        }
    }

    fn spend(&mut self, cost: u32, now: impl Fn() -> Instant) {
        self.cost = self.cost.saturating_add(cost);
        let since = *self.since.get_or_insert_with(&now);
        if self.cost > BUDGET {
            // The clock is read only here.
            let now = now();
            self.flooded |= now.saturating_duration_since(since) < PERIOD;
            self.since = Some(now);
            self.cost = 0;
        }
    }

    pub(super) fn position(&self) -> Position {
        let in_headers = self.payload_left > 0 && matches!(self.header[3], HEADERS | CONTINUATION);
        match (self.in_block || in_headers, self.payload_left + self.header_bytes) {
            (true, _) => Position::Head,
            (false, 0) => Position::Between,
            (false, _) => Position::Body,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame_on(stream: u32, kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let mut bytes = vec![0, (payload >> 8) as u8, payload as u8, kind, flags];
        bytes.extend(stream.to_be_bytes());
        bytes.resize(9 + payload, 7);
        bytes
    }

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        frame_on(1, kind, flags, payload)
    }

    /// Number of frames that pass, of `count`, sent at this pace.
    fn passing(frame: &[u8], count: usize, pace: Duration) -> usize {
        passing_each(|_| frame.to_vec(), count, pace)
    }

    /// The same for different frames.
    fn passing_each(each: impl Fn(u32) -> Vec<u8>, count: usize, pace: Duration) -> usize {
        passing_beside(0, each, count, pace)
    }

    /// The same for a client with so many requests that engines answer.
    fn passing_beside(
        work: u32,
        each: impl Fn(u32) -> Vec<u8>,
        count: usize,
        pace: Duration,
    ) -> usize {
        let start = Instant::now();
        let mut frames = Frames::default();
        let passes =
            |i: &u32| frames.feed(&each(*i), &mut 0, || work, || start + pace * *i).is_ok();
        (0..u32::try_from(count).unwrap_or(u32::MAX)).take_while(passes).count()
    }

    #[test]
    fn frames_without_data_are_limited() {
        let quick = Duration::from_micros(1);
        let slow = Duration::from_millis(20);
        for (what, frame) in
            [("ping", frame(6, 0, 8)), ("settings", frame(4, 0, 0)), ("empty", frame(0, 0, 0))]
        {
            assert!((900..=1100).contains(&passing(&frame, 5000, quick)), "{what}");
            assert_eq!(passing(&frame, 5000, slow), 5000, "{what}");
        }
        assert_eq!(passing(&frame(0, 0, 100), 5000, quick), 5000, "data");
        assert_eq!(passing(&frame(8, 0, 4), 100_000, quick), 100_000, "window updates");
        assert!(passing(&frame(8, 0, 4), 2_000_000, quick) < 1_100_000, "window updates");
    }

    #[test]
    fn as_many_requests_may_be_cancelled_as_are_answered_by_engines() {
        let request = |stream| frame_on(stream, HEADERS, 5, 10);
        let reset = |stream| frame_on(stream, RST_STREAM, 0, 4);
        let cancelled = |i: u32| [request(2 * i + 1), reset(2 * i + 1)].concat();
        assert_eq!(passing_each(cancelled, 500, Duration::ZERO), 100);
        assert_eq!(passing_beside(250, cancelled, 500, Duration::ZERO), 350);
        // Requests alone buy nothing.
        let half = |i: u32| [request(4 * i + 1), request(4 * i + 3), reset(4 * i + 1)].concat();
        assert_eq!(passing_each(half, 500, Duration::ZERO), 100);
    }

    #[test]
    fn trailers_are_not_counted_as_requests() {
        let cancelled = |i: u32| {
            let stream = 2 * i + 1;
            let head = frame_on(stream, HEADERS, END_HEADERS, 10);
            let trailers = frame_on(stream, HEADERS, END_HEADERS | END_STREAM, 10);
            [head, trailers, frame_on(stream, RST_STREAM, 0, 4)].concat()
        };
        assert_eq!(passing_each(cancelled, 500, Duration::ZERO), 100);
        // Trailers do not add to the budget either.
        let pinged = |_| [frame_on(1, HEADERS, 5, 10), frame_on(0, 6, 0, 8)].concat();
        assert!(passing_each(pinged, 5000, Duration::from_micros(1)) < 1100);
    }

    #[test]
    fn the_accepted_part_of_a_refused_input_ends_with_a_frame() {
        let ping = frame(6, 0, 8);
        let many = ping.repeat(2000);
        for cut in [1, 7, 9, 10, 16, 17, 1000] {
            let mut frames = Frames::default();
            let mut passed = 0;
            for piece in many.chunks(cut) {
                match frames.feed(piece, &mut 0, || 0, Instant::now) {
                    Ok(()) => passed += piece.len(),
                    Err(good) => {
                        passed += good;
                        break;
                    }
                }
            }
            assert!(passed < many.len() && passed % ping.len() == 0, "{cut}: {passed}");
        }
    }

    #[test]
    fn a_header_block_is_open_until_its_last_frame() {
        let mut frames = Frames::default();
        let mut heads = 0;
        let block =
            [frame(HEADERS, 0, 3), frame(CONTINUATION, 0, 3), frame(CONTINUATION, END_HEADERS, 3)];
        for (i, byte) in block.concat().into_iter().enumerate() {
            assert_eq!(frames.feed(&[byte], &mut heads, || 0, Instant::now), Ok(()));
            let expected = match i {
                0..8 => Position::Body,
                35 => Position::Between,
                _ => Position::Head,
            };
            assert_eq!(frames.position(), expected, "{i}");
        }
        assert_eq!(heads, 1);
    }
}
