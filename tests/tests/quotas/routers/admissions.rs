//! What clients saw of the requests that were admitted.

use std::sync::{Mutex, MutexGuard};

/// Milliseconds of the window of a limit per minute.
pub(crate) const MINUTE_MS: u64 = 60_000;

/// A request that was admitted at some time between two moments.
#[derive(Clone, Copy, Debug)]
struct Admission {
    router: usize,
    sent_ms: u64,
    replied_ms: u64,
    tokens: u64,
}

/// Requests and tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) requests: u64,
    pub(crate) tokens: u64,
}

/// The requests of a tenant that were admitted.
#[derive(Debug, Default)]
pub(crate) struct Admissions(Mutex<Vec<Admission>>);

impl Admissions {
    fn all(&self) -> MutexGuard<'_, Vec<Admission>> {
        self.0.lock().unwrap()
    }

    /// Notes a request that a router has admitted after `sent_ms` and before `replied_ms`.
    pub(crate) fn add(&self, router: usize, sent_ms: u64, replied_ms: u64, tokens: u64) {
        self.all().push(Admission { router, sent_ms, replied_ms, tokens });
    }

    fn sum(&self, mut is_meant: impl FnMut(&Admission) -> bool) -> Cost {
        self.all().iter().filter(|one| is_meant(one)).fold(Cost::default(), |sum, one| Cost {
            requests: sum.requests + 1,
            tokens: sum.tokens + one.tokens,
        })
    }

    /// What a router has admitted.
    pub(crate) fn by(&self, router: usize) -> Cost {
        self.sum(|one| one.router == router)
    }

    /// What was admitted by requests that were sent at a time or later.
    pub(crate) fn since(&self, since_ms: u64) -> Cost {
        self.sum(|one| one.sent_ms >= since_ms)
    }

    /// The most that was certainly admitted in any minute that begins at a time or later.
    pub(crate) fn highest_minute(&self, since_ms: u64) -> Cost {
        let starts: Vec<u64> = self.all().iter().map(|one| one.sent_ms).collect();
        let mut highest = Cost::default();
        for start_ms in starts.into_iter().filter(|start_ms| *start_ms >= since_ms) {
            let end_ms = start_ms + MINUTE_MS;
            let minute = self.sum(|one| one.sent_ms >= start_ms && one.replied_ms <= end_ms);
            highest.requests = highest.requests.max(minute.requests);
            highest.tokens = highest.tokens.max(minute.tokens);
        }
        highest
    }
}

#[test]
fn a_minute_has_what_was_sent_and_answered_within_it() {
    let admissions = Admissions::default();
    admissions.add(0, 0, 10, 5);
    admissions.add(1, 59_000, 60_000, 7);
    admissions.add(2, 59_000, 60_001, 11);
    admissions.add(2, 119_000, 119_000, 2);
    assert_eq!(admissions.highest_minute(0), Cost { requests: 3, tokens: 20 });
    assert_eq!(admissions.highest_minute(59_001), Cost { requests: 1, tokens: 2 });
    assert_eq!(admissions.by(2), Cost { requests: 2, tokens: 13 });
    assert_eq!(admissions.since(59_000).requests, 3);
}
