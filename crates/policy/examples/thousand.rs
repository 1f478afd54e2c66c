//! How long one decision among a thousand workers takes: `cargo run --release -p
//! splitrail-policy --example thousand`. Prints the median and the 99th percentile.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use splitrail_policy::{Candidate, Choice, Leg, Policy, Query, WorkerIndex, mix};

const DECISIONS: usize = 20_000;

fn main() {
    let mut candidates: Vec<Candidate> = (0..1_000)
        .map(|number| {
            let bits = mix(u64::from(number));
            let overlap_blocks = (bits % 40) as u32;
            let worker = WorkerIndex(number);
            let mut candidate = Candidate { worker, up: true, ..Candidate::default() };
            candidate.wait_ns = bits % 2_000_000_000;
            candidate.busy_share = (bits % 97) as f64 / 97.0;
            candidate.overlap_blocks = overlap_blocks;
            candidate.speculative_blocks = overlap_blocks + (bits % 3) as u32;
            candidate.requests = (bits % 50) as u32;
            candidate.active_tokens = bits % 300_000;
            candidate
        })
        .collect();
    let policies = [
        Policy::predicted_ttft(),
        Policy::KvOverlap { overlap_weight: 1.0, load_weight: 1.0, temperature: 0.0 },
        Policy::LeastLoaded {},
    ];
    for policy in policies {
        let mut choice = Choice::default();
        let mut taken_ns = Vec::with_capacity(DECISIONS);
        for turn in 0..DECISIONS as u64 {
            let moved = (mix(turn) % 1_000) as usize;
            candidates[moved].wait_ns = mix(!turn) % 2_000_000_000;
            let query = Query {
                leg: Leg::Prefill,
                prompt_tokens: 20_000,
                prompt_blocks: 40,
                block_size: 512,
                turn,
                draw: mix(turn),
                sharing: Default::default(),
            };
            let began = Instant::now();
            choice.decide(&policy, &candidates, &[], &query, 3);
            taken_ns.push(began.elapsed().as_nanos());
            std::hint::black_box(&choice);
        }
        taken_ns.sort_unstable();
        let at = |percent: usize| taken_ns[DECISIONS * percent / 100] as f64 / 1e3;
        println!("{:<16} median {:6.2} us, p99 {:6.2} us", policy.name(), at(50), at(99));
    }
}
