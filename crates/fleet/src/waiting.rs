//! Requests that wait in the router for a worker, instead of in an engine's queue, where they could
//! not be moved to another worker. `splitrail_policy::queue` decides which request goes where, and
//! when.
//!
//! No background task is needed: the waiting requests run the scheduling themselves, when a request
//! arrives, when a worker has finished a prompt, when a worker is predicted to finish one, and at
//! least every 250 ms.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use splitrail_kv::{BlockHash, common_blocks};
use tokio::sync::{Notify, oneshot};

use super::exclusion::Exclusion;
use super::pool::{CandidateQuery, Pool};
use super::roster::Roster;
use splitrail_api::steering::Urgency;
use splitrail_policy::queue::{Item, Payer, Queue, QueueConfig, QueueRefusal, Ticket, View};
use splitrail_policy::{Candidate, Choice, Leg, Policy, Query, Source};
use splitrail_workload::booking::Booking;
use splitrail_workload::clock::ns_since;

/// Longest time between two scheduling rounds: a prediction can be wrong, and a worker that
/// recovers sends no signal.
const ROUND_INTERVAL_MAX: Duration = Duration::from_millis(250);

/// The queues of a pool.
#[derive(Debug)]
pub struct WaitingQueues {
    epoch: Instant,
    /// The queue of prefill legs and the queue of aggregated legs.
    queues: [Mutex<WaitingQueue>; 2],
    /// Notified when a worker has finished a prompt.
    freed: Arc<Notify>,
}

#[derive(Debug)]
struct WaitingQueue {
    queue: Queue<Arc<Waiter>>,
    /// When the next worker is predicted to have room.
    due: Option<Instant>,
}

/// What a waiting request needs from a worker.
#[derive(Debug)]
pub struct PlacementRequest {
    /// `Prefill` or `Aggregated`.
    pub leg: Leg,
    /// Hashes of the prompt's blocks.
    pub hashes: Arc<[BlockHash]>,
    /// Workers that must not take the leg.
    pub excluded: Vec<Exclusion>,
    /// Whether the worker may fetch a part of the prompt from another worker.
    pub may_fetch: bool,
    /// The number of leading blocks that the leg may read back; 0 if it reads nothing.
    pub readable_blocks: u32,
    /// Whether the leg itself may take a prefix from another worker (one shot).
    pub takes_prefix: bool,
    /// What the policy needs to know of the request.
    pub query: Query,
    /// Whether the router will learn when the prompt has been computed.
    pub observes_prefill_end: bool,
    /// Priority class, tenant and deadline.
    pub urgency: Urgency,
}

/// A worker that was chosen for a request, and the basis of the choice.
#[derive(Debug)]
pub struct GrantedPlace {
    /// The workers at the time of the choice.
    pub roster: Arc<Roster>,
    /// The candidates.
    pub candidates: Vec<Candidate>,
    /// The choice.
    pub choice: Choice,
    /// The booking of the request on the chosen worker.
    pub booking: Booking,
}

/// The refusal of a request that may not wait, or may not wait any longer.
#[derive(Clone, Copy, Debug)]
pub struct NoRoom {
    /// The reason.
    pub reason: NoRoomReason,
    /// Seconds after which a retry may succeed.
    pub retry_after_seconds: u64,
}

/// Why a request may not wait, or may not wait any longer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NoRoomReason {
    /// The queue is full.
    Full,
    /// The first token is predicted to miss its deadline: it would take at least this many
    /// milliseconds.
    Late(f64),
    /// The request has waited for the maximum time, given here.
    Waited(Duration),
    /// No worker is left that may serve the request.
    NoWorker,
}

/// A request in a queue, and the channel for its result.
#[derive(Debug)]
struct Waiter {
    asked: PlacementRequest,
    reply: Mutex<Option<oneshot::Sender<Box<GrantedPlace>>>>,
}

impl Default for WaitingQueues {
    fn default() -> Self {
        let line =
            || Mutex::new(WaitingQueue { queue: Queue::new(QueueConfig::default()), due: None });
        Self { epoch: Instant::now(), queues: [line(), line()], freed: Arc::default() }
    }
}

impl WaitingQueues {
    /// To be notified when a worker has finished a prompt.
    pub fn freed(&self) -> &Arc<Notify> {
        &self.freed
    }

    /// Number of waiting requests.
    pub fn len(&self) -> usize {
        self.queues.iter().map(|line| lock(line).queue.len()).sum()
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sets the configuration of the queues.
    pub fn configure(&self, config: QueueConfig) {
        self.queues.iter().for_each(|line| lock(line).queue.configure(config));
    }

    /// The number of requests that wait for the leg, and for how many milliseconds the ones that
    /// would be served before a prompt with this shortest prefill time keep the workers busy.
    pub fn ahead(&self, leg: Leg, prefill_ms: f64, workers: usize) -> (usize, f64) {
        let line = lock(self.line(leg));
        (line.queue.len(), line.queue.ahead_ms(0, prefill_ms, workers))
    }

    /// Waits for a worker. Dropping the future removes the request from the queue and frees a
    /// booking that it was given meanwhile. `entered` is called when the request has entered the
    /// queue; what it returns is dropped when the wait ends, however it ends.
    ///
    /// # Errors
    /// If the request may not wait, or may not wait any longer, or if no worker is left that may serve
    /// it.
    pub async fn wait<W>(
        &self,
        pool: &Pool,
        policy: &Policy,
        asked: PlacementRequest,
        entered: impl FnOnce() -> W,
    ) -> Result<GrantedPlace, NoRoom> {
        let leg = asked.leg;
        let excluded = asked.excluded.clone();
        let (reply, mut granted) = oneshot::channel();
        let place = self.join(pool, asked, reply)?;
        let _wait = entered();
        self.turn(pool, policy, leg);
        let max_wait = lock(self.line(leg)).queue.config().max_wait_ms;
        let max_wait = Duration::from_secs_f64(max_wait / 1e3);
        let mut patience = pin!(tokio::time::sleep(max_wait));
        loop {
            if !pool.has_candidate(leg, &excluded) && granted.is_empty() {
                return Err(NoRoom { reason: NoRoomReason::NoWorker, retry_after_seconds: 1 });
            }
            let due = lock(self.line(leg)).due;
            let due = due.map(|due| due.saturating_duration_since(Instant::now()));
            let look = due.map_or(ROUND_INTERVAL_MAX, |due| due.min(ROUND_INTERVAL_MAX));
            tokio::select! {
                biased;
                room = &mut granted => match room {
                    Ok(room) => {
                        place.given();
                        return Ok(*room);
                    }
                    // A sender leaves the queue only together with a booking.
                    Err(_) => return Err(NoRoom { reason: NoRoomReason::Full, retry_after_seconds: 1 }),
                },
                () = &mut patience => return Err(self.too_long(pool, leg, max_wait)),
                () = self.freed.notified() => {}
                () = tokio::time::sleep(look) => {}
            }
            // Runs the rounds of both legs, since the freed worker may suit another request.
            for leg in [Leg::Prefill, Leg::Aggregated] {
                self.turn(pool, policy, leg);
            }
        }
    }

    /// The refusal of a request that has waited too long; it may be retried when those that wait
    /// now have been served.
    fn too_long(&self, pool: &Pool, leg: Leg, max_wait: Duration) -> NoRoom {
        let roster = pool.roster();
        let able = roster.iter().filter(|worker| worker.serves(leg) && worker.is_up()).count();
        let (_, ahead_ms) = self.ahead(leg, f64::INFINITY, able);
        let retry_after_seconds = (ahead_ms / 1e3).ceil().clamp(1.0, 3600.0) as u64;
        NoRoom { reason: NoRoomReason::Waited(max_wait), retry_after_seconds }
    }

    fn join(
        &self,
        pool: &Pool,
        asked: PlacementRequest,
        reply: oneshot::Sender<Box<GrantedPlace>>,
    ) -> Result<QueuePlace<'_>, NoRoom> {
        let now = Instant::now();
        let (leg, query, urgency) = (asked.leg, asked.query, asked.urgency);
        let item = Item {
            key: Arc::new(Waiter { asked, reply: Mutex::new(Some(reply)) }),
            arrival_ns: ns_since(self.epoch, urgency.arrived),
            class: urgency.class,
            payer: Payer {
                tenant: urgency.client.number,
                tenant_weight: urgency.client.weight,
                session: urgency.session,
            },
            deadline_ns: urgency.deadline.map(|at| ns_since(self.epoch, at)),
            query,
        };
        let line = self.line(leg);
        let mut queue = lock(line);
        let joined =
            queue.queue.push(item, ns_since(self.epoch, now), &mut FleetView::new(pool, now));
        let ticket = joined.map_err(|refused: QueueRefusal| NoRoom {
            reason: refused.predicted_ttft_ms.map_or(NoRoomReason::Full, NoRoomReason::Late),
            retry_after_seconds: refused.retry_after_seconds(),
        })?;
        Ok(QueuePlace { line, ticket, waits: true })
    }

    /// Runs one scheduling round. Each released request is booked at once, so that the next round
    /// takes it into account.
    fn turn(&self, pool: &Pool, policy: &Policy, leg: Leg) {
        let now = Instant::now();
        let mut sight = FleetView::new(pool, now);
        let mut line = lock(self.line(leg));
        let round = line.queue.round(ns_since(self.epoch, now), policy, &mut sight);
        line.due = round.due_ns.map(|ns| self.epoch + Duration::from_nanos(ns));
        for release in round.releases {
            let chosen = &release.candidates[release.choice.index];
            let Some(worker) = sight.roster.get(chosen.worker) else { continue };
            let query = release.item.query;
            let available_prefix = release.choice.available_prefix(&release.candidates, &query);
            let held = query.cached_tokens(available_prefix.blocks);
            let to_compute = query.prompt_tokens.saturating_sub(held);
            let Waiter { asked, reply } = release.item.key.as_ref();
            let rank = chosen.rank;
            let work =
                worker.load.costs.begin(now, rank, to_compute, held, !asked.observes_prefill_end);
            let work = work.loading(chosen.overlap_by_tier, query.block_size);
            let work = work.reading(available_prefix.read_tokens);
            let booking = worker.book(rank, to_compute, query.prompt_tokens);
            let granted = GrantedPlace {
                roster: Arc::clone(&sight.roster),
                candidates: release.candidates,
                choice: release.choice,
                booking: booking.with_work(work),
            };
            // Later requests with the same prefix see the blocks that this one will leave there.
            pool.speculative_index.sent(now, worker, rank, &asked.hashes);
            let reply = reply.lock().unwrap_or_else(PoisonError::into_inner).take();
            // If the request is gone, the failed send drops its booking.
            let _left = reply.map(|reply| reply.send(Box::new(granted)));
        }
    }

    fn line(&self, leg: Leg) -> &Mutex<WaitingQueue> {
        &self.queues[usize::from(leg != Leg::Prefill)]
    }
}

/// A request's place in a queue. Dropping it removes the request.
struct QueuePlace<'a> {
    line: &'a Mutex<WaitingQueue>,
    ticket: Ticket,
    waits: bool,
}

impl QueuePlace<'_> {
    /// The request has got a booking and has left the queue.
    fn given(mut self) {
        self.waits = false;
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        if self.waits {
            let _left = lock(self.line).queue.remove(self.ticket);
        }
    }
}

/// The workers at one instant.
struct FleetView<'a> {
    pool: &'a Pool,
    roster: Arc<Roster>,
    now: Instant,
}

impl<'a> FleetView<'a> {
    fn new(pool: &'a Pool, now: Instant) -> Self {
        Self { pool, roster: pool.roster(), now }
    }
}

impl View<Arc<Waiter>> for FleetView<'_> {
    fn candidates(&mut self, key: &Arc<Waiter>, out: &mut Vec<Candidate>) {
        let PlacementRequest { leg, hashes, excluded, readable_blocks, takes_prefix, .. } =
            &key.asked;
        let query = CandidateQuery {
            leg: *leg,
            hashes,
            prompt_tokens: key.asked.query.prompt_tokens,
            exclusions: excluded,
            readable_blocks: *readable_blocks,
            takes_prefix: *takes_prefix,
            from: None,
            now: self.now,
        };
        self.pool.list_candidates(&self.roster, query, out);
    }

    fn sources(&mut self, key: &Arc<Waiter>, out: &mut Vec<Source>) {
        match key.asked.may_fetch {
            true => self.pool.list_sources(&self.roster, &key.asked.hashes, self.now, out),
            false => out.clear(),
        }
    }

    fn shared_blocks(&self, one: &Arc<Waiter>, other: &Arc<Waiter>) -> u32 {
        let same = common_blocks(&one.asked.hashes, &other.asked.hashes);
        u32::try_from(same).unwrap_or(u32::MAX)
    }

    fn same_workers(&self, one: &Arc<Waiter>, other: &Arc<Waiter>) -> bool {
        one.asked.excluded == other.asked.excluded
    }
}

fn lock(line: &Mutex<WaitingQueue>) -> MutexGuard<'_, WaitingQueue> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_kv::{HashSeed, IndexConfig};

    use super::*;
    use crate::worker::Worker;
    use splitrail_api::shares::ClientShare;

    fn pool() -> Pool {
        let seed = HashSeed(1);
        let (model, max_blocks_per_worker) = ("m".into(), 8);
        Pool::new(IndexConfig { model, block_size: 16, seed, max_blocks_per_worker }, Some(1))
    }

    fn asked() -> PlacementRequest {
        let (leg, draw) = (Leg::Prefill, 0);
        let prompt_tokens = 100;
        let query = Query {
            leg,
            prompt_tokens,
            prompt_blocks: 0,
            block_size: 16,
            turn: 0,
            draw,
            sharing: Default::default(),
        };
        let arrived = Instant::now();
        let client = ClientShare::EVERYONE;
        let urgency = Urgency { arrived, class: 0, client, session: 0, deadline: None };
        PlacementRequest {
            leg,
            hashes: Arc::default(),
            excluded: Vec::new(),
            may_fetch: false,
            readable_blocks: 0,
            takes_prefix: false,
            query,
            observes_prefill_end: true,
            urgency,
        }
    }

    /// A worker that is busy with a long prompt whose end the router learns.
    fn busy_worker(pool: &Pool) -> (Arc<Worker>, Booking) {
        let config = r#"{"id": "w", "role": "prefill", "url": "http://w:1"}"#;
        let config = serde_json::from_str(config).unwrap();
        let worker = pool.enter(|number| Worker::new(number, config, "w:1".parse().unwrap()));
        worker.set_up(true, "it is up");
        let work = worker.load.costs.begin(Instant::now(), None, 1_000_000, 0, false);
        let booking = worker.book(None, 0, 0).with_work(work);
        (worker, booking)
    }

    #[tokio::test]
    async fn a_request_waits_at_most_max_wait_and_then_leaves_the_queue() {
        let pool = pool();
        pool.waiting.configure(QueueConfig { max_wait_ms: 20.0, ..QueueConfig::default() });
        let began = Instant::now();
        let _busy = busy_worker(&pool);
        let waited = pool.waiting.wait(&pool, &Policy::predicted_ttft(), asked(), || ()).await;
        let refused = waited.unwrap_err();
        assert_eq!(refused.reason, NoRoomReason::Waited(Duration::from_millis(20)));
        assert!(began.elapsed() >= Duration::from_millis(20));
        assert!(refused.retry_after_seconds >= 1);
        assert!(pool.waiting.is_empty());
    }

    #[tokio::test]
    async fn a_request_stops_waiting_when_the_last_worker_that_may_serve_it_leaves() {
        let leaves: [fn(&Pool, &Worker); 2] =
            [|pool, worker| pool.leave(worker), |_, worker| worker.quarantine("a test")];
        for leave in leaves {
            let pool = pool();
            let max_wait_ms = 20_000.0;
            pool.waiting.configure(QueueConfig { max_wait_ms, ..QueueConfig::default() });
            let (worker, _booking) = busy_worker(&pool);
            let policy = Policy::predicted_ttft();
            let mut wait = pin!(pool.waiting.wait(&pool, &policy, asked(), || ()));
            let early = tokio::time::timeout(Duration::from_millis(10), wait.as_mut()).await;
            assert!(early.is_err(), "the worker is busy");
            leave(&pool, &worker);
            assert_eq!(wait.await.unwrap_err().reason, NoRoomReason::NoWorker);
            assert!(pool.waiting.is_empty());
        }
    }
}
