//! Whether a remote prefill pays: a pure function of a snapshot and of coefficients, which
//! today are configured.
//!
//! Both sides are in milliseconds of predicted time to the first token:
//!
//! ```text
//! remote(p, d) = queue(p) + compute(p, what p lacks) + queue(d) + hand-off(what d lacks)
//! local(d)     = (queue(d) + compute(d, what d lacks)) x interference(d's requests)
//! ```

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::candidate::Candidate;

/// Coefficients of `auto`: what a prefill costs on either side.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AutoCosts {
    /// Microseconds in which a prefill worker computes one prompt token.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub prefill_us_per_token: f64,
    /// Microseconds in which a decode worker does.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub decode_us_per_token: f64,
    /// By how much each request that a decode worker has slows a prefill on it, in percent.
    #[schemars(range(min = 0.0, max = 1e6))]
    pub interference_percent: f64,
    /// Milliseconds of a hand-off, however small.
    #[schemars(range(min = 0.0, max = 1e6))]
    pub hand_off_ms: f64,
    /// Microseconds to transfer the KV of one token.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub transfer_us_per_token: f64,
}

impl Default for AutoCosts {
    fn default() -> Self {
        Self {
            prefill_us_per_token: 100.0,
            decode_us_per_token: 100.0,
            interference_percent: 10.0,
            hand_off_ms: 10.0,
            transfer_us_per_token: 5.0,
        }
    }
}

/// A prompt to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Its length, or what it weighs where the router knows no tokens of it.
    pub prompt_tokens: u64,
    /// Tokens per block; 0 if that is not known.
    pub block_size: u32,
}

/// What the better worker of each kind would take, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Prefill on one worker, decode on another.
    pub remote_ms: f64,
    /// Both on a decode worker.
    pub local_ms: f64,
}

impl Estimate {
    /// Whether the remote prefill is quicker.
    pub fn remote_pays(&self) -> bool {
        self.remote_ms < self.local_ms
    }
}

/// Compares the two; `None` where there are not two workers that are up.
pub fn compare(
    costs: &AutoCosts,
    work: Work,
    prefill: &[Candidate],
    decode: &[Candidate],
) -> Option<Estimate> {
    let up = |candidates: &[Candidate]| -> Vec<Candidate> {
        candidates.iter().copied().filter(|candidate| candidate.up).collect()
    };
    let (prefill, decode) = (up(prefill), up(decode));
    let pairs = prefill.iter().flat_map(|p| decode.iter().map(move |d| (p, d)));
    // An engine does not hand over to itself.
    let pairs = pairs.filter(|(p, d)| p.worker != d.worker);
    let remote = pairs.map(|(p, d)| remote_ms(costs, work, p, d)).min_by(f64::total_cmp)?;
    let local = decode.iter().map(|d| local_ms(costs, work, d)).min_by(f64::total_cmp)?;
    Some(Estimate { remote_ms: remote, local_ms: local })
}

fn remote_ms(costs: &AutoCosts, work: Work, p: &Candidate, d: &Candidate) -> f64 {
    let computed = p.prefill_tokens as f64 + lacking(work, p);
    let us = computed * costs.prefill_us_per_token
        + d.prefill_tokens as f64 * costs.decode_us_per_token
        + lacking(work, d) * costs.transfer_us_per_token;
    costs.hand_off_ms + us / 1e3
}

fn local_ms(costs: &AutoCosts, work: Work, d: &Candidate) -> f64 {
    let computed = d.prefill_tokens as f64 + lacking(work, d);
    let slower = 1.0 + costs.interference_percent / 100.0 * f64::from(d.requests);
    computed * costs.decode_us_per_token * slower / 1e3
}

/// Tokens of the prompt that a worker does not hold. The last one is always computed.
fn lacking(work: Work, candidate: &Candidate) -> f64 {
    let held = u64::from(candidate.believed_blocks()) * u64::from(work.block_size);
    work.prompt_tokens.saturating_sub(held).max(1) as f64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COSTS: AutoCosts = AutoCosts {
        prefill_us_per_token: 100.0,
        decode_us_per_token: 200.0,
        interference_percent: 50.0,
        hand_off_ms: 20.0,
        transfer_us_per_token: 10.0,
    };

    fn worker(worker: usize) -> Candidate {
        Candidate { worker, up: true, ..Candidate::default() }
    }

    fn compared(prompt_tokens: u64, p: Candidate, d: Candidate) -> Estimate {
        compare(&COSTS, Work { prompt_tokens, block_size: 16 }, &[p], &[d]).unwrap()
    }

    #[test]
    fn each_term_is_in_the_sum() {
        let p = Candidate { prefill_tokens: 100, overlap_blocks: 10, ..worker(0) };
        let d = Candidate { prefill_tokens: 50, overlap_blocks: 20, requests: 2, ..worker(1) };
        let Estimate { remote_ms, local_ms } = compared(1000, p, d);
        // (100 + 840) x 0.1 + 50 x 0.2 + 680 x 0.01 + 20; (50 + 680) x 0.2 x 2.
        assert!((remote_ms - 130.8).abs() < 1e-9, "{remote_ms}");
        assert!((local_ms - 292.0).abs() < 1e-9, "{local_ms}");
    }

    #[test]
    fn short_and_cached_prompts_stay_and_long_cold_ones_go() {
        assert!(!compared(100, worker(0), worker(1)).remote_pays());
        assert!(compared(10_000, worker(0), worker(1)).remote_pays());
        let holder = Candidate { overlap_blocks: 620, ..worker(1) };
        assert!(!compared(10_000, worker(0), holder).remote_pays());
        let busy = Candidate { requests: 8, ..worker(1) };
        assert!(compared(500, worker(0), busy).remote_pays());
        let queue = Candidate { prefill_tokens: 100_000, ..worker(0) };
        assert!(!compared(10_000, queue, worker(1)).remote_pays());
    }

    #[test]
    fn without_two_workers_there_is_nothing_to_compare() {
        let work = Work { prompt_tokens: 1000, block_size: 16 };
        let down = Candidate { up: false, ..worker(0) };
        assert_eq!(compare(&COSTS, work, &[down], &[worker(1)]), None);
        assert_eq!(compare(&COSTS, work, &[worker(0)], &[]), None);
        assert_eq!(compare(&COSTS, work, &[worker(0)], &[worker(0)]), None);
    }

    proptest! {
        #[test]
        fn more_cached_on_decode_never_makes_remote_better(
            prompt_tokens in 1u64..50_000, held in 0u32..3000, more in 0u32..3000,
        ) {
            let advantage = |overlap_blocks| {
                let d = Candidate { overlap_blocks, ..worker(1) };
                let Estimate { remote_ms, local_ms } = compared(prompt_tokens, worker(0), d);
                local_ms - remote_ms
            };
            prop_assert!(advantage(held + more) <= advantage(held) + 1e-9);
        }
    }
}
