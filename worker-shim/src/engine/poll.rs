//! Polls the engine's health and metrics.

use std::time::Duration;

use splitrail_engine::EngineKind;
use splitrail_engine::load::EngineLoad;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use super::client::{EngineClient, QueryError};
use crate::telemetry::Metrics;
use crate::ticks;

/// Timeout of each request.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The number of late replies in a row after which an engine counts as down.
const LATE_MAX: u32 = 3;

/// The weight of a new step time is one divided by this number.
const STEP_SMOOTHING: u64 = 4;

/// What the last polls found.
#[derive(Clone, Debug, Default)]
pub struct EnginePoll {
    /// Whether the engine answers.
    pub up: bool,
    /// The number of the engine process, counted from 1; 0 before the engine was first reached.
    pub process: u64,
    /// When the metrics were requested.
    pub at: Option<Instant>,
    /// The engine's metrics.
    pub figures: EngineLoad,
    /// The smoothed duration of one step, in microseconds.
    pub step_us: Option<u64>,
}

/// Polls until dropped.
pub(super) async fn run(
    client: &EngineClient,
    engine: EngineKind,
    interval: Duration,
    polled: &watch::Sender<EnginePoll>,
    metrics: &Metrics,
) {
    let mut ticks = tokio::time::interval_at(ticks::next_after(Instant::now()), interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut logged_down, mut late) = (false, 0);
    loop {
        ticks.tick().await;
        let asked = Instant::now();
        let outcome = query(client, engine).await;
        let was = polled.borrow().clone();
        let processes = was.process;
        let now = match outcome {
            Ok(figures) => {
                let now = was.clone().updated_with(asked, figures);
                if !was.up {
                    tracing::info!(process = now.process, "the engine answers");
                } else if now.process != was.process {
                    tracing::warn!(process = now.process, "the engine has restarted");
                }
                (logged_down, late) = (false, 0);
                now
            }
            // An engine may be late because it is busy.
            Err(QueryError::Late(_)) if was.up && late + 1 < LATE_MAX => {
                late += 1;
                was
            }
            Err(error) => {
                if !std::mem::replace(&mut logged_down, true) {
                    tracing::warn!(%error, "the engine is down, or still starting");
                }
                EnginePoll { up: false, ..was }
            }
        };
        metrics.engine_up.set(now.up.into());
        metrics.engine_processes.inc_by(now.process.saturating_sub(processes));
        polled.send_replace(now);
    }
}

impl EnginePoll {
    /// The state after a poll that returned `figures`.
    fn updated_with(self, asked: Instant, figures: Option<EngineLoad>) -> Self {
        let known = figures.is_some();
        let figures = figures.unwrap_or_default();
        // After an outage the process is the same only if its start time shows it.
        let is_same_process = self.figures.started_at_s.is_some()
            && self.figures.started_at_s == figures.started_at_s;
        let restarted = match self.up {
            true => known && figures.is_of_another_process(&self.figures),
            false => !is_same_process,
        };
        if restarted {
            let process = self.process + 1;
            return Self { up: true, process, at: known.then_some(asked), figures, step_us: None };
        }
        if !known {
            // The last metrics stay, and their age grows.
            return Self { up: true, ..self };
        }
        let waits = figures.inter_token.zip(self.figures.inter_token);
        let step_us = match (waits.and_then(|(now, was)| now.mean_us_since(&was)), self.step_us) {
            (Some(now), Some(was)) => Some(was - was / STEP_SMOOTHING + now / STEP_SMOOTHING),
            (now, was) => now.or(was),
        };
        Self { up: true, process: self.process, at: Some(asked), figures, step_us }
    }
}

/// Reads health and metrics. Returns `None` for a healthy engine whose metrics cannot be read.
async fn query(
    client: &EngineClient,
    engine: EngineKind,
) -> Result<Option<EngineLoad>, QueryError> {
    let paths = engine.paths();
    client.get(paths.liveness, TIMEOUT).await?;
    Ok(client.get(paths.metrics, TIMEOUT).await.ok().map(|text| engine.load(&text)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use splitrail_engine::load::InterToken;

    fn figures(started_at_s: Option<f64>, count: u64, sum_s: f64) -> Option<EngineLoad> {
        let inter_token = Some(InterToken { count, sum_s });
        Some(EngineLoad { started_at_s, inter_token, ..EngineLoad::default() })
    }

    fn after(steps: &[Option<Option<EngineLoad>>]) -> EnginePoll {
        steps.iter().fold(EnginePoll::default(), |was, step| match step {
            Some(figures) => was.updated_with(Instant::now(), figures.clone()),
            None => EnginePoll { up: false, ..was },
        })
    }

    #[test]
    fn an_engine_with_another_start_time_is_another_process() {
        let (old, new) = (figures(Some(1.0), 0, 0.0), figures(Some(2.0), 0, 0.0));
        for (steps, process) in [
            (vec![Some(old.clone())], 1),
            (vec![Some(old.clone()), Some(old.clone())], 1),
            (vec![Some(old.clone()), Some(new.clone())], 2),
            (vec![Some(old.clone()), None, Some(old.clone())], 1),
            (vec![Some(old.clone()), None, Some(new)], 2),
            (vec![Some(old.clone()), Some(None), Some(old)], 1),
            // Without a start time, an engine counts as restarted after an outage.
            (vec![Some(None), None, Some(None)], 2),
            (vec![Some(None), Some(None)], 1),
        ] {
            assert_eq!(after(&steps).process, process);
        }
    }

    #[test]
    fn the_step_time_is_smoothed_and_kept_while_nothing_is_generated() {
        let at = |count, sum_s| Some(figures(Some(1.0), count, sum_s));
        assert_eq!(after(&[at(0, 0.0)]).step_us, None);
        assert_eq!(after(&[at(0, 0.0), at(10, 0.1)]).step_us, Some(10_000));
        let slower = [at(0, 0.0), at(10, 0.1), at(20, 0.5)];
        assert_eq!(after(&slower).step_us, Some(17_500));
        assert_eq!(after(&[&slower[..], &[at(20, 0.5)]].concat()).step_us, Some(17_500));
    }

    #[test]
    fn without_new_metrics_the_last_ones_keep_their_age() {
        let polled = after(&[Some(figures(Some(1.0), 3, 0.1)), Some(None)]);
        assert!(polled.up && polled.at.is_some());
        assert_eq!(polled.figures.inter_token.unwrap().count, 3);
    }
}
