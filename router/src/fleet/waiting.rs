//! Requests that wait for a worker here, and not in an engine's queue, where their place could
//! not be changed any more. Whom they get, and when, says `pick::queue`.
//!
//! Nobody owns a task here: whoever waits turns the wheel, when it comes, when some worker has
//! finished a prompt, and when one is predicted to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use splitrail_kv::BlockHash;
use tokio::sync::{Notify, oneshot};

use super::booking::Booking;
use super::pool::Pool;
use super::roster::Roster;
use crate::pick::queue::{Item, Queue, QueueConfig, Refused, Ticket, View};
use crate::pick::{Candidate, Choice, Leg, Policy, Query};

/// A prediction may be wrong, and a worker come back unheard: so often somebody looks.
const LOOK_AT_LEAST: Duration = Duration::from_millis(250);

/// The queues of a pool.
#[derive(Debug)]
pub struct Waiting {
    epoch: Instant,
    /// Of prefill legs, and of those that do both.
    queues: [Mutex<Line>; 2],
    /// A worker has finished a prompt.
    freed: Arc<Notify>,
}

#[derive(Debug)]
struct Line {
    queue: Queue<Arc<Waiter>>,
    /// When the next worker is predicted to have room.
    due: Option<Instant>,
}

/// What a request asks for.
#[derive(Debug)]
pub struct Asked {
    /// Prefill, or aggregated.
    pub leg: Leg,
    /// Its blocks.
    pub hashes: Vec<BlockHash>,
    /// Workers that it must not have.
    pub excluded: Vec<usize>,
    /// What is asked of the workers.
    pub query: Query,
    /// Whether it is heard when its prompt is computed.
    pub heard: bool,
    /// How urgent it is.
    pub urgency: Urgency,
}

/// How urgent a request is.
#[derive(Clone, Copy, Debug)]
pub struct Urgency {
    /// When it came.
    pub arrived: Instant,
    /// Higher ones are served first.
    pub class: i32,
    /// On whose account.
    pub tenant: u64,
    /// When its first token should be there.
    pub deadline: Option<Instant>,
}

/// A worker's room, and why it was that one.
#[derive(Debug)]
pub struct Granted {
    /// The workers at that moment.
    pub roster: Arc<Roster>,
    /// Those among whom it was chosen.
    pub candidates: Vec<Candidate>,
    /// The choice.
    pub choice: Choice,
    /// The room.
    pub booking: Booking,
}

/// Why a request may not wait.
#[derive(Clone, Copy, Debug)]
pub struct NoRoom {
    /// The soonest that its first token could be there; `None` where the queue is full.
    pub predicted_ttft_ms: Option<f64>,
    /// When it may be tried again with some hope.
    pub retry_after_seconds: u64,
}

/// What a queue holds of a request.
#[derive(Debug)]
struct Waiter {
    asked: Asked,
    reply: Mutex<Option<oneshot::Sender<Box<Granted>>>>,
}

impl Default for Waiting {
    fn default() -> Self {
        let line = || Mutex::new(Line { queue: Queue::new(QueueConfig::default()), due: None });
        Self { epoch: Instant::now(), queues: [line(), line()], freed: Arc::default() }
    }
}

impl Waiting {
    /// Told by whoever finishes a prompt.
    pub fn freed(&self) -> &Arc<Notify> {
        &self.freed
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.queues.iter().map(|line| lock(line).queue.len()).sum()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How requests wait from now on.
    pub fn configure(&self, config: QueueConfig) {
        self.queues.iter().for_each(|line| lock(line).queue.configure(config));
    }

    /// How many wait for the leg, and how long those keep its workers busy that would go before
    /// a prompt whose shortest prefill takes so long.
    pub fn ahead(&self, leg: Leg, prefill_ms: f64, workers: usize) -> (usize, f64) {
        let line = lock(self.line(leg));
        (line.queue.len(), line.queue.ahead_ms(0, prefill_ms, workers))
    }

    /// Waits for a worker. Dropped, the request is out of the queue, and a room that it was
    /// given meanwhile is free.
    ///
    /// # Errors
    /// If it may not wait.
    pub async fn wait(
        &self,
        pool: &Pool,
        policy: &Policy,
        asked: Asked,
    ) -> Result<Granted, NoRoom> {
        let leg = asked.leg;
        let (reply, mut granted) = oneshot::channel();
        let place = self.join(pool, asked, reply)?;
        self.turn(pool, policy, leg);
        loop {
            let due = lock(self.line(leg)).due;
            let look = Instant::now() + LOOK_AT_LEAST;
            let due = due.map_or(look, |due| due.min(look));
            tokio::select! {
                biased;
                room = &mut granted => match room {
                    Ok(room) => {
                        place.given();
                        return Ok(*room);
                    }
                    // Senders live in the queue, and leave it with a room only.
                    Err(_) => return Err(NoRoom { predicted_ttft_ms: None, retry_after_seconds: 1 }),
                },
                () = self.freed.notified() => {}
                () = tokio::time::sleep_until(due.into()) => {}
            }
            // Whoever is woken turns the wheel for all: the room may be the others'.
            for leg in [Leg::Prefill, Leg::Aggregated] {
                self.turn(pool, policy, leg);
            }
        }
    }

    fn join(
        &self,
        pool: &Pool,
        asked: Asked,
        reply: oneshot::Sender<Box<Granted>>,
    ) -> Result<Place<'_>, NoRoom> {
        let now = Instant::now();
        let (leg, query, urgency) = (asked.leg, asked.query, asked.urgency);
        let item = Item {
            key: Arc::new(Waiter { asked, reply: Mutex::new(Some(reply)) }),
            arrival_ns: self.ns(urgency.arrived),
            class: urgency.class,
            tenant: urgency.tenant,
            tenant_weight: 1.0,
            deadline_ns: urgency.deadline.map(|at| self.ns(at)),
            query,
        };
        let line = self.line(leg);
        let mut queue = lock(line);
        let joined = queue.queue.push(item, self.ns(now), &mut Sight::new(pool, now));
        let ticket = joined.map_err(|refused: Refused<_>| NoRoom {
            predicted_ttft_ms: refused.predicted_ttft_ms,
            retry_after_seconds: refused.retry_after_seconds(),
        })?;
        Ok(Place { line, ticket, waits: true })
    }

    /// Gives rooms to whom they are due. One that is given is booked at once: the next turn
    /// sees it.
    fn turn(&self, pool: &Pool, policy: &Policy, leg: Leg) {
        let now = Instant::now();
        let mut sight = Sight::new(pool, now);
        let mut line = lock(self.line(leg));
        let round = line.queue.round(self.ns(now), policy, &mut sight);
        line.due = round.due_ns.map(|ns| self.epoch + Duration::from_nanos(ns));
        for release in round.releases {
            let chosen = &release.candidates[release.choice.index];
            let Some(worker) = sight.roster.get(chosen.worker) else { continue };
            let query = release.item.query;
            let held = query.cached_tokens(chosen.held_blocks());
            let to_compute = query.prompt_tokens.saturating_sub(held);
            let Waiter { asked, reply } = release.item.key.as_ref();
            let rank = chosen.rank;
            let work = worker.costs.begin(now, rank, (to_compute, held), !asked.heard);
            let booking = Booking::on(worker, rank, to_compute, query.prompt_tokens);
            let granted = Granted {
                roster: Arc::clone(&sight.roster),
                candidates: release.candidates,
                choice: release.choice,
                booking: booking.with_work(work),
            };
            // Siblings that follow see what this one leaves there.
            pool.assumed.sent(now, worker, rank, &asked.hashes);
            let reply = reply.lock().unwrap_or_else(PoisonError::into_inner).take();
            // Who has left gives the room back with this.
            let _left = reply.map(|reply| reply.send(Box::new(granted)));
        }
    }

    fn line(&self, leg: Leg) -> &Mutex<Line> {
        &self.queues[usize::from(leg != Leg::Prefill)]
    }

    fn ns(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.epoch);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A place in a queue; dropping it leaves.
struct Place<'a> {
    line: &'a Mutex<Line>,
    ticket: Ticket,
    waits: bool,
}

impl Place<'_> {
    /// It has led to a room.
    fn given(mut self) {
        self.waits = false;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.waits {
            let _left = lock(self.line).queue.remove(self.ticket);
        }
    }
}

/// The workers as they are at one instant.
struct Sight<'a> {
    pool: &'a Pool,
    roster: Arc<Roster>,
    now: Instant,
}

impl<'a> Sight<'a> {
    fn new(pool: &'a Pool, now: Instant) -> Self {
        Self { pool, roster: pool.roster(), now }
    }
}

impl View<Arc<Waiter>> for Sight<'_> {
    fn candidates(&mut self, key: &Arc<Waiter>, out: &mut Vec<Candidate>) {
        let Asked { leg, hashes, excluded, .. } = &key.asked;
        *out = self.pool.candidates(&self.roster, *leg, hashes, excluded, self.now);
    }

    fn shared_blocks(&self, one: &Arc<Waiter>, other: &Arc<Waiter>) -> u32 {
        let (one, other) = (&one.asked.hashes, &other.asked.hashes);
        // Chained hashes that agree anywhere agree everywhere before it.
        let shorter = one.len().min(other.len());
        let (mut same, mut differ) = (0, shorter + 1);
        while differ - same > 1 {
            let middle = same + (differ - same) / 2;
            if one[middle - 1] == other[middle - 1] {
                same = middle;
            } else {
                differ = middle;
            }
        }
        u32::try_from(same).unwrap_or(u32::MAX)
    }
}

fn lock(line: &Mutex<Line>) -> MutexGuard<'_, Line> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}
