//! Predicts the cost of a choice in milliseconds, term by term.
//!
//! ```text
//! prefill leg     wait + fetch + read + load + prefill + hand-off(prompt) + delay of other requests
//! aggregated      wait + fetch + load + prefill + step                    + delay of other requests
//! decode leg      wait + load + hand-off(what it lacks) + step
//! delay           price x (work - least work) + copy + room + later turns - credits
//! ```
//!
//! `prefill` is the time for the tokens that the worker will not hold when it begins this prompt:
//! blocks of queued requests count as present. `step` is the first decode step. `work` is the same
//! prefill on the fleet's usual worker: a slow worker costs more time for its own request, but
//! takes nothing from other requests, which would lose if it were idle. `fetch` is 0 unless the
//! worker takes leading blocks from another worker; `prefill` and `work` are then those of the rest,
//! and `copy` is the price of holding the blocks twice (`fetch.rs`). The same holds for `read`, what
//! the worker reads back from a decode worker (`read_back.rs`). `load` is for blocks that the worker
//! holds in slower tiers (`load.rs`).
//!
//! **The price of extra work.** Computing on one worker what another worker holds delays all later
//! requests. Their number follows from the load: a server that is busy for the share `rho` of its
//! time catches up with an extra millisecond only after `1 / (1 - rho)` milliseconds, and all
//! requests that arrive in that time wait a millisecond longer. Requests that already wait for any
//! worker are delayed as well: with `q` of them for `n` workers, and half of those on a worker
//! after this one, `q / 2n`. On an idle fleet the price is 1, and prompts are spread. On a busy
//! fleet the price is higher, and prompts go to the workers that hold their prefix. The maximum is
//! 10: with a higher price, a few queued hits would keep a worker from being used at all.
//!
//! **Shared prefixes.** A prefix that many conversations have, such as a system prompt, is needed on
//! each worker that serves some of them. What computing or fetching it costs is paid once there, and
//! saved by each conversation that comes later. So it is credited: the choice is made as if each
//! candidate held the prefix, and conversations spread. A prefix counts as shared if it has more
//! conversations than [`CONVERSATIONS_PER_COPY`] for each copy that exists, or than there are workers.
//!
//! **Later turns.** A conversation comes back to the worker that holds its history. What its later
//! prompts will have to compute is therefore charged at the worker's own load: `1 / (1 - rho)`, less
//! the 1 of an idle worker.
//!
//! **Room.** A block that is computed takes the place of another one if the cache is full. So a part of
//! the time to compute what the worker lacks, apart from shared blocks, is charged, times the share of
//! its cache that has blocks: caches fill evenly, even where one worker seems a little faster than
//! another. To charge exactly what would be evicted made placement better only with the engine's own
//! order of eviction, which events do not tell; `docs/policies.md` has the figures.

use serde::Serialize;
use splitrail_kv::{PromptSharing, SharedPrefix};

use crate::candidate::{Candidate, Leg, Query, RESUME_CREDIT};
use crate::coefficients::Coefficients;
use crate::load::load_seconds;

/// Maximum of the price of extra work.
const PRICE_MAX: f64 = 10.0;

/// The terms of one candidate's cost, in milliseconds. Their sum, less the credits, is the cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CostTerms {
    /// The wait until the worker can begin: for earlier prompts, or for room in its KV cache.
    pub wait_ms: f64,
    /// The time by which the blocks that the worker fetches from another worker arrive later than
    /// it could begin; 0 without a fetch.
    pub fetch_ms: f64,
    /// The time to read back what a decode worker keeps; 0 if the worker reads nothing.
    pub read_ms: f64,
    /// The time to load the blocks that the worker holds in slower tiers.
    pub load_ms: f64,
    /// The time to compute the part of the prompt that the worker neither holds nor fetches or reads.
    pub prefill_ms: f64,
    /// The time to transfer the KV to the worker that generates the reply.
    pub hand_off_ms: f64,
    /// The first decode step, together with the other requests of the worker.
    pub step_ms: f64,
    /// The delay of later requests because another worker would have less to compute.
    pub extra_work_ms: f64,
    /// The delay of later requests because fetched blocks take the place of others and use links; 0
    /// without a fetch.
    pub copy_ms: f64,
    /// The delay of other requests because new blocks take the place of theirs.
    pub room_ms: f64,
    /// The delay of other requests by the later turns of the conversation, which will come to the same
    /// worker.
    pub later_turns_ms: f64,
    /// What computing and fetching a prefix costs that many conversations have: a further copy of it
    /// pays. It is subtracted.
    pub shared_credit_ms: f64,
    /// What later requests save because this one stores a resume point that the worker lacks. It is
    /// subtracted.
    #[serde(skip_serializing_if = "is_zero")]
    pub resume_credit_ms: f64,
}

fn is_zero(ms: &f64) -> bool {
    *ms == 0.0
}

impl CostTerms {
    /// The cost.
    pub fn total_ms(&self) -> f64 {
        let delay_ms = self.extra_work_ms + self.copy_ms + self.room_ms + self.later_turns_ms;
        self.ttft_ms() + delay_ms - self.shared_credit_ms - self.resume_credit_ms
    }

    /// The predicted time to the first token, as far as this leg takes part in it.
    pub fn ttft_ms(&self) -> f64 {
        let before_ms = self.wait_ms + self.fetch_ms + self.read_ms + self.load_ms;
        before_ms + self.prefill_ms + self.hand_off_ms + self.step_ms
    }
}

/// How many conversations a copy of a shared prefix serves before a further copy pays, as long as some
/// workers have none.
const CONVERSATIONS_PER_COPY: usize = 8;

/// What a block that takes the place of another one costs, relative to computing it. On recorded coding
/// agents, 0.2 to 0.4 gave the same times to first token within their noise, and 0 and 1 worse ones.
const ROOM_PRICE: f64 = 0.3;

/// The number of later requests that an extra millisecond of prefill delays, computed from the
/// workers' load and the requests that wait for any worker (`waiting_here`) or on a worker.
pub fn extra_work_price(candidates: &[Candidate], waiting_here: usize) -> f64 {
    let mut load = Load::default();
    candidates.iter().filter(|candidate| candidate.up).for_each(|candidate| load.add(candidate));
    load.price(waiting_here)
}

/// The inputs of the price, summed over the workers that are up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    busy: f64,
    waiting: u64,
    workers: u32,
}

impl Load {
    pub(crate) fn add(&mut self, candidate: &Candidate) {
        self.busy += candidate.busy_share.clamp(0.0, 1.0);
        self.waiting += u64::from(candidate.waiting);
        self.workers += 1;
    }

    pub(crate) fn price(&self, waiting_here: usize) -> f64 {
        if self.workers == 0 {
            return 1.0;
        }
        let workers = f64::from(self.workers);
        let waiting = self.waiting as f64 + waiting_here as f64;
        (load_price(self.busy / workers) + waiting / (2.0 * workers)).min(PRICE_MAX)
    }
}

/// The part of the price that follows from the share of time in which workers compute prompts.
fn load_price(busy_share: f64) -> f64 {
    1.0 / (1.0 - busy_share).max(1.0 / PRICE_MAX)
}

/// What is the same for all candidates of a decision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common {
    /// The coefficients of the fleet's usual worker.
    pub(crate) usual: Coefficients,
    /// The number of leading blocks that count as shared.
    pub(crate) shared_blocks: u32,
    /// The time to compute the rest on the usual worker.
    unshared_ms: f64,
    /// The time that the later turns of the conversation take on the usual worker.
    later_ms: f64,
}

impl Common {
    /// For a prompt without any sharing, on workers that are as fast as this one.
    pub(crate) fn alone(usual: Coefficients) -> Self {
        Self { usual, shared_blocks: 0, unshared_ms: 0.0, later_ms: 0.0 }
    }

    /// For a prompt of which the candidates hold so many blocks each.
    pub(crate) fn of(
        query: &Query,
        usual: Coefficients,
        held_blocks: impl Iterator<Item = u32> + Clone,
    ) -> Self {
        let shared_blocks = shared_blocks(&query.sharing, held_blocks);
        let cached = query.cached_tokens(shared_blocks);
        let later_tokens = query.sharing.later_blocks * f64::from(query.block_size);
        Self {
            usual,
            shared_blocks,
            unshared_ms: ms(usual.prefill_seconds(query.prompt_tokens, cached)),
            later_ms: ms(later_tokens * usual.prefill_seconds_per_token),
        }
    }

    /// What a candidate would have to do if it held the shared blocks; `times` are for the blocks that
    /// it holds, or would hold after a fetch.
    #[inline(always)]
    pub(crate) fn unshared(
        &self,
        candidate: &Candidate,
        query: &Query,
        held_blocks: u32,
        times: ComputeTimes,
    ) -> ComputeTimes {
        if self.shared_blocks <= held_blocks {
            return times;
        }
        if candidate.readable_blocks == 0
            && candidate.coefficients.prefill() == self.usual.prefill()
        {
            let prefill_ms = self.unshared_ms;
            return ComputeTimes { read_ms: 0.0, prefill_ms, work_ms: prefill_ms };
        }
        ComputeTimes::of(candidate, query, self.shared_blocks, &self.usual)
    }
}

/// The number of leading blocks that count as shared, because a further copy of them pays; at most as
/// many as one of the candidates holds. Each candidate is given by the number of blocks that it holds.
fn shared_blocks(sharing: &PromptSharing, held_blocks: impl Iterator<Item = u32> + Clone) -> u32 {
    if sharing.prefixes().next().is_none() {
        return 0;
    }
    let (workers, most) =
        held_blocks.clone().fold((0, 0), |(workers, most), held| (workers + 1, held.max(most)));
    let is_shared = |prefix: &SharedPrefix| {
        let copies = held_blocks.clone().filter(|held| *held >= prefix.blocks.min(most)).count();
        prefix.conversations as usize > workers.min(copies * CONVERSATIONS_PER_COPY)
    };
    sharing.prefixes().find(is_shared).map_or(0, |prefix| prefix.blocks.min(most))
}

/// All terms of a candidate. `extra_work_ms` is the whole work here, without that for the shared
/// blocks, because the least work of all candidates is not known yet, and `resume_credit_ms` is that of
/// this request alone.
pub(crate) fn terms(candidate: &Candidate, query: &Query, common: &Common) -> CostTerms {
    let costs = &candidate.coefficients;
    let lacking_blocks = query.prompt_blocks.saturating_sub(candidate.believed_blocks());
    let needed_tokens = u64::from(lacking_blocks) * u64::from(query.block_size);
    let wait_for_room_ms = ms(candidate.kv_room.wait_seconds(needed_tokens));
    let wait_ms = wait_ms(candidate, query.leg).max(wait_for_room_ms);
    let load_ms = ms(load_seconds(candidate, query));
    let step_ms = || {
        let context = candidate.active_tokens.saturating_add(query.prompt_tokens);
        ms(costs.step_seconds(u64::from(candidate.requests) + 1, context))
    };
    if query.leg == Leg::Decode {
        let held = u64::from(candidate.believed_blocks()) * u64::from(query.block_size);
        let lacking = query.prompt_tokens.saturating_sub(held);
        let hand_off_ms = ms(costs.hand_off_seconds(lacking));
        // What is loaded need not be handed over, and never takes longer.
        let handed_over_ms = ms(costs.hand_off_link_seconds(query.prompt_tokens - lacking));
        let load_ms = load_ms.min(handed_over_ms);
        return CostTerms {
            wait_ms,
            load_ms,
            hand_off_ms,
            step_ms: step_ms(),
            ..CostTerms::default()
        };
    }
    let held = candidate.held_blocks();
    let times = ComputeTimes::of(candidate, query, held, &common.usual);
    let ComputeTimes { read_ms, prefill_ms, .. } = times;
    let unshared = common.unshared(candidate, query, held, times);
    let resume_credit_ms = match candidate.unresumable_blocks() {
        0 => 0.0,
        more => {
            let resumed = candidate.held_blocks() + more;
            let resumed = ComputeTimes::of(candidate, query, resumed, &common.usual);
            RESUME_CREDIT * (prefill_ms - resumed.prefill_ms).max(0.0)
        }
    };
    let (hand_off_ms, step_ms) = if query.leg == Leg::Prefill {
        (ms(costs.hand_off_seconds(query.prompt_tokens)), 0.0)
    } else {
        (0.0, step_ms())
    };
    CostTerms {
        wait_ms,
        fetch_ms: 0.0,
        read_ms,
        load_ms,
        prefill_ms,
        hand_off_ms,
        step_ms,
        extra_work_ms: unshared.work_ms,
        copy_ms: 0.0,
        room_ms: ROOM_PRICE * candidate.cache_fill * unshared.work_ms,
        later_turns_ms: common.later_ms * (load_price(candidate.busy_share) - 1.0),
        shared_credit_ms: times.own_ms() - unshared.own_ms(),
        resume_credit_ms,
    }
}

/// What a candidate has to do for a prompt of which it holds some leading blocks.
#[derive(Clone, Copy)]
pub(crate) struct ComputeTimes {
    pub(crate) read_ms: f64,
    pub(crate) prefill_ms: f64,
    /// The same prefill on the usual worker, and the read.
    pub(crate) work_ms: f64,
}

impl ComputeTimes {
    #[inline]
    pub(crate) fn of(
        candidate: &Candidate,
        query: &Query,
        held_blocks: u32,
        usual: &Coefficients,
    ) -> Self {
        let costs = &candidate.coefficients;
        let available_prefix = candidate.available_prefix(query, held_blocks);
        let cached = query.cached_tokens(available_prefix.blocks);
        let read_ms = ms(available_prefix.read_seconds);
        let prefill_ms = ms(costs.prefill_seconds(query.prompt_tokens, cached));
        let work_ms = if costs.prefill() == usual.prefill() {
            prefill_ms
        } else {
            ms(usual.prefill_seconds(query.prompt_tokens, cached))
        };
        Self { read_ms, prefill_ms, work_ms: work_ms + read_ms }
    }

    /// The time of the request itself.
    pub(crate) fn own_ms(self) -> f64 {
        self.read_ms + self.prefill_ms
    }
}

/// The wait until the candidate can begin. Without a predicted wait it is estimated from the queued
/// tokens. A decode leg waits for prompts only if its worker predicts a wait.
fn wait_ms(candidate: &Candidate, leg: Leg) -> f64 {
    if candidate.wait_ns > 0 || leg == Leg::Decode {
        return candidate.wait_ns as f64 / 1e6;
    }
    let queued = candidate.prefill_tokens as f64;
    ms(queued * candidate.coefficients.prefill_seconds_per_token)
}

pub(crate) fn ms(seconds: f64) -> f64 {
    seconds * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candidate::KvRoom;

    fn query(leg: Leg) -> Query {
        Query {
            leg,
            prompt_tokens: 12_000,
            prompt_blocks: 23,
            block_size: 512,
            turn: 0,
            draw: 0,
            sharing: PromptSharing::default(),
        }
    }

    #[test]
    fn each_leg_has_the_terms_of_what_it_does() {
        let (idle, usual) =
            (Candidate { up: true, ..Candidate::default() }, Coefficients::default());
        let prefill = terms(&idle, &query(Leg::Prefill), &Common::alone(usual));
        assert!((prefill.prefill_ms - 1195.6).abs() < 1e-6, "{prefill:?}");
        // 5 ms and 12,000 x 327,680 bytes at 100 GB/s.
        assert!((prefill.hand_off_ms - 44.3216).abs() < 1e-6, "{prefill:?}");
        let decode = Candidate { requests: 9, active_tokens: 88_000, ..idle };
        let decode = terms(&decode, &query(Leg::Decode), &Common::alone(usual));
        // 15 ms, 10 x 0.1 ms, 100,000 x 30 ns.
        assert!((decode.step_ms - 19.0).abs() < 1e-6, "{decode:?}");
        assert!(decode.prefill_ms == 0.0 && decode.hand_off_ms == prefill.hand_off_ms);
        let both = terms(&idle, &query(Leg::Aggregated), &Common::alone(usual));
        assert!(both.hand_off_ms == 0.0 && both.prefill_ms == prefill.prefill_ms);
        assert!(both.step_ms > 15.0);
    }

    #[test]
    fn a_worker_without_room_for_the_prompt_waits_until_running_requests_end() {
        let kv_room = KvRoom { free_tokens: 2_000, used_tokens: 20_000, kept_seconds: 4.0 };
        let full = Candidate { up: true, kv_room, ..Candidate::default() };
        let usual = Coefficients::default();
        let wait_ms =
            |candidate| terms(&candidate, &query(Leg::Decode), &Common::alone(usual)).wait_ms;
        // Of 23 blocks of 512 tokens it lacks room for 9,776 tokens, about half of what is in use.
        assert!((wait_ms(full) - 1_955.2).abs() < 1e-6, "{}", wait_ms(full));
        let holds_most = Candidate { overlap_blocks: 20, ..full };
        assert_eq!(wait_ms(holds_most), 0.0);
        assert_eq!(wait_ms(Candidate::default()), 0.0, "nothing is known of its room");
        let tiny = KvRoom { used_tokens: 10, ..kv_room };
        assert_eq!(wait_ms(Candidate { kv_room: tiny, ..full }), 4_000.0);
    }

    #[test]
    fn a_prefix_without_a_resume_point_saves_no_time_but_a_quarter_of_its_cost() {
        let usual = Coefficients::default();
        let of = |spine_blocks, overlap_blocks| {
            let held = Candidate { up: true, spine_blocks, overlap_blocks, ..Candidate::default() };
            terms(&held, &query(Leg::Aggregated), &Common::alone(usual))
        };
        let (cold, unresumable, held) = (of(0, 0), of(20, 0), of(20, 20));
        assert!((unresumable.ttft_ms() - cold.ttft_ms()).abs() < 1e-9);
        let saved = cold.total_ms() - held.total_ms();
        let credited = cold.total_ms() - unresumable.total_ms();
        // The work of later requests is weighed by the choice, and the credit with it.
        let work = cold.extra_work_ms - held.extra_work_ms;
        assert!((credited - RESUME_CREDIT * (saved - work)).abs() < 1e-6, "{credited} of {saved}");
        assert_eq!(held.resume_credit_ms, 0.0);
    }

    #[test]
    fn extra_work_is_cheap_on_an_idle_fleet_and_dear_on_a_busy_one() {
        let with = |busy_share, waiting| Candidate {
            up: true,
            busy_share,
            waiting,
            ..Candidate::default()
        };
        let down = Candidate { up: false, busy_share: 1.0, waiting: 99, ..Candidate::default() };
        assert_eq!(extra_work_price(&[with(0.0, 0), down], 0), 1.0);
        assert_eq!(extra_work_price(&[with(0.5, 0), with(1.0, 0)], 0), 4.0);
        assert_eq!(extra_work_price(&[with(0.5, 0), with(0.5, 1)], 3), 3.0);
        assert_eq!(extra_work_price(&[with(1.0, 50)], 50), PRICE_MAX);
        assert_eq!(extra_work_price(&[down], 7), 1.0);
    }
}
