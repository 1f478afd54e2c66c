//! Asks an engine that gives no sign of work for one token: an engine that is busy with a long prompt
//! gives it, and one that hangs does not.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};

use crate::{LegRequest, ServedModel, Worker};
use splitrail_api::Endpoint;
use splitrail_api::error::Error;
use splitrail_engine_client::{LegHeaders, Shape};

/// How long an engine may take for the token before it counts as hanging, if its costs are known.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same if they are not: the first request after a start takes longer.
const PATIENCE_UNLEARNED: Duration = Duration::from_secs(5);
/// The pause after the first trial; each further one without another sign of work doubles it.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(4);
/// The time without a trial after which pauses are short again.
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// When the reply is no longer waited for.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The prompt: a few tokens, which fill no block.
pub const PROMPT: &str = "Hello";

/// The trials of one worker.
#[derive(Debug, Default)]
pub struct WorkTrial(Mutex<TrialState>);

#[derive(Debug, Default)]
struct TrialState {
    /// When the trial under way began.
    began: Option<Instant>,
    /// When the last trial ended, and the pause after it.
    ended: Option<Instant>,
    pause: Duration,
}

impl WorkTrial {
    /// Begins a trial, unless one is under way or the pause after the last one is not over.
    pub(super) fn begin(&self, now: Instant) -> bool {
        let mut state = self.lock();
        let since = state.ended.map(|ended| now.saturating_duration_since(ended));
        if state.began.is_some() || since.is_some_and(|since| since < state.pause) {
            return false;
        }
        if since.is_some_and(|since| since >= FORGET_AFTER) {
            state.pause = Duration::ZERO;
        }
        state.began = Some(now);
        state.pause = (state.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        true
    }

    /// Whether the engine has not answered a trial in time. `is_learned` says whether its costs are
    /// known.
    pub(super) fn is_unanswered(&self, is_learned: bool, now: Instant) -> bool {
        let patience = if is_learned { PATIENCE } else { PATIENCE_UNLEARNED };
        self.lock().began.is_some_and(|began| now.saturating_duration_since(began) >= patience)
    }

    fn end(&self, now: Instant) {
        let mut state = self.lock();
        (state.began, state.ended) = (None, Some(now));
    }

    /// A poisoned lock is still used: the state stays valid at each step of a change.
    fn lock(&self) -> MutexGuard<'_, TrialState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a trial also if its task is aborted.
struct EndOfTrial<'a>(&'a Worker);

impl Drop for EndOfTrial<'_> {
    fn drop(&mut self) {
        self.0.health.trial.end(Instant::now());
    }
}

/// Asks a worker's engine for one token: as a chat, or as a completion if the engine refuses chats. The
/// head of a reply, which comes with the token, is a sign of work.
pub(super) async fn run(served: Arc<ServedModel>, worker: Arc<Worker>) {
    let _end = EndOfTrial(&worker);
    let mut body = json!({
        "model": served.name(), "max_tokens": 1, "temperature": 0, "stream": false,
        "messages": [{"role": "user", "content": PROMPT}],
    });
    let headers = &LegHeaders::with_random_id();
    let ask = |endpoint, body: &Value| {
        let (client, shape) = (&served.client, Shape::whole(endpoint));
        let body = Bytes::from(body.to_string());
        let leg = LegRequest { client, worker: &worker, shape, headers };
        async move { leg.begin(body).await }
    };
    let asked = async {
        let begun = ask(Endpoint::Chat, &body).await;
        if !begun.as_ref().is_err_and(Error::is_reply) {
            return begun;
        }
        body["prompt"] = PROMPT.into();
        body.as_object_mut().and_then(|body| body.remove("messages"));
        ask(Endpoint::Completions, &body).await
    };
    match tokio::time::timeout(TIMEOUT, asked).await {
        Ok(Ok(response)) => {
            worker.health.progress.record_sign();
            served.client.finish(response.body);
        }
        Ok(Err(error)) => {
            tracing::debug!(worker = worker.id(), %error, "a trial for one token failed");
        }
        Err(_) => tracing::debug!(worker = worker.id(), "a trial for one token got no reply"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_trial_at_a_time_with_growing_pauses() {
        let (trial, start) = (WorkTrial::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(trial.begin(at(0)) && !trial.begin(at(9)));
        assert!(!trial.is_unanswered(false, at(4)) && trial.is_unanswered(false, at(5)));
        assert!(trial.is_unanswered(true, at(1)));
        trial.end(at(10));
        assert!(!trial.is_unanswered(true, at(10)) && !trial.begin(at(10)));
        assert!(trial.begin(at(11)));
        trial.end(at(12));
        assert!(!trial.begin(at(13)) && trial.begin(at(14)), "twice as long");
        trial.end(at(15));
        assert!(trial.begin(at(75)));
        trial.end(at(76));
        assert!(trial.begin(at(77)), "short again");
    }
}
