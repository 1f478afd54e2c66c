//! Fetches of prefixes from other workers: their bounds, and those under way on each worker.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use splitrail_kv::BlockHash;
use tokio::sync::watch;

use super::breaker::Breaker;
use splitrail_config::model::{Model, PeerFetch};

/// The bounds of a model's peer fetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchBounds {
    /// Minimum number of prompt tokens that a fetch must bring.
    pub min_tokens: u32,
    /// Maximum number of concurrent fetches from a worker, and to a worker.
    pub max_per_worker: u32,
    /// Within which time from the decision a prefill leg that takes a prefix by itself (`one_shot`)
    /// must be predicted to have computed its prompt: nothing renews the lease of what it takes. 0 if
    /// no leg takes anything.
    pub one_shot_within_ns: u64,
    /// Whether a worker sends and takes prefixes for requests only after it has done so in a trial.
    pub needs_trial: bool,
}

impl FetchBounds {
    /// The bounds of a fetch beside which there is no other one.
    pub const SINGLE: Self =
        Self { min_tokens: 0, max_per_worker: 1, one_shot_within_ns: 0, needs_trial: false };

    /// The bounds that a model configures; `None` without peer fetches.
    pub fn of(model: &Model) -> Option<Self> {
        let min_tokens = model.peer_fetch_min_tokens;
        let max_per_worker = model.peer_fetch_max_per_worker;
        // Half of the time in which a hand-off may be sent: predictions are not exact.
        let within = model.lease * 9 / 20;
        let one_shot_within_ns = match model.peer_fetch {
            PeerFetch::OneShot => within.as_nanos().try_into().unwrap_or(u64::MAX),
            PeerFetch::Auto | PeerFetch::Off | PeerFetch::TwoStep => 0,
        };
        let needs_trial = model.peer_fetch == PeerFetch::Auto;
        let bounds = Self { min_tokens, max_per_worker, one_shot_within_ns, needs_trial };
        model.fetches_prefixes().then_some(bounds)
    }
}

/// The fetches of one worker.
#[derive(Debug, Default)]
pub struct PeerFetches {
    /// Prefixes that other workers take from this one.
    sent: Direction,
    /// Prefixes that this worker takes from others.
    taken: Direction,
    /// What this worker is taking. Bounded by `peer_fetch_max_per_worker`.
    arriving: Mutex<Vec<ArrivingPrefix>>,
    /// The failures of trials.
    trials: Breaker,
}

/// A prefix that a worker is taking.
#[derive(Debug)]
struct ArrivingPrefix {
    prefix: Prefix,
    /// Whether the prefix has arrived; closed without a value if it has not.
    has_arrived: watch::Receiver<bool>,
}

/// Leading blocks of a prompt on a worker, or on one of its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The data-parallel rank that the leg is pinned to.
    pub rank: Option<u16>,
    /// The number of blocks.
    pub blocks: u32,
    /// The hash of the last block, which stands for all of them.
    pub last: BlockHash,
}

/// The fetches of one worker in one direction.
#[derive(Debug, Default)]
struct Direction {
    running: AtomicU32,
    /// The predicted duration of their transfers, in nanoseconds.
    transfer_ns: AtomicU64,
    breaker: Breaker,
    /// Whether a trial has succeeded.
    is_proven: AtomicBool,
}

impl Direction {
    fn allows(&self, bounds: FetchBounds, now: Instant) -> bool {
        self.is_free(bounds, now) && (!bounds.needs_trial || self.is_proven.load(Relaxed))
    }

    fn is_free(&self, bounds: FetchBounds, now: Instant) -> bool {
        self.running.load(Relaxed) < bounds.max_per_worker && self.breaker.allows(now)
    }

    /// Adds a fetch, unless there are as many as there may be.
    fn begin(&self, bounds: FetchBounds, transfer_ns: u64, now: Instant) -> bool {
        let more = |running| (running < bounds.max_per_worker).then_some(running + 1);
        let begun = self.running.fetch_update(Relaxed, Relaxed, more).is_ok();
        if begun {
            self.transfer_ns.fetch_add(transfer_ns, Relaxed);
            self.breaker.begin(now);
        }
        begun
    }

    fn end(&self, transfer_ns: u64) {
        self.transfer_ns.fetch_sub(transfer_ns, Relaxed);
        self.running.fetch_sub(1, Relaxed);
    }
}

impl PeerFetches {
    /// Whether the worker may send a further prefix.
    pub fn may_send(&self, bounds: FetchBounds, now: Instant) -> bool {
        self.sent.allows(bounds, now)
    }

    /// Whether the worker may take a further prefix.
    pub fn may_take(&self, bounds: FetchBounds, now: Instant) -> bool {
        self.taken.allows(bounds, now)
    }

    /// Whether a trial of the worker is not to wait because others have failed.
    pub fn may_try(&self, now: Instant) -> bool {
        self.trials.allows(now)
    }

    /// Records that a trial of the worker begins.
    pub fn trial_begins(&self, now: Instant) {
        self.trials.begin(now);
    }

    /// Records a trial in which a worker has taken a prefix from a source.
    pub fn trial_succeeded(source: &Self, fetcher: &Self) {
        source.sent.is_proven.store(true, Relaxed);
        fetcher.taken.is_proven.store(true, Relaxed);
        source.trials.succeed();
        fetcher.trials.succeed();
    }

    /// Forgets what trials have shown, because the engine is another process.
    pub fn forget_trials(&self) {
        self.sent.is_proven.store(false, Relaxed);
        self.taken.is_proven.store(false, Relaxed);
        self.trials.succeed();
    }

    /// Records that a trial of the worker has failed.
    pub fn trial_failed(&self, now: Instant) {
        self.trials.fail(now);
    }

    /// Whether the worker has sent a prefix in a trial.
    pub fn has_sent(&self) -> bool {
        self.sent.is_proven.load(Relaxed)
    }

    /// Whether the worker has taken a prefix in a trial.
    pub fn has_taken(&self) -> bool {
        self.taken.is_proven.load(Relaxed)
    }

    /// Whether this worker as a source, or the other one as the one that takes, has failed lately.
    pub fn failed_with(&self, fetcher: &Self, now: Instant) -> bool {
        !self.sent.breaker.allows(now) || !fetcher.taken.breaker.allows(now)
    }

    /// The predicted duration of transfers from the worker, in nanoseconds.
    pub fn outgoing_ns(&self) -> u64 {
        self.sent.transfer_ns.load(Relaxed)
    }

    /// The predicted duration of transfers to the worker, in nanoseconds.
    pub fn incoming_ns(&self) -> u64 {
        self.taken.transfer_ns.load(Relaxed)
    }

    /// To be told whether this prefix has arrived, if the worker is taking it already.
    pub fn arriving(&self, prefix: Prefix) -> Option<watch::Receiver<bool>> {
        let arriving = self.arriving_list();
        let same = arriving.iter().find(|arriving| arriving.prefix == prefix);
        same.map(|arriving| arriving.has_arrived.clone())
    }

    fn arriving_list(&self) -> MutexGuard<'_, Vec<ArrivingPrefix>> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of fetches under way from the worker.
    pub fn sending(&self) -> u32 {
        self.sent.running.load(Relaxed)
    }

    /// Number of fetches under way to the worker.
    pub fn taking(&self) -> u32 {
        self.taken.running.load(Relaxed)
    }
}

/// A fetch under way, which counts on both workers. Dropping it ends it.
#[derive(Debug)]
pub struct FetchBooking {
    source: Arc<PeerFetches>,
    fetcher: Arc<PeerFetches>,
    transfer_ns: u64,
    has_arrived: watch::Sender<bool>,
}

impl FetchBooking {
    /// Begins a fetch whose transfer is predicted to take `transfer_ns`; `None` if one of the
    /// workers has as many fetches as it may have.
    pub fn begin(
        source: &Arc<PeerFetches>,
        fetcher: &Arc<PeerFetches>,
        prefix: Prefix,
        bounds: FetchBounds,
        transfer_ns: u64,
    ) -> Option<Self> {
        let now = Instant::now();
        if !source.sent.begin(bounds, transfer_ns, now) {
            return None;
        }
        if !fetcher.taken.begin(bounds, transfer_ns, now) {
            source.sent.end(transfer_ns);
            return None;
        }
        let (sender, has_arrived) = watch::channel(false);
        fetcher.arriving_list().push(ArrivingPrefix { prefix, has_arrived });
        let (source, fetcher) = (Arc::clone(source), Arc::clone(fetcher));
        Some(Self { source, fetcher, transfer_ns, has_arrived: sender })
    }

    /// Whether no other fetch uses the links of both workers, so that its duration says how fast
    /// they are.
    pub fn is_alone(&self) -> bool {
        self.source.sent.running.load(Relaxed) == 1 && self.fetcher.taken.running.load(Relaxed) == 1
    }

    /// Tells requests that wait for the same prefix that it has arrived.
    pub fn arrived(&self) {
        self.has_arrived.send_replace(true);
    }

    /// Records that the source did its part, or that it is a source of nothing for a while.
    pub fn source_did(&self, well: bool, now: Instant) {
        self.source.sent.ended(well, now);
    }

    /// Records that the other worker took the prefix, or that neither it nor the source takes part in
    /// a fetch in this direction for a while: it may have failed because the source is gone.
    pub fn both_did(&self, well: bool, now: Instant) {
        self.fetcher.taken.ended(well, now);
        if !well {
            self.source.sent.ended(false, now);
        }
    }
}

impl Direction {
    fn ended(&self, well: bool, now: Instant) {
        if well {
            self.breaker.succeed();
        } else {
            self.breaker.fail(now);
        }
    }
}

impl Drop for FetchBooking {
    fn drop(&mut self) {
        // Before the channel is closed: who is told of that finds another fetch, or none.
        let own = self.has_arrived.subscribe();
        self.fetcher.arriving_list().retain(|one| !one.has_arrived.same_channel(&own));
        self.source.sent.end(self.transfer_ns);
        self.fetcher.taken.end(self.transfer_ns);
    }
}
