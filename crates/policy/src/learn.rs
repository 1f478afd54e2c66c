//! Learns the costs of a worker's work from observations.
//!
//! Each stage is a sum of a few terms ([`Coefficients`]), and each term has a prior from the
//! configuration. What is learned is the error of each term: a scale, 1 at the start,
//! fitted by recursive least squares over relative errors ([`Fit`]). Errors are relative, since a long
//! prompt says no more about a worker than a short one.
//!
//! A worker is compared with the usual worker of its fleet ([`UsualScales`]): one that has not been
//! observed yet is expected to be like it, and one that differs by no more than noise counts as equal.
//! Otherwise the first worker that is found faster than the prior would get all requests for ever, and
//! noise would choose among equal workers.

mod busy;
mod fit;
mod stage;
mod usual;

use serde::Serialize;
use splitrail_kv::Tier;

use crate::coefficients::Coefficients;
use stage::Stage;

pub use busy::BusyShare;
pub use fit::Fit;
pub use usual::UsualScales;

/// Learns the coefficients of one worker.
///
/// **Exploration.** A worker that was found slow gets little work, and so could never be found fast
/// again. No request is sent at random for that. Instead, while a stage of the worker is not
/// observed, its coefficients return to those of the usual worker: after the first minute the
/// difference is halved every five minutes, until the worker is chosen again and observed. Each stage has its own time,
/// since a decode worker computes no prompts, and a prefill worker does not decode.
#[derive(Clone, Debug, PartialEq)]
pub struct Learner {
    prior: Coefficients,
    prefill: Stage<3>,
    hand_off: Stage<2>,
    fetch: Stage<2>,
    read: Stage<1>,
    load: Stage<3>,
    step: Stage<3>,
}

/// The observations behind an estimate, and its quality.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evidence {
    /// The number of observations.
    pub observations: u64,
    /// The usual relative error of recent predictions: 0.1 is ten percent. 1 at the start.
    pub error: f64,
}

/// The [`Evidence`] of each estimate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StageEvidence {
    /// Of prefills.
    pub prefill: Evidence,
    /// Of hand-offs.
    pub hand_off: Evidence,
    /// Of fetches from other workers.
    pub fetch: Evidence,
    /// Of read-backs.
    pub read: Evidence,
    /// Of loads from slower tiers.
    pub load: Evidence,
    /// Of decode steps.
    pub step: Evidence,
}

/// How many times as long as the usual worker of the fleet a worker takes; `None` if that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Slowdown {
    /// To compute a prompt.
    pub prefill: Option<f64>,
    /// For a decode step.
    pub decode: Option<f64>,
}

impl Slowdown {
    /// The larger of the two.
    pub fn largest(&self) -> Option<f64> {
        let both = [self.prefill, self.decode];
        both.into_iter().flatten().max_by(f64::total_cmp)
    }
}

/// The tiers from which blocks are loaded.
const SLOWER: [Tier; Tier::COUNT - 1] = [Tier::Host, Tier::Disk, Tier::Remote];

impl Learner {
    /// A learner with the configured coefficients as prior.
    pub fn new(prior: Coefficients) -> Self {
        Self {
            prior,
            prefill: Stage::new(),
            hand_off: Stage::new(),
            fetch: Stage::new(),
            read: Stage::new(),
            load: Stage::new(),
            step: Stage::new(),
        }
    }

    /// Learns from a prefill of `new_tokens` after `context_tokens` that took `seconds`, without
    /// its wait in a queue.
    pub fn prefill(&mut self, now_ns: u64, new_tokens: u64, context_tokens: u64, seconds: f64) {
        self.prefill.observe(
            now_ns,
            prefill_parts(&self.prior, new_tokens, context_tokens),
            seconds,
        );
    }

    /// Learns from a hand-off of the KV of `tokens` tokens that took `seconds`.
    pub fn hand_off(&mut self, now_ns: u64, tokens: u64, seconds: f64) {
        self.hand_off.observe(now_ns, hand_off_parts(&self.prior, tokens), seconds);
    }

    /// Learns from a fetch of the KV of `tokens` tokens that took `seconds`, without waits for
    /// earlier transfers.
    pub fn fetch(&mut self, now_ns: u64, tokens: u64, seconds: f64) {
        self.fetch.observe(now_ns, fetch_parts(&self.prior, tokens), seconds);
    }

    /// Learns from a prefill of `new_tokens` after `context_tokens` that took `seconds`, of which
    /// `loaded` tokens were loaded from each tier. The time beyond that of
    /// the predicted prefill counts as loading.
    pub fn load(
        &mut self,
        now_ns: u64,
        new_tokens: u64,
        context_tokens: u64,
        loaded: [u64; Tier::COUNT],
        seconds: f64,
    ) {
        let prompt_tokens = new_tokens.saturating_add(context_tokens);
        let prefill = self.coefficients(now_ns).prefill_seconds(prompt_tokens, context_tokens);
        let parts = load_parts(&self.prior, loaded);
        // A prefill that took less than predicted says that loading took no time.
        let least = parts.iter().sum::<f64>() / 100.0;
        self.load.observe(now_ns, parts, (seconds - prefill).max(least));
    }

    /// Learns from a prefill of `new_tokens` after `context_tokens` that took `seconds`, of which
    /// `read_tokens` were read back. The time beyond that of the predicted prefill counts as
    /// reading.
    pub fn read(
        &mut self,
        now_ns: u64,
        new_tokens: u64,
        context_tokens: u64,
        read_tokens: u64,
        seconds: f64,
    ) {
        let costs = self.coefficients(now_ns);
        let prompt_tokens = new_tokens.saturating_add(context_tokens);
        let prefill = costs.prefill_seconds(prompt_tokens, context_tokens);
        let part = costs.hand_off_seconds(read_tokens);
        // A prefill that took less than predicted says that reading took no time.
        self.read.observe(now_ns, [part], (seconds - prefill).max(part / 100.0));
    }

    /// Learns from a decode step of `requests` requests that have `context_tokens` tokens of
    /// context in total and that took `seconds`.
    pub fn step(&mut self, now_ns: u64, requests: u64, context_tokens: u64, seconds: f64) {
        self.step.observe(now_ns, step_parts(&self.prior, requests, context_tokens), seconds);
    }

    /// The learned coefficients at the time `now_ns`.
    pub fn coefficients(&self, now_ns: u64) -> Coefficients {
        let [prefill_base, per_token, per_pair] = self.prefill.scales(now_ns);
        let [hand_off_base, transfer] = self.hand_off.scales(now_ns);
        let [fetch_base, fetch_transfer] = self.fetch.scales(now_ns);
        let [read_ratio] = self.read.scales(now_ns);
        let load = self.load.scales(now_ns);
        let [step_base, per_request, per_context] = self.step.scales(now_ns);
        let prior = &self.prior;
        Coefficients {
            prefill_base_seconds: prior.prefill_base_seconds * prefill_base,
            prefill_seconds_per_token: prior.prefill_seconds_per_token * per_token,
            prefill_seconds_per_token_pair: prior.prefill_seconds_per_token_pair * per_pair,
            hand_off_base_seconds: prior.hand_off_base_seconds * hand_off_base,
            kv_bytes_per_token: prior.kv_bytes_per_token,
            bandwidth_bytes_per_second: prior.bandwidth_bytes_per_second / transfer,
            fetch_base_seconds: prior.fetch_base_seconds * fetch_base,
            fetch_bytes_per_second: prior.fetch_bytes_per_second / fetch_transfer,
            read_ratio: prior.read_ratio * read_ratio,
            load_bytes_per_second: std::array::from_fn(|i| {
                prior.load_bytes_per_second[i] / load[i]
            }),
            step_base_seconds: prior.step_base_seconds * step_base,
            step_seconds_per_request: prior.step_seconds_per_request * per_request,
            step_seconds_per_context_token: prior.step_seconds_per_context_token * per_context,
        }
    }

    /// Sets what the usual worker of the fleet is like. Stages of which the fleet knows nothing keep
    /// what they had.
    pub fn set_usual(&mut self, usual: &UsualScales) {
        usual.prefill.iter().for_each(|scales| self.prefill.usual = *scales);
        usual.hand_off.iter().for_each(|scales| self.hand_off.usual = *scales);
        usual.fetch.iter().for_each(|scales| self.fetch.usual = *scales);
        usual.read.iter().for_each(|scales| self.read.usual = *scales);
        usual.load.iter().for_each(|scales| self.load.usual = *scales);
        usual.step.iter().for_each(|scales| self.step.usual = *scales);
    }

    /// Drops what was learned of this worker and keeps what the usual one is like.
    pub fn forget(&mut self) {
        self.prefill.forget();
        self.hand_off.forget();
        self.fetch.forget();
        self.read.forget();
        self.load.forget();
        self.step.forget();
    }

    /// How many times as long as on the usual worker a prefill takes, and a decode step; `None` after
    /// few observations.
    pub fn slowdown(&self) -> Slowdown {
        Slowdown { prefill: self.prefill.slowdown(), decode: self.step.slowdown() }
    }

    /// The quality of the estimates.
    pub fn evidence(&self) -> StageEvidence {
        StageEvidence {
            prefill: self.prefill.fit.evidence(),
            hand_off: self.hand_off.fit.evidence(),
            fetch: self.fetch.fit.evidence(),
            read: self.read.fit.evidence(),
            load: self.load.fit.evidence(),
            step: self.step.fit.evidence(),
        }
    }
}

fn prefill_parts(prior: &Coefficients, new_tokens: u64, context_tokens: u64) -> [f64; 3] {
    let (new, context) = (new_tokens as f64, context_tokens as f64);
    [
        prior.prefill_base_seconds,
        prior.prefill_seconds_per_token * new,
        prior.prefill_seconds_per_token_pair * new * (context + new / 2.0),
    ]
}

fn hand_off_parts(prior: &Coefficients, tokens: u64) -> [f64; 2] {
    [prior.hand_off_base_seconds, prior.hand_off_link_seconds(tokens)]
}

fn fetch_parts(prior: &Coefficients, tokens: u64) -> [f64; 2] {
    [prior.fetch_base_seconds, prior.fetch_link_seconds(tokens)]
}

fn load_parts(prior: &Coefficients, loaded: [u64; Tier::COUNT]) -> [f64; SLOWER.len()] {
    let per_token = prior.load_seconds_per_token();
    SLOWER.map(|tier| loaded[tier as usize] as f64 * per_token[tier as usize])
}

fn step_parts(prior: &Coefficients, requests: u64, context_tokens: u64) -> [f64; 3] {
    [
        prior.step_base_seconds,
        prior.step_seconds_per_request * requests as f64,
        prior.step_seconds_per_context_token * context_tokens as f64,
    ]
}

#[cfg(test)]
mod tests;
