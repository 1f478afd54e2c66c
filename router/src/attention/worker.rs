//! What needs attention of one worker.

use std::time::Instant;

use super::{Attention, AttentionKind};
use splitrail_api::Endpoint;
use splitrail_config::model::Role;
use splitrail_fleet::Worker;
use splitrail_fleet::parity::Parity;
use splitrail_fleet::state::WorkerState;
use splitrail_policy::Leg;
use splitrail_policy::learn::Slowdown;
use splitrail_workload::endpoint_support::{BASIC_ENDPOINTS, TOKENIZER};

/// From this factor on an operator should know of a slow worker. Hardware of one fleet differs by less.
const NOTABLE_SLOWDOWN: f64 = 3.0;

/// From this share on an engine's KV cache is full, if requests wait in the engine as well.
const FULL_KV_RATIO: f64 = 0.95;
/// The share of KV blocks in use from which waiting requests say that the cache is too small.
const SMALL_KV_RATIO: f64 = 0.5;

/// What is known of a worker.
#[derive(Debug)]
pub(super) struct WorkerFacts {
    pub(super) state: WorkerState,
    pub(super) state_why: String,
    pub(super) is_quarantined: bool,
    /// The legs whose circuit breaker is open, and that of the engine's tokenizer.
    pub(super) breakers_open: Vec<&'static str>,
    pub(super) last_failure: Option<String>,
    pub(super) parity: Parity,
    pub(super) takes_part_in_kv_routing: bool,
    /// Whether it has a source of KV events.
    pub(super) tells_blocks: bool,
    pub(super) events_are_current: bool,
    pub(super) index_is_truncated: bool,
    /// Why its part of the index was rebuilt several times within the last minutes.
    pub(super) index_rebuilt_often: Option<&'static str>,
    /// The paths of chats and completions, if its engine does not offer them.
    pub(super) missing_paths: Vec<&'static str>,
    /// Whether its engine has refused the last request because it is full.
    pub(super) refuses_because_full: bool,
    /// The share of the engine's KV blocks that is in use, and the requests that wait in the engine.
    pub(super) kv_used_ratio: Option<f64>,
    pub(super) engine_waiting: Option<u64>,
    /// Whether it serves decode legs only: these wait for a hand-off or for KV blocks.
    pub(super) only_decodes: bool,
    pub(super) engine_running: Option<u64>,
    pub(super) slowdown: Slowdown,
    /// Why its engine reports no load.
    pub(super) load_failure: Option<String>,
    /// Whether none of several replies said how much of the prompt was cached.
    pub(super) reports_no_cached_tokens: bool,
    /// The endpoints on which it hands nothing over.
    pub(super) missing_hand_offs: Vec<&'static str>,
    /// Whether decode workers have failed on its hand-offs.
    pub(super) has_failed_hand_offs: bool,
    /// Cache groups of its engine that the index does not follow.
    pub(super) unfollowed_cache_groups: Vec<String>,
}

impl WorkerFacts {
    pub(super) fn of(worker: &Worker) -> Self {
        let now = Instant::now();
        let load = worker.load(now);
        let load = load.as_ref();
        Self {
            state: worker.state(),
            state_why: worker.health.lifecycle.since().why,
            is_quarantined: worker.is_quarantined(),
            breakers_open: open_breakers(worker),
            last_failure: worker.health.last_failure(),
            parity: worker.kv.parity.parity(),
            takes_part_in_kv_routing: worker.takes_part_in_kv_routing(),
            tells_blocks: worker.tells_blocks(),
            events_are_current: worker.events_are_current(),
            index_is_truncated: worker.index_is_truncated(),
            index_rebuilt_often: worker.kv.event_stats.often_rebuilt(now),
            missing_paths: missing_paths(worker, now),
            refuses_because_full: worker.health.rest.is_full(),
            kv_used_ratio: load.and_then(|load| load.kv_used_ratio),
            engine_waiting: load.and_then(|load| load.waiting),
            only_decodes: worker.config.role == Role::Decode,
            engine_running: load.and_then(|load| load.running),
            slowdown: worker.load.costs.slowdown(),
            load_failure: worker.load_failure().map(|cause| cause.to_string()),
            reports_no_cached_tokens: worker.kv.usage_stats.reports_no_cached_tokens(),
            missing_hand_offs: worker.transfer.missing_hand_offs.missing(),
            has_failed_hand_offs: worker.transfer.failed_hand_offs.are_suspected(),
            unfollowed_cache_groups: worker.kv.event_stats.unfollowed_groups().names().collect(),
        }
    }
}

/// The paths of chats and completions, if the engine of a worker has said that it lacks them.
fn missing_paths(worker: &Worker, now: Instant) -> Vec<&'static str> {
    let support = &worker.engine.endpoint_support;
    let missing = BASIC_ENDPOINTS.into_iter().filter(|endpoint| support.is_lacking(*endpoint, now));
    missing.map(Endpoint::path).collect()
}

/// The legs whose circuit breaker is open, and that of the engine's tokenizer.
pub fn open_breakers(worker: &Worker) -> Vec<&'static str> {
    [Leg::Prefill, Leg::Decode]
        .into_iter()
        .filter(|leg| worker.serves(*leg) && worker.breaker(*leg).is_open())
        .map(Leg::name)
        .chain(worker.engine.endpoint_support.breaker.is_open().then_some(TOKENIZER))
        .collect()
}

/// What needs attention of a worker.
pub(super) fn of_worker(worker: &WorkerFacts) -> Vec<Attention> {
    use AttentionKind as Kind;
    let mut found = Vec::new();
    found.extend(state(worker));
    if worker.state == WorkerState::Down {
        // Everything else that is wrong with it follows from that.
        return found;
    }
    if !worker.breakers_open.is_empty() {
        let legs = worker.breakers_open.join(", ");
        let failure =
            worker.last_failure.as_ref().map(|failure| format!(", last failure {failure}"));
        let message = format!("circuit breaker open: {legs}{}", failure.unwrap_or_default());
        found.push(Attention::new(Kind::BreakerOpen, message));
    }
    if !worker.missing_paths.is_empty() {
        let message = format!("its engine does not offer {}", worker.missing_paths.join(" and "));
        let advice =
            "is `url` right, is another service on this port, or does a proxy change the path?";
        found.push(Attention::new(Kind::LacksEndpoint, message).advise(advice));
    }
    found.extend(kv_routing(worker));
    if worker.tells_blocks && !worker.events_are_current {
        let message = "its KV events do not arrive; its overlap is not used";
        let advice = "is `kv_events` the address of its publisher, and reachable from here? \
                      `splitrail check --connect` tries it";
        found.push(Attention::new(Kind::EventsCutOff, message).advise(advice));
    }
    if worker.index_is_truncated {
        let advice = "raise `limits.index_blocks_per_worker_max`";
        let message = "the index lacks some of its blocks";
        found.push(Attention::new(Kind::IndexTruncated, message).advise(advice));
    }
    if let Some(reason) = worker.index_rebuilt_often {
        let message = format!("its index is dropped and built again and again: {reason}");
        let attention =
            Attention::new(Kind::IndexRebuiltOften, message).advise(rebuild_advice(reason));
        // Restarts are over once the events come again.
        let is_note = reason == "engine_restarted" && worker.events_are_current;
        found.push(Attention { is_note, ..attention });
    }
    found.extend(performance(worker));
    if !worker.missing_hand_offs.is_empty() {
        let endpoints = worker.missing_hand_offs.join(", ");
        let message = format!("handed nothing over on {endpoints}");
        let advice = "is its role right, or are the roles of prefill and decode swapped? Does its engine \
                      have a connector?";
        found.push(Attention::new(Kind::NoHandOff, message).advise(advice));
    }
    if worker.has_failed_hand_offs {
        let message = "decode workers fail on its hand-offs; it hands nothing over";
        let advice = "the decode engines' logs say why: another version, other flags, or no way from \
                      them to it";
        found.push(Attention::new(Kind::NoHandOff, message).advise(advice));
    }
    if let Some(message) = upper_bound(worker) {
        let advice = "docs/parity.md, hybrid models, says what this means";
        found.push(Attention::new(Kind::OverlapIsUpperBound, message).advise(advice));
    }
    found
}

fn state(worker: &WorkerFacts) -> Option<Attention> {
    let message = format!("{}: {}", worker.state.name(), worker.state_why);
    match worker.state {
        WorkerState::Joining | WorkerState::Warming | WorkerState::Serving => None,
        WorkerState::Draining => {
            let advice = match worker.is_quarantined {
                false => "`splitrail undrain ID` takes it back into service",
                true => "restart its engine; or reset its prefix cache first, then undrain it",
            };
            Some(Attention::new(AttentionKind::Draining, message).advise(advice))
        }
        WorkerState::Down => {
            let advice = "is its engine running, and reachable from the router under its address?";
            Some(Attention::new(AttentionKind::State, message).advise(advice))
        }
        WorkerState::Ejected => {
            let failure = worker.last_failure.as_ref();
            let failure =
                failure.map_or_else(String::new, |failure| format!(", last failure {failure}"));
            let advice =
                "it is tried again by itself; the engine's log says why it fails or is slow";
            let message = format!("{message}{failure}");
            Some(Attention::new(AttentionKind::State, message).advise(advice))
        }
        WorkerState::Stuck => {
            let advice = "it is tried again by itself; is its engine's process stopped, or its \
                          accelerator hung?";
            Some(Attention::new(AttentionKind::State, message).advise(advice))
        }
        WorkerState::Unready | WorkerState::Left => {
            Some(Attention::new(AttentionKind::State, message))
        }
    }
}

/// What is wrong with the work of a worker's engine.
fn performance(worker: &WorkerFacts) -> Vec<Attention> {
    use AttentionKind as Kind;
    let mut found = Vec::new();
    let full_advice = "the fleet is too small for its load, or the engine's queue too short";
    let waiting = worker.engine_waiting.unwrap_or(0);
    if worker.refuses_because_full {
        let message = "full: its engine refuses requests (429 or 503)";
        found.push(Attention::new(Kind::Full, message).advise(full_advice));
    } else if worker.kv_used_ratio.is_some_and(|used| used >= FULL_KV_RATIO) && waiting > 0 {
        let message = "full: its KV cache has no room, and requests wait in the engine";
        found.push(Attention::new(Kind::Full, message).advise(full_advice));
    } else if lacks_kv(worker) {
        let message =
            "full: its KV cache is too small, so that as many requests wait in the engine as run";
        let advice =
            "give its engine more KV blocks (vLLM: --gpu-memory-utilization), or add workers";
        found.push(Attention::new(Kind::Full, message).advise(advice));
    }
    let Slowdown { prefill, decode } = worker.slowdown;
    for (work, times) in [("prefills take", prefill), ("decode steps take", decode)] {
        let Some(times) = times.filter(|times| *times >= NOTABLE_SLOWDOWN) else { continue };
        let message = format!("slow: its {work} {times:.1} times as long as on the others");
        let advice = "look for a throttled accelerator, another process on it, or other flags of its \
                      engine";
        found.push(Attention::new(Kind::Slow, message).advise(advice));
    }
    if let Some(cause) = &worker.load_failure {
        let message = format!("reports no load ({cause}): only what the router has booked counts");
        let advice = "make its `/metrics` reachable for the router (SGLang: --enable-metrics)";
        found.push(Attention::new(Kind::NoLoad, message).advise(advice));
    }
    if worker.reports_no_cached_tokens {
        let message = "reports no cached tokens: they are estimated from the index";
        let advice = "start its engine with --enable-prompt-tokens-details (vLLM) or \
                      --enable-cache-report (SGLang)";
        found.push(Attention::new(Kind::NoCachedTokens, message).advise(advice));
    }
    found
}

/// Whether the KV cache of a worker for decode holds so few requests that the next one often has no
/// room, although not all blocks are in use. Transfers of hand-offs keep only few requests waiting.
fn lacks_kv(worker: &WorkerFacts) -> bool {
    let (waiting, running) =
        (worker.engine_waiting.unwrap_or(0), worker.engine_running.unwrap_or(0));
    let is_in_use = worker.kv_used_ratio.is_some_and(|used| used >= SMALL_KV_RATIO);
    worker.only_decodes && is_in_use && waiting >= running.max(2)
}

/// What the index does not say of a worker.
fn upper_bound(worker: &WorkerFacts) -> Option<String> {
    let groups = &worker.unfollowed_cache_groups;
    if groups.iter().any(|group| group == "no_full_attention") {
        return Some("prompts are placed by load: its model has no full attention".into());
    }
    let names = groups.join(", ");
    let message = || format!("overlap is not exact: cache groups {names} are not followed");
    (!groups.is_empty()).then(message)
}

/// What to do about an index that is rebuilt again and again for a reason.
fn rebuild_advice(reason: &str) -> &'static str {
    match reason {
        "unclear_removal" => {
            "its engine sends KV events of a kind that this release cannot use, and that may remove \
             blocks: use a version of the engine that this release knows"
        }
        "garbage" => {
            "its KV events cannot be decoded: is `kv_events` the address of its publisher?"
        }
        "gap" | "replay_too_short" | "replay_failed" | "unverified" => {
            "KV events are lost: give it `kv_replay`, and the engine a larger buffer for replays"
        }
        "engine_restarted" => "its engine restarts: the engine's log has the cause",
        _ => "docs/guides/low-cache-hits.md, section 3, has the queries",
    }
}

/// Why a worker takes no part in KV routing, or takes part untested.
fn kv_routing(worker: &WorkerFacts) -> Option<Attention> {
    use AttentionKind as Kind;
    let found = match worker.parity {
        Parity::Mismatch(_) => of_parity(Kind::ParityMismatch, worker.parity),
        Parity::Unknown(_) if counts_untested(worker) => {
            of_parity(Kind::ParityUnknown, worker.parity)
        }
        _ if worker.takes_part_in_kv_routing || worker.is_quarantined => return None,
        Parity::Pending => {
            let message = "no KV routing yet: not tested since the worker joined or came back";
            Attention::new(Kind::ParityPending, message)
        }
        _ => Attention::new(
            Kind::NoKvRouting,
            "no KV routing: the worker finds much less in its cache than the index states",
        ),
    };
    Some(found)
}

/// Whether a worker's overlap counts although its canary gave no clear result. An index without room
/// is found by itself, and a prompt without exact tokens has no overlap.
fn counts_untested(worker: &WorkerFacts) -> bool {
    let is_told = |cause: &str| matches!(cause, "over_limit" | "tokenizer_not_exact");
    let counts =
        worker.takes_part_in_kv_routing && worker.tells_blocks && worker.events_are_current;
    counts && worker.parity.cause_name().is_some_and(|cause| !is_told(cause))
}

/// The result of a worker's canary, with its cause and what to do.
fn of_parity(kind: AttentionKind, parity: Parity) -> Attention {
    let cause = parity.cause_name().unwrap_or("unknown");
    let found = Attention::new(kind, format!("parity {}: {cause}", parity.name()));
    Attention { advice: parity.advice().map(str::to_owned), ..found }
}

#[cfg(test)]
mod tests {
    use super::*;
    use splitrail_fleet::parity::{Cause, UnclearReason};

    /// A worker in service.
    fn good() -> WorkerFacts {
        WorkerFacts {
            state: WorkerState::Serving,
            state_why: "why".into(),
            is_quarantined: false,
            breakers_open: Vec::new(),
            last_failure: None,
            parity: Parity::Ok,
            takes_part_in_kv_routing: true,
            tells_blocks: true,
            events_are_current: true,
            index_is_truncated: false,
            index_rebuilt_often: None,
            missing_paths: Vec::new(),
            refuses_because_full: false,
            kv_used_ratio: Some(0.99),
            engine_waiting: Some(0),
            only_decodes: true,
            engine_running: Some(2),
            slowdown: Slowdown { prefill: Some(2.9), decode: None },
            load_failure: None,
            reports_no_cached_tokens: false,
            missing_hand_offs: Vec::new(),
            has_failed_hand_offs: false,
            unfollowed_cache_groups: Vec::new(),
        }
    }

    fn kinds(worker: &WorkerFacts) -> Vec<AttentionKind> {
        of_worker(worker).into_iter().map(|found| found.kind).collect()
    }

    #[test]
    fn a_worker_in_service_needs_no_attention_and_each_fault_is_named_once() {
        use AttentionKind as Kind;
        assert!(of_worker(&good()).is_empty());
        let waits = WorkerFacts { engine_waiting: Some(3), ..good() };
        assert_eq!(kinds(&waits), [Kind::Full]);
        let small = |waiting| WorkerFacts {
            kv_used_ratio: Some(0.8),
            engine_waiting: Some(waiting),
            ..good()
        };
        assert_eq!(kinds(&small(2)), [Kind::Full]);
        assert!(of_worker(&small(1)).is_empty(), "it may wait for its hand-off");
        let prefills = WorkerFacts { only_decodes: false, ..small(9) };
        assert!(of_worker(&prefills).is_empty(), "prompts wait to be computed");
        let worst = WorkerFacts {
            state: WorkerState::Draining,
            breakers_open: vec!["decode"],
            events_are_current: false,
            index_is_truncated: true,
            index_rebuilt_often: Some("gap"),
            refuses_because_full: true,
            slowdown: Slowdown { prefill: Some(20.0), decode: Some(1.1) },
            load_failure: Some("engine_timeout".into()),
            reports_no_cached_tokens: true,
            missing_hand_offs: vec!["chat"],
            unfollowed_cache_groups: vec!["mamba".into()],
            ..waits
        };
        let all = [
            Kind::Draining,
            Kind::BreakerOpen,
            Kind::EventsCutOff,
            Kind::IndexTruncated,
            Kind::IndexRebuiltOften,
            Kind::Full,
            Kind::Slow,
            Kind::NoLoad,
            Kind::NoCachedTokens,
            Kind::NoHandOff,
            Kind::OverlapIsUpperBound,
        ];
        assert_eq!(kinds(&worst), all);
    }

    #[test]
    fn a_worker_without_kv_routing_is_named_with_the_cause_unless_it_is_down() {
        use AttentionKind as Kind;
        let untested =
            WorkerFacts { parity: Parity::Pending, takes_part_in_kv_routing: false, ..good() };
        assert_eq!(kinds(&untested), [Kind::ParityPending]);
        let down = WorkerFacts { state: WorkerState::Down, events_are_current: false, ..untested };
        assert_eq!(kinds(&down), [Kind::State], "the rest follows from that");
        let mismatch = WorkerFacts { parity: Parity::Mismatch(Cause::BlockSize), ..good() };
        let found = of_worker(&mismatch);
        assert_eq!(found[0].message, "parity mismatch: block_size");
        assert_eq!(found[0].advice.as_deref(), Some(Cause::BlockSize.advice()));
        let drifts = WorkerFacts { takes_part_in_kv_routing: false, ..good() };
        assert_eq!(kinds(&drifts), [Kind::NoKvRouting]);
    }

    #[test]
    fn overlap_that_counts_without_a_clear_canary_is_named_unless_that_is_told_elsewhere() {
        use AttentionKind as Kind;
        let unclear = |reason| WorkerFacts { parity: Parity::Unknown(reason), ..good() };
        assert!(of_worker(&unclear(None)).is_empty(), "without a cause, nothing was tested");
        let no_reply = || unclear(Some(UnclearReason::NoReply));
        assert_eq!(kinds(&no_reply()), [Kind::ParityUnknown]);
        let silent = WorkerFacts { tells_blocks: false, ..no_reply() };
        assert!(of_worker(&silent).is_empty(), "it reports no blocks");
        assert!(of_worker(&unclear(Some(UnclearReason::TokenizerNotExact))).is_empty());
        let cut_off = WorkerFacts { events_are_current: false, ..no_reply() };
        assert_eq!(kinds(&cut_off), [Kind::EventsCutOff]);
    }
}
