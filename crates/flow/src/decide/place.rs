//! Places a leg on a worker and records the reasons for the choice.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use splitrail_kv::{Overlap, Tier};

use crate::context::{Context, PromptContext};
use crate::decide::adapter_holders::is_about_adapters;
use crate::prepare::Unit;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_engine_client::LegHeaders;
use splitrail_fleet::ServedModel;
use splitrail_fleet::waiting::{GrantedPlace, NoRoom, NoRoomReason, PlacementRequest};
use splitrail_fleet::{CandidateQuery, Exclusion, Pool, Roster, Worker};
use splitrail_ledger::leg::Expectation;
use splitrail_ledger::timeline::Stage;
use splitrail_policy::{
    Candidate, Choice, Distance, FetchPlan, Leg, Location, Query, Source, holders,
};
use splitrail_telemetry::LabelledSeries;
use splitrail_telemetry::clock::unix_ms;
use splitrail_transfer::pair::Target;
use splitrail_transfer::peer_fetch::PeerFetchOutcome;
use splitrail_workload::Booking;
use splitrail_workload::costs::RankScope;

mod record;

use record::record;
pub(crate) use record::{fetch_choice, note_vetoed};

thread_local! {
    /// Buffers of the choice, kept per thread so that a choice allocates nothing.
    static PICKING: RefCell<(Vec<Candidate>, Vec<Source>, Choice)> = RefCell::default();
}

/// A leg that has been placed: its worker, and what the router knew of the worker at the time of the
/// choice.
pub(crate) struct PlacedLeg {
    pub(crate) worker: Arc<Worker>,
    /// The data-parallel rank that the leg is pinned to.
    pub(crate) rank: Option<u16>,
    /// Whether the index of this worker was trusted when `overlap_blocks` was counted.
    pub(crate) is_believed: bool,
    pub(crate) overlap_blocks: u32,
    /// The part of `overlap_blocks` that counts; it is smaller if the worker has lately found fewer
    /// cached tokens than the index said (drift).
    pub(crate) believed_blocks: u32,
    /// Leading blocks of the speculative index, including `overlap_blocks`; used for bookings.
    pub(crate) speculative_blocks: u32,
    /// `overlap_blocks` if the engine did the opposite with the last block of a hit.
    overlap_otherwise: u32,
    /// `overlap_blocks` split by tier.
    pub(crate) overlap_by_tier: [u32; Tier::COUNT],
    /// The prefix that the worker is to fetch from another worker before the leg is sent.
    pub(crate) fetch: Option<FetchPlan>,
    /// The last blocks of `overlap_blocks`, which a peer fetch has brought for this leg.
    pub(crate) fetched_blocks: u32,
    /// The number of tokens that the leg reads from another worker.
    pub(crate) read_tokens: u64,
    /// When the leg must have ended, because of what it reads.
    pub(crate) read_deadline: Option<ReadDeadline>,
    /// The last tokens of what was or is fetched, which their source has computed for this leg.
    pub(crate) recomputed_tokens: u32,
    /// How far the worker is from the one that hands over to the leg.
    pub(crate) distance: Distance,
    /// Whether a peer fetch has brought blocks that the index may not have yet.
    has_fetched: bool,
    /// The booking that the queue made, until the leg is sent.
    booking: Mutex<Option<Booking>>,
}

impl PlacedLeg {
    /// Takes the booking that the queue made, if there is one and it was not taken yet.
    pub(crate) fn take_booking(&self) -> Option<Booking> {
        self.booking.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The worker, and the rank that the leg is pinned to.
    pub(crate) fn target(&self) -> Target<'_> {
        Target { worker: &self.worker, rank: self.rank }
    }

    /// The headers of a leg to this worker: pinned to the chosen rank, unless they name a rank
    /// already.
    pub(crate) fn pinned(&self, leg_headers: &LegHeaders) -> LegHeaders {
        let rank = leg_headers.rank.or(self.rank.map(u32::from));
        LegHeaders { rank, ..leg_headers.clone() }
    }

    /// Whether the engine's count of cached tokens should equal the count of the index. It need not
    /// if the engine may run the leg on any of several ranks.
    pub(crate) fn is_comparable(&self) -> bool {
        let anywhere = self.rank.is_none() && self.worker.ranks.are_chosen_by_the_engine();
        self.is_believed && !anywhere && !self.has_fetched
    }

    /// Records that the leg reads the blocks that the worker lacks of this many leading ones.
    pub(crate) fn reads(&mut self, blocks: u32, block_size: u32) {
        let tokens = blocks.saturating_sub(self.speculative_blocks).saturating_mul(block_size);
        self.read_tokens = tokens.into();
        self.speculative_blocks = self.speculative_blocks.max(blocks);
    }

    /// Records that the worker holds this many leading blocks after a peer fetch, as it has
    /// confirmed itself.
    pub(crate) fn received(&mut self, blocks: u32, block_size: u32, outcome: PeerFetchOutcome) {
        // The worker's engine may drop the last block of a hit. Then it does not use this block, although
        // the source has sent it.
        let dropped = u32::from(self.worker.kv.last_block.is_dropped());
        self.overlap_otherwise = blocks.saturating_sub(1 - dropped);
        self.recomputed_tokens = outcome.recomputed_tokens().saturating_sub(dropped * block_size);
        let blocks = blocks.saturating_sub(dropped);
        let more = blocks.saturating_sub(self.overlap_blocks);
        self.has_fetched = true;
        self.fetched_blocks = if outcome == PeerFetchOutcome::Shared { 0 } else { more };
        self.overlap_blocks += more;
        self.overlap_by_tier[Tier::Device as usize] += more;
        self.believed_blocks = self.believed_blocks.max(blocks);
        self.speculative_blocks = self.speculative_blocks.max(blocks);
    }

    /// The number of prompt tokens that the worker will have to compute, for its booking. Tokens of
    /// speculative blocks are not counted, because they are cached or about to be cached.
    pub(crate) fn uncached_tokens(&self, context: &Context, unit: &Unit) -> u64 {
        let block_size = u64::from(context.served.pool.block_size());
        unit.weight_tokens.saturating_sub(u64::from(self.speculative_blocks) * block_size)
    }

    /// Books the leg, which computes its prompt. `observes_prefill_end` says whether the router will
    /// see when the prefill ends; only then is the cost model trained with the duration.
    pub(crate) fn book(
        &self,
        context: &Context,
        unit: &Unit,
        now: Instant,
        observes_prefill_end: bool,
    ) -> Booking {
        let booking = self.take_booking().unwrap_or_else(|| {
            let uncached = self.uncached_tokens(context, unit);
            let cached = unit.weight_tokens - uncached;
            let costs = &self.worker.load.costs;
            let work = costs.begin(now, self.rank, uncached, cached, !observes_prefill_end);
            let work = work.loading(self.overlap_by_tier, context.served.pool.block_size());
            let work = work.reading(self.read_tokens);
            self.worker.book(self.rank, uncached, unit.weight_tokens).with_work(work)
        });
        // The weight of a recording says nothing about its duration, nor its duration about prefills.
        if unit.recording.is_some() { booking.without_teaching() } else { booking }
    }

    /// The predicted time from the sending of the leg to its first output, in which it computes
    /// `new_tokens` of the prompt, behind what the worker has to do already.
    pub(crate) fn predicted_time(&self, unit: &Unit, new_tokens: u64) -> Duration {
        let (now, load) = (Instant::now(), &self.worker.load);
        let requests = u64::from(load.booked.requests());
        let own = load.costs.leg_times(now, new_tokens, unit.weight_tokens, requests).first;
        let wait_ns = load.costs.seen(now, RankScope::Rank(self.rank), 0).wait_ns;
        own + Duration::from_nanos(wait_ns)
    }

    /// What the router expects of the leg: length, overlap, and whether the engine's count of cached
    /// tokens can be compared with the index.
    pub(crate) fn expectation(&self, context: &Context, unit: &Unit) -> Expectation {
        let bypasses_cache = context.options.bypasses_cache.is_some();
        let tokens_known = unit.prompt_tokens.is_some();
        // An engine reports the cached tokens of the last sample, which finds the blocks that the
        // first sample computed. So the count of several samples cannot be compared.
        let several_samples = context.options.samples > 1;
        let indexed = self.is_comparable();
        Expectation {
            prompt_tokens: unit.prompt_tokens,
            overlap: Overlap { blocks: self.overlap_blocks, by_tier: self.overlap_by_tier },
            blocks_otherwise: self.overlap_otherwise,
            overlap_is_upper_bound: self.worker.overlap_is_upper_bound(),
            fetched_blocks: self.fetched_blocks,
            recomputed_tokens: self.recomputed_tokens,
            block_size: context.served.pool.block_size(),
            bypasses_cache,
            several_samples,
            comparable: tokens_known && indexed && !several_samples && !bypasses_cache,
            epoch: self.worker.kv.usage_stats.epoch(),
            events: self.worker.kv.event_stats.now().events,
        }
    }
}

/// When a leg that reads KV from another worker must have ended.
#[derive(Clone, Copy)]
pub(crate) struct ReadDeadline {
    pub(crate) at: tokio::time::Instant,
    /// The key of the configuration that it follows from.
    pub(crate) key: &'static str,
}

/// Which workers a leg may be placed on.
#[derive(Clone, Copy)]
pub(crate) struct LegRules<'a> {
    pub(crate) leg: Leg,
    /// Workers that must not be chosen.
    pub(crate) excluded: &'a [Exclusion],
    /// The number of leading blocks that the worker should hold; if no worker holds as many, only
    /// the workers that hold most are candidates.
    pub(crate) blocks: Option<u32>,
    /// Whether the worker may fetch a prefix from another worker first.
    pub(crate) may_fetch: bool,
    /// The number of leading blocks that the leg may read back; 0 if it reads nothing.
    pub(crate) readable_blocks: u32,
    /// Whether the leg itself may take a prefix from another worker (one shot).
    pub(crate) takes_prefix: bool,
    /// Where the worker is that hands over to a decode leg; `None` if the leg takes nothing over.
    pub(crate) from: Option<Location>,
}

impl<'a> LegRules<'a> {
    /// Any worker for a leg except the excluded workers.
    pub(crate) fn any(leg: Leg, excluded: &'a [Exclusion]) -> Self {
        Self {
            leg,
            excluded,
            blocks: None,
            may_fetch: false,
            readable_blocks: 0,
            takes_prefix: false,
            from: None,
        }
    }

    /// Any worker for a decode leg that takes its KV from this one, except the excluded workers.
    pub(crate) fn decode(from: &Worker, excluded: &'a [Exclusion]) -> Self {
        Self { from: Some(from.transfer.location), ..Self::any(Leg::Decode, excluded) }
    }

    /// The query for a pool's candidates, regardless of how many blocks the candidates hold.
    pub(crate) fn query(self, unit: &'a Unit, now: Instant) -> CandidateQuery<'a> {
        let Self { leg, excluded: exclusions, readable_blocks, takes_prefix, from, .. } = self;
        let (hashes, prompt_tokens) = (&unit.hashes, unit.weight_tokens);
        CandidateQuery {
            leg,
            hashes,
            prompt_tokens,
            exclusions,
            readable_blocks,
            takes_prefix,
            from,
            now,
        }
    }
}

/// A choice, with the candidates that it was made from.
#[derive(Clone, Copy)]
pub(crate) struct Pick<'a> {
    /// The workers of the model.
    pub(crate) roster: &'a Roster,
    /// The candidates that the policy was given.
    pub(crate) candidates: &'a [Candidate],
    /// The policy's choice among them.
    pub(crate) choice: &'a Choice,
}

/// The same point of time on two clocks.
#[derive(Clone, Copy)]
pub(crate) struct Moment {
    /// The monotonic clock, for intervals.
    pub(crate) instant: Instant,
    /// The calendar time, for records, in milliseconds since 1970.
    pub(crate) unix_ms: u64,
}

impl Moment {
    pub(crate) fn now() -> Self {
        Self { instant: Instant::now(), unix_ms: unix_ms() }
    }
}

/// Chooses a worker for a leg and records the reasons for the choice.
pub(crate) fn place(prompt: PromptContext<'_>, rules: LegRules<'_>) -> Result<PlacedLeg, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let leg = rules.leg;
    let ServedModel { config, pool, .. } = context.served.as_ref();
    let started = Instant::now();
    let roster = pool.roster();
    PICKING.with_borrow_mut(|(candidates, sources, choice)| {
        pool.list_candidates(&roster, rules.query(unit, started), candidates);
        list_sources(pool, &roster, unit, rules, started, sources);
        if let Some(blocks) = rules.blocks {
            holders(candidates, blocks);
        }
        let started = prompt.mark(Stage::Match);
        let query = query(pool, unit, leg, pool.next_turn(leg), pool.draw());
        if !choice.decide(&config.policy, candidates, sources, &query, 0) {
            let now = Moment { instant: started, unix_ms: unix_ms() };
            note_vetoed(decision, &roster, rules, candidates, now);
            let task = match leg {
                Leg::Prefill => "prefill",
                Leg::Decode => "decode",
                Leg::Aggregated => "prefill and decode",
            };
            let message = format!("model {} has no worker left to {task}", config.name);
            return Err(Error::new(ErrorKind::NoWorker, message));
        }
        let pick = Pick { roster: &roster, candidates, choice };
        let placed = record_choice(prompt, query, rules, pick, None);
        prompt.mark(Stage::Pick);
        placed
    })
}

/// Places a leg that computes its prompt. If the model has a queue, the leg waits for its turn.
/// `observes_prefill_end` says whether the router will see when the prefill ends.
pub(crate) async fn place_in_turn(
    prompt: PromptContext<'_>,
    rules: LegRules<'_>,
    observes_prefill_end: bool,
) -> Result<PlacedLeg, Error> {
    let PromptContext { context, unit, .. } = prompt;
    let ServedModel { config, pool, .. } = context.served.as_ref();
    // If no worker is up, there is no use in waiting.
    if config.queue.is_none() || !pool.any_up(rules.leg, rules.excluded) {
        return place(prompt, rules);
    }
    let query = query(pool, unit, rules.leg, pool.next_turn(rules.leg), pool.draw());
    let asked = PlacementRequest {
        leg: rules.leg,
        hashes: Arc::clone(&unit.hashes),
        excluded: rules.excluded.to_vec(),
        may_fetch: rules.may_fetch,
        readable_blocks: rules.readable_blocks,
        takes_prefix: rules.takes_prefix,
        query,
        observes_prefill_end,
        urgency: context.urgency,
    };
    let entered = || QueueWait(prompt);
    let granted = Box::pin(pool.waiting.wait(pool, &config.policy, asked, entered)).await;
    let GrantedPlace { roster, candidates, choice, booking } = match granted {
        Ok(granted) => granted,
        Err(no_room) => return refused(prompt, rules, no_room),
    };
    let pick = Pick { roster: &roster, candidates: &candidates, choice: &choice };
    let placed = record_choice(prompt, query, rules, pick, Some(booking));
    prompt.mark(Stage::Pick);
    placed
}

/// A prompt's wait in the queue. It is counted when this value is dropped: when the prompt gets a
/// worker, has waited for too long, or its client leaves.
struct QueueWait<'a>(PromptContext<'a>);

impl Drop for QueueWait<'_> {
    fn drop(&mut self) {
        self.0.mark(Stage::Admit);
    }
}

/// What becomes of a leg that the queue does not take, or does not keep.
fn refused(
    prompt: PromptContext<'_>,
    rules: LegRules<'_>,
    no_room: NoRoom,
) -> Result<PlacedLeg, Error> {
    let context = prompt.context;
    let name = context.served.name();
    let seconds = u32::try_from(no_room.retry_after_seconds).unwrap_or(u32::MAX);
    let (reason, message) = match no_room.reason {
        NoRoomReason::Late(ms) => {
            let message = format!(
                "model {name} is too busy for its goal: the first token would come after \
                 {:.1} s (queue.ttft_goal)",
                ms / 1e3
            );
            ("ttft_goal", message)
        }
        NoRoomReason::Full => {
            let message =
                format!("the queue of model {name} is full (queue.max_waiting); retry later");
            ("queue_full", message)
        }
        NoRoomReason::Waited(limit) => {
            let message = format!(
                "model {name} is too busy: the request has waited for {limit:?} (queue.max_wait)"
            );
            ("max_wait", message)
        }
        // As if it had not waited.
        NoRoomReason::NoWorker => return place(prompt, rules),
    };
    context.metrics.shed.with_label_values(&[name, reason]).inc();
    Err(Error::new(ErrorKind::Busy(seconds), message))
}

/// Records and counts a choice.
fn record_choice(
    prompt: PromptContext<'_>,
    query: Query,
    rules: LegRules<'_>,
    pick: Pick<'_>,
    booking: Option<Booking>,
) -> Result<PlacedLeg, Error> {
    let PromptContext { context, unit, .. } = prompt;
    let Pick { roster, candidates, choice } = pick;
    let leg = query.leg;
    let chosen = candidates[choice.index];
    let Some(worker) = roster.get(chosen.worker).map(Arc::clone) else {
        // This cannot happen: the candidates were taken from the same roster.
        return Err(Error::new(ErrorKind::Internal, "a candidate is not in its roster"));
    };
    let distance = rules.from.unwrap_or_default().distance(worker.transfer.location);
    record(prompt, query, rules, pick);
    if unit.unknown.is_none() || !unit.hashes.is_empty() {
        let fetched_blocks = choice.fetch().map_or(0, |fetch| fetch.blocks);
        let held_blocks = chosen.overlap_blocks.max(fetched_blocks);
        let lost = choice.best_overlap_blocks.saturating_sub(held_blocks);
        let LabelledSeries { model, series } = context.served.labelled_series();
        series.placed(&context.metrics, model, leg.name(), chosen.overlap_blocks, lost);
    }
    let Candidate { rank, overlap_blocks, overlap_by_tier, speculative_blocks, .. } = chosen;
    Ok(PlacedLeg {
        is_believed: worker.overlap_is_believed(rank),
        worker,
        rank,
        overlap_blocks,
        overlap_otherwise: chosen.overlap_otherwise,
        believed_blocks: chosen.believed_blocks(),
        speculative_blocks,
        overlap_by_tier,
        fetch: choice.fetch(),
        fetched_blocks: 0,
        read_tokens: 0,
        read_deadline: None,
        recomputed_tokens: 0,
        distance,
        has_fetched: false,
        booking: Mutex::new(booking),
    })
}

/// Replaces the contents of a list by the workers from which a leg's worker may fetch a prefix.
pub(crate) fn list_sources(
    pool: &Pool,
    roster: &Roster,
    unit: &Unit,
    rules: LegRules<'_>,
    now: Instant,
    sources: &mut Vec<Source>,
) {
    match rules.may_fetch {
        true => {
            pool.list_sources(roster, &unit.hashes, now, sources);
            let is_excluded = |source: &Source| {
                let mut others = rules.excluded.iter().filter(|one| is_about_adapters(one));
                others.any(|one| one.worker == source.worker)
            };
            sources.retain(|source| !is_excluded(source));
        }
        false => sources.clear(),
    }
}

/// The candidates for a leg at the time `now`.
pub(crate) fn candidates(
    pool: &Pool,
    roster: &Roster,
    unit: &Unit,
    rules: LegRules<'_>,
    now: Instant,
) -> Vec<Candidate> {
    let mut candidates = pool.candidates(roster, rules.query(unit, now));
    if let Some(blocks) = rules.blocks {
        holders(&mut candidates, blocks);
    }
    candidates
}

/// The policy's query for a leg, with a turn and a random draw for ties.
pub(crate) fn query(pool: &Pool, unit: &Unit, leg: Leg, turn: u64, draw: u64) -> Query {
    Query {
        leg,
        prompt_tokens: unit.weight_tokens,
        prompt_blocks: unit.hashes.len() as u32,
        block_size: pool.block_size(),
        turn,
        draw,
        sharing: pool.conversations.find(&unit.hashes),
    }
}

/// Enters a placed leg that is being sent in the speculative index: its worker is about to hold the
/// prompt's KV, so prompts with the same prefix can follow it.
pub(crate) fn record_sent_prompt(context: &Context, unit: &Unit, placed: &PlacedLeg) {
    // If all blocks are confirmed, no speculative entry is needed.
    if (placed.overlap_blocks as usize) < unit.hashes.len() {
        let index = &context.served.pool.speculative_index;
        index.sent(Instant::now(), &placed.worker, placed.rank, &unit.hashes);
    }
}

/// Enters in the speculative index that a leg has computed the prompt's KV on its worker.
pub(crate) fn record_computed_prompt(context: &Context, unit: &Unit, placed: &PlacedLeg) {
    if unit.hashes.is_empty() {
        return;
    }
    let index = &context.served.pool.speculative_index;
    index.computed(Instant::now(), &placed.worker, placed.rank, &unit.hashes);
}
