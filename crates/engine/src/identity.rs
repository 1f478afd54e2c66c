//! Parses what an engine reports about itself, and builds the requests that find out the rest.
//!
//! All functions convert texts to facts; when an engine is asked is decided elsewhere.

use serde::Deserialize;
use serde_json::value::RawValue;

mod trial;
mod version;

pub use trial::{Trial, TrialOutcome};
pub use version::EngineVersion;

use crate::dialect::Dialect;
use crate::kind::EngineKind;
use crate::threshold_reply::CACHE_THRESHOLD;
use crate::usage::EngineUsage;
use crate::zmtp::Endpoint;

/// The path to which a [`Trial`] is sent.
pub const TRIAL_PATH: &str = "/v1/completions";
/// The header that pins a request to a data-parallel rank, of vLLM and SGLang.
pub const RANK_HEADER: &str = "x-data-parallel-rank";

/// Whether an engine's message says that it has no such rank: vLLM's `data_parallel_rank 1 is out of
/// range [0, 1).`, or SGLang's `routed_dp_rank=1 out of range [0, 1)`.
pub fn refuses_rank(message: &str) -> bool {
    ["data_parallel_rank", "routed_dp_rank"].iter().any(|name| message.starts_with(name))
}

/// Maximum number of ranks that is accepted from an engine.
pub(crate) const RANKS_MAX: usize = 1024;
/// Maximum number of models and adapters that are taken from an engine's list.
const MODELS_MAX: usize = 4096;

/// The member `version` of a report.
pub(crate) fn version(text: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Version {
        version: String,
    }
    let Version { version } = serde_json::from_str(text).ok()?;
    let sane = version.len() <= 64 && version.chars().all(|c| c.is_ascii_graphic());
    (sane && !version.is_empty()).then_some(version)
}

/// A model or an adapter that an engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineModel {
    /// The name that requests use.
    pub name: String,
    /// The maximum length of a sequence in tokens.
    pub context_tokens: Option<u32>,
    /// Whether it is an adapter of another model.
    pub is_adapter: bool,
    /// Where the engine has loaded it from: a path on its host, or the name of a repository.
    pub root: Option<String>,
    /// The engine that lists it, by its `owned_by`; `None` if that is the name of no engine.
    pub owner: Option<EngineKind>,
}

/// Reads `/v1/models`.
pub(crate) fn served_models(text: &str) -> Option<Vec<EngineModel>> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Card>,
    }
    #[derive(Deserialize)]
    struct Card {
        id: String,
        parent: Option<String>,
        root: Option<String>,
        max_model_len: Option<u32>,
        owned_by: Option<serde_json::Value>,
    }
    let owner = |owned_by: serde_json::Value| EngineKind::of_name(owned_by.as_str()?);
    let Models { data } = serde_json::from_str(text).ok()?;
    let model = |card: Card| EngineModel {
        name: card.id,
        context_tokens: card.max_model_len,
        is_adapter: card.parent.is_some(),
        root: card.root,
        owner: card.owned_by.and_then(owner),
    };
    Some(data.into_iter().take(MODELS_MAX).map(model).collect())
}

/// Where one data-parallel rank publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSource {
    /// The rank.
    pub rank: u16,
    /// The address of the publisher.
    pub events: Endpoint,
    /// The address of the replay service, if the rank has one.
    pub replay: Option<Endpoint>,
}

/// Why the addresses of an engine's KV events are not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourcesError {
    /// The text is not such a list.
    #[error("the engine's list of KV event sources is invalid")]
    Shape,
    /// A publisher cannot be reached over TCP.
    #[error("rank {rank} publishes KV events at an address that is not TCP")]
    Endpoint {
        /// The rank.
        rank: u16,
    },
}

/// One source for each of `ranks`: the listed one, or the default address of rank r, r ports after
/// rank 0, if the rank is not listed or all listed ranks have the same address. A rank whose port
/// would exceed the maximum is left out.
pub fn of_all_ranks(listed: &[EventSource], ranks: u32) -> Vec<EventSource> {
    let Some(first) = listed.iter().min_by_key(|source| source.rank) else {
        return Vec::new();
    };
    let ranks = u16::try_from(ranks).unwrap_or(u16::MAX).min(RANKS_MAX as u16);
    let behind = |endpoint: &Endpoint, rank: u16| shifted(endpoint, rank - first.rank);
    let source = |rank: u16| {
        let own = listed.iter().find(|source| source.rank == rank);
        match own.filter(|own| rank == first.rank || own.events != first.events) {
            Some(own) => Some(own.clone()),
            None => {
                let replay = first.replay.as_ref().and_then(|replay| behind(replay, rank));
                Some(EventSource { rank, events: behind(&first.events, rank)?, replay })
            }
        }
    };
    (first.rank..first.rank.saturating_add(ranks)).filter_map(source).collect()
}

/// The same host with the port increased; `None` beyond the last port.
fn shifted(first: &Endpoint, ports: u16) -> Option<Endpoint> {
    let text = first.to_string();
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse::<u16>().ok()?.checked_add(ports)?;
    format!("{host}:{port}").parse().ok()
}

/// The endpoint to which to connect, for one to which a process on `host` is bound.
pub(crate) fn reachable_endpoint(bound: &str, host: &str) -> Option<Endpoint> {
    let rest = bound.strip_prefix("tcp://")?;
    let (name, port) = rest.rsplit_once(':')?;
    let host = match name {
        "*" | "0.0.0.0" | "[::]" | "" => host,
        // A loopback address is reachable only if the router runs on the same host.
        name => name,
    };
    format!("tcp://{host}:{port}").parse().ok()
}

/// The parts of a complete reply that a trial needs.
#[derive(Deserialize)]
struct Reply<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(default)]
    choices: Vec<ReplyChoice>,
}

#[derive(Deserialize)]
struct ReplyChoice {
    finish_reason: Option<String>,
}

impl Reply<'_> {
    fn reports_cached_tokens(&self) -> Option<bool> {
        let usage = EngineUsage::parse(Dialect::Chunks, self.usage?.get()).ok()?;
        Some(usage.cached_tokens.is_some())
    }

    fn is_turned_away(&self) -> bool {
        let reason = |choice: &ReplyChoice| {
            choice.finish_reason.as_deref().is_some_and(|reason| reason == CACHE_THRESHOLD)
        };
        self.choices.iter().any(reason)
    }
}
