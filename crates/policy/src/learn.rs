//! Learns the costs of a worker's work from observations.
//!
//! Each stage is a sum of a few terms ([`Coefficients`]), and each term has a prior from the
//! configuration. What is learned is the error of each term: a scale, 1 at the start,
//! fitted by recursive least squares over relative errors ([`Fit`]). Errors are relative, since a long
//! prompt says no more about a worker than a short one.

mod busy;
mod fit;

use serde::Serialize;
use splitrail_kv::Tier;

use crate::coefficients::Coefficients;

pub use busy::BusyShare;
pub use fit::Fit;

/// If the last observation of a stage is older than this, what was learned of that stage is gradually
/// trusted less.
const TRUSTED_SECONDS: f64 = 60.0;
/// After each further period of this length, half of the difference from the prior is left.
const HALF_LIFE_SECONDS: f64 = 300.0;

/// Learns the coefficients of one worker.
///
/// **Exploration.** A worker that was found slow gets little work, and so could never be found fast
/// again. No request is sent at random for that. Instead, while a stage of the worker is not
/// observed, its coefficients return to the prior: after the first minute the difference is halved
/// every five minutes, until the worker is chosen again and observed. Each stage has its own time,
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

/// What was learned of one stage, and when.
#[derive(Clone, Debug, Default, PartialEq)]
struct Stage<const N: usize> {
    fit: Fit<N>,
    /// The time of the last usable observation, in nanoseconds.
    observed_ns: u64,
}

impl<const N: usize> Stage<N> {
    /// Learns as [`Fit::observe`]. What has faded since the last observation stays so, and its
    /// uncertainty has grown, so that this observation weighs more.
    fn observe(&mut self, now_ns: u64, parts: [f64; N], seconds: f64) {
        let trust = self.trust(now_ns);
        let mut faded = self.fit.clone();
        if trust < 1.0 {
            faded.fade(trust);
        }
        if faded.observe(parts, seconds) {
            *self = Self { fit: faded, observed_ns: now_ns.max(self.observed_ns) };
        }
    }

    /// The scales as far as they are trusted at the time `now_ns`.
    fn scales(&self, now_ns: u64) -> [f64; N] {
        self.fit.scales(self.trust(now_ns))
    }

    /// How far the scales are trusted at the time `now_ns`, from 0 to 1.
    fn trust(&self, now_ns: u64) -> f64 {
        let idle_seconds = now_ns.saturating_sub(self.observed_ns) as f64 / 1e9;
        let half_lives = (idle_seconds - TRUSTED_SECONDS).max(0.0) / HALF_LIFE_SECONDS;
        0.5f64.powf(half_lives)
    }
}

/// The observations behind an estimate, and its quality.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evidence {
    /// The number of observations.
    pub observations: u64,
    /// The usual relative error of recent predictions: 0.1 is ten percent. 1 at the start.
    pub error: f64,
}

/// The tiers from which blocks are loaded.
const SLOWER: [Tier; Tier::COUNT - 1] = [Tier::Host, Tier::Disk, Tier::Remote];

impl Learner {
    /// A learner with the configured coefficients as prior.
    pub fn new(prior: Coefficients) -> Self {
        Self {
            prior,
            prefill: Stage::default(),
            hand_off: Stage::default(),
            fetch: Stage::default(),
            read: Stage::default(),
            load: Stage::default(),
            step: Stage::default(),
        }
    }

    /// Learns from a prefill of `new_tokens` after `context_tokens` that took `seconds`, without
    /// its wait in a queue.
    pub fn prefill(&mut self, now_ns: u64, new_tokens: u64, context_tokens: u64, seconds: f64) {
        let (new, context) = (new_tokens as f64, context_tokens as f64);
        let parts = [
            self.prior.prefill_base_seconds,
            self.prior.prefill_seconds_per_token * new,
            self.prior.prefill_seconds_per_token_pair * new * (context + new / 2.0),
        ];
        self.prefill.observe(now_ns, parts, seconds);
    }

    /// Learns from a hand-off of the KV of `tokens` tokens that took `seconds`.
    pub fn hand_off(&mut self, now_ns: u64, tokens: u64, seconds: f64) {
        let bytes = tokens as f64 * self.prior.kv_bytes_per_token;
        let parts =
            [self.prior.hand_off_base_seconds, bytes / self.prior.bandwidth_bytes_per_second];
        self.hand_off.observe(now_ns, parts, seconds);
    }

    /// Learns from a fetch of the KV of `tokens` tokens that took `seconds`, without waits for
    /// earlier transfers.
    pub fn fetch(&mut self, now_ns: u64, tokens: u64, seconds: f64) {
        let parts = [self.prior.fetch_base_seconds, self.prior.fetch_link_seconds(tokens)];
        self.fetch.observe(now_ns, parts, seconds);
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
        let per_token = self.prior.load_seconds_per_token();
        let parts = SLOWER.map(|tier| loaded[tier as usize] as f64 * per_token[tier as usize]);
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
        let parts = [
            self.prior.step_base_seconds,
            self.prior.step_seconds_per_request * requests as f64,
            self.prior.step_seconds_per_context_token * context_tokens as f64,
        ];
        self.step.observe(now_ns, parts, seconds);
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

    /// The quality of the estimate for prefills.
    pub fn prefill_evidence(&self) -> Evidence {
        self.prefill.fit.evidence()
    }

    /// The quality of the estimate for hand-offs.
    pub fn hand_off_evidence(&self) -> Evidence {
        self.hand_off.fit.evidence()
    }

    /// The quality of the estimate for fetches.
    pub fn fetch_evidence(&self) -> Evidence {
        self.fetch.fit.evidence()
    }

    /// The quality of the estimate for reads.
    pub fn read_evidence(&self) -> Evidence {
        self.read.fit.evidence()
    }

    /// The quality of the estimate for loads from slower tiers.
    pub fn load_evidence(&self) -> Evidence {
        self.load.fit.evidence()
    }

    /// The quality of the estimate for decode steps.
    pub fn step_evidence(&self) -> Evidence {
        self.step.fit.evidence()
    }
}

#[cfg(test)]
mod tests;
