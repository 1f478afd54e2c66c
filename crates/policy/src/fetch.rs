//! Fetching a prefix: from which worker a candidate would take leading blocks that it lacks, and
//! whether that is cheaper than computing them.
//!
//! ```text
//! ready       max(source's wait, candidate's link) + base + tokens x bytes_per_token / bandwidth
//! fetch       what of `ready` the candidate's wait does not hide
//! copy        0.6 x the computing that the fetch replaces + the transfer
//! cost        wait + fetch + prefill(the rest) + price x (work(the rest) + fetch) + copy
//! ```
//!
//! **One shot.** Where a prefill leg can take the prefix itself, there is one request less, which is half
//! of the base. An engine loads what a waiting leg takes while it computes other prompts, as it does for
//! the request that the leg replaces. So one shot is planned wherever it is possible.
//!
//! A candidate computes the rest of the prompt behind the blocks that it has fetched, so with each
//! further block the cost falls faster: of one source either all blocks are worth fetching or none.
//! The exception is the wait. What arrives while the candidate waits costs no time, so the blocks
//! that do are examined as well; that is the better part where links are slow.
//!
//! **The price of a fetch.** A worker that waits for blocks computes nothing, so the part of a fetch
//! that its wait does not hide delays later requests as work does. Without that, fetches over slow
//! links (3 GB/s) made requests wait longer than none at all.
//!
//! **The price of a copy.** What is fetched is held twice, and takes the place of other blocks that
//! are computed again later. How many depends on the caches: on the public conversation trace,
//! 0.3 to 0.75 of the replaced computing gave the same times to first token where caches are large
//! (10,000 blocks); where they are small (2,000 blocks), 0.5 to 0.6 gave the best ones.
//! The transfer takes time of two links from others. It counts once: links are idle most of the
//! time, and a link that is not is known by its wait.

use serde::Serialize;

use crate::candidate::{Candidate, Query};
use crate::index::WorkerIndex;
use crate::kv_format::KvFormat;
use crate::predicted::{Common, ComputeTimes, CostTerms, ms};
use crate::read_back::READ_MIN_TOKENS;

/// The most sources that a decision examines for each candidate.
const SOURCES_MAX: usize = 8;
/// The share of the replaced computing that the copies of blocks cost later requests.
const COPY_RATIO: f64 = 0.6;
/// A fetch must save at least this share of the computing that it replaces, because a prediction is
/// not more exact.
pub(crate) const MARGIN_RATIO: f64 = 0.1;

/// A worker, or one of its ranks, that can hand leading blocks of the prompt to another worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Source {
    /// The worker's number in the roster of its model.
    pub worker: WorkerIndex,
    /// The data-parallel rank that holds the blocks; `None` if the worker has one rank.
    pub rank: Option<u16>,
    /// Leading blocks of the prompt that the worker holds, confirmed by its events and without the
    /// share that does not count because of drift.
    pub blocks: u32,
    /// The predicted time until the worker can begin to send: earlier transfers on its outgoing
    /// link, and what delays the request that asks it to send, as the loading of blocks that it holds
    /// in slower tiers. A worker that does is a source for each of its tiers.
    pub wait_ns: u64,
    /// How the worker's engine stores KV.
    pub kv_format: KvFormat,
}

/// A fetch that makes a candidate cheaper.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FetchPlan {
    /// The worker that sends the blocks.
    pub source: WorkerIndex,
    /// The rank of that worker.
    pub rank: Option<u16>,
    /// The number of leading blocks that the candidate holds after the fetch. They are more than
    /// it holds now, and at most as many as the source holds.
    pub blocks: u32,
    /// The number of tokens that are sent: what the candidate does not hold now.
    pub tokens: u64,
    /// The predicted time in milliseconds from the decision until the blocks are there.
    pub ready_ms: f64,
    /// Whether the leg takes the blocks by itself.
    pub one_shot: bool,
}

impl FetchPlan {
    /// The way of the fetch, as in metrics and records.
    pub fn way(&self) -> &'static str {
        if self.one_shot { "one_shot" } else { "two_step" }
    }
}

/// The sources of a decision that no other source surpasses in blocks and in wait. Bounded by
/// [`SOURCES_MAX`].
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BestSources(Vec<Source>);

impl BestSources {
    /// Replaces the sources.
    pub(crate) fn select(&mut self, sources: &[Source]) {
        self.0.clear();
        let surpasses = |one: &Source, other: &Source| {
            let is_alike = one.kv_format == other.kv_format;
            is_alike && one.blocks >= other.blocks && one.wait_ns <= other.wait_ns
        };
        for source in sources.iter().filter(|source| source.blocks > 0) {
            if self.0.iter().any(|known| surpasses(known, source)) {
                continue;
            }
            self.0.retain(|known| !surpasses(source, known));
            self.0.push(*source);
            if self.0.len() > SOURCES_MAX {
                let fewest = (0..self.0.len()).min_by_key(|i| self.0[*i].blocks);
                fewest.map(|i| self.0.swap_remove(i));
            }
        }
    }

    /// The fetch that saves a candidate most, and its terms with that fetch. `None` if computing is
    /// cheaper. `without` are the terms without a fetch, `price` is that of extra work.
    pub(crate) fn plan(
        &self,
        candidate: &Candidate,
        query: &Query,
        without: &CostTerms,
        common: &Common,
        price: f64,
    ) -> Option<(FetchPlan, CostTerms)> {
        let mut best: Option<(f64, FetchPlan, CostTerms)> = None;
        for (source, whole) in self.whole(candidate, query) {
            let hidden = hidden_blocks(candidate, source, query, without.wait_ms);
            let hidden = hidden.filter(|hidden| *hidden < whole.blocks);
            let hidden = hidden.and_then(|hidden| fetch_of(candidate, source, hidden, query));
            for plan in [Some(whole), hidden].into_iter().flatten() {
                let (plan, terms) = fetched(candidate, plan, query, without, common);
                let computed_ms = without.prefill_ms - terms.prefill_ms + without.read_ms
                    - terms.read_ms
                    + price * (without.extra_work_ms - terms.extra_work_ms);
                let gain_ms = computed_ms * (1.0 - MARGIN_RATIO) - terms.fetch_ms - terms.copy_ms;
                if gain_ms > best.as_ref().map_or(0.0, |(most_ms, ..)| *most_ms) {
                    best = Some((gain_ms, plan, terms));
                }
            }
        }
        best.map(|(_, plan, terms)| (plan, terms))
    }

    /// The fetches of all that a source holds, for a candidate that can fetch and lacks some of it.
    pub(crate) fn whole<'a>(
        &'a self,
        candidate: &'a Candidate,
        query: &'a Query,
    ) -> impl Iterator<Item = (&'a Source, FetchPlan)> {
        let sources = if candidate.can_fetch { &self.0[..] } else { &[] };
        sources.iter().filter_map(|source| {
            let blocks = source.blocks.min(query.prompt_blocks);
            fetch_of(candidate, source, blocks, query).map(|plan| (source, plan))
        })
    }
}

/// The fetch of `blocks` leading blocks; `None` if the candidate has them or stores KV otherwise, or if
/// it would bring less than it must.
fn fetch_of(
    candidate: &Candidate,
    source: &Source,
    blocks: u32,
    query: &Query,
) -> Option<FetchPlan> {
    let is_strange = !source.kv_format.fits(candidate.kv_format);
    if is_strange || source.worker == candidate.worker || blocks <= candidate.held_blocks() {
        return None;
    }
    let cached = query.cached_tokens(blocks);
    let tokens = cached - query.cached_tokens(candidate.believed_blocks()).min(cached);
    let begins_ms = source.wait_ns.max(candidate.link_wait_ns) as f64 / 1e6;
    let ready_ms = begins_ms + ms(candidate.coefficients.fetch_seconds(tokens));
    let plan = FetchPlan {
        source: source.worker,
        rank: source.rank,
        blocks,
        tokens,
        ready_ms,
        one_shot: false,
    };
    (tokens >= u64::from(candidate.fetch_min_tokens)).then_some(plan)
}

/// The price of the copies that a fetch makes in milliseconds, if it replaces `replaced_ms` of
/// computing.
pub(crate) fn copy_ms(candidate: &Candidate, plan: &FetchPlan, replaced_ms: f64) -> f64 {
    COPY_RATIO * replaced_ms + ms(candidate.coefficients.fetch_link_seconds(plan.tokens))
}

/// A fetch in the best possible way, and the terms of the candidate with it.
fn fetched(
    candidate: &Candidate,
    plan: FetchPlan,
    query: &Query,
    without: &CostTerms,
    common: &Common,
) -> (FetchPlan, CostTerms) {
    let times = ComputeTimes::of(candidate, query, plan.blocks, &common.usual);
    let ComputeTimes { read_ms, prefill_ms, .. } = times;
    let unshared = common.unshared(candidate, query, plan.blocks, times);
    let work_ms = unshared.work_ms;
    let copy_ms = copy_ms(candidate, &plan, without.extra_work_ms - work_ms);
    let with = |plan: FetchPlan| {
        let fetch_ms = (plan.ready_ms - without.wait_ms).max(0.0);
        // Of the fetch, the shared blocks are credited as those are that are computed.
        let held = candidate.held_blocks();
        let shared_ratio = f64::from(common.shared_blocks.min(plan.blocks).saturating_sub(held))
            / f64::from((plan.blocks - held).max(1));
        let extra_work_ms = work_ms + fetch_ms * (1.0 - shared_ratio);
        let shared_credit_ms = times.own_ms() - unshared.own_ms() + fetch_ms * shared_ratio;
        let resume_credit_ms = 0.0;
        (
            plan,
            CostTerms {
                fetch_ms,
                read_ms,
                prefill_ms,
                extra_work_ms,
                copy_ms,
                shared_credit_ms,
                resume_credit_ms,
                ..*without
            },
        )
    };
    // A leg that takes a prefix cannot read anything back, and an engine computes short prefixes.
    let is_possible = plan.tokens >= READ_MIN_TOKENS && read_ms == 0.0;
    let base_ms = ms(candidate.coefficients.fetch_base_seconds);
    let taken = FetchPlan { ready_ms: plan.ready_ms - base_ms / 2.0, one_shot: true, ..plan };
    let taken = is_possible.then(|| with(taken)).filter(|(_, terms)| {
        let done_ms = CostTerms { hand_off_ms: 0.0, ..*terms }.ttft_ms();
        done_ms * 1e6 < candidate.one_shot_within_ns as f64
    });
    taken.unwrap_or_else(|| with(plan))
}

/// The number of leading blocks that a candidate would hold if it fetched what arrives while it
/// waits; `None` if nothing does.
fn hidden_blocks(
    candidate: &Candidate,
    source: &Source,
    query: &Query,
    wait_ms: f64,
) -> Option<u32> {
    let costs = &candidate.coefficients;
    let begins_ns = source.wait_ns.max(candidate.link_wait_ns);
    let left_seconds = wait_ms / 1e3 - begins_ns as f64 / 1e9 - costs.fetch_base_seconds;
    let block_seconds = costs.fetch_link_seconds(u64::from(query.block_size));
    let blocks = left_seconds / block_seconds;
    (blocks >= 1.0).then(|| candidate.believed_blocks().saturating_add(blocks as u32))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
