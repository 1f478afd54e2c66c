//! Distinguishes a worker's answers from late bytes: by the id of the request, where answers carry it, or
//! otherwise by how soon they begin.
//!
//! vLLM makes the `id` of an answer from the router's `x-request-id`. Once a worker's answers on
//! one path were seen to carry the id, each of them must: one without it is for another request.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};

/// Answers without the id in a row after which the engine is taken for one that does not repeat
/// it any more: a proxy may have put another version in its place.
const FOREIGN_MAX: u8 = 16;

/// What an answer that begins at once adds to the score; any other takes 1 away. So the score falls
/// while less than one in 17 answers begins at once: those few may be chance, and late bytes are
/// looked for. An engine of which more do is quick, and would lose too many of its answers.
const AT_ONCE_GAIN: u8 = 16;
/// Scores from this on say that answers begin at once: more than one in a row is needed.
const AT_ONCE_MIN: u8 = 2 * AT_ONCE_GAIN - 8;
/// The highest score: what an engine did long ago does not count.
const AT_ONCE_MAX: u8 = 4 * AT_ONCE_GAIN;

/// What one worker was seen to repeat.
#[derive(Debug, Default)]
pub struct Echoes {
    /// A bit for each kind of answer that carried the id.
    kinds: AtomicU32,
    /// Answers without it since the last one that had it.
    foreign: AtomicU8,
    /// How often answers on new connections began at once recently: a score from 0 to `AT_ONCE_MAX`.
    at_once: AtomicU8,
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

    /// Whether bytes that arrive right after a request was written may be its answer.
    pub fn come_at_once(&self) -> bool {
        self.at_once.load(Relaxed) >= AT_ONCE_MIN
    }

    /// An answer has begun on a new connection, which carries no late bytes.
    pub fn began(&self, at_once: bool) {
        let next = |score: u8| match at_once {
            true => (score + AT_ONCE_GAIN).min(AT_ONCE_MAX),
            false => score.saturating_sub(1),
        };
        // A lost update by another thread is an answer that was not counted.
        let score = self.at_once.load(Relaxed);
        if next(score) != score {
            self.at_once.store(next(score), Relaxed);
        }
    }

    /// It is another process than before, or may be.
    pub fn forget(&self) {
        self.at_once.store(0, Relaxed);
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

    #[test]
    fn another_process_may_take_longer_to_answer() {
        let echoes = Echoes::default();
        assert!(!echoes.come_at_once());
        echoes.began(true);
        echoes.began(true);
        assert!(echoes.come_at_once());
        echoes.forget();
        assert!(!echoes.come_at_once());
    }

    /// Begins 1,700 answers, one of `every` at once, and counts those after which the next may be late bytes.
    fn suspicious(every: usize) -> usize {
        let echoes = Echoes::default();
        let answers = (0..1700).map(|answer| {
            echoes.began(answer % every == 0);
            !echoes.come_at_once()
        });
        answers.filter(|suspicious| *suspicious).count()
    }

    #[test]
    fn an_engine_that_rarely_answers_at_once_is_still_watched_for_late_bytes() {
        assert_eq!(suspicious(100), 1700);
        assert_eq!(suspicious(30), 1700);
    }

    #[test]
    fn an_engine_that_often_answers_at_once_is_learned_soon_and_stays_known() {
        assert!(suspicious(1) <= 1);
        assert!(suspicious(4) <= 5);
        assert!(suspicious(10) <= 50);
    }
}
