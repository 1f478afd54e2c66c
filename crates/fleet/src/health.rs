//! Ejects workers of a model that perform much worse than their peers, ends slow starts and ejections
//! when their time is over, finds workers that are stuck, and compares what workers cost.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::roster::Roster;
use super::state::{Event, WorkerState};
use super::work_trial;
use super::worker::Worker;
use crate::ServedModel;
use splitrail_config::model::{EjectionConfig, Model, OnNoPrefill, Role};
use splitrail_policy::learn::UsualScales;
use splitrail_workload::ejection::{Record, lasts, outliers};

/// Interval at which ends of slow starts and ejections are checked, and the progress of workers.
const TICK: Duration = Duration::from_millis(100);

/// Interval at which workers learn what the usual one is like.
const COMPARISON_INTERVAL: Duration = Duration::from_millis(500);

/// Watches a model until the task is aborted.
pub(super) async fn run(served: Arc<ServedModel>) {
    let config = served.config.health;
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut next_look, mut next_comparison) = (Instant::now(), Instant::now());
    // At most one for each worker.
    let mut trials = JoinSet::new();
    loop {
        ticks.tick().await;
        let now = Instant::now();
        let roster = served.pool.roster();
        end_times(&roster, config.slow_start, now);
        while trials.try_join_next().is_some() {}
        for worker in roster.iter() {
            if check_progress(&roster, worker, &served.config, now) {
                trials.spawn(work_trial::run(Arc::clone(&served), Arc::clone(worker)));
            }
        }
        if now >= next_comparison {
            next_comparison = now + COMPARISON_INTERVAL;
            compare_costs(&roster);
        }
        if now >= next_look {
            next_look = now + config.ejection.interval;
            look(&roster, &config.ejection, now);
        }
    }
}

/// Ends slow starts and ejections whose time is over.
fn end_times(roster: &Roster, slow_start: Duration, now: Instant) {
    for worker in roster.iter() {
        match worker.state() {
            WorkerState::Warming if worker.health.lifecycle.age(now) >= slow_start => {
                worker.health.lifecycle.change(Event::Warm, "it has been alive for long enough");
            }
            WorkerState::Ejected if worker.health.ejections.is_over(now) => {
                worker.health.lifecycle.change(Event::Readmit, "its time is over");
            }
            _ => {}
        }
    }
}

/// Tells each worker's cost model what the usual worker of its role is like. Of what no worker of the
/// role has done yet, the usual one of all roles is known.
fn compare_costs(roster: &Roster) {
    let workers: Vec<_> =
        roster.iter().map(|worker| (worker, worker.load.costs.learner())).collect();
    let of_all = UsualScales::of(workers.iter().map(|(_, learner)| learner));
    for role in [Role::Prefill, Role::Decode, Role::Both] {
        let of_role = workers.iter().filter(|(worker, _)| worker.config.role == role);
        let usual = UsualScales::of(of_role.clone().map(|(_, learner)| learner)).or(&of_all);
        of_role.for_each(|(worker, _)| worker.load.costs.set_usual(&usual));
    }
}

/// Takes a worker out of service that makes no progress, or back into service. Returns whether it is to
/// be asked for one token first. The last worker of its role that takes work stays: nothing could take
/// its place. A prefill worker can be done without if decode workers compute prompts locally.
fn check_progress(roster: &Roster, worker: &Worker, config: &Model, now: Instant) -> bool {
    let health = &worker.health;
    // An engine that serves no request alone cannot be asked for a token.
    let can_be_asked = config.connector.serves_alone();
    let stalled = health.progress.stalled_for(now, can_be_asked);
    if worker.state() == WorkerState::Stuck {
        let works = health.progress.signs() != health.signs_when_stuck.load(Relaxed);
        if works || (!can_be_asked && stalled.is_none()) {
            health.lifecycle.change(Event::Progress, "it shows work again, or no leg waits");
            return false;
        }
        return can_be_asked && health.trial.begin(now);
    }
    let Some(silent) = stalled else { return false };
    if can_be_asked && !health.trial.is_unanswered(worker.load.costs.are_learned(), now) {
        return worker.state().takes_work() && health.trial.begin(now);
    }
    let role = worker.config.role;
    let takes_its_place = |other: &Worker| {
        other.index != worker.index && other.config.role == role && other.state().takes_work()
    };
    let is_local = role == Role::Prefill && config.on_no_prefill == OnNoPrefill::Local;
    if is_local || roster.iter().any(|other| takes_its_place(other)) {
        let seconds = silent.as_secs_f64();
        let legs = worker.load.booked.requests();
        let why = format!("no sign of work for {seconds:.1} s; {legs} legs wait");
        health.signs_when_stuck.store(health.progress.signs(), Relaxed);
        health.lifecycle.change(Event::Stall, why);
    }
    false
}

/// Judges the results of the workers since the last evaluation, separately for each role.
fn look(roster: &Roster, config: &EjectionConfig, now: Instant) {
    for role in [Role::Prefill, Role::Decode, Role::Both] {
        let workers: Vec<&Arc<Worker>> =
            roster.iter().filter(|worker| worker.config.role == role).collect();
        let records: Vec<Record> = workers.iter().map(|worker| record(worker)).collect();
        for (worker, record) in workers.iter().zip(&records) {
            let well = record.failed == 0 && record.legs >= config.requests_min;
            if well && !record.ejected {
                worker.health.ejections.forget();
            }
        }
        for (index, cause) in outliers(&records, config) {
            let Some(worker) = roster.get(index) else { continue };
            if worker.health.lifecycle.change(Event::Eject, cause.name()) {
                worker.health.ejections.begin(now, |times| lasts(config, times));
            }
        }
    }
}

fn record(worker: &Worker) -> Record {
    let state = worker.state();
    let (ejected, takes_work) = (state == WorkerState::Ejected, state.takes_work());
    Record { worker: worker.index, ejected, takes_work, ..worker.health.outcomes.take() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Pool;
    use crate::models::{SharedParts, models};
    use splitrail_kv::{HashSeed, IndexConfig};
    use splitrail_telemetry::Metrics;
    use splitrail_workload::progress::Awaited;

    const CONFIG: &str = r#"
models:
  - name: sim
    block_size: 16
    tokenizer: { kind: none }
    flow: aggregated
    workers: [{ id: w0, role: both, url: "http://w0:1" }]
    health: { ejection: { interval: 1s, requests_min: 3, base_time: 10m, ejected_percent_max: 50 } }
"#;

    #[test]
    fn a_worker_that_gives_no_token_is_stuck_if_others_can_take_its_place() {
        let worker = |id: &str, role: &str| {
            let config = format!(r#"{{"id": "{id}", "role": "{role}", "url": "http://{id}:1"}}"#);
            let config = serde_json::from_str(&config).unwrap();
            move |number| Worker::new(number, config, "w:1".parse().unwrap())
        };
        let index = IndexConfig {
            model: "m".into(),
            block_size: 16,
            seed: HashSeed(1),
            max_blocks_per_worker: 8,
        };
        let loaded = splitrail_config::parse("test.yaml", CONFIG, &std::env::temp_dir());
        let loaded = loaded.unwrap_or_else(|problems| panic!("{problems}")).config;
        let mut config = loaded.models[0].clone();
        let pool = Pool::new(index, None);
        let workers = [("p", "prefill"), ("d0", "decode"), ("d1", "decode")]
            .map(|(id, role)| pool.enter(worker(id, role)));
        let legs = workers.each_ref().map(|worker| {
            let leg = worker.book(None, 0, 10);
            leg.set_awaited(Awaited::FirstOutput);
            leg
        });
        let start = Instant::now();
        let asked = |config: &Model, at_s: u64| {
            let (roster, now) = (pool.roster(), start + Duration::from_secs(at_s));
            roster.iter().map(|worker| check_progress(&roster, worker, config, now)).collect()
        };
        let states = || workers.each_ref().map(|worker| worker.state().name());
        config.on_no_prefill = OnNoPrefill::Fail;
        assert_eq!(asked(&config, 0), [false; 3]);
        assert_eq!(asked(&config, 60), [true; 3], "each is asked for one token first");
        assert_eq!((asked(&config, 61), states()), (vec![false; 3], ["joining"; 3]));
        assert_eq!(asked(&config, 65), [false; 3]);
        assert_eq!(states(), ["joining", "stuck", "joining"], "the last of its role stays");
        config.on_no_prefill = OnNoPrefill::Local;
        asked(&config, 66);
        assert_eq!(states(), ["stuck", "stuck", "joining"]);
        drop(legs);
        asked(&config, 67);
        assert_eq!(states(), ["stuck", "stuck", "joining"], "nothing shows that it works");
        workers.iter().for_each(|worker| worker.health.progress.record_sign());
        asked(&config, 68);
        assert_eq!(states(), ["serving", "serving", "joining"]);
    }

    #[tokio::test]
    async fn an_ejection_lasts_when_the_models_configuration_changes() {
        let loaded = splitrail_config::parse("test.yaml", CONFIG, &std::env::temp_dir());
        let config = loaded.unwrap_or_else(|problems| panic!("{problems}")).config;
        let metrics = Metrics::new().unwrap();
        let shared = SharedParts { memory: &Arc::default(), metrics: &metrics };
        let served = models(&config, shared, None).unwrap().remove(0);
        let [sick, well] = ["w0", "w1"].map(|id| {
            let config = format!(r#"{{"id": "{id}", "role": "both", "url": "http://{id}:1"}}"#);
            let config = serde_json::from_str(&config).unwrap();
            let authority = format!("{id}:1").parse().unwrap();
            let worker = served.pool.enter(|number| Worker::new(number, config, authority));
            worker.set_probed(true, "a test");
            worker
        });
        for _ in 0..3 {
            sick.health.outcomes.ended(true);
            well.health.outcomes.ended(false);
        }
        // Each reload starts the task again, which looks at the workers at once.
        for _ in 0..2 {
            let watched = tokio::time::timeout(TICK / 2, run(Arc::clone(&served))).await;
            assert!(watched.is_err(), "it has no end");
            assert_eq!(sick.state(), WorkerState::Ejected);
        }
        assert_eq!(well.state(), WorkerState::Serving);
    }
}
