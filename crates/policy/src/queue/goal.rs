//! Early refusal: rejects a request at once that would miss its TTFT goal.

use super::{Item, Queue, View, shortest_prefill_ms};
use crate::candidate::Candidate;

/// Why the queue refuses a request.
#[derive(Clone, Copy, Debug)]
pub struct QueueRefusal {
    /// The lowest possible time to the first token; `None` if the queue is full.
    pub predicted_ttft_ms: Option<f64>,
    /// The time after which a retry can succeed.
    pub retry_after_ms: f64,
}

impl QueueRefusal {
    pub(super) fn full(retry_after_ms: f64) -> Self {
        Self { predicted_ttft_ms: None, retry_after_ms }
    }

    /// The value of the header `Retry-After`, from 1 to 3600.
    pub fn retry_after_seconds(&self) -> u64 {
        (self.retry_after_ms / 1e3).ceil().clamp(1.0, 3600.0) as u64
    }
}

impl<T> Queue<T> {
    /// Refuses a request that cannot meet the goal even under the best conditions.
    pub(super) fn check_goal(
        &self,
        item: Item<T>,
        prefill_ms: f64,
        now_ns: u64,
        candidates: &[Candidate],
    ) -> Result<Item<T>, QueueRefusal> {
        let Some(goal_ms) = self.config.ttft_goal_ms else { return Ok(item) };
        let waited_ms = now_ns.saturating_sub(item.arrival_ns) as f64 / 1e6;
        let wait_ms = self.wait_ms(&item, prefill_ms, candidates);
        let predicted_ms = waited_ms + wait_ms + prefill_ms;
        if predicted_ms <= goal_ms || prefill_ms > goal_ms || wait_ms == 0.0 {
            // A request whose prefill alone exceeds the goal, or that would not have to wait, has
            // no better chance later.
            return Ok(item);
        }
        let retry_after_ms = (predicted_ms - goal_ms).min(wait_ms);
        Err(QueueRefusal { predicted_ttft_ms: Some(predicted_ms), retry_after_ms })
    }

    /// The predicted wait of a request that is not in the queue; `None` without a worker that is up.
    pub(super) fn backlog_ms(&self, item: &Item<T>, view: &mut impl View<T>) -> Option<f64> {
        let mut candidates = Vec::new();
        view.candidates(&item.key, &mut candidates);
        let prefill_ms = shortest_prefill_ms(&candidates, &item.query);
        let is_any_up = candidates.iter().any(|candidate| candidate.up);
        is_any_up.then(|| self.wait_ms(item, prefill_ms, &candidates))
    }

    /// The time until the first worker is free and the requests before this one are served by all
    /// workers.
    fn wait_ms(&self, item: &Item<T>, prefill_ms: f64, candidates: &[Candidate]) -> f64 {
        let up = || candidates.iter().filter(|candidate| candidate.up);
        let workers = up().count();
        if workers == 0 {
            return 0.0;
        }
        let free_ms = up().map(|c| c.wait_ns as f64 / 1e6).fold(f64::INFINITY, f64::min);
        free_ms + self.ahead_ms(item.class, prefill_ms, workers)
    }

    /// The time in milliseconds for which `workers` workers are busy with the requests that come
    /// before a request of this class and predicted prefill.
    pub fn ahead_ms(&self, class: i32, prefill_ms: f64, workers: usize) -> f64 {
        let before = self.waiting.iter().filter(|other| {
            let other_class = other.item.class;
            other_class > class || (other_class == class && other.prefill_ms <= prefill_ms)
        });
        before.map(|other| other.prefill_ms).sum::<f64>() / workers.max(1) as f64
    }
}
