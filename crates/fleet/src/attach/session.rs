//! The session of one attached worker, over all streams of its shim: a task that ends when the worker leaves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_engine::vllm::load::EngineLoad;
use splitrail_kv::{Applied, HASH_LAYOUT};
use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_proto::v1::attach_response::Message as Answer;
use tokio::sync::watch;
use tonic::Status;

use super::blocks::{Blocks, Fault};
use super::context::AttachContext;
use super::greet::{self, AttachRequest};
use super::inbound::Said;
use super::line::Line;
use super::registry::{PendingStream, SessionLease};
use crate::indexing::{Indexing, OVER_LIMIT};
use crate::resync::ResyncWishes;
use crate::shim_report::Others;

/// An attached worker.
pub(super) struct Session {
    context: Arc<AttachContext>,
    lease: SessionLease,
    known: Option<Known>,
    /// Whether there is a way for the shim to come back, where that can be away by itself.
    plane: Option<watch::Receiver<bool>>,
}

/// The worker, and what is known of its blocks.
struct Known {
    blocks: Blocks,
    indexing: Indexing,
    /// Its shim has said good-bye.
    is_leaving: bool,
    /// Hears that all should be told anew.
    wishes: ResyncWishes,
}

/// What comes after a stream.
enum After {
    /// Another one of the same shim, which takes its place.
    NewStream(Box<PendingStream>),
    /// It broke off: another one may come.
    Silence,
    /// Nothing: the worker leaves.
    Nothing,
}

/// What a stream has brought, or what else has happened.
enum Step {
    Said(Box<Result<Option<Said>, Status>>),
    After(After),
    /// The fleet has another worker in place of this one.
    Replaced,
    /// Somebody wants all of it told anew.
    Wished(&'static str),
    /// Something may be said.
    Due,
}

/// Waits for so long, not counting the time in which there is no way to come back.
async fn grace(grace: Duration, plane: Option<watch::Receiver<bool>>) {
    let Some(mut connected) = plane else { return tokio::time::sleep(grace).await };
    while connected.wait_for(|connected| *connected).await.is_ok() {
        let away = connected.wait_for(|connected| !*connected);
        if tokio::time::timeout(grace, away).await.is_err() {
            return;
        }
    }
}

impl Session {
    pub(super) fn new(context: Arc<AttachContext>, lease: SessionLease) -> Self {
        Self { context, lease, known: None, plane: None }
    }

    /// Serves its streams until it is gone for good.
    pub(super) async fn run(mut self, first: Box<PendingStream>) {
        let mut next = Some(first);
        while let Some(stream) = next.take() {
            let live = self.lease.live(&self.context.cluster.metrics);
            let mut after = self.serve(*stream).await;
            while let After::NewStream(newer) = after {
                after = self.serve(*newer).await;
            }
            drop(live);
            if let After::Silence = after {
                next = self.wait().await;
            }
        }
    }

    /// Waits whether the shim comes back. What is known of its worker stays, but is not
    /// believed.
    async fn wait(&mut self) -> Option<Box<PendingStream>> {
        if let Some(Known { blocks, indexing, .. }) = &mut self.known {
            indexing.worker.set_events_current(false);
            if !blocks.is_whole() {
                blocks.distrust();
            }
            let (worker, grace) = (indexing.worker.id(), self.context.config.rejoin_grace);
            tracing::warn!(worker, ?grace, "its shim is gone without a word");
        }
        tokio::select! {
            biased;
            () = self.context.stop.cancelled() => None,
            () = self.lease.evicted.cancelled() => None,
            stream = self.lease.streams.recv() => stream,
            () = grace(self.context.config.rejoin_grace, self.plane.clone()) => None,
        }
    }

    async fn serve(&mut self, stream: PendingStream) -> After {
        let (request, mut line) = Line::new(stream, Instant::now());
        self.plane = line.inbound.plane();
        if let Err(status) = self.enter(&request).and_then(|()| self.welcome(&request, &mut line)) {
            self.context.count(status.code());
            line.end(status);
            return After::Nothing;
        }
        self.context.count_attached(!line.resync.is_open());
        loop {
            if let Some((reason, known)) = line.say(Instant::now()).zip(self.known.as_ref()) {
                known.indexing.count_resync(reason);
            }
            let said = match self.step(&mut line).await {
                Step::Said(said) => *said,
                Step::After(after) => return after,
                Step::Due => continue,
                Step::Wished(reason) => {
                    if let Some(known) = &mut self.known {
                        known.blocks.distrust();
                        known.indexing.worker.set_events_current(false);
                    }
                    line.resync.need(reason);
                    continue;
                }
                Step::Replaced => match self.enter(&request) {
                    Ok(()) => {
                        line.resync.need("worker_replaced");
                        continue;
                    }
                    Err(status) => Err(status),
                },
            };
            let result = match said {
                Ok(Some(said)) => self.hear(said, &mut line).await,
                Ok(None) if line.is_leaving => return After::Nothing,
                Ok(None) => return After::Silence,
                Err(status) => {
                    line.end(status);
                    return if line.is_leaving { After::Nothing } else { After::Silence };
                }
            };
            if let Err(status) = result {
                tracing::warn!(worker = request.config.id, %status, "a shim is sent away");
                line.end(status);
                return After::Nothing;
            }
        }
    }

    async fn step(&mut self, line: &mut Line) -> Step {
        let gone = self.known.as_ref().map(|known| known.indexing.worker.gone.clone());
        let gone = gone.unwrap_or_default();
        let due = line.resync.due().map(tokio::time::Instant::from_std);
        let asked = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let outbound = line.outbound.clone();
        let ack_due = tokio::time::Instant::from_std(line.ack_due());
        let acking = async {
            tokio::time::sleep_until(ack_due).await;
            outbound.reserve().await
        };
        let wished = async {
            match &mut self.known {
                Some(known) => known.wishes.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.context.stop.cancelled() => {
                line.end(Status::unavailable("the router stops"));
                Step::After(After::Nothing)
            }
            () = self.lease.evicted.cancelled() => {
                line.end(Status::aborted("another shim speaks for this worker"));
                Step::After(After::Nothing)
            }
            stream = self.lease.streams.recv() => {
                line.end(Status::aborted("a newer stream takes the place of this one"));
                Step::After(stream.map_or(After::Nothing, After::NewStream))
            }
            () = gone.cancelled() => Step::Replaced,
            said = line.inbound.said() => Step::Said(Box::new(said)),
            room = acking, if line.unacked.is_some() => {
                let sequence = line.unacked.unwrap_or_default();
                let message = Some(Answer::Ack(v1::Ack { sequence }));
                if let Ok(room) = room {
                    room.send(Ok(v1::AttachResponse { message }));
                }
                line.acked();
                Step::Due
            }
            reason = wished => Step::Wished(reason),
            () = asked => Step::Due,
            () = outbound.closed() => Step::After(After::Silence),
        }
    }

    /// Lets the worker into the fleet, or finds that it is there.
    fn enter(&mut self, request: &AttachRequest) -> Result<(), Status> {
        let worker = greet::claim(&self.context.fleet, request)?;
        let serving = self.context.cluster.serving();
        let name = request.served.name();
        let served = serving.model(name).ok_or_else(|| Status::not_found("it left"))?;
        let is_same = |known: &Known| Arc::ptr_eq(&known.indexing.worker, &worker);
        if !self.known.as_ref().is_some_and(is_same) {
            worker.set_unsynced();
            let blocks = Blocks::new(Arc::clone(&served.pool), Arc::clone(&worker));
            let cluster = Arc::clone(&self.context.cluster);
            let wishes = worker.resync.wishes();
            let indexing =
                Indexing::new(cluster, name.into(), Arc::clone(&served.pool), worker, None);
            self.known = Some(Known { blocks, indexing, is_leaving: false, wishes });
        }
        self.learn(request.capabilities.clone())
    }

    /// Says what the shim needs to know, and what of its worker is known already.
    fn welcome(&mut self, request: &AttachRequest, line: &mut Line) -> Result<(), Status> {
        let Some(Known { blocks, indexing, is_leaving, .. }) = &mut self.known else {
            return Err(Status::internal("a worker that has just entered is not there"));
        };
        if std::mem::take(is_leaving) {
            indexing.worker.set_draining(false, "its shim is here again");
        }
        let block_size = indexing.pool.block_size();
        if block_size == 0 {
            return Err(Status::unavailable("the model's block size is not known yet"));
        }
        let known_sequence = blocks.known(&request.mirror_id);
        if known_sequence.is_none() {
            // Another mirror may be another engine's.
            indexing.worker.becomes_another();
            blocks.distrust();
            line.resync.asked(Instant::now());
        }
        let interval = self.context.config.load_interval.as_millis();
        let welcome = v1::Welcome {
            protocol: greet::PROTOCOL,
            router_id: self.context.router_id.clone(),
            hash_seed: self.context.cluster.hash_seed.0,
            hash_layout: HASH_LAYOUT,
            model: indexing.model().to_owned(),
            block_size,
            blocks_max: self.context.cluster.serving().limits.index_blocks_per_worker_max as u64,
            load_interval_ms: u32::try_from(interval).unwrap_or(u32::MAX),
            known_sequence,
        };
        line.tell(Answer::Welcome(welcome));
        tracing::info!(
            model = indexing.model(),
            worker = indexing.worker.id(),
            url = request.config.url,
            known_sequence,
            "a shim attaches"
        );
        Ok(())
    }

    async fn hear(&mut self, said: Said, line: &mut Line) -> Result<(), Status> {
        match (said, &self.known) {
            (Said::Message(message), _) => {
                return self.take(message.map(|message| *message), line).await;
            }
            (Said::InStep, Some(known)) if !line.resync.is_open() && known.blocks.is_whole() => {
                known.believe();
            }
            (Said::OutOfStep, Some(known)) => known.indexing.worker.set_events_current(false),
            _ => {}
        }
        Ok(())
    }

    async fn take(&mut self, message: Option<Message>, line: &mut Line) -> Result<(), Status> {
        let Some(known) = &mut self.known else { return Ok(()) };
        match message {
            Some(Message::Load(load)) => {
                known.load(&load, self.context.config.load_stale);
                // Changes of the time without a stream come before the second.
                line.loads += 1;
                if line.loads > 1 && !line.resync.is_open() && known.blocks.is_whole() {
                    known.believe_unless_told(line);
                }
                Ok(())
            }
            Some(Message::Snapshot(part)) => known.snapshot(part, line).await,
            Some(Message::Events(events)) => known.events(&events, line).await,
            Some(Message::Capabilities(capabilities)) => {
                greet::check(&capabilities)?;
                self.learn(capabilities)
            }
            Some(Message::Bye(bye)) => {
                (line.is_leaving, known.is_leaving) = (true, true);
                let reason: String =
                    bye.reason.chars().take(64).flat_map(char::escape_debug).collect();
                let why = format!("its shim says good-bye: {reason}");
                known.indexing.worker.set_draining(true, why);
                Ok(())
            }
            Some(Message::Hello(_)) => Err(Status::invalid_argument("`hello` comes once")),
            // What a later version says.
            None => Ok(()),
        }
    }

    /// Takes what the shim knows of its engine.
    fn learn(&mut self, capabilities: v1::Capabilities) -> Result<(), Status> {
        let Some(known) = &self.known else { return Ok(()) };
        let Indexing { pool, worker, .. } = &known.indexing;
        if let Some(tokens) = capabilities.block_size
            && !pool.learn_block_size(tokens)
        {
            let ours = pool.block_size();
            let message = format!("the engine's block size is {tokens}, the model's is {ours}");
            return Err(Status::failed_precondition(message));
        }
        if let Some(tokens) = capabilities.context_tokens {
            worker.set_context_tokens(tokens);
        }
        worker.set_honours_threshold(capabilities.honours_threshold);
        worker.ranks.set_count(capabilities.ranks.unwrap_or(1));
        worker.ranks.set_pins(capabilities.takes_rank_header);
        if capabilities.publishes_kv_events == Some(false) {
            worker.set_synced();
        }
        worker.shim_report.set_capabilities(capabilities);
        Ok(())
    }
}

impl Known {
    /// The order of words says what is known to be true; where it does not, that is said.
    fn believe_unless_told(&self, line: &Line) {
        if line.inbound.keeps_order() {
            self.believe();
        }
    }

    /// What is in the index is what the worker holds.
    fn believe(&self) {
        let worker = &self.indexing.worker;
        if !worker.shim_report.publishes() {
            worker.set_synced();
        } else if !worker.events_are_current() {
            self.indexing.in_step();
        }
    }

    async fn snapshot(&mut self, part: v1::SnapshotPart, line: &mut Line) -> Result<(), Status> {
        line.resync.answered();
        if !self.blocks.is_restoring() {
            self.indexing.worker.set_events_current(false);
            self.indexing.begin_whole();
            self.indexing.pool.assumed.forget(self.indexing.worker.index);
        }
        let mut sum = Applied::default();
        let taken = self.blocks.snapshot(part, &mut sum).await;
        self.indexing.note(0, sum);
        match taken {
            Ok(None) => Ok(()),
            Ok(Some(sequence)) => {
                line.applied(sequence);
                self.believe_unless_told(line);
                if self.indexing.may_log("synced") {
                    let (worker, blocks) = (self.indexing.worker.id(), self.indexing.blocks());
                    tracing::info!(worker, blocks, "index is in step");
                }
                Ok(())
            }
            Err(fault) => self.at_fault(fault, line),
        }
    }

    async fn events(&mut self, events: &v1::Events, line: &mut Line) -> Result<(), Status> {
        if line.resync.is_open() {
            return Ok(());
        }
        self.indexing.observe(events.changes.len(), events.engine_time_s);
        let mut sum = Applied::default();
        let taken = self.blocks.events(events, &mut sum).await;
        self.indexing.note(events.changes.len(), sum);
        match taken {
            Ok(sequence) => {
                line.applied(sequence);
                self.believe_unless_told(line);
                if self.indexing.has_room_again(Instant::now()) {
                    line.resync.need(OVER_LIMIT);
                    self.indexing.wait_longer();
                }
                Ok(())
            }
            Err(fault) => self.at_fault(fault, line),
        }
    }

    fn at_fault(&mut self, fault: Fault, line: &mut Line) -> Result<(), Status> {
        self.blocks.distrust();
        self.indexing.worker.set_events_current(false);
        match fault {
            Fault::Gap(missed) => {
                self.indexing.gap(missed);
                line.resync.need("gap");
            }
            Fault::Nonsense(why) => {
                self.indexing.garbage(&why);
                line.resync.need("nonsense");
                if line.is_hopeless() {
                    return Err(Status::invalid_argument(why));
                }
            }
        }
        Ok(())
    }

    fn load(&self, load: &v1::Load, stale: Duration) {
        let Indexing { pool, worker, .. } = &self.indexing;
        let now = Instant::now();
        let others = Others::beyond(load, &worker.booked, pool.block_size());
        worker.shim_report.set_others(now, stale, others);
        let age = Duration::from_millis(load.age_ms.into());
        let ratio = load.kv_used_ratio.filter(|ratio| (0.0..=1.0).contains(ratio));
        let figures = EngineLoad {
            running: load.running,
            waiting: load.waiting,
            kv_used_ratio: ratio,
            total_blocks: load.kv_blocks,
            ..EngineLoad::default()
        };
        worker.set_load(now.checked_sub(age).unwrap_or(now), figures);
        if !load.up {
            // Nothing is known of its cache.
            pool.assumed.forget(worker.index);
        } else if let Some(known) = worker.shim_report.capabilities() {
            // Forgotten while it was down.
            if worker.honours_threshold().is_none() {
                worker.set_honours_threshold(known.honours_threshold);
            }
            if worker.ranks.pins().is_none() {
                worker.ranks.set_pins(known.takes_rank_header);
            }
        }
        worker.set_probed(load.up, "its shim says so");
    }
}
