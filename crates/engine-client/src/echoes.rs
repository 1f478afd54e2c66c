//! Which of a worker's answers carry the id of their request.
//!
//! vLLM makes the `id` of an answer from the router's `x-request-id`. Once a worker's answers on
//! one path were seen to carry the id, each of them must: one without it is for another request.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};

/// Answers without the id in a row after which the engine is taken for one that does not repeat
/// it any more: a proxy may have put another version in its place.
const FOREIGN_MAX: u8 = 16;

/// What one worker was seen to repeat.
#[derive(Debug, Default)]
pub struct Echoes {
    /// A bit for each kind of answer that carried the id.
    kinds: AtomicU32,
    /// Answers without it since the last one that had it.
    foreign: AtomicU8,
}

/// What a foreign answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// It is for another request.
    Dropped,
    /// It was one too many: from now on nothing is expected of this worker's answers.
    Unlearned,
}

impl Echoes {
    /// Whether answers of a kind (0 to 31) must carry the id.
    pub fn are_expected(&self, kind: u8) -> bool {
        self.kinds.load(Relaxed) & (1 << kind) != 0
    }

    /// An answer of a kind has carried the id.
    pub fn came(&self, kind: u8) {
        // Most often both are known: nothing is written that all threads read.
        if !self.are_expected(kind) {
            self.kinds.fetch_or(1 << kind, Relaxed);
        }
        if self.foreign.load(Relaxed) != 0 {
            self.foreign.store(0, Relaxed);
        }
    }

    /// An answer of a kind that must carry the id has not.
    pub fn missed(&self) -> Foreign {
        if self.foreign.fetch_add(1, Relaxed) + 1 < FOREIGN_MAX {
            return Foreign::Dropped;
        }
        self.forget();
        Foreign::Unlearned
    }

    /// It is another process than before, or may be.
    pub fn forget(&self) {
        self.kinds.store(0, Relaxed);
        self.foreign.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_once_is_expected_of_answers_of_its_kind() {
        let echoes = Echoes::default();
        echoes.came(3);
        assert!(echoes.are_expected(3) && !echoes.are_expected(2));
        echoes.forget();
        assert!(!echoes.are_expected(3));
    }

    #[test]
    fn an_engine_that_never_repeats_it_any_more_is_believed_in_the_end() {
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
