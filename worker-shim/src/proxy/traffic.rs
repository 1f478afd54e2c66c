//! What runs on the engine through this shim, whoever sent it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus::{IntGauge, Registry};
use tokio::sync::watch;

/// Hand-offs that are remembered; older ones are forgotten first.
const STAGED_MAX: usize = 1 << 16;

/// Counts of what runs. Exact on every path: a request holds a ticket, and dropping the
/// ticket takes it out again.
#[derive(Debug)]
pub struct Traffic {
    requests: IntGauge,
    prefill_tokens_queued: IntGauge,
    staged: Mutex<Staged>,
    changed: watch::Sender<()>,
}

impl Traffic {
    /// Counts from 0, shown as metrics in `registry`.
    ///
    /// # Errors
    /// If the registry has metrics of these names.
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Arc<Self>> {
        let gauge = |name, help| -> prometheus::Result<IntGauge> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        Ok(Arc::new(Self {
            requests: gauge(
                "splitrail_shim_requests",
                "Requests under way to the engine, until the last byte of their answers.",
            )?,
            prefill_tokens_queued: gauge(
                "splitrail_shim_prefill_tokens_queued",
                "Prompt tokens of requests whose answers have not begun; estimated where the \
                 router does not tell.",
            )?,
            staged: Mutex::default(),
            changed: watch::Sender::new(()),
        }))
    }

    /// Requests that the engine works for: from before they are sent until the last byte of
    /// the answer, or until the client or the engine is gone.
    pub fn requests(&self) -> u64 {
        self.requests.get().unsigned_abs()
    }

    /// Prompt tokens of those requests whose answers have not begun. As the router says in
    /// `x-splitrail-prefill-tokens`, else a quarter of the body's bytes.
    pub fn prefill_tokens_queued(&self) -> u64 {
        self.prefill_tokens_queued.get().unsigned_abs()
    }

    /// Hand-offs that the engine has given out in the time of one lease. Nobody tells the
    /// shim when one is fetched, so this is the most that can still be pinned. Falls
    /// with time, of which [`Self::changed`] says nothing.
    pub fn staged(&self) -> u64 {
        self.lock_staged().count(Instant::now())
    }

    /// Tells of changes of any of the counts. Wake-ups of changes that come together
    /// may be one.
    pub fn changed(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// A hand-off has been given out.
    pub(super) fn stage(&self, lease: Duration) {
        self.lock_staged().add(Instant::now() + lease);
        self.changed.send_replace(());
    }

    /// Takes in a request.
    pub(super) fn enter(self: &Arc<Self>, prefill_tokens: u64) -> Ticket {
        self.requests.inc();
        self.prefill_tokens_queued.add(prefill_tokens as i64);
        self.changed.send_replace(());
        let phase = Mutex::new(Phase::Queued(prefill_tokens));
        Ticket(Arc::new(Entry { traffic: Arc::clone(self), phase }))
    }

    fn lock_staged(&self) -> MutexGuard<'_, Staged> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When the leases of hand-offs end, earliest first.
#[derive(Debug, Default)]
struct Staged(VecDeque<Instant>);

impl Staged {
    fn add(&mut self, end: Instant) {
        if self.0.len() == STAGED_MAX {
            self.0.pop_front();
        }
        // In order, even if the engine was started again with a shorter lease.
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
struct Entry {
    traffic: Arc<Traffic>,
    phase: Mutex<Phase>,
}

/// How far a request is.
#[derive(Debug)]
enum Phase {
    /// No byte of its answer is there; with its prompt's tokens.
    Queued(u64),
    Begun,
    Ended,
}

impl Entry {
    /// Goes on to a later phase; says whether it was in an earlier one.
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

/// One request's place in the counts. Dropping it ends the request.
#[derive(Debug)]
pub(super) struct Ticket(Arc<Entry>);

impl Ticket {
    /// Its answer has begun: the prompt is computed.
    pub(super) fn begun(&self) {
        self.0.advance(Phase::Begun);
    }

    /// For whoever learns the prompt's length as it passes.
    pub(super) fn meter(&self) -> Meter {
        Meter(Arc::clone(&self.0))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.advance(Phase::Ended);
    }
}

/// Adds to a request's prompt tokens for as long as its answer has not begun.
#[derive(Debug)]
pub(super) struct Meter(Arc<Entry>);

impl Meter {
    /// So many more tokens.
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
    use proptest::prelude::*;

    use super::*;

    fn counts(traffic: &Traffic) -> (u64, u64) {
        (traffic.requests(), traffic.prefill_tokens_queued())
    }

    type UnderWay = (Ticket, Meter, Option<u64>);

    proptest! {
        #[test]
        fn counts_are_those_of_what_is_under_way(
            steps in proptest::collection::vec((0usize..6, 0u8..4, 0u64..1000), 0..200)
        ) {
            let traffic = Traffic::new(&Registry::new()).unwrap();
            // A ticket, its meter, and the tokens it should be queued with.
            let mut under_way = [const { None::<UnderWay> }; 6];
            for (slot, step, tokens) in steps {
                match (step, &mut under_way[slot]) {
                    (0, entry) => {
                        let ticket = traffic.enter(tokens);
                        let meter = ticket.meter();
                        *entry = Some((ticket, meter, Some(tokens)));
                    }
                    (1, Some((ticket, _, queued))) => {
                        ticket.begun();
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
            // What outlives its request adds nothing.
            let meters: Vec<Meter> =
                under_way.into_iter().flatten().map(|(_, meter, _)| meter).collect();
            meters.iter().for_each(|meter| meter.add(7));
            prop_assert_eq!(counts(&traffic), (0, 0));
        }
    }

    #[tokio::test]
    async fn every_change_is_told() {
        let traffic = Traffic::new(&Registry::new()).unwrap();
        let mut changed = traffic.changed();
        let mut told = || {
            changed.has_changed().unwrap() && {
                changed.mark_unchanged();
                true
            }
        };
        assert!(!told());
        let ticket = traffic.enter(10);
        assert!(told());
        ticket.meter().add(1);
        assert!(told());
        ticket.begun();
        assert!(told());
        ticket.begun();
        assert!(!told(), "it had begun before");
        drop(ticket);
        assert!(told());
        traffic.stage(Duration::from_secs(1));
        assert!(told());
    }

    #[test]
    fn hand_offs_are_forgotten_with_their_lease() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut staged = Staged::default();
        staged.add(after(30));
        staged.add(after(40));
        // The engine was started again, with a shorter lease.
        staged.add(after(20));
        let counts = [0, 29, 30, 39, 40].map(|seconds| staged.count(after(seconds)));
        assert_eq!(counts, [3, 3, 2, 2, 0]);
        for _ in 0..STAGED_MAX + 5 {
            staged.add(after(50));
        }
        assert_eq!(staged.count(start), STAGED_MAX as u64);
    }
}
