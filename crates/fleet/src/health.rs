//! Ejects workers of a model that perform much worse than their peers, and ends slow starts and
//! ejections when their time is over.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::MissedTickBehavior;

use super::roster::Roster;
use super::state::{Event, WorkerState};
use super::worker::Worker;
use crate::Served;
use splitrail_config::model::{EjectionConfig, Role};
use splitrail_policy::WorkerIndex;
use splitrail_workload::ejection::{Record, lasts, outliers};

/// Interval at which ends of slow starts and ejections are checked.
const TICK: Duration = Duration::from_millis(100);

/// Watches a model until the task is aborted.
pub(super) async fn run(served: Arc<Served>) {
    let config = served.config.health;
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watch = Watch { ejected: HashMap::new(), next_look: Instant::now() };
    loop {
        ticks.tick().await;
        let now = Instant::now();
        let roster = served.pool.roster();
        watch.end_times(&roster, config.slow_start, now);
        if now >= watch.next_look {
            watch.next_look = now + config.ejection.interval;
            watch.look(&roster, &config.ejection, now);
        }
    }
}

struct Watch {
    /// For each ejected worker, the number of ejections in a row and the end of the last one.
    ejected: HashMap<WorkerIndex, (u32, Instant)>,
    next_look: Instant,
}

impl Watch {
    /// Ends slow starts and ejections whose time is over.
    fn end_times(&mut self, roster: &Roster, slow_start: Duration, now: Instant) {
        self.ejected.retain(|worker, _| roster.get(*worker).is_some());
        for worker in roster.iter() {
            match worker.state() {
                WorkerState::Warming if worker.life.age(now) >= slow_start => {
                    worker.life.change(Event::Warm, "it has been alive for long enough");
                }
                WorkerState::Ejected => {
                    let until = self.ejected.get(&worker.index).map(|(_, until)| *until);
                    if until.is_none_or(|until| now >= until) {
                        worker.life.change(Event::Readmit, "its time is over");
                    }
                }
                _ => {}
            }
        }
    }

    /// Judges the results of the workers since the last evaluation, separately for each role.
    fn look(&mut self, roster: &Roster, config: &EjectionConfig, now: Instant) {
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            let workers: Vec<&Arc<Worker>> =
                roster.iter().filter(|worker| worker.config.role == role).collect();
            let records: Vec<Record> = workers.iter().map(|worker| record(worker)).collect();
            for record in &records {
                let well = record.failed == 0 && record.legs >= config.requests_min;
                if well && !record.ejected {
                    self.ejected.remove(&record.worker);
                }
            }
            for (index, cause) in outliers(&records, config) {
                let Some(worker) = roster.get(index) else { continue };
                if worker.life.change(Event::Eject, cause.name()) {
                    let (times, until) = self.ejected.entry(index).or_insert((0, now));
                    *times += 1;
                    *until = now + lasts(config, *times);
                }
            }
        }
    }
}

fn record(worker: &Worker) -> Record {
    let ejected = worker.state() == WorkerState::Ejected;
    Record { worker: worker.index, ejected, ..worker.outcomes.take() }
}
