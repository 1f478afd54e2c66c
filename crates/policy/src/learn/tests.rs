//! Tests that known coefficients are found from wrong priors and with noise.

use super::*;
use proptest::prelude::*;
use splitrail_kv::mix;

const SECOND: u64 = 1_000_000_000;

/// A uniformly distributed fraction in [0, 1).
fn even(seed: u64, i: u64) -> f64 {
    (mix(mix(seed) ^ i.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Prompts of between one hundred and some thirty thousand new tokens, half of them after a prefix.
fn prompt(seed: u64, i: u64) -> (u64, u64) {
    let new = (100.0 * (even(seed, 3 * i) * 5.7).exp()) as u64;
    let context = if i.is_multiple_of(2) { 0 } else { (even(seed, 3 * i + 1) * 30_000.0) as u64 };
    (new, context)
}

fn worst_error(learned: &Coefficients, truth: &Coefficients) -> f64 {
    let prompts = [(500, 0), (2_000, 0), (12_000, 0), (1_000, 20_000), (30_000, 0)];
    let error = |(new, context)| {
        let of = |costs: &Coefficients| costs.prefill_seconds(new + context, context);
        (of(learned) / of(truth) - 1.0).abs()
    };
    prompts.into_iter().map(error).fold(0.0, f64::max)
}

fn slower(costs: &Coefficients, factor: f64) -> Coefficients {
    Coefficients {
        prefill_base_seconds: costs.prefill_base_seconds * factor,
        prefill_seconds_per_token: costs.prefill_seconds_per_token * factor,
        prefill_seconds_per_token_pair: costs.prefill_seconds_per_token_pair * factor,
        ..*costs
    }
}

fn teach(learner: &mut Learner, truth: &Coefficients, seed: u64, count: u64, noise: f64) {
    for i in 0..count {
        let (new, context) = prompt(seed, i);
        let seconds = truth.prefill_seconds(new + context, context);
        let off = 1.0 + noise * (2.0 * even(seed, 3 * i + 2) - 1.0);
        learner.prefill(i * SECOND, new, context, seconds * off);
    }
}

proptest! {
    /// With a prior of twice, half or five times the true values and a noise of a fifth, the
    /// estimate is within a tenth after one worker's part of a thousand requests on eight workers.
    #[test]
    fn a_wrong_prior_is_overcome(seed: u64, factor in 0.2f64..5.0) {
        let truth = Coefficients::default();
        let mut learner = Learner::new(slower(&truth, factor));
        teach(&mut learner, &truth, seed, 125, 0.2);
        compare(std::slice::from_mut(&mut learner));
        let learned = learner.coefficients(125 * SECOND);
        prop_assert!(worst_error(&learned, &truth) < 0.1, "{learned:?}");
    }

    #[test]
    fn outliers_and_nonsense_move_little_and_nothing_leaves_its_bounds(
        seed: u64, stalls in proptest::collection::vec(0.0f64..1e6, 1..8),
    ) {
        let truth = Coefficients::default();
        let mut learner = Learner::new(truth);
        teach(&mut learner, &truth, seed, 200, 0.05);
        for seconds in stalls {
            learner.prefill(200 * SECOND, 1_000, 0, seconds);
        }
        for nonsense in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            learner.prefill(200 * SECOND, 1_000, 0, nonsense);
        }
        let learned = learner.coefficients(200 * SECOND);
        let factor = learned.prefill_seconds(1_000, 0) / truth.prefill_seconds(1_000, 0);
        prop_assert!((0.2..3.0).contains(&factor), "{factor}");
        teach(&mut learner, &truth, seed ^ 1, 100, 0.05);
        prop_assert!(worst_error(&learner.coefficients(100 * SECOND), &truth) < 0.1);
    }
}

#[test]
fn the_first_requests_of_engines_that_compile_for_them_say_nothing_of_later_ones() {
    let truth = Coefficients::default();
    let mut workers = [Learner::new(truth), Learner::new(truth)];
    for worker in &mut workers {
        worker.prefill(0, 500, 0, 3.0);
    }
    compare(&mut workers);
    for taught in [0, 1] {
        teach(&mut workers[taught], &truth, 1, 10, 0.0);
        compare(&mut workers);
        let learned = workers.each_ref().map(|worker| worker.coefficients(10 * SECOND));
        let errors = learned.each_ref().map(|learned| worst_error(learned, &truth));
        assert!(errors.iter().all(|error| *error < 0.1), "{errors:?}");
    }
}

#[test]
fn a_worker_that_is_much_faster_than_the_usual_one_is_known_after_three_requests() {
    let prior = Coefficients::default();
    let mut workers = [Learner::new(prior), Learner::new(prior)];
    teach(&mut workers[0], &slower(&prior, 40.0), 1, 5, 0.0);
    compare(&mut workers);
    let seconds = 0.5 * prior.prefill_seconds(200, 0);
    for i in 0..3 {
        workers[1].prefill(i * SECOND, 200, 0, seconds);
        compare(&mut workers);
    }
    let [slow, fast] =
        workers.map(|worker| worker.coefficients(5 * SECOND).prefill_seconds(200, 0));
    assert!((fast / seconds - 1.0).abs() < 0.1 && slow > 5.0 * fast, "{slow} {fast} {seconds}");
}

#[test]
fn one_stall_moves_a_settled_estimate_by_less_than_a_tenth() {
    let truth = Coefficients::default();
    let mut learner = Learner::new(truth);
    teach(&mut learner, &truth, 1, 200, 0.05);
    learner.prefill(200 * SECOND, 2_000, 0, 100.0);
    assert!(worst_error(&learner.coefficients(200 * SECOND), &truth) < 0.1);
}

#[test]
fn a_worker_that_becomes_slow_is_known_to_be_after_some_dozens_of_requests() {
    let truth = Coefficients::default();
    let mut learner = Learner::new(truth);
    teach(&mut learner, &truth, 1, 500, 0.1);
    teach(&mut learner, &slower(&truth, 2.0), 2, 80, 0.1);
    let learned = learner.coefficients(80 * SECOND);
    assert!(worst_error(&learned, &slower(&truth, 2.0)) < 0.15, "{learned:?}");
    assert!(learner.evidence().prefill.observations == 580);
}

#[test]
fn learned_costs_fade_without_observations() {
    let prior = Coefficients::default();
    let mut learner = Learner::new(prior);
    teach(&mut learner, &slower(&prior, 4.0), 3, 100, 0.0);
    let at = |seconds: u64| {
        let learned = learner.coefficients((99 + seconds) * SECOND);
        learned.prefill_seconds_per_token / prior.prefill_seconds_per_token
    };
    assert!((3.8..4.2).contains(&at(60)), "{}", at(60));
    assert!((1.9..2.1).contains(&at(360)), "{}", at(360));
    assert!((1.0..1.01).contains(&at(36_000)), "{}", at(36_000));
}

/// The first request after an hour shows what the worker is like now: neither the earlier costs
/// nor the prior outweigh it.
#[test]
fn one_observation_after_learned_costs_have_faded_is_believed() {
    let prior = Coefficients::default();
    for (before, now) in [(4.0, 1.0), (4.0, 4.0), (1.0, 4.0), (4.0, 2.0)] {
        let mut learner = Learner::new(prior);
        teach(&mut learner, &slower(&prior, before), 3, 100, 0.0);
        let later_ns = (99 + 3_600) * SECOND;
        let seconds = slower(&prior, now).prefill_seconds(8_000, 0);
        learner.prefill(later_ns, 8_000, 0, seconds);
        let told = learner.coefficients(later_ns).prefill_seconds(8_000, 0);
        assert!((told / seconds - 1.0).abs() < 0.15, "{before} {now}: {told} {seconds}");
    }
}

#[test]
fn a_pause_of_minutes_between_requests_changes_little_of_what_is_learned() {
    let prior = Coefficients::default();
    let truth = slower(&prior, 4.0);
    let mut learner = Learner::new(prior);
    for i in 0..60 {
        let (new, context) = prompt(3, i);
        let off = 1.0 + 0.1 * (2.0 * even(3, 3 * i + 2) - 1.0);
        let seconds = truth.prefill_seconds(new + context, context) * off;
        learner.prefill(i * 180 * SECOND, new, context, seconds);
    }
    let learned = learner.coefficients(59 * 180 * SECOND);
    assert!(worst_error(&learned, &truth) < 0.3, "{learned:?}");
}

#[test]
fn one_stalled_request_changes_little_where_requests_are_minutes_apart() {
    let prior = Coefficients::default();
    for apart_seconds in [1, 90, 120, 180] {
        let mut learner = Learner::new(prior);
        let at = |i: u64| i * apart_seconds * SECOND;
        for i in 0..300 {
            let off = 1.0 + 0.05 * (2.0 * even(3, i) - 1.0);
            learner.prefill(at(i), 2_000, 0, prior.prefill_seconds(2_000, 0) * off);
        }
        learner.prefill(at(300), 2_000, 0, 20.0);
        let told = learner.coefficients(at(300)).prefill_seconds(2_000, 0);
        let times = told / prior.prefill_seconds(2_000, 0);
        assert!((0.9..1.3).contains(&times), "{apart_seconds}: {times}");
    }
}

#[test]
fn hand_offs_and_steps_are_learned_as_well() {
    let truth = Coefficients { bandwidth_bytes_per_second: 3e9, ..Coefficients::default() };
    let mut learner = Learner::new(Coefficients { step_base_seconds: 5e-3, ..Default::default() });
    for i in 0..200 {
        let (tokens, requests) = (prompt(7, i).0, 1 + i % 60);
        let now_ns = (3_400 + i) * SECOND;
        learner.hand_off(now_ns, tokens, truth.hand_off_seconds(tokens));
        let context = requests * 3_000;
        learner.step(now_ns, requests, context, truth.step_seconds(requests, context));
    }
    // A decode worker has computed no prompt for an hour.
    let learned = learner.coefficients(3_600 * SECOND);
    for tokens in [200, 5_000, 20_000] {
        let ratio = learned.hand_off_seconds(tokens) / truth.hand_off_seconds(tokens);
        assert!((0.95..1.05).contains(&ratio), "{tokens}: {ratio}");
    }
    let step_ratio =
        |costs: &Coefficients| costs.step_seconds(20, 60_000) / truth.step_seconds(20, 60_000);
    assert!((0.95..1.05).contains(&step_ratio(&learned)), "{}", step_ratio(&learned));
    // Prompts that it computes by then say nothing of its steps.
    learner.prefill(36_000 * SECOND, 1_000, 0, truth.prefill_seconds(1_000, 0));
    let later = step_ratio(&learner.coefficients(36_000 * SECOND));
    let prior = step_ratio(&Coefficients { step_base_seconds: 5e-3, ..Default::default() });
    assert!((later / prior - 1.0).abs() < 0.01, "{later} {prior}");
    assert!(learner.evidence().hand_off.error < 0.1 && learner.evidence().step.error < 0.1);
}

#[test]
fn the_busy_share_follows_the_last_minute() {
    let mut share = BusyShare::default();
    assert_eq!(share.at(SECOND), 0.0);
    share.set(SECOND, true);
    assert!((share.at(61 * SECOND) - 0.632).abs() < 0.001, "{}", share.at(61 * SECOND));
    share.set(601 * SECOND, false);
    assert!((share.at(661 * SECOND) - 0.368).abs() < 0.001);
    // The worker is busy for half of each second.
    for i in 700..1_400 {
        share.set(i * SECOND, true);
        share.set(i * SECOND + SECOND / 2, false);
    }
    assert!((share.at(1_400 * SECOND) - 0.5).abs() < 0.01);
}

#[test]
fn slow_fetches_and_loads_are_found_out() {
    let prior = Coefficients::default();
    let mut learner = Learner::new(prior);
    for i in 0..200 {
        let tokens = 1_000 + 997 * (i % 40);
        learner.fetch(0, tokens, 2.0 * prior.fetch_seconds(tokens));
        // Host memory is twice as slow as told, the disk as fast as told.
        let loaded = [0, tokens, tokens / 2, 0];
        let load = [0.0, 2.0, 1.0, 0.0].into_iter().zip(prior.load_seconds_per_token());
        let load: f64 = load.zip(loaded).map(|((times, per), n)| times * per * n as f64).sum();
        let seconds = prior.prefill_seconds(50_000, 49_000) + load;
        learner.load(0, 1_000, 49_000, loaded, seconds);
    }
    let learned = learner.coefficients(0);
    let times = learned.fetch_seconds(20_000) / prior.fetch_seconds(20_000);
    assert!((times - 2.0).abs() < 0.05, "{times}");
    let load = |costs: &Coefficients| costs.load_seconds_per_token();
    let of = |tier: usize| load(&learned)[tier] / load(&prior)[tier];
    // Both tiers always come together here, so only their sum is certain.
    let sum = |costs: &Coefficients| load(costs)[1] + load(costs)[2] / 2.0;
    let truth = 2.0 * load(&prior)[1] + load(&prior)[2] / 2.0;
    assert!((sum(&learned) / truth - 1.0).abs() < 0.05, "{} {}", of(1), of(2));
    assert_eq!((of(3), learner.evidence().load.observations), (1.0, 200));
}

/// A fleet of workers that are `factors` times as slow as the prior; those without a factor have done
/// nothing yet. All of them have been told of the usual one.
fn fleet(factors: &[Option<f64>], noise: f64) -> Vec<Learner> {
    let prior = Coefficients::default();
    let mut fleet: Vec<Learner> = (0..)
        .zip(factors)
        .map(|(seed, factor)| {
            let mut learner = Learner::new(prior);
            let truth = factor.map(|factor| slower(&prior, factor));
            truth.iter().for_each(|truth| teach(&mut learner, truth, seed, 100, noise));
            learner
        })
        .collect();
    compare(&mut fleet);
    fleet
}

/// Tells the workers what the usual one of them is like.
fn compare(fleet: &mut [Learner]) {
    let usual = UsualScales::of(fleet.iter());
    fleet.iter_mut().for_each(|learner| learner.set_usual(&usual));
}

#[test]
fn a_worker_without_observations_costs_what_the_observed_ones_do() {
    let fleet = fleet(&[Some(0.1), None, Some(0.1), None], 0.0);
    let costs: Vec<f64> =
        fleet.iter().map(|one| one.coefficients(99 * SECOND).prefill_seconds(3_000, 0)).collect();
    let apart = costs.iter().map(|cost| (cost / costs[0] - 1.0).abs()).fold(0.0, f64::max);
    assert!(apart < 1e-3, "{costs:?}");
    assert!(fleet[1].slowdown() == Slowdown::default());
    // What others have learned is the start of what this one learns.
    let mut late = fleet[1].clone();
    let seconds = slower(&Coefficients::default(), 0.1).prefill_seconds(3_000, 0);
    late.prefill(99 * SECOND, 3_000, 0, seconds);
    let told = late.coefficients(99 * SECOND).prefill_seconds(3_000, 0);
    assert!((told / seconds - 1.0).abs() < 0.01, "{told} {seconds}");
}

#[test]
fn workers_that_differ_by_noise_cost_the_same_and_a_slow_one_costs_what_it_takes() {
    let fleet = fleet(&[Some(2.0), Some(2.0), Some(40.0), Some(2.0)], 0.05);
    let cost = |one: &Learner| one.coefficients(99 * SECOND).prefill_seconds(2_000, 0);
    assert_eq!(cost(&fleet[0]), cost(&fleet[1]));
    assert_eq!(cost(&fleet[0]), cost(&fleet[3]));
    let times = cost(&fleet[2]) / cost(&fleet[0]);
    assert!((18.0..22.0).contains(&times), "{times}");
    let slowdowns: Vec<f64> = fleet.iter().map(|one| one.slowdown().prefill.unwrap()).collect();
    assert!(slowdowns[2] > 18.0 && slowdowns[0] < 1.1, "{slowdowns:?}");
}

#[test]
fn what_a_worker_has_learned_fades_towards_the_usual_one() {
    let mut fleet = fleet(&[Some(2.0), Some(2.0), Some(8.0)], 0.0);
    let slow = &mut fleet[2];
    let times = |slow: &Learner, seconds: u64| {
        let learned = slow.coefficients((99 + seconds) * SECOND);
        learned.prefill_seconds_per_token / Coefficients::default().prefill_seconds_per_token
    };
    assert!((3.8..4.2).contains(&times(slow, 360)), "{}", times(slow, 360));
    assert!((1.9..2.1).contains(&times(slow, 36_000)), "{}", times(slow, 36_000));
    slow.forget();
    assert!((1.9..2.1).contains(&times(slow, 0)), "{}", times(slow, 0));
}
