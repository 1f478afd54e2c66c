//! The ring of recent changes with their numbers, for routers that reconnect.

use std::collections::VecDeque;
use std::sync::Arc;

use splitrail_proto::v1::{Change, Events, change};

/// Maximum number of messages that [`ChangeLog::after`] returns.
const BATCH_MAX: usize = 32;
/// Approximate size in bytes of a message and of a change, without their blocks.
const MESSAGE_BYTES: usize = 96;
const CHANGE_BYTES: usize = 72;
/// Size in bytes of a name or a hash.
const WORD_BYTES: usize = 8;

/// A position in the changes of all mirrors of this process. Later positions compare as
/// greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChangePosition {
    /// The number of the mirror in this process.
    pub(crate) generation: u64,
    /// The number of the change in that mirror; 0 before the first.
    pub(crate) sequence: u64,
}

/// The requested changes are no longer in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChangesLost;

/// A ring of changes with a limited size.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    position: ChangePosition,
    mirror_id: String,
    ring: VecDeque<Arc<Events>>,
    bytes: usize,
    bytes_max: usize,
}

impl ChangeLog {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            position: ChangePosition::default(),
            mirror_id: String::new(),
            ring: VecDeque::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// Starts a new mirror with a new id, whose changes are numbered from 1.
    pub(crate) fn start_new_mirror(&mut self) {
        self.mirror_id = format!("{:032x}", rand::random::<u128>());
        self.position = ChangePosition { generation: self.position.generation + 1, sequence: 0 };
        self.ring.clear();
        self.bytes = 0;
    }

    pub(crate) fn generation(&self) -> u64 {
        self.position.generation
    }

    pub(crate) fn mirror_id(&self) -> &str {
        &self.mirror_id
    }

    pub(crate) fn position(&self) -> ChangePosition {
        self.position
    }

    /// The number of messages in the ring, and their approximate size in bytes.
    pub(crate) fn kept(&self) -> (usize, usize) {
        (self.ring.len(), self.bytes)
    }

    /// Adds changes of one rank with the next number.
    pub(crate) fn push(&mut self, rank: u32, engine_time_s: f64, changes: Vec<Change>) {
        self.position.sequence += 1;
        let sequence = self.position.sequence;
        let events = Events { sequence, rank, engine_time_s, changes };
        self.bytes += estimated_bytes(&events);
        self.ring.push_back(Arc::new(events));
        while self.bytes > self.bytes_max {
            let Some(oldest) = self.ring.pop_front() else { break };
            self.bytes -= estimated_bytes(&oldest);
        }
    }

    /// Whether a router at `position` can continue from the ring, even if as many changes as half
    /// of the ring are added in the meantime.
    pub(crate) fn covers_with_margin(&self, position: ChangePosition) -> bool {
        let missed = self.position.sequence.checked_sub(position.sequence);
        let missed = missed.and_then(|missed| usize::try_from(missed).ok());
        let half = self.ring.len() / 2;
        position.generation == self.position.generation
            && missed.is_some_and(|missed| missed <= half)
    }

    /// Returns the next changes after `sequence`; an empty list if it is the last.
    ///
    /// # Errors
    /// If the changes are no longer in the ring, or belong to another mirror.
    pub(crate) fn after(
        &self,
        generation: u64,
        sequence: u64,
    ) -> Result<Vec<Arc<Events>>, ChangesLost> {
        let behind = self.position.sequence.checked_sub(sequence).ok_or(ChangesLost)?;
        let behind = usize::try_from(behind).map_err(|_| ChangesLost)?;
        let from = self.ring.len().checked_sub(behind).ok_or(ChangesLost)?;
        if generation != self.position.generation {
            return Err(ChangesLost);
        }
        Ok(self.ring.range(from..).take(BATCH_MAX).cloned().collect())
    }
}

/// The approximate size of a message in bytes.
fn estimated_bytes(events: &Events) -> usize {
    let words = |change: &Change| match &change.change {
        Some(change::Change::Stored(stored)) => stored.names.len() + stored.hashes.len(),
        Some(change::Change::Removed(removed)) => removed.names.len(),
        Some(change::Change::Cleared(_)) | None => 0,
    };
    let words: usize = events.changes.iter().map(words).sum();
    MESSAGE_BYTES + events.changes.len() * CHANGE_BYTES + words * WORD_BYTES
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sequences(log: &ChangeLog, generation: u64, sequence: u64) -> Result<Vec<u64>, ChangesLost> {
        let after = log.after(generation, sequence)?;
        Ok(after.iter().map(|events| events.sequence).collect())
    }

    #[test]
    fn the_change_log_returns_changes_as_far_back_as_the_ring_reaches() {
        let mut log = ChangeLog::new(4 * MESSAGE_BYTES);
        assert_eq!(sequences(&log, 0, 0), Ok(Vec::new()));
        for _ in 0..6 {
            log.push(0, 0.0, Vec::new());
        }
        assert_eq!(sequences(&log, 0, 2), Ok(vec![3, 4, 5, 6]));
        assert_eq!(sequences(&log, 0, 6), Ok(Vec::new()));
        assert_eq!(sequences(&log, 0, 1), Err(ChangesLost), "3 is the oldest that is kept");
        assert_eq!(sequences(&log, 0, 7), Err(ChangesLost), "that is still to come");
        assert_eq!(log.kept(), (4, 4 * MESSAGE_BYTES));
        let at = |sequence| ChangePosition { generation: 0, sequence };
        assert!(log.covers_with_margin(at(4)) && !log.covers_with_margin(at(3)));
    }

    #[test]
    fn a_new_mirror_gets_a_new_id_and_numbers_changes_from_one() {
        let mut log = ChangeLog::new(1 << 20);
        log.start_new_mirror();
        log.push(0, 0.0, Vec::new());
        let (id, generation) = (log.mirror_id().to_owned(), log.generation());
        log.start_new_mirror();
        assert_ne!(log.mirror_id(), id);
        assert_eq!(sequences(&log, generation, 0), Err(ChangesLost));
        assert_eq!(sequences(&log, log.generation(), 0), Ok(Vec::new()));
        log.push(0, 0.0, Vec::new());
        assert_eq!(sequences(&log, log.generation(), 0), Ok(vec![1]));
    }
}
