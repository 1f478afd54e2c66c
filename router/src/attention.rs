//! What an operator should look at, found in one place for `splitrail status` and `workers`, the live
//! page and `/ready`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::core::Core;
use crate::live::Shed;
use splitrail_access::Access;
use splitrail_access::keys::{Grant, KeyHolder};
use splitrail_config::model::Discovery;
use splitrail_fleet::refused_workers::RefusedOfSource;
use splitrail_fleet::{ServedModel, Worker};
use splitrail_settings::natural_order::compare;
use splitrail_telemetry::clock::unix_ms;
use splitrail_telemetry::metrics::{labels_of_zeros, values_of};

mod pairs;
mod worker;

use pairs::without_partner;
pub use worker::open_breakers;
use worker::{WorkerFacts, of_worker};

/// How long before its end a key or certificate is named.
const EXPIRES_SOON: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// How long after a request with an expired key this counts as a fault.
const EXPIRED_USE: Duration = Duration::from_secs(60);

/// Maximum number of keys that a line names.
const KEYS_NAMED_MAX: usize = 8;

/// Kinds of what needs attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKind {
    /// The router is not ready, or drains.
    NotReady,
    /// The last reload was refused.
    ReloadRefused,
    /// Lines of one of the router's files are lost.
    FileNotWritten,
    /// A file of API keys cannot be used.
    KeyFileUnusable,
    /// API keys have expired, or will soon.
    KeysExpire,
    /// The certificate of a listener has expired, or will soon.
    CertificateExpires,
    /// The router has no keys of an issuer of JSON Web Tokens.
    IssuerWithoutKeys,
    /// A discovery source cannot be read, or found workers that cannot be added.
    DiscoveryFails,
    /// The router is not connected to the broker over which limits are shared.
    BrokerDisconnected,
    /// The router has refused requests because of load.
    ShedsRequests,
    /// A model is served without KV routing, because the router does not know the tokens of prompts.
    NoTokenizer,
    /// Prompts fail alike on all workers.
    SuspectPrompts,
    /// Workers have not all loaded an adapter, or from different paths.
    AdaptersDiffer,
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
    /// An engine does not offer chats or completions.
    LacksEndpoint,
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
    /// Its engine does not say how much of a prompt was cached.
    NoCachedTokens,
    /// A worker handed nothing over on some endpoints, decode workers fail on its hand-offs, or it has no
    /// partner.
    NoHandOff,
    /// The engine of a worker may find less than the index says.
    OverlapIsUpperBound,
}

impl AttentionKind {
    /// Whether nothing is wrong, so that it is only to be known.
    fn is_note(self) -> bool {
        matches!(
            self,
            Self::OverlapIsUpperBound
                | Self::NoTokenizer
                | Self::NoCachedTokens
                | Self::KeysExpire
                | Self::CertificateExpires
                | Self::AdaptersDiffer
        )
    }
}

/// Something that an operator should look at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attention {
    /// Its kind.
    pub kind: AttentionKind,
    /// Whether nothing is wrong, so that it is only to be known.
    pub is_note: bool,
    /// The model that it is about; `None` if it is about the router.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The ids of the workers that it is about, in the order of lists.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<String>,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Attention {
    fn new(kind: AttentionKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            is_note: kind.is_note(),
            model: None,
            workers: Vec::new(),
            message: message.into(),
            advice: None,
        }
    }

    fn advise(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}

/// All that needs attention: of the router, then of workers, then of models, and notes last. `shed`
/// are the requests that were refused because of load within the last minute.
pub fn find(core: &Core, shed: &[Shed]) -> Vec<Attention> {
    let mut found = of_router(core);
    found.extend(of_shed(shed));
    let serving = core.serving();
    found.extend(serving.models.iter().flat_map(|served| of_workers(served)));
    found.extend(serving.models.iter().flat_map(|served| of_pairs(served)));
    found.extend(serving.models.iter().flat_map(|served| of_model(served)));
    found.extend(serving.models.iter().flat_map(|served| of_adapters(served)));
    // The sort is stable.
    found.sort_by_key(|attention| attention.is_note);
    found
}

/// What is only to be known of the models, which `/ready` says as well.
pub fn notes_of_models(core: &Core) -> Vec<Attention> {
    let serving = core.serving();
    let all = serving.models.iter().flat_map(|served| of_model(served));
    all.filter(|attention| attention.is_note).collect()
}

/// What needs attention of one worker.
pub fn find_of_worker(worker: &Worker) -> Vec<Attention> {
    of_worker(&WorkerFacts::of(worker))
}

/// What the router cannot do, write, read or reach.
fn of_router(core: &Core) -> Vec<Attention> {
    use AttentionKind as Kind;
    let mut found = Vec::new();
    if let Some(reason) = core.unready() {
        found.push(Attention::new(Kind::NotReady, format!("not ready: {reason}")));
    }
    let metrics = &core.metrics;
    if !labels_of_zeros(&metrics.config_reload_successful).is_empty() {
        let advice = "`splitrail reload` and the router's log name what is wrong: \
                      a mistake in the file, or a key that needs a restart";
        let refused = "the last reload was refused; the configuration before it stays in use";
        found.push(Attention::new(Kind::ReloadRefused, refused).advise(advice));
    }
    for section in labels_of_zeros(&metrics.output_file_writable) {
        let goes_to_stdout =
            section == "access_log" && core.serving().config.access_log.path.is_none();
        let (message, advice) = match goes_to_stdout {
            true => (
                format!("{section}: lines are lost, because standard output is not read"),
                "repair its reader, or set `access_log.path` or a lower `access_log.sample_ratio`",
            ),
            false => (
                format!("{section}.path: lines are lost, because the file cannot be written"),
                "the router's log has the cause: make room, or repair the folder",
            ),
        };
        found.push(Attention::new(Kind::FileNotWritten, message).advise(advice));
    }
    let access = core.access.load();
    for file in access.unusable_key_files(Instant::now()) {
        let message =
            format!("auth: the key file {file} cannot be used; its previous keys stay valid");
        let advice = "`splitrail check --config FILE`, run as the router's user, names the mistake";
        found.push(Attention::new(Kind::KeyFileUnusable, message).advise(advice));
    }
    found.extend(of_keys(&access));
    found.extend(of_certificates(core));
    for issuer in labels_of_zeros(&metrics.jwks_keys) {
        let message = format!("auth: there are no keys of issuer {issuer}; its tokens are refused");
        let advice = "the router's log has the cause: check the address or file of `auth[].jwks`";
        found.push(Attention::new(Kind::IssuerWithoutKeys, message).advise(advice));
    }
    let sources: BTreeSet<_> = labels_of_zeros(&metrics.discovery_successful).into_iter().collect();
    for source in sources {
        let message = format!("discovery: {source} cannot be read; no new workers are found there");
        let advice = "the router's log has the cause: the name, the API server, or the Role that lets \
                      the router list and watch pods";
        found.push(Attention::new(Kind::DiscoveryFails, message).advise(advice));
    }
    if access.is_broker_connected() == Some(false) {
        let message = "quotas: the broker is not connected; after `quotas.lease`, tenants get a \
                       small part of their limits";
        let advice = "the router's log has the cause: check `quotas.servers` and `quotas.login`";
        found.push(Attention::new(Kind::BrokerDisconnected, message).advise(advice));
    }
    found
}

/// API keys that have expired, and those that will soon.
fn of_keys(access: &Access) -> Vec<Attention> {
    let now = SystemTime::now();
    let (expired, all) = (access.expired_keys(now), access.expired_keys(now + EXPIRES_SOON));
    let soon: Vec<_> = all.into_iter().filter(|holder| !expired.contains(holder)).collect();
    let about = |holders: Vec<KeyHolder>, when: &str| {
        let named = holders.iter().take(KEYS_NAMED_MAX).map(|holder| match &holder.grant {
            Grant::Tenant(tenant) => format!("{} of {tenant}", holder.id),
            Grant::Role(role) => format!("{} of operators ({})", holder.id, role.name()),
        });
        let named = named.collect::<Vec<_>>().join(", ");
        let more = match holders.len().saturating_sub(KEYS_NAMED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let advice = "`splitrail keys new` makes another one; remove those that nobody uses";
        let message = format!("auth: API keys that {when}: {named}{more}");
        (!holders.is_empty())
            .then(|| Attention::new(AttentionKind::KeysExpire, message).advise(advice))
    };
    let refused = access.expired_keys_used_after(now - EXPIRED_USE);
    let refused = about(refused, "have expired, and are still used: their requests get 401");
    let refused = refused.map(|attention| Attention { is_note: false, ..attention });
    let others = [about(expired, "have expired"), about(soon, "expire within a week")];
    refused.into_iter().chain(others.into_iter().flatten()).collect()
}

/// The certificates of listeners that have expired, and those that will soon.
fn of_certificates(core: &Core) -> Vec<Attention> {
    let (mut found, now_s) = (Vec::new(), (unix_ms() / 1000) as i64);
    for (listener, expires_s) in values_of(&core.metrics.certificate_expires) {
        let left = Duration::from_secs(u64::try_from(expires_s - now_s).unwrap_or(0));
        if expires_s == 0 || left > EXPIRES_SOON {
            continue;
        }
        let (is_note, when) = match left.is_zero() {
            true => (false, "has expired: clients that check it refuse it"),
            false => (true, "expires within a week"),
        };
        let message = format!("the certificate of listener {listener} {when}");
        let attention = Attention::new(AttentionKind::CertificateExpires, message)
            .advise("put a new one in its place; the router reads the files again by itself");
        found.push(Attention { is_note, ..attention });
    }
    found
}

/// The refusals because of load, which are one matter for the operator.
fn of_shed(shed: &[Shed]) -> Option<Attention> {
    let mut reasons = BTreeSet::new();
    for Shed { model, reason, .. } in shed {
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

fn of_model(served: &ServedModel) -> Vec<Attention> {
    use AttentionKind as Kind;
    let mut found = Vec::new();
    if !served.config.tokenizer.makes_tokens() {
        let advice =
            "set the model's `tokenizer`: a folder, or `engine` if the engines can be asked";
        let message = "no KV routing: the model has no tokenizer";
        found.push(Attention::new(Kind::NoTokenizer, message).advise(advice));
    }
    let prompts = served.suspects.count(Instant::now());
    if prompts > 0 {
        let prompts =
            if prompts == 1 { "1 prompt has".into() } else { format!("{prompts} prompts have") };
        let message =
            format!("{prompts} failed alike on two workers; each is tried on one worker only");
        let advice = "the engines' logs say why; docs/health.md, suspect prompts";
        found.push(Attention::new(Kind::SuspectPrompts, message).advise(advice));
    }
    let sources: Vec<_> = served.config.discovery.iter().map(Discovery::name).collect();
    let mut refused = served.pool.refused_workers.all();
    refused.retain(|refused| sources.contains(&refused.source));
    for RefusedOfSource { source, workers, why } in refused {
        let message = format!("discovery: {workers} found by {source} cannot be added; {why}");
        let advice = "docs/discovery.md says which workers a source may add; `fleet.networks` has the \
                      allowed addresses";
        found.push(Attention::new(Kind::DiscoveryFails, message).advise(advice));
    }
    found.iter_mut().for_each(|attention| attention.model = Some(served.name().to_owned()));
    found
}

/// The workers that take part in no hand-off although they are in service.
fn of_pairs(served: &ServedModel) -> Vec<Attention> {
    let model = Some(served.name().to_owned());
    let advice = "KV moves only within a transfer group (`transfer_group`, or the pods' label), and \
                  between engines that store it alike";
    let found = without_partner(served).into_iter().map(|(workers, message)| {
        let found = Attention::new(AttentionKind::NoHandOff, message).advise(advice);
        Attention { model: model.clone(), workers, ..found }
    });
    found.collect()
}

/// What is to be known of a model's adapters.
fn of_adapters(served: &ServedModel) -> Vec<Attention> {
    let names = served.config.adapters.iter();
    let mut found: Vec<_> = names.flat_map(|name| of_adapter(served, name)).collect();
    found.iter_mut().for_each(|attention| attention.model = Some(served.name().to_owned()));
    found
}

/// The workers that have not loaded an adapter as most have that can serve a request alone.
fn of_adapter(served: &ServedModel, name: &str) -> Vec<Attention> {
    let Some(holder) = served.pool.typical_holder(name) else { return Vec::new() };
    let roster = served.pool.roster();
    let about = |differs: &dyn Fn(&Worker) -> bool, message: String, advice: &str| {
        let in_service = roster.iter().filter(|worker| worker.state().takes_work());
        let differing = in_service.filter(|worker| differs(worker));
        let mut workers: Vec<_> = differing.map(|worker| worker.id().to_owned()).collect();
        workers.sort_by(|one, other| compare(one, other));
        let found = Attention::new(AttentionKind::AdaptersDiffer, message).advise(advice);
        (!workers.is_empty()).then_some(Attention { workers, ..found })
    };
    let lacking = about(
        &|worker| worker.has_adapter(name) == Some(false),
        format!("without the adapter {name}: its requests go only to workers that have it"),
        "load it there (vLLM: POST /v1/load_lora_adapter), unless you want that",
    );
    let elsewhere = about(
        &|worker| !worker.agrees_on(Some(name), &holder),
        format!(
            "with the adapter {name} from another path than most: no KV of it moves to or from others"
        ),
        "load it from the same path on all workers",
    );
    lacking.into_iter().chain(elsewhere).collect()
}

/// What needs attention of a model's workers, with what is the same for several of them once.
fn of_workers(served: &ServedModel) -> Vec<Attention> {
    let mut groups: Vec<Attention> = Vec::new();
    for worker in served.pool.roster().iter() {
        for mut found in find_of_worker(worker) {
            // Causes name the worker, whom the group names already.
            found.message = found.message.replace(&format!("worker {} ", worker.id()), "");
            let is_alike = |group: &&mut Attention| {
                (group.kind, group.is_note, &group.message, &group.advice)
                    == (found.kind, found.is_note, &found.message, &found.advice)
            };
            match groups.iter_mut().find(is_alike) {
                Some(group) => group.workers.push(worker.id().to_owned()),
                None => groups.push(Attention {
                    model: Some(served.name().to_owned()),
                    workers: vec![worker.id().to_owned()],
                    ..found
                }),
            }
        }
    }
    groups.iter_mut().for_each(|group| group.workers.sort_by(|one, other| compare(one, other)));
    groups
}
