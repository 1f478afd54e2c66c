//! Tests of the choice between reading back and computing.

use proptest::prelude::*;

use super::*;
use crate::{CandidateIndex, Choice, KvFormat, Leg, Policy, Source, WorkerIndex, pick};

const BLOCK_TOKENS: u32 = 16;

fn query() -> Query {
    Query {
        leg: Leg::Prefill,
        prompt_tokens: 1_610,
        prompt_blocks: 100,
        block_size: BLOCK_TOKENS,
        turn: 0,
        draw: 0,
        sharing: Default::default(),
    }
}

/// A worker that holds some blocks and could read up to `readable_blocks`.
fn reader(number: u32, held: u32, readable_blocks: u32) -> Candidate {
    let worker = WorkerIndex(number);
    Candidate {
        worker,
        up: true,
        overlap_blocks: held,
        readable_blocks,
        readable_pin: 7,
        ..Candidate::default()
    }
}

fn decide(candidates: &[Candidate], sources: &[Source]) -> Choice {
    pick(&Policy::predicted_ttft(), candidates, sources, query()).unwrap()
}

#[test]
fn read_back_tokens_are_not_computed_and_take_the_time_of_a_hand_off() {
    let choice = decide(&[reader(0, 40, 90)], &[]);
    let terms = choice.terms[0];
    // 5 ms and 800 x 327,680 bytes at 100 GB/s; then 170 tokens after 1,440.
    assert!((terms.read_ms - 7.62144).abs() < 1e-9, "{terms:?}");
    let rest_ms = 10.0 + 170.0 * 85e-3 + 170.0 * (1_440.0 + 85.0) * 2.3e-6;
    assert!((terms.prefill_ms - rest_ms).abs() < 1e-9, "{terms:?}");
    let available_prefix = choice.available_prefix(&[reader(0, 40, 90)], &query());
    assert_eq!((available_prefix.blocks, available_prefix.read_tokens), (90, 800));
}

#[test]
fn a_worker_that_can_read_is_as_good_as_one_that_holds_unless_reading_is_slow() {
    let busy = Candidate { wait_ns: 200_000_000, ..reader(0, 40, 90) };
    let idle = reader(1, 0, 90);
    assert_eq!(decide(&[busy, idle], &[]).index, CandidateIndex(1));
    // Without the pin, the one that holds the prompt of the turn before is better.
    let busy = Candidate { wait_ns: 50_000_000, readable_blocks: 0, ..busy };
    let unable = Candidate { readable_blocks: 0, ..idle };
    assert_eq!(decide(&[busy, unable], &[]).index, CandidateIndex(0));
    assert_eq!(decide(&[busy, idle], &[]).index, CandidateIndex(1));
}

#[test]
fn a_pin_that_is_slower_to_read_than_to_compute_is_computed() {
    let mut slow = reader(0, 40, 90);
    slow.coefficients.bandwidth_bytes_per_second = 1e9;
    let without = decide(&[Candidate { readable_blocks: 0, ..slow }], &[]);
    let with = decide(&[slow], &[]);
    assert_eq!((with.terms[0], with.available_prefix(&[slow], &query())), {
        (without.terms[0], AvailablePrefix { blocks: 40, ..AvailablePrefix::default() })
    });
    // Learned to be slower than hand-offs.
    let mut learned = reader(0, 40, 90);
    learned.coefficients.read_ratio = 20.0;
    assert_eq!(decide(&[learned], &[]).terms[0].read_ms, 0.0);
}

#[test]
fn engines_read_nothing_that_is_short() {
    // Three blocks are 48 tokens, four are 64.
    assert_eq!(decide(&[reader(0, 87, 90)], &[]).terms[0].read_ms, 0.0);
    assert!(decide(&[reader(0, 86, 90)], &[]).terms[0].read_ms > 0.0);
}

#[test]
fn after_a_fetch_only_what_it_has_not_brought_is_read() {
    let mut worker = reader(1, 0, 100);
    worker.can_fetch = true;
    // Reading everything is slow, and reading the last ten blocks is not.
    worker.coefficients.hand_off_base_seconds = 0.0;
    worker.coefficients.bandwidth_bytes_per_second = 5e9;
    let kv_format = KvFormat::default();
    let source = Source { worker: WorkerIndex(0), rank: None, blocks: 90, wait_ns: 0, kv_format };
    let choice = decide(&[worker], &[source]);
    assert_eq!(choice.fetch().map(|fetch| fetch.blocks), Some(90));
    let available_prefix = choice.available_prefix(&[worker], &query());
    assert_eq!((available_prefix.blocks, available_prefix.read_tokens), (100, 160));
    let read_ms = 160.0 * 327_680.0 / 5e9 * 1e3;
    assert!((choice.terms[0].read_ms - read_ms).abs() < 1e-9, "{choice:?}");
}

proptest! {
    /// A read is planned only if the request gets its first token sooner; without one, nothing
    /// changes.
    #[test]
    fn a_read_is_never_dearer_than_computing(
        held in 0u32..100, readable in 0u32..100, base in 0.0f64..0.1, speed in 1e8f64..1e12,
        wait_ns in 0u64..1_000_000_000, ratio in 0.01f64..100.0,
    ) {
        let mut with = reader(0, held, readable);
        with.wait_ns = wait_ns;
        with.coefficients.hand_off_base_seconds = base;
        with.coefficients.bandwidth_bytes_per_second = speed;
        with.coefficients.read_ratio = ratio;
        let without = Candidate { readable_blocks: 0, ..with };
        let [with, without] = [with, without].map(|worker| decide(&[worker], &[]).terms[0]);
        if with.read_ms == 0.0 {
            prop_assert_eq!(with, without);
        } else {
            prop_assert!(with.ttft_ms() < without.ttft_ms());
        }
    }
}
