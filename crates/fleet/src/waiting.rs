//! Requests that wait in the router for a worker, instead of in an engine's queue, where they could
//! not be moved to another worker. `splitrail_policy::queue` decides which request goes where, and when.
//!
//! No task is needed: scheduling runs when a request arrives, when a worker has
//! finished a prompt, and when a worker is predicted to finish one.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use splitrail_kv::BlockHash;
use tokio::sync::{Notify, oneshot};

use super::booking::Booking;
use super::exclusion::Exclusion;
use super::pool::{CandidateQuery, Pool};
use super::roster::Roster;
use splitrail_api::steering::Urgency;
use splitrail_policy::queue::{Item, Queue, QueueConfig, Refused, Ticket, View};
use splitrail_policy::{Candidate, Choice, Leg, Policy, Query};

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
    pub hashes: Arc<[BlockHash]>,
    /// Workers that it must not have.
    pub excluded: Vec<Exclusion>,
    /// What is asked of the workers.
    pub query: Query,
    /// Whether it is known when its prompt is computed.
    pub observes_prefill_end: bool,
    /// How urgent it is.
    pub urgency: Urgency,
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

/// Why a request may not wait, or no longer.
#[derive(Clone, Copy, Debug)]
pub struct NoRoom {
    /// Why.
    pub why: Why,
    /// When it may be tried again with some hope.
    pub retry_after_seconds: u64,
}

/// Why a request may not wait, or no longer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// The queue is full.
    Full,
    /// Its first token could not be there in time, but in so many milliseconds at best.
    Late(f64),
    /// It has waited for as long as any may.
    Waited(Duration),
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
    /// If it may not wait, or no longer.
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
        let max_wait = lock(self.line(leg)).queue.config().max_wait_ms;
        let max_wait = Duration::from_secs_f64(max_wait / 1e3);
        let mut patience = pin!(tokio::time::sleep(max_wait));
        loop {
            let due = lock(self.line(leg)).due;
            let due = due.map(|due| due.saturating_duration_since(Instant::now()));
            let look = due.map_or(LOOK_AT_LEAST, |due| due.min(LOOK_AT_LEAST));
            tokio::select! {
                biased;
                room = &mut granted => match room {
                    Ok(room) => {
                        place.given();
                        return Ok(*room);
                    }
                    // Senders live in the queue, and leave it with a room only.
                    Err(_) => return Err(NoRoom { why: Why::Full, retry_after_seconds: 1 }),
                },
                () = &mut patience => return Err(self.too_long(pool, leg, max_wait)),
                () = self.freed.notified() => {}
                () = tokio::time::sleep(look) => {}
            }
            // Whoever is woken turns the wheel for all: the room may be the others'.
            for leg in [Leg::Prefill, Leg::Aggregated] {
                self.turn(pool, policy, leg);
            }
        }
    }

    /// It may come again when those that wait now have been served.
    fn too_long(&self, pool: &Pool, leg: Leg, max_wait: Duration) -> NoRoom {
        let roster = pool.roster();
        let able = roster.iter().filter(|worker| worker.serves(leg) && worker.is_up()).count();
        let (_, ahead_ms) = self.ahead(leg, f64::INFINITY, able);
        let retry_after_seconds = (ahead_ms / 1e3).ceil().clamp(1.0, 3600.0) as u64;
        NoRoom { why: Why::Waited(max_wait), retry_after_seconds }
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
            why: refused.predicted_ttft_ms.map_or(Why::Full, Why::Late),
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
            let work = worker.costs.begin(now, rank, to_compute, held, !asked.observes_prefill_end);
            let booking = worker.book(rank, to_compute, query.prompt_tokens);
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
        let query = CandidateQuery { leg: *leg, hashes, exclusions: excluded, now: self.now };
        *out = self.pool.candidates(&self.roster, query);
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_kv::{HashSeed, IndexConfig};

    use super::*;

    fn pool() -> Pool {
        let seed = HashSeed(1);
        let (model, max_blocks_per_worker) = ("m".into(), 8);
        Pool::new(IndexConfig { model, block_size: 16, seed, max_blocks_per_worker }, Some(1))
    }

    fn asked() -> Asked {
        let (leg, draw) = (Leg::Prefill, 0);
        let prompt_tokens = 100;
        let query = Query {
            leg,
            prompt_tokens,
            prompt_blocks: 0,
            first_blocks: [0; 2],
            block_size: 16,
            turn: 0,
            draw,
        };
        let arrived = Instant::now();
        let urgency = Urgency { arrived, class: 0, tenant: 0, deadline: None };
        Asked {
            leg,
            hashes: Arc::default(),
            excluded: Vec::new(),
            query,
            observes_prefill_end: true,
            urgency,
        }
    }

    #[tokio::test]
    async fn nobody_waits_for_longer_than_that_and_who_has_is_out_of_the_queue() {
        let pool = pool();
        pool.waiting.configure(QueueConfig { max_wait_ms: 20.0, ..QueueConfig::default() });
        let began = Instant::now();
        // There is no worker: none will ever be free.
        let waited = pool.waiting.wait(&pool, &Policy::predicted_ttft(), asked()).await;
        let refused = waited.unwrap_err();
        assert_eq!(refused.why, Why::Waited(Duration::from_millis(20)));
        assert!(began.elapsed() >= Duration::from_millis(20));
        assert!(refused.retry_after_seconds >= 1);
        assert!(pool.waiting.is_empty());
    }
}
