//! Counts the requests of all clients that run on the engine through this shim.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus::IntGauge;
use tokio::sync::watch;

use crate::telemetry::Registrar;

/// Maximum number of counted hand-offs. Beyond it, the oldest is no longer counted.
const STAGED_MAX: usize = 1 << 16;

/// Counts of requests and hand-offs. The counts are exact on every path, because each request
/// holds a ticket whose drop ends the count.
#[derive(Debug)]
pub struct Traffic {
    requests: IntGauge,
    prefill_tokens_queued: IntGauge,
    staged: Mutex<StagedHandOffs>,
    changed: watch::Sender<()>,
}

impl Traffic {
    /// Creates the counts and registers them as metrics.
    ///
    /// # Errors
    /// If the registry already has metrics of these names.
    pub(crate) fn new(new: &Registrar<'_>) -> prometheus::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            requests: new.gauge(
                "requests_in_flight",
                "Requests to the engine that are in flight, until the last byte of their replies.",
            )?,
            prefill_tokens_queued: new.gauge(
                "queued_prefill_tokens",
                "Prompt tokens of requests whose replies have not begun. Estimated as a quarter of the \
                 body's bytes if the router does not report them.",
            )?,
            staged: Mutex::default(),
            changed: watch::Sender::new(()),
        }))
    }

    /// The number of requests in flight: from before a request is sent until the last byte of its
    /// reply, or until the client or the engine has disconnected.
    pub fn requests(&self) -> u64 {
        self.requests.get().unsigned_abs()
    }

    /// The prompt tokens of those requests whose replies have not begun. The router sends them in
    /// `x-splitrail-prefill-tokens`; otherwise they are estimated as a quarter of the body's bytes.
    pub fn prefill_tokens_queued(&self) -> u64 {
        self.prefill_tokens_queued.get().unsigned_abs()
    }

    /// The number of hand-offs whose lease has not ended. The shim is not informed when one is
    /// fetched, so this is an upper bound. It decreases with time, which [`Self::changed`] does
    /// not report.
    pub fn staged(&self) -> u64 {
        self.lock_staged().count(Instant::now())
    }

    /// A receiver that is marked as changed when any of the counts changes.
    pub fn changed(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Counts a hand-off until its lease ends.
    pub(super) fn stage(&self, lease: Duration) {
        self.lock_staged().add(Instant::now() + lease);
        self.changed.send_replace(());
    }

    /// Counts a request until the returned ticket is dropped.
    pub(crate) fn enter(self: &Arc<Self>, prefill_tokens: u64) -> RequestTicket {
        self.requests.inc();
        self.prefill_tokens_queued.add(prefill_tokens as i64);
        self.changed.send_replace(());
        let phase = Mutex::new(Phase::Queued(prefill_tokens));
        RequestTicket(Arc::new(CountedRequest { traffic: Arc::clone(self), phase }))
    }

    fn lock_staged(&self) -> MutexGuard<'_, StagedHandOffs> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ends of the leases of hand-offs, earliest first.
#[derive(Debug, Default)]
struct StagedHandOffs(VecDeque<Instant>);

impl StagedHandOffs {
    fn add(&mut self, end: Instant) {
        if self.0.len() == STAGED_MAX {
            self.0.pop_front();
        }
        // Sorted, even if the engine has restarted with a shorter lease.
        self.0.push_back(self.0.back().map_or(end, |last| end.max(*last)));
    }

    fn count(&mut self, now: Instant) -> u64 {
        while self.0.front().is_some_and(|end| *end <= now) {
            self.0.pop_front();
        }
        self.0.len() as u64
    }
}

#[derive(Debug)]
struct CountedRequest {
    traffic: Arc<Traffic>,
    phase: Mutex<Phase>,
}

/// The phase of a request.
#[derive(Debug)]
enum Phase {
    /// The reply has not begun. Holds the prompt's tokens.
    Queued(u64),
    Begun,
    Ended,
}

impl CountedRequest {
    /// Moves to a later phase and updates the counts.
    fn advance(&self, to: Phase) {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let ends = matches!(to, Phase::Ended) && !matches!(*phase, Phase::Ended);
        let tokens = match *phase {
            Phase::Queued(tokens) => Some(tokens),
            Phase::Begun | Phase::Ended => None,
        };
        if tokens.is_none() && !ends {
            return;
        }
        *phase = to;
        drop(phase);
        self.traffic.prefill_tokens_queued.sub(tokens.unwrap_or(0) as i64);
        if ends {
            self.traffic.requests.dec();
        }
        self.traffic.changed.send_replace(());
    }
}

/// Counts one request. Dropping it ends the count.
#[derive(Debug)]
pub(crate) struct RequestTicket(Arc<CountedRequest>);

impl RequestTicket {
    /// Records that the reply has begun, so the prompt is computed.
    pub(super) fn begin_reply(&self) {
        self.0.advance(Phase::Begun);
    }

    /// A meter that adds prompt tokens while the body is forwarded.
    pub(super) fn meter(&self) -> PromptTokenMeter {
        PromptTokenMeter(Arc::clone(&self.0))
    }
}

impl Drop for RequestTicket {
    fn drop(&mut self) {
        self.0.advance(Phase::Ended);
    }
}

/// Adds to the prompt tokens of a request while its reply has not begun.
#[derive(Debug)]
pub(super) struct PromptTokenMeter(Arc<CountedRequest>);

impl PromptTokenMeter {
    /// Adds `tokens` prompt tokens.
    pub(super) fn add(&self, tokens: u64) {
        let mut phase = self.0.phase.lock().unwrap_or_else(PoisonError::into_inner);
        if let Phase::Queued(queued) = &mut *phase {
            *queued += tokens;
            self.0.traffic.prefill_tokens_queued.add(tokens as i64);
            drop(phase);
            self.0.traffic.changed.send_replace(());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use prometheus::Registry;
    use proptest::prelude::*;

    use super::*;

    fn counts(traffic: &Traffic) -> (u64, u64) {
        (traffic.requests(), traffic.prefill_tokens_queued())
    }

    type CountedLeg = (RequestTicket, PromptTokenMeter, Option<u64>);

    proptest! {
        #[test]
        fn counts_match_the_requests_in_flight(
            steps in proptest::collection::vec((0usize..6, 0u8..4, 0u64..1000), 0..200)
        ) {
            let traffic = Traffic::new(&Registrar(&Registry::new())).unwrap();
            // A ticket, its meter, and the tokens it should be queued with.
            let mut under_way = [const { None::<CountedLeg> }; 6];
            for (slot, step, tokens) in steps {
                match (step, &mut under_way[slot]) {
                    (0, entry) => {
                        let ticket = traffic.enter(tokens);
                        let meter = ticket.meter();
                        *entry = Some((ticket, meter, Some(tokens)));
                    }
                    (1, Some((ticket, _, queued))) => {
                        ticket.begin_reply();
                        *queued = None;
                    }
                    (2, Some((_, meter, queued))) => {
                        meter.add(tokens);
                        *queued = queued.map(|queued| queued + tokens);
                    }
                    (_, entry) => *entry = None,
                }
                let here = under_way.iter().flatten();
                let queued = here.clone().filter_map(|(_, _, queued)| *queued).sum();
                prop_assert_eq!(counts(&traffic), (here.count() as u64, queued));
            }
            // A meter that outlives its request adds nothing.
            let meters: Vec<PromptTokenMeter> =
                under_way.into_iter().flatten().map(|(_, meter, _)| meter).collect();
            meters.iter().for_each(|meter| meter.add(7));
            prop_assert_eq!(counts(&traffic), (0, 0));
        }
    }

    #[tokio::test]
    async fn every_change_of_a_count_is_signalled() {
        let traffic = Traffic::new(&Registrar(&Registry::new())).unwrap();
        let mut changed = traffic.changed();
        let mut signalled = || {
            changed.has_changed().unwrap() && {
                changed.mark_unchanged();
                true
            }
        };
        assert!(!signalled());
        let ticket = traffic.enter(10);
        assert!(signalled());
        ticket.meter().add(1);
        assert!(signalled());
        ticket.begin_reply();
        assert!(signalled());
        ticket.begin_reply();
        assert!(!signalled(), "it had begun before");
        drop(ticket);
        assert!(signalled());
        traffic.stage(Duration::from_secs(1));
        assert!(signalled());
    }

    #[test]
    fn hand_offs_are_counted_until_their_lease_ends() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut staged = StagedHandOffs::default();
        staged.add(after(30));
        staged.add(after(40));
        // The engine has restarted with a shorter lease.
        staged.add(after(20));
        let counts = [0, 29, 30, 39, 40].map(|seconds| staged.count(after(seconds)));
        assert_eq!(counts, [3, 3, 2, 2, 0]);
        for _ in 0..STAGED_MAX + 5 {
            staged.add(after(50));
        }
        assert_eq!(staged.count(start), STAGED_MAX as u64);
    }
}
