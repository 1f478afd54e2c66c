//! Why a leg that computes its prompt moves no KV: fetches nothing, takes nothing in one shot, or reads
//! nothing back. One reason each, the first that applies.

use std::time::Instant;

use serde::Serialize;
use splitrail_api::Endpoint;
use splitrail_api::request::Options;
use splitrail_config::model::PeerFetch;
use splitrail_fleet::peer_fetch::has_room;
use splitrail_fleet::{Roster, ServedModel, Worker};
use splitrail_policy::{Candidate, FetchPlan, Leg, Source};
use splitrail_workload::fetches::FetchBounds;

use crate::decide::fetchable::is_fetchable;
use crate::decide::place::query;
use crate::prepare::Unit;
use splitrail_transfer::pinned::{reads_back, reports_ids};

/// Engines compute fewer tokens than this instead of taking them.
const TAKEN_MIN_TOKENS: u64 = 64;

/// Why KV does not move. `docs/hand-offs.md` explains each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoTransfer {
    /// The configuration does not ask for it.
    Off,
    /// Its engines do not report the token ids of prompts on this endpoint.
    Endpoint,
    /// Only prefill legs can.
    Leg,
    /// The tokens of the prompt are not known exactly.
    TokensUnknown,
    /// The request bypasses the prefix cache.
    BypassesCache,
    /// An engine counted other tokens than the router: nothing is read in this model any more.
    Distrusted,
    /// Router and worker do not agree on tokens or blocks, or it lost too many.
    NotBelieved,
    /// The engine has not shown yet that it has `bidirectional_kv_xfer`.
    FlagUnknown,
    /// The engine has shown that it has no `bidirectional_kv_xfer`.
    FlagAbsent,
    /// So much of the worker's KV cache is in use that its engine might preempt the leg.
    CacheFull,
    /// With `auto`: no trial with the worker, or the other one, has succeeded yet.
    Untried,
    /// The worker, or the other one, has failed in it lately.
    Cooldown,
    /// As many fetches as there may be are running on the worker, or on the other one.
    Full,
    /// The engine chooses the data-parallel rank by itself, or its block size is not the model's.
    Ranks,
    /// No other worker holds more of the prompt.
    NoSource,
    /// A worker holds more, and takes no work now.
    SourceUnavailable,
    /// All workers that hold more are of other transfer groups.
    OtherTransferGroup,
    /// The engine that holds more stores KV in another data type, layout or block size.
    OtherKvFormat,
    /// No decode worker keeps more of the prompt: it was read, released, or its time is over.
    NothingKept,
    /// No decode worker keeps more of the prompt, and one keeps as many blocks as it may.
    PinsFull,
    /// The fetch would bring too few tokens.
    MinTokens,
    /// The leg reads back, and can take only one set of blocks.
    ReadsBack,
    /// The prompt is predicted to be computed too late for the lease of the source.
    Lease,
    /// Computing is predicted to be as cheap.
    Dearer,
}

/// A leg that computes its prompt, with the choice of its worker.
pub(super) struct ChosenLeg<'a> {
    pub(super) served: &'a ServedModel,
    pub(super) endpoint: Endpoint,
    pub(super) unit: &'a Unit,
    pub(super) options: Options,
    pub(super) leg: Leg,
    pub(super) roster: &'a Roster,
    pub(super) worker: &'a Worker,
    pub(super) seen: &'a Candidate,
    pub(super) plan: Option<FetchPlan>,
    pub(super) now: Instant,
}

impl ChosenLeg<'_> {
    /// Why nothing is fetched; `None` if something is. `sources` are the workers that can send.
    pub(super) fn fetch(&self, sources: &[Source]) -> Option<NoTransfer> {
        if self.plan.is_some() {
            return None;
        }
        let Self { served, endpoint, unit, options, worker, seen, .. } = self;
        let Some(bounds) = served.pool.fetch_bounds() else { return Some(NoTransfer::Off) };
        if options.bypasses_cache.is_some() {
            return Some(NoTransfer::BypassesCache);
        }
        if !is_fetchable(served, *endpoint, unit, *options) {
            return Some(NoTransfer::TokensUnknown);
        }
        if !seen.can_fetch {
            let fetches = &worker.transfer.fetches;
            let is_full = fetches.taking() >= bounds.max_per_worker;
            let is_allowed = fetches.may_take(bounds, self.now);
            return Some(if !has_room(worker, self.now) {
                NoTransfer::CacheFull
            } else if is_full {
                NoTransfer::Full
            } else if bounds.needs_trial && !fetches.has_taken() {
                NoTransfer::Untried
            } else if !is_allowed {
                NoTransfer::Cooldown
            } else {
                NoTransfer::Ranks
            });
        }
        let has_more =
            |source: &&Source| source.worker != worker.index && source.blocks > seen.held_blocks();
        let more: Vec<_> = sources.iter().filter(has_more).collect();
        if more.is_empty() {
            return Some(self.without_source(bounds));
        }
        if !more.iter().any(|source| source.kv_format.fits(seen.kv_format)) {
            let is_near = |source: &&Source| source.kv_format.is_of_group_of(seen.kv_format);
            return Some(match more.iter().any(is_near) {
                true => NoTransfer::OtherKvFormat,
                false => NoTransfer::OtherTransferGroup,
            });
        }
        let most = more.iter().map(|source| source.blocks).max().unwrap_or(0);
        let brought = self.tokens(most.saturating_sub(seen.believed_blocks()));
        let is_short = brought < u64::from(bounds.min_tokens);
        Some(if is_short { NoTransfer::MinTokens } else { NoTransfer::Dearer })
    }

    /// Why no worker can send more of the prompt than the chosen one holds.
    fn without_source(&self, bounds: FetchBounds) -> NoTransfer {
        let pool = &self.served.pool;
        let least = self.seen.held_blocks() as usize + 1;
        let Some(hashes) = self.unit.hashes.get(..least) else { return NoTransfer::NoSource };
        let holds = |worker: &&Worker| {
            let mut ranks = 0..worker.ranks.count();
            let pinned = worker.ranks.are_chosen_by_the_router();
            worker.index != self.worker.index
                && ranks.any(|rank| pool.holds(worker, pinned.then_some(rank), hashes))
        };
        let is_short = self.tokens(self.unit.hashes.len() as u32) < u64::from(bounds.min_tokens);
        let why = |holder: &Worker| {
            if !holder.state().takes_work() {
                NoTransfer::SourceUnavailable
            } else if holder.transfer.fetches.sending() >= bounds.max_per_worker {
                NoTransfer::Full
            } else if bounds.needs_trial && !holder.transfer.fetches.has_sent() {
                NoTransfer::Untried
            } else if !holder.transfer.fetches.may_send(bounds, self.now) {
                NoTransfer::Cooldown
            } else if is_short {
                NoTransfer::MinTokens
            } else {
                NoTransfer::SourceUnavailable
            }
        };
        let mut holders = self.roster.iter().map(|worker| &**worker).filter(holds).map(why);
        let Some(first) = holders.next() else { return NoTransfer::NoSource };
        // What a worker in service lacks says more than that another one is out of service.
        let is_telling = |why: &NoTransfer| *why != NoTransfer::SourceUnavailable;
        if is_telling(&first) { first } else { holders.find(is_telling).unwrap_or(first) }
    }

    /// Why a fetch takes two steps; `None` if it takes one shot, or there is none.
    pub(super) fn one_shot(&self) -> Option<NoTransfer> {
        let plan = self.plan.filter(|plan| !plan.one_shot)?;
        let Self { served, endpoint, unit, worker, .. } = self;
        let is_configured = served.config.peer_fetch == PeerFetch::OneShot;
        Some(if !is_configured {
            NoTransfer::Off
        } else if self.leg != Leg::Prefill {
            NoTransfer::Leg
        } else if !reports_ids(*endpoint) {
            NoTransfer::Endpoint
        } else if unit.unknown.is_some() {
            NoTransfer::TokensUnknown
        } else if served.pool.read_back.is_distrusted() {
            NoTransfer::Distrusted
        } else if let Some(why) = self.reader() {
            why
        } else if let Some(why) = flag(worker) {
            why
        } else if plan.tokens < TAKEN_MIN_TOKENS {
            NoTransfer::MinTokens
        } else if self.reads_behind(plan.blocks) {
            NoTransfer::ReadsBack
        } else {
            NoTransfer::Lease
        })
    }

    /// Whether the leg would read back KV that follows this number of leading blocks.
    fn reads_behind(&self, blocks: u32) -> bool {
        let query = query(&self.served.pool, self.unit, self.leg, 0, 0);
        self.seen.available_prefix(&query, blocks).read_tokens > 0
    }

    /// Why nothing is read back, by a leg that reads nothing; `readable_blocks` are those that it might.
    pub(super) fn read_back(&self, readable_blocks: u32) -> NoTransfer {
        let Self { served, endpoint, unit, options, worker, seen, .. } = self;
        if !served.config.read_back {
            return NoTransfer::Off;
        }
        if !reads_back(&served.config, *endpoint) {
            return NoTransfer::Endpoint;
        }
        if options.bypasses_cache.is_some() {
            return NoTransfer::BypassesCache;
        }
        if unit.unknown.is_some() {
            return NoTransfer::TokensUnknown;
        }
        if served.pool.read_back.is_distrusted() {
            return NoTransfer::Distrusted;
        }
        if let Some(why) = self.reader() {
            return why;
        }
        let prompt = unit.hashes.get(..readable_blocks as usize).unwrap_or_default();
        if let Some(found) = served.pool.read_back.find(self.now, prompt, worker) {
            let more = (found.blocks as u32).saturating_sub(seen.held_blocks());
            let is_short = self.tokens(more) < TAKEN_MIN_TOKENS;
            return if is_short { NoTransfer::MinTokens } else { NoTransfer::Dearer };
        }
        self.without_pin()
    }

    /// Why no decode worker keeps more of the prompt.
    fn without_pin(&self) -> NoTransfer {
        let decoders = self.roster.iter().filter(|worker| worker.serves(Leg::Decode));
        let flags: Vec<_> = decoders
            .clone()
            .map(|worker| worker.transfer.read_back.keeps_for_read_back())
            .collect();
        if !flags.contains(&Some(true)) {
            let is_known = flags.iter().all(|flag| *flag == Some(false));
            return if is_known { NoTransfer::FlagAbsent } else { NoTransfer::FlagUnknown };
        }
        let block_tokens = self.tokens(1).max(1);
        let prompt_blocks = self.unit.weight_tokens.div_ceil(block_tokens);
        let is_full = |worker: &Worker| {
            let pinned = self.served.pool.read_back.pinned_blocks(worker.index);
            pinned + prompt_blocks > splitrail_fleet::read_back::blocks_max(self.served, worker)
        };
        match decoders.clone().any(|worker| is_full(worker)) {
            true => NoTransfer::PinsFull,
            false => NoTransfer::NothingKept,
        }
    }

    /// Why the chosen worker reads nothing from others.
    fn reader(&self) -> Option<NoTransfer> {
        if !self.worker.takes_part_in_kv_routing() {
            return Some(NoTransfer::NotBelieved);
        }
        if !has_room(self.worker, self.now) {
            return Some(NoTransfer::CacheFull);
        }
        (!self.worker.transfer.read_back.may_read(self.now)).then_some(NoTransfer::Cooldown)
    }

    fn tokens(&self, blocks: u32) -> u64 {
        u64::from(blocks) * u64::from(self.served.pool.block_size())
    }
}

/// Why an engine cannot be given a leg that takes a prefix.
fn flag(worker: &Worker) -> Option<NoTransfer> {
    match worker.transfer.read_back.keeps_for_read_back() {
        None => Some(NoTransfer::FlagUnknown),
        Some(false) => Some(NoTransfer::FlagAbsent),
        Some(true) => None,
    }
}
