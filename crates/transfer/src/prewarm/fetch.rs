//! One fetch of prewarming.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_kv::BlockHash;

use crate::peer_fetch::{Asker, PeerFetchOutcome, Steps, Workers};
use splitrail_api::JsonObject;
use splitrail_engine_client::LegHeaders;
use splitrail_fleet::{ServedModel, Worker};
use splitrail_policy::nanoseconds;
use splitrail_telemetry::Metrics;
use splitrail_workload::costs::RankScope;
use splitrail_workload::fetches::{FetchBooking, FetchBounds, Prefix};

/// What is fetched, from where, and to where.
pub(super) struct PrewarmFetch {
    /// The worker that holds the prefix.
    pub(super) source: Arc<Worker>,
    /// The rank that holds it, if the source has several.
    pub(super) source_rank: Option<u16>,
    /// The worker that is prewarmed.
    pub(super) fetcher: Arc<Worker>,
    /// The rank that takes it, if the worker has several.
    pub(super) rank: Option<u16>,
    /// The hashes of the blocks of the prefix.
    pub(super) hashes: Arc<[BlockHash]>,
    /// The number of tokens that the worker does not hold.
    pub(super) tokens: u64,
    /// The bounds that leave a place to fetches for requests.
    pub(super) bounds: FetchBounds,
}

/// Bytes of memory for each token of a prefix: its id, and its digits in the bodies of both requests.
const TOKEN_BYTES: usize = 32;

/// Counts how a fetch ends. One that is dropped before it has an outcome was cancelled.
struct OutcomeCount<'a> {
    served: &'a ServedModel,
    metrics: &'a Metrics,
    outcome: PeerFetchOutcome,
}

impl Drop for OutcomeCount<'_> {
    fn drop(&mut self) {
        let labels = [self.served.name(), self.outcome.name()];
        self.metrics.prewarm_fetches.with_label_values(&labels).inc();
    }
}

/// A fetch that has ended, and how long it took.
#[derive(Clone, Copy)]
pub(super) struct EndedFetch {
    pub(super) outcome: PeerFetchOutcome,
    pub(super) took: Duration,
}

/// Fetches a prefix, and counts it.
pub(super) async fn fetch(
    served: Arc<ServedModel>,
    metrics: Arc<Metrics>,
    plan: PrewarmFetch,
) -> PeerFetchOutcome {
    let mut counted =
        OutcomeCount { served: &served, metrics: &metrics, outcome: PeerFetchOutcome::Cancelled };
    counted.outcome = run(&served, &metrics, &plan).await.unwrap_or_else(|outcome| outcome);
    counted.outcome
}

async fn run(
    served: &Arc<ServedModel>,
    metrics: &Arc<Metrics>,
    plan: &PrewarmFetch,
) -> Result<PeerFetchOutcome, PeerFetchOutcome> {
    let PrewarmFetch { source, source_rank, fetcher, rank, hashes, tokens, bounds } = plan;
    let last = *hashes.last().ok_or(PeerFetchOutcome::Unusable)?;
    if !served.pool.holds(source, *source_rank, hashes) {
        return Err(PeerFetchOutcome::Gone);
    }
    // Requests come first: while they need the memory, there is no place.
    let bytes = (hashes.len() * served.pool.block_size() as usize).saturating_mul(TOKEN_BYTES);
    let memory = Arc::new(served.pool.hot.charge(bytes).ok_or(PeerFetchOutcome::Full)?);
    let known = served.pool.hot.tokens(hashes).ok_or(PeerFetchOutcome::Unusable)?;
    let costs = fetcher.load.costs.seen(Instant::now(), RankScope::Rank(None), 0).coefficients;
    let transfer_ns = nanoseconds(costs.fetch_link_seconds(*tokens));
    let prefix = Prefix { rank: *rank, blocks: hashes.len() as u32, last };
    let booking = FetchBooking::begin(
        &source.transfer.fetches,
        &fetcher.transfer.fetches,
        prefix,
        *bounds,
        transfer_ns,
    );
    let booking = booking.ok_or(PeerFetchOutcome::Full)?;
    let was_idle = booking.is_alone() && source.load.booked.prefill_tokens() == 0;
    let mut body = JsonObject::parse_str("{}").map_err(|_| PeerFetchOutcome::Unusable)?;
    body.set("model", known.model);
    // Any token does as the one after the prefix: its block is not full, so nothing is cached of it.
    let mut ids = known.ids;
    ids.push(*ids.first().ok_or(PeerFetchOutcome::Unusable)?);
    let (body, memory) = (&body, Some(&memory));
    let asker = Asker { served, metrics, body, memory, leg_headers: leg_headers() };
    let workers = Workers { source, source_rank: *source_rank, fetcher };
    let begun = Instant::now();
    let deadline = begun + served.config.timeouts.peer_fetch;
    let outcome = Steps::new(asker, &booking, workers, prefix, deadline.into()).run(&ids).await?;
    booking.arrived();
    if was_idle && booking.is_alone() && outcome == PeerFetchOutcome::Fetched {
        fetcher.load.costs.learn_fetch(Instant::now(), *tokens, begun.elapsed().as_secs_f64());
    }
    Ok(outcome)
}

fn leg_headers() -> LegHeaders {
    // Kept connections may lead to the worker's process before its restart.
    LegHeaders { fresh: true, ..LegHeaders::with_random_id() }
}
