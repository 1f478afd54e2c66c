//! Tests of the times of a request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use splitrail_telemetry::trace_context::TraceContext;

use super::*;
use crate::leg::LegKind;

fn traced() -> RequestTrace {
    let context = TraceContext { trace_id: 7, span_id: 8, is_sampled: true };
    RequestTrace { context, parent_id: None, state: None }
}

fn after(origin: Instant, us: u64) -> Instant {
    origin + Duration::from_micros(us)
}

#[test]
fn server_timing_adds_up_the_prompts_of_a_batch() {
    let origin = Instant::now();
    let times = Arc::new(Timeline::new(origin, None));
    times.end_stage(Stage::Receive, after(origin, 1_000));
    times.end_stage(Stage::Tokenize, after(origin, 1_500));
    let [one, two] = [times.prompt(0), times.prompt(1)];
    one.end_stage(Stage::FirstToken, after(origin, 3_500));
    two.end_stage(Stage::FirstToken, after(origin, 5_500));
    let timing = "receive;dur=1.000, tokenize;dur=0.500, first_token;dur=6.000";
    assert_eq!(times.server_timing(), timing);
    assert_eq!(times.reply_begun(origin), after(origin, 5_500));
    assert!(times.close(after(origin, 9_000)).is_none(), "it is not traced");
}

#[test]
fn a_hand_off_is_the_time_from_the_last_prefill_to_the_first_token() {
    let origin = Instant::now();
    let times = Arc::new(Timeline::new(origin, None));
    let clock = times.prompt(0);
    clock.end_stage(Stage::Prefill, after(origin, 10));
    clock.end_stage(Stage::Failed, after(origin, 20));
    clock.end_stage(Stage::Prefill, after(origin, 50));
    clock.end_stage(Stage::Pick, after(origin, 60));
    assert_eq!(times.hand_off(), None);
    clock.end_stage(Stage::FirstToken, after(origin, 90));
    assert_eq!(times.hand_off(), Some(Duration::from_micros(40)));
    // A prompt that was computed locally after all was not handed over.
    let local = times.prompt(1);
    local.end_stage(Stage::Prefill, after(origin, 10));
    local.hand_off_lost();
    local.end_stage(Stage::FirstToken, after(origin, 90));
    assert_eq!(times.hand_off(), Some(Duration::from_micros(40)));
}

#[test]
fn a_leg_that_is_still_open_ends_with_its_request_and_none_ends_later() {
    let origin = Instant::now();
    let times = Arc::new(Timeline::new(origin, Some(traced())));
    let clock = times.prompt(0);
    let mut first = clock.leg(LegKind::Prefill, "p", || 1);
    let open = clock.leg(LegKind::Decode, "d", || 2);
    let parent = open.traceparent();
    let header = "00-00000000000000000000000000000007-0000000000000002-01";
    assert_eq!(parent.as_deref(), Some(header));
    first.end(after(origin, 90), "ok");
    first.end(after(origin, 1), "engine_failed");
    let legs = times.close(after(origin, 50)).map(|spans| spans.legs).unwrap_or_default();
    let ends: Vec<_> = legs.iter().map(|leg| (leg.end, leg.outcome)).collect();
    let end = Some(Duration::from_micros(50));
    assert_eq!(ends, [(end, "ok"), (end, "cancelled")]);
}

#[test]
fn a_batch_of_many_prompts_keeps_a_bounded_number_of_spans() {
    let origin = Instant::now();
    let times = Arc::new(Timeline::new(origin, Some(traced())));
    for prompt in 0..1000 {
        let clock = times.prompt(prompt);
        let _leg = clock.leg(LegKind::Decode, "w", || 1);
        clock.end_stage(Stage::FirstToken, after(origin, 10));
    }
    assert_eq!(times.total(Stage::FirstToken), Some(Duration::from_micros(10_000)));
    let spans = times.close(after(origin, 20)).unwrap_or_default();
    assert_eq!((spans.stages.len(), spans.legs.len(), spans.left_out), (256, 256, 2 * 744));
}

proptest! {
    /// Whatever the order of the stages and the readings of the clock: the stages of each prompt
    /// follow each other without a gap or an overlap, and add up to the time until the last one.
    #[test]
    fn the_stages_of_a_prompt_add_up_to_its_time(
        shared in prop::collection::vec((0..9usize, 0..50u64), 0..4),
        own in prop::collection::vec((0..3usize, 0..9usize, 0..200u64), 0..60),
    ) {
        let origin = Instant::now();
        let times = Arc::new(Timeline::new(origin, Some(traced())));
        for (stage, at) in shared {
            times.end_stage(Stage::ALL[stage], after(origin, at));
        }
        let mut last = [None; 3];
        for (prompt, stage, at) in own {
            times.prompt(prompt).end_stage(Stage::ALL[stage], after(origin, at));
            last[prompt] = last[prompt].max(Some(at));
        }
        let begun = times.reply_begun(origin).duration_since(origin);
        let sum: Duration =
            Stage::ALL.into_iter().filter_map(|stage| times.total(stage)).sum();
        let spans = times.close(after(origin, 500)).unwrap_or_default();
        prop_assert_eq!(spans.stages.iter().map(|span| span.end - span.begin).sum::<Duration>(), sum);
        for prompt in 0..3u32 {
            let of_prompt = |span: &&StageSpan| span.prompt.is_none_or(|one| one == prompt);
            let mut at = Duration::ZERO;
            for span in spans.stages.iter().filter(of_prompt) {
                prop_assert_eq!(span.begin, at);
                prop_assert!(span.end >= span.begin);
                at = span.end;
            }
            prop_assert!(last[prompt as usize].is_none() || at <= begun);
        }
        for hand_off in &spans.hand_offs {
            prop_assert!(hand_off.begin <= hand_off.end);
        }
    }
}
