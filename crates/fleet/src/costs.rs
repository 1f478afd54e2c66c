//! Learns the costs of a worker's work from finished requests, and predicts when a worker will be free.
//!
//! The worker is modelled as a server that computes one prompt after another. An engine that
//! computes several at once finishes them at about the same time, and the model is only used for the time
//! until the next prompt can begin.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use serde::Serialize;
use tokio::sync::Notify;

use splitrail_config::model::CostsConfig;
use splitrail_policy::Coefficients;
use splitrail_policy::learn::{BusyShare, Evidence, Learner};

/// How long coefficients are used before they are reckoned anew: they change slowly, and
/// picks are frequent.
const FRESH_NS: u64 = 500_000_000;

/// One worker's costs.
#[derive(Debug)]
pub struct Costs {
    epoch: Instant,
    /// Told when a prompt is done.
    freed: OnceLock<Arc<Notify>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    prior: Coefficients,
    learner: Learner,
    busy: BusyShare,
    /// This router's prompts that the worker has to compute, the oldest first. As many as
    /// there are requests in flight.
    queue: VecDeque<Queued>,
    next: u64,
    /// When each rank last did a prompt; as many as the worker has ranks.
    done: Vec<(Option<u16>, u64)>,
    /// The learner's word, and when it was given.
    known: (Coefficients, u64),
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    number: u64,
    rank: Option<u16>,
    begun_ns: u64,
    predicted_ns: u64,
    /// Whether nobody is going to say when it is computed: the reply comes as a whole.
    unheard: bool,
}

/// The queue whose waiting time is predicted: that of one rank, or that of the rank which the engine will choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankScope {
    /// A rank's, or that of a worker without.
    Rank(Option<u16>),
    /// That of whichever of so many ranks the engine is going to choose.
    Any(u64),
}

/// What a pick wants to know of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// Until one more prompt could begin.
    pub wait_ns: u64,
    /// Prompts of this router that it has not begun.
    pub waiting: u32,
    /// The share of the last minute in which it computed prompts.
    pub busy_share: f64,
    /// What its work costs.
    pub coefficients: Coefficients,
}

/// As it is shown.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CostsView {
    /// What it costs.
    pub costs: CostsConfig,
    /// What the cost of prefills rests on.
    pub prefill: Evidence,
    /// What the cost of hand-offs rests on.
    pub hand_off: Evidence,
    /// What the cost of steps rests on.
    pub step: Evidence,
    /// The share of the last minute in which it computed prompts.
    pub busy_share: f64,
}

impl Costs {
    /// Begins with what is configured.
    pub fn new(prior: Coefficients) -> Self {
        let state = State {
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

    /// From now on, these are told when a prompt is done.
    pub fn tell(&self, freed: &Arc<Notify>) {
        let _once = self.freed.set(Arc::clone(freed));
    }

    /// From now on this is configured. If it is news, what was learned is void.
    pub fn set_prior(&self, prior: Coefficients) {
        let mut state = self.lock();
        if state.prior != prior {
            state.prior = prior;
            state.learner = Learner::new(prior);
            state.known = (prior, 0);
        }
    }

    /// It is another process, or may be: what was learned of the last one is void.
    pub fn forget(&self) {
        let mut state = self.lock();
        state.learner = Learner::new(state.prior);
        state.known = (state.prior, 0);
    }

    /// What is known at this instant, where others have it compute so many tokens besides.
    pub fn seen(&self, now: Instant, whose: RankScope, others_tokens: u64) -> Seen {
        let now_ns = self.ns(now);
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
        Seen {
            wait_ns: left_ns.saturating_add(others as u64),
            waiting: u32::try_from(queued.saturating_sub(1)).unwrap_or(u32::MAX),
            busy_share: state.busy.at(now_ns),
            coefficients,
        }
    }

    /// The worker gets a prompt of which it has `new_tokens` to compute, after the
    /// `context_tokens` that it holds; `unheard` if nobody is going to say when it is done.
    pub fn begin(
        self: &Arc<Self>,
        now: Instant,
        rank: Option<u16>,
        new_tokens: u64,
        context_tokens: u64,
        unheard: bool,
    ) -> Work {
        let now_ns = self.ns(now);
        let mut state = self.lock();
        let coefficients = state.coefficients(now_ns);
        let prompt_tokens = new_tokens.saturating_add(context_tokens);
        let predicted_ns = coefficients.prefill_ns(prompt_tokens, context_tokens);
        let number = state.next;
        state.next += 1;
        state.queue.push_back(Queued { number, rank, begun_ns: now_ns, predicted_ns, unheard });
        state.busy.set(now_ns, true);
        Work { costs: Arc::clone(self), number, new_tokens, context_tokens }
    }

    /// Its KV of so many tokens came within so many seconds to where it is used.
    pub fn handed_over(&self, tokens: u64, seconds: f64) {
        self.lock().learner.hand_off(tokens, seconds);
    }

    /// A step of generation of so many requests with so much context took so long.
    pub fn stepped(&self, requests: u64, context_tokens: u64, seconds: f64) {
        self.lock().learner.step(requests, context_tokens, seconds);
    }

    /// What it is believed to cost, and why.
    pub fn view(&self, now: Instant) -> CostsView {
        let now_ns = self.ns(now);
        let state = self.lock();
        CostsView {
            costs: state.learner.coefficients(now_ns).into(),
            prefill: state.learner.prefill_evidence(),
            hand_off: state.learner.hand_off_evidence(),
            step: state.learner.step_evidence(),
            busy_share: state.busy.at(now_ns),
        }
    }

    /// Takes a prompt out; the seconds that it took by itself.
    fn leave(&self, now: Instant, number: u64) -> Option<f64> {
        let now_ns = self.ns(now);
        let mut state = self.lock();
        let place = state.queue.iter().position(|queued| queued.number == number)?;
        let queued = state.queue.remove(place)?;
        let alone_ns = now_ns.saturating_sub(queued.begun_ns.max(state.done_ns(queued.rank)));
        match state.done.iter_mut().find(|(rank, _)| *rank == queued.rank) {
            Some((_, done_ns)) => *done_ns = now_ns,
            None => state.done.push((queued.rank, now_ns)),
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

    fn ns(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.epoch);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// When a rank last did a prompt; 0 if it did none.
    fn done_ns(&self, rank: Option<u16>) -> u64 {
        self.done.iter().find(|(other, _)| *other == rank).map_or(0, |(_, done_ns)| *done_ns)
    }

    /// What is left of a rank's queue, and how many are in it. Of prompts whose end is heard, the first is at work until
    /// then; of others it is when the prediction says.
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

/// A prompt that a worker has to compute; dropping it takes it from the queue and teaches
/// nothing.
#[derive(Debug)]
pub struct Work {
    costs: Arc<Costs>,
    number: u64,
    new_tokens: u64,
    context_tokens: u64,
}

impl Work {
    /// It is computed: so much was cached by the engine's word, if it has given it.
    pub fn done(self, now: Instant, cached_tokens: Option<u64>) {
        let prompt_tokens = self.new_tokens.saturating_add(self.context_tokens);
        let cached = cached_tokens.map_or(self.context_tokens, |cached| cached.min(prompt_tokens));
        let Some(seconds) = self.costs.leave(now, self.number) else { return };
        let now_ns = self.costs.ns(now);
        let mut state = self.costs.lock();
        state.learner.prefill(now_ns, prompt_tokens - cached, cached, seconds);
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // What is done has left already, and is not there.
        let _seconds = self.costs.leave(Instant::now(), self.number);
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
    fn a_worker_twice_as_slow_as_told_is_found_out_though_its_prompts_queue() {
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
    fn a_prompt_whose_end_nobody_hears_is_done_when_it_should_be() {
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
    fn what_fails_teaches_nothing() {
        let (costs, at) = costs();
        drop(costs.begin(at(0), None, 1000, 0, false));
        assert_eq!(costs.view(at(5000)).prefill.observations, 0);
    }
}
