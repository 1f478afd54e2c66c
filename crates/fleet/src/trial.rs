//! Tries once whether an engine supports `cache_hit_threshold`, and whether one with several
//! data-parallel ranks takes requests that name a rank.
//!
//! No engine reports either, and engines that do not know the field ignore it (vLLM does). So the
//! trial is a prompt of a few tokens with a threshold of 1, which no prompt reaches, since an
//! engine computes the last token of every prompt. An engine that supports the field rejects the
//! request; one that does not generates a single token. For ranks, the trial names a rank that does
//! not exist.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use splitrail_engine::identity::Trial;
use tokio::time::MissedTickBehavior;

use super::worker::Worker;
use crate::{LegRequest, ServedModel};
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_engine_client::{LegHeaders, NO_SUCH_RANK, Shape};

/// Interval at which the task checks whether a trial is due.
const PERIOD: Duration = Duration::from_millis(500);
/// Maximum time for the reply: a busy engine may take a while.
const PATIENCE: Duration = Duration::from_secs(30);

/// Tries thresholds on one worker whenever it is up and its support is unknown, until the task is
/// aborted.
pub async fn run(served: Arc<ServedModel>, worker: Arc<Worker>) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if !worker.is_up() || !worker.is_probed() || worker.supports_cache_hit_threshold().is_some()
        {
            continue;
        }
        match tokio::time::timeout(PATIENCE, ask(&served, &worker)).await {
            Ok(Ok(supported)) => {
                worker.set_supports_cache_hit_threshold(Some(supported));
                let (model, worker) = (served.name(), worker.id());
                tracing::info!(model, worker, supported, "cache_hit_threshold");
            }
            // The engine may be starting, or full; the trial is repeated.
            Ok(Err(error)) => {
                tracing::debug!(worker = worker.id(), %error, "the trial for cache_hit_threshold failed and is repeated");
            }
            Err(_) => tracing::debug!(worker = worker.id(), "did not say in time"),
        }
    }
}

/// Tries rank headers on one worker whenever it is up, has several ranks and its support is
/// unknown.
pub async fn run_rank(served: Arc<ServedModel>, worker: Arc<Worker>) {
    let mut counts = worker.ranks.follow();
    loop {
        // The sender belongs to the worker, which this task keeps alive.
        let several = |count: &Option<u16>| count.is_some_and(|count| count > 1);
        if counts.wait_for(several).await.is_err() {
            return;
        }
        if worker.is_up() && worker.is_probed() && worker.ranks.takes_rank_header().is_none() {
            match tokio::time::timeout(PATIENCE, ask_rank(&served, &worker)).await {
                Ok(Ok(pins)) => {
                    worker.ranks.set_takes_rank_header(Some(pins));
                    let ranks = worker.ranks.count();
                    let (model, worker) = (served.name(), worker.id());
                    tracing::info!(model, worker, ranks, pins, "x-data-parallel-rank");
                }
                Ok(Err(error)) => {
                    tracing::debug!(worker = worker.id(), %error, "the trial for rank headers failed and is repeated");
                }
                Err(_) => tracing::debug!(worker = worker.id(), "did not say in time"),
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Whether the engine refuses the model's name; `None` without a reply within `patience`.
pub(super) async fn refuses_model(
    served: &ServedModel,
    worker: &Arc<Worker>,
    patience: Duration,
) -> Option<bool> {
    let asked = send(served, worker, Trial::Threshold, None);
    match tokio::time::timeout(patience, asked).await.ok()? {
        Ok(_) => Some(false),
        Err(error) if error.kind() == ErrorKind::EngineLacksModel => Some(true),
        Err(error) => error.is_reply().then_some(false),
    }
}

async fn ask_rank(served: &ServedModel, worker: &Arc<Worker>) -> Result<bool, Error> {
    let nowhere = Trial::Rank.rank(worker.ranks.count().into());
    match send(served, worker, Trial::Rank, nowhere).await {
        Ok(_) => Ok(false),
        Err(error) => match error.kind() {
            _ if error.message().ends_with(NO_SUCH_RANK) => Ok(true),
            // The engine rejects the request for another reason than its rank.
            ErrorKind::EngineRejected(400 | 422)
            | ErrorKind::EngineLacksPath
            | ErrorKind::EngineLacksModel => Ok(false),
            _ => Err(error),
        },
    }
}

/// Sends a trial and returns the reply.
async fn send(
    served: &ServedModel,
    worker: &Arc<Worker>,
    trial: Trial,
    rank: Option<u32>,
) -> Result<Bytes, Error> {
    let body = Bytes::from(trial.body(served.name()));
    let headers = &LegHeaders { rank, ..LegHeaders::with_random_id() };
    let shape = Shape::whole(Endpoint::Completions);
    let leg = LegRequest { client: &served.client, worker, shape, headers };
    Ok(leg.whole(body).await?.body)
}

async fn ask(served: &ServedModel, worker: &Arc<Worker>) -> Result<bool, Error> {
    match send(served, worker, Trial::Threshold, None).await {
        Ok(reply) => {
            let outcome = Trial::Threshold.read(200, &reply).unwrap_or_default();
            if outcome.reports_cached_tokens == Some(false) {
                tracing::warn!(
                    model = served.name(),
                    worker = worker.id(),
                    "the engine reports no cached tokens, so that they are estimated: start it \
                     with --enable-prompt-tokens-details"
                );
            }
            outcome
                .supports_cache_hit_threshold
                .ok_or_else(|| Error::engine(worker.id(), "sent no completion"))
        }
        Err(error) => match error.kind() {
            ErrorKind::EngineRejected(412) => Ok(true),
            // The engine does not support the request in this form, so the router uses its index.
            ErrorKind::EngineRejected(400 | 422)
            | ErrorKind::EngineLacksPath
            | ErrorKind::EngineLacksModel => Ok(false),
            _ => Err(error),
        },
    }
}
