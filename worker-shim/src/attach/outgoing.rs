//! What one router is told, in the order in which it is told. Nothing is prepared before the
//! connection has room for it, so that there is no queue to bound.

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
use super::load::LoadTeller;
use super::refusal::PROTOCOL;
use super::status::{Entry, Stage};
use crate::mirror::{Cut, Head, Mirror, Parts};

/// Between two copies of everything for one router, however often it asks.
const BETWEEN_COPIES: Duration = Duration::from_millis(100);

/// What the router has said, as far as it matters here.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Steer {
    /// Set by its welcome.
    pub(super) start: Option<Start>,
    /// How often it asked for a copy of everything.
    pub(super) resyncs: u64,
}

/// How to begin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    /// Up to where it has all changes of the mirror that was named to it.
    pub(super) known_sequence: Option<u64>,
    pub(super) load_interval_ms: u32,
}

/// Whether the router takes what it is told.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    copying: AtomicBool,
    messages: AtomicU64,
}

impl Pulse {
    /// Messages that it has taken.
    pub(super) fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// Whether a copy of everything is on its way, of which there can be few.
    pub(super) fn is_copying(&self) -> bool {
        self.copying.load(Ordering::Relaxed)
    }
}

enum Blocks {
    /// A copy is being made.
    Copying(BoxFuture<'static, Arc<Cut>>),
    /// It is being sent.
    Copy(Parts),
    /// Changes are sent as they come; these are next.
    Tail { at: Head, next: VecDeque<Arc<Events>> },
}

/// What one router is still to be told.
pub(super) struct Outgoing {
    mirror: Mirror,
    hello: Option<Hello>,
    /// The mirror that `hello` speaks of.
    generation: u64,
    steer: watch::Receiver<Steer>,
    head: watch::Receiver<Head>,
    load: LoadTeller,
    capabilities: watch::Receiver<Capabilities>,
    leaving: CancellationToken,
    bye: Option<Bye>,
    /// `None` before the welcome.
    blocks: Option<Blocks>,
    resyncs: u64,
    next_copy_at: Instant,
    in_step_timeout: Duration,
    entry: Arc<Entry>,
    pulse: Arc<Pulse>,
}

impl Outgoing {
    pub(super) fn new(link: &Link, steer: watch::Receiver<Steer>, pulse: Arc<Pulse>) -> Self {
        let (config, told) = (&link.config, &link.told);
        let mut capabilities = told.capabilities.clone();
        let (generation, mirror_id) = told.mirror.id();
        let hello = Hello {
            protocol: PROTOCOL,
            worker_id: config.worker_id.clone(),
            instance_id: told.instance_id.clone(),
            role: config.role.into(),
            url: config.url.clone(),
            model: config.model.clone(),
            capabilities: Some(capabilities.borrow_and_update().clone()),
            mirror_id,
            instance_secret: told.secret.0.to_vec(),
        };
        let grace_ms = u64::try_from(config.grace.as_millis()).unwrap_or(u64::MAX);
        Self {
            mirror: told.mirror.clone(),
            hello: Some(hello),
            generation,
            steer,
            head: told.mirror.head(),
            load: LoadTeller::new(told.load.clone()),
            capabilities,
            leaving: told.leaving.clone(),
            bye: Some(Bye { reason: "stopping".to_owned(), grace_ms }),
            blocks: None,
            resyncs: 0,
            next_copy_at: Instant::now(),
            in_step_timeout: config.timing.in_step_timeout,
            entry: Arc::clone(&link.entry),
            pulse,
        }
    }

    /// All of it, until the call ends.
    pub(super) fn messages(self) -> impl Stream<Item = AttachRequest> + Send + 'static {
        futures_util::stream::unfold(self, async |mut outgoing| {
            let message = outgoing.next().await?;
            outgoing.pulse.messages.fetch_add(1, Ordering::Relaxed);
            Some((AttachRequest { message: Some(message) }, outgoing))
        })
    }

    async fn next(&mut self) -> Option<Message> {
        if let Some(hello) = self.hello.take() {
            return Some(Message::Hello(hello));
        }
        if self.blocks.is_none() {
            let start = self.steer.wait_for(|steer| steer.start.is_some()).await.ok()?.start?;
            self.begin(start);
        }
        loop {
            if let Some(message) = self.aside().or_else(|| self.next_of_blocks()) {
                return Some(message);
            }
            self.wait().await?;
        }
    }

    fn begin(&mut self, start: Start) {
        self.load.set_interval(start.load_interval_ms);
        match start.known_sequence {
            Some(sequence) => {
                let at = Head { generation: self.generation, sequence };
                self.entry.update(|status| status.sent_sequence = sequence);
                self.tail(at);
            }
            None => self.copy(self.in_step_timeout),
        }
    }

    /// What is not about blocks, and comes first since it is short.
    fn aside(&mut self) -> Option<Message> {
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

    fn next_of_blocks(&mut self) -> Option<Message> {
        loop {
            match self.blocks.as_mut()? {
                Blocks::Copying(_) => return None,
                Blocks::Copy(parts) => {
                    let head = parts.head();
                    if let Some(part) = parts.next() {
                        self.entry.update(|status| status.sent_sequence = part.sequence);
                        return Some(Message::Snapshot(part));
                    }
                    self.entry.update(|status| status.snapshots += 1);
                    self.next_copy_at = Instant::now() + BETWEEN_COPIES;
                    self.tail(head);
                }
                Blocks::Tail { .. } if self.steer.borrow().resyncs != self.resyncs => {
                    self.copy(Duration::ZERO);
                }
                Blocks::Tail { at, next } => {
                    if next.is_empty() {
                        // First, so that what comes from here on is waited for.
                        self.head.mark_unchanged();
                        match self.mirror.after(at.generation, at.sequence) {
                            Ok(changes) if changes.is_empty() => return None,
                            Ok(changes) => *next = changes.into(),
                            Err(_) => {
                                self.copy(Duration::ZERO);
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

    fn tail(&mut self, at: Head) {
        self.pulse.copying.store(false, Ordering::Relaxed);
        self.entry.update(|status| status.stage = Stage::Live);
        self.blocks = Some(Blocks::Tail { at, next: VecDeque::new() });
    }

    /// Everything from the beginning, once the mirror is in step or this much time has passed.
    fn copy(&mut self, in_step_timeout: Duration) {
        self.resyncs = self.steer.borrow().resyncs;
        self.entry.update(|status| status.stage = Stage::Snapshot);
        let (mirror, not_before) = (self.mirror.clone(), self.next_copy_at);
        let has_events = self.capabilities.borrow().publishes_kv_events.unwrap_or(true);
        let copying = async move {
            sleep_until(not_before).await;
            if has_events {
                let mut caught_up = mirror.caught_up();
                let _in_step = timeout(in_step_timeout, caught_up.wait_for(|yes| *yes)).await;
            }
            mirror.cut().await
        };
        self.blocks = Some(Blocks::Copying(copying.boxed()));
    }

    /// Waits until there may be something to tell; `None` once the call is over.
    async fn wait(&mut self) -> Option<()> {
        let Self { steer, head, load, capabilities, leaving, bye, blocks, pulse, .. } = self;
        let is_tail = matches!(blocks, Some(Blocks::Tail { .. }));
        let knows_more = capabilities.has_changed().is_ok();
        let copied = async {
            match blocks {
                Some(Blocks::Copying(copying)) => copying.await,
                _ => std::future::pending().await,
            }
        };
        let cut = tokio::select! {
            changed = steer.changed() => return changed.ok(),
            () = leaving.cancelled(), if bye.is_some() => None,
            _ = capabilities.changed(), if knows_more => {
                // To be seen by whoever asks.
                capabilities.mark_changed();
                None
            }
            () = load.wait() => None,
            _ = head.changed(), if is_tail => None,
            cut = copied => Some(cut),
        };
        if let Some(cut) = cut {
            pulse.copying.store(true, Ordering::Relaxed);
            *blocks = Some(Blocks::Copy(Parts::new(cut)));
        }
        Some(())
    }
}
