//! What only SGLang says, or says in its own way.

use serde::Deserialize;

mod load;

pub(crate) use load::load;

use crate::identity::{EventSource, RANKS_MAX, SourcesError, reachable_endpoint};
use crate::kind::ReportPaths;

/// The paths of SGLang's reports. `/health` generates a token, which takes a second.
pub(crate) const PATHS: ReportPaths = ReportPaths {
    liveness: "/ping",
    version: "/server_info",
    models: "/v1/models",
    event_sources: "/server_info",
    metrics: "/metrics",
};

/// Reads `/server_info`: rank r publishes, and answers replays, r ports after rank 0. An engine without
/// a prefix cache, as a decode engine by default, opens a publisher and never uses it.
pub(crate) fn event_sources(text: &str, host: &str) -> Result<Vec<EventSource>, SourcesError> {
    #[derive(Deserialize)]
    struct ServerInfo {
        kv_events: Option<Publisher>,
        #[serde(default)]
        disable_radix_cache: bool,
    }
    #[derive(Deserialize)]
    struct Publisher {
        publisher: String,
        endpoint_host: String,
        endpoint_port_base: u16,
        replay_endpoint_port_base: Option<u16>,
        dp_size: u16,
    }
    let info: ServerInfo = serde_json::from_str(text).map_err(|_| SourcesError::Shape)?;
    let publisher = info.kv_events.filter(|events| events.publisher == "zmq");
    let Some(publisher) = publisher.filter(|_| !info.disable_radix_cache) else {
        return Ok(Vec::new());
    };
    if usize::from(publisher.dp_size) > RANKS_MAX {
        return Err(SourcesError::Shape);
    }
    let endpoint = |first: u16, rank: u16| {
        let port = first.checked_add(rank).ok_or(SourcesError::Shape)?;
        let bound = format!("tcp://{}:{port}", publisher.endpoint_host);
        reachable_endpoint(&bound, host).ok_or(SourcesError::Endpoint { rank })
    };
    let source = |rank: u16| {
        let events = endpoint(publisher.endpoint_port_base, rank)?;
        let replay = publisher.replay_endpoint_port_base;
        let replay = replay.map(|first| endpoint(first, rank)).transpose()?;
        Ok(EventSource { rank, events, replay })
    };
    (0..publisher.dp_size).map(source).collect()
}
