//! Tests of decision records: their JSON form, and the effects of events.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use splitrail_config::model::CachedTokensFallback;
use splitrail_engine::usage::EngineUsage;
use splitrail_kv::Overlap;
use splitrail_policy::{CostTerms, Leg};

use super::*;
use crate::leg::{Expectation, LegFacts, LegKind};
use crate::veto::VetoReason;

fn leg(kind: LegKind, worker: &str, overlap_blocks: u32) -> LegFacts {
    let overlap = Overlap { blocks: overlap_blocks, by_tier: [overlap_blocks, 0, 0, 0] };
    let prompt_tokens = Some(100);
    let expected = Expectation { prompt_tokens, overlap, block_size: 16, ..Expectation::default() };
    LegFacts::new(kind, worker, expected)
}

fn candidate(leg: Leg, worker: &str, overlap_blocks: u32, chosen: bool) -> CandidateRecord {
    CandidateRecord {
        leg: leg.name(),
        worker: worker.into(),
        rank: Some(1),
        up: true,
        overlap_blocks,
        spine_blocks: None,
        overlap_by_tier: [overlap_blocks, 0, 0, 0],
        overlap_discount: 0.0,
        speculative_blocks: overlap_blocks,
        underway_blocks: 0,
        requests: 2,
        prefill_tokens: 40,
        active_tokens: 300,
        cost: 1.5,
        terms: (!chosen).then(|| CostTerms { prefill_ms: 2.5, ..CostTerms::default() }),
        veto: (!chosen).then_some(VetoReason::Busy),
        index_age_ms: chosen.then_some(7),
        fetch: (!chosen).then(fetch),
        read_back_blocks: 0,
        chosen,
    }
}

fn fetch() -> FetchChoice {
    let (source, rank, way) = ("d1".into(), Some(1), "two_step");
    FetchChoice { source, rank, blocks: 4, tokens: 64, predicted_ms: 2.5, way }
}

fn placement(leg: Leg, worker: &str, overlap_blocks: u32) -> Placement {
    Placement {
        leg,
        worker: worker.into(),
        overlap_blocks,
        best_overlap_blocks: overlap_blocks + 1,
        estimated_cached_tokens: Some(16 * overlap_blocks),
        turn: 8,
        draw: 17,
    }
}

fn veto(leg: Leg) -> VetoRecord {
    let reason = VetoReason::SameWorker;
    VetoRecord { leg: leg.name(), worker: "p1".into(), reason, index_age_ms: Some(5) }
}

fn begun() -> DecisionHandle {
    DecisionHandle::new(Decision {
        request_id: "r-1".into(),
        prompt_index: 2,
        model: "m".into(),
        flow: "auto",
        decided_unix_ms: 1_700_000_000_000,
        prompt_tokens: Some(100),
        prompt_unknown: Some("media"),
        prompt_blocks: 6,
        ..Decision::default()
    })
}

fn usage(cached_tokens: Option<u32>) -> EngineUsage {
    EngineUsage { prompt_tokens: 100, completion_tokens: Some(9), cached_tokens }
}

fn report(cached_tokens: Option<u32>) -> UsageReport {
    let (leg, fallback) = (usage(cached_tokens), CachedTokensFallback::Estimate);
    UsageReport { leg, whole: leg, fallback, is_shown: true }
}

/// A prompt that was rejected by a decode worker and then went through a hand-off: every member
/// of its record has a value.
fn complete() -> DecisionHandle {
    let decision = begun();
    decision.weighed(WeighedRecord {
        remote_ms: Some(12.5),
        local_ms: Some(20.0),
        remote_ttft_ms: Some(11.0),
        local_ttft_ms: Some(18.0),
        local: false,
        explored: true,
        hit_ratio: 0.25,
        remote_fetch: Some(fetch()),
        local_fetch: Some(fetch()),
    });
    decision.decode_try_begun("decode_first", Some(0.75));
    decision.placed(placement(Leg::Aggregated, "d0", 2), [].into_iter());
    decision.attempt_begun();
    decision.enter(|entry| entry.decode_sent(leg(LegKind::Decode, "d0", 2)));
    decision.threshold_rejected(None, "below_threshold");
    decision.decode_tried("engine", "rejected");
    assert_eq!(decision.hit_ratio_reported(Some(0.25)), Some(0.25));
    decision.flow_begun("decode_first");
    assert!(decision.prefill_made_local("one_token"));
    let of = Leg::Prefill;
    let seen = [candidate(of, "p1", 3, true), candidate(of, "p0", 4, false)];
    decision.placed(placement(of, "p1", 3), seen.into_iter());
    let (worker, outcome, took_ms) = ("p0".into(), "fetched", 3.5);
    decision.fetch_ended(FetchRecord { worker, choice: fetch(), outcome, took_ms });
    decision.attempt_begun();
    decision.enter(|entry| entry.prefill_sent(leg(LegKind::Prefill, "p1", 3)));
    decision.prefill_reported(Some(100), Some(48));
    let of = Leg::Decode;
    decision.vetoed(of, [veto(of)].into_iter());
    let placement = Placement { turn: 9, draw: 18, ..placement(of, "d1", 1) };
    decision.placed(placement, [candidate(of, "d1", 1, true)].into_iter());
    decision.enter(|entry| entry.decode_sent(leg(LegKind::Decode, "d1", 1)));
    assert_eq!(decision.usage_reported(report(Some(16))), Some(48));
    decision.reply_completed();
    decision
}

fn json(decision: &DecisionHandle) -> String {
    decision.with(|decision| serde_json::to_string_pretty(decision).unwrap())
}

#[test]
fn a_complete_record_is_shown_with_these_members_in_this_order() {
    let shown = include_str!("../../tests/fixtures/decision_complete.json");
    assert_eq!(json(&complete()), shown.trim_end());
}

#[test]
fn a_record_that_was_just_started_is_shown_with_these_members_in_this_order() {
    let shown = include_str!("../../tests/fixtures/decision_started.json");
    assert_eq!(json(&DecisionHandle::new(Decision::default())), shown.trim_end());
}

#[test]
fn a_flow_that_begins_discards_workers_candidates_and_outcome_of_the_former() {
    let decision = complete();
    decision.flow_begun("prefill_first");
    decision.with(|decision| {
        assert_eq!(decision.flow, "prefill_first");
        assert_eq!(
            (decision.prefill_worker.as_deref(), decision.decode_worker.as_deref()),
            (None, None)
        );
        assert_eq!((decision.local_reason, decision.outcome), (None, None));
        assert!(decision.candidates.is_empty() && decision.vetoed.is_empty());
        assert!(decision.draws.is_empty());
        // The result of the decode-first attempt and the number of attempts are about the whole
        // prompt.
        assert_eq!((decision.decode_try, decision.attempts), (Some("rejected"), 2));
    });
}

#[test]
fn a_request_is_counted_once_for_each_reason_of_a_local_prefill() {
    let decision = begun();
    assert!(decision.prefill_made_local("no_prefill"));
    decision.flow_begun("prefill_first");
    assert!(!decision.prefill_made_local("no_prefill"), "a further attempt for the same reason");
    assert!(decision.prefill_made_local("prefill_ended"));
    assert_eq!(decision.with(|decision| decision.flow), "aggregated");
}

#[test]
fn the_end_of_a_request_does_not_change_the_outcome_that_a_prompt_has() {
    let (answered, open) = (complete(), begun());
    for decision in [&answered, &open] {
        decision.request_ended("cancelled");
    }
    assert_eq!(answered.with(|decision| decision.outcome), Some("ok"));
    assert_eq!(open.with(|decision| decision.outcome), Some("cancelled"));
}

#[test]
fn cached_tokens_that_are_foretold_are_at_most_the_prompt() {
    let decision = begun();
    decision.enter(|entry| entry.prefill_sent(leg(LegKind::Prefill, "p1", 3)));
    decision.prefill_reported(Some(120), Some(110));
    decision.announce_cached_tokens();
    decision.with(|decision| {
        assert_eq!((decision.cached_tokens, decision.told_cached_tokens), (Some(100), Some(100)));
        assert_eq!(decision.cached_source, Some("engine"));
    });
}

#[derive(Clone, Copy, Debug)]
enum Event {
    FlowBegun,
    DecodeTryBegun,
    AttemptBegun,
    Placed(Leg),
    Vetoed(Leg),
    MadeLocal,
    PrefillSent,
    PrefillReported(Option<u32>),
    DecodeSent,
    DecodeFailed,
    AttemptDiscarded,
    ThresholdRejected,
    ThresholdReplyMade,
    ResumeSent,
    ResumeFailed,
    Foretold,
    UsageReported(Option<u32>),
    Completed,
    Lost,
    RequestEnded,
}

fn event() -> impl Strategy<Value = Event> {
    let leg = || prop_oneof![Just(Leg::Prefill), Just(Leg::Decode), Just(Leg::Aggregated)];
    let cached = || proptest::option::of(0u32..=100);
    prop_oneof![
        1 => Just(Event::FlowBegun),
        1 => Just(Event::DecodeTryBegun),
        1 => Just(Event::AttemptBegun),
        4 => leg().prop_map(Event::Placed),
        1 => leg().prop_map(Event::Vetoed),
        1 => Just(Event::MadeLocal),
        2 => Just(Event::PrefillSent),
        2 => cached().prop_map(Event::PrefillReported),
        2 => Just(Event::DecodeSent),
        1 => Just(Event::DecodeFailed),
        1 => Just(Event::AttemptDiscarded),
        1 => Just(Event::ThresholdRejected),
        1 => Just(Event::ThresholdReplyMade),
        1 => Just(Event::ResumeSent),
        1 => Just(Event::ResumeFailed),
        1 => Just(Event::Foretold),
        2 => cached().prop_map(Event::UsageReported),
        1 => Just(Event::Completed),
        1 => Just(Event::Lost),
        1 => Just(Event::RequestEnded),
    ]
}

/// The expected content of a record after some events.
#[derive(Debug, Default)]
struct Model {
    attempts: u32,
    prefill_worker: Option<String>,
    decode_worker: Option<String>,
    outcome: Option<&'static str>,
}

impl Model {
    /// Applies the `n`th event; no two workers have the same name.
    fn take(&mut self, event: Event, n: usize, decision: &DecisionHandle) {
        let worker = format!("w{n}");
        let fallback = CachedTokensFallback::Estimate;
        match event {
            Event::FlowBegun => {
                decision.flow_begun("prefill_first");
                *self = Self { attempts: self.attempts, ..Self::default() };
            }
            Event::DecodeTryBegun => {
                decision.decode_try_begun("decode_first", Some(0.5));
                *self = Self { attempts: self.attempts, ..Self::default() };
            }
            Event::AttemptBegun => {
                decision.attempt_begun();
                self.attempts += 1;
            }
            Event::Placed(leg) => {
                let chosen = candidate(leg, &worker, 1, true);
                let seen = [chosen, candidate(leg, "other", 2, false)];
                decision.placed(placement(leg, &worker, 1), seen.into_iter());
                match leg {
                    Leg::Prefill => self.prefill_worker = Some(worker),
                    Leg::Decode | Leg::Aggregated => self.decode_worker = Some(worker),
                }
            }
            Event::MadeLocal => {
                decision.prefill_made_local("no_prefill");
                self.prefill_worker = None;
            }
            Event::DecodeFailed => {
                decision.decode_failed("engine_failed");
                self.outcome = Some("engine_failed");
            }
            Event::ThresholdRejected => {
                decision.threshold_rejected(Some(usage(Some(3))), "below_threshold");
                self.outcome = Some("below_threshold");
            }
            Event::ThresholdReplyMade => {
                decision.threshold_reply_made(leg(LegKind::Decode, "", 1), fallback, true);
                self.outcome = Some("ok");
            }
            Event::Completed => {
                decision.reply_completed();
                self.outcome = Some("ok");
            }
            Event::Lost => {
                decision.reply_lost("decode_lost");
                self.outcome = Some("decode_lost");
            }
            Event::RequestEnded => {
                decision.request_ended("cancelled");
                self.outcome.get_or_insert("cancelled");
            }
            other => report_leg(other, &worker, decision),
        }
    }
}

/// Events that change neither attempts nor workers nor the outcome.
fn report_leg(event: Event, worker: &str, decision: &DecisionHandle) {
    match event {
        Event::Vetoed(leg) => decision.vetoed(leg, [veto(leg), veto(leg)].into_iter()),
        Event::PrefillSent => {
            decision.enter(|entry| entry.prefill_sent(leg(LegKind::Prefill, worker, 1)))
        }
        Event::PrefillReported(cached) => {
            decision.prefill_reported(Some(100), cached);
        }
        Event::DecodeSent => {
            decision.enter(|entry| entry.decode_sent(leg(LegKind::Decode, worker, 1)))
        }
        Event::AttemptDiscarded => decision.enter(|entry| entry.discard("lease_expired")),
        Event::ResumeSent => {
            decision.enter(|entry| entry.decode_resumed(leg(LegKind::Decode, worker, 1)))
        }
        Event::ResumeFailed => decision.enter(|entry| entry.discard_decode("engine_failed")),
        Event::Foretold => decision.announce_cached_tokens(),
        Event::UsageReported(cached) => {
            decision.usage_reported(report(cached));
        }
        _ => {}
    }
}

proptest! {
    #[test]
    fn after_any_events_attempts_workers_and_outcome_are_consistent(
        events in proptest::collection::vec(event(), 0..40),
    ) {
        let (mut model, handle) = (Model::default(), begun());
        for (n, event) in events.into_iter().enumerate() {
            model.take(event, n, &handle);
            let decision = handle.with(Decision::clone);
            prop_assert_eq!(decision.attempts, model.attempts);
            prop_assert_eq!(decision.prefill_worker.as_deref(), model.prefill_worker.as_deref());
            prop_assert_eq!(decision.decode_worker.as_deref(), model.decode_worker.as_deref());
            prop_assert_eq!(decision.outcome, model.outcome);
            for leg in [Leg::Prefill, Leg::Decode, Leg::Aggregated].map(Leg::name) {
                let chosen = |one: &&CandidateRecord| one.leg == leg && one.chosen;
                let chosen = decision.candidates.iter().filter(chosen).count();
                let draws = decision.draws.iter().filter(|draw| draw.leg == leg).count();
                prop_assert!(chosen <= 1 && chosen == draws, "one choice for each leg");
                let vetoed = decision.vetoed.iter().filter(|veto| veto.leg == leg).count();
                prop_assert!(vetoed <= 2);
            }
            let is_chosen = |worker: &str| {
                decision.candidates.iter().any(|one| one.chosen && *one.worker == *worker)
            };
            prop_assert!(decision.prefill_worker.as_deref().is_none_or(is_chosen));
            prop_assert!(decision.decode_worker.as_deref().is_none_or(is_chosen));
            let (cached, source) = (decision.cached_tokens, decision.cached_source);
            prop_assert_eq!(cached.is_some(), source.is_some());
            prop_assert_eq!(cached, decision.told_cached_tokens);
            prop_assert!(cached.is_none_or(|tokens| tokens <= 100));
        }
    }
}
