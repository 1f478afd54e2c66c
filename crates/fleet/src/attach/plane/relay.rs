//! Passes what a worker published on the event plane to its session, in the form of a shim's stream:
//! a hello, a snapshot where one is needed, and then each change once, in order.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use splitrail_event_plane::names;
use splitrail_event_plane::snapshot::Label;
use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_proto::v1::attach_response::Message as Answer;
use tokio::sync::{mpsc, watch};
use tonic::{Code, Status};

use super::super::credentials::Allowed;
use super::super::inbound::{Inbound, Relayed, Said};
use super::super::receive::receive;
use super::model::Model;
use super::slots::{Latest, Slot, lock};
use super::terms;

/// Words on their way to the session; whoever has more waits.
const SAID_MAX: usize = 16;
/// The session's answers that wait to be read.
const ANSWERS_MAX: usize = 8;
/// Messages that are relayed before answers are looked for.
const AT_ONCE: usize = 32;
/// How long a session may take to welcome.
const WELCOME: Duration = Duration::from_secs(15);
/// Between two looks at whether something is overdue.
const LOOK: Duration = Duration::from_millis(250);
/// How long a session may take to say that it needs a snapshot.
const SAYS_SO: Duration = Duration::from_secs(2);
/// How long what is said to be in the stream may take to come, while nothing else comes.
const LATE: Duration = Duration::from_secs(5);
/// Between two questions for a new snapshot.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// How long a shim that has said good-bye may be silent.
const BYE_SILENCE: Duration = Duration::from_secs(3);
/// Pause after a line that ended by itself, and after one that was refused.
const SOON: Duration = Duration::from_millis(200);
const REFUSED: Duration = Duration::from_secs(10);

/// Serves a worker until its session is over.
pub(super) async fn serve(model: Arc<Model>, slot: Arc<Slot>) {
    let (said, heard) = mpsc::channel(SAID_MAX);
    let (answer, answers) = mpsc::channel(ANSWERS_MAX);
    let connected = model.broker.connected.clone();
    let inbound = Inbound::Plane(Relayed { said: heard, connected });
    // Who may publish for which worker is the broker's to say.
    let receiving = receive(Arc::clone(&model.context), inbound, answer, Allowed::default());
    let relaying = async {
        let latest = slot.latest.subscribe();
        let now = Instant::now();
        let relay = Relay {
            model: &model,
            slot: &slot,
            said,
            answers,
            latest,
            hello: v1::Hello::default(),
            at: None,
            need: None,
            load_number: 0,
            has_said_bye: false,
            target: None,
            is_out_of_step: false,
            moved_at: now,
        };
        let pause = relay.run().await;
        *lock(&slot.not_before) = Instant::now() + pause;
        slot.is_relayed.store(false, Relaxed);
    };
    tokio::join!(receiving, relaying);
}

/// Up to where the session has been told.
#[derive(Clone, Debug, PartialEq, Eq)]
struct At {
    mirror_id: String,
    sequence: u64,
}

/// The need for a snapshot.
#[derive(Debug)]
struct Need {
    reason: String,
    since: Instant,
    /// Nothing is done before; the session may have a word to say.
    not_before: Instant,
    /// Where the last change is known to be beyond reach: the snapshot must reach there.
    least: Option<At>,
    asked_at: Option<Instant>,
}

/// Where the session is to get.
struct Target {
    /// Since when.
    since: Instant,
    mirror_id: String,
    /// None while the shim itself does not know.
    sequence: Option<u64>,
}

struct Relay<'r> {
    model: &'r Model,
    slot: &'r Slot,
    said: mpsc::Sender<Said>,
    answers: mpsc::Receiver<Result<v1::AttachResponse, Status>>,
    latest: watch::Receiver<Latest>,
    hello: v1::Hello,
    /// None as long as a snapshot is needed.
    at: Option<At>,
    need: Option<Need>,
    load_number: u64,
    has_said_bye: bool,
    /// What the shim has told to be in the stream, and has not come yet.
    target: Option<Target>,
    is_out_of_step: bool,
    /// When the last change came.
    moved_at: Instant,
}

/// The line is over; how long to wait before the next.
struct Over(Duration);

impl Relay<'_> {
    async fn run(mut self) -> Duration {
        let Over(pause) = match self.greet().await {
            Ok(()) => self.relay().await,
            Err(over) => over,
        };
        pause
    }

    async fn greet(&mut self) -> Result<(), Over> {
        let latest = self.latest.borrow_and_update().clone();
        let (Some(hello), Some(theirs)) = (latest.hello, latest.terms) else {
            return Err(Over(SOON));
        };
        let ours = self.model.terms().ok_or(Over(REFUSED))?;
        if !terms::agree(&ours, &theirs) {
            self.model.count_refused("terms");
            self.model.context.count(Code::FailedPrecondition);
            let (worker, model) = (self.slot.token.as_str(), self.model.name.as_str());
            tracing::error!(
                model,
                worker,
                "a shim hashes blocks in another way than this router: it is turned away"
            );
            return Err(Over(REFUSED));
        }
        self.hello = hello.clone();
        // `reports` has seen to it that the same process speaks, or that the one before is gone.
        let hello = v1::Hello { instance_secret: self.slot.secret.to_vec(), ..hello };
        self.tell(Message::Hello(hello)).await?;
        let answer = tokio::time::timeout(WELCOME, self.answers.recv()).await;
        match answer.ok().flatten() {
            Some(Ok(v1::AttachResponse { message: Some(Answer::Welcome(welcome)) })) => {
                let mirror_id = self.hello.mirror_id.clone();
                self.at = welcome.known_sequence.map(|sequence| At { mirror_id, sequence });
                if self.at.is_none() {
                    self.need("start", Duration::ZERO);
                }
                Ok(())
            }
            Some(Err(status)) => Err(over(&status)),
            _ => Err(Over(SOON)),
        }
    }

    async fn relay(&mut self) -> Over {
        // What was heard before the welcome counts as well.
        self.latest.mark_changed();
        loop {
            let outcome = tokio::select! {
                biased;
                answer = self.answers.recv() => self.answered(answer),
                Ok(()) = self.latest.changed() => self.report().await,
                () = self.slot.news.notified() => Ok(()),
                () = tokio::time::sleep(LOOK) => Ok(()),
            };
            let outcome = match outcome {
                Ok(()) => self.go_on().await,
                over => over,
            };
            if let Err(over) = outcome {
                return over;
            }
        }
    }

    async fn go_on(&mut self) -> Result<(), Over> {
        let silence = self.latest.borrow().at.elapsed();
        let most = self.model.config.cut_off_max;
        let most = if self.has_said_bye { most.min(BYE_SILENCE) } else { most };
        if silence >= most {
            tracing::warn!(worker = self.slot.token, "nothing is heard of a shim");
            return Err(Over(SOON));
        }
        self.queue().await?;
        if self.need.is_some() {
            self.snapshot().await?;
            self.queue().await?;
        }
        self.check_behind().await
    }

    fn answered(&mut self, answer: Option<Result<v1::AttachResponse, Status>>) -> Result<(), Over> {
        match answer {
            Some(Ok(answer)) => {
                if let Some(Answer::Resync(resync)) = answer.message {
                    self.at = None;
                    self.need(&resync.reason, Duration::ZERO);
                }
                Ok(())
            }
            Some(Err(status)) => Err(over(&status)),
            None => Err(Over(SOON)),
        }
    }

    /// Says what a report has that is new.
    async fn report(&mut self) -> Result<(), Over> {
        let latest = self.latest.borrow_and_update().clone();
        let Some(hello) = latest.hello else { return Err(Over(Duration::ZERO)) };
        let is_same = |one: &v1::Hello, other: &v1::Hello| {
            (&one.instance_id, &one.url, &one.model, one.role)
                == (&other.instance_id, &other.url, &other.model, other.role)
        };
        if !is_same(&hello, &self.hello) {
            return Err(Over(Duration::ZERO));
        }
        if hello.capabilities != self.hello.capabilities {
            let capabilities = hello.capabilities.clone().unwrap_or_default();
            self.tell(Message::Capabilities(capabilities)).await?;
        }
        self.hello = hello;
        if let Some(bye) = latest.bye.filter(|_| !self.has_said_bye) {
            self.has_said_bye = true;
            self.tell(Message::Bye(bye)).await?;
        }
        if let Some((number, load)) = latest.load
            && number != self.load_number
        {
            self.load_number = number;
            self.tell(Message::Load(load)).await?;
        }
        let (mirror_id, sequence) = (latest.mirror_id, latest.sequence);
        let since = Instant::now();
        match &mut self.target {
            // What was told first comes first: else who is busy would never get there.
            Some(target) if target.mirror_id == mirror_id && target.sequence.is_some() => {}
            Some(target) => (target.mirror_id, target.sequence) = (mirror_id, sequence),
            None => self.target = Some(Target { since, mirror_id, sequence }),
        }
        Ok(())
    }

    /// Whether everything came that was told to be there.
    fn is_in_step(&self) -> bool {
        let (Some(at), Some(target)) = (&self.at, &self.target) else { return false };
        at.mirror_id == target.mirror_id
            && target.sequence.is_some_and(|sequence| sequence <= at.sequence)
    }

    /// Relays what waits, until something is missing.
    async fn queue(&mut self) -> Result<(), Over> {
        for _ in 0..AT_ONCE {
            let Some(at) = self.at.clone() else { return Ok(()) };
            let Some((bytes, message)) = self.slot.pop() else { return Ok(()) };
            if message.mirror_id != at.mirror_id {
                self.slot.put_back(bytes, message);
                self.other_mirror(&at).await?;
                continue;
            }
            let fresh = message.events.iter().find(|events| events.sequence > at.sequence);
            if let Some(fresh) = fresh
                && fresh.sequence != at.sequence + 1
            {
                // The session counts what is missing, and asks.
                let events = fresh.clone();
                self.slot.put_back(bytes, message);
                self.at = None;
                self.need("gap", SAYS_SO);
                return self.tell(Message::Events(events)).await;
            }
            for events in message.events {
                let at = self.at.get_or_insert_with(|| at.clone());
                if events.sequence == at.sequence + 1 {
                    at.sequence = events.sequence;
                    self.moved_at = Instant::now();
                    self.tell(Message::Events(events)).await?;
                }
            }
        }
        self.slot.news.notify_one();
        Ok(())
    }

    /// What comes next is of another mirror: of one before, if the store still has this one.
    async fn other_mirror(&mut self, at: &At) -> Result<(), Over> {
        let label = self.model.label(&self.slot.token).await.ok().flatten();
        if label.is_some_and(|label| label.mirror_id == at.mirror_id) {
            self.slot.keep(&at.mirror_id);
            return Ok(());
        }
        self.at = None;
        self.need("mirror", Duration::ZERO);
        self.say(Said::OutOfStep).await
    }

    fn need(&mut self, reason: &str, session_says_so: Duration) {
        let not_before = Instant::now() + session_says_so;
        match &mut self.need {
            Some(need) => need.not_before = need.not_before.min(not_before),
            None => {
                let reason = reason.to_owned();
                let since = Instant::now();
                self.need = Some(Need { reason, since, not_before, least: None, asked_at: None });
            }
        }
    }

    /// Fetches a snapshot from which what waits leads on; asks for one if there is none.
    async fn snapshot(&mut self) -> Result<(), Over> {
        let now = Instant::now();
        let Some(need) = self.need.as_mut().filter(|need| now >= need.not_before) else {
            return Ok(());
        };
        need.not_before = now + LOOK;
        if !self.model.broker.is_connected() {
            return Ok(());
        }
        let label = self.model.label(&self.slot.token).await.ok().flatten();
        if let Some(label) = label.filter(|label| self.is_usable(label)) {
            return self.fetch(&label).await;
        }
        // A shim that has only begun is about to store one.
        let has_begun = self.latest.borrow().sequence.is_some();
        let Some(need) = &mut self.need else { return Ok(()) };
        if !has_begun && now < need.since + LATE {
            return Ok(());
        }
        if need.asked_at.is_none_or(|at| now >= at + ASK_AGAIN) {
            need.asked_at = Some(now);
            let reason = need.reason.clone();
            self.model.count_snapshot("asked");
            let subject = names::ask(&self.model.name, &self.hello.worker_id);
            self.model.ask(subject, &reason).await;
        }
        Ok(())
    }

    /// Whether what waits, or is to come, leads on from a snapshot.
    fn is_usable(&self, label: &Label) -> bool {
        let least = self.need.as_ref().and_then(|need| need.least.as_ref());
        if least.is_some_and(|least| {
            least.mirror_id == label.mirror_id && label.sequence < least.sequence
        }) {
            return false;
        }
        match self.slot.first(&label.mirror_id) {
            Some(first) => first <= label.sequence + 1,
            None => self.latest.borrow().mirror_id == label.mirror_id,
        }
    }

    async fn fetch(&mut self, wanted: &Label) -> Result<(), Over> {
        // Nobody closes it.
        let Ok(_one_of_few) = self.model.fetching.acquire().await else { return Ok(()) };
        // What was there before this snapshot, and is of another mirror, is older.
        self.slot.keep(&wanted.mirror_id);
        let mut has_begun = false;
        match self.parts(&mut has_begun).await? {
            Ok(at) => {
                self.model.count_snapshot("applied");
                (self.at, self.need, self.moved_at) = (Some(at), None, Instant::now());
                Ok(())
            }
            Err(error) => {
                self.model.count_snapshot("failed");
                let worker = self.slot.token.as_str();
                tracing::info!(worker, %error, "a snapshot cannot be fetched: trying again");
                // Half of one is nothing: the session forgets it with the line.
                if has_begun { Err(Over(SOON)) } else { Ok(()) }
            }
        }
    }

    async fn parts(&mut self, has_begun: &mut bool) -> Result<std::io::Result<At>, Over> {
        let mut fetch = match self.model.fetch(&self.slot.token).await {
            Ok(fetch) => fetch,
            Err(error) => return Ok(Err(error)),
        };
        let Label { mirror_id, sequence, .. } = fetch.label().clone();
        loop {
            match fetch.part().await {
                Ok(Some(part)) => {
                    *has_begun = true;
                    self.tell(Message::Snapshot(part)).await?;
                }
                Ok(None) if *has_begun => return Ok(Ok(At { mirror_id, sequence })),
                Ok(None) => return Ok(Err(std::io::ErrorKind::UnexpectedEof.into())),
                Err(error) => return Ok(Err(error)),
            }
        }
    }

    /// Says when everything is there, and notices what is said to be there and does not come.
    async fn check_behind(&mut self) -> Result<(), Over> {
        if self.is_in_step() {
            (self.target, self.is_out_of_step) = (None, false);
            return self.say(Said::InStep).await;
        }
        let Some(since) = self.target.as_ref().map(|target| target.since) else { return Ok(()) };
        if since.elapsed() >= self.model.config.cut_off_max && !self.is_out_of_step {
            self.is_out_of_step = true;
            self.say(Said::OutOfStep).await?;
        }
        let is_late = since.elapsed() >= LATE && self.moved_at.elapsed() >= LATE;
        if self.at.is_none() || !is_late || !self.slot.is_empty() {
            return Ok(());
        }
        let (mirror_id, sequence) = {
            let latest = self.latest.borrow();
            (latest.mirror_id.clone(), latest.sequence)
        };
        if let Some(sequence) = sequence {
            self.at = None;
            self.need("lost", Duration::ZERO);
            if let Some(need) = &mut self.need {
                need.least = Some(At { mirror_id, sequence });
            }
            return self.say(Said::OutOfStep).await;
        }
        Ok(())
    }

    async fn tell(&self, message: Message) -> Result<(), Over> {
        self.say(Said::Message(Some(Box::new(message)))).await
    }

    async fn say(&self, said: Said) -> Result<(), Over> {
        self.said.send(said).await.map_err(|_| Over(SOON))
    }
}

/// How long to wait after a session has ended a line.
fn over(status: &Status) -> Over {
    match status.code() {
        Code::Aborted | Code::Unavailable => Over(Duration::from_secs(1)),
        _ => Over(REFUSED),
    }
}
