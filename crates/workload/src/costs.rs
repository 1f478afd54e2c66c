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
use splitrail_policy::learn::{BusyShare, Learner, Slowdown, StageEvidence, UsualScales};
use splitrail_policy::{Coefficients, nanoseconds};

/// How many prompts whose end is not observed may count as computed while nothing has been learned of a
/// worker: it may be far slower than configured.
const UNHEARD_MAX: usize = 8;

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
    /// What each rank completed last. Bounded by the number of ranks.
    done: Vec<ComputedPrompt>,
    /// The last computed coefficients, and when they were computed.
    known: (Coefficients, u64),
}

/// What is known of when a rank began a prompt.
#[derive(Clone, Copy, Debug)]
enum Beginning {
    /// When it had computed what was sent before, with an error of so many seconds.
    Known(f64),
    /// A prompt that was sent before may have been computed meanwhile.
    Unknown,
    /// The prompt was computed at this time at the latest, as a later one shows.
    ComputedBefore(u64),
}

/// A prompt that a rank has computed.
#[derive(Clone, Copy, Debug)]
struct ComputedPrompt {
    rank: Option<u16>,
    /// When it was computed.
    at_ns: u64,
    /// How far that may be wrong, because it was not observed.
    error_ns: u64,
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
    /// When the prompt was computed at the latest: a later one of its rank has been.
    computed_ns: Option<u64>,
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

/// What is known of a whole reply when it has arrived.
#[derive(Clone, Copy, Debug)]
pub struct WholeReply {
    /// The engine's figure of cached tokens, if it reported one.
    pub cached_tokens: Option<u64>,
    /// The decode steps after the first token.
    pub steps: u64,
    /// The requests that the worker had meanwhile, this one included.
    pub requests: u64,
    /// Their tokens of context in total.
    pub context_tokens: u64,
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
    /// The observations behind each estimate.
    #[serde(flatten)]
    pub evidence: StageEvidence,
    /// The share of the last minute in which the worker computed prompts, from 0 to 1.
    pub busy_share: f64,
}

/// How fast a worker is; `None` for what is not learned yet.
#[derive(Clone, Copy, Debug)]
pub struct LearnedSpeed {
    /// Prompt tokens that it computes per second.
    pub prefill_tokens_per_s: Option<f64>,
    /// Milliseconds of a decode step.
    pub step_ms: Option<f64>,
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
            computed_ns: None,
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
            0 => (costs.hand_off_seconds(prompt_tokens), state.learner.evidence().step),
            _ => {
                let held = prompt_tokens.saturating_sub(new_tokens);
                (costs.prefill_seconds(prompt_tokens, held), state.learner.evidence().prefill)
            }
        };
        let duration = |seconds| Duration::from_nanos(nanoseconds(seconds));
        let are_learned = evidence.observations > 0;
        LegTimes { first: duration(first + step), step: duration(step), are_learned }
    }

    /// Whether the times of prefills or decode steps have been observed.
    pub fn are_learned(&self) -> bool {
        self.lock().is_learned()
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
            evidence: state.learner.evidence(),
            busy_share: state.busy.at(now_ns),
        }
    }

    /// The speed that was learned, for people: without a prompt before the one that is computed, and
    /// of a step of one request.
    pub fn learned_speed(&self, now: Instant) -> LearnedSpeed {
        let now_ns = ns_since(self.epoch, now);
        let state = self.lock();
        let costs = state.learner.coefficients(now_ns);
        let step = costs.step_base_seconds + costs.step_seconds_per_request;
        let prefills = state.learner.evidence().prefill.observations;
        let steps = state.learner.evidence().step.observations;
        LearnedSpeed {
            prefill_tokens_per_s: (prefills > 0).then(|| 1.0 / costs.prefill_seconds_per_token),
            step_ms: (steps > 0).then_some(step * 1e3),
        }
    }

    /// Learns from a whole reply whose prompt was handed over, `took` after its leg was sent: the
    /// hand-off or a step, whichever took longer as predicted. The hand-off took `scale` times as long as
    /// one within a zone.
    pub fn learn_handed_over(
        &self,
        now: Instant,
        tokens: u64,
        took: Duration,
        scale: f64,
        reply: WholeReply,
    ) {
        let now_ns = ns_since(self.epoch, now);
        let mut state = self.lock();
        let costs = state.coefficients(now_ns);
        let hand_off = costs.hand_off_seconds(tokens) * scale;
        let steps = reply.seconds(&costs);
        let took = took.as_secs_f64();
        if steps > hand_off {
            state.learn_steps(now_ns, reply, took - hand_off);
        } else if reply.requests <= 1 {
            state.learner.hand_off(now_ns, tokens, (took - steps) / scale);
        }
    }

    /// Removes a prompt from the queue. `computed` says when it was computed, if it was. Returns the
    /// seconds that it took by itself. A prompt that is removed without being computed, behind others,
    /// says nothing of how far those are.
    fn leave(&self, now_ns: u64, number: u64, computed: Option<(u64, u64)>) -> Option<f64> {
        let mut state = self.lock();
        let place = state.queue.iter().position(|queued| queued.number == number)?;
        let queued = state.queue.remove(place)?;
        let is_behind = state.queue.iter().take(place).any(|other| other.rank == queued.rank);
        let (at_ns, error_ns) = computed.unwrap_or((now_ns, 0));
        if computed.is_some() {
            // A worker computes prompts in the order in which they are sent.
            let before = state.queue.iter_mut().take(place).filter(|other| other.unheard);
            let before = before.filter(|other| other.rank == queued.rank);
            before.for_each(|other| _ = other.computed_ns.get_or_insert(at_ns));
        }
        let alone_ns = at_ns.saturating_sub(queued.begun_ns.max(state.done_ns(queued.rank)));
        if computed.is_some() || !is_behind {
            let rank = queued.rank;
            let last = ComputedPrompt { rank, at_ns, error_ns };
            match state.done.iter_mut().find(|done| done.rank == rank) {
                Some(done) if done.at_ns <= at_ns => *done = last,
                Some(_) => {}
                None => state.done.push(last),
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

impl WholeReply {
    /// The predicted time of its steps.
    fn seconds(&self, costs: &Coefficients) -> f64 {
        self.steps as f64 * costs.step_seconds(self.requests.max(1), self.context_tokens)
    }
}

impl CostState {
    /// What a rank completed last, if it ever did.
    fn done(&self, rank: Option<u16>) -> Option<&ComputedPrompt> {
        self.done.iter().find(|done| done.rank == rank)
    }

    /// When a rank last completed a prompt; 0 if it never did.
    fn done_ns(&self, rank: Option<u16>) -> u64 {
        self.done(rank).map_or(0, |done| done.at_ns)
    }

    /// What is known of the beginning of a prompt that has its reply now; `None` if it is not in the
    /// queue.
    fn beginning(&self, number: u64) -> Option<Beginning> {
        let place = self.queue.iter().position(|queued| queued.number == number)?;
        let QueuedPrefill { rank, begun_ns, computed_ns, .. } = self.queue[place];
        if let Some(computed_ns) = computed_ns {
            return Some(Beginning::ComputedBefore(computed_ns));
        }
        let is_open = |other: &QueuedPrefill| other.rank == rank && other.computed_ns.is_none();
        if self.queue.iter().take(place).any(is_open) {
            return Some(Beginning::Unknown);
        }
        let last = self.done(rank).filter(|last| last.at_ns + last.error_ns > begun_ns);
        Some(Beginning::Known(last.map_or(0.0, |last| last.error_ns as f64 / 1e9)))
    }

    /// Learns from decode steps that took so many seconds in all.
    fn learn_steps(&mut self, now_ns: u64, reply: WholeReply, seconds: f64) {
        let WholeReply { steps, requests, context_tokens, .. } = reply;
        self.learner.step(now_ns, requests, context_tokens, seconds / steps as f64);
    }

    /// Whether anything has been learned of what the worker does for a reply.
    fn is_learned(&self) -> bool {
        let evidence = self.learner.evidence();
        evidence.prefill.observations > 0 || evidence.step.observations > 0
    }

    /// The remaining time of a rank's queue, and the number of prompts in it. If the router learns
    /// when the first prompt ends, that prompt is in progress until then; otherwise it ends at the
    /// predicted time. Of those, only some count as computed while nothing has been learned.
    fn left_ns(&self, now_ns: u64, rank: Option<u16>) -> (u64, usize) {
        let is_open = |queued: &&QueuedPrefill| queued.computed_ns.is_none();
        let own = || self.queue.iter().filter(|queued| queued.rank == rank).filter(is_open);
        let begun_ns = own().next().map_or(now_ns, |head| head.begun_ns.max(self.done_ns(rank)));
        let mut passed_ns = now_ns.saturating_sub(begun_ns);
        let mut left_ns = 0_u64;
        let unheard_max = if self.is_learned() { usize::MAX } else { UNHEARD_MAX };
        for (place, queued) in own().enumerate() {
            let spent_ns = passed_ns.min(queued.predicted_ns);
            left_ns = left_ns.saturating_add(queued.predicted_ns - spent_ns);
            let goes_on = queued.unheard && place < unheard_max;
            passed_ns = if goes_on { passed_ns - spent_ns } else { 0 };
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
        let now_ns = ns_since(self.costs.epoch, now);
        let left = self.costs.leave(now_ns, self.number, Some((now_ns, 0)));
        left.into_iter().for_each(|seconds| self.learn(now_ns, cached, seconds));
    }

    /// Records that the whole reply to the prompt has arrived, and learns from it: from the prefill if
    /// that took most of the time, as predicted, or from a step if many of them did.
    pub fn replied(self, now: Instant, reply: WholeReply) {
        /// With fewer steps, their mean is too uncertain.
        const STEPS_MIN: u64 = 8;
        let prompt_tokens = self.new_tokens.saturating_add(self.context_tokens);
        let cached = reply.cached_tokens.unwrap_or(self.context_tokens).min(prompt_tokens);
        let now_ns = ns_since(self.costs.epoch, now);
        let (prefill, steps, beginning) = {
            let mut state = self.costs.lock();
            let costs = state.coefficients(now_ns);
            let prefill = costs.prefill_seconds(prompt_tokens, cached);
            (prefill, reply.seconds(&costs), state.beginning(self.number))
        };
        let steps_ns = nanoseconds(steps);
        let computed = match beginning {
            Some(Beginning::ComputedBefore(at_ns)) => (at_ns, 0),
            _ => (now_ns.saturating_sub(steps_ns), steps_ns),
        };
        let left = self.costs.leave(now_ns, self.number, Some(computed));
        let Some((seconds, beginning)) = left.zip(beginning) else { return };
        let (of_prompt, of_steps) = match beginning {
            Beginning::Unknown => return,
            Beginning::Known(error) => (prefill + error, seconds + steps - prefill),
            Beginning::ComputedBefore(at_ns) => {
                (prefill, now_ns.saturating_sub(at_ns) as f64 / 1e9)
            }
        };
        if reply.steps >= STEPS_MIN && steps >= 2.0 * of_prompt {
            self.costs.lock().learn_steps(now_ns, reply, of_steps);
        } else if matches!(beginning, Beginning::Known(error) if prefill >= steps + error) {
            self.learn(now_ns, cached, seconds);
        }
    }

    /// Learns from the prompt, which took so many seconds by itself.
    fn learn(&self, now_ns: u64, cached: u64, seconds: f64) {
        let prompt_tokens = self.new_tokens.saturating_add(self.context_tokens);
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
        let now_ns = ns_since(self.costs.epoch, Instant::now());
        let _seconds = self.costs.leave(now_ns, self.number, None);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
