//! Applies one worker's KV events to the index, separately for each data-parallel rank: each rank
//! numbers its events on its own, and a gap in one says nothing about the others.

use std::sync::Arc;
use std::time::Instant;

use splitrail_engine::identity::{EventSource, of_all_ranks};
use splitrail_engine::kv_events::EventBatch;
use splitrail_engine::kv_events::{ResetReason, Subscription, SyncOutcome, Update};
use splitrail_engine::zmtp::AddressFilter;
use splitrail_kv::{AppliedBlocks, EngineHash, KvEvent};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::engine_facts::Publication;
use super::follow::supervise;
use super::indexing::{IndexPart, OVER_LIMIT};
use super::pool::Pool;
use super::ranks::rank_key;
use super::resync::ResyncRequest;
use super::worker::Worker;
use crate::Cluster;
use splitrail_engine_client::networks::literal;

/// Maximum number of batches between the subscription and the index. A full queue stops reading, so
/// that batches wait in the kernel's buffers and finally in the engine.
const QUEUE_BATCHES: usize = 256;

/// Maximum number of blocks that are applied before the lock of the index is released, so that
/// other writers and requests get their turn.
const BLOCKS_PER_LOCK: usize = 4096;

/// The task that follows one rank.
struct FollowerTask {
    tasks: JoinSet<()>,
    /// Whether a publisher was found at the rank's address.
    connected: watch::Receiver<bool>,
}

/// Follows a worker until the task is aborted: at the addresses that are written down, or that the
/// engine says. An engine that says others is followed there.
pub(super) async fn run(
    cluster: Arc<Cluster>,
    model: Arc<str>,
    pool: Arc<Pool>,
    worker: Arc<Worker>,
) {
    pool.block_size_known().await;
    let mut publications = worker.engine.facts.follow_publication();
    let mut ranks = Vec::new();
    loop {
        let known = publications.borrow_and_update().clone();
        let following = async {
            match known {
                Publication::At(sources) => {
                    follow_ranks(&cluster, &model, &pool, &worker, &sources, &mut ranks).await
                }
                Publication::Unknown | Publication::Nowhere => std::future::pending().await,
            }
        };
        tokio::select! {
            () = following => return,
            // The sender belongs to the worker, which this task keeps alive.
            changed = publications.changed() => if changed.is_err() {
                return;
            },
        }
        // What was followed is of no use any more. The tasks have ended before the next ones begin:
        // what they say of the worker would be taken for news.
        for mut gone in ranks.drain(..) {
            gone.tasks.shutdown().await;
        }
        worker.set_events_current(false);
        for rank in 0..worker.ranks.count() {
            pool.index().clear_worker(rank_key(worker.index, rank));
        }
    }
}

/// Follows all ranks of a worker whose ranks publish at `listed`. The number of ranks comes from the
/// engine. A rank is only connected to after a publisher was found at the port of the rank before
/// it, so that an engine cannot make the router scan the ports of a host. The tasks are in `following`.
async fn follow_ranks(
    cluster: &Arc<Cluster>,
    model: &Arc<str>,
    pool: &Arc<Pool>,
    worker: &Arc<Worker>,
    listed: &[EventSource],
    following: &mut Vec<FollowerTask>,
) {
    let mut counts = worker.ranks.follow();
    loop {
        // The sender belongs to the worker, which this task keeps alive.
        let Ok(count) = counts.wait_for(Option::is_some).await.map(|count| count.unwrap_or(1))
        else {
            return;
        };
        let kept = following.len().min(count.into());
        for (rank, mut gone) in (count..).zip(following.drain(kept..)) {
            gone.tasks.shutdown().await;
            pool.index().clear_worker(rank_key(worker.index, rank));
        }
        let sources = of_all_ranks(listed, count.into());
        let reachable = sources.len();
        if reachable < usize::from(count) && following.is_empty() {
            let (model, worker, ranks) = (worker.model(), worker.id(), count);
            tracing::error!(
                model,
                worker,
                ranks,
                "the ports after kv_events do not suffice for all ranks"
            );
        }
        let is_confirmed = |last: &FollowerTask| *last.connected.borrow();
        if following.last().is_none_or(is_confirmed)
            && let Some(source) = sources.into_iter().nth(following.len())
        {
            let (cluster, model, pool) = (Arc::clone(cluster), Arc::clone(model), Arc::clone(pool));
            let (followed, (sender, connected)) = (Arc::clone(worker), watch::channel(false));
            let admits = admits(&cluster, worker, &source);
            let task = move || {
                let (cluster, model, pool) = (cluster.clone(), model.clone(), pool.clone());
                let part =
                    IndexPart::new(cluster, model, pool, followed.clone(), Some(source.rank));
                follow(part, source.clone(), admits.clone(), sender.clone())
            };
            let mut tasks = JoinSet::new();
            tasks.spawn(supervise("KV events", worker, task));
            following.push(FollowerTask { tasks, connected });
        }
        let is_short = following.len() < reachable;
        let next_may_begin = async {
            match following.last_mut() {
                Some(last) if !is_confirmed(last) => {
                    // The sender belongs to the task, which is kept in `following`.
                    let _connected = last.connected.wait_for(|connected| *connected).await;
                }
                Some(_) if is_short => {}
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = counts.changed() => if changed.is_err() {
                return;
            },
            () = next_may_begin => {}
        }
    }
}

/// Restricts the addresses of a worker's publisher if it is not listed in the configuration, and
/// neither is the host, if the engine says where it publishes. Host names are resolved at each
/// connection.
fn admits(cluster: &Cluster, worker: &Worker, source: &EventSource) -> Option<AddressFilter> {
    let networks = cluster.networks.clone();
    // The host of a listed worker is allowed too, if it is an IP address.
    let own = literal(worker.address.authority.host()).filter(|_| !worker.address.guarded);
    is_guarded(worker, source)
        .then(|| AddressFilter::new(move |ip| networks.admit(ip) || own == Some(ip)))
}

fn is_guarded(worker: &Worker, source: &EventSource) -> bool {
    let host = worker.address.authority.host();
    let mut endpoints = [Some(&source.events), source.replay.as_ref()].into_iter().flatten();
    match worker.engine.facts.asks_for_events() {
        // An engine must not make the router connect to other hosts.
        true => worker.address.guarded || endpoints.any(|endpoint| endpoint.host() != host),
        false => worker.address.guards_events,
    }
}

/// Follows one rank until the task is aborted.
async fn follow(
    part: IndexPart,
    source: EventSource,
    admits: Option<AddressFilter>,
    connected: watch::Sender<bool>,
) {
    let mut intake = Intake { part, source, speaks: None, oldest_batch: None, is_replayed: true };
    loop {
        let (sink, mut updates) = mpsc::channel(QUEUE_BATCHES);
        let EventSource { events, replay, .. } = intake.source.clone();
        let mut subscription = Subscription {
            admits: admits.clone(),
            connected: Some(connected.clone()),
            ..Subscription::new(events, replay)
        };
        if let Some(tokens) = intake.part.pool.attention_chunk_tokens() {
            subscription.limits.attention_chunk_tokens = tokens;
        }
        let replays = subscription.clone();
        let following = subscription.run(sink, CancellationToken::new());
        // Requests to resynchronise that were made earlier are fulfilled by starting here.
        let mut requests = intake.part.worker.kv.resync.requests();
        // What the index held before may be outdated.
        intake.part.forget();
        intake.oldest_batch = None;
        intake.is_replayed = true;
        let applying = async {
            loop {
                tokio::select! {
                    update = updates.recv() => match update {
                        Some(update) => intake.take(update).await,
                        None => std::future::pending().await,
                    },
                    request = requests.next() => if intake.should_begin_anew(&replays, request).await {
                        return request.reason;
                    },
                }
                if intake.part.has_room_again(Instant::now()) {
                    let request = ResyncRequest { reason: OVER_LIMIT, is_last_resort: false };
                    if intake.should_begin_anew(&replays, request).await {
                        return OVER_LIMIT;
                    }
                    intake.part.wait_longer();
                }
            }
        };
        // Both futures run in this task, so that aborting it ends both.
        tokio::select! {
            () = following => return,
            reason = applying => {
                intake.begin_anew(reason);
                if reason == OVER_LIMIT {
                    intake.part.wait_longer();
                }
            }
        }
    }
}

struct Intake {
    part: IndexPart,
    source: EventSource,
    /// The rank that the stream's batches name, if any. A stream belongs to one rank, but an engine
    /// that is one of many ranks with addresses of their own may use any number.
    speaks: Option<u16>,
    /// The number of the first batch that the index was built from.
    oldest_batch: Option<u64>,
    /// Whether what arrives may be a replay: since the start or an interruption, until all has been
    /// caught up with. After a reset on the same connection nothing says that it has.
    is_replayed: bool,
}

impl Intake {
    async fn take(&mut self, update: Update) {
        match update {
            Update::Batch { sequence, batch } => {
                self.oldest_batch.get_or_insert(sequence);
                self.apply(&batch).await;
            }
            Update::Reset { reason } => self.reset(reason),
            Update::Synced { outcome } => self.synced(outcome),
            Update::Gap { expected, sequence } => self.part.gap(sequence - expected),
            Update::Garbage { error, .. } => self.part.garbage(&error),
            // Only needed by readers that do not read the stream continuously.
            Update::Fresh { .. } => {}
            Update::Disconnected { error } => {
                let worker = Arc::clone(&self.part.worker);
                self.is_replayed = true;
                self.part.set_current(false);
                // A worker that comes back may run another version of the engine.
                worker.kv.parity.forget();
                if self.part.may_log("disconnected") {
                    let (rank, endpoint) = (self.source.rank, &self.source.events);
                    tracing::warn!(
                        model = worker.model(),
                        worker = worker.id(),
                        rank,
                        %endpoint,
                        %error,
                        "KV events are disconnected: the worker's overlap is ignored until they return"
                    );
                }
            }
        }
    }

    fn synced(&mut self, outcome: SyncOutcome) {
        self.is_replayed = false;
        self.part.mark_complete();
        if !self.part.may_log("synced") {
            return;
        }
        let blocks = self.part.blocks();
        let (model, worker) = (self.part.worker.model(), self.part.worker.id());
        match outcome {
            SyncOutcome::Replayed => match self.oldest_batch {
                Some(oldest_batch) if oldest_batch > 0 => tracing::info!(
                    model,
                    worker,
                    blocks,
                    oldest_batch,
                    "the index is synchronised, but for blocks that were stored before the oldest \
                     batch of the engine's replay"
                ),
                _ => tracing::info!(model, worker, blocks, "the index is synchronised"),
            },
            SyncOutcome::ReplayFailed => tracing::warn!(
                model,
                worker,
                blocks,
                "the replay of KV events failed and is repeated: until then, the index has only \
                 blocks that are stored from now on"
            ),
            SyncOutcome::NoReplay => tracing::warn!(
                model,
                worker,
                blocks,
                "no replay: the index has only blocks that are stored from now on"
            ),
        }
    }

    async fn apply(&mut self, batch: &EventBatch) {
        let made_s = (!self.is_replayed).then_some(batch.timestamp_s);
        self.part.observe(batch.events.len(), made_s);
        if let Some(rank) = batch.rank.filter(|rank| self.is_of_another_rank(*rank)) {
            // Requests that are pinned to this rank would not find these blocks.
            self.part.worker.kv.event_stats.of_other_rank(batch.events.len());
            self.part.count_rejected("rank", batch.events.len());
            if self.part.may_log("rank") {
                let (model, worker) = (self.part.worker.model(), self.part.worker.id());
                tracing::warn!(
                    model,
                    worker,
                    rank,
                    "events of another data-parallel rank are ignored"
                );
            }
            return;
        }
        self.part.skip(batch.skipped);
        if batch.events.iter().any(KvEvent::clears_device) {
            self.part.pool.speculative_index.forget(self.part.worker.index);
        }
        if batch.events.contains(&KvEvent::Cleared) && batch.skipped.replaced_by_clear == 0 {
            // Blocks of this batch that do not fit are counted below.
            self.part.nothing_is_left_out();
        }
        let sum = self.index_events(batch).await;
        self.part.note(batch.events.len(), sum);
    }

    fn is_of_another_rank(&mut self, says: u16) -> bool {
        let expected = match self.part.worker.ranks.count() {
            1 => *self.speaks.get_or_insert(says),
            _ => self.source.rank,
        };
        says != expected
    }

    /// Applies a batch to the index, whose lock is released after some blocks.
    async fn index_events(&self, batch: &EventBatch) -> AppliedBlocks {
        let (mut sum, mut rest) = (AppliedBlocks::default(), &batch.events[..]);
        while let [first, behind @ ..] = rest {
            if blocks_of(first) > BLOCKS_PER_LOCK {
                sum += self.index_long(first).await;
                rest = behind;
            } else {
                rest = self.index_some(rest, &mut sum);
            }
            if !rest.is_empty() {
                tokio::task::yield_now().await;
            }
        }
        sum
    }

    /// Applies events of up to about `BLOCKS_PER_LOCK` blocks together, and returns the rest.
    fn index_some<'e>(&self, mut events: &'e [KvEvent], sum: &mut AppliedBlocks) -> &'e [KvEvent] {
        let IndexPart { pool, worker, .. } = &self.part;
        let mut index = pool.index();
        if worker.gone.is_cancelled() {
            return &[];
        }
        let mut blocks = 0;
        while let [event, behind @ ..] = events
            && (blocks == 0 || blocks + blocks_of(event) <= BLOCKS_PER_LOCK)
        {
            // Events without blocks take time as well.
            blocks += blocks_of(event).max(1);
            *sum += index.apply(self.part.key(), event);
            events = behind;
        }
        events
    }

    /// Applies an event of many blocks in portions.
    async fn index_long(&self, event: &KvEvent) -> AppliedBlocks {
        let mut sum = AppliedBlocks::default();
        let mut left = blocks_of(event);
        for portion in portions(event) {
            left -= blocks_of(&portion);
            let mut applied = AppliedBlocks::default();
            self.index_some(&[portion], &mut applied);
            sum += applied;
            // The blocks after those that are not indexed have no parent in the index.
            if applied.malformed > 0 {
                sum.malformed += left;
                break;
            }
            if applied.over_limit > 0 {
                sum.over_limit += left;
                break;
            }
            if left > 0 {
                tokio::task::yield_now().await;
            }
        }
        sum
    }

    /// Whether all events are read again. An engine keeps a bounded number of batches (vLLM: 10,000 by
    /// default). Of blocks that it has stored earlier only the index knows, which is therefore kept.
    async fn should_begin_anew(&mut self, replays: &Subscription, request: ResyncRequest) -> bool {
        let ResyncRequest { reason, is_last_resort } = request;
        let oldest_batch = replays.oldest_batch().await;
        if is_last_resort || oldest_batch == Some(0) {
            return true;
        }
        if self.part.may_log("kept") {
            tracing::warn!(
                model = self.part.worker.model(),
                worker = self.part.worker.id(),
                reason,
                oldest_batch,
                "a replay would not show all of the engine's KV events: they are not read again, and \
                 the index is kept"
            );
        }
        false
    }

    /// Prepares to read all events again: blocks that the size limit left out may fit now, or a
    /// resynchronisation was requested.
    fn begin_anew(&mut self, reason: &'static str) {
        self.part.count_resync(reason);
        self.part.set_current(false);
        tracing::info!(
            model = self.part.worker.model(),
            worker = self.part.worker.id(),
            reason,
            "the worker's KV events are read again"
        );
    }

    fn reset(&mut self, reason: ResetReason) {
        // Unless only batches were lost, the engine's process may be another one.
        if !matches!(reason, ResetReason::Gap | ResetReason::Garbage) {
            self.part.worker.becomes_another();
        }
        self.speaks = None;
        self.oldest_batch = None;
        self.part.forget();
        self.part.count_resync(reason.name());
        if self.part.may_log("reset") {
            let (model, worker) = (self.part.worker.model(), self.part.worker.id());
            tracing::warn!(
                model,
                worker,
                reason = reason.name(),
                "the worker's part of the index is rebuilt"
            );
        }
    }
}

/// The number of blocks that an event names, or whose work it makes.
fn blocks_of(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { blocks, .. } => blocks.len(),
        KvEvent::Removed { hashes, .. }
        | KvEvent::Dropped { hashes }
        | KvEvent::GroupStored { hashes, .. }
        | KvEvent::GroupRemoved { hashes, .. } => hashes.len(),
        // Looks at all blocks of the worker.
        KvEvent::TierCleared { .. } => BLOCKS_PER_LOCK,
        KvEvent::Cleared => 0,
    }
}

/// Divides an event into events of at most `BLOCKS_PER_LOCK` blocks, which have the same effect.
fn portions(event: &KvEvent) -> Box<dyn Iterator<Item = KvEvent> + Send + '_> {
    match event {
        KvEvent::Stored { parent, blocks, adapter, salt, tier } => {
            let mut parent = *parent;
            Box::new(blocks.chunks(BLOCKS_PER_LOCK).map(move |blocks| {
                let last = blocks.last().map(|block| block.hash);
                let parent = std::mem::replace(&mut parent, last);
                let (adapter, salt) = (adapter.clone(), salt.clone());
                KvEvent::Stored { parent, blocks: blocks.to_vec(), adapter, salt, tier: *tier }
            }))
        }
        KvEvent::Removed { hashes, tier } => {
            let of =
                |hashes: &[EngineHash]| KvEvent::Removed { hashes: hashes.to_vec(), tier: *tier };
            Box::new(hashes.chunks(BLOCKS_PER_LOCK).map(of))
        }
        KvEvent::Dropped { hashes } => {
            let of = |hashes: &[EngineHash]| KvEvent::Dropped { hashes: hashes.to_vec() };
            Box::new(hashes.chunks(BLOCKS_PER_LOCK).map(of))
        }
        KvEvent::GroupRemoved { group, hashes } => {
            let of = |hashes: &[EngineHash]| KvEvent::GroupRemoved {
                group: *group,
                hashes: hashes.to_vec(),
            };
            Box::new(hashes.chunks(BLOCKS_PER_LOCK).map(of))
        }
        // Blocks of other groups are placed by the others of their event.
        KvEvent::GroupStored { .. } | KvEvent::TierCleared { .. } | KvEvent::Cleared => {
            Box::new(std::iter::once(event.clone()))
        }
    }
}

#[cfg(test)]
mod tests;
