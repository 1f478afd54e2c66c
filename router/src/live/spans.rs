//! What was counted lately: the differences of the readings of the last minute.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::pace::READING_INTERVAL;
use super::readings::{CounterReading, ModelReading};

/// The time over which percentiles and hit ratios are computed.
pub(super) const WINDOW: Duration = Duration::from_secs(60);

/// Number of readings that are kept: one for each [`READING_INTERVAL`] of the window, and one at
/// its beginning.
const KEPT: usize = (WINDOW.as_secs() / READING_INTERVAL.as_secs()) as usize + 1;

/// The readings of the last minute.
#[derive(Debug, Default)]
pub(super) struct LastReadings {
    /// The oldest first.
    kept: VecDeque<CounterReading>,
    /// The newest one, unless it is the newest of those that are kept.
    newest: Option<CounterReading>,
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

impl LastReadings {
    /// Adds a reading that replaces the newest one.
    pub(super) fn add(&mut self, reading: CounterReading) {
        self.newest = Some(reading);
    }

    /// Keeps the newest reading for a minute.
    pub(super) fn keep_newest(&mut self) {
        self.kept.extend(self.newest.take());
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
        let seconds = known.clone().rfind(long_ago).map(span).unwrap_or(minute);
        Some(Spans { minute, seconds })
    }
}
