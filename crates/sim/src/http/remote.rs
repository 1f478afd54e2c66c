//! The part of a request about other engines' KV, for each connector.

use serde_json::Value;

use crate::config::{KvConnector, LoadFailure, Role, SimConfig};
use crate::engine::hand_off::{Source, refused};
use crate::engine::read_back::Read;
use crate::engine::request::RemoteKv;
use crate::error::ApiError;

/// Whether the request would end a real engine's process: it has NIXL's `do_remote_prefill` without
/// block ids, that of NIXL in push mode without a remote request id, or Mooncake's at a prefill engine.
pub(crate) fn is_deadly(body: &Value, config: &SimConfig) -> bool {
    let params = &body["kv_transfer_params"];
    let blocks = &params["remote_block_ids"];
    let kills = match config.connector {
        KvConnector::Nixl => blocks.is_null() || blocks.as_array().is_some_and(Vec::is_empty),
        KvConnector::NixlPush => params["remote_request_id"].is_null(),
        KvConnector::Mooncake => config.role == Role::Prefill,
        _ => false,
    };
    kills && params["do_remote_prefill"] == true
}

/// Parses the hand-off of one choice. `name` is the engine's own name for it, `index` its index
/// among the request's choices.
pub(crate) fn read_remote(
    body: &Value,
    config: &SimConfig,
    name: String,
    index: usize,
) -> Result<RemoteKv, ApiError> {
    let params = &body["kv_transfer_params"];
    let stages = params["do_remote_decode"] == true;
    let pulls = params["do_remote_prefill"] == true;
    if stages && pulls {
        return Err(refused("hand_off_mismatch", "asks for both legs"));
    }
    let is_bidirectional =
        config.connector == KvConnector::Nixl && config.bidirectional_ttl_ms.is_some();
    let has_params = params.as_object().is_some_and(|params| !params.is_empty());
    if is_bidirectional && has_params && !stages && !pulls {
        // The real engine would pin the blocks of the request for ever.
        return Err(refused("hand_off_mismatch", "asks for no leg, and would pin blocks for ever"));
    }
    let has_room = !body["bootstrap_room"].is_null();
    let strange = match config.connector {
        KvConnector::Nixl | KvConnector::NixlPush | KvConnector::Mooncake => has_room,
        KvConnector::SharedStorage => has_room || stages || pulls,
        KvConnector::Sglang => stages || pulls,
        KvConnector::None => false,
    };
    if strange {
        // A real engine would ignore unknown parameters, and serve something else.
        return Err(refused("hand_off_mismatch", "has the parameters of another connector"));
    }
    match config.connector {
        KvConnector::SharedStorage | KvConnector::None => Ok(RemoteKv::None),
        KvConnector::Sglang => room(body, config, index),
        KvConnector::Nixl | KvConnector::NixlPush | KvConnector::Mooncake if pulls => {
            allow(body, config, Role::Prefill, "do_remote_prefill")?;
            let source = match config.connector {
                KvConnector::Mooncake => Source::from_mooncake(params),
                KvConnector::NixlPush => Source::from_push(params, &name),
                _ => Source::from_nixl(params),
            };
            let lacking = || refused("hand_off_unknown", "lacks fields or has wrong ones");
            source.map(RemoteKv::Pull).ok_or_else(lacking)
        }
        KvConnector::Nixl | KvConnector::NixlPush | KvConnector::Mooncake if stages => {
            if config.connector != KvConnector::NixlPush {
                // By such a request, a decode engine that is pushed to says that it does not pull.
                allow(body, config, Role::Decode, "do_remote_decode")?;
            }
            let remote_request_id = match config.connector {
                KvConnector::Mooncake => params["transfer_id"].as_str().map(str::to_owned),
                _ => Some(name),
            };
            let remote_request_id = remote_request_id
                .filter(|id| !id.is_empty())
                .ok_or_else(|| refused("hand_off_unknown", "has no transfer id"))?;
            let is_pushed = config.connector == KvConnector::Mooncake;
            Ok(RemoteKv::Stage { remote_request_id, is_pushed })
        }
        KvConnector::Nixl | KvConnector::NixlPush | KvConnector::Mooncake => Ok(RemoteKv::None),
    }
}

/// Parses what a prefill leg reads from another engine, if it names blocks: what a decode engine keeps
/// pinned, or a prefix that any engine hands over.
pub(crate) fn read_of(body: &Value, config: &SimConfig) -> Result<Option<Read>, ApiError> {
    let params = &body["kv_transfer_params"];
    if params["do_remote_decode"] != true || params["remote_block_ids"].is_null() {
        return Ok(None);
    }
    if config.bidirectional_ttl_ms.is_none() {
        // The real engine would wait for ever.
        return Err(refused(
            "hand_off_refused",
            "is to be read by a prefill leg, without bidirectional_kv_xfer",
        ));
    }
    if config.load_failure == LoadFailure::Recompute {
        // The real engine would wait for ever if it could not read.
        return Err(refused(
            "hand_off_refused",
            "is to be read by a prefill leg, with kv_load_failure_policy recompute",
        ));
    }
    let lacking = || refused("hand_off_unknown", "lacks fields or has wrong ones");
    let source = Source::from_nixl(params).ok_or_else(lacking)?;
    let tokens = params["remote_num_tokens"].as_u64().filter(|tokens| *tokens > 0);
    let tokens = tokens.ok_or_else(lacking)? as usize;
    Ok(Some(Read { source, tokens }))
}

/// SGLang: one half of a pair refuses requests without a room; the choices of a request have
/// consecutive rooms.
fn room(body: &Value, config: &SimConfig, index: usize) -> Result<RemoteKv, ApiError> {
    let room = &body["bootstrap_room"];
    if room.is_null() {
        return match config.role {
            Role::Both => Ok(RemoteKv::None),
            Role::Prefill | Role::Decode => {
                let message = "This engine is one half of a pair: the request has no room.";
                let error = ApiError::bad_request("bootstrap_room", message);
                Err(error.with_code("room_missing"))
            }
        };
    }
    let wrong = || {
        let message = "bootstrap_host, bootstrap_port or bootstrap_room is missing or wrong.";
        ApiError::bad_request("bootstrap_room", message).with_code("room_wrong")
    };
    let number = room.as_i64().filter(|number| *number >= 0).ok_or_else(wrong)?;
    let number = number.checked_add(index as i64).ok_or_else(wrong)?;
    let host = body["bootstrap_host"].as_str().ok_or_else(wrong)?;
    let port = body["bootstrap_port"].as_u64().and_then(|port| port.try_into().ok());
    let port = port.ok_or_else(wrong)?;
    let name = format!("room-{number}");
    match config.role {
        Role::Prefill => Ok(RemoteKv::Stage { remote_request_id: name, is_pushed: false }),
        Role::Decode => Ok(RemoteKv::Pull(Source::meeting(&name, host, port))),
        Role::Both => Err(wrong_role("a room")),
    }
}

/// Refuses a leg that an engine of role `not` does not serve, unless it is a step of a peer fetch.
fn allow(body: &Value, config: &SimConfig, not: Role, what: &str) -> Result<(), ApiError> {
    let fetches = config.peer_fetch && body["max_tokens"] == 1;
    if config.role == not && !fetches { Err(wrong_role(what)) } else { Ok(()) }
}

fn wrong_role(what: &str) -> ApiError {
    let message = format!("This engine's role does not allow {what}.");
    ApiError::bad_request("kv_transfer_params", message).with_code("wrong_role")
}
