//! Counts the attempts of one prompt's legs, and excludes workers on which a leg already failed.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::context::{Context, PromptContext};
use crate::decide::adapter_holders::{lacking_adapter, reconsider};
use crate::decide::context_length::{fits_elsewhere, not_longer, too_short};
use crate::decide::fetchable::may_fetch;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_fleet::{Exclusion, ServedModel, Worker};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::{Leg, WorkerIndex};

/// The workers on which a leg of one prompt has failed, and the number of attempts that are left.
pub(crate) struct DecodeAttempts {
    failed: Vec<Exclusion>,
    left: u32,
    failures: AttemptFailures,
    /// Whether a worker that computes the prompt may fetch a part of it. After a failed fetch, none
    /// does.
    pub(crate) may_fetch: bool,
}

impl DecodeAttempts {
    /// As many attempts as the model's configuration allows (`retries.decode`).
    pub(crate) fn new(prompt: PromptContext<'_>) -> Self {
        let Context { served, endpoint, options, .. } = prompt.context.as_ref();
        let output_tokens = options.output.least_tokens();
        let mut failed = match endpoint.generates() {
            true => too_short(served, Leg::Decode, prompt.unit, output_tokens),
            false => Vec::new(),
        };
        failed.extend(lacking_adapter(served, &prompt.unit.body));
        let failures = AttemptFailures::new(prompt);
        let left = failures.bound(served.config.retries.decode);
        Self { failed, left, failures, may_fetch: may_fetch(prompt) }
    }

    /// Workers that are not tried again.
    pub(crate) fn failed(&self) -> &[Exclusion] {
        &self.failed
    }

    /// Whether no further attempt is allowed after the present one.
    pub(crate) fn is_last(&self) -> bool {
        self.left == 0
    }

    /// Records that an attempt has succeeded.
    pub(crate) fn succeeded(&self, served: &ServedModel) {
        self.failures.succeeded(served);
    }

    /// Excludes further workers.
    pub(crate) fn exclude(&mut self, workers: Vec<Exclusion>) {
        self.failed.extend(workers);
    }

    /// Excludes a prefill worker on whose hand-off a decode leg has failed, if another one is up.
    pub(crate) fn use_another_prefill_worker(&mut self, served: &ServedModel, worker: &Worker) {
        self.failed.push(Exclusion::new(worker.index, VetoReason::NoHandOff));
        if !served.pool.any_up(Leg::Prefill, &self.failed) {
            self.failed.pop();
        }
    }

    /// Notes that a worker has failed a leg, and allows a further attempt.
    ///
    /// # Errors
    /// The worker's error, if another worker would not do better, no other worker is up, or the
    /// attempts or the retry budget are used up.
    pub(crate) fn retry_elsewhere(
        &mut self,
        context: &Context,
        leg: Leg,
        worker: &Worker,
        error: Error,
    ) -> Result<(), Error> {
        self.failures.judge(&context.served, leg, worker, &error);
        reconsider(&mut self.failed, &error);
        let fits_elsewhere = fits_elsewhere(&context.served, worker, &error);
        match fits_elsewhere {
            true => self.failed.extend(not_longer(&context.served, worker, &self.failed)),
            false => {
                let reason = VetoReason::of_failure(error.kind());
                self.failed.push(Exclusion::new(worker.index, reason));
            }
        }
        let others = context.served.pool.any_up(leg, &self.failed);
        let stale = error.kind() == ErrorKind::StaleConnection;
        if stale
            || !others && (error.kind() == ErrorKind::LeaseExpired || error.is_of_the_connection())
        {
            // The worker may be tried again: it was too slow once but may be in time with a new
            // prefill, or a connection to it was lost, which says nothing about the next
            // connection.
            self.failed.pop();
        } else if !(others && (error.worth_another_worker() || fits_elsewhere)) {
            return Err(error);
        }
        self.retry(context, worker, error)
    }

    /// Allows a further attempt after one that failed without a fault of its worker. After a kept
    /// connection that had ended, it does not count as one of those that are left: the engine got
    /// nothing, and as all further attempts use new connections, this comes once.
    ///
    /// # Errors
    /// The error of the attempt, if the attempts or the retry budget are used up.
    pub(crate) fn retry(
        &mut self,
        context: &Context,
        worker: &Worker,
        error: Error,
    ) -> Result<(), Error> {
        let used = u32::from(error.kind() != ErrorKind::StaleConnection);
        match self.left.checked_sub(used) {
            Some(left) if allow_retry(context, "decode", worker, &error) => {
                self.left = left;
                Ok(())
            }
            _ => Err(error),
        }
    }
}

/// How the attempts of one prompt have failed, to tell a prompt that fails everywhere from a worker that
/// fails.
pub(crate) struct AttemptFailures {
    /// The client's prompt, as raw JSON.
    prompt: Option<Box<str>>,
    /// Whether the prompt has failed on two workers before.
    is_suspect: bool,
    /// The worker, leg and outcome of the first failure.
    first: Option<(WorkerIndex, Leg, &'static str)>,
}

impl AttemptFailures {
    /// Of a prompt before its first attempt.
    pub(crate) fn new(prompt: PromptContext<'_>) -> Self {
        let PromptContext { context, unit, .. } = prompt;
        // A recording's `prompt` is that of many.
        let members = if context.endpoint.transcribes() { &[][..] } else { &PROMPT_MEMBERS };
        let raw = members.iter().find_map(|key| unit.body.raw(key));
        let now = Instant::now();
        let is_suspect = raw.is_some_and(|raw| context.served.suspects.contains(raw, now));
        Self { prompt: raw.map(Box::from), is_suspect, first: None }
    }

    /// The number of further attempts: none for a suspect prompt.
    pub(crate) fn bound(&self, configured: u32) -> u32 {
        if self.is_suspect { 0 } else { configured }
    }

    /// Records that an attempt has succeeded.
    pub(crate) fn succeeded(&self, served: &ServedModel) {
        if let Some(prompt) = self.prompt.as_ref().filter(|_| self.is_suspect) {
            served.suspects.remove(prompt);
        }
    }

    /// Judges a failure that was counted against its worker. If the prompt has failed alike on another
    /// worker, neither is at fault, unless nothing else succeeds there.
    pub(crate) fn judge(&mut self, served: &ServedModel, leg: Leg, worker: &Worker, error: &Error) {
        // That nothing listens at a worker's address says nothing about the prompt.
        if !error.speaks_against_its_worker() || error.kind() == ErrorKind::EngineUnreachable {
            return;
        }
        if self.is_suspect {
            worker.forgive(leg);
            return;
        }
        let Some((index, first_leg, outcome)) = self.first else {
            self.first = Some((worker.index, leg, error.outcome()));
            return;
        };
        let roster = served.pool.roster();
        let other = roster.get(index).filter(|_| index != worker.index);
        let Some(other) = other.filter(|_| outcome == error.outcome()) else { return };
        let Some(prompt) = &self.prompt else { return };
        if worker.breaker(leg).may_forgive() && other.breaker(first_leg).may_forgive() {
            worker.forgive(leg);
            other.forgive(first_leg);
            served.suspects.add(prompt, Instant::now());
            self.is_suspect = true;
            let (model, workers) = (served.name(), [other.id(), worker.id()]);
            tracing::warn!(
                model,
                ?workers,
                outcome,
                "a prompt fails alike on two workers: neither counts as failing, and the prompt is \
                 tried on one worker only from now on"
            );
        }
    }
}

/// The members of bodies that hold the prompt.
const PROMPT_MEMBERS: [&str; 4] = ["messages", "prompt", "input", "token_ids"];

/// Whether the model's retry budget allows a further attempt; if so, the attempt is counted and
/// logged.
pub(crate) fn allow_retry(
    context: &Context,
    leg: &'static str,
    worker: &Worker,
    error: &Error,
) -> bool {
    if !context.served.retry_budget.withdraw() {
        let labels = [context.served.name(), leg];
        context.metrics.retries_refused.with_label_values(&labels).inc();
        return false;
    }
    record_retry(context, leg, worker, error);
    true
}

/// Counts and logs a further attempt. After a failure of a kept connection, further attempts use new
/// connections.
pub(crate) fn record_retry(context: &Context, leg: &'static str, worker: &Worker, error: &Error) {
    if matches!(error.kind(), ErrorKind::ForeignReply | ErrorKind::StaleConnection) {
        context.distrusts_kept_connections.store(true, Relaxed);
    }
    if error.kind() == ErrorKind::EngineTimeout {
        context.was_late.store(true, Relaxed);
    }
    let labels = [context.served.name(), leg, error.outcome()];
    context.metrics.retries.with_label_values(&labels).inc();
    tracing::warn!(model = labels[0], leg, worker = worker.id(), %error, "trying another worker");
}
