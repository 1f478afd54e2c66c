//! `cache_hit_threshold: auto`: whether a decode worker computes the rest of a prompt itself.
//!
//! For each request, both ways are predicted in milliseconds and compared:
//!
//! ```text
//! remote  wait(p) + prefill(p) + hand-off + step      + price(prefill pool) x prefill(p)
//! local   wait(d) + local(d) + step                   + price(decode pool)  x local(d)
//! local(d) = steps x (max(a, b) + interference x min(a, b))
//! ```
//!
//! where `a` is a step of generation on `d` as it is, and `b` the computing of one chunk.
//! The prices are those of [`predicted`](crate::extra_work_price): either way takes its time
//! from who comes later on the same pool, and the busier pool is the dearer.
//!
//! **What others feel.** While a decode worker computes a prompt, each of its streams gets
//! tokens at the pace of `max(a, b) + interference x min(a, b)`. Where that stays under the
//! goal for the time between tokens (TBT), it is free. What is longer uses up a budget of the
//! worker ([`guard`]), and without budget the prompt is not computed there.
//!
//! **What is learned.** The interference, and how far the predictions of either way are off,
//! from the times of finished requests. A way that nobody has gone for minutes is believed
//! again as configured; besides, one in 64 requests for which the other way is at most half
//! as dear again goes that way, if it was not seen for ten seconds, and a dearer one if it was
//! not seen for minutes: twice as dear for each two of them. All of that may take two
//! percent of the time that requests wait for their first tokens. There is no other
//! exploration.
//!
//! **A number.** Engines and shims that gate want a ratio, not a comparison. It is the
//! one above which local prefills saved most in the last minutes ([`curve`]).

mod curve;
mod estimate;
mod guard;

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::candidate::{Candidate, Query};
use crate::index::{CandidateIndex, WorkerIndex};
use crate::learn::{Evidence, Fit};
use crate::mix::mix;
use curve::Curve;
use guard::Guard;

/// The threshold of a request that names none and whose model names none.
pub const DEFAULT_THRESHOLD_RATIO: f64 = 0.8;

/// A calibration that is older is believed less.
const TRUSTED_SECONDS: f64 = 60.0;
/// After each further such time, half as far from what is configured.
const HALF_LIFE_SECONDS: f64 = 120.0;
/// From so long after the last observation on, the next one counts for more, the more the
/// longer: where one way is hardly ever gone, few tries must tell.
const DOUBTED_SECONDS: f64 = 10.0;
/// Half as much is left of what was learned after each further such time.
const DOUBT_HALF_LIFE_SECONDS: f64 = 60.0;
/// One in so many requests may explore.
const EXPLORED_OF: u64 = 64;
/// Exploring may take so much of the time that all requests wait for their first tokens.
const EXPLORED_SHARE: f64 = 0.02;
/// What is not explored with is kept up to this.
const EXPLORED_SAVED_MAX_MS: f64 = 3_000.0;
/// The way explored costs at most so many times the other.
const EXPLORED_COST: f64 = 1.5;
/// It was not gone for so long.
const EXPLORED_AFTER_NS: u64 = 10_000_000_000;

/// What `auto` goes by.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct ThresholdConfig {
    /// Milliseconds between two tokens of a stream, in the mean of its slowest tenth, that a
    /// local prefill may cause.
    #[schemars(range(min = 1.0, max = 60_000.0))]
    pub tbt_goal_ms: f64,
    /// Tokens of a prompt that a decode worker computes in one step; 0: all of them.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub chunk_tokens: u32,
    /// How much of the shorter of a step's two parts adds to the longer one, until it is
    /// learned: 0 where they overlap, 1 where one waits for the other.
    #[schemars(range(min = 0.01, max = 10.0))]
    pub interference: f64,
}

impl Default for ThresholdConfig {
    fn default() -> Self {
        Self { tbt_goal_ms: 200.0, chunk_tokens: 2048, interference: 1.0 }
    }
}

/// A request for which either way is to be chosen.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// What is asked.
    pub query: Query,
    /// Workers that may compute the prompt for another.
    pub prefill: &'a [Candidate],
    /// Workers that may generate. Their `prefill_tokens` are those of local prefills that are
    /// not done; their coefficients say what computing costs there.
    pub decode: &'a [Candidate],
    /// Requests that wait for any prefill worker.
    pub waiting: usize,
    /// How long those of them that go before this one keep the pool busy:
    /// [`Queue::ahead_ms`](crate::queue::Queue::ahead_ms).
    pub ahead_ms: f64,
}

/// What one way would take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Way {
    /// The candidate that computes the prompt.
    pub index: CandidateIndex,
    /// The predicted time to the first token.
    pub ttft_ms: f64,
    /// With what others lose.
    pub cost_ms: f64,
    /// What the prediction was before it was corrected by what is learned: what is to be
    /// given back to [`Threshold::observe`].
    pub parts_ms: [f64; 2],
    /// What the cheaper way was predicted to take, where this one is explored; else 0.
    pub instead_ms: f64,
    /// What of the budget for long steps it uses up; 0 for the remote way.
    pub excess_ms: f64,
}

impl Way {
    /// What is lost by exploring it, if it takes so long.
    fn explored_ms(&self, ttft_ms: f64) -> f64 {
        if self.instead_ms > 0.0 { (ttft_ms - self.instead_ms).max(0.0) } else { 0.0 }
    }
}

/// Both ways compared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Whether the decode worker should compute the prompt.
    pub local: bool,
    /// Whether that is not the cheaper way, but one to be learned about.
    pub explored: bool,
    /// The best decode worker for it; `None` where nobody may, or the goal between tokens
    /// forbids it everywhere.
    pub at_decode: Option<Way>,
    /// The best prefill worker for it; `None` where there is none.
    pub at_prefill: Option<Way>,
    /// The best share of the prompt that any decode worker holds.
    pub hit_ratio: f64,
}

impl Verdict {
    /// The way that is to be gone.
    pub fn way(&self) -> Option<&Way> {
        if self.local { self.at_decode.as_ref() } else { self.at_prefill.as_ref() }
    }
}

/// What has been learned so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Learned {
    /// The share of a prompt that a decode worker must hold to compute the rest itself. 1 as
    /// well where a local prefill never pays.
    pub threshold_ratio: f64,
    /// Comparisons of the last minutes that it rests on.
    pub comparisons: f64,
    /// How much of what was at stake in them this one number decides rightly, from 0 to 1,
    /// less where there are few of them.
    pub confidence: f64,
    /// How much of a step's shorter part adds to the longer one.
    pub interference: f64,
    /// How well local prefills are predicted.
    pub local: Evidence,
    /// How well remote ones are.
    pub remote: Evidence,
}

/// Learns for one pair of pools.
#[derive(Clone, Debug)]
pub struct Threshold {
    config: ThresholdConfig,
    local: Fit<2>,
    remote: Fit<2>,
    /// When each was last observed.
    local_ns: u64,
    remote_ns: u64,
    guards: HashMap<WorkerIndex, Guard>,
    curve: Curve,
    /// Milliseconds that exploring may take.
    exploring_ms: f64,
}

impl Threshold {
    /// Knows nothing yet. Until requests are compared, its ratio is the one given.
    pub fn new(config: ThresholdConfig, threshold_ratio: f64) -> Self {
        Self {
            config,
            local: Fit::default(),
            remote: Fit::default(),
            local_ns: 0,
            remote_ns: 0,
            guards: HashMap::new(),
            curve: Curve::new(threshold_ratio),
            exploring_ms: 0.0,
        }
    }

    /// Compares both ways. Changes nothing: whoever goes the way says so to
    /// [`Threshold::gone`].
    pub fn compare(&self, now_ns: u64, offer: &Offer<'_>) -> Verdict {
        let at_prefill = self.at_prefill(now_ns, offer);
        let at_decode = self.at_decode(now_ns, offer);
        let (mut at_decode, mut at_prefill) = (at_decode, at_prefill);
        let (local, explored) = match (&mut at_decode, &mut at_prefill) {
            (Some(local), Some(remote)) => {
                let cheaper = local.cost_ms < remote.cost_ms;
                let explored = self.explores(now_ns, cheaper, local, remote, offer.query.draw);
                if explored {
                    let (other, best) = if cheaper { (remote, local) } else { (local, remote) };
                    other.instead_ms = best.ttft_ms;
                }
                (cheaper != explored, explored)
            }
            (local, _) => (local.is_some(), false),
        };
        let held = offer.decode.iter().filter(|c| c.up).map(Candidate::believed_blocks).max();
        let hit = offer.query.cached_tokens(held.unwrap_or(0)) as f64;
        let hit_ratio = hit / offer.query.prompt_tokens.saturating_sub(1).max(1) as f64;
        Verdict { local, explored, at_decode, at_prefill, hit_ratio }
    }

    /// A request goes as a verdict said.
    pub fn gone(&mut self, now_ns: u64, verdict: &Verdict, offer: &Offer<'_>) {
        if let (Some(local), Some(remote)) = (verdict.at_decode, verdict.at_prefill) {
            let saved_ms = remote.cost_ms - local.cost_ms;
            self.curve.compared(now_ns, verdict.hit_ratio, saved_ms);
        }
        if let Some(way) = verdict.way() {
            let earned_ms = self.exploring_ms + EXPLORED_SHARE * way.ttft_ms;
            self.exploring_ms = earned_ms.min(EXPLORED_SAVED_MAX_MS) - way.explored_ms(way.ttft_ms);
        }
        let Some(local) = verdict.at_decode.filter(|_| verdict.local) else { return };
        let Some(chosen) = offer.decode.get(local.index.0) else { return };
        // Those that have left the fleet must not be remembered for ever.
        let here = |worker: &WorkerIndex| offer.decode.iter().any(|c| c.worker == *worker);
        self.guards.retain(|worker, _| here(worker));
        let (goal_ms, step_ms) = (self.config.tbt_goal_ms, estimate::step_ms(chosen));
        let guard = self.guards.entry(chosen.worker).or_default();
        guard.spend(now_ns, goal_ms, step_ms, local.excess_ms);
    }

    /// A request that went a way had its first token after so many milliseconds.
    pub fn observe(&mut self, now_ns: u64, local: bool, way: &Way, ttft_ms: f64) {
        let (fit, observed_ns) = if local {
            (&mut self.local, &mut self.local_ns)
        } else {
            (&mut self.remote, &mut self.remote_ns)
        };
        // It took what it took, whatever was predicted.
        self.exploring_ms += way.explored_ms(way.ttft_ms) - way.explored_ms(ttft_ms);
        let gap_seconds = now_ns.saturating_sub(*observed_ns) as f64 / 1e9;
        let doubted = (gap_seconds - DOUBTED_SECONDS).max(0.0) / DOUBT_HALF_LIFE_SECONDS;
        if doubted > 0.0 {
            fit.doubt(1.0 - 0.5f64.powf(doubted));
        }
        if fit.observe(way.parts_ms, ttft_ms) {
            *observed_ns = now_ns;
        }
    }

    /// What has been learned so far.
    pub fn learned(&self, now_ns: u64) -> Learned {
        let [_, interference] = self.local.scales(trust(now_ns, self.local_ns));
        Learned {
            threshold_ratio: self.curve.threshold_ratio(now_ns),
            comparisons: self.curve.comparisons(now_ns),
            confidence: self.curve.confidence(now_ns),
            interference: interference * self.config.interference,
            local: self.local.evidence(),
            remote: self.remote.evidence(),
        }
    }

    fn explores(&self, now_ns: u64, cheaper: bool, local: &Way, remote: &Way, draw: u64) -> bool {
        let (other, best, seen_ns) =
            if cheaper { (remote, local, self.remote_ns) } else { (local, remote, self.local_ns) };
        mix(draw ^ 0x6578_706c_6f72_6521).is_multiple_of(EXPLORED_OF)
            && other.ttft_ms - best.ttft_ms <= self.exploring_ms
            && other.cost_ms * trust(now_ns, seen_ns) <= EXPLORED_COST * best.cost_ms
            && now_ns.saturating_sub(seen_ns) > EXPLORED_AFTER_NS
    }
}

/// How far a calibration is believed.
fn trust(now_ns: u64, observed_ns: u64) -> f64 {
    let seconds = now_ns.saturating_sub(observed_ns) as f64 / 1e9;
    0.5f64.powf((seconds - TRUSTED_SECONDS).max(0.0) / HALF_LIFE_SECONDS)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
