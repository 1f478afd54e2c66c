//! Bookings: the work that was placed on a worker and is not finished. A booking ends when it is
//! dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::costs::{PromptWork, WholeReply};
use super::progress::{Awaited, LegProgress};

/// Sums of a worker's bookings. Relaxed atomics suffice, because the counters are only statistics
/// for placement.
#[derive(Debug, Default)]
pub struct BookedSums {
    requests: AtomicU32,
    prefill_tokens: AtomicU64,
    active_tokens: AtomicU64,
    /// The moving average of the time for which requests hold their tokens, in microseconds.
    kept_us: AtomicU64,
}

/// A duration counts for one part in so many in the moving average.
const AVERAGED_OVER: u64 = 8;

impl BookedSums {
    /// The usual time for which a request holds its tokens; 0 before the first one has ended.
    pub fn kept(&self) -> Duration {
        Duration::from_micros(self.kept_us.load(Relaxed))
    }

    /// Averages in how long a request has held its tokens. Of two at the same time, one may get lost.
    fn record_kept(&self, kept: Duration) {
        let kept_us = u64::try_from(kept.as_micros()).unwrap_or(u64::MAX);
        let before_us = self.kept_us.load(Relaxed);
        let after_us = match before_us {
            0 => kept_us,
            _ => before_us - before_us / AVERAGED_OVER + kept_us / AVERAGED_OVER,
        };
        self.kept_us.store(after_us, Relaxed);
    }

    /// Number of this router's requests on the worker.
    pub fn requests(&self) -> u32 {
        self.requests.load(Relaxed)
    }

    /// Prompt tokens of these requests that the worker still has to compute.
    pub fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens.load(Relaxed)
    }

    /// Prompt tokens of these requests in total.
    pub fn active_tokens(&self) -> u64 {
        self.active_tokens.load(Relaxed)
    }
}

/// The booking of one leg on a worker, and on a rank if the leg is pinned to it. Dropping it
/// removes the leg from the sums.
#[derive(Debug)]
pub struct Booking {
    booked: Arc<BookedSums>,
    of_rank: Option<Arc<BookedSums>>,
    /// 1 until the booking ends, then 0.
    requests: u32,
    prefill_tokens: u64,
    active_tokens: u64,
    begun: Instant,
    /// The prompt's place in the worker's queue, if the worker computes it.
    work: Option<PromptWork>,
    /// Whether the cost model learns from the prompt.
    teaches: bool,
    /// The signs of work that the worker gives for the leg.
    progress: Option<LegProgress>,
}

impl Booking {
    /// Books a leg: `prefill_tokens` to compute, `active_tokens` to hold.
    pub fn new(booked: &Arc<BookedSums>, prefill_tokens: u64, active_tokens: u64) -> Self {
        Self::both(Arc::clone(booked), None, prefill_tokens, active_tokens)
    }

    /// Books a leg on a worker, and on one of its ranks if the leg is pinned to it.
    pub fn both(
        booked: Arc<BookedSums>,
        of_rank: Option<Arc<BookedSums>>,
        prefill_tokens: u64,
        active_tokens: u64,
    ) -> Self {
        let booking = Self {
            booked,
            of_rank,
            requests: 1,
            prefill_tokens,
            active_tokens,
            begun: Instant::now(),
            work: None,
            teaches: true,
            progress: None,
        };
        for booked in booking.places() {
            booked.requests.fetch_add(booking.requests, Relaxed);
            booked.prefill_tokens.fetch_add(prefill_tokens, Relaxed);
            booked.active_tokens.fetch_add(active_tokens, Relaxed);
        }
        booking
    }

    fn places(&self) -> impl Iterator<Item = &Arc<BookedSums>> {
        std::iter::once(&self.booked).chain(&self.of_rank)
    }

    /// Adds the prompt that the worker computes, from whose duration the cost model learns.
    pub fn with_work(mut self, work: PromptWork) -> Self {
        self.work = Some(work);
        self
    }

    /// Lets the cost model learn nothing from the prompt, whose tokens are not counted.
    pub fn without_teaching(mut self) -> Self {
        self.teaches = false;
        self
    }

    /// Adds the watch of the leg's progress.
    pub fn with_progress(mut self, progress: LegProgress) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Sets what the router awaits of the engine from now on.
    pub fn set_awaited(&self, awaited: Awaited) {
        self.progress.iter().for_each(|progress| progress.set_awaited(awaited));
    }

    /// Records the end of the leg's reply.
    pub fn reply_done(&self, now: Instant) {
        self.progress.iter().for_each(|progress| progress.record_reply(now));
    }

    /// Records that the whole reply of a leg has arrived, from whose duration the cost model learns.
    pub fn whole_reply_done(&mut self, now: Instant, reply: WholeReply) {
        if let Some(work) = self.work.take().filter(|_| self.teaches) {
            work.replied(now, reply);
        }
        self.free_prefill();
    }

    /// Records output of the engine, for which the prompt has been computed: its tokens are no longer
    /// queued. `cached_tokens` is the engine's figure, if it reported one.
    pub fn prefill_done(&mut self, cached_tokens: Option<u32>) {
        self.progress.iter().for_each(LegProgress::record_output);
        if let Some(work) = self.work.take().filter(|_| self.teaches) {
            work.done(Instant::now(), cached_tokens.map(u64::from));
        }
        self.free_prefill();
    }

    /// Removes the leg from the sums before the booking is dropped.
    pub fn end(&mut self) {
        self.work = None;
        self.progress = None;
        self.free_prefill();
        let requests = std::mem::take(&mut self.requests);
        let tokens = std::mem::take(&mut self.active_tokens);
        for booked in self.places() {
            if requests > 0 {
                booked.record_kept(self.begun.elapsed());
            }
            booked.active_tokens.fetch_sub(tokens, Relaxed);
            booked.requests.fetch_sub(requests, Relaxed);
        }
    }

    fn free_prefill(&mut self) {
        let tokens = std::mem::take(&mut self.prefill_tokens);
        if tokens == 0 {
            return;
        }
        for booked in self.places() {
            booked.prefill_tokens.fetch_sub(tokens, Relaxed);
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;

    #[test]
    fn a_dropped_booking_leaves_nothing() {
        let booked = Arc::new(BookedSums::default());
        let mut first = Booking::new(&booked, 10, 20);
        let second = Booking::new(&booked, 5, 5);
        assert_eq!(
            (booked.requests(), booked.prefill_tokens(), booked.active_tokens()),
            (2, 15, 25)
        );
        first.prefill_done(None);
        first.prefill_done(None);
        assert_eq!(booked.prefill_tokens(), 5);
        first.end();
        assert_eq!((booked.requests(), booked.active_tokens()), (1, 5));
        drop(first);
        assert_eq!((booked.requests(), booked.active_tokens()), (1, 5));
        drop(second);
        assert_eq!((booked.requests(), booked.prefill_tokens(), booked.active_tokens()), (0, 0, 0));
    }

    #[test]
    fn a_prompt_whose_tokens_are_not_counted_teaches_nothing() {
        let booked = Arc::new(BookedSums::default());
        let reply = WholeReply { cached_tokens: Some(0), steps: 0, requests: 1, context_tokens: 9 };
        let teaches = |is_recording: bool| {
            let costs = Arc::new(Costs::default());
            let booking = || {
                let work = costs.begin(Instant::now(), None, 9, 0, false);
                let booking = Booking::new(&booked, 9, 9).with_work(work);
                if is_recording { booking.without_teaching() } else { booking }
            };
            booking().prefill_done(None);
            booking().whole_reply_done(Instant::now(), reply);
            costs.view(Instant::now()).evidence.prefill.observations > 0
        };
        assert_eq!([true, false].map(teaches), [false, true]);
    }
}
