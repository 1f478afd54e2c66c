//! The messages to one router, in order. A message is prepared only when the connection can
//! accept it, so there is no queue that needs a bound.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::Stream;
use futures_util::future::BoxFuture;
use splitrail_proto::v1::attach_request::Message;
use splitrail_proto::v1::{AttachRequest, Bye, Capabilities, Events, Hello};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::link::Link;
use super::load_reporter::LoadReporter;
use super::status::{Stage, StatusEntry};
use super::stream_end::PROTOCOL;
use crate::mirror::{ChangePosition, Mirror, Snapshot, SnapshotParts};

/// Minimum time between two snapshots for one router, however often it asks.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(100);

/// What the router has asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RouterInstructions {
    /// Set by the router's welcome.
    pub(super) start: Option<StreamStart>,
    /// The number of resynchronisations that the router has asked for.
    pub(super) resyncs: u64,
}

/// How a stream begins, from the router's welcome.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamStart {
    /// The last change that the router already has of the mirror that `Hello` named. `None` if it
    /// needs a snapshot.
    pub(super) known_sequence: Option<u64>,
    /// How often the router wants load reports, in milliseconds; 0 for the default.
    pub(super) load_interval_ms: u32,
}

/// Progress of the messages to a router, to detect a router that has stopped reading.
#[derive(Debug, Default)]
pub(super) struct SendProgress {
    sending_snapshot: AtomicBool,
    message_count: AtomicU64,
}

impl SendProgress {
    /// The number of messages that the connection has accepted.
    pub(super) fn message_count(&self) -> u64 {
        self.message_count.load(Ordering::Relaxed)
    }

    /// Whether a snapshot is being sent. The number of snapshots in memory is limited.
    pub(super) fn is_sending_snapshot(&self) -> bool {
        self.sending_snapshot.load(Ordering::Relaxed)
    }
}

/// How far the router is with the engine's blocks.
enum BlockPhase {
    /// A snapshot is being prepared.
    Preparing(BoxFuture<'static, Arc<Snapshot>>),
    /// A snapshot is being sent.
    Snapshot(SnapshotParts),
    /// Changes are sent as they occur. `at` is the last change sent; `next` are the next ones.
    Changes { at: ChangePosition, next: VecDeque<Arc<Events>> },
}

/// Produces the messages to one router.
pub(super) struct OutgoingMessages {
    mirror: Mirror,
    hello: Option<Hello>,
    /// The generation of the mirror that `hello` names.
    generation: u64,
    instructions: watch::Receiver<RouterInstructions>,
    position: watch::Receiver<ChangePosition>,
    load: LoadReporter,
    capabilities: watch::Receiver<Capabilities>,
    leaving: CancellationToken,
    bye: Option<Bye>,
    /// `None` before the router's welcome.
    blocks: Option<BlockPhase>,
    resyncs: u64,
    next_snapshot_at: Instant,
    in_step_timeout: Duration,
    entry: Arc<StatusEntry>,
    progress: Arc<SendProgress>,
}

impl OutgoingMessages {
    pub(super) fn new(
        link: &Link,
        instructions: watch::Receiver<RouterInstructions>,
        progress: Arc<SendProgress>,
    ) -> Self {
        let (config, shim) = (&link.config, &link.shim);
        let mut capabilities = shim.capabilities.clone();
        let (generation, mirror_id) = shim.mirror.id();
        let hello = Hello {
            protocol: PROTOCOL,
            worker_id: config.worker_id.clone(),
            instance_id: shim.instance_id.clone(),
            role: config.role.into(),
            url: config.url.clone(),
            model: config.model.clone(),
            capabilities: Some(capabilities.borrow_and_update().clone()),
            mirror_id,
            instance_secret: shim.secret.0.to_vec(),
        };
        let grace_ms = u64::try_from(config.grace.as_millis()).unwrap_or(u64::MAX);
        Self {
            mirror: shim.mirror.clone(),
            hello: Some(hello),
            generation,
            instructions,
            position: shim.mirror.position(),
            load: LoadReporter::new(shim.load.clone()),
            capabilities,
            leaving: shim.leaving.clone(),
            bye: Some(Bye { reason: "stopping".to_owned(), grace_ms }),
            blocks: None,
            resyncs: 0,
            next_snapshot_at: Instant::now(),
            in_step_timeout: config.timing.in_step_timeout,
            entry: Arc::clone(&link.entry),
            progress,
        }
    }

    /// The messages as a stream, until the call ends.
    pub(super) fn messages(self) -> impl Stream<Item = AttachRequest> + Send + 'static {
        futures_util::stream::unfold(self, async |mut outgoing| {
            let message = outgoing.next().await?;
            outgoing.progress.message_count.fetch_add(1, Ordering::Relaxed);
            Some((AttachRequest { message: Some(message) }, outgoing))
        })
    }

    async fn next(&mut self) -> Option<Message> {
        if let Some(hello) = self.hello.take() {
            return Some(Message::Hello(hello));
        }
        if self.blocks.is_none() {
            let start = self
                .instructions
                .wait_for(|instructions| instructions.start.is_some())
                .await
                .ok()?
                .start?;
            self.start_stream(start);
        }
        loop {
            if let Some(message) = self.next_control_message().or_else(|| self.next_block_message())
            {
                return Some(message);
            }
            self.wait().await?;
        }
    }

    fn start_stream(&mut self, start: StreamStart) {
        self.load.set_interval(start.load_interval_ms);
        match start.known_sequence {
            Some(sequence) => {
                let at = ChangePosition { generation: self.generation, sequence };
                self.entry.update(|status| status.sent_sequence = sequence);
                self.send_changes_after(at);
            }
            None => self.send_snapshot(self.in_step_timeout),
        }
    }

    /// Returns the next message that is not about blocks. Such messages go first because they are
    /// short.
    fn next_control_message(&mut self) -> Option<Message> {
        if self.leaving.is_cancelled()
            && let Some(bye) = self.bye.take()
        {
            return Some(Message::Bye(bye));
        }
        if self.capabilities.has_changed().unwrap_or(false) {
            return Some(Message::Capabilities(self.capabilities.borrow_and_update().clone()));
        }
        self.load.due().map(Message::Load)
    }

    fn next_block_message(&mut self) -> Option<Message> {
        loop {
            match self.blocks.as_mut()? {
                BlockPhase::Preparing(_) => return None,
                BlockPhase::Snapshot(parts) => {
                    let position = parts.snapshot_position();
                    if let Some(part) = parts.next() {
                        self.entry.update(|status| status.sent_sequence = part.sequence);
                        return Some(Message::Snapshot(part));
                    }
                    self.entry.update(|status| status.snapshots += 1);
                    self.next_snapshot_at = Instant::now() + SNAPSHOT_INTERVAL;
                    self.send_changes_after(position);
                }
                BlockPhase::Changes { .. }
                    if self.instructions.borrow().resyncs != self.resyncs =>
                {
                    self.send_snapshot(Duration::ZERO);
                }
                BlockPhase::Changes { at, next } => {
                    if next.is_empty() {
                        // Before the changes are read, so that later changes wake `wait`.
                        self.position.mark_unchanged();
                        match self.mirror.after(at.generation, at.sequence) {
                            Ok(changes) if changes.is_empty() => return None,
                            Ok(changes) => *next = changes.into(),
                            Err(_) => {
                                self.send_snapshot(Duration::ZERO);
                                continue;
                            }
                        }
                    }
                    let events = next.pop_front()?;
                    at.sequence = events.sequence;
                    self.entry.update(|status| status.sent_sequence = events.sequence);
                    return Some(Message::Events(Arc::unwrap_or_clone(events)));
                }
            }
        }
    }

    fn send_changes_after(&mut self, at: ChangePosition) {
        self.progress.sending_snapshot.store(false, Ordering::Relaxed);
        self.entry.update(|status| status.stage = Stage::Live);
        self.blocks = Some(BlockPhase::Changes { at, next: VecDeque::new() });
    }

    /// Prepares a snapshot, once the mirror has caught up or `in_step_timeout` has passed.
    fn send_snapshot(&mut self, in_step_timeout: Duration) {
        self.resyncs = self.instructions.borrow().resyncs;
        self.entry.update(|status| status.stage = Stage::Snapshot);
        let (mirror, not_before) = (self.mirror.clone(), self.next_snapshot_at);
        let has_events = self.capabilities.borrow().publishes_kv_events.unwrap_or(true);
        let preparing = async move {
            sleep_until(not_before).await;
            if has_events {
                let mut caught_up = mirror.caught_up();
                let _in_step = timeout(in_step_timeout, caught_up.wait_for(|yes| *yes)).await;
            }
            mirror.snapshot().await
        };
        self.blocks = Some(BlockPhase::Preparing(preparing.boxed()));
    }

    /// Waits until there may be a message to send. Returns `None` once the call has ended.
    async fn wait(&mut self) -> Option<()> {
        let Self {
            instructions, position, load, capabilities, leaving, bye, blocks, progress, ..
        } = self;
        let sends_changes = matches!(blocks, Some(BlockPhase::Changes { .. }));
        let capabilities_can_change = capabilities.has_changed().is_ok();
        let prepared = async {
            match blocks {
                Some(BlockPhase::Preparing(preparing)) => preparing.await,
                _ => std::future::pending().await,
            }
        };
        let snapshot = tokio::select! {
            changed = instructions.changed() => return changed.ok(),
            () = leaving.cancelled(), if bye.is_some() => None,
            _ = capabilities.changed(), if capabilities_can_change => {
                // Marked again, so that `next_control_message` sees the change.
                capabilities.mark_changed();
                None
            }
            () = load.wait() => None,
            _ = position.changed(), if sends_changes => None,
            snapshot = prepared => Some(snapshot),
        };
        if let Some(snapshot) = snapshot {
            progress.sending_snapshot.store(true, Ordering::Relaxed);
            *blocks = Some(BlockPhase::Snapshot(SnapshotParts::new(snapshot)));
        }
        Some(())
    }
}
