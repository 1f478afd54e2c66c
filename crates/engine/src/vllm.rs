//! What only vLLM says, or says in its own way.

use serde::Deserialize;

mod load;

pub(crate) use load::load;

use crate::identity::{EngineVersion, EventSource, RANKS_MAX, SourcesError, reachable_endpoint};
use crate::kind::ReportPaths;

/// The paths of vLLM's reports.
pub(crate) const PATHS: ReportPaths = ReportPaths {
    liveness: "/health",
    version: "/version",
    models: "/v1/models",
    event_sources: "/kv_event_sources",
    metrics: "/metrics",
};

/// The oldest version whose KV events, usage and hand-offs are known.
pub(crate) const OLDEST_VERSION: EngineVersion = EngineVersion { major: 0, minor: 22, patch: 1 };

/// Reads `/kv_event_sources`, a map from rank to address.
pub(crate) fn event_sources(text: &str, host: &str) -> Result<Vec<EventSource>, SourcesError> {
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
        let events = reachable_endpoint(bound, host).ok_or(SourcesError::Endpoint { rank })?;
        let replay = source.replay_endpoint.as_deref();
        let replay = replay.and_then(|bound| reachable_endpoint(bound, host));
        sources.push(EventSource { rank, events, replay });
    }
    Ok(sources)
}
