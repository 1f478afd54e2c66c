//! Records of unusual requests, which are kept for hours: the ring forgets them within minutes.
//!
//! For each minute, the slowest requests are kept, and random ones of those that failed, of those
//! that were tried several times, and of all.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rand::RngExt;

use super::handle::DecisionHandle;

/// Number of minutes whose records are kept, counting only minutes in which requests ended: eight
/// hours under traffic.
const MINUTES: usize = 480;

/// Number of records of each kind and minute.
const KEPT: usize = 2;

/// Records of unusual requests of the last hours: at most `MINUTES * KEPT * 5`.
#[derive(Debug, Default)]
pub(super) struct NotableDecisions {
    minutes: Mutex<VecDeque<Minute>>,
}

/// The unusual requests that ended in one minute.
#[derive(Debug, Default)]
struct Minute {
    /// Minutes since 1970.
    number: u64,
    slowest_streams: Slowest,
    slowest_replies: Slowest,
    failed: Sample,
    retried: Sample,
    all: Sample,
}

/// The records with the largest times.
#[derive(Debug, Default)]
struct Slowest(Vec<(f64, DecisionHandle)>);

/// Records that were chosen at random, each with the same probability (reservoir sampling).
#[derive(Debug, Default)]
struct Sample {
    seen: usize,
    kept: Vec<DecisionHandle>,
}

impl NotableDecisions {
    /// Keeps the record of a request that ended at this time, if it is one of the unusual ones.
    pub(super) fn offer(&self, handle: &DecisionHandle, ended_unix_ms: u64) {
        let Some((ttft_ms, total_ms, has_failed, attempts)) = handle.with(|decision| {
            let times = decision.times?;
            Some((times.ttft_ms, times.total_ms, decision.has_failed(), decision.attempts))
        }) else {
            return;
        };
        let number = ended_unix_ms / 60_000;
        let mut minutes = self.lock();
        // A clock that was set back goes on with the newest minute.
        if minutes.back().is_none_or(|newest| newest.number < number) {
            minutes.push_back(Minute { number, ..Minute::default() });
            while minutes.len() > MINUTES {
                minutes.pop_front();
            }
        }
        let Some(minute) = minutes.back_mut() else { return };
        match ttft_ms {
            Some(ttft_ms) => minute.slowest_streams.offer(ttft_ms, handle),
            None => minute.slowest_replies.offer(total_ms, handle),
        }
        if has_failed {
            minute.failed.offer(handle);
        }
        if attempts > 1 {
            minute.retried.offer(handle);
        }
        minute.all.offer(handle);
    }

    /// All records; one may be there several times.
    pub(super) fn all(&self) -> Vec<DecisionHandle> {
        self.lock().iter().flat_map(Minute::records).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Minute>> {
        self.minutes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Minute {
    fn records(&self) -> impl Iterator<Item = &DecisionHandle> {
        let slowest = self.slowest_streams.0.iter().chain(&self.slowest_replies.0);
        let samples = [&self.failed, &self.retried, &self.all];
        slowest.map(|(_, handle)| handle).chain(samples.into_iter().flat_map(|sample| &sample.kept))
    }
}

impl Slowest {
    fn offer(&mut self, ms: f64, handle: &DecisionHandle) {
        let fastest =
            self.0.iter().map(|(ms, _)| *ms).enumerate().min_by(|a, b| a.1.total_cmp(&b.1));
        match fastest {
            _ if self.0.len() < KEPT => self.0.push((ms, handle.clone())),
            Some((place, fastest_ms)) if ms > fastest_ms => self.0[place] = (ms, handle.clone()),
            _ => {}
        }
    }
}

impl Sample {
    fn offer(&mut self, handle: &DecisionHandle) {
        self.seen += 1;
        if self.kept.len() < KEPT {
            self.kept.push(handle.clone());
            return;
        }
        let place = rand::rng().random_range(0..self.seen);
        if let Some(kept) = self.kept.get_mut(place) {
            *kept = handle.clone();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::record::Decision;
    use super::*;
    use crate::timeline::RequestTimes;

    fn ended(id: &str, ms: f64, outcome: &'static str) -> DecisionHandle {
        let start = Decision { request_id: id.into(), ..Decision::default() };
        let handle = DecisionHandle::new(start);
        let times = RequestTimes { ttft_ms: Some(ms), total_ms: ms, stages_ms: Default::default() };
        handle.request_took(times);
        handle.lock().outcome = Some(outcome);
        handle
    }

    fn ids(notable: &NotableDecisions) -> Vec<String> {
        let mut ids: Vec<String> = notable
            .all()
            .iter()
            .map(|handle| handle.with(|decision| decision.request_id.to_string()))
            .collect();
        ids.sort();
        ids.dedup();
        ids
    }

    #[test]
    fn the_slowest_and_the_failed_of_a_minute_are_kept_among_many_others() {
        let notable = NotableDecisions::default();
        for number in 0..10_000 {
            let ms = if number == 77 { 900.0 } else { 5.0 + f64::from(number % 10) };
            let outcome = if number == 99 { "engine_failed" } else { "ok" };
            notable.offer(&ended(&format!("{number}"), ms, outcome), 60_000 + number as u64);
        }
        let kept = ids(&notable);
        assert!(kept.contains(&"77".into()) && kept.contains(&"99".into()), "{kept:?}");
        assert!(kept.len() <= 5 * KEPT, "{kept:?}");
    }

    #[test]
    fn the_oldest_minutes_make_room() {
        let notable = NotableDecisions::default();
        for minute in 0..MINUTES as u64 + 5 {
            notable.offer(&ended(&format!("m{minute}"), 1.0, "ok"), minute * 60_000);
        }
        let kept = ids(&notable);
        assert_eq!(kept.len(), MINUTES);
        assert!(!kept.contains(&"m4".into()) && kept.contains(&"m5".into()));
        // A clock that is set back makes no room.
        notable.offer(&ended("late", 2.0, "ok"), 0);
        assert!(ids(&notable).contains(&"late".into()) && ids(&notable).len() == MINUTES + 1);
    }

    #[test]
    fn each_of_many_requests_is_as_likely_to_be_kept() {
        let mut counts = [0; 8];
        for _ in 0..4_000 {
            let mut sample = Sample::default();
            let handles: Vec<_> = (0..8).map(|id| ended(&id.to_string(), 1.0, "ok")).collect();
            handles.iter().for_each(|handle| sample.offer(handle));
            for kept in &sample.kept {
                let id: usize = kept.with(|decision| decision.request_id.parse().unwrap());
                counts[id] += 1;
            }
        }
        // 4,000 * 2 / 8 each; six standard deviations are 165.
        assert!(counts.iter().all(|count| (835..=1165).contains(count)), "{counts:?}");
    }
}
