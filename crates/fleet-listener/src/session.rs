//! The session of one attached worker, over all streams of its shim: a task that ends when the
//! worker leaves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_engine::load::EngineLoad;
use splitrail_kv::{AppliedBlocks, HASH_LAYOUT};
use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_proto::v1::attach_response::Message as RouterMessage;
use tonic::{Code, Status};

use super::blocks::{Fault, ShimBlocks};
use super::context::AttachContext;
use super::hello::{self, CheckedHello};
use super::registry::{PendingStream, SessionGuard};
use super::stream::ShimStream;
use splitrail_fleet::indexing::{IndexPart, OVER_LIMIT};
use splitrail_fleet::resync::ResyncRequests;
use splitrail_fleet::shim_report::OtherLoad;
use splitrail_fleet::worker::UnreadyCause;

/// The session of one worker.
pub(super) struct Session {
    context: Arc<AttachContext>,
    guard: SessionGuard,
    attached: Option<AttachedWorker>,
}

/// The worker, and the state of its blocks.
struct AttachedWorker {
    blocks: ShimBlocks,
    indexing: IndexPart,
    /// The engine's block size in tokens, if it is another than the model's: its blocks are then not
    /// indexed.
    other_block_size: Option<u32>,
    /// Requests to build the worker's part of the index again.
    resync_requests: ResyncRequests,
}

/// What follows a stream.
enum NextStep {
    /// A newer stream of the same shim.
    NewStream(Box<PendingStream>),
    /// The stream broke off; the shim may reconnect.
    Silence,
    /// The worker leaves.
    Nothing,
}

/// The next event for a session.
enum SessionEvent {
    Received(Box<Result<Option<Option<Message>>, Status>>),
    Ended(NextStep),
    /// The fleet has replaced the worker by a new one with the same id.
    Replaced,
    /// A new snapshot was requested, for this reason.
    ResyncRequested(&'static str),
    /// An acknowledgement or a snapshot request may be due.
    Due,
}

impl Session {
    pub(super) fn new(context: Arc<AttachContext>, guard: SessionGuard) -> Self {
        Self { context, guard, attached: None }
    }

    /// Serves the shim's streams until the worker leaves.
    pub(super) async fn run(mut self, first: Box<PendingStream>) {
        let mut next = Some(first);
        while let Some(pending) = next.take() {
            let live = self.guard.live(&self.context.cluster.metrics);
            let mut after = self.serve(*pending).await;
            while let NextStep::NewStream(newer) = after {
                after = self.serve(*newer).await;
            }
            // Before another shim can find that no stream is open.
            if let NextStep::Silence = after {
                self.guard.keep(self.context.config.rejoin_grace);
            }
            drop(live);
            if let NextStep::Silence = after {
                next = self.wait().await;
            }
        }
    }

    /// Waits for the shim to reconnect. The worker's blocks stay in the index, but are not used.
    async fn wait(&mut self) -> Option<Box<PendingStream>> {
        if let Some(AttachedWorker { blocks, indexing, .. }) = &mut self.attached {
            indexing.worker.set_events_current(false);
            if !blocks.is_complete() {
                blocks.distrust();
            }
            let (model, worker) = (indexing.worker.model(), indexing.worker.id());
            let grace = self.context.config.rejoin_grace;
            tracing::warn!(
                model,
                worker,
                ?grace,
                "a shim's stream has ended; waiting for it to attach again"
            );
        }
        tokio::select! {
            biased;
            () = self.context.stop.cancelled() => None,
            () = self.guard.evicted.cancelled() => None,
            pending = self.guard.streams.recv() => pending,
            () = tokio::time::sleep(self.context.config.rejoin_grace) => None,
        }
    }

    async fn serve(&mut self, pending: PendingStream) -> NextStep {
        let (mut hello, mut stream) = ShimStream::new(pending, Instant::now());
        if let Err(status) =
            self.claim_worker(&hello).and_then(|()| self.send_welcome(&hello, &mut stream))
        {
            self.context.count(status.code());
            stream.end(status);
            return NextStep::Nothing;
        }
        self.context.count_attached(!stream.resync.is_open());
        loop {
            let due = stream.send_due(Instant::now());
            if let Some((reason, attached)) = due.zip(self.attached.as_mut()) {
                attached.indexing.count_resync(reason);
            }
            let received = match self.next_event(&mut stream).await {
                SessionEvent::Received(received) => *received,
                SessionEvent::Ended(after) => return after,
                SessionEvent::Due => continue,
                SessionEvent::ResyncRequested(reason) => {
                    if let Some(attached) = &mut self.attached {
                        attached.blocks.distrust();
                        attached.indexing.worker.set_events_current(false);
                    }
                    stream.resync.need(reason);
                    continue;
                }
                SessionEvent::Replaced => {
                    if let Some(capabilities) = self.capabilities() {
                        hello.capabilities = capabilities;
                    }
                    match self.claim_worker(&hello) {
                        Ok(()) => {
                            stream.resync.need("worker_replaced");
                            continue;
                        }
                        Err(status) => Err(status),
                    }
                }
            };
            let result = match received {
                Ok(Some(message)) => self.handle(message, &mut stream).await,
                Ok(None) if stream.is_leaving => return NextStep::Nothing,
                Ok(None) => return NextStep::Silence,
                Err(status) => {
                    stream.end(status);
                    return if stream.is_leaving { NextStep::Nothing } else { NextStep::Silence };
                }
            };
            if let Err(status) = result {
                tracing::warn!(
                    model = hello.served.name(),
                    worker = hello.config.id,
                    code = ?status.code(),
                    why = status.message(),
                    "a shim's stream is closed because of an error"
                );
                // The engine has another block size: its shim attaches again at once.
                let comes_back = status.code() == Code::Unavailable;
                stream.end(status);
                return if comes_back { NextStep::Silence } else { NextStep::Nothing };
            }
        }
    }

    async fn next_event(&mut self, stream: &mut ShimStream) -> SessionEvent {
        let gone = self.attached.as_ref().map(|attached| attached.indexing.worker.gone.clone());
        let gone = gone.unwrap_or_default();
        let due = stream.resync.due().map(tokio::time::Instant::from_std);
        let resync_due = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let pool = self.attached.as_ref().map(|attached| Arc::clone(&attached.indexing.pool));
        let model_block_size = stream.model_block_size;
        let block_size_changed = async {
            match pool {
                Some(pool) => pool.block_size_changed(model_block_size).await,
                None => std::future::pending().await,
            }
        };
        let outbound = stream.outbound.clone();
        let ack_due = tokio::time::Instant::from_std(stream.ack_due());
        let ack_room = async {
            tokio::time::sleep_until(ack_due).await;
            outbound.reserve().await
        };
        let resync_requested = async {
            match &mut self.attached {
                Some(attached) => attached.resync_requests.next().await.reason,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.context.stop.cancelled() => {
                stream.end(Status::unavailable("the router stops"));
                SessionEvent::Ended(NextStep::Nothing)
            }
            () = self.guard.evicted.cancelled() => {
                stream.end(Status::aborted("another shim speaks for this worker"));
                SessionEvent::Ended(NextStep::Nothing)
            }
            pending = self.guard.streams.recv() => {
                stream.end(Status::aborted("a newer stream takes the place of this one"));
                SessionEvent::Ended(pending.map_or(NextStep::Nothing, NextStep::NewStream))
            }
            () = gone.cancelled() => SessionEvent::Replaced,
            () = block_size_changed => {
                stream.end(Status::unavailable("the model's block size has changed; attach again"));
                SessionEvent::Ended(NextStep::Silence)
            }
            received = stream.inbound.next() => SessionEvent::Received(Box::new(received)),
            room = ack_room, if stream.unacked.is_some() => {
                let sequence = stream.unacked.unwrap_or_default();
                let message = Some(RouterMessage::Ack(v1::Ack { sequence }));
                if let Ok(room) = room {
                    room.send(Ok(v1::AttachResponse { message }));
                }
                stream.mark_acked();
                SessionEvent::Due
            }
            reason = resync_requested => SessionEvent::ResyncRequested(reason),
            () = resync_due => SessionEvent::Due,
            () = outbound.closed() => SessionEvent::Ended(NextStep::Silence),
        }
    }

    /// What the shim has reported last of the engine's capabilities, in its hello or since.
    fn capabilities(&self) -> Option<v1::Capabilities> {
        let reported = self.attached.as_ref()?.indexing.worker.shim_report.capabilities()?;
        Some(Arc::unwrap_or_clone(reported))
    }

    /// Adds the worker to the fleet, or confirms that it is there.
    fn claim_worker(&mut self, hello: &CheckedHello) -> Result<(), Status> {
        let worker = hello::claim(&self.context.fleet, hello)?;
        let serving = self.context.cluster.serving();
        let name = hello.served.name();
        let served = serving
            .model(name)
            .ok_or_else(|| Status::not_found("this model is no longer served"))?;
        let is_same = |attached: &AttachedWorker| Arc::ptr_eq(&attached.indexing.worker, &worker);
        if !self.attached.as_ref().is_some_and(is_same) {
            // Whether the shim leaves may have changed after the worker was replaced.
            match self.attached.as_ref().map(|before| &before.indexing.worker) {
                Some(before) if before.is_drained_for_shim() => {
                    worker.drain_for_shim("its shim leaves")
                }
                Some(_) => worker.rejoin("its shim is attached"),
                None => {}
            }
            worker.set_unsynced();
            let blocks = ShimBlocks::new(Arc::clone(&served.pool), Arc::clone(&worker));
            let cluster = Arc::clone(&self.context.cluster);
            let resync_requests = worker.kv.resync.requests();
            let indexing =
                IndexPart::new(cluster, name.into(), Arc::clone(&served.pool), worker, None);
            self.attached =
                Some(AttachedWorker { blocks, indexing, other_block_size: None, resync_requests });
        }
        self.set_capabilities(hello.capabilities.clone())
    }

    /// Sends the welcome, with the number of the last change that the index has.
    fn send_welcome(
        &mut self,
        hello: &CheckedHello,
        stream: &mut ShimStream,
    ) -> Result<(), Status> {
        let Some(AttachedWorker { blocks, indexing, other_block_size, .. }) = &mut self.attached
        else {
            return Err(Status::internal("the worker is not attached"));
        };
        // The shim may have left in an earlier session.
        indexing.worker.rejoin("its shim has attached again");
        let model_block_size = indexing.pool.block_size();
        if model_block_size == 0 {
            return Err(Status::unavailable("the model's block size is not known yet"));
        }
        // A shim attaches to no router that hashes blocks of another size than its engine's.
        let block_size = other_block_size.unwrap_or(model_block_size);
        (stream.block_size, stream.model_block_size) = (block_size, model_block_size);
        let known_sequence = blocks.known(&hello.mirror_id);
        if known_sequence.is_none() {
            // Another mirror may belong to another engine process.
            indexing.worker.becomes_another();
            blocks.distrust();
            stream.resync.asked(Instant::now());
        }
        let interval = self.context.config.load_interval.as_millis();
        let welcome = v1::Welcome {
            protocol: hello::PROTOCOL,
            router_id: self.context.router_id.clone(),
            hash_seed: self.context.cluster.hash_seed.0,
            hash_layout: HASH_LAYOUT,
            model: indexing.model().to_owned(),
            block_size,
            blocks_max: self.context.cluster.serving().limits.index_blocks_per_worker_max as u64,
            load_interval_ms: u32::try_from(interval).unwrap_or(u32::MAX),
            known_sequence,
        };
        stream.try_send(RouterMessage::Welcome(welcome));
        tracing::info!(
            model = indexing.model(),
            worker = indexing.worker.id(),
            url = hello.config.url,
            known_sequence,
            "a shim attaches"
        );
        Ok(())
    }

    async fn handle(
        &mut self,
        message: Option<Message>,
        stream: &mut ShimStream,
    ) -> Result<(), Status> {
        let Some(attached) = &mut self.attached else { return Ok(()) };
        match message {
            Some(Message::Load(load)) => {
                attached.load(&load, self.context.config.load_stale_after);
                // Changes from the time without a stream arrive before the second load report.
                stream.load_reports += 1;
                if stream.load_reports > 1
                    && !stream.resync.is_open()
                    && attached.blocks.is_complete()
                {
                    attached.mark_current();
                }
                Ok(())
            }
            Some(Message::Snapshot(_) | Message::Events(_))
                if attached.other_block_size.is_some() =>
            {
                stream.resync.answered();
                Ok(())
            }
            Some(Message::Snapshot(part)) => attached.snapshot(part, stream).await,
            Some(Message::Events(events)) => attached.events(&events, stream).await,
            Some(Message::Capabilities(capabilities)) => {
                hello::check(&capabilities)?;
                self.set_capabilities(capabilities)?;
                self.check_block_size(stream)
            }
            Some(Message::Bye(bye)) => {
                stream.is_leaving = true;
                let reason: String =
                    bye.reason.chars().take(64).flat_map(char::escape_debug).collect();
                let why = format!("its shim leaves: {reason}");
                attached.indexing.worker.drain_for_shim(why);
                Ok(())
            }
            Some(Message::Hello(_)) => Err(Status::invalid_argument("`hello` comes once")),
            // A message of a later protocol version.
            None => Ok(()),
        }
    }

    /// Checks that blocks are hashed with the size of which the stream's welcome says so.
    fn check_block_size(&self, stream: &ShimStream) -> Result<(), Status> {
        let Some(attached) = &self.attached else { return Ok(()) };
        let model_block_size = attached.indexing.pool.block_size();
        match attached.other_block_size.unwrap_or(model_block_size) == stream.block_size {
            true => Ok(()),
            false => Err(Status::unavailable("the engine has another block size; attach again")),
        }
    }

    /// Applies the engine's capabilities as the shim reports them.
    fn set_capabilities(&mut self, capabilities: v1::Capabilities) -> Result<(), Status> {
        let Some(attached) = &mut self.attached else { return Ok(()) };
        attached.set_block_size(capabilities.block_size)?;
        let worker = &attached.indexing.worker;
        if let Some(tokens) = capabilities.context_tokens {
            worker.engine.facts.set_context_tokens(tokens);
        }
        worker.set_supports_cache_hit_threshold(capabilities.supports_cache_hit_threshold);
        worker.ranks.set_count(capabilities.ranks.unwrap_or(1));
        worker.ranks.set_takes_rank_header(capabilities.takes_rank_header);
        if capabilities.publishes_kv_events == Some(false) {
            worker.set_synced();
        }
        attached.indexing.add_named_groups(&capabilities.unfollowed_cache_groups);
        worker.shim_report.set_capabilities(capabilities);
        Ok(())
    }
}

impl AttachedWorker {
    /// Records the engine's block size. If the model's is that of its engines, a worker with another
    /// one serves without the index: it need not be the one that is wrong.
    ///
    /// # Errors
    /// The configuration says another block size.
    fn set_block_size(&mut self, reported: Option<u32>) -> Result<(), Status> {
        let IndexPart { pool, worker, .. } = &self.indexing;
        let other = reported.filter(|tokens| !pool.learn_block_size(worker, *tokens));
        let before = std::mem::replace(&mut self.other_block_size, other);
        let Some(engine) = other else { return Ok(()) };
        let block_size = pool.block_size();
        if !pool.learns_block_size() {
            let message =
                format!("the engine's block size is {engine}, the model's is {block_size}");
            return Err(Status::failed_precondition(message));
        }
        if before != other {
            tracing::error!(
                model = worker.model(),
                worker = worker.id(),
                block_size,
                engine,
                "the engine's block size differs from the model's: its blocks are not indexed; give \
                 all engines one block size"
            );
            pool.index().remove_worker(worker.index.0);
            pool.speculative_index.forget(worker.index);
        }
        worker.set_events_current(false);
        worker.set_synced();
        self.blocks.distrust();
        Ok(())
    }

    /// Marks the worker's blocks in the index as current.
    fn mark_current(&self) {
        if self.other_block_size.is_some() {
            return;
        }
        let worker = &self.indexing.worker;
        if !worker.shim_report.publishes() {
            worker.set_synced();
        } else if !worker.events_are_current() {
            self.indexing.mark_complete();
        }
    }

    async fn snapshot(
        &mut self,
        part: v1::SnapshotPart,
        stream: &mut ShimStream,
    ) -> Result<(), Status> {
        stream.resync.answered();
        if !self.blocks.is_restoring() {
            self.indexing.worker.set_events_current(false);
            self.indexing.begin_whole();
            self.indexing.pool.speculative_index.forget(self.indexing.worker.index);
        }
        let mut sum = AppliedBlocks::default();
        let taken = self.blocks.snapshot(part, &mut sum).await;
        self.indexing.note(0, sum);
        match taken {
            Ok(None) => Ok(()),
            Ok(Some(sequence)) => {
                stream.note_applied(sequence);
                self.mark_current();
                if self.indexing.may_log("synced") {
                    let (worker, blocks) = (&self.indexing.worker, self.indexing.blocks());
                    let (model, worker) = (worker.model(), worker.id());
                    tracing::info!(model, worker, blocks, "the index is synchronised");
                }
                Ok(())
            }
            Err(fault) => self.handle_fault(fault, stream),
        }
    }

    async fn events(&mut self, events: &v1::Events, stream: &mut ShimStream) -> Result<(), Status> {
        if stream.resync.is_open() {
            return Ok(());
        }
        let made_s = Some(events.engine_time_s).filter(|made_s| *made_s != 0.0);
        self.indexing.observe(events.changes.len(), made_s);
        let mut sum = AppliedBlocks::default();
        let taken = self.blocks.events(events, &mut sum).await;
        self.indexing.note(events.changes.len(), sum);
        match taken {
            Ok(sequence) => {
                stream.note_applied(sequence);
                self.mark_current();
                if self.indexing.has_room_again(Instant::now()) {
                    stream.resync.need(OVER_LIMIT);
                    self.indexing.wait_longer();
                }
                Ok(())
            }
            Err(fault) => self.handle_fault(fault, stream),
        }
    }

    fn handle_fault(&mut self, fault: Fault, stream: &mut ShimStream) -> Result<(), Status> {
        self.blocks.distrust();
        self.indexing.worker.set_events_current(false);
        match fault {
            Fault::Gap(missed) => {
                self.indexing.gap(missed);
                stream.resync.need("gap");
            }
            Fault::Invalid(why) => {
                self.indexing.garbage(&why);
                stream.resync.need("nonsense");
                if stream.count_invalid() {
                    return Err(Status::invalid_argument(why));
                }
            }
        }
        Ok(())
    }

    fn load(&self, load: &v1::Load, stale: Duration) {
        let IndexPart { pool, worker, .. } = &self.indexing;
        let now = Instant::now();
        let others = OtherLoad::beyond(load, &worker.load.booked, pool.block_size());
        worker.shim_report.set_others(now, stale, others);
        let age = Duration::from_millis(load.age_ms.into());
        let ratio = load.kv_used_ratio.filter(|ratio| (0.0..=1.0).contains(ratio));
        let figures = EngineLoad {
            running: load.running,
            waiting: load.waiting,
            kv_used_ratio: ratio,
            total_blocks: load.kv_blocks,
            started_at_s: load.started_at_s,
            tokens_total: load.tokens_total,
            ..EngineLoad::default()
        };
        if let Some(asleep) = load.asleep {
            worker.set_unready(UnreadyCause::Asleep, asleep);
        }
        worker.set_load(now.checked_sub(age).unwrap_or(now), figures);
        if load.started_at_s.is_some_and(|started| worker.health.presence.reports_start(started)) {
            worker.record_restart();
        }
        if !load.up {
            // While the engine is down, its cache contents are unknown.
            pool.speculative_index.forget(worker.index);
        } else if let Some(capabilities) = worker.shim_report.capabilities() {
            // These were reset while the engine was down.
            if worker.supports_cache_hit_threshold().is_none() {
                worker.set_supports_cache_hit_threshold(capabilities.supports_cache_hit_threshold);
            }
            if worker.ranks.takes_rank_header().is_none() {
                worker.ranks.set_takes_rank_header(capabilities.takes_rank_header);
            }
            if worker.engine.facts.block_size().is_none() {
                worker.engine.facts.set_block_size(capabilities.block_size);
            }
        }
        worker.set_probed(load.up, "its shim reported it");
    }
}
