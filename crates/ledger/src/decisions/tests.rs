//! The form of a decision record in JSON.
#![allow(clippy::unwrap_used)]

use splitrail_engine::usage::EngineUsage;
use splitrail_kv::Overlap;
use splitrail_policy::{Candidate, Terms};

use super::*;
use crate::entry::ReportedUsage;
use crate::leg::{Expected, LegFacts, LegKind};
use crate::veto::VetoReason;

fn leg(kind: LegKind, worker: &str, overlap_blocks: u32) -> LegFacts {
    let overlap = Overlap { blocks: overlap_blocks, by_tier: [overlap_blocks, 0, 0, 0] };
    let prompt_tokens = Some(100);
    let expected = Expected { prompt_tokens, overlap, block_size: 16, ..Expected::default() };
    LegFacts::new(kind, worker, expected)
}

fn candidate(leg: &'static str, worker: &str, overlap_blocks: u32, chosen: bool) -> CandidateRecord {
    let seen = Candidate {
        rank: Some(1),
        up: true,
        overlap_blocks,
        overlap_by_tier: [overlap_blocks, 0, 0, 0],
        assumed_blocks: overlap_blocks,
        requests: 2,
        prefill_tokens: 40,
        active_tokens: 300,
        ..Candidate::default()
    };
    let figures = Figures {
        cost: 1.5,
        terms: (!chosen).then(|| Terms { prefill_ms: 2.5, ..Terms::default() }),
        veto: (!chosen).then_some(VetoReason::Busy),
        index_age_ms: chosen.then_some(7),
    };
    CandidateRecord::new(leg, worker, &seen, figures, chosen)
}

/// A prompt that went through a rejected decode-first try, a lost attempt and a hand-off: every
/// member of its record has a value.
fn complete() -> Decision {
    let mut ledger = Entry::default();
    ledger.decode_sent(leg(LegKind::Decode, "d0", 2));
    ledger.discard("below_threshold");
    ledger.prefill_sent(leg(LegKind::Prefill, "p1", 3));
    ledger.prefill_reported(Some(100), Some(48));
    ledger.decode_sent(leg(LegKind::Decode, "d1", 1));
    let usage = EngineUsage { prompt_tokens: 100, completion_tokens: 9, cached_tokens: Some(16) };
    ledger.decode_reported(usage);
    let (prompt_tokens, completion_tokens) = (100, 9);
    ledger.tell(ReportedUsage { prompt_tokens, completion_tokens, cached_tokens: Some(48) });
    Decision {
        request_id: "r-1".into(),
        prompt_index: 2,
        model: "m".into(),
        flow: "aggregated",
        local_reason: Some("one_token"),
        counted_reason: Some("one_token"),
        cache_hit_threshold: Some(0.75),
        cache_hit_ratio: Some(0.25),
        gate: Some("engine"),
        decode_try: Some("rejected"),
        auto: Some(WeighedRecord {
            remote_ms: Some(12.5),
            local_ms: Some(20.0),
            remote_ttft_ms: Some(11.0),
            local_ttft_ms: Some(18.0),
            local: false,
            explored: true,
            hit_ratio: 0.25,
        }),
        decided_unix_ms: 1_700_000_000_000,
        attempts: 2,
        prefill_worker: Some("p1".into()),
        decode_worker: Some("d1".into()),
        prompt_tokens: Some(100),
        prompt_unknown: Some("media"),
        prompt_blocks: 6,
        overlap_blocks: 3,
        best_overlap_blocks: 4,
        decode_overlap_blocks: 1,
        estimated_cached_tokens: Some(48),
        candidates: vec![
            candidate("prefill", "p1", 3, true),
            candidate("prefill", "p0", 4, false),
            candidate("decode", "d1", 1, true),
        ],
        vetoed: vec![VetoRecord {
            leg: "decode",
            worker: "p1".into(),
            reason: VetoReason::SameWorker,
            index_age_ms: Some(5),
        }],
        draws: vec![
            DrawRecord { leg: "prefill", turn: 8, draw: 17 },
            DrawRecord { leg: "decode", turn: 9, draw: 18 },
        ],
        shadow: vec![ShadowRecord {
            leg: "prefill",
            policy: "predicted_ttft",
            worker: "p0".into(),
            agrees: false,
            predicted_gain_ms: 3.5,
        }],
        outcome: Some("ok"),
        cached_tokens: Some(48),
        told_cached_tokens: Some(48),
        cached_source: Some("engine"),
        transferred_tokens: Some(84),
        ledger,
    }
}

#[test]
fn a_complete_record_is_shown_with_these_members_in_this_order() {
    let json = serde_json::to_string_pretty(&complete()).unwrap();
    assert_eq!(json, include_str!("../../tests/fixtures/decision_complete.json").trim_end());
}

#[test]
fn a_record_that_was_just_started_is_shown_with_these_members_in_this_order() {
    let json = serde_json::to_string_pretty(&Decision::default()).unwrap();
    assert_eq!(json, include_str!("../../tests/fixtures/decision_started.json").trim_end());
}
