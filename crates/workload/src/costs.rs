//! Learns the costs of a worker's work from finished requests, and predicts when a worker will be
//! free.
//!
//! The worker is modelled as a server that computes one prompt after another. An engine that
//! computes several at once finishes them at about the same time, and the model is only used for
//! the time until the next prompt can begin.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::Notify;

use crate::clock::ns_since;
use crate::progress::LegTimes;
use splitrail_config::model::CostsConfig;
use splitrail_kv::Tier;
use splitrail_policy::learn::{BusyShare, Evidence, Learner, Slowdown, UsualScales};
use splitrail_policy::{Coefficients, nanoseconds};

/// How long computed coefficients are reused: they change slowly, and they are read often.
const FRESH_NS: u64 = 500_000_000;

/// The cost model of one worker, and the queue of its prompts.
#[derive(Debug)]
pub struct Costs {
    epoch: Instant,
    /// Notified when a prompt has been computed.
    freed: OnceLock<Arc<Notify>>,
    state: Mutex<CostState>,
}

#[derive(Debug)]
struct CostState {
    prior: Coefficients,
    learner: Learner,
    busy: BusyShare,
    /// This router's prompts that the worker still has to compute, the oldest first. Bounded by the
    /// number of requests in flight.
    queue: VecDeque<QueuedPrefill>,
    next: u64,
    /// When each rank last completed a prompt. Bounded by the number of ranks.
    done: Vec<(Option<u16>, u64)>,
    /// The last computed coefficients, and when they were computed.
    known: (Coefficients, u64),
}

#[derive(Clone, Copy, Debug)]
struct QueuedPrefill {
    number: u64,
    rank: Option<u16>,
    begun_ns: u64,
    predicted_ns: u64,
    /// Whether the router will not learn when the prompt is computed, because the reply is not
    /// streamed.
    unheard: bool,
}

/// The queue whose waiting time is predicted: that of one rank, or that of the rank which the
/// engine will choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankScope {
    /// The queue of one rank, or of a worker without ranks.
    Rank(Option<u16>),
    /// The queue of the rank that the engine will choose; the number of ranks.
    Any(u64),
}

/// What a decision needs to know of a worker's costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerCosts {
    /// Nanoseconds until one more prompt could begin.
    pub wait_ns: u64,
    /// Number of this router's prompts that the worker has not begun.
    pub waiting: u32,
    /// The share of the last minute in which the worker computed prompts, from 0 to 1.
    pub busy_share: f64,
    /// The coefficients of the cost model.
    pub coefficients: Coefficients,
}

/// The cost model as shown on the admin listener.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CostsView {
    /// The coefficients.
    pub costs: CostsConfig,
    /// The bandwidth of fetches from other workers in gigabytes (10^9 bytes) per second: the
    /// configured one is that of hand-offs, but both are learned apart.
    pub fetch_gb_per_second: f64,
    /// The observations behind the cost of prefills.
    pub prefill: Evidence,
    /// The observations behind the cost of hand-offs.
    pub hand_off: Evidence,
    /// The observations behind the cost of fetches.
    pub fetch: Evidence,
    /// The observations behind the cost of read-backs.
    pub read: Evidence,
    /// The observations behind the cost of loads from slower tiers.
    pub load: Evidence,
    /// The observations behind the cost of decode steps.
    pub step: Evidence,
    /// The share of the last minute in which the worker computed prompts, from 0 to 1.
    pub busy_share: f64,
}

impl Default for Costs {
    fn default() -> Self {
        Self::new(Coefficients::default())
    }
}

impl Costs {
    /// A cost model that starts with the configured coefficients.
    pub fn new(prior: Coefficients) -> Self {
        let state = CostState {
            prior,
            learner: Learner::new(prior),
            busy: BusyShare::default(),
            queue: VecDeque::new(),
            next: 0,
            done: Vec::new(),
            known: (prior, 0),
        };
        Self { epoch: Instant::now(), freed: OnceLock::new(), state: Mutex::new(state) }
    }

    /// Sets what to notify when a prompt has been computed. Only the first call counts.
    pub fn notify_when_freed(&self, freed: &Arc<Notify>) {
        let _once = self.freed.set(Arc::clone(freed));
    }

    /// Sets the configured coefficients. If they have changed, everything learned is dropped.
    pub fn set_prior(&self, prior: Coefficients) {
        let mut state = self.lock();
        if state.prior != prior {
            state.prior = prior;
            state.learner = Learner::new(prior);
            state.known = (prior, 0);
        }
    }

    /// Drops what was learned of this worker, because it may have been restarted.
    pub fn forget(&self) {
        let mut state = self.lock();
        state.learner.forget();
        state.known = (state.learner.coefficients(0), 0);
    }

    /// What was learned, for a comparison with other workers.
    pub fn learner(&self) -> Learner {
        self.lock().learner.clone()
    }

    /// Sets what the usual worker of the fleet is like.
    pub fn set_usual(&self, usual: &UsualScales) {
        self.lock().learner.set_usual(usual);
    }

    /// How many times as long as the usual worker this one takes.
    pub fn slowdown(&self) -> Slowdown {
        self.lock().learner.slowdown()
    }

    /// The current costs and waiting time, if other routers have sent `others_tokens` to compute.
    pub fn seen(&self, now: Instant, whose: RankScope, others_tokens: u64) -> WorkerCosts {
        let now_ns = ns_since(self.epoch, now);
        let mut state = self.lock();
        let coefficients = state.coefficients(now_ns);
        let others = others_tokens as f64 * coefficients.prefill_seconds_per_token * 1e9;
        let (left_ns, queued) = match whose {
            RankScope::Rank(rank) => state.left_ns(now_ns, rank),
            RankScope::Any(ranks) => {
                let (left_ns, queued) = state.left_ns(now_ns, None);
                (left_ns / ranks.max(1), queued.div_ceil(ranks.max(1) as usize))
            }
        };
        WorkerCosts {
            wait_ns: left_ns.saturating_add(others as u64),
            waiting: u32::try_from(queued.saturating_sub(1)).unwrap_or(u32::MAX),
            busy_share: state.busy.at(now_ns),
            coefficients,
        }
    }

    /// Adds a prompt to the queue, with `new_tokens` to compute after `context_tokens` that the
    /// worker holds. `unheard` if the router will not learn when it is computed.
    pub fn begin(
        self: &Arc<Self>,
        now: Instant,
        rank: Option<u16>,
        new_tokens: u64,
        context_tokens: u64,
        unheard: bool,
    ) -> PromptWork {
        let now_ns = ns_since(self.epoch, now);
        let mut state = self.lock();
        let coefficients = state.coefficients(now_ns);
        let prompt_tokens = new_tokens.saturating_add(context_tokens);
        let predicted_ns = coefficients.prefill_ns(prompt_tokens, context_tokens);
        let number = state.next;
        state.next += 1;
        state.queue.push_back(QueuedPrefill {
            number,
            rank,
            begun_ns: now_ns,
            predicted_ns,
            unheard,
        });
        state.busy.set(now_ns, true);
        let (costs, loaded) = (Arc::clone(self), [0; Tier::COUNT]);
        PromptWork { costs, number, new_tokens, context_tokens, loaded, read_tokens: 0 }
    }

    /// The predicted times of a leg with `new_tokens` to compute of a prompt of `prompt_tokens`, or
    /// whose whole prompt is handed over if that is 0, among `requests` on the worker.
    pub fn leg_times(
        &self,
        now: Instant,
        new_tokens: u64,
        prompt_tokens: u64,
        requests: u64,
    ) -> LegTimes {
        let mut state = self.lock();
        let costs = state.coefficients(ns_since(self.epoch, now));
        let step = costs.step_seconds(requests, prompt_tokens.saturating_mul(requests));
        let (first, evidence) = match new_tokens {
            0 => (costs.hand_off_seconds(prompt_tokens), state.learner.step_evidence()),
            _ => {
                let held = prompt_tokens.saturating_sub(new_tokens);
                (costs.prefill_seconds(prompt_tokens, held), state.learner.prefill_evidence())
            }
        };
        let duration = |seconds| Duration::from_nanos(nanoseconds(seconds));
        let are_learned = evidence.observations > 0;
        LegTimes { first: duration(first + step), step: duration(step), are_learned }
    }

    /// Whether the times of prefills or decode steps have been observed.
    pub fn are_learned(&self) -> bool {
        let state = self.lock();
        let evidence = [state.learner.prefill_evidence(), state.learner.step_evidence()];
        evidence.iter().any(|stage| stage.observations > 0)
    }

    /// Learns from a hand-off: the KV of `tokens` arrived within `seconds`.
    pub fn learn_hand_off(&self, now: Instant, tokens: u64, seconds: f64) {
        self.lock().learner.hand_off(ns_since(self.epoch, now), tokens, seconds);
    }

    /// Learns from a fetch: the KV of `tokens` arrived within `seconds`, without waits for earlier
    /// transfers.
    pub fn learn_fetch(&self, now: Instant, tokens: u64, seconds: f64) {
        self.lock().learner.fetch(ns_since(self.epoch, now), tokens, seconds);
    }

    /// Learns from a decode step of `requests` with a total of `context_tokens`.
    pub fn learn_step(&self, now: Instant, requests: u64, context_tokens: u64, seconds: f64) {
        self.lock().learner.step(ns_since(self.epoch, now), requests, context_tokens, seconds);
    }

    /// The cost model as shown on the admin listener.
    pub fn view(&self, now: Instant) -> CostsView {
        let now_ns = ns_since(self.epoch, now);
        let state = self.lock();
        let coefficients = state.learner.coefficients(now_ns);
        CostsView {
            costs: coefficients.into(),
            fetch_gb_per_second: coefficients.fetch_bytes_per_second / 1e9,
            prefill: state.learner.prefill_evidence(),
            hand_off: state.learner.hand_off_evidence(),
            fetch: state.learner.fetch_evidence(),
            read: state.learner.read_evidence(),
            load: state.learner.load_evidence(),
            step: state.learner.step_evidence(),
            busy_share: state.busy.at(now_ns),
        }
    }

    /// Removes a prompt from the queue. Returns the seconds that it took by itself. A prompt that is
    /// removed without being computed, behind others, says nothing of how far those are.
    fn leave(&self, now: Instant, number: u64, is_computed: bool) -> Option<f64> {
        let now_ns = ns_since(self.epoch, now);
        let mut state = self.lock();
        let place = state.queue.iter().position(|queued| queued.number == number)?;
        let queued = state.queue.remove(place)?;
        let is_behind = state.queue.iter().take(place).any(|other| other.rank == queued.rank);
        let alone_ns = now_ns.saturating_sub(queued.begun_ns.max(state.done_ns(queued.rank)));
        if is_computed || !is_behind {
            match state.done.iter_mut().find(|(rank, _)| *rank == queued.rank) {
                Some((_, done_ns)) => *done_ns = now_ns,
                None => state.done.push((queued.rank, now_ns)),
            }
        }
        if state.queue.is_empty() {
            state.busy.set(now_ns, false);
        }
        drop(state);
        if let Some(freed) = self.freed.get() {
            freed.notify_one();
        }
        Some(alone_ns as f64 / 1e9)
    }

    fn lock(&self) -> MutexGuard<'_, CostState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CostState {
    /// When a rank last completed a prompt; 0 if it never did.
    fn done_ns(&self, rank: Option<u16>) -> u64 {
        self.done.iter().find(|(other, _)| *other == rank).map_or(0, |(_, done_ns)| *done_ns)
    }

    /// The remaining time of a rank's queue, and the number of prompts in it. If the router learns
    /// when the first prompt ends, that prompt is in progress until then; otherwise it ends at the
    /// predicted time.
    fn left_ns(&self, now_ns: u64, rank: Option<u16>) -> (u64, usize) {
        let own = || self.queue.iter().filter(|queued| queued.rank == rank);
        let begun_ns = own().next().map_or(now_ns, |head| head.begun_ns.max(self.done_ns(rank)));
        let mut passed_ns = now_ns.saturating_sub(begun_ns);
        let mut left_ns = 0_u64;
        for queued in own() {
            let spent_ns = passed_ns.min(queued.predicted_ns);
            left_ns = left_ns.saturating_add(queued.predicted_ns - spent_ns);
            passed_ns = if queued.unheard { passed_ns - spent_ns } else { 0 };
        }
        (left_ns, own().count())
    }

    fn coefficients(&mut self, now_ns: u64) -> Coefficients {
        if now_ns.saturating_sub(self.known.1) >= FRESH_NS {
            self.known = (self.learner.coefficients(now_ns), now_ns);
        }
        self.known.0
    }
}

/// A prompt that a worker has to compute. Dropping it removes it from the queue without learning
/// from it.
#[derive(Debug)]
pub struct PromptWork {
    costs: Arc<Costs>,
    number: u64,
    new_tokens: u64,
    context_tokens: u64,
    /// The part of the context that the worker holds in each tier, in tokens.
    loaded: [u64; Tier::COUNT],
    /// The part of the context that the worker reads back.
    read_tokens: u64,
}

impl PromptWork {
    /// Says how many blocks of the context the worker holds in each tier: those that are not in
    /// accelerator memory are loaded.
    pub fn loading(mut self, blocks_by_tier: [u32; Tier::COUNT], block_size: u32) -> Self {
        self.loaded = blocks_by_tier.map(|blocks| u64::from(blocks) * u64::from(block_size));
        self
    }

    /// Says how much of the context the worker reads back, which takes its time.
    pub fn reading(mut self, tokens: u64) -> Self {
        if tokens > 0 {
            self.read_tokens = tokens;
            let mut state = self.costs.lock();
            let read_ns = nanoseconds(state.known.0.read_seconds(tokens));
            let number = self.number;
            let queued = state.queue.iter_mut().find(|queued| queued.number == number);
            if let Some(queued) = queued {
                queued.predicted_ns = queued.predicted_ns.saturating_add(read_ns);
            }
        }
        self
    }

    /// Records that the prompt has been computed, and learns from it: not if the worker was to load
    /// or read blocks and found fewer, because it is not known which were loaded. `cached_tokens` is
    /// the engine's figure, if it reported one.
    pub fn done(self, now: Instant, cached_tokens: Option<u64>) {
        let prompt_tokens = self.new_tokens.saturating_add(self.context_tokens);
        let cached = cached_tokens.map_or(self.context_tokens, |cached| cached.min(prompt_tokens));
        let Some(seconds) = self.costs.leave(now, self.number, true) else { return };
        let now_ns = ns_since(self.costs.epoch, now);
        let mut state = self.costs.lock();
        let new_tokens = prompt_tokens - cached;
        let loads = self.loaded[1..] != [0; Tier::COUNT - 1];
        if self.read_tokens > 0 {
            if cached >= self.context_tokens && !loads {
                state.learner.read(now_ns, new_tokens, cached, self.read_tokens, seconds);
            }
        } else if !loads {
            state.learner.prefill(now_ns, new_tokens, cached, seconds);
        } else if cached >= self.context_tokens {
            state.learner.load(now_ns, new_tokens, cached, self.loaded, seconds);
        }
    }
}

impl Drop for PromptWork {
    fn drop(&mut self) {
        // Has no effect after `done`, which has already removed the prompt.
        let _seconds = self.costs.leave(Instant::now(), self.number, false);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn costs() -> (Arc<Costs>, impl Fn(u64) -> Instant) {
        let costs = Arc::new(Costs::new(Coefficients::default()));
        let epoch = costs.epoch;
        (costs, move |ms| epoch + Duration::from_millis(ms))
    }

    #[test]
    fn a_queue_is_as_long_as_what_is_left_of_it() {
        let (costs, at) = costs();
        // 12,000 tokens take 1195.6 ms by the prior.
        let first = costs.begin(at(0), None, 12_000, 0, false);
        let second = costs.begin(at(100), None, 12_000, 0, false);
        let wait_ms = |ms| costs.seen(at(ms), RankScope::Rank(None), 0).wait_ns / 1_000_000;
        assert_eq!(
            (wait_ms(100), costs.seen(at(100), RankScope::Rank(None), 0).waiting),
            (2291, 1)
        );
        assert_eq!(wait_ms(1200), 1195, "what takes longer than predicted is about to end");
        assert_eq!(
            costs.seen(at(1200), RankScope::Rank(None), 1000).wait_ns / 1_000_000,
            1280,
            "others' work waits too"
        );
        first.done(at(1300), None);
        assert_eq!(wait_ms(1300), 1195);
        assert_eq!(wait_ms(1800), 695);
        drop(second);
        assert_eq!(wait_ms(1800), 0);
        assert_eq!(costs.seen(at(1800), RankScope::Rank(None), 0).waiting, 0);
    }

    #[test]
    fn a_worker_twice_as_slow_as_configured_is_learned_although_its_prompts_queue() {
        let (costs, at) = costs();
        let prior = Coefficients::default();
        let mut now_ms = 0;
        let mut queue = VecDeque::new();
        for i in 0..400_u64 {
            let (new, context) = (500 + i * 37 % 9000, i * 91 % 4000);
            queue.push_back((costs.begin(at(now_ms), None, new, context, false), new, context));
            if queue.len() < 3 {
                continue;
            }
            let (work, new, context) = queue.pop_front().unwrap();
            let true_ms = 2 * prior.prefill_ns(new + context, context) / 1_000_000;
            now_ms += true_ms;
            work.done(at(now_ms), Some(context));
        }
        let told = costs.view(at(now_ms));
        let ratio = Coefficients::from(told.costs).prefill_ns(8000, 1000) as f64
            / prior.prefill_ns(8000, 1000) as f64;
        assert!((1.9..2.1).contains(&ratio), "{ratio}");
        assert!(told.prefill.observations > 300 && told.busy_share > 0.9, "{told:?}");
        costs.forget();
        assert_eq!(costs.seen(at(now_ms), RankScope::Rank(None), 0).coefficients, prior);
    }

    #[test]
    fn a_prompt_that_gives_up_its_place_leaves_those_before_it_as_far_as_they_are() {
        let (mut costs, _) = costs();
        let second = Duration::from_secs(1);
        Arc::get_mut(&mut costs).unwrap().epoch -= second;
        let (then, now) = (costs.epoch, costs.epoch + second);
        // Takes 1195.6 ms by the prior, of which a second is over.
        let _first = costs.begin(then, None, 12_000, 0, false);
        drop(costs.begin(then, None, 12_000, 0, false));
        assert_eq!(costs.seen(now, RankScope::Rank(None), 0).wait_ns / 1_000_000, 195);
    }

    #[test]
    fn a_prompt_whose_end_is_not_observed_ends_at_its_predicted_time() {
        let (costs, at) = costs();
        let _both = [0, 0].map(|_| costs.begin(at(0), None, 12_000, 0, true));
        let wait_ms = |ms| costs.seen(at(ms), RankScope::Rank(None), 0).wait_ns / 1_000_000;
        assert_eq!((wait_ms(0), wait_ms(1195), wait_ms(2000), wait_ms(9000)), (2391, 1196, 391, 0));
    }

    #[test]
    fn ranks_have_queues_of_their_own() {
        let (costs, at) = costs();
        let _first = costs.begin(at(0), Some(0), 12_000, 0, false);
        let second = costs.begin(at(0), Some(1), 6_000, 0, false);
        let wait_ms = |rank| costs.seen(at(0), RankScope::Rank(Some(rank)), 0).wait_ns / 1_000_000;
        assert_eq!((wait_ms(0), wait_ms(1), wait_ms(2)), (1195, 561, 0));
        second.done(at(600), None);
        let first = costs.seen(at(700), RankScope::Rank(Some(0)), 0).wait_ns / 1_000_000;
        assert_eq!(first, 495, "another rank's end says nothing of this one");
        drop(_first);
        let _any = [0, 0].map(|_| costs.begin(at(700), None, 12_000, 0, false));
        let all_ns = costs.seen(at(700), RankScope::Rank(None), 0).wait_ns;
        assert_eq!(costs.seen(at(700), RankScope::Any(2), 0).wait_ns, all_ns / 2);
    }

    #[test]
    fn a_prompt_that_reads_takes_its_time_and_teaches_what_reading_takes() {
        let (costs, at) = costs();
        let wait_ms = |ms| costs.seen(at(ms), RankScope::Rank(None), 0).wait_ns as f64 / 1e6;
        // 10 ms and 1,000 tokens after 5,000; to read 5,000 tokens takes 5 ms and 16.384 ms.
        let prefill_ms = 10.0 + 85.0 + 1_000.0 * 5_500.0 * 2.3e-6;
        let work = costs.begin(at(0), None, 1_000, 5_000, false).reading(5_000);
        assert!((wait_ms(0) - prefill_ms - 21.384).abs() < 1e-3, "{}", wait_ms(0));
        drop(work);
        let mut now_ms = 1_000;
        for _ in 0..50 {
            let work = costs.begin(at(now_ms), None, 1_000, 5_000, false).reading(5_000);
            now_ms += 208;
            work.done(at(now_ms), Some(6_000 - 1_000));
            // It had lost a part, which it computed.
            let work = costs.begin(at(now_ms), None, 1_000, 5_000, false).reading(5_000);
            now_ms += 900;
            work.done(at(now_ms), Some(200));
        }
        let view = costs.view(at(now_ms));
        assert_eq!((view.prefill.observations, view.read.observations), (0, 50));
        let read_ms = costs.seen(at(now_ms), RankScope::Rank(None), 0).coefficients;
        let read_ms = read_ms.read_seconds(5_000) * 1e3;
        assert!((95.0..105.0).contains(&read_ms), "{read_ms}");
    }

    #[test]
    fn failed_prompts_do_not_train_the_cost_model() {
        let (costs, at) = costs();
        drop(costs.begin(at(0), None, 1000, 0, false));
        assert_eq!(costs.view(at(5000)).prefill.observations, 0);
    }
}
