//! The order of one engine's event batches: no duplicate, no unseen gap, and a
//! reset wherever continuity cannot be shown. Pure: messages in, actions out.
//!
//! What an engine guarantees: batches are numbered from 0 with its process, and
//! live ones arrive in rising order, some perhaps dropped. A replay returns the
//! batches from a number on, as far back as the engine keeps them.
//!
//! Numbers alone cannot tell a restarted engine from the same one. So a replay
//! always starts at the **last batch that was delivered**, the anchor: unless the
//! very same bytes come back under that number, it is another process, or one
//! that has forgotten too much.

use std::collections::VecDeque;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use super::subscription::{BufferLimits, ResetReason, SyncOutcome};

#[cfg(test)]
mod tests;

/// A batch with its number. The largest number is reserved: it ends a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Numbered {
    pub(super) sequence: u64,
    pub(super) payload: Bytes,
}

/// What to do next; in the order given.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Hand the batch on.
    Deliver(Numbered),
    /// Say that all that was delivered so far is void.
    Reset(ResetReason),
    /// Start a replay, in place of one that may be under way.
    Replay { from: u64 },
    /// Say that all there was to know is delivered.
    Synced(SyncOutcome),
    /// Give up the connection and make a new one.
    Reconnect,
}

/// How a replay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayEnd {
    /// With the end marker.
    Complete,
    /// Without: no answer in time, no connection, or nonsense.
    Failed,
}

/// The batch that was delivered last.
#[derive(Clone, Copy)]
struct Anchor {
    sequence: u64,
    fingerprint: u64,
}

enum Phase {
    Disconnected,
    Replaying {
        /// The batch that has yet to come back.
        anchor: Option<Anchor>,
        /// Something was delivered.
        progressed: bool,
    },
    Live,
}

/// The state machine of one engine's stream.
pub(super) struct Sequencer {
    has_replay: bool,
    limits: BufferLimits,
    phase: Phase,
    /// The number that must come next; `None` where any may.
    next: Option<u64>,
    /// `None` exactly when nothing was delivered since the last reset.
    last: Option<Anchor>,
    /// The last live number on this connection.
    last_live: Option<u64>,
    /// Live batches that came during a replay.
    buffer: VecDeque<Numbered>,
    buffered_bytes: usize,
    /// `Synced` was said for this connection.
    synced: bool,
    /// The replay under way only checks an idle stream.
    checking: bool,
    /// A replay on this connection brought what could not be decoded.
    replay_undecodable: bool,
}

impl Sequencer {
    pub(super) fn new(has_replay: bool, limits: BufferLimits) -> Self {
        Self {
            has_replay,
            limits,
            phase: Phase::Disconnected,
            next: None,
            last: None,
            last_live: None,
            buffer: VecDeque::new(),
            buffered_bytes: 0,
            synced: false,
            checking: false,
            replay_undecodable: false,
        }
    }

    /// Live batches will come from now on.
    pub(super) fn connected(&mut self, out: &mut Vec<Action>) {
        self.disconnected();
        self.synced = false;
        self.replay_undecodable = false;
        if self.has_replay {
            self.begin_replay(out);
        } else {
            // The engine may have restarted meanwhile and, by chance, have
            // arrived at just the expected number.
            self.reset(ResetReason::Unverified, out);
            self.go_live(SyncOutcome::NoReplay, false, out);
        }
    }

    /// No batches will come, live or replayed.
    pub(super) fn disconnected(&mut self) {
        self.phase = Phase::Disconnected;
        self.last_live = None;
        self.checking = false;
        self.clear_buffer();
    }

    /// Nothing came for a while: make sure that nothing was missed.
    pub(super) fn check(&mut self, out: &mut Vec<Action>) {
        if self.has_replay && matches!(self.phase, Phase::Live) {
            self.checking = true;
            self.begin_replay(out);
        }
    }

    /// The number that the next live batch should have; `None` where any may come.
    pub(super) fn expected(&self) -> Option<u64> {
        matches!(self.phase, Phase::Live).then_some(self.next).flatten()
    }

    /// A batch that was delivered could not be decoded, and what it said is lost. A
    /// replay starts over, unless one has brought such batches before: then it is the
    /// engine's dialect, and another replay would bring them again.
    /// `sequence` is its number; the reset that it means is said already.
    pub(super) fn undecodable(&mut self, sequence: u64, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Replaying { .. } => self.replay_undecodable = true,
            Phase::Live if self.has_replay && !self.replay_undecodable => {
                if self.last.is_some_and(|last| last.sequence == sequence) {
                    self.last = None;
                }
                self.reset(ResetReason::Garbage, out);
                self.begin_replay(out);
            }
            _ => {}
        }
    }

    /// A live batch.
    pub(super) fn live(&mut self, batch: Numbered, out: &mut Vec<Action>) {
        let restarted = self.last_live.is_some_and(|last| batch.sequence <= last);
        self.last_live = Some(batch.sequence);
        match self.phase {
            Phase::Disconnected => {}
            _ if restarted => {
                self.clear_buffer();
                self.reset(ResetReason::EngineRestarted, out);
                if self.has_replay {
                    self.buffer(batch);
                    self.begin_replay(out);
                } else {
                    self.deliver(batch, out);
                }
            }
            Phase::Replaying { .. } => self.buffer(batch),
            Phase::Live => match self.next {
                Some(next) if batch.sequence < next => {}
                Some(next) if batch.sequence > next && self.has_replay => {
                    self.buffer(batch);
                    self.begin_replay(out);
                }
                Some(next) if batch.sequence > next => {
                    self.reset(ResetReason::Gap, out);
                    self.deliver(batch, out);
                }
                _ => self.deliver(batch, out),
            },
        }
    }

    /// A replayed batch.
    pub(super) fn replayed(&mut self, batch: Numbered, out: &mut Vec<Action>) {
        let Phase::Replaying { anchor, progressed } = &mut self.phase else {
            return;
        };
        if let Some(expected) = *anchor {
            if batch.sequence < expected.sequence {
                return;
            }
            *anchor = None;
            if batch.sequence == expected.sequence {
                if fingerprint(&batch.payload) != expected.fingerprint {
                    self.restart(out);
                }
                return;
            }
            *progressed = true;
            self.reset(ResetReason::ReplayTooShort, out);
        } else {
            match self.next {
                Some(next) if batch.sequence < next => return,
                Some(next) if batch.sequence > next => self.reset(ResetReason::Gap, out),
                _ => {}
            }
            if let Phase::Replaying { progressed, .. } = &mut self.phase {
                *progressed = true;
            }
        }
        self.deliver(batch, out);
    }

    /// The replay is over.
    pub(super) fn replay_ended(&mut self, end: ReplayEnd, out: &mut Vec<Action>) {
        let Phase::Replaying { anchor, progressed } = self.phase else {
            return;
        };
        match end {
            ReplayEnd::Complete if anchor.is_some() => self.restart(out),
            ReplayEnd::Complete => {
                self.next.get_or_insert(0);
                self.go_live(SyncOutcome::Replayed, progressed, out);
            }
            ReplayEnd::Failed if self.checking => {
                // Nothing is known to be lost yet: whether the engine is gone
                // shows when connecting anew.
                self.disconnected();
                out.push(Action::Reconnect);
            }
            ReplayEnd::Failed => {
                if anchor.is_some() {
                    self.reset(ResetReason::ReplayFailed, out);
                }
                self.go_live(SyncOutcome::ReplayFailed, false, out);
            }
        }
    }

    fn begin_replay(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Replaying { anchor: self.last, progressed: false };
        out.push(Action::Replay { from: self.last.map_or(0, |anchor| anchor.sequence) });
    }

    /// The engine is another process than before: start over, keeping the live
    /// batches, which are the new one's.
    fn restart(&mut self, out: &mut Vec<Action>) {
        self.checking = false;
        self.reset(ResetReason::EngineRestarted, out);
        self.begin_replay(out);
    }

    /// Goes on with live batches, those that wait first.
    fn go_live(&mut self, outcome: SyncOutcome, may_replay: bool, out: &mut Vec<Action>) {
        self.phase = Phase::Live;
        self.checking = false;
        while let Some(batch) = self.buffer.pop_front() {
            self.buffered_bytes -= batch.payload.len();
            match self.next {
                Some(next) if batch.sequence < next => continue,
                // The buffer overflowed. Replays go on only as long as each
                // brings something, so that this ends.
                Some(next) if batch.sequence > next && may_replay => {
                    self.buffered_bytes += batch.payload.len();
                    self.buffer.push_front(batch);
                    return self.begin_replay(out);
                }
                Some(next) if batch.sequence > next => self.reset(ResetReason::Gap, out),
                _ => {}
            }
            self.deliver(batch, out);
        }
        if !std::mem::replace(&mut self.synced, true) {
            out.push(Action::Synced(outcome));
        }
    }

    fn deliver(&mut self, batch: Numbered, out: &mut Vec<Action>) {
        let Numbered { sequence, payload } = &batch;
        self.next = sequence.checked_add(1);
        self.last = Some(Anchor { sequence: *sequence, fingerprint: fingerprint(payload) });
        out.push(Action::Deliver(batch));
    }

    /// Voids what was delivered, where anything was.
    fn reset(&mut self, reason: ResetReason, out: &mut Vec<Action>) {
        self.next = None;
        if self.last.take().is_some() {
            out.push(Action::Reset(reason));
        }
    }

    /// Keeps a live batch for later. The oldest give way: a replay fetches them
    /// again, while the newest is what shows that any are missing.
    fn buffer(&mut self, batch: Numbered) {
        self.buffered_bytes += batch.payload.len();
        self.buffer.push_back(batch);
        while self.buffer.len() > self.limits.max_batches
            || self.buffered_bytes > self.limits.max_bytes
        {
            match self.buffer.pop_front() {
                Some(oldest) => self.buffered_bytes -= oldest.payload.len(),
                None => break,
            }
        }
    }

    fn clear_buffer(&mut self) {
        self.buffer.clear();
        self.buffered_bytes = 0;
    }
}

fn fingerprint(payload: &[u8]) -> u64 {
    xxh3_64(payload)
}
