//! Places a leg on a worker and records why.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use splitrail_kv::Tier;

use super::context::{Context, PromptContext};
use crate::prepare::Unit;
use splitrail_api::error::{Error, Kind};
use splitrail_engine_client::Envelope;
use splitrail_fleet::Served;
use splitrail_fleet::waiting::{Asked, Granted, NoRoom, Why};
use splitrail_fleet::{Booking, CandidateQuery, Exclusion, Pool, Roster, Worker};
use splitrail_policy::{Candidate, Choice, Leg, Query, holders};
use splitrail_telemetry::clock::unix_ms;

mod record;

pub(super) use record::note_vetoed;
use record::{record, shadow};

thread_local! {
    /// What a pick needs, kept so that none allocates.
    static PICKING: RefCell<(Vec<Candidate>, Choice)> = RefCell::default();
}

/// A chosen worker with what was known of it.
pub(super) struct Placed {
    pub(super) worker: Arc<Worker>,
    /// The data-parallel rank that the leg is pinned to.
    pub(super) rank: Option<u16>,
    /// Whether `overlap_blocks` are by events that are believed.
    pub(super) is_believed: bool,
    pub(super) overlap_blocks: u32,
    /// What of it counts, where the worker was seen to find less than it should.
    pub(super) believed_blocks: u32,
    /// Leading blocks that it is assumed to hold, those among them: for bookings.
    pub(super) assumed_blocks: u32,
    /// The same blocks as `overlap_blocks` by tier.
    pub(super) overlap_by_tier: [u32; Tier::COUNT],
    /// Its room, where it was given one before; whoever sends the leg takes it.
    room: Mutex<Option<Booking>>,
}

impl Placed {
    /// The room that it was given, if it was and nobody has taken it.
    pub(super) fn take_room(&self) -> Option<Booking> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// What goes with a leg there: pinned to its rank, unless it is to another one already.
    pub(super) fn pinned(&self, envelope: &Envelope) -> Envelope {
        let rank = envelope.rank.or(self.rank.map(u32::from));
        Envelope { rank, ..envelope.clone() }
    }

    /// Whether the engine's count of cached tokens should be what the index says: not where
    /// it may run on any of several ranks.
    pub(super) fn is_comparable(&self) -> bool {
        let anywhere = self.rank.is_none() && self.worker.ranks.are_chosen_by_the_engine();
        self.is_believed && !anywhere
    }
}

/// What kind of worker a leg wants.
#[derive(Clone, Copy)]
pub(super) struct Wish<'a> {
    pub(super) leg: Leg,
    /// Workers that it must not be.
    pub(super) excluded: &'a [Exclusion],
    /// Blocks that it should hold; where none does, one that holds most is taken.
    pub(super) blocks: Option<u32>,
}

impl<'a> Wish<'a> {
    /// Any worker for a leg but these.
    pub(super) fn any(leg: Leg, excluded: &'a [Exclusion]) -> Self {
        Self { leg, excluded, blocks: None }
    }

    /// Asks a pool for the candidates, however many blocks they hold.
    fn query(self, unit: &'a Unit, now: Instant) -> CandidateQuery<'a> {
        let Self { leg, excluded, .. } = self;
        CandidateQuery { leg, hashes: &unit.hashes, exclusions: excluded, now }
    }
}

/// A choice, with what it was made from.
#[derive(Clone, Copy)]
pub(super) struct Pick<'a> {
    /// The workers of the model.
    pub(super) roster: &'a Roster,
    /// The candidates that the policy was given.
    pub(super) candidates: &'a [Candidate],
    /// The policy's choice among them.
    pub(super) choice: &'a Choice,
}

/// A point of time by both clocks.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    /// For intervals.
    pub(super) instant: Instant,
    /// For records, in milliseconds since 1970.
    pub(super) unix_ms: u64,
}

impl Moment {
    pub(super) fn now() -> Self {
        Self { instant: Instant::now(), unix_ms: unix_ms() }
    }
}

/// Picks a worker for a leg and writes down why.
pub(super) fn place(prompt: PromptContext<'_>, wish: Wish<'_>) -> Result<Placed, Error> {
    let PromptContext { context, unit, decision } = prompt;
    let leg = wish.leg;
    let Served { config, pool, .. } = context.served.as_ref();
    let started = Instant::now();
    let roster = pool.roster();
    PICKING.with_borrow_mut(|(candidates, choice)| {
        pool.list_candidates(&roster, wish.query(unit, started), candidates);
        if let Some(blocks) = wish.blocks {
            holders(candidates, blocks);
        }
        let started = context.mark("match", started);
        let query = query(pool, unit, leg, pool.next_turn(leg), pool.draw());
        if !choice.decide(&config.policy, candidates, &query, 0) {
            let now = Moment { instant: started, unix_ms: unix_ms() };
            note_vetoed(decision, &roster, wish, candidates, now);
            let message = format!("model {} has no worker left for {}", config.name, leg.name());
            return Err(Error::new(Kind::NoWorker, message));
        }
        let pick = Pick { roster: &roster, candidates, choice };
        let placed = settle(prompt, query, wish, pick, None);
        context.mark("pick", started);
        placed
    })
}

/// Places a leg that computes its prompt: in its turn, where the model's requests wait here.
/// `observes_prefill_end` says whether it is known when its prompt is computed.
pub(super) async fn place_in_turn(
    prompt: PromptContext<'_>,
    wish: Wish<'_>,
    observes_prefill_end: bool,
) -> Result<Placed, Error> {
    let PromptContext { context, unit, .. } = prompt;
    let Served { config, pool, .. } = context.served.as_ref();
    // Where nobody can be asked, there is nothing to wait for.
    if config.queue.is_none() || !pool.any_up(wish.leg, wish.excluded) {
        return place(prompt, wish);
    }
    let started = Instant::now();
    let query = query(pool, unit, wish.leg, pool.next_turn(wish.leg), pool.draw());
    let asked = Asked {
        leg: wish.leg,
        hashes: Arc::clone(&unit.hashes),
        excluded: wish.excluded.to_vec(),
        query,
        observes_prefill_end,
        urgency: context.urgency,
    };
    let granted = Box::pin(pool.waiting.wait(pool, &config.policy, asked)).await;
    context.mark("admit", started);
    let Granted { roster, candidates, choice, booking } =
        granted.map_err(|no_room| refused(context, no_room))?;
    let pick = Pick { roster: &roster, candidates: &candidates, choice: &choice };
    settle(prompt, query, wish, pick, Some(booking))
}

fn refused(context: &Context, no_room: NoRoom) -> Error {
    let name = context.served.name();
    let seconds = u32::try_from(no_room.retry_after_seconds).unwrap_or(u32::MAX);
    let (reason, message) = match no_room.why {
        Why::Late(ms) => {
            let message = format!(
                "model {name} is too busy for its goal: the first token would come after \
                 {:.1} s (queue.ttft_goal_ms)",
                ms / 1e3
            );
            ("ttft_goal", message)
        }
        Why::Full => {
            let message =
                format!("as many requests as may wait for model {name} (queue.max_waiting)");
            ("queue_full", message)
        }
        Why::Waited(limit) => {
            let message = format!(
                "model {name} is too busy: the request has waited for {limit:?} (queue.max_wait_ms)"
            );
            ("max_wait", message)
        }
    };
    context.metrics.shed.with_label_values(&[name, reason]).inc();
    Error::new(Kind::Busy(seconds), message)
}

/// Writes a choice down, and counts it.
fn settle(
    prompt: PromptContext<'_>,
    query: Query,
    wish: Wish<'_>,
    pick: Pick<'_>,
    room: Option<Booking>,
) -> Result<Placed, Error> {
    let PromptContext { context, unit, decision } = prompt;
    let Pick { roster, candidates, choice } = pick;
    let leg = query.leg;
    let chosen = candidates[choice.index];
    let Some(worker) = roster.get(chosen.worker).map(Arc::clone) else {
        // Candidates are of the same roster.
        return Err(Error::new(Kind::Internal, "a candidate is not in its roster"));
    };
    record(prompt, query, wish, pick);
    shadow(context, decision, query, pick);
    let metrics = &context.metrics;
    if unit.unknown.is_none() || !unit.hashes.is_empty() {
        let labels = [context.served.name(), leg.name()];
        metrics.overlap_blocks.with_label_values(&labels).observe(chosen.overlap_blocks.into());
        let lost = choice.best_overlap_blocks - chosen.overlap_blocks;
        metrics.overlap_blocks_lost.with_label_values(&labels[..1]).inc_by(lost.into());
    }
    let Candidate { rank, overlap_blocks, overlap_by_tier, assumed_blocks, .. } = chosen;
    Ok(Placed {
        is_believed: worker.overlap_is_believed(rank),
        worker,
        rank,
        overlap_blocks,
        believed_blocks: chosen.believed_blocks(),
        assumed_blocks,
        overlap_by_tier,
        room: Mutex::new(room),
    })
}

/// Who may take a leg, at this instant.
pub(super) fn candidates(
    pool: &Pool,
    roster: &Roster,
    unit: &Unit,
    wish: Wish<'_>,
    now: Instant,
) -> Vec<Candidate> {
    let mut candidates = pool.candidates(roster, wish.query(unit, now));
    if let Some(blocks) = wish.blocks {
        holders(&mut candidates, blocks);
    }
    candidates
}

/// What is asked of them, with a turn and a draw.
pub(super) fn query(pool: &Pool, unit: &Unit, leg: Leg, turn: u64, draw: u64) -> Query {
    Query {
        leg,
        prompt_tokens: unit.weight_tokens,
        prompt_blocks: unit.hashes.len() as u32,
        first_blocks: [0, 1].map(|i| unit.hashes.get(i).map_or(0, |hash| hash.0)),
        block_size: pool.block_size(),
        turn,
        draw,
    }
}

/// A placed leg is being sent, and leaves the prompt's KV on its worker: what begins alike
/// may follow it.
pub(super) fn sent(context: &Context, unit: &Unit, placed: &Placed) {
    // What is confirmed needs no guess.
    if (placed.overlap_blocks as usize) < unit.hashes.len() {
        let assumed = &context.served.pool.assumed;
        assumed.sent(Instant::now(), &placed.worker, placed.rank, &unit.hashes);
    }
}

/// A leg has left the prompt's KV on its worker.
pub(super) fn computed(context: &Context, unit: &Unit, placed: &Placed) {
    if unit.hashes.is_empty() {
        return;
    }
    let assumed = &context.served.pool.assumed;
    assumed.computed(Instant::now(), &placed.worker, placed.rank, &unit.hashes);
}
