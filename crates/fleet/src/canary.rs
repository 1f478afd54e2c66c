//! The parity canary: a known prompt for each worker, which shows whether router and engine make
//! the same tokens and KV blocks of a prompt.
//!
//! If they differ, no request fails, but lookups in the index miss or, worse, find blocks of other
//! prompts. So each worker is asked when it joins, when it comes back, and at an interval. Its
//! overlap is ignored before the first result and after a mismatch. The engine is asked for the
//! prompt's tokens and then serves the prompt once (one token), with its own `cache_salt`, so that
//! it shares no blocks with clients. The blocks must then appear in the index, whichever source
//! reports the events. A canary is not a client's request: it has no ledger entry, no decision
//! record and no booking, and it does not count for circuit breakers.

use std::sync::Arc;
use std::time::Duration;

use splitrail_engine::kv_events::OtherGroups;
use splitrail_kv::{BlockHash, Namespace, chain_hashes};
use tokio::sync::watch;
use tokio::time::Instant;

mod ask;
mod diagnose;
mod prompt;

use super::parity::{Cause, Parity, ParityState, UnclearReason};
use super::worker::Worker;
use crate::Cluster;
use crate::ServedModel;
use ask::Reply;
use diagnose::{CanaryBlocks, CanaryResult};
use prompt::Prompt;
use splitrail_api::text::random_id;
use splitrail_config::model::Flow;

/// Interval at which conditions are checked.
const GLANCE: Duration = Duration::from_millis(10);
/// Maximum time to wait for a worker's KV events before it is asked without them.
const EVENTS_PATIENCE: Duration = Duration::from_secs(10);
/// Initial time until a worker is asked again after an unclear result; doubles up to
/// `canary.interval`.
const AGAIN_MIN: Duration = Duration::from_secs(1);

/// Asks one worker repeatedly until the task is aborted.
pub(super) async fn run(cluster: Arc<Cluster>, served: Arc<ServedModel>, worker: Arc<Worker>) {
    let config = served.config.canary;
    let canary = Canary { cluster, served, worker: Arc::clone(&worker) };
    let mut standing = worker.kv.parity.follow();
    let mut pause = AGAIN_MIN;
    loop {
        let round = standing.borrow_and_update().round;
        let result = tokio::select! {
            () = another(&mut standing, round) => continue,
            result = canary.ask() => result,
        };
        canary.record(round, result);
        let again = match result {
            CanaryResult::Unclear(_) => {
                pause = (pause * 2).min(config.interval);
                pause
            }
            CanaryResult::Agree | CanaryResult::Differ(_) => {
                pause = AGAIN_MIN;
                config.interval
            }
        };
        tokio::select! {
            () = another(&mut standing, round) => pause = AGAIN_MIN,
            () = tokio::time::sleep(again) => {}
        }
    }
}

/// Waits until the worker may have been restarted.
async fn another(standing: &mut watch::Receiver<ParityState>, round: u64) {
    // The sender belongs to the worker, which this task keeps alive.
    let _changed = standing.wait_for(|state| state.round != round).await;
}

struct Canary {
    cluster: Arc<Cluster>,
    served: Arc<ServedModel>,
    worker: Arc<Worker>,
}

impl Canary {
    /// Asks once, as soon as the worker can answer.
    async fn ask(&self) -> CanaryResult {
        let Self { served, worker, .. } = self;
        served.pool.block_size_known().await;
        while !(worker.is_up() && worker.is_probed()) {
            tokio::time::sleep(GLANCE).await;
        }
        // A worker that has been probed was asked where it publishes, or its shim has said it.
        let expects_events = worker.tells_blocks();
        let has_events = expects_events && self.events_come().await;
        let prompt = match prompt::make(served, worker.engine.facts.context_tokens()).await {
            Ok(prompt) => prompt,
            Err(reason) => return CanaryResult::Unclear(reason),
        };
        let engine = match ask::tokens(served, worker, &prompt).await {
            Ok(tokens) => tokens,
            Err(reason) => return CanaryResult::Unclear(reason),
        };
        if let Some(cause) = diagnose::tokens(&prompt.tokens, &engine) {
            return CanaryResult::Differ(cause);
        }
        let compared = diagnose::is_compared(&prompt.tokens, &engine);
        // An engine never answers one leg of a pair alone.
        let alone = served.config.connector.serves_alone();
        if !alone && served.config.flow != Flow::Aggregated {
            return if compared {
                CanaryResult::Agree
            } else {
                CanaryResult::Unclear(UnclearReason::NotServedAlone)
            };
        }
        match self.serve(&prompt, None, has_events).await {
            CanaryResult::Agree if expects_events && !has_events => {
                CanaryResult::Unclear(UnclearReason::EventsCutOff)
            }
            CanaryResult::Agree => self.serve_adapter(&prompt, has_events).await,
            other => other,
        }
    }

    /// Waits for a limited time until the worker's events are being received. Returns whether they
    /// are.
    async fn events_come(&self) -> bool {
        let coming = async {
            while !self.events_are_current() {
                tokio::time::sleep(GLANCE).await;
            }
        };
        tokio::time::timeout(EVENTS_PATIENCE, coming).await.is_ok()
    }

    /// Whether events are being received: of the first rank if requests can be pinned, since it is
    /// the one asked; otherwise of all ranks.
    fn events_are_current(&self) -> bool {
        match self.worker.ranks.are_chosen_by_the_router() {
            true => self.worker.ranks.is_current(0),
            false => self.worker.events_are_current(),
        }
    }

    /// Repeats the test with the first adapter that the engine may have. One is enough to see how events name adapters.
    async fn serve_adapter(&self, prompt: &Prompt, has_events: bool) -> CanaryResult {
        let may_have = |name: &&String| self.worker.has_adapter(name) != Some(false);
        let adapter = self.served.config.adapters.iter().find(may_have);
        let Some(adapter) = adapter.filter(|_| has_events) else {
            return CanaryResult::Agree;
        };
        match self.serve(prompt, Some(adapter), has_events).await {
            // Adapters may be loaded later, or on other workers.
            CanaryResult::Unclear(_) => CanaryResult::Agree,
            other => other,
        }
    }

    /// Lets the engine serve the prompt once, and looks for its blocks in the index.
    async fn serve(
        &self,
        prompt: &Prompt,
        adapter: Option<&str>,
        has_events: bool,
    ) -> CanaryResult {
        let Self { served, worker, .. } = self;
        let salt = format!("splitrail-canary-{}", random_id());
        let before = worker.kv.event_stats.now();
        let reply = match ask::serve(served, worker, prompt, adapter, &salt).await {
            Ok(reply) => reply,
            Err(reason) => return CanaryResult::Unclear(reason),
        };
        let tokens = prompt.sent(reply.is_chat);
        if let Some(cause) = diagnose::count(reply.is_chat, tokens.len(), reply.prompt_tokens) {
            return CanaryResult::Differ(cause);
        }
        if !has_events {
            return CanaryResult::Agree;
        }
        let places = Places::new(self, prompt, tokens, adapter, &salt);
        let deadline = Instant::now() + served.config.canary.timeout;
        loop {
            let blocks = self.look(&places, &reply);
            let witnessed = worker.kv.event_stats.now().since(before);
            if blocks.is_settled() || Instant::now() >= deadline {
                return diagnose::blocks(&CanaryBlocks { witnessed, ..blocks });
            }
            if !self.events_are_current() {
                return CanaryResult::Unclear(UnclearReason::EventsCutOff);
            }
            tokio::time::sleep(GLANCE).await;
        }
    }

    fn look(&self, places: &Places, reply: &Reply) -> CanaryBlocks {
        let Self { served, worker, .. } = self;
        let held = |hashes: &Vec<BlockHash>| served.pool.indexed_blocks(worker, hashes);
        let is_held =
            |hashes: &Vec<BlockHash>| !hashes.is_empty() && held(hashes) as usize == hashes.len();
        let load = worker.load(std::time::Instant::now());
        CanaryBlocks {
            wanted: places.right.len() as u32,
            found: held(&places.right),
            unsalted: is_held(&places.unsalted),
            other_adapter: places.other_adapters.iter().any(is_held),
            other_special: places.other_special.iter().any(is_held),
            block_size: served.pool.block_size(),
            engine_block_size: load.and_then(|load| load.block_size),
            cached_tokens: reply.cached_tokens,
            is_truncated: worker.index_is_truncated(),
            lacks_full_attention: lacks_full_attention(worker),
            ..CanaryBlocks::default()
        }
    }

    /// Records, counts and logs a result.
    fn record(&self, round: u64, result: CanaryResult) {
        let (model, worker) = (self.served.name(), self.worker.id());
        let before = self.worker.kv.parity.parity();
        let parity = match result {
            CanaryResult::Agree => Parity::Ok,
            CanaryResult::Differ(cause) => Parity::Mismatch(cause),
            CanaryResult::Unclear(reason) => Parity::Unknown(Some(reason)),
        };
        let cause = parity.cause_name().unwrap_or("none");
        self.worker.kv.parity.record(round, parity);
        self.cluster.metrics.canaries.with_label_values(&[model, parity.name(), cause]).inc();
        match parity {
            Parity::Mismatch(_) => tracing::error!(
                model,
                worker,
                cause,
                advice = parity.advice(),
                "the worker does not agree with the router on prompts and KV blocks: it is \
                 served by load, without KV routing"
            ),
            _ if parity == before => {}
            // An unclear result does not replace an earlier clear one.
            Parity::Unknown(_) if before != Parity::Pending => {
                tracing::debug!(model, worker, cause, "the canary gave no clear result");
            }
            Parity::Unknown(_) => {
                let advice = parity.advice();
                tracing::warn!(model, worker, cause, advice, "the canary gave no clear result");
            }
            _ => tracing::info!(model, worker, "the worker agrees on prompts and KV blocks"),
        }
    }
}

/// Whether the events of a worker tell of cache groups, but of none that the index can follow a prompt
/// by.
fn lacks_full_attention(worker: &Worker) -> bool {
    let stats = &worker.kv.event_stats;
    let has_groups_only = !stats.followed_groups().is_empty() && stats.now().stored == 0;
    has_groups_only || stats.unfollowed_groups().includes(OtherGroups::named("no_full_attention"))
}

/// The prompt's block hashes, and those under which the blocks of a misbehaving engine would
/// appear.
struct Places {
    right: Vec<BlockHash>,
    unsalted: Vec<BlockHash>,
    other_adapters: Vec<Vec<BlockHash>>,
    other_special: Vec<Vec<BlockHash>>,
}

impl Places {
    fn new(
        canary: &Canary,
        prompt: &Prompt,
        tokens: &[u32],
        adapter: Option<&str>,
        salt: &str,
    ) -> Self {
        let Canary { cluster, served, .. } = canary;
        let hashes = |salt: Option<&str>, adapter: Option<&str>, tokens: &[u32]| {
            let block_size = served.pool.block_size();
            let namespace = Namespace { salt, model: served.name(), adapter, block_size };
            let mut hashes = Vec::new();
            chain_hashes(&namespace, cluster.hash_seed, tokens, &mut hashes);
            hashes
        };
        let salted = Some(salt);
        let adapters = served.config.adapters.iter().map(|name| Some(name.as_str()));
        let others = adapters.chain([None]).filter(|other| *other != adapter);
        Self {
            right: hashes(salted, adapter, tokens),
            unsalted: hashes(None, adapter, tokens),
            other_adapters: others.map(|other| hashes(salted, other, tokens)).collect(),
            other_special: prompt
                .otherwise(tokens)
                .iter()
                .map(|tokens| hashes(salted, adapter, tokens))
                .collect(),
        }
    }
}
