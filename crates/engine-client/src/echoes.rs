//! Which of a worker's replies carry the id of their request.
//!
//! vLLM makes the `id` of a reply from the router's `x-request-id`. Once a worker's replies on
//! one path were seen to carry the id, each of them must: one without it is for another request.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// Number of consecutive replies without the id after which the router no longer expects the id: a
/// proxy may have replaced the engine by another version.
const FOREIGN_MAX: u8 = 16;

/// Which kinds of one worker's replies have carried the id.
#[derive(Debug, Default)]
pub struct Echoes {
    /// One bit for each kind of reply that carried the id.
    kinds: AtomicU64,
    /// Consecutive replies without the id that should have carried it.
    foreign: AtomicU8,
}

/// The consequence of a reply without the expected id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// The reply is for another request.
    Dropped,
    /// The limit of such replies is reached: the id is no longer expected of this worker's replies.
    Unlearned,
}

impl Echoes {
    /// Whether replies of a kind (0 to 63) must carry the id.
    pub fn are_expected(&self, kind: u8) -> bool {
        self.kinds.load(Relaxed) & (1 << kind) != 0
    }

    /// Notes that a reply of this kind has carried the id.
    pub fn came(&self, kind: u8) {
        // Usually both are already set: this avoids writes to memory that all threads read.
        if !self.are_expected(kind) {
            self.kinds.fetch_or(1 << kind, Relaxed);
        }
        if self.foreign.load(Relaxed) != 0 {
            self.foreign.store(0, Relaxed);
        }
    }

    /// Notes that a reply without the id came where the id was expected.
    pub fn missed(&self) -> Foreign {
        if self.foreign.fetch_add(1, Relaxed) + 1 < FOREIGN_MAX {
            return Foreign::Dropped;
        }
        self.forget();
        Foreign::Unlearned
    }

    /// Forgets everything, because the worker may be another process than before.
    pub fn forget(&self) {
        self.kinds.store(0, Relaxed);
        self.foreign.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_expected_of_a_kind_once_a_reply_of_it_carried_the_id() {
        let echoes = Echoes::default();
        echoes.came(3);
        assert!(echoes.are_expected(3) && !echoes.are_expected(2));
        echoes.forget();
        assert!(!echoes.are_expected(3));
    }

    #[test]
    fn the_id_is_no_longer_expected_after_enough_replies_without_it() {
        let echoes = Echoes::default();
        echoes.came(0);
        for _ in 0..100 {
            for _ in 1..FOREIGN_MAX {
                assert_eq!(echoes.missed(), Foreign::Dropped);
            }
            echoes.came(0);
        }
        for _ in 1..FOREIGN_MAX {
            echoes.missed();
        }
        assert!(echoes.are_expected(0));
        assert_eq!(echoes.missed(), Foreign::Unlearned);
        assert!(!echoes.are_expected(0));
    }
}
