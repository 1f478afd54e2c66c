//! The last changes, numbered: what routers that were away for a while have missed.

use std::collections::VecDeque;
use std::sync::Arc;

use splitrail_proto::v1::{Change, Events, change};

/// Changes that are handed out at once.
const AT_ONCE: usize = 32;
/// What a message and a change take beside their blocks, in bytes, about.
const PER_MESSAGE: usize = 96;
const PER_CHANGE: usize = 72;
/// A name, or a hash.
const PER_WORD: usize = 8;

/// Up to where changes are there. Of two, the later one is the greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Head {
    /// Which mirror, counted in this process.
    pub(crate) generation: u64,
    /// Its last change; 0 before the first.
    pub(crate) sequence: u64,
}

/// The changes asked for are not there any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lost;

/// A ring of changes.
#[derive(Debug)]
pub(crate) struct Log {
    head: Head,
    mirror_id: String,
    ring: VecDeque<Arc<Events>>,
    bytes: usize,
    bytes_max: usize,
}

impl Log {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            head: Head::default(),
            mirror_id: String::new(),
            ring: VecDeque::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// Another mirror, which is numbered from 1 on.
    pub(crate) fn begin_anew(&mut self) {
        self.mirror_id = format!("{:032x}", rand::random::<u128>());
        self.head = Head { generation: self.head.generation + 1, sequence: 0 };
        self.ring.clear();
        self.bytes = 0;
    }

    pub(crate) fn generation(&self) -> u64 {
        self.head.generation
    }

    pub(crate) fn mirror_id(&self) -> &str {
        &self.mirror_id
    }

    pub(crate) fn head(&self) -> Head {
        self.head
    }

    /// Changes that are kept, and their bytes.
    pub(crate) fn kept(&self) -> (usize, usize) {
        (self.ring.len(), self.bytes)
    }

    /// Adds changes of one rank under the next number.
    pub(crate) fn push(&mut self, rank: u32, engine_time_s: f64, changes: Vec<Change>) {
        self.head.sequence += 1;
        let sequence = self.head.sequence;
        let events = Events { sequence, rank, engine_time_s, changes };
        self.bytes += bytes(&events);
        self.ring.push_back(Arc::new(events));
        while self.bytes > self.bytes_max {
            let Some(oldest) = self.ring.pop_front() else { break };
            self.bytes -= bytes(&oldest);
        }
    }

    /// Whether whoever has everything up to here can go on, if it takes as long as half of
    /// the ring lasts.
    pub(crate) fn reaches_well(&self, head: Head) -> bool {
        let missed = self.head.sequence.checked_sub(head.sequence);
        let missed = missed.and_then(|missed| usize::try_from(missed).ok());
        let half = self.ring.len() / 2;
        head.generation == self.head.generation && missed.is_some_and(|missed| missed <= half)
    }

    /// The next changes behind one; none if that is the last.
    pub(crate) fn after(&self, generation: u64, sequence: u64) -> Result<Vec<Arc<Events>>, Lost> {
        let behind = self.head.sequence.checked_sub(sequence).ok_or(Lost)?;
        let behind = usize::try_from(behind).map_err(|_| Lost)?;
        let from = self.ring.len().checked_sub(behind).ok_or(Lost)?;
        if generation != self.head.generation {
            return Err(Lost);
        }
        Ok(self.ring.range(from..).take(AT_ONCE).cloned().collect())
    }
}

/// What a message takes, in bytes, about.
fn bytes(events: &Events) -> usize {
    let words = |change: &Change| match &change.change {
        Some(change::Change::Stored(stored)) => stored.names.len() + stored.hashes.len(),
        Some(change::Change::Removed(removed)) => removed.names.len(),
        Some(change::Change::Cleared(_)) | None => 0,
    };
    let words: usize = events.changes.iter().map(words).sum();
    PER_MESSAGE + events.changes.len() * PER_CHANGE + words * PER_WORD
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sequences(log: &Log, generation: u64, sequence: u64) -> Result<Vec<u64>, Lost> {
        let after = log.after(generation, sequence)?;
        Ok(after.iter().map(|events| events.sequence).collect())
    }

    #[test]
    fn changes_follow_each_other_as_far_back_as_the_ring_reaches() {
        let mut log = Log::new(4 * PER_MESSAGE);
        assert_eq!(sequences(&log, 0, 0), Ok(Vec::new()));
        for _ in 0..6 {
            log.push(0, 0.0, Vec::new());
        }
        assert_eq!(sequences(&log, 0, 2), Ok(vec![3, 4, 5, 6]));
        assert_eq!(sequences(&log, 0, 6), Ok(Vec::new()));
        assert_eq!(sequences(&log, 0, 1), Err(Lost), "3 is the oldest that is kept");
        assert_eq!(sequences(&log, 0, 7), Err(Lost), "that is still to come");
        assert_eq!(log.kept(), (4, 4 * PER_MESSAGE));
        let at = |sequence| Head { generation: 0, sequence };
        assert!(log.reaches_well(at(4)) && !log.reaches_well(at(3)));
    }

    #[test]
    fn another_mirror_has_another_name_and_begins_at_one() {
        let mut log = Log::new(1 << 20);
        log.begin_anew();
        log.push(0, 0.0, Vec::new());
        let (id, generation) = (log.mirror_id().to_owned(), log.generation());
        log.begin_anew();
        assert_ne!(log.mirror_id(), id);
        assert_eq!(sequences(&log, generation, 0), Err(Lost));
        assert_eq!(sequences(&log, log.generation(), 0), Ok(Vec::new()));
        log.push(0, 0.0, Vec::new());
        assert_eq!(sequences(&log, log.generation(), 0), Ok(vec![1]));
    }
}
