//! What a shim says about itself at `/splitrail/status`, and whether a bootstrap server answers.

use serde_json::Value;
use splitrail_config::model::Connector;
use splitrail_engine::connectors::mooncake::{EngineIds, MAX_QUERY_BYTES, QUERY_PATH};
use splitrail_engine_client::Engine;
use splitrail_fleet::Bootstrap;
use tokio::net::TcpStream;
use tokio::time::timeout_at;

use super::{Asker, shortened};
use crate::facts::{BootstrapFact, ShimFact, ShimStatus};

/// The path at which a shim reports its status.
const STATUS_PATH: &str = "/splitrail/status";
/// Maximum size of a shim's status, in bytes.
const STATUS_MAX_BYTES: usize = 1 << 20;

/// Asks the shim for its status.
pub(crate) async fn status(asker: &Asker<'_>) -> ShimFact {
    let reply = asker.get(STATUS_PATH, STATUS_MAX_BYTES).await;
    let body = reply.ok().filter(|reply| reply.status == 200).map(|reply| reply.body);
    let status = body.and_then(|body| parse(&body));
    status.map_or(ShimFact::Absent, ShimFact::Reports)
}

/// The status in a reply; `None` if it is not one of a shim.
fn parse(body: &[u8]) -> Option<ShimStatus> {
    let status: Value = serde_json::from_slice(body).ok()?;
    let text = |value: &Value| value.as_str().map(shortened);
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let routers = list(&status["routers"]);
    // A duplicate is the same router at another of its addresses.
    let is_live = |router: &&Value| router["stage"] == "live" || router["stage"] == "duplicate";
    let ranks = list(&status["mirror"]["ranks"]);
    let error = |router: &Value| text(&router["last_error"]).filter(|_| !is_live(&router));
    Some(ShimStatus {
        id: text(&status["id"])?,
        role: text(&status["role"])?,
        unready: text(&status["unready"]),
        current_ranks: ranks.iter().filter(|rank| rank["current"] == true).count(),
        ranks: ranks.len(),
        live_routers: routers.iter().filter(is_live).count(),
        routers: routers.len(),
        router_error: routers.iter().find_map(error),
    })
}

/// Asks the bootstrap server of a prefill worker. That of Mooncake lists its engines; that of SGLang
/// is only connected to.
pub(crate) async fn bootstrap(asker: &Asker<'_>, connector: Connector) -> BootstrapFact {
    let configured = asker.subject.worker.config.bootstrap.as_deref();
    let Some(server) = Bootstrap::new(configured, asker.subject.authority()) else {
        return BootstrapFact::Untested;
    };
    let patience = asker.until(super::QUESTION_TIMEOUT);
    let answers = async {
        match connector {
            Connector::Mooncake => query(asker, &server).await,
            Connector::Nixl | Connector::NixlPush | Connector::SharedStorage | Connector::None => {
                Ok(())
            }
            Connector::Sglang if asker.subject.is_guarded() => Ok(()),
            Connector::Sglang => {
                let connected = TcpStream::connect((server.host(), server.port())).await;
                connected.map(drop).map_err(|error| error.to_string())
            }
        }
    };
    match timeout_at(patience, answers).await.unwrap_or_else(|_| Err("no reply in time".into())) {
        Ok(()) => BootstrapFact::Answers,
        Err(cause) => BootstrapFact::Fails { url: server.url(), cause },
    }
}

async fn query(asker: &Asker<'_>, server: &Bootstrap) -> Result<(), String> {
    let guarded = asker.subject.is_guarded();
    let text = asker.client.ask(server.authority(), guarded, QUERY_PATH, MAX_QUERY_BYTES).await?;
    EngineIds::parse(&text).map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_of_a_shim_is_read_and_nothing_else() {
        let body = br#"{"id":"d0","role":"decode","unready":null,
            "routers":[{"stage":"live"},{"stage":"waiting","last_error":"refused"}],
            "mirror":{"ranks":[{"current":true},{"current":false}]}}"#;
        let expected = ShimStatus {
            id: "d0".to_owned(),
            role: "decode".to_owned(),
            unready: None,
            current_ranks: 1,
            ranks: 2,
            live_routers: 1,
            routers: 2,
            router_error: Some("refused".to_owned()),
        };
        assert_eq!(parse(body), Some(expected));
        for other in [&b"{}"[..], b"[]", b"", br#"{"id":1,"role":"decode"}"#] {
            assert_eq!(parse(other), None);
        }
    }
}
