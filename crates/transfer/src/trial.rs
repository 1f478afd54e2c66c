//! Trials of peer fetches. With `peer_fetch: auto`, a worker sends and takes prefixes for requests of
//! clients only after it has done so for a prompt of the router's own.
//!
//! The source computes one block of a prompt with a random cache salt, which no client shares, and
//! hands it over; the other worker takes it. Both keep the block until they need its place. A trial is
//! like the [canary](splitrail_fleet): it is in no ledger and no decision record.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_api::JsonObject;
use splitrail_api::text::random_id;
use splitrail_engine_client::LegHeaders;
use splitrail_fleet::peer_fetch::{can_send, can_take};
use splitrail_fleet::{Cluster, ServedModel, Worker};
use splitrail_kv::BlockHash;
use splitrail_policy::Leg;
use splitrail_telemetry::{Metrics, TaskName, restart_on_panic};
use splitrail_workload::fetches::{FetchBooking, FetchBounds, PeerFetches, Prefix};
use tokio_util::sync::CancellationToken;

use crate::peer_fetch::{Asker, PeerFetchOutcome, Steps, Workers};

/// Interval at which workers are looked at.
const INTERVAL: Duration = Duration::from_millis(500);
/// The token ids of the prompt: every vocabulary has them.
const IDS: std::ops::Range<u32> = 3..203;

/// Tries the workers of all models until `stop` is cancelled.
pub async fn run(cluster: Arc<Cluster>, stop: CancellationToken) {
    let follow = || follow(Arc::clone(&cluster), stop.clone());
    restart_on_panic(TaskName::new("trials of peer fetches"), follow).await;
}

async fn follow(cluster: Arc<Cluster>, stop: CancellationToken) {
    let mut turn = 0;
    while !stop.is_cancelled() {
        for served in &cluster.serving().models {
            let bounds = served.pool.fetch_bounds().filter(|bounds| bounds.needs_trial);
            let Some(bounds) = bounds.filter(|_| served.config.canary.enabled) else { continue };
            let bounds = FetchBounds { needs_trial: false, ..bounds };
            if let Some(trial) = next(served, bounds, turn) {
                turn += 1;
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = trial.run(served, &cluster.metrics) => {}
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            () = stop.cancelled() => {}
        }
    }
}

/// A trial of a worker with another one.
struct Trial {
    worker: Arc<Worker>,
    other: Arc<Worker>,
    /// Whether the worker takes a block; otherwise it sends one.
    takes: bool,
}

/// The next trial: of a worker that has not taken a block yet, or has not sent one.
fn next(served: &ServedModel, bounds: FetchBounds, turn: usize) -> Option<Trial> {
    let (roster, now) = (served.pool.roster(), Instant::now());
    let block_size = served.pool.block_size();
    let able = |worker: &&Arc<Worker>| {
        is_able(worker, now)
            && can_take(worker, bounds, block_size, now)
            && can_send(worker, bounds, block_size, now)
    };
    let able: Vec<_> = roster.iter().filter(able).collect();
    let lacks_proof = |fetches: &PeerFetches| !fetches.has_taken() || !fetches.has_sent();
    able.iter().filter(|worker| lacks_proof(&worker.transfer.fetches)).find_map(|worker| {
        let others = || {
            let fits =
                |other: &&Arc<Worker>| other.index != worker.index && other.stores_kv_as(worker);
            able.iter().copied().filter(fits)
        };
        // If a trial fails, the next one is with another worker.
        let other = others().nth(turn % others().count().max(1))?;
        let takes = !worker.transfer.fetches.has_taken();
        Some(Trial { worker: Arc::clone(worker), other: Arc::clone(other), takes })
    })
}

/// Whether the engine shows metrics of NIXL, or its shim, which reports no metrics, is configured for it.
fn has_nixl(worker: &Worker, now: Instant) -> bool {
    let capabilities = worker.shim_report.capabilities();
    worker.load(now).is_some_and(|load| load.has_nixl)
        || capabilities.is_some_and(|capabilities| capabilities.connector == "nixl")
}

/// Whether a worker can be tried: its engine has NIXL, agrees with the router on prompts
/// and blocks, has full attention only, and no trial of it has failed lately.
fn is_able(worker: &Worker, now: Instant) -> bool {
    let groups = &worker.kv.event_stats;
    has_nixl(worker, now)
        && worker.overlap_is_believed(None)
        && groups.followed_groups().is_empty()
        && groups.unfollowed_groups().is_empty()
        && worker.transfer.fetches.may_try(now)
        && [Leg::Prefill, Leg::Decode]
            .iter()
            .any(|leg| worker.serves(*leg) && worker.is_available(*leg, now))
}

impl Trial {
    async fn run(&self, served: &Arc<ServedModel>, metrics: &Arc<Metrics>) {
        let Self { worker, other, takes } = self;
        worker.transfer.fetches.trial_begins(Instant::now());
        let (source, fetcher) = if *takes { (other, worker) } else { (worker, other) };
        let workers = Workers { source, source_rank: rank(source), fetcher };
        let outcome = transfer(served, metrics, workers).await.unwrap_or_else(|outcome| outcome);
        let model = served.name();
        // An engine that drops the last block of each hit computes the test block again.
        if outcome.has_blocks() {
            let [source_of, fetcher_of] = [source, fetcher].map(|worker| &worker.transfer.fetches);
            PeerFetches::trial_succeeded(source_of, fetcher_of);
            let (worker, source) = (fetcher.id(), source.id());
            tracing::info!(model, worker, source, "the worker took a test block from the source");
        } else {
            worker.transfer.fetches.trial_failed(Instant::now());
            tracing::info!(
                model,
                worker = fetcher.id(),
                source = source.id(),
                outcome = outcome.name(),
                "the worker could not take a test block from the source: requests are served without \
                 such peer fetches, and it is tried again (peer_fetch: auto)"
            );
        }
    }
}

/// Has the source compute one block of a new prompt, and the other worker take it.
async fn transfer(
    served: &Arc<ServedModel>,
    metrics: &Arc<Metrics>,
    workers: Workers<'_>,
) -> Result<PeerFetchOutcome, PeerFetchOutcome> {
    let mut body = JsonObject::parse_str("{}").map_err(|_| PeerFetchOutcome::Unusable)?;
    for (key, value) in [("model", served.name()), ("cache_salt", &random_id())] {
        body.set(key, serde_json::Value::from(value).to_string());
    }
    let ids: Vec<u32> = IDS.cycle().take(served.pool.block_size() as usize + 1).collect();
    // A trial takes no place of fetches for clients, and its failure is none of theirs.
    let bounds = FetchBounds::SINGLE;
    let prefix = Prefix { rank: rank(workers.fetcher), blocks: 1, last: BlockHash(0) };
    let (sent, taken) = Default::default();
    let booking = FetchBooking::begin(&sent, &taken, prefix, bounds, 0);
    let booking = booking.ok_or(PeerFetchOutcome::Full)?;
    let leg_headers = LegHeaders::with_random_id();
    let asker = Asker { served, metrics, body: &body, memory: None, leg_headers };
    let deadline = Instant::now() + served.config.timeouts.peer_fetch;
    let steps = Steps::new(asker, &booking, workers, prefix, deadline.into());
    steps.compute(&ids).await?;
    steps.run(&ids).await
}

/// The rank that is tried, if the worker has several.
fn rank(worker: &Worker) -> Option<u16> {
    worker.ranks.are_chosen_by_the_router().then_some(0)
}
