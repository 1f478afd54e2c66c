//! Keeps the readings of the last minute, and makes snapshots of them.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::history::History;
use super::readings::{ModelReading, Reading};
use super::snapshot::{self, Snapshot};
use super::{INTERVAL, READING_INTERVAL, send_time};
use crate::core::Core;

/// The time over which percentiles and hit ratios are computed.
pub(super) const WINDOW: Duration = Duration::from_secs(60);

/// Number of readings that are kept: one for each [`READING_INTERVAL`] of the window, and one at
/// its beginning.
const KEPT: usize = (WINDOW.as_secs() / READING_INTERVAL.as_secs()) as usize + 1;

/// The readings of the last minute.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    /// The oldest first.
    kept: VecDeque<Reading>,
    /// The newest one, which may also be among those that are kept.
    newest: Option<Reading>,
}

/// Two readings of one model, and the time between them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span<'a> {
    /// The earlier one.
    pub(super) from: &'a ModelReading,
    /// The later one.
    pub(super) to: &'a ModelReading,
    /// The time between them.
    pub(super) seconds: f64,
}

/// What was counted of one model lately.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spans<'a> {
    /// About [`WINDOW`], for percentiles and ratios.
    pub(super) minute: Span<'a>,
    /// At least [`READING_INTERVAL`], for rates.
    pub(super) seconds: Span<'a>,
}

impl Sampler {
    /// Reads the counters; if the reading is to be kept, adds a point to the history too.
    pub(super) fn read(&mut self, core: &Core, is_kept: bool, history: &Mutex<History>) {
        let now = Instant::now();
        self.newest = Some(Reading::new(core, now));
        if !is_kept {
            return;
        }
        history.lock().unwrap_or_else(PoisonError::into_inner).add(self, core);
        self.kept.extend(self.newest.take());
        // It is read again at the next snapshot; until then the kept one is as new.
        while self.kept.len() > KEPT {
            self.kept.pop_front();
        }
    }

    /// What was counted of a model lately; `None` before the second reading, or for a model that
    /// has just been added.
    pub(super) fn spans(&self, model: &str) -> Option<Spans<'_>> {
        let newest = self.newest.as_ref().or(self.kept.back())?;
        let to = newest.model(model)?;
        let known =
            self.kept.iter().filter_map(|reading| Some((reading.at, reading.model(model)?)));
        let known = known.filter(|(at, _)| *at < newest.at);
        let span = |(at, from): (Instant, _)| Span {
            from,
            to,
            seconds: newest.at.saturating_duration_since(at).as_secs_f64(),
        };
        let long_ago =
            |(at, _): &(Instant, _)| newest.at.saturating_duration_since(*at) >= READING_INTERVAL;
        let minute = known.clone().next().map(span)?;
        // The last of those that are long enough ago, or the first of all.
        let seconds = known.clone().filter(long_ago).last().map(span).unwrap_or(minute);
        Some(Spans { minute, seconds })
    }

    /// A snapshot as a server-sent event.
    pub(super) fn snapshot(&self, core: &Core) -> Bytes {
        event(&snapshot::snapshot(self, core))
    }
}

/// Frames a snapshot as an event, which says when the next one comes.
fn event(snapshot: &Snapshot) -> Bytes {
    let json = serde_json::to_string(snapshot).unwrap_or_default();
    let members = json.strip_prefix('{').unwrap_or_default();
    // As long as the framing and the number are.
    const FRAME_BYTES: usize = 60;
    let next_in = send_time(json.len() + FRAME_BYTES).max(INTERVAL).as_millis();
    format!("event: snapshot\ndata: {{\"next_in_ms\":{next_in},{members}\n\n").into()
}
