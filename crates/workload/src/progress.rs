//! Whether a worker makes progress with the legs that it was sent. The probes of an engine may be
//! answered although its generation hangs, for example in a collective operation.
//!
//! A worker **stalls** when one of its legs has waited for [`PATIENCE`] times as long as predicted,
//! and at least for [`PATIENCE_MIN`], while the worker gave no sign of work: no event or end of any
//! leg, and no growth of the engine's own counters of tokens. It also stalls when a leg was given up
//! without such a sign. A prompt may take that long by itself; so a worker that stalls is asked for
//! one token, whose arrival is a sign of work.
//!
//! A leg counts only while the router waits for the engine. While a slow client keeps the router from
//! reading, the engine's silence is not known.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How many times as long as predicted a leg waits before its worker stalls.
pub const PATIENCE: u32 = 4;
/// The shortest wait that can show that a worker stalls: below it, jitter is no evidence.
pub const PATIENCE_MIN: Duration = Duration::from_secs(1);
/// The shortest wait for a first token from a worker whose costs have not been learned.
const PATIENCE_UNLEARNED: Duration = Duration::from_secs(10);
/// The wait for a whole reply from a worker that has not completed one yet.
const WHOLE_REPLY_UNLEARNED: Duration = Duration::from_secs(60);
/// The shortest wait for a whole reply from an engine that can be asked for one token: its counters of
/// tokens are read every second or so, and the answer tells a long reply from a hang.
const WHOLE_REPLY_MIN: Duration = Duration::from_secs(2);
/// The weight of a new duration of a whole reply in the moving average.
const WEIGHT: f64 = 0.2;

/// The predicted times of one leg.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LegTimes {
    /// Until the first output.
    pub first: Duration,
    /// Between two outputs.
    pub step: Duration,
    /// Whether the predictions come from observations of the worker.
    pub are_learned: bool,
}

/// What the router waits for on behalf of a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Awaited {
    /// Nothing of this engine: the leg has not been sent, its client does not read, or another engine
    /// has to work first.
    Nothing = 0,
    /// The first output, or the reply of a prefill leg.
    FirstOutput = 1,
    /// The next event of a stream.
    NextOutput = 2,
    /// The end of a reply that is not streamed.
    WholeReply = 3,
}

/// The progress of one worker.
#[derive(Debug, Default)]
pub struct Progress {
    /// Number of signs of work. It only grows.
    signs: AtomicU64,
    state: Mutex<ProgressState>,
}

#[derive(Debug, Default)]
struct ProgressState {
    /// The legs on the worker. Bounded by the number of requests in flight.
    legs: BTreeMap<u64, WatchedLeg>,
    next: u64,
    /// The number of signs at the last look.
    signs: u64,
    /// When a look last found new signs.
    sign_at: Option<Instant>,
    /// Since when a leg that was given up had waited, if there was no sign since.
    suspect_since: Option<Instant>,
    /// Moving average of the seconds that whole replies take; 0 before the first.
    whole_reply_seconds: f64,
}

#[derive(Debug)]
struct WatchedLeg {
    awaited: Arc<AtomicU8>,
    times: LegTimes,
    /// Since when looks have found the router waiting for the leg.
    since: Option<Instant>,
}

/// One leg on a worker. Dropping it ends the watch.
#[derive(Debug)]
pub struct LegProgress {
    worker: Arc<Progress>,
    number: u64,
    awaited: Arc<AtomicU8>,
    begun: Instant,
}

impl Progress {
    /// Begins to watch a leg, which the router does not wait for yet.
    pub fn begin(self: &Arc<Self>, times: LegTimes, now: Instant) -> LegProgress {
        let awaited = Arc::new(AtomicU8::new(Awaited::Nothing as u8));
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        let leg = WatchedLeg { awaited: Arc::clone(&awaited), times, since: None };
        state.legs.insert(number, leg);
        LegProgress { worker: Arc::clone(self), number, awaited, begun: now }
    }

    /// Records a sign of work that belongs to no leg, such as a growth of the engine's counters.
    pub fn record_sign(&self) {
        self.signs.fetch_add(1, Relaxed);
    }

    /// Number of signs of work so far.
    pub fn signs(&self) -> u64 {
        self.signs.load(Relaxed)
    }

    /// When the worker last gave a sign of work, as the last look has found.
    pub fn sign_at(&self) -> Option<Instant> {
        self.lock().sign_at
    }

    /// Records that a leg which had waited since `since` was given up without any sign of work
    /// meanwhile.
    pub fn suspect(&self, since: Instant) {
        self.lock().suspect_since.get_or_insert(since);
    }

    /// For how long the leg that shows that the worker stalls has waited; `None` if the worker does
    /// not stall. `can_be_asked` says whether a worker that stalls is asked for one token, before
    /// anything follows from it. Call it several times per [`PATIENCE_MIN`].
    pub fn stalled_for(&self, now: Instant, can_be_asked: bool) -> Option<Duration> {
        let signs = self.signs.load(Relaxed);
        let mut state = self.lock();
        if signs != state.signs {
            (state.signs, state.sign_at, state.suspect_since) = (signs, Some(now), None);
        }
        let sign_at = state.sign_at;
        let whole_reply = state.whole_reply_patience();
        // A long prompt may keep an engine from all other work.
        let is_first = |leg: &&WatchedLeg| leg.awaited() == Awaited::FirstOutput;
        let prompts = state.legs.values().filter(is_first).map(|leg| leg.times.patience());
        let longest_prompt = prompts.max().unwrap_or_default();
        let suspect_since = state.suspect_since;
        let mut longest = suspect_since.map(|since| now.saturating_duration_since(since));
        for leg in state.legs.values_mut() {
            let patience = match leg.awaited() {
                Awaited::Nothing => {
                    leg.since = None;
                    continue;
                }
                Awaited::FirstOutput => leg.times.patience(),
                Awaited::NextOutput => longest_prompt.max(leg.times.step * PATIENCE),
                Awaited::WholeReply if can_be_asked => leg.times.patience().max(WHOLE_REPLY_MIN),
                Awaited::WholeReply => whole_reply.max(leg.times.first.saturating_mul(PATIENCE)),
            };
            let since = *leg.since.get_or_insert(now);
            let silent = now.saturating_duration_since(sign_at.map_or(since, |at| at.max(since)));
            if silent > patience.max(PATIENCE_MIN) {
                longest = longest.max(Some(silent));
            }
        }
        longest
    }

    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProgressState {
    fn whole_reply_patience(&self) -> Duration {
        match self.whole_reply_seconds {
            0.0 => WHOLE_REPLY_UNLEARNED,
            seconds => seconds_of(seconds).saturating_mul(PATIENCE),
        }
    }

    fn learn_whole_reply(&mut self, took: Duration) {
        let (before, took) = (self.whole_reply_seconds, took.as_secs_f64());
        self.whole_reply_seconds =
            if before == 0.0 { took } else { before + WEIGHT * (took - before) };
    }
}

impl LegTimes {
    /// For how long a leg waits for its first output before its worker stalls.
    fn patience(&self) -> Duration {
        let patience = self.first.saturating_mul(PATIENCE);
        if self.are_learned { patience } else { patience.max(PATIENCE_UNLEARNED) }
    }
}

impl WatchedLeg {
    fn awaited(&self) -> Awaited {
        let all = [Awaited::FirstOutput, Awaited::NextOutput, Awaited::WholeReply];
        let number = self.awaited.load(Relaxed);
        all.into_iter().find(|one| *one as u8 == number).unwrap_or(Awaited::Nothing)
    }
}

impl LegProgress {
    /// Sets what is awaited from now on.
    pub fn set_awaited(&self, awaited: Awaited) {
        self.awaited.store(awaited as u8, Relaxed);
    }

    /// Records output of the leg. Until more is awaited, the leg says nothing of its worker.
    pub fn record_output(&self) {
        self.set_awaited(Awaited::Nothing);
        self.worker.record_sign();
    }

    /// Records the end of the leg's reply, and learns from the time that it took if it was awaited as
    /// a whole.
    pub fn record_reply(&self, now: Instant) {
        if self.awaited.load(Relaxed) == Awaited::WholeReply as u8 {
            self.worker.lock().learn_whole_reply(now.saturating_duration_since(self.begun));
        }
        self.record_output();
    }
}

impl Drop for LegProgress {
    fn drop(&mut self) {
        self.worker.lock().legs.remove(&self.number);
    }
}

fn seconds_of(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn times(first_ms: u32, are_learned: bool) -> LegTimes {
        LegTimes { first: first_ms * MS, step: 5 * MS, are_learned }
    }

    /// Looks every 100 ms from `from_ms` on; when the worker first stalls, in milliseconds.
    fn stalled_at(progress: &Progress, start: Instant, from_ms: u32, to_ms: u32) -> Option<u32> {
        let mut looks = (from_ms..=to_ms).step_by(100);
        looks.find(|ms| progress.stalled_for(start + *ms * MS, false).is_some())
    }

    #[test]
    fn a_worker_stalls_when_a_leg_waits_for_several_times_as_long_as_predicted() {
        let start = Instant::now();
        for (first_ms, are_learned, expected_ms) in
            [(10, true, 1_100), (500, true, 2_100), (10, false, 10_100), (5_000, false, 20_100)]
        {
            let progress = Arc::new(Progress::default());
            let leg = progress.begin(times(first_ms, are_learned), start);
            assert_eq!(stalled_at(&progress, start, 0, 900), None, "nothing is awaited yet");
            leg.set_awaited(Awaited::FirstOutput);
            let stalled = stalled_at(&progress, start, 1_000, 60_000);
            assert_eq!(stalled, Some(1_000 + expected_ms), "{first_ms} {are_learned}");
            drop(leg);
            assert_eq!(progress.stalled_for(start + 60_000 * MS, false), None);
        }
    }

    #[test]
    fn any_sign_of_work_is_progress_for_all_legs() {
        let (start, progress) = (Instant::now(), Arc::new(Progress::default()));
        let waits = progress.begin(times(10, true), start);
        waits.set_awaited(Awaited::FirstOutput);
        let streams = progress.begin(times(10, true), start);
        for ms in (0..3_000).step_by(500) {
            assert_eq!(stalled_at(&progress, start, ms, ms + 400), None);
            streams.set_awaited(Awaited::NextOutput);
            streams.record_output();
        }
        assert_eq!(stalled_at(&progress, start, 3_000, 3_900), None);
        progress.record_sign();
        assert_eq!(stalled_at(&progress, start, 4_000, 4_900), None, "the engine's counters grow");
        assert_eq!(stalled_at(&progress, start, 5_000, 9_000), Some(5_100));
    }

    #[test]
    fn a_client_that_does_not_read_does_not_make_its_worker_stall() {
        let (start, progress) = (Instant::now(), Arc::new(Progress::default()));
        let leg = progress.begin(times(10, true), start);
        leg.set_awaited(Awaited::FirstOutput);
        leg.record_output();
        assert_eq!(stalled_at(&progress, start, 0, 60_000), None);
        leg.set_awaited(Awaited::NextOutput);
        assert_eq!(stalled_at(&progress, start, 60_100, 90_000), Some(61_200));
    }

    #[test]
    fn a_stream_waits_for_the_prompts_of_others() {
        let (start, progress) = (Instant::now(), Arc::new(Progress::default()));
        let [prompt, stream] = [2_000, 10].map(|ms| progress.begin(times(ms, true), start));
        prompt.set_awaited(Awaited::FirstOutput);
        stream.set_awaited(Awaited::NextOutput);
        assert_eq!(stalled_at(&progress, start, 0, 60_000), Some(8_100));
    }

    #[test]
    fn a_whole_reply_may_take_several_times_as_long_as_usual() {
        let (start, progress) = (Instant::now(), Arc::new(Progress::default()));
        let leg = progress.begin(times(10, true), start);
        leg.set_awaited(Awaited::WholeReply);
        assert_eq!(stalled_at(&progress, start, 0, 90_000), Some(60_100), "nothing is known yet");
        leg.record_reply(start + 500 * MS);
        assert_eq!(progress.stalled_for(start + 90_100 * MS, false), None);
        let next = progress.begin(times(10, true), start);
        next.set_awaited(Awaited::WholeReply);
        assert_eq!(progress.stalled_for(start + 95_000 * MS, true), None);
        assert_eq!(progress.stalled_for(start + 97_000 * MS, true), None);
        assert!(progress.stalled_for(start + 97_100 * MS, true).is_some(), "it can be asked");
        assert_eq!(stalled_at(&progress, start, 97_000, 190_000), Some(97_100));
    }

    #[test]
    fn a_leg_that_was_given_up_is_remembered_until_the_next_sign_of_work() {
        let (start, progress) = (Instant::now(), Progress::default());
        assert_eq!(progress.stalled_for(start, false), None);
        progress.suspect(start);
        progress.suspect(start + 500 * MS);
        assert_eq!(progress.stalled_for(start + 700 * MS, false), Some(700 * MS));
        progress.record_sign();
        assert_eq!(progress.stalled_for(start + 800 * MS, false), None);
        assert_eq!(progress.sign_at(), Some(start + 800 * MS));
    }
}
