//! What an operator should look at.

use std::collections::BTreeSet;

use serde::Serialize;

use super::snapshot::{ModelSnapshot, ReplicaState, ShedSnapshot, WorkerSnapshot};

/// Kinds of what needs attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AttentionKind {
    /// The replica is not ready, or drains.
    NotReady,
    /// The last reload was refused.
    ReloadRefused,
    /// Lines of one of the replica's files are lost.
    FileNotWritten,
    /// A file of API keys cannot be used.
    KeyFileUnusable,
    /// The replica has no keys of an issuer of JSON Web Tokens.
    IssuerWithoutKeys,
    /// The replica is not connected to the broker over which limits are shared.
    BrokerDisconnected,
    /// The replica has refused requests because of load.
    ShedsRequests,
    /// A model is served without KV routing, because the router does not know the tokens of prompts.
    NoTokenizer,
    /// Prompts fail alike on all workers.
    SuspectPrompts,
    /// A worker is down, unready, ejected, stuck, or leaves.
    State,
    /// A worker is drained.
    Draining,
    /// A circuit breaker of a worker is open.
    BreakerOpen,
    /// A worker does not agree with the router on tokens or blocks.
    ParityMismatch,
    /// The canary of a worker has not ended since the worker joined or came back.
    ParityPending,
    /// The canary of a worker gave no clear result.
    ParityUnknown,
    /// A worker takes no part in KV routing for another reason.
    NoKvRouting,
    /// The KV events of a worker do not arrive.
    EventsCutOff,
    /// The index lacks blocks of a worker.
    IndexTruncated,
    /// The index of a worker is rebuilt again and again.
    IndexRebuiltOften,
    /// The engine of a worker is full.
    Full,
    /// A worker takes much longer than the others of its role.
    Slow,
    /// Its engine reports no load.
    NoLoad,
    /// A worker handed nothing over on some endpoints.
    NoHandOff,
    /// The engine of a worker may find less than the index says.
    OverlapIsUpperBound,
}

impl AttentionKind {
    /// Whether nothing is wrong, so that it is only to be known.
    pub(crate) fn is_note(self) -> bool {
        matches!(self, Self::OverlapIsUpperBound | Self::NoTokenizer)
    }
}

/// Something that an operator should look at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Attention {
    pub(crate) kind: AttentionKind,
    /// The worker's model; `None` if it is about the replica.
    pub(crate) model: Option<String>,
    /// The worker's id.
    pub(crate) worker: Option<String>,
    /// What is wrong.
    pub(crate) message: String,
    /// What to do about it.
    pub(crate) advice: Option<String>,
}

impl Attention {
    fn new(kind: AttentionKind, message: impl Into<String>) -> Self {
        Self { kind, model: None, worker: None, message: message.into(), advice: None }
    }

    fn advise(self, advice: &str) -> Self {
        Self { advice: Some(advice.to_owned()), ..self }
    }
}

/// What is wrong with a replica and with its workers, as it sees them.
pub(crate) fn of_replica(snapshot: &ReplicaState) -> Vec<Attention> {
    let mut found = Vec::new();
    if let Some(reason) = &snapshot.not_ready {
        found.push(Attention::new(AttentionKind::NotReady, format!("not ready: {reason}")));
    }
    if snapshot.reload_refused {
        let advice = "`splitrail reload` and the router's log name what is wrong: \
                      a mistake in the file, or a key that needs a restart";
        let refused = "the last reload was refused; the configuration before it stays in use";
        found.push(Attention::new(AttentionKind::ReloadRefused, refused).advise(advice));
    }
    found.extend(files_and_connections(snapshot));
    found.extend(sheds(&snapshot.shed));
    found.extend(snapshot.models.iter().flat_map(of_model));
    found.extend(snapshot.workers.iter().flat_map(of_worker));
    found
}

/// What the replica cannot write, read or reach.
fn files_and_connections(snapshot: &ReplicaState) -> Vec<Attention> {
    use AttentionKind as Kind;
    let mut found = Vec::new();
    for section in &snapshot.unwritten_files {
        let message = format!("{section}.path: lines are lost, because the file cannot be written");
        let advice = "the router's log has the cause: make room, or repair the folder";
        found.push(Attention::new(Kind::FileNotWritten, message).advise(advice));
    }
    for file in &snapshot.unusable_key_files {
        let message =
            format!("auth: the key file {file} cannot be used; its previous keys stay valid");
        let advice = "`splitrail check --config FILE`, run as the router's user, names the mistake";
        found.push(Attention::new(Kind::KeyFileUnusable, message).advise(advice));
    }
    for issuer in &snapshot.issuers_without_keys {
        let message = format!("auth: there are no keys of issuer {issuer}; its tokens are refused");
        let advice = "the router's log has the cause: check the address or file of `auth[].jwks`";
        found.push(Attention::new(Kind::IssuerWithoutKeys, message).advise(advice));
    }
    if snapshot.broker_disconnected {
        let message = "quotas: the broker is not connected; after `quotas.lease`, tenants get a \
                       small part of their limits";
        let advice = "the router's log has the cause: check `quotas.servers` and `quotas.login`";
        found.push(Attention::new(Kind::BrokerDisconnected, message).advise(advice));
    }
    found
}

/// The refusals because of load, which are one matter for the operator.
fn sheds(shed: &[ShedSnapshot]) -> Option<Attention> {
    let mut reasons = BTreeSet::new();
    for ShedSnapshot { model, reason, .. } in shed {
        reasons.insert(match model.as_str() {
            "none" => reason.clone(),
            model => format!("{reason} of {model}"),
        });
    }
    let requests: u64 = shed.iter().map(|shed| shed.requests).sum();
    let reasons = reasons.into_iter().collect::<Vec<_>>().join(", ");
    let advice = "the reasons are those of `splitrail_shed_total`: docs/limits.md";
    let message = format!("sheds requests: {requests} within the last minute ({reasons})");
    (requests > 0).then(|| Attention::new(AttentionKind::ShedsRequests, message).advise(advice))
}

/// What is wrong with a model.
fn of_model(model: &ModelSnapshot) -> Vec<Attention> {
    use AttentionKind as Kind;
    let mut found = Vec::new();
    if !model.tokenizer {
        let advice =
            "set the model's `tokenizer`: a folder, or `engine` if the engines can be asked";
        let message = "no KV routing: the model has no tokenizer";
        found.push(Attention::new(Kind::NoTokenizer, message).advise(advice));
    }
    if model.suspect_prompts > 0 {
        let prompts = model.suspect_prompts;
        let message = format!(
            "{prompts} prompts have failed alike on two workers; each is tried on one worker only"
        );
        let advice = "the engines' logs say why; docs/health.md, suspect prompts";
        found.push(Attention::new(Kind::SuspectPrompts, message).advise(advice));
    }
    found.iter_mut().for_each(|attention| attention.model = Some(model.name.clone()));
    found
}

/// What is wrong with a worker, as one replica sees it.
pub(crate) fn of_worker(worker: &WorkerSnapshot) -> Vec<Attention> {
    use AttentionKind as Kind;
    let mut found = Vec::new();
    let why = &worker.state_why;
    match worker.state.as_str() {
        "down" | "unready" | "ejected" | "stuck" | "left" => {
            found.push(Attention::new(Kind::State, format!("{}: {why}", worker.state)));
        }
        "draining" => {
            let advice = match worker.quarantined {
                false => format!("`splitrail undrain {}` takes it back into service", worker.id),
                true => {
                    "restart its engine; or reset its prefix cache first, then undrain it".into()
                }
            };
            let draining = format!("draining: {why}");
            found.push(Attention::new(Kind::Draining, draining).advise(&advice));
        }
        _ => {}
    }
    if !worker.breakers_open.is_empty() {
        let legs = worker.breakers_open.join(", ");
        let failure =
            worker.last_failure.as_ref().map(|failure| format!(", last failure {failure}"));
        let message = format!("circuit breaker open: {legs}{}", failure.unwrap_or_default());
        found.push(Attention::new(Kind::BreakerOpen, message));
    }
    found.extend(kv_routing(worker));
    if worker.events_cut_off {
        let message = "its KV events do not arrive; its overlap is not used";
        found.push(Attention::new(Kind::EventsCutOff, message));
    }
    if worker.index_truncated {
        let advice = "raise `limits.index_blocks_per_worker_max`";
        let message = "the index lacks some of its blocks";
        found.push(Attention::new(Kind::IndexTruncated, message).advise(advice));
    }
    if let Some(reason) = &worker.index_rebuilt_often {
        let message = format!("its index is dropped and built again and again: {reason}");
        let found_often = Attention::new(Kind::IndexRebuiltOften, message);
        found.push(found_often.advise(rebuild_advice(reason)));
    }
    found.extend(performance(worker));
    if !worker.no_hand_off.is_empty() {
        let endpoints = worker.no_hand_off.join(", ");
        let message = format!("handed nothing over on {endpoints}");
        found.push(Attention::new(Kind::NoHandOff, message));
    }
    if let Some(message) = upper_bound(worker) {
        let advice = "docs/parity.md, hybrid models, says what this means";
        found.push(Attention::new(Kind::OverlapIsUpperBound, message).advise(advice));
    }
    for attention in &mut found {
        attention.model = Some(worker.model.clone());
        attention.worker = Some(worker.id.clone());
    }
    found
}

/// What is wrong with the work of a worker's engine.
fn performance(worker: &WorkerSnapshot) -> Vec<Attention> {
    use AttentionKind as Kind;
    let mut found = Vec::new();
    if worker.full {
        let advice = "the fleet is too small for its load, or the engine's queue too short";
        let message = "full: its engine refuses requests (429 or 503)";
        found.push(Attention::new(Kind::Full, message).advise(advice));
    }
    for (work, times) in worker.slowdown.notable() {
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
    found
}

/// What the index does not say of a worker.
pub(crate) fn upper_bound(worker: &WorkerSnapshot) -> Option<String> {
    let groups = &worker.unfollowed_cache_groups;
    if groups.iter().any(|group| group == "no_full_attention") {
        return Some("prompts are placed by load: its model has no full attention".into());
    }
    let names = groups.join(", ");
    let message = || format!("overlap is an upper bound: cache groups {names} are not followed");
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

/// Why a worker takes no part in KV routing, or takes part untested. Of a worker that is down, its
/// state says enough.
fn kv_routing(worker: &WorkerSnapshot) -> Option<Attention> {
    use AttentionKind as Kind;
    let found = match worker.parity.as_str() {
        _ if worker.state == "down" => return None,
        "mismatch" => of_parity(Kind::ParityMismatch, worker),
        "unknown" if counts_untested(worker) => of_parity(Kind::ParityUnknown, worker),
        _ if worker.kv_routing || worker.quarantined => return None,
        "pending" => {
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
fn counts_untested(worker: &WorkerSnapshot) -> bool {
    let is_told = |cause: &str| matches!(cause, "over_limit" | "tokenizer_not_exact");
    let counts = worker.kv_routing && worker.events_origin.is_some() && !worker.events_cut_off;
    counts && worker.parity_cause.as_deref().is_some_and(|cause| !is_told(cause))
}

/// The result of a worker's canary, with its cause and what to do.
fn of_parity(kind: AttentionKind, worker: &WorkerSnapshot) -> Attention {
    let cause = worker.parity_cause.as_deref().unwrap_or("unknown");
    let found = Attention::new(kind, format!("parity {}: {cause}", worker.parity));
    Attention { advice: worker.parity_advice.clone(), ..found }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::snapshot::SlowdownSnapshot;

    #[test]
    fn a_worker_in_service_needs_no_attention_and_each_fault_is_named_once() {
        let good =
            WorkerSnapshot { state: "serving".into(), kv_routing: true, ..Default::default() };
        assert!(of_worker(&good).is_empty());
        let kinds = |worker: WorkerSnapshot| -> Vec<AttentionKind> {
            of_worker(&worker).into_iter().map(|found| found.kind).collect()
        };
        use AttentionKind as Kind;
        assert_eq!(kinds(WorkerSnapshot { state: "down".into(), ..good.clone() }), [Kind::State]);
        assert_eq!(
            kinds(WorkerSnapshot { kv_routing: false, ..good.clone() }),
            [Kind::NoKvRouting]
        );
        let mismatch =
            WorkerSnapshot { parity: "mismatch".into(), kv_routing: false, ..good.clone() };
        assert_eq!(kinds(mismatch), [Kind::ParityMismatch]);
        let untested =
            WorkerSnapshot { parity: "pending".into(), kv_routing: false, ..good.clone() };
        assert_eq!(kinds(untested.clone()), [Kind::ParityPending]);
        assert_eq!(kinds(WorkerSnapshot { state: "down".into(), ..untested }), [Kind::State]);
        // Without a cause, nothing was tested.
        let disabled = WorkerSnapshot { parity: "unknown".into(), ..good.clone() };
        assert!(of_worker(&disabled).is_empty());
        let unclear = WorkerSnapshot { parity_cause: Some("no_reply".into()), ..disabled };
        assert!(of_worker(&unclear).is_empty(), "it reports no blocks");
        let unclear = WorkerSnapshot { events_origin: Some("engine".into()), ..unclear };
        assert_eq!(kinds(unclear.clone()), [Kind::ParityUnknown]);
        let estimated =
            WorkerSnapshot { parity_cause: Some("tokenizer_not_exact".into()), ..unclear.clone() };
        assert!(of_worker(&estimated).is_empty());
        let drifts = WorkerSnapshot { kv_routing: false, ..unclear.clone() };
        assert_eq!(kinds(drifts), [Kind::NoKvRouting]);
        let cut_off = WorkerSnapshot { events_cut_off: true, ..unclear };
        assert_eq!(kinds(cut_off), [Kind::EventsCutOff]);
        let worst = WorkerSnapshot {
            state: "draining".into(),
            breakers_open: vec!["decode".into()],
            events_cut_off: true,
            index_truncated: true,
            index_rebuilt_often: Some("gap".into()),
            full: true,
            slowdown: SlowdownSnapshot { prefill: Some(20.0), decode: Some(1.1) },
            load_failure: Some("engine_timeout".into()),
            no_hand_off: vec!["chat".into()],
            unfollowed_cache_groups: vec!["mamba".into()],
            ..good
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
            Kind::NoHandOff,
            Kind::OverlapIsUpperBound,
        ];
        assert_eq!(all.iter().filter(|kind| kind.is_note()).count(), 1);
        assert_eq!(kinds(worst), all);
    }
}
