//! Prewarming: a prefill worker that has joined or restarted takes over the prefixes that recent
//! prompts use most from the workers that hold them, by peer fetches of the router's own.
//!
//! It serves requests meanwhile: there is nothing to wait for, since every prefix that it has not
//! got yet is computed or fetched as without prewarming. Requests of clients go first. A worker with
//! a queue takes part in no fetch of prewarming, and such a fetch never takes the last place for
//! fetches of a worker. What is fetched is in no ledger, since no client has asked for it.
//!
//! Prompts with a cache salt, and so all prompts of tenants, are not remembered: nothing of them is
//! kept, or sent to a worker, beyond their own requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::context::PromptContext;
use super::peer_fetch::is_fetchable;
use splitrail_fleet::prewarm::RecentPrompt;
use splitrail_fleet::{Cluster, Served};

mod choose;
mod fetch;
mod joins;

use joins::Joins;

/// Interval at which workers are looked at while one is being prewarmed, and otherwise.
const TICKS: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(250)];
/// Pause after the token ids of a prompt were computed: at most 20 prompts per second are tokenised
/// a second time.
const LEARN_PAUSE: Duration = Duration::from_millis(50);
/// Pause before the task starts again after it has panicked.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// Remembers a prompt that a prefill worker has computed.
pub(super) fn remember(prompt: PromptContext<'_>) {
    let PromptContext { context, unit, .. } = prompt;
    let (served, endpoint) = (&context.served, context.endpoint);
    let pool = &served.pool;
    let Some(bounds) = pool.fetch_bounds().filter(|_| pool.hot.is_on()) else { return };
    let is_salted = !matches!(unit.body.raw("cache_salt"), None | Some("null"));
    let is_short = unit.prompt_tokens.is_none_or(|tokens| tokens < bounds.min_tokens);
    if is_salted || is_short || !is_fetchable(served, endpoint, unit, context.options) {
        return;
    }
    let Some(model) = unit.body.raw("model") else { return };
    let recent = RecentPrompt { model, hashes: &unit.hashes, block_size: pool.block_size() };
    let (memory, memory_max_bytes) = context.preparer.memory();
    if !pool.hot.record(recent, (memory, memory_max_bytes)) {
        return;
    }
    let learning = Learning(Arc::clone(served));
    let (preparer, unit) = (Arc::clone(&context.preparer), unit.clone());
    let learn = async move {
        let Learning(served) = &learning;
        if let Some(ids) = preparer.prompt_ids(served, endpoint, &unit).await {
            served.pool.hot.learn(&unit.hashes, &ids.ids, memory_max_bytes);
        }
        tokio::time::sleep(LEARN_PAUSE).await;
    };
    // If there are too many tasks, a later prompt with the same prefix is learned.
    served.releases.run(learn);
}

/// The token ids of a prompt are being computed. When it is dropped, those of the next one may be.
struct Learning(Arc<Served>);

impl Drop for Learning {
    fn drop(&mut self) {
        self.0.pool.hot.learning_ended();
    }
}

/// Prewarms the workers of all models, until the task is aborted.
pub async fn run(cluster: Arc<Cluster>) {
    loop {
        let mut running = JoinSet::new();
        running.spawn(follow(Arc::clone(&cluster)));
        match running.join_next().await {
            Some(Err(error)) if error.is_panic() => {
                tracing::error!("prewarming panicked and is restarted");
                tokio::time::sleep(RESTART_PAUSE).await;
            }
            _ => return,
        }
    }
}

async fn follow(cluster: Arc<Cluster>) {
    let mut models: HashMap<String, Joins> = HashMap::new();
    let fetched = Arc::new(Notify::new());
    loop {
        let serving = cluster.serving();
        let is_on = |served: &&Arc<Served>| served.pool.hot.is_on();
        models.retain(|name, joins| {
            let is_kept =
                serving.model(name).filter(is_on).is_some_and(|served| joins.is_of(served));
            if !is_kept {
                joins.stop(&cluster.metrics);
            }
            is_kept
        });
        let mut is_busy = false;
        for served in serving.models.iter().filter(is_on) {
            let joins = models.entry(served.name().to_owned());
            let joins = joins.or_insert_with(|| Joins::new(served, &fetched));
            is_busy |= joins.look(served, &cluster.metrics, Instant::now());
        }
        drop(serving);
        let [busy, idle] = TICKS;
        tokio::select! {
            () = tokio::time::sleep(if is_busy { busy } else { idle }) => {}
            () = fetched.notified() => {}
        }
    }
}
