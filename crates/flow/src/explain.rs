//! Explains how a request would be served: makes every decision for it and executes none of them.
//!
//! The functions are the same that serve traffic, in the same order, on the same snapshot. Nothing
//! is booked, counted or sent. The result contains counts, hashes and names, and no content.

use std::time::Instant;

use serde::Serialize;

use crate::decide::adapter_holders::{is_about_adapters, lacking_adapter};
use crate::decide::context_length::{PREFILL_OUTPUT_TOKENS, too_short};
use crate::decide::fetchable::is_fetchable;
use crate::decide::gate::{GateDecision, Need};
use crate::decide::place::{LegRules, Moment, Pick, candidates, list_sources, query};
use crate::decide::plan::{Facts, LocalReason, NextLegs, Plan, plan};
use crate::decide::supporting_workers;
use crate::decide::weigh::{PrefillComparison, is_open, learned_ratio, prefill_rules, weigh};
use crate::prepare::{PreparedRequest, Unit};
use crate::run::decode_try::{Holder, decide_gate, hit_ratio};
use crate::run::read_back::readable;
use splitrail_api::Endpoint;
use splitrail_api::error::Error;
use splitrail_api::request::Options;
use splitrail_api::steering::Steering;
use splitrail_config::model::{KvPath, Model, OnNoPrefill, Policy, RequestFlow};
use splitrail_fleet::ServedModel;
use splitrail_fleet::{Exclusion, Roster, Worker};
use splitrail_ledger::decisions::CandidateRecord;
use splitrail_ledger::decisions::WeighedRecord;
use splitrail_ledger::leg::ReadBackOffer;
use splitrail_policy::{Candidate, CandidateIndex, Choice, FetchPlan, Leg, pick};
use splitrail_transfer::lease::usable;
use splitrail_transfer::participants::{
    excluded_from_decode, excluded_from_prefill, none_hands_over, without_hand_offs,
};

mod condition;
mod no_transfer;

pub use condition::{Condition, Veto};
use no_transfer::ChosenLeg;
pub use no_transfer::NoTransfer;

/// The explanation of one request.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The model's configured name.
    pub model: String,
    /// The endpoint of the request.
    pub endpoint: &'static str,
    /// The flow that the client or the model's configuration asks for.
    pub flow_asked: &'static str,
    /// The policy that chooses workers.
    pub policy: Policy,
    /// The unit of the policy's costs.
    pub cost_unit: &'static str,
    /// The prompts of the request, without further samples.
    pub prompts: Vec<PromptExplained>,
}

/// The explanation of one prompt.
#[derive(Clone, Debug, Serialize)]
pub struct PromptExplained {
    /// The position of the prompt in the batch, from 0.
    pub prompt_index: usize,
    /// The length of the prompt in tokens; `None` if the router does not know its tokens.
    pub prompt_tokens: Option<u32>,
    /// Why the tokens are not known, or not all of them.
    pub prompt_unknown: Option<&'static str>,
    /// The number of full blocks whose hashes are known.
    pub prompt_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// The root of the chain of block hashes, in hexadecimal. It is equal only for prompts with
    /// equal salt, model, adapter and block size.
    pub namespace: String,
    /// The flow that the prompt would take, as far as the router decides it.
    pub flow: &'static str,
    /// Why the prompt of a P/D model would be computed by the worker that decodes it.
    pub local_reason: Option<&'static str>,
    /// The predicted costs that `auto` compares.
    pub auto: Option<WeighedRecord>,
    /// The gate of the decode-first step, if there is one.
    pub gate: Option<GateExplained>,
    /// What the prefill worker would read back from a decode worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_back: Option<ReadBackOffer>,
    /// Why the prefill worker would read nothing back, if the model reads back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_read_back: Option<NoTransfer>,
    /// The choices of workers, in the order in which they would be made.
    pub steps: Vec<ExplainedStep>,
    /// Why the request cannot be served, or where its explanation ends.
    pub stops: Option<String>,
}

/// The decision whether a decode worker serves the prompt alone.
#[derive(Clone, Debug, Serialize)]
pub struct GateExplained {
    /// The share of the prompt that must be cached, from 0 to 1.
    pub cache_hit_threshold: f64,
    /// The same in blocks; `None` if the prompt's tokens are not known.
    pub needed_blocks: Option<u32>,
    /// The number of blocks that count on the chosen worker.
    pub believed_blocks: u32,
    /// The share of the prompt, from 0 to 1, that this worker has cached according to the index;
    /// `None` if the index is not trusted for it or the prompt's tokens are not known.
    pub cache_hit_ratio: Option<f64>,
    /// The gate that would decide: `engine`, `shim` or `router`.
    pub who: &'static str,
    /// `enough`, `asked` (the engine or shim decides when it gets the request),
    /// `too_little` or `unknown`.
    pub verdict: &'static str,
}

/// One choice of a worker.
#[derive(Clone, Debug, Serialize)]
pub struct ExplainedStep {
    /// `decode_try`, `prefill`, `decode` or `reply`.
    pub step: &'static str,
    /// The leg that is placed.
    pub leg: &'static str,
    /// The id of the chosen worker; `None` if there was no candidate.
    pub chosen: Option<String>,
    /// The data-parallel rank of the chosen worker, if the leg is pinned to one.
    pub chosen_rank: Option<u16>,
    /// The id of the worker that would have been chosen otherwise.
    pub runner_up: Option<String>,
    /// The data-parallel rank of the runner-up.
    pub runner_up_rank: Option<u16>,
    /// The cost of the runner-up minus the cost of the chosen worker. Negative if the policy does
    /// not choose by cost alone.
    pub margin: Option<f64>,
    /// Why the chosen worker would fetch nothing, if the model fetches and the leg computes a prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_fetch: Option<NoTransfer>,
    /// Why its fetch would take two steps, if the model fetches in one shot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_one_shot: Option<NoTransfer>,
    /// All candidates, the cheapest first.
    pub candidates: Vec<CandidateRecord>,
    /// The other workers of the model, with the reasons for which they are no candidates.
    pub vetoed: Vec<Veto>,
    /// How reliable the index is for each candidate.
    pub conditions: Vec<Condition>,
}

/// Explains a request that was prepared in the same way as a request that is served.
///
/// # Errors
/// If the model does not allow the requested flow.
pub fn explain(prepared: &PreparedRequest, steering: Steering) -> Result<Explanation, Error> {
    let served = &prepared.served;
    let flow = steering.flow_for(&served.config)?;
    let threshold = prepared.threshold.or(steering.threshold);
    let endpoint = prepared.endpoint;
    let flow = if endpoint.generates() { flow } else { RequestFlow::Aggregated };
    let prompts = prepared.units.iter().filter(|unit| !unit.further_sample).map(|unit| {
        if !endpoint.generates() {
            return Explainer::new(prepared, unit).auxiliary();
        }
        let open = is_open(served, flow, threshold);
        let remote = || prefill_rules(served, endpoint, unit, prepared.options);
        let auto = open.then(|| weigh(served, unit, remote(), false));
        let facts = Facts {
            flow,
            threshold,
            learned: open.then(|| learned_ratio(served)),
            remote_pays: auto.and_then(|weighed| weighed.remote_pays()),
            prompt_tokens: unit.prompt_tokens,
            options: prepared.options,
            context_tokens: served.pool.context_tokens(),
            no_hand_off: none_hands_over(served, endpoint, Instant::now()),
        };
        Explainer::new(prepared, unit).go(plan(&served.config, facts), auto)
    });
    Ok(Explanation {
        model: served.name().to_owned(),
        endpoint: prepared.endpoint.name(),
        flow_asked: flow.name(),
        policy: served.config.policy.clone(),
        cost_unit: served.config.policy.cost_unit(),
        prompts: prompts.collect(),
    })
}

/// The state of the explanation of one prompt.
struct Explainer<'a> {
    served: &'a ServedModel,
    endpoint: Endpoint,
    options: Options,
    unit: &'a Unit,
    roster: std::sync::Arc<Roster>,
    /// The workers that return no hand-offs for the endpoint.
    missing: Vec<Exclusion>,
    /// The workers whose context is too short for the prompt and its reply, or that lack its adapter.
    unable: Vec<Exclusion>,
    explained: PromptExplained,
}

impl<'a> Explainer<'a> {
    fn new(prepared: &'a PreparedRequest, unit: &'a Unit) -> Self {
        let PreparedRequest { served, endpoint, options, .. } = prepared;
        let explained = PromptExplained {
            prompt_index: unit.prompt_index,
            prompt_tokens: unit.prompt_tokens,
            prompt_unknown: unit.unknown,
            prompt_blocks: unit.hashes.len() as u32,
            block_size: served.pool.block_size(),
            namespace: format!("{:016x}", unit.namespace.0),
            flow: "",
            local_reason: None,
            auto: None,
            gate: None,
            read_back: None,
            no_read_back: None,
            steps: Vec::new(),
            stops: None,
        };
        let missing = without_hand_offs(served, *endpoint, Instant::now());
        let mut unable = match endpoint.generates() {
            true => too_short(served, Leg::Decode, unit, options.output.least_tokens()),
            false => Vec::new(),
        };
        unable.extend(lacking_adapter(served, &unit.body));
        if endpoint.generates() {
            let lacking = supporting_workers::lacking_endpoint(served, *endpoint, Instant::now());
            unable.extend(lacking.unwrap_or_default());
        }
        let (endpoint, options) = (*endpoint, *options);
        let roster = served.pool.roster();
        Self { served, endpoint, options, unit, roster, missing, unable, explained }
    }

    fn go(mut self, plan: Plan, auto: Option<PrefillComparison>) -> PromptExplained {
        self.explained.auto = auto.map(|weighed| weighed.record(self.served));
        self.explained.flow = plan.name();
        let serves = plan.gate.is_some_and(|threshold| self.decode_try(threshold, plan.then));
        if !serves {
            self.then(plan.then);
        }
        self.explained
    }

    /// Explains a request of an auxiliary endpoint, which one worker serves.
    fn auxiliary(mut self) -> PromptExplained {
        self.explained.flow = RequestFlow::Aggregated.name();
        let now = Instant::now();
        let unable = &self.unable;
        match supporting_workers::leg_for_endpoint(self.served, self.endpoint, unable, now) {
            Ok((leg, mut excluded)) => {
                excluded.extend(unable);
                self.step("reply", LegRules::any(leg, &excluded));
            }
            Err(error) => self.explained.stops = Some(error.message().to_owned()),
        }
        self.explained
    }

    /// Explains the decode-first step. True if a decode worker certainly serves the prompt alone,
    /// or if the explanation ends here.
    fn decode_try(&mut self, threshold: f64, then: NextLegs) -> bool {
        let need = Need::new(threshold, self.unit.prompt_tokens, self.served.pool.block_size());
        let may_fetch = then != NextLegs::ThresholdReply && self.may_fetch();
        let excluded = self.unable.clone();
        let alone = LegRules::any(Leg::Aggregated, &excluded);
        let rules = LegRules { blocks: need.blocks, may_fetch, ..alone };
        let Some(chosen) = self.step("decode_try", rules) else { return true };
        let Some(worker) = self.roster.get(chosen.worker) else { return true };
        let held = chosen.believed_blocks();
        let holder = Holder { worker, rank: chosen.rank, believed_blocks: held };
        let (gate, gate_decision) =
            decide_gate(&self.served.config, self.endpoint, self.unit, holder, &need);
        self.explained.gate = Some(GateExplained {
            cache_hit_threshold: threshold,
            needed_blocks: need.blocks,
            believed_blocks: held,
            cache_hit_ratio: hit_ratio(self.unit, holder, self.served.pool.block_size()),
            who: gate.name(),
            verdict: match gate_decision {
                GateDecision::Enough(_) => "enough",
                GateDecision::Ask(_) => "asked",
                GateDecision::TooLittle => "too_little",
                GateDecision::Unknown => "unknown",
            },
        });
        matches!(gate_decision, GateDecision::Enough(_))
    }

    fn then(&mut self, then: NextLegs) {
        let pool = &self.served.pool;
        match then {
            NextLegs::ThresholdReply => {
                self.explained.stops = Some("the client is told `cache_threshold`".into())
            }
            NextLegs::Aggregated(reason) => self.alone(Leg::Aggregated, reason),
            NextLegs::OnPrefill if pool.any_up(Leg::Prefill, &self.unable) => {
                self.alone(Leg::Prefill, Some(LocalReason::OneToken));
            }
            NextLegs::OnPrefill => self.without(LocalReason::NoPrefill),
            NextLegs::PrefillFirst if !pool.any_up(Leg::Decode, &self.unable) => {
                self.without(LocalReason::NoDecode);
            }
            NextLegs::PrefillFirst => self.both(),
        }
    }

    fn both(&mut self) {
        let pool = &self.served.pool;
        let mut excluded = excluded_from_prefill(self.served, &self.unable);
        excluded.extend(too_short(self.served, Leg::Prefill, self.unit, PREFILL_OUTPUT_TOKENS));
        excluded.extend(&self.missing);
        excluded.extend(self.unable.iter().filter(|one| is_about_adapters(one)));
        if !pool.any_up(Leg::Prefill, &excluded) {
            return self.without(LocalReason::NoPrefill);
        }
        let rules = prefill_rules(self.served, self.endpoint, self.unit, self.options);
        let rules = LegRules { excluded: &excluded, ..rules };
        let Some(prefill) = self.step("prefill", rules) else { return };
        self.explain_read_back(&prefill, rules.readable_blocks);
        let Some(worker) = self.roster.get(prefill.worker) else { return };
        let mut excluded = self.unable.clone();
        excluded.extend(excluded_from_decode(self.served, worker));
        let late = self.too_late();
        if pool.any_up(Leg::Decode, &[&excluded[..], &late].concat()) {
            excluded.extend(late);
        }
        self.step("decode", LegRules::decode(worker, &excluded));
    }

    /// What the prefill leg would read back, or why nothing.
    fn explain_read_back(&mut self, prefill: &Candidate, readable_blocks: u32) {
        self.explained.read_back = self.read_back(prefill, readable_blocks);
        if self.explained.read_back.is_some() {
            return;
        }
        let Some(worker) = self.roster.get(prefill.worker) else { return };
        let chosen = self.chosen(Leg::Prefill, worker, prefill, None, Instant::now());
        let why = chosen.read_back(readable_blocks);
        self.explained.no_read_back = (why != NoTransfer::Off).then_some(why);
    }

    fn chosen<'b>(
        &'b self,
        leg: Leg,
        worker: &'b Worker,
        seen: &'b Candidate,
        plan: Option<FetchPlan>,
        now: Instant,
    ) -> ChosenLeg<'b> {
        let Self { served, endpoint, unit, options, roster, .. } = self;
        let (endpoint, options) = (*endpoint, *options);
        ChosenLeg { served, endpoint, unit, options, leg, roster, worker, seen, plan, now }
    }

    /// What the prefill leg would read back.
    fn read_back(&self, prefill: &Candidate, readable_blocks: u32) -> Option<ReadBackOffer> {
        let reader = self.roster.get(prefill.worker)?;
        let held = prefill.speculative_blocks;
        let found = readable(self.served, self.unit, reader, held, readable_blocks)?;
        let worker = self.roster.get(found.holder)?.id().into();
        let tokens = found.blocks as u32 * self.served.pool.block_size();
        Some(ReadBackOffer { worker, tokens })
    }

    /// Decode workers whose queue takes longer than the lease of a hand-off made now.
    fn too_late(&self) -> Vec<Exclusion> {
        let Model { connector, lease, .. } = &self.served.config;
        match connector.kv_path() {
            KvPath::Pulled => self.served.pool.workers_too_late(usable(*lease), Instant::now()),
            KvPath::None | KvPath::Stored | KvPath::Pushed | KvPath::Matched => Vec::new(),
        }
    }

    fn alone(&mut self, leg: Leg, reason: Option<LocalReason>) {
        self.explained.local_reason = reason.map(LocalReason::name);
        let may_fetch = self.may_fetch();
        let excluded = self.unable.clone();
        self.step("reply", LegRules { may_fetch, ..LegRules::any(leg, &excluded) });
    }

    /// Whether the worker that computes the prompt may fetch a part of it.
    fn may_fetch(&self) -> bool {
        is_fetchable(self.served, self.endpoint, self.unit, self.options)
    }

    fn without(&mut self, reason: LocalReason) {
        let Model { on_no_prefill, name, .. } = &self.served.config;
        if *on_no_prefill == OnNoPrefill::Fail {
            let what = if reason == LocalReason::NoDecode { "decode" } else { "prefill" };
            self.explained.stops = Some(format!("model {name} has no {what} worker that is up"));
            return;
        }
        self.explained.flow = "aggregated";
        self.alone(Leg::Aggregated, Some(reason));
    }

    /// Makes a choice and records it; `None` if there are no candidates.
    fn step(&mut self, name: &'static str, rules: LegRules<'_>) -> Option<Candidate> {
        let now = Moment::now();
        let pool = &self.served.pool;
        let seen = candidates(pool, &self.roster, self.unit, rules, now.instant);
        // An explanation draws its own random bits for ties and does not advance the turn of
        // `round_robin`.
        let query = query(pool, self.unit, rules.leg, pool.turn(rules.leg), rand::random());
        let mut sources = Vec::new();
        list_sources(pool, &self.roster, self.unit, rules, now.instant, &mut sources);
        let choice = pick(&self.served.config.policy, &seen, &sources, query);
        let mut step = ExplainedStep {
            step: name,
            leg: rules.leg.name(),
            chosen: None,
            chosen_rank: None,
            runner_up: None,
            runner_up_rank: None,
            margin: None,
            no_fetch: None,
            no_one_shot: None,
            candidates: Vec::new(),
            vetoed: condition::vetoed(&self.roster, rules, &seen, now.instant),
            conditions: condition::of(&self.roster, &seen),
        };
        let chosen = choice.map(|choice| {
            let pick = Pick { roster: &self.roster, candidates: &seen, choice: &choice };
            step.chosen = Some(pick.worker_id(choice.index).to_owned());
            step.chosen_rank = seen[choice.index].rank;
            step.runner_up = choice.runner_up.map(|i| pick.worker_id(i).to_owned());
            step.runner_up_rank = choice.runner_up.and_then(|i| seen[i].rank);
            step.margin = choice.runner_up.map(|_| choice.margin);
            let order = order(&choice).into_iter();
            step.candidates = order.map(|i| pick.record(rules.leg, i, now)).collect();
            if let Some(worker) = self.roster.get(seen[choice.index].worker)
                && rules.leg != Leg::Decode
            {
                let plan = choice.fetch();
                let chosen = self.chosen(rules.leg, worker, &seen[choice.index], plan, now.instant);
                let has = |why: &NoTransfer| *why != NoTransfer::Off;
                step.no_fetch = chosen.fetch(&sources).filter(has);
                step.no_one_shot = chosen.one_shot().filter(has);
            }
            let fetched_blocks = choice.fetch().map_or(0, |fetch| fetch.blocks);
            let seen = seen[choice.index];
            Candidate { speculative_blocks: seen.speculative_blocks.max(fetched_blocks), ..seen }
        });
        if chosen.is_none() {
            self.explained.stops =
                Some(format!("no worker is left for {} ({name})", rules.leg.name()));
        }
        self.explained.steps.push(step);
        chosen
    }
}

/// The candidates, the cheapest first.
fn order(choice: &Choice) -> Vec<CandidateIndex> {
    let mut order: Vec<_> = CandidateIndex::all(choice.costs.len()).collect();
    order.sort_by(|a, b| choice.costs[*a].total_cmp(&choice.costs[*b]));
    order
}
