//! Reads what an engine reports about itself, and makes the requests that find out the rest.
//!
//! Texts go in and facts come out; when an engine is asked is not decided here.

use serde::Deserialize;
use serde_json::value::RawValue;

mod trial;

pub use trial::{Trial, TrialOutcome};

use crate::threshold_reply::CACHE_THRESHOLD;
use crate::usage::EngineUsage;
use crate::zmtp::Endpoint;

/// Answers 200 once the engine serves.
pub const HEALTH_PATH: &str = "/health";
/// Read by [`version`].
pub const VERSION_PATH: &str = "/version";
/// Read by [`served_model`].
pub const MODELS_PATH: &str = "/v1/models";
/// Read by [`event_sources`]; older versions have no such path.
pub const EVENT_SOURCES_PATH: &str = "/kv_event_sources";
/// Read by [`super::load::EngineLoad::parse`].
pub const METRICS_PATH: &str = "/metrics";
/// Where a [`Trial`] is sent.
pub const TRIAL_PATH: &str = "/v1/completions";
/// The header that pins a request to a data-parallel rank.
pub const RANK_HEADER: &str = "x-data-parallel-rank";

/// An engine with more ranks than this is not believed to have so many.
const RANKS_MAX: usize = 1024;

/// The engine's version, as it writes it.
pub fn version(text: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Version {
        version: String,
    }
    let Version { version } = serde_json::from_str(text).ok()?;
    let sane = version.len() <= 64 && version.chars().all(|c| c.is_ascii_graphic());
    (sane && !version.is_empty()).then_some(version)
}

/// A model that an engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedModel {
    /// The name that requests give.
    pub name: String,
    /// The longest sequence, in tokens.
    pub context_tokens: Option<u32>,
}

/// The model that the engine serves: the first that is nobody's adapter. `None` if the
/// text is no list of models, or none is in it.
pub fn served_model(text: &str) -> Option<ServedModel> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Card>,
    }
    #[derive(Deserialize)]
    struct Card {
        id: String,
        parent: Option<String>,
        max_model_len: Option<u32>,
    }
    let Models { data } = serde_json::from_str(text).ok()?;
    let base = data.into_iter().find(|card| card.parent.is_none())?;
    Some(ServedModel { name: base.id, context_tokens: base.max_model_len })
}

/// Where one data-parallel rank publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSource {
    /// The rank.
    pub rank: u16,
    /// The publisher.
    pub events: Endpoint,
    /// The replay service, where it has one.
    pub replay: Option<Endpoint>,
}

/// Why it is not known where events are published.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourcesError {
    /// Not what `/kv_event_sources` answers.
    #[error("the engine's list of KV event sources is not understood")]
    Shape,
    /// A publisher that cannot be reached over TCP.
    #[error("rank {rank} publishes KV events where they cannot be had over TCP")]
    Endpoint {
        /// The rank.
        rank: u16,
    },
}

/// The sources that an engine on `host` lists, by rank; none if it publishes no events.
/// An engine says what it has bound, which is mostly `*`: that is taken for `host`.
///
/// # Errors
/// The text makes no sense, or there is no way to reach a source.
pub fn event_sources(text: &str, host: &str) -> Result<Vec<EventSource>, SourcesError> {
    #[derive(Deserialize)]
    struct Source {
        #[serde(default)]
        enable_kv_cache_events: bool,
        publisher: Option<String>,
        endpoint: Option<String>,
        replay_endpoint: Option<String>,
    }
    let listed: std::collections::BTreeMap<u16, Source> =
        serde_json::from_str(text).map_err(|_| SourcesError::Shape)?;
    if listed.len() > RANKS_MAX {
        return Err(SourcesError::Shape);
    }
    let mut sources = Vec::new();
    for (rank, source) in listed {
        let zmq = source.publisher.as_deref().is_none_or(|publisher| publisher == "zmq");
        if !source.enable_kv_cache_events || !zmq {
            continue;
        }
        let bound = source.endpoint.as_deref().ok_or(SourcesError::Shape)?;
        let events = reach(bound, host).ok_or(SourcesError::Endpoint { rank })?;
        let replay = source.replay_endpoint.as_deref();
        let replay = replay.and_then(|bound| reach(bound, host));
        sources.push(EventSource { rank, events, replay });
    }
    Ok(sources)
}

/// One source for each of `ranks`: the listed one, or where rank r publishes if nobody says
/// it or all are said to publish in one place, which is r ports behind rank 0. A rank beyond
/// the last port is left out.
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

/// The same host, so many ports further; `None` beyond the last.
fn shifted(first: &Endpoint, ports: u16) -> Option<Endpoint> {
    let text = first.to_string();
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse::<u16>().ok()?.checked_add(ports)?;
    format!("{host}:{port}").parse().ok()
}

/// The endpoint to connect to, for one that a process on `host` has bound.
fn reach(bound: &str, host: &str) -> Option<Endpoint> {
    let rest = bound.strip_prefix("tcp://")?;
    let (name, port) = rest.rsplit_once(':')?;
    let host = match name {
        "*" | "0.0.0.0" | "[::]" | "" => host,
        // Loopback of the engine's host is not ours, unless we are there as well.
        name => name,
    };
    format!("tcp://{host}:{port}").parse().ok()
}

/// The `usage` of a whole reply, and whether a choice of it was turned away.
#[derive(Deserialize)]
struct Reply<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(default)]
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    finish_reason: Option<String>,
}

impl Reply<'_> {
    fn reports_cached_tokens(&self) -> Option<bool> {
        let usage = EngineUsage::parse(self.usage?).ok()?;
        Some(usage.cached_tokens.is_some())
    }

    fn is_turned_away(&self) -> bool {
        let reason = |choice: &Choice| {
            choice.finish_reason.as_deref().is_some_and(|reason| reason == CACHE_THRESHOLD)
        };
        self.choices.iter().any(reason)
    }
}
