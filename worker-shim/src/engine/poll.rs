//! Asks the engine for its health and its figures, again and again.

use std::time::Duration;

use splitrail_engine::vllm::identity::{HEALTH_PATH, METRICS_PATH};
use splitrail_engine::vllm::load::EngineLoad;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use super::client::{AskError, EngineClient};
use crate::telemetry::Metrics;
use crate::ticks;

/// An engine that takes longer to answer is not well.
const PATIENCE: Duration = Duration::from_secs(2);

/// A new step time counts by one part in so many.
const STEP_SMOOTHING: u64 = 4;

/// An engine's own figures, as they were last had.
#[derive(Clone, Debug, Default)]
pub struct Polled {
    /// Whether it answers.
    pub up: bool,
    /// Which of its processes it is, from 1; 0 until it was reached.
    pub process: u64,
    /// When it was asked for the figures.
    pub at: Option<Instant>,
    /// The figures.
    pub figures: EngineLoad,
    /// The time of one step, in microseconds, smoothed.
    pub step_us: Option<u64>,
}

/// Polls until dropped.
pub(super) async fn run(
    client: &EngineClient,
    interval: Duration,
    polled: &watch::Sender<Polled>,
    metrics: &Metrics,
) {
    let mut ticks = tokio::time::interval_at(ticks::next_after(Instant::now()), interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut said_down = false;
    loop {
        ticks.tick().await;
        let asked = Instant::now();
        let outcome = ask(client).await;
        let was = polled.borrow().clone();
        let now = match outcome {
            Ok(figures) => {
                let now = was.clone().followed_by(asked, figures);
                if !was.up {
                    tracing::info!(process = now.process, "the engine answers");
                } else if now.process != was.process {
                    tracing::warn!(process = now.process, "the engine is another process");
                }
                said_down = false;
                now
            }
            Err(error) => {
                if !std::mem::replace(&mut said_down, true) {
                    tracing::warn!(%error, "the engine is down, or still starting");
                }
                Polled { up: false, ..was }
            }
        };
        metrics.engine_up.set(now.up.into());
        metrics.engine_processes.set(i64::try_from(now.process).unwrap_or(i64::MAX));
        polled.send_replace(now);
    }
}

impl Polled {
    /// What is known after the engine gave these figures.
    fn followed_by(self, asked: Instant, figures: Option<EngineLoad>) -> Self {
        let known = figures.is_some();
        let figures = figures.unwrap_or_default();
        // After an outage it is the same process only if it says so.
        let says_same = self.figures.started_at_s.is_some()
            && self.figures.started_at_s == figures.started_at_s;
        let anew = match self.up {
            true => known && figures.is_of_another_process(&self.figures),
            false => !says_same,
        };
        if anew {
            let process = self.process + 1;
            return Self { up: true, process, at: known.then_some(asked), figures, step_us: None };
        }
        if !known {
            // What was known stays, and grows old.
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

/// `None` for an engine that is well, but has no figures to show.
async fn ask(client: &EngineClient) -> Result<Option<EngineLoad>, AskError> {
    client.get(HEALTH_PATH, PATIENCE).await?;
    match client.get(METRICS_PATH, PATIENCE).await {
        Ok(text) => Ok(Some(EngineLoad::from_bytes(&text))),
        Err(AskError::Status(_) | AskError::Body) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use splitrail_engine::vllm::load::InterToken;

    fn figures(started_at_s: Option<f64>, count: u64, sum_s: f64) -> Option<EngineLoad> {
        let inter_token = Some(InterToken { count, sum_s });
        Some(EngineLoad { started_at_s, inter_token, ..EngineLoad::default() })
    }

    fn after(steps: &[Option<Option<EngineLoad>>]) -> Polled {
        steps.iter().fold(Polled::default(), |was, step| match step {
            Some(figures) => was.followed_by(Instant::now(), figures.clone()),
            None => Polled { up: false, ..was },
        })
    }

    #[test]
    fn an_engine_that_began_at_another_time_is_another_process() {
        let (old, new) = (figures(Some(1.0), 0, 0.0), figures(Some(2.0), 0, 0.0));
        for (steps, process) in [
            (vec![Some(old.clone())], 1),
            (vec![Some(old.clone()), Some(old.clone())], 1),
            (vec![Some(old.clone()), Some(new.clone())], 2),
            (vec![Some(old.clone()), None, Some(old.clone())], 1),
            (vec![Some(old.clone()), None, Some(new)], 2),
            (vec![Some(old.clone()), Some(None), Some(old)], 1),
            // Who does not say when it began is not believed to be the same after an outage.
            (vec![Some(None), None, Some(None)], 2),
            (vec![Some(None), Some(None)], 1),
        ] {
            assert_eq!(after(&steps).process, process);
        }
    }

    #[test]
    fn the_time_of_a_step_is_smoothed_and_kept_while_nothing_is_generated() {
        let at = |count, sum_s| Some(figures(Some(1.0), count, sum_s));
        assert_eq!(after(&[at(0, 0.0)]).step_us, None);
        assert_eq!(after(&[at(0, 0.0), at(10, 0.1)]).step_us, Some(10_000));
        let slower = [at(0, 0.0), at(10, 0.1), at(20, 0.5)];
        assert_eq!(after(&slower).step_us, Some(17_500));
        assert_eq!(after(&[&slower[..], &[at(20, 0.5)]].concat()).step_us, Some(17_500));
    }

    #[test]
    fn without_figures_those_before_stay_and_keep_their_age() {
        let polled = after(&[Some(figures(Some(1.0), 3, 0.1)), Some(None)]);
        assert!(polled.up && polled.at.is_some());
        assert_eq!(polled.figures.inter_token.unwrap().count, 3);
    }
}
