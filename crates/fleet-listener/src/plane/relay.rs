//! Passes what a worker published on the event plane to its session, in the form of a shim's
//! stream: a hello, a snapshot where one is needed, and then each change once, in order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_event_plane::names;
use splitrail_event_plane::snapshot::Label;
use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_proto::v1::attach_response::Message as RouterMessage;
use tokio::sync::{mpsc, watch};
use tonic::{Code, Status};

use super::model::PlaneModel;
use super::slots::{LatestReports, RelayMark, Slot};
use super::terms;
use crate::credentials::AllowedWorkers;
use crate::inbound::{Inbound, RelayedMessages, ShimInput};
use crate::receive::receive;

/// Messages that wait for the session; beyond that the relay waits. Few, because each may have the
/// most that a message may take decoded.
const QUEUE_MAX: usize = 4;
/// Maximum number of messages of the session that wait to be read.
const REPLIES_MAX: usize = 8;
/// Messages that are relayed before responses are read again.
const MESSAGES_PER_TURN: usize = 32;
/// Maximum time for a session to send its welcome.
const WELCOME: Duration = Duration::from_secs(15);
/// Interval of the check for overdue messages.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time for a session to request a snapshot by itself.
const SESSION_REQUEST_TIME: Duration = Duration::from_secs(2);
/// Maximum time for a change that the shim reports as published to arrive while nothing else
/// arrives.
const OVERDUE: Duration = Duration::from_secs(5);
/// Time between two requests for a new snapshot.
const REQUEST_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum silence of a shim that has sent `Bye`.
const BYE_SILENCE: Duration = Duration::from_secs(3);
/// Pause after a relay that ended by itself, and after one that was refused or panicked.
const PAUSE: Duration = Duration::from_millis(200);
pub(super) const PAUSE_AFTER_REFUSAL: Duration = Duration::from_secs(10);

/// Serves a worker until its session ends.
pub(super) async fn serve(model: Arc<PlaneModel>, mut mark: RelayMark) {
    let (to_session, received) = mpsc::channel(QUEUE_MAX);
    let (reply, replies) = mpsc::channel(REPLIES_MAX);
    let connected = model.broker.connected.clone();
    let inbound = Inbound::Plane(RelayedMessages { received, connected });
    // The broker's permissions decide who may publish for which worker.
    let receiving = receive(Arc::clone(&model.context), inbound, reply, AllowedWorkers::default());
    let relaying = async {
        let slot = Arc::clone(mark.slot());
        let latest = slot.latest.subscribe();
        let now = Instant::now();
        let relay = Relay {
            model: &model,
            slot: &slot,
            to_session,
            replies,
            latest,
            hello: v1::Hello::default(),
            sent: None,
            need: None,
            load_number: 0,
            has_said_bye: false,
            target: None,
            is_out_of_step: false,
            last_change_at: now,
        };
        mark.pause = relay.run().await;
        drop(mark);
    };
    tokio::join!(receiving, relaying);
}

/// The last change that was passed to the session.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Position {
    mirror_id: String,
    sequence: u64,
}

impl Position {
    /// Whether a change with this number is the next one. None follows the largest number.
    fn is_followed_by(&self, sequence: u64) -> bool {
        self.sequence.checked_add(1) == Some(sequence)
    }
}

/// The need for a snapshot.
#[derive(Debug)]
struct SnapshotNeed {
    reason: String,
    since: Instant,
    /// Nothing is requested before this time, since the session may request a snapshot itself.
    not_before: Instant,
    /// The change that a snapshot must include, if later changes are known to be lost.
    must_include: Option<Position>,
    asked_at: Option<Instant>,
}

/// What the session must reach to be in step.
struct Target {
    since: Instant,
    mirror_id: String,
    /// `None` while the shim does not know the number.
    sequence: Option<u64>,
}

struct Relay<'r> {
    model: &'r PlaneModel,
    slot: &'r Slot,
    to_session: mpsc::Sender<ShimInput>,
    replies: mpsc::Receiver<Result<v1::AttachResponse, Status>>,
    latest: watch::Receiver<LatestReports>,
    hello: v1::Hello,
    /// `None` while a snapshot is needed.
    sent: Option<Position>,
    need: Option<SnapshotNeed>,
    load_number: u64,
    has_said_bye: bool,
    /// What the shim reported as published and has not arrived yet.
    target: Option<Target>,
    is_out_of_step: bool,
    /// When the last change arrived.
    last_change_at: Instant,
}

/// The relay has ended; holds the pause before the next relay.
struct RelayEnd(Duration);

impl Relay<'_> {
    async fn run(mut self) -> Duration {
        let RelayEnd(pause) = match self.start().await {
            Ok(()) => self.relay().await,
            Err(ended) => ended,
        };
        pause
    }

    async fn start(&mut self) -> Result<(), RelayEnd> {
        let latest = self.latest.borrow_and_update().clone();
        let (Some(hello), Some(theirs)) = (latest.hello, latest.terms) else {
            return Err(RelayEnd(PAUSE));
        };
        let ours = self.model.terms().ok_or(RelayEnd(PAUSE_AFTER_REFUSAL))?;
        if !terms::agree(&ours, &theirs) {
            self.model.count_refused("terms");
            self.model.context.count(Code::FailedPrecondition);
            let (worker, model) = (self.slot.token.as_str(), self.model.name.as_str());
            tracing::error!(
                model,
                worker,
                "a shim hashes blocks in another way than this router; it is refused"
            );
            return Err(RelayEnd(PAUSE_AFTER_REFUSAL));
        }
        self.hello = hello.clone();
        // `reports` ensures that this is the same process, or that the previous one is gone.
        let hello = v1::Hello { instance_secret: self.slot.secret.to_vec(), ..hello };
        self.send_message(Message::Hello(hello)).await?;
        let reply = tokio::time::timeout(WELCOME, self.replies.recv()).await;
        match reply.ok().flatten() {
            Some(Ok(v1::AttachResponse { message: Some(RouterMessage::Welcome(welcome)) })) => {
                let mirror_id = self.hello.mirror_id.clone();
                self.sent = welcome.known_sequence.map(|sequence| Position { mirror_id, sequence });
                if self.sent.is_none() {
                    self.need("start", Duration::ZERO);
                }
                Ok(())
            }
            Some(Err(status)) => Err(pause_after(&status)),
            _ => Err(RelayEnd(PAUSE)),
        }
    }

    async fn relay(&mut self) -> RelayEnd {
        // Reports from before the welcome must be handled as well.
        self.latest.mark_changed();
        loop {
            let outcome = tokio::select! {
                biased;
                reply = self.replies.recv() => self.answered(reply),
                Ok(()) = self.latest.changed() => self.report().await,
                () = self.slot.news.notified() => Ok(()),
                () = tokio::time::sleep(CHECK_INTERVAL) => Ok(()),
            };
            let outcome = match outcome {
                Ok(()) => self.proceed().await,
                ended => ended,
            };
            if let Err(ended) = outcome {
                return ended;
            }
        }
    }

    async fn proceed(&mut self) -> Result<(), RelayEnd> {
        let silence = self.latest.borrow().at.elapsed();
        let most = self.model.config.disconnect_grace;
        let most = if self.has_said_bye { most.min(BYE_SILENCE) } else { most };
        if silence >= most {
            tracing::warn!(
                model = self.model.name,
                worker = self.slot.token,
                "a shim has been silent for too long"
            );
            return Err(RelayEnd(PAUSE));
        }
        self.queue().await?;
        if self.need.is_some() {
            self.snapshot().await?;
            self.queue().await?;
        }
        self.check_behind().await
    }

    fn answered(
        &mut self,
        reply: Option<Result<v1::AttachResponse, Status>>,
    ) -> Result<(), RelayEnd> {
        match reply {
            Some(Ok(reply)) => {
                if let Some(RouterMessage::Resync(resync)) = reply.message {
                    self.sent = None;
                    self.need(&resync.reason, Duration::ZERO);
                }
                Ok(())
            }
            Some(Err(status)) => Err(pause_after(&status)),
            None => Err(RelayEnd(PAUSE)),
        }
    }

    /// Passes on what is new in the last report.
    async fn report(&mut self) -> Result<(), RelayEnd> {
        let latest = self.latest.borrow_and_update().clone();
        let Some(hello) = latest.hello else { return Err(RelayEnd(Duration::ZERO)) };
        let is_same = |one: &v1::Hello, other: &v1::Hello| {
            (&one.instance_id, &one.url, &one.model, one.role)
                == (&other.instance_id, &other.url, &other.model, other.role)
        };
        if !is_same(&hello, &self.hello) {
            return Err(RelayEnd(Duration::ZERO));
        }
        if hello.capabilities != self.hello.capabilities {
            let capabilities = hello.capabilities.clone().unwrap_or_default();
            self.send_message(Message::Capabilities(capabilities)).await?;
        }
        self.hello = hello;
        if let Some(bye) = latest.bye.filter(|_| !self.has_said_bye) {
            self.has_said_bye = true;
            self.send_message(Message::Bye(bye)).await?;
        }
        if let Some((number, load)) = latest.load
            && number != self.load_number
        {
            self.load_number = number;
            self.send_message(Message::Load(load)).await?;
        }
        let (mirror_id, sequence) = (latest.mirror_id, latest.sequence);
        let since = Instant::now();
        match &mut self.target {
            // The target is not moved before it is reached; otherwise a busy worker would never
            // reach it.
            Some(target) if target.mirror_id == mirror_id && target.sequence.is_some() => {}
            Some(target) => (target.mirror_id, target.sequence) = (mirror_id, sequence),
            None => self.target = Some(Target { since, mirror_id, sequence }),
        }
        Ok(())
    }

    /// Whether everything that the shim reported as published has been passed on.
    fn is_in_step(&self) -> bool {
        let (Some(at), Some(target)) = (&self.sent, &self.target) else { return false };
        at.mirror_id == target.mirror_id
            && target.sequence.is_some_and(|sequence| sequence <= at.sequence)
    }

    /// Passes waiting messages on until one is missing.
    async fn queue(&mut self) -> Result<(), RelayEnd> {
        for _ in 0..MESSAGES_PER_TURN {
            let Some(at) = self.sent.clone() else { return Ok(()) };
            let Some(waiting) = self.slot.pop() else { return Ok(()) };
            if waiting.mirror_id != at.mirror_id {
                self.slot.put_back(waiting);
                self.other_mirror(&at).await?;
                continue;
            }
            let Ok(message) = waiting.decode() else {
                self.model.count_refused("nonsense");
                continue;
            };
            let fresh = message.events.iter().find(|events| events.sequence > at.sequence);
            if let Some(fresh) = fresh
                && !at.is_followed_by(fresh.sequence)
            {
                // The session counts the missing changes and requests a snapshot.
                let events = fresh.clone();
                self.slot.put_back(waiting);
                self.sent = None;
                self.need("gap", SESSION_REQUEST_TIME);
                return self.send_message(Message::Events(events)).await;
            }
            for events in message.events {
                let at = self.sent.get_or_insert_with(|| at.clone());
                if at.is_followed_by(events.sequence) {
                    at.sequence = events.sequence;
                    self.last_change_at = Instant::now();
                    self.send_message(Message::Events(events)).await?;
                }
            }
        }
        self.slot.news.notify_one();
        Ok(())
    }

    /// Handles a waiting message of another mirror. If the store still has this mirror's snapshot,
    /// the message is of an earlier mirror and is dropped.
    async fn other_mirror(&mut self, at: &Position) -> Result<(), RelayEnd> {
        let label = self.model.label(&self.slot.token).await.ok().flatten();
        if label.is_some_and(|label| label.mirror_id == at.mirror_id) {
            self.slot.keep(&at.mirror_id);
            return Ok(());
        }
        self.sent = None;
        self.need("mirror", Duration::ZERO);
        self.send(ShimInput::OutOfStep).await
    }

    fn need(&mut self, reason: &str, delay: Duration) {
        let not_before = Instant::now() + delay;
        match &mut self.need {
            Some(need) => need.not_before = need.not_before.min(not_before),
            None => {
                let reason = reason.to_owned();
                let since = Instant::now();
                self.need = Some(SnapshotNeed {
                    reason,
                    since,
                    not_before,
                    must_include: None,
                    asked_at: None,
                });
            }
        }
    }

    /// Fetches a snapshot that the waiting messages follow; requests one if there is none.
    async fn snapshot(&mut self) -> Result<(), RelayEnd> {
        let now = Instant::now();
        let Some(need) = self.need.as_mut().filter(|need| now >= need.not_before) else {
            return Ok(());
        };
        need.not_before = now + CHECK_INTERVAL;
        if !self.model.broker.is_connected() {
            return Ok(());
        }
        let label = self.model.label(&self.slot.token).await.ok().flatten();
        let mut fetched = Ok(());
        if let Some(label) = label.filter(|label| self.is_usable(label)) {
            // What cannot be read stays there until the shim stores another in its place.
            fetched = self.fetch(&label).await;
        }
        // A shim that has just started is about to store a snapshot.
        let has_begun = self.latest.borrow().sequence.is_some();
        let Some(need) = &mut self.need else { return fetched };
        if !has_begun && now < need.since + OVERDUE {
            return fetched;
        }
        if need.asked_at.is_none_or(|at| now >= at + REQUEST_INTERVAL) {
            need.asked_at = Some(now);
            let reason = need.reason.clone();
            self.model.count_snapshot("asked");
            let subject = names::ask(&self.model.name, &self.hello.worker_id);
            self.model.ask(subject, &reason).await;
        }
        fetched
    }

    /// Whether the waiting or the next messages follow a snapshot without a gap.
    fn is_usable(&self, label: &Label) -> bool {
        let must_include = self.need.as_ref().and_then(|need| need.must_include.as_ref());
        if must_include.is_some_and(|must_include| {
            must_include.mirror_id == label.mirror_id && label.sequence < must_include.sequence
        }) {
            return false;
        }
        match self.slot.first(&label.mirror_id) {
            Some(first) => first.saturating_sub(1) <= label.sequence,
            None => self.latest.borrow().mirror_id == label.mirror_id,
        }
    }

    async fn fetch(&mut self, wanted: &Label) -> Result<(), RelayEnd> {
        // The semaphore is never closed.
        let Ok(_permit) = self.model.fetching.acquire().await else { return Ok(()) };
        // Messages of other mirrors are older than this snapshot.
        self.slot.keep(&wanted.mirror_id);
        let mut has_begun = false;
        match self.parts(&mut has_begun).await? {
            Ok(at) => {
                self.model.count_snapshot("applied");
                (self.sent, self.need, self.last_change_at) = (Some(at), None, Instant::now());
                Ok(())
            }
            Err(error) => {
                self.model.count_snapshot("failed");
                let (model, worker) = (&self.model.name, self.slot.token.as_str());
                tracing::info!(model, worker, %error, "a snapshot cannot be fetched: trying again");
                // The session discards a partial snapshot when this relay ends.
                if has_begun { Err(RelayEnd(PAUSE)) } else { Ok(()) }
            }
        }
    }

    async fn parts(&mut self, has_begun: &mut bool) -> Result<std::io::Result<Position>, RelayEnd> {
        let mut fetch = match self.model.fetch(&self.slot.token).await {
            Ok(fetch) => fetch,
            Err(error) => return Ok(Err(error)),
        };
        let Label { mirror_id, sequence, .. } = fetch.label().clone();
        loop {
            match fetch.part().await {
                Ok(Some(part)) => {
                    *has_begun = true;
                    self.send_message(Message::Snapshot(part)).await?;
                }
                Ok(None) if *has_begun => return Ok(Ok(Position { mirror_id, sequence })),
                Ok(None) => return Ok(Err(std::io::ErrorKind::UnexpectedEof.into())),
                Err(error) => return Ok(Err(error)),
            }
        }
    }

    /// Tells the session when everything has arrived; requests a snapshot if published changes do
    /// not arrive.
    async fn check_behind(&mut self) -> Result<(), RelayEnd> {
        if self.is_in_step() {
            (self.target, self.is_out_of_step) = (None, false);
            return self.send(ShimInput::InStep).await;
        }
        let Some(since) = self.target.as_ref().map(|target| target.since) else { return Ok(()) };
        if since.elapsed() >= self.model.config.disconnect_grace && !self.is_out_of_step {
            self.is_out_of_step = true;
            self.send(ShimInput::OutOfStep).await?;
        }
        let is_late = since.elapsed() >= OVERDUE && self.last_change_at.elapsed() >= OVERDUE;
        if self.sent.is_none() || !is_late || !self.slot.is_empty() {
            return Ok(());
        }
        let (mirror_id, sequence) = {
            let latest = self.latest.borrow();
            (latest.mirror_id.clone(), latest.sequence)
        };
        if let Some(sequence) = sequence {
            self.sent = None;
            self.need("lost", Duration::ZERO);
            if let Some(need) = &mut self.need {
                need.must_include = Some(Position { mirror_id, sequence });
            }
            return self.send(ShimInput::OutOfStep).await;
        }
        Ok(())
    }

    async fn send_message(&self, message: Message) -> Result<(), RelayEnd> {
        self.send(ShimInput::Message(Some(Box::new(message)))).await
    }

    async fn send(&self, item: ShimInput) -> Result<(), RelayEnd> {
        self.to_session.send(item).await.map_err(|_| RelayEnd(PAUSE))
    }
}

/// The pause after a session has ended a relay with a status.
fn pause_after(status: &Status) -> RelayEnd {
    match status.code() {
        Code::Aborted | Code::Unavailable => RelayEnd(Duration::from_secs(1)),
        _ => RelayEnd(PAUSE_AFTER_REFUSAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_change_follows_the_largest_number() {
        let at = |sequence| Position { mirror_id: String::new(), sequence };
        assert!(at(1).is_followed_by(2) && at(u64::MAX - 1).is_followed_by(u64::MAX));
        assert!(!at(1).is_followed_by(1) && !at(1).is_followed_by(3));
        assert!(!at(u64::MAX).is_followed_by(0) && !at(u64::MAX).is_followed_by(u64::MAX));
    }
}
