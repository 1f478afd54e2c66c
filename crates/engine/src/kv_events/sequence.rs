//! The order of one engine's event batches: no duplicate, no unnoticed gap, and a reset whenever
//! continuity cannot be shown. Pure: messages in, actions out.
//!
//! What an engine guarantees: batches are numbered from 0 since the start of its process, and live
//! batches arrive in rising order, some of them possibly lost. A replay returns the batches from a
//! number on, as far back as the engine keeps them.
//!
//! Numbers alone cannot distinguish a restarted engine from the same one. So a replay always starts
//! at the **last batch that was delivered**, the anchor: unless exactly the same bytes come back
//! under that number, it is another process, or one that no longer has the batch.

use std::collections::VecDeque;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use super::subscription::{BufferLimits, ResetReason, SyncOutcome};

#[cfg(test)]
mod tests;

/// A batch with its number. The largest number is reserved for the end of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NumberedBatch {
    pub(super) sequence: u64,
    pub(super) payload: Bytes,
}

/// What to do next, in this order.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Deliver the batch.
    Deliver(NumberedBatch),
    /// Report that everything delivered so far is void.
    Reset(ResetReason),
    /// Start a replay, in place of a running one.
    Replay { from: u64 },
    /// Report that the known history has been delivered.
    Synced(SyncOutcome),
    /// Close the connection and connect again.
    Reconnect,
}

/// How a replay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayEnd {
    /// The replay ended with its end marker.
    Complete,
    /// The replay ended without it: no reply in time, no connection, or an invalid message.
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
        /// The batch that must come back first.
        anchor: Option<Anchor>,
        /// Whether what was delivered so far is void as soon as the replay delivers something.
        starts_over: bool,
        /// Whether something was delivered.
        progressed: bool,
    },
    Live,
}

/// The state machine of one engine's stream.
pub(super) struct Sequencer {
    has_replay: bool,
    limits: BufferLimits,
    phase: Phase,
    /// The number of the next batch; `None` if any number is accepted.
    next: Option<u64>,
    /// `None` exactly if nothing was delivered since the last reset.
    last: Option<Anchor>,
    /// The last live number on this connection.
    last_live: Option<u64>,
    /// Live batches that arrived during a replay.
    buffer: VecDeque<NumberedBatch>,
    buffered_bytes: usize,
    /// Whether `Synced` was reported for this connection.
    synced: bool,
    /// Whether the running replay only checks an idle stream.
    checking: bool,
    /// Whether a replay on this connection contained a batch that could not be decoded.
    replay_undecodable: bool,
    /// Whether batches are missing from before the oldest one that was delivered, because a replay
    /// failed. The next replay then starts from the beginning.
    incomplete: bool,
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
            incomplete: false,
        }
    }

    /// Live batches will arrive from now on.
    pub(super) fn connected(&mut self, out: &mut Vec<Action>) {
        self.disconnected();
        self.synced = false;
        self.replay_undecodable = false;
        if self.has_replay {
            self.begin_replay(out);
        } else {
            // The engine may have restarted meanwhile and, by chance, have reached exactly the
            // expected number.
            self.reset(ResetReason::Unverified, out);
            self.go_live(SyncOutcome::NoReplay, false, out);
        }
    }

    /// No batches will arrive, live or replayed.
    pub(super) fn disconnected(&mut self) {
        self.phase = Phase::Disconnected;
        self.last_live = None;
        self.checking = false;
        self.clear_buffer();
    }

    /// Nothing arrived for a while: checks that nothing was missed.
    pub(super) fn check(&mut self, out: &mut Vec<Action>) {
        if self.has_replay && matches!(self.phase, Phase::Live) {
            self.checking = true;
            self.begin_replay(out);
        }
    }

    /// Whether a replay has failed, and none has repaired this since.
    pub(super) fn is_incomplete(&self) -> bool {
        self.incomplete
    }

    /// Repeats a replay that has failed, if none is running.
    pub(super) fn retry(&mut self, out: &mut Vec<Action>) {
        if self.incomplete && matches!(self.phase, Phase::Live) {
            self.begin_replay(out);
        }
    }

    /// The number that the next live batch should have; `None` if any is accepted.
    pub(super) fn expected(&self) -> Option<u64> {
        matches!(self.phase, Phase::Live).then_some(self.next).flatten()
    }

    /// A delivered batch could not be decoded, so its changes are lost. A replay starts over,
    /// unless a replay has already contained such batches: then the engine uses another dialect,
    /// and a further replay would fail again. `sequence` is the batch's number; the resulting reset
    /// has already been reported.
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

    /// A live batch arrived.
    pub(super) fn live(&mut self, batch: NumberedBatch, out: &mut Vec<Action>) {
        let is_copy = |last: Anchor| {
            last.sequence == batch.sequence && last.fingerprint == fingerprint(&batch.payload)
        };
        let repeats = self.last_live == Some(batch.sequence);
        if repeats && matches!(self.phase, Phase::Live) && self.last.is_some_and(is_copy) {
            return;
        }
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

    /// A replayed batch arrived.
    pub(super) fn replayed(&mut self, batch: NumberedBatch, out: &mut Vec<Action>) {
        let Phase::Replaying { anchor, starts_over, progressed } = &mut self.phase else {
            return;
        };
        if std::mem::take(starts_over) {
            *progressed = true;
            self.reset(ResetReason::ReplayFailed, out);
        } else if let Some(expected) = *anchor {
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

    /// The replay has ended.
    pub(super) fn replay_ended(&mut self, end: ReplayEnd, out: &mut Vec<Action>) {
        let Phase::Replaying { anchor, starts_over, progressed } = self.phase else {
            return;
        };
        self.incomplete = match end {
            ReplayEnd::Complete => false,
            // A check that fails makes a new connection, with a replay.
            ReplayEnd::Failed => self.incomplete || !self.checking,
        };
        match end {
            ReplayEnd::Complete if anchor.is_some() || starts_over => self.restart(out),
            ReplayEnd::Complete => {
                self.next.get_or_insert(0);
                self.go_live(SyncOutcome::Replayed, progressed, out);
            }
            ReplayEnd::Failed if self.checking => {
                // Nothing is known to be lost yet: connecting again will show whether the engine is
                // gone.
                self.disconnected();
                out.push(Action::Reconnect);
            }
            ReplayEnd::Failed => {
                // On a new connection, the engine may be another process.
                if anchor.is_some() || (starts_over && !self.synced) {
                    self.reset(ResetReason::ReplayFailed, out);
                }
                self.go_live(SyncOutcome::ReplayFailed, false, out);
            }
        }
    }

    fn begin_replay(&mut self, out: &mut Vec<Action>) {
        // What is missing is older than the last batch that was delivered.
        let starts_over = self.incomplete && self.last.is_some();
        let anchor = self.last.filter(|_| !starts_over);
        self.phase = Phase::Replaying { anchor, starts_over, progressed: false };
        out.push(Action::Replay { from: anchor.map_or(0, |anchor| anchor.sequence) });
    }

    /// The engine is another process than before: starts over, and keeps the live batches, which
    /// are those of the new process.
    fn restart(&mut self, out: &mut Vec<Action>) {
        self.checking = false;
        self.reset(ResetReason::EngineRestarted, out);
        if self.synced {
            // The live connection may still be to the process before, which hangs.
            self.disconnected();
            out.push(Action::Reconnect);
        } else {
            self.begin_replay(out);
        }
    }

    /// Continues with live batches, first those in the buffer.
    fn go_live(&mut self, outcome: SyncOutcome, may_replay: bool, out: &mut Vec<Action>) {
        self.phase = Phase::Live;
        self.checking = false;
        while let Some(batch) = self.buffer.pop_front() {
            self.buffered_bytes -= batch.payload.len();
            match self.next {
                Some(next) if batch.sequence < next => continue,
                // The buffer overflowed. Further replays are made only as long as each delivers
                // something, so that this ends.
                Some(next) if batch.sequence > next && may_replay => {
                    self.buffered_bytes += batch.payload.len();
                    self.buffer.push_front(batch);
                    return self.begin_replay(out);
                }
                Some(next) if batch.sequence > next => {
                    self.incomplete = self.has_replay;
                    self.reset(ResetReason::Gap, out);
                }
                _ => {}
            }
            self.deliver(batch, out);
        }
        if !std::mem::replace(&mut self.synced, true) {
            out.push(Action::Synced(outcome));
        }
    }

    fn deliver(&mut self, batch: NumberedBatch, out: &mut Vec<Action>) {
        let NumberedBatch { sequence, payload } = &batch;
        self.next = sequence.checked_add(1);
        self.last = Some(Anchor { sequence: *sequence, fingerprint: fingerprint(payload) });
        out.push(Action::Deliver(batch));
    }

    /// Voids what was delivered, if anything was.
    fn reset(&mut self, reason: ResetReason, out: &mut Vec<Action>) {
        self.next = None;
        if self.last.take().is_some() {
            out.push(Action::Reset(reason));
        }
    }

    /// Keeps a live batch for later. The oldest ones are dropped first: a replay fetches them
    /// again, while the newest shows that some are missing.
    fn buffer(&mut self, batch: NumberedBatch) {
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
