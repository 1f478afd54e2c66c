//! Outlier ejection: which workers perform so much worse than their peers that they get no requests
//! for a while. Pure functions.

use std::time::Duration;

use splitrail_config::model::EjectionConfig;
use splitrail_policy::WorkerIndex;

/// The results of one worker since the last evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Record {
    /// The worker's number.
    pub worker: WorkerIndex,
    /// Whether it is ejected now.
    pub ejected: bool,
    /// Whether its state lets it get new work.
    pub takes_work: bool,
    /// Legs that ended.
    pub legs: u32,
    /// Number of these legs that failed through the worker's fault.
    pub failed: u32,
    /// Mean time to the first token, in milliseconds; `None` if no reply began.
    pub first_token_ms: Option<f64>,
}

/// Why a worker is ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The share of failed legs is too high.
    Failures,
    /// The time to the first token is too long.
    Slow,
}

impl Cause {
    /// The description in logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Failures => "fails too often",
            Self::Slow => "takes too long",
        }
    }
}

/// The workers to eject now, the worst first. `records` has all workers of one role. Those that are
/// out of service for another reason than an ejection count for nothing, so that the last one in
/// service stays.
pub fn outliers(records: &[Record], config: &EjectionConfig) -> Vec<(WorkerIndex, Cause)> {
    let out = records.iter().filter(|record| record.ejected).count();
    let able = records.iter().filter(|record| record.takes_work).count();
    let percent = config.ejected_percent_max as usize;
    // One of two may be ejected as well.
    let cap = ((able + out) * percent / 100).max(percent.min(1));
    let room = cap.saturating_sub(out).min(able.saturating_sub(1));
    let judged: Vec<&Record> = records
        .iter()
        .filter(|record| record.takes_work && record.legs >= config.requests_min)
        .collect();
    let mut worst: Vec<(f64, WorkerIndex, Cause)> = Vec::new();
    for record in &judged {
        let others = judged.iter().filter(|other| other.worker != record.worker);
        let failing = share(record);
        let usual = median(others.clone().map(|other| share(other)));
        let stands_out = usual.is_some_and(|usual| usual < failing / 2.0);
        let limit = f64::from(config.failure_percent) / 100.0;
        if limit > 0.0 && failing >= limit && stands_out {
            worst.push((1e9 + failing, record.worker, Cause::Failures));
            continue;
        }
        let usual = median(others.filter_map(|other| other.first_token_ms));
        if config.slow_factor > 0
            && let (Some(own), Some(usual)) = (record.first_token_ms, usual)
            && own > usual * f64::from(config.slow_factor)
        {
            worst.push((own / usual.max(f64::MIN_POSITIVE), record.worker, Cause::Slow));
        }
    }
    worst.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    worst.into_iter().take(room).map(|(_, worker, cause)| (worker, cause)).collect()
}

/// How long the `times`th ejection in a row lasts.
pub fn lasts(config: &EjectionConfig, times: u32) -> Duration {
    config.base_time * times.clamp(1, 10)
}

fn share(record: &Record) -> f64 {
    f64::from(record.failed) / f64::from(record.legs.max(1))
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config() -> EjectionConfig {
        EjectionConfig { slow_factor: 5, requests_min: 10, ..EjectionConfig::default() }
    }

    fn record(worker: u32, failed: u32, first_token_ms: f64) -> Record {
        let worker = WorkerIndex(worker);
        let first_token_ms = Some(first_token_ms);
        Record { worker, ejected: false, takes_work: true, legs: 100, failed, first_token_ms }
    }

    #[test]
    fn a_worker_that_fails_more_than_the_others_is_ejected() {
        let records = [record(0, 60, 10.0), record(1, 2, 10.0), record(2, 0, 10.0)];
        assert_eq!(outliers(&records, &config()), [(WorkerIndex(0), Cause::Failures)]);
        let all = [record(0, 60, 10.0), record(1, 60, 10.0), record(2, 60, 10.0)];
        assert_eq!(outliers(&all, &config()), [], "something that all share");
        let few = [Record { legs: 9, failed: 9, ..records[0] }, records[1], records[2]];
        assert_eq!(outliers(&few, &config()), [], "too few to judge by");
    }

    #[test]
    fn a_worker_that_is_many_times_slower_is_ejected() {
        let records = [record(0, 0, 100.0), record(1, 0, 10.0), record(2, 0, 12.0)];
        assert_eq!(outliers(&records, &config()), [(WorkerIndex(0), Cause::Slow)]);
        let off = EjectionConfig { slow_factor: 0, ..config() };
        assert_eq!(outliers(&records, &off), []);
    }

    #[test]
    fn the_cap_holds_with_those_already_out() {
        let mut records: Vec<_> = (0..10).map(|i| record(i, 0, 10.0)).collect();
        for (i, record) in records.iter_mut().enumerate().take(4) {
            record.failed = 90 + i as u32;
        }
        let out: Vec<_> = outliers(&records, &config()).iter().map(|(worker, _)| *worker).collect();
        assert_eq!(out, [3, 2, 1].map(WorkerIndex), "a third of ten");
        (records[9].ejected, records[9].takes_work) = (true, false);
        assert_eq!(outliers(&records, &config()).len(), 2);
        let two = [record(0, 100, 1.0), record(1, 0, 1.0)];
        let one = [(WorkerIndex(0), Cause::Failures)];
        assert_eq!(outliers(&two, &config()), one, "one of two may go");
    }

    #[test]
    fn the_last_worker_in_service_stays_and_nobody_is_judged_alone() {
        let half = EjectionConfig { ejected_percent_max: 50, ..config() };
        let sick = record(0, 60, 10.0);
        let down = Record { takes_work: false, ..record(1, 0, 10.0) };
        let draining = Record { worker: WorkerIndex(2), legs: 0, first_token_ms: None, ..down };
        assert_eq!(outliers(&[sick, down, draining], &half), [], "the others take no work");
        let idle = Record { legs: 0, ..record(1, 0, 10.0) };
        assert_eq!(outliers(&[sick, idle], &half), [], "none to compare it with");
        let well = record(1, 0, 10.0);
        assert_eq!(outliers(&[sick, well], &half), [(WorkerIndex(0), Cause::Failures)]);
        let none = EjectionConfig { ejected_percent_max: 0, ..config() };
        assert_eq!(outliers(&[sick, well, draining], &none), []);
    }

    #[test]
    fn a_stubborn_one_is_out_for_longer_up_to_a_bound() {
        let time = |times| lasts(&config(), times).as_secs();
        assert_eq!((time(1), time(2), time(10), time(99)), (30, 60, 300, 300));
    }

    fn records() -> impl Strategy<Value = Vec<Record>> {
        let one = (0u32..3, 0u32..200, 0u32..200, proptest::option::of(0.0..1e6f64));
        proptest::collection::vec(one, 0..30).prop_map(|all| {
            let numbered = (0..).map(WorkerIndex).zip(all);
            numbered
                .map(|(worker, (state, legs, failed, first_token_ms))| Record {
                    worker,
                    ejected: state == 0,
                    takes_work: state == 1,
                    legs,
                    failed: failed.min(legs),
                    first_token_ms,
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn at_least_one_worker_stays_in_any_order_of_reports(
            records in records(), ejected_percent_max in 0u32..=100, turn in 0usize..30
        ) {
            let config = EjectionConfig { ejected_percent_max, ..config() };
            let out = outliers(&records, &config);
            let before = records.iter().filter(|record| record.ejected).count();
            let able = records.iter().filter(|record| record.takes_work).count();
            let percent = ejected_percent_max as usize;
            let cap = ((before + able) * percent / 100).max(percent.min(1));
            prop_assert!(out.is_empty() || before + out.len() <= cap);
            prop_assert!(out.is_empty() || out.len() < able);
            let mut turned = records.clone();
            turned.rotate_left(turn.min(records.len()));
            prop_assert_eq!(outliers(&turned, &config), out);
        }
    }
}
