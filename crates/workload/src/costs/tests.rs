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
    assert_eq!((wait_ms(100), costs.seen(at(100), RankScope::Rank(None), 0).waiting), (2291, 1));
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
fn a_worker_twice_as_slow_as_configured_is_learned_although_its_prompts_queue() {
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
    assert!(told.evidence.prefill.observations > 300 && told.busy_share > 0.9, "{told:?}");
    costs.forget();
    assert_eq!(costs.seen(at(now_ms), RankScope::Rank(None), 0).coefficients, prior);
}

#[test]
fn a_prompt_that_gives_up_its_place_leaves_those_before_it_as_far_as_they_are() {
    let (mut costs, _) = costs();
    let second = Duration::from_secs(1);
    Arc::get_mut(&mut costs).unwrap().epoch -= second;
    let (then, now) = (costs.epoch, costs.epoch + second);
    // Takes 1195.6 ms by the prior, of which a second is over.
    let _first = costs.begin(then, None, 12_000, 0, false);
    drop(costs.begin(then, None, 12_000, 0, false));
    assert_eq!(costs.seen(now, RankScope::Rank(None), 0).wait_ns / 1_000_000, 195);
}

#[test]
fn a_prompt_whose_end_is_not_observed_ends_at_its_predicted_time() {
    let (costs, at) = costs();
    let _both = [0, 0].map(|_| costs.begin(at(0), None, 12_000, 0, true));
    let wait_ms = |ms| costs.seen(at(ms), RankScope::Rank(None), 0).wait_ns / 1_000_000;
    assert_eq!((wait_ms(0), wait_ms(1195), wait_ms(2000), wait_ms(9000)), (2391, 1196, 391, 0));
}

#[test]
fn few_prompts_count_as_computed_at_their_predicted_time_before_anything_is_learned() {
    let (costs, at) = costs();
    let mut all: Vec<_> = (0..12).map(|_| costs.begin(at(0), None, 12_000, 0, true)).collect();
    let wait_ms = |ms| costs.seen(at(ms), RankScope::Rank(None), 0).wait_ns / 1_000_000;
    // Nine of them take 10.8 s, and the others are not begun before one has a reply.
    assert_eq!(wait_ms(60_000), 3 * 1195 + 1);
    all.remove(0).replied(at(60_000), WHOLE);
    assert!(costs.view(at(60_000)).evidence.prefill.observations == 1);
    assert_eq!(wait_ms(600_000), 0);
}

const WHOLE: WholeReply =
    WholeReply { cached_tokens: None, steps: 0, requests: 1, context_tokens: 0 };

#[test]
fn whole_replies_teach_what_a_slow_worker_takes_although_its_prompts_queue() {
    let (costs, at) = costs();
    let prior = Coefficients::default();
    let step_ms = 2.0 * prior.step_seconds(1, 3_000) * 1e3;
    // A worker that is twice as slow as configured: one prompt after the other, and steps beside them.
    let (mut arrives_ms, mut free_ms) = (0.0_f64, 0.0_f64);
    let mut arrivals = VecDeque::new();
    for i in 0..900_u64 {
        let new = 500 + i * 37 % 9000;
        let prefill_ms = 2.0 * prior.prefill_ns(new, 0) as f64 / 1e6;
        arrives_ms += if i % 4 == 0 { 2_500.0 } else { 500.0 };
        free_ms = free_ms.max(arrives_ms) + prefill_ms;
        let steps = if i % 5 == 0 { 400 } else { 4 };
        arrivals.push_back((arrives_ms, free_ms + step_ms * steps as f64, new, steps));
    }
    let mut waiting: Vec<(f64, PromptWork, u64)> = Vec::new();
    let mut now_ms = 0.0;
    loop {
        let next = waiting.iter().map(|(ends_ms, ..)| *ends_ms).fold(f64::MAX, f64::min);
        match arrivals.front() {
            Some((begins_ms, ends_ms, new, steps)) if *begins_ms < next => {
                let work = costs.begin(at(*begins_ms as u64), None, *new, 0, true);
                waiting.push((*ends_ms, work, *steps));
                arrivals.pop_front();
            }
            _ => {
                let Some(place) = waiting.iter().position(|(ends_ms, ..)| *ends_ms == next) else {
                    break;
                };
                let (_, work, steps) = waiting.swap_remove(place);
                now_ms = next;
                let reply = WholeReply { steps, context_tokens: 3_000, ..WHOLE };
                work.replied(at(now_ms as u64), reply);
            }
        }
    }
    let view = costs.view(at(now_ms as u64));
    let learned = Coefficients::from(view.costs);
    let ratio = learned.prefill_ns(8000, 0) as f64 / prior.prefill_ns(8000, 0) as f64;
    assert!((1.7..2.3).contains(&ratio), "{ratio} {view:?}");
    let ratio = learned.step_seconds(1, 3_000) / prior.step_seconds(1, 3_000);
    assert!((1.7..2.3).contains(&ratio), "{ratio} {view:?}");
}

#[test]
fn a_whole_reply_before_that_of_an_earlier_prompt_teaches_nothing() {
    let (costs, at) = costs();
    let [first, second] = [0, 0].map(|_| costs.begin(at(0), None, 12_000, 0, true));
    second.replied(at(2_400), WHOLE);
    assert_eq!(costs.view(at(2_400)).evidence.prefill.observations, 0);
    // But the worker has computed the first one as well, which has its reply later.
    let wait_ns = costs.seen(at(2_400), RankScope::Rank(None), 0).wait_ns;
    assert_eq!(wait_ns, 0);
    // When it was computed is not known either.
    first.replied(at(2_500), WHOLE);
    assert_eq!(costs.view(at(2_500)).evidence.prefill.observations, 0);
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
fn a_prompt_that_reads_takes_its_time_and_teaches_what_reading_takes() {
    let (costs, at) = costs();
    let wait_ms = |ms| costs.seen(at(ms), RankScope::Rank(None), 0).wait_ns as f64 / 1e6;
    // 10 ms and 1,000 tokens after 5,000; to read 5,000 tokens takes 5 ms and 16.384 ms.
    let prefill_ms = 10.0 + 85.0 + 1_000.0 * 5_500.0 * 2.3e-6;
    let work = costs.begin(at(0), None, 1_000, 5_000, false).reading(5_000);
    assert!((wait_ms(0) - prefill_ms - 21.384).abs() < 1e-3, "{}", wait_ms(0));
    drop(work);
    let mut now_ms = 1_000;
    for _ in 0..50 {
        let work = costs.begin(at(now_ms), None, 1_000, 5_000, false).reading(5_000);
        now_ms += 208;
        work.done(at(now_ms), Some(6_000 - 1_000));
        // It had lost a part, which it computed.
        let work = costs.begin(at(now_ms), None, 1_000, 5_000, false).reading(5_000);
        now_ms += 900;
        work.done(at(now_ms), Some(200));
    }
    let view = costs.view(at(now_ms));
    assert_eq!((view.evidence.prefill.observations, view.evidence.read.observations), (0, 50));
    let read_ms = costs.seen(at(now_ms), RankScope::Rank(None), 0).coefficients;
    let read_ms = read_ms.read_seconds(5_000) * 1e3;
    assert!((95.0..105.0).contains(&read_ms), "{read_ms}");
}

#[test]
fn failed_prompts_do_not_train_the_cost_model() {
    let (costs, at) = costs();
    drop(costs.begin(at(0), None, 1000, 0, false));
    assert_eq!(costs.view(at(5000)).evidence.prefill.observations, 0);
}
