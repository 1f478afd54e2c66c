//! Peer fetch: before a leg that computes its prompt, its worker takes leading blocks of the prompt
//! from another worker that holds them, instead of computing them.
//!
//! It has two steps, both requests of the router's own for one token. The source is asked for the
//! prefix and one more token as if for a prefill leg: it computes that token and replies with a
//! hand-off. The worker gets the same prompt with that hand-off as if for a decode leg, and then
//! holds the prefix. The leg finds it in the worker's own cache. With one shot, a prefill leg itself
//! carries the hand-off, cut to whole blocks, in the place of the second step. Whatever fails, the leg
//! computes what the worker does not hold: a fetch never fails a request.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;
use tokio::time::{Instant as TokioInstant, timeout_at};

use crate::context::PromptContext;
use crate::decide::place::{PlacedLeg, fetch_choice};
use crate::run::leg_headers::leg_headers;
use splitrail_fleet::Worker;
use splitrail_fleet::peer_fetch::takes_prefixes;
use splitrail_ledger::decisions::FetchRecord;
use splitrail_ledger::timeline::Stage;
use splitrail_policy::{FetchPlan, nanoseconds};
use splitrail_transfer::peer_fetch::{Asker, PeerFetchOutcome, Steps, Workers};
use splitrail_workload::costs::RankScope;
use splitrail_workload::fetches::{FetchBooking, FetchBounds, Prefix};

mod one_shot;

pub(crate) use one_shot::OneShot;
use one_shot::OneShotHandOff;

/// Runs the fetch that was chosen together with the worker of a leg, if there is one. After a fetch
/// that failed, no further attempt of the leg may fetch. Returns what the leg is to take itself, if it
/// is to, which needs a leg that may take a prefix.
pub(crate) async fn fetch_planned<'a>(
    prompt: PromptContext<'a>,
    placed: &mut PlacedLeg,
    may_fetch: &mut bool,
) -> Option<Box<OneShot<'a>>> {
    let plan = placed.fetch.take()?;
    Box::pin(fetch_first(prompt, placed, plan, may_fetch)).await
}

async fn fetch_first<'a>(
    prompt: PromptContext<'a>,
    placed: &mut PlacedLeg,
    plan: FetchPlan,
    may_fetch: &mut bool,
) -> Option<Box<OneShot<'a>>> {
    let mut fetching = Fetching::begin(prompt, placed, plan)?;
    // Other requests see that the worker has work. The time of the fetch is not taken for computing.
    let (rank, weight_tokens) = (placed.rank, prompt.unit.weight_tokens);
    let rest_tokens = weight_tokens.saturating_sub(fetching.plan.tokens);
    let room = placed.take_booking();
    let booking = room.unwrap_or_else(|| placed.worker.book(rank, rest_tokens, weight_tokens));
    let step = fetching.run().await;
    drop(booking);
    prompt.mark(Stage::PeerFetch);
    let outcome = match step {
        Ok(FetchBeforeLeg::Given(offer)) => {
            *may_fetch = false;
            placed.recomputed_tokens = offer.recomputed_tokens();
            return Some(Box::new(OneShot::new(fetching, *offer)));
        }
        Ok(FetchBeforeLeg::Ended(outcome)) | Err(outcome) => outcome,
    };
    fetching.outcome = outcome;
    *may_fetch = outcome.has_blocks();
    if outcome.has_blocks() {
        let block_size = prompt.context.served.pool.block_size();
        placed.received(fetching.prefix.blocks, block_size, outcome);
    }
    None
}

/// What was done for a fetch before the leg.
enum FetchBeforeLeg {
    /// All of it.
    Ended(PeerFetchOutcome),
    /// The source has given a hand-off, which the leg carries.
    Given(Box<OneShotHandOff>),
}

/// A fetch under way. A fetch that is dropped before it has an outcome was cancelled.
struct Fetching<'a> {
    prompt: PromptContext<'a>,
    /// What was planned; its way is the one that is used.
    plan: FetchPlan,
    bounds: FetchBounds,
    prefix: Prefix,
    fetcher: Arc<Worker>,
    begun: Instant,
    /// By when the requests before the leg must have ended.
    deadline: TokioInstant,
    outcome: PeerFetchOutcome,
}

impl<'a> Fetching<'a> {
    /// `None` if the fetch would bring less than it must.
    fn begin(prompt: PromptContext<'a>, placed: &PlacedLeg, plan: FetchPlan) -> Option<Self> {
        let PromptContext { context, unit, .. } = prompt;
        let pool = &context.served.pool;
        let (bounds, block_size) = (pool.fetch_bounds()?, pool.block_size());
        // The last token of a prompt is always computed, so its block is of no use if it is full.
        let blocks = plan.blocks.min(unit.prompt_tokens?.checked_sub(1)? / block_size.max(1));
        let last = *unit.hashes.get(blocks.checked_sub(1)? as usize)?;
        let brought_blocks = blocks.saturating_sub(placed.believed_blocks);
        let brought_tokens = u64::from(brought_blocks) * u64::from(block_size);
        (brought_tokens >= u64::from(bounds.min_tokens)).then(|| Self {
            prompt,
            plan,
            bounds,
            prefix: Prefix { rank: placed.rank, blocks, last },
            fetcher: Arc::clone(&placed.worker),
            begun: Instant::now(),
            deadline: TokioInstant::now() + context.served.config.timeouts.peer_fetch,
            outcome: PeerFetchOutcome::Cancelled,
        })
    }

    async fn run(&mut self) -> Result<FetchBeforeLeg, PeerFetchOutcome> {
        let mut has_waited = false;
        while let Some(arriving) = self.fetcher.transfer.fetches.arriving(self.prefix) {
            if let Some(outcome) = self.wait_for(arriving).await {
                return Ok(FetchBeforeLeg::Ended(outcome));
            }
            has_waited = true;
        }
        if has_waited && self.have_failed() {
            return Err(PeerFetchOutcome::Failed);
        }
        self.fetch().await
    }

    /// Waits for another request's fetch of the same prefix. `None` if that request ends without the
    /// prefix: its fetch failed, or its client left. Then one of those who wait fetches in its place.
    async fn wait_for(&self, mut arriving: watch::Receiver<bool>) -> Option<PeerFetchOutcome> {
        let arrived = arriving.wait_for(|has_arrived| *has_arrived);
        match timeout_at(self.deadline, arrived).await {
            Ok(arrived) => arrived.is_ok().then_some(PeerFetchOutcome::Shared),
            Err(_) => Some(PeerFetchOutcome::TimedOut),
        }
    }

    /// Whether one of the workers has failed in a fetch lately.
    fn have_failed(&self) -> bool {
        let roster = self.prompt.context.served.pool.roster();
        let (fetcher, now) = (&self.fetcher.transfer.fetches, Instant::now());
        roster
            .get(self.plan.source)
            .is_none_or(|source| source.transfer.fetches.failed_with(fetcher, now))
    }

    async fn fetch(&mut self) -> Result<FetchBeforeLeg, PeerFetchOutcome> {
        let PromptContext { context, unit, .. } = self.prompt;
        let pool = &context.served.pool;
        let roster = pool.roster();
        let source = roster.get(self.plan.source).ok_or(PeerFetchOutcome::Gone)?;
        let hashes = &unit.hashes[..self.prefix.blocks as usize];
        if !pool.holds(source, self.plan.rank, hashes) {
            return Err(PeerFetchOutcome::Gone);
        }
        let costs = self.fetcher.load.costs.seen(self.begun, RankScope::Rank(None), 0).coefficients;
        let transfer_ns = nanoseconds(costs.fetch_link_seconds(self.plan.tokens));
        let booking = FetchBooking::begin(
            &source.transfer.fetches,
            &self.fetcher.transfer.fetches,
            self.prefix,
            self.bounds,
            transfer_ns,
        );
        let booking = booking.ok_or(PeerFetchOutcome::Full)?;
        let was_idle = booking.is_alone() && source.load.booked.prefill_tokens() == 0;
        // The booking keeps others from computing the ids of the same prefix.
        let ids = context.preparer.prompt_ids(&context.served, context.endpoint, unit);
        let ids = timeout_at(self.deadline, ids).await.map_err(|_| PeerFetchOutcome::TimedOut)?;
        let ids = ids.ok_or(PeerFetchOutcome::Unusable)?;
        // The engine may be another process by now.
        self.plan.one_shot &= takes_prefixes(&self.fetcher, Instant::now());
        let workers = Workers { source, source_rank: self.plan.rank, fetcher: &self.fetcher };
        let (served, metrics) = (&context.served, &context.metrics);
        let (body, memory) = (&unit.body, Some(&context.memory));
        let asker = Asker { served, metrics, body, memory, leg_headers: leg_headers(context) };
        let steps = Steps::new(asker, &booking, workers, self.prefix, self.deadline);
        let sent = Instant::now();
        let given = steps.give(&ids.ids).await?;
        if self.plan.one_shot {
            let source = Arc::clone(source);
            let offer = OneShotHandOff::new(booking, source, given, self.prefix, pool.block_size());
            return offer.map(|offer| FetchBeforeLeg::Given(Box::new(offer)));
        }
        let outcome = steps.take(given).await?;
        booking.arrived();
        if was_idle && booking.is_alone() && outcome == PeerFetchOutcome::Fetched {
            let took_seconds = sent.elapsed().as_secs_f64();
            self.fetcher.load.costs.learn_fetch(Instant::now(), self.plan.tokens, took_seconds);
        }
        Ok(FetchBeforeLeg::Ended(outcome))
    }
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        let PromptContext { context, decision, .. } = self.prompt;
        let outcome = self.outcome.name();
        let labels = [context.served.name(), self.plan.way(), outcome];
        context.metrics.peer_fetches.with_label_values(&labels).inc();
        let plan = FetchPlan { blocks: self.prefix.blocks, ..self.plan };
        decision.fetch_ended(FetchRecord {
            worker: self.fetcher.id().into(),
            choice: fetch_choice(&context.served.pool.roster(), plan),
            outcome,
            took_ms: self.begun.elapsed().as_secs_f64() * 1e3,
        });
    }
}
