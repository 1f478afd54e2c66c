//! Identifies the shim of a new stream and decides whether it may attach.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use tonic::Status;

use super::credentials::Allowed;
use super::inbound::{Inbound, Said};
use crate::Cluster;
use crate::Served;
use crate::{Fleet, Source};
use splitrail_config::http_address;
use splitrail_config::model::{Discovery, Role, Worker as WorkerConfig};
use splitrail_engine_client::networks::literal;

/// The version of the protocol between shims and routers.
pub(super) const PROTOCOL: u32 = 1;
/// Maximum time between the start of a stream and its hello.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum time to resolve a host name.
const LOOK_UP: Duration = Duration::from_secs(5);
/// Maximum length of a worker's id in characters, as in the configuration.
const ID_MAX: usize = 128;
/// Maximum length of any other text in characters.
const TEXT_MAX: usize = 256;
/// Length of the secret of a shim's process in bytes.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=64;

/// What a hello asks for: the worker, and the proofs that its shim gave.
pub(super) struct AttachRequest {
    pub(super) served: Arc<Served>,
    /// The worker in the form of the configuration.
    pub(super) config: WorkerConfig,
    pub(super) authority: Authority,
    /// Proves that two streams are of the same process; empty if the shim sent none.
    pub(super) secret: Vec<u8>,
    pub(super) mirror_id: String,
    pub(super) capabilities: v1::Capabilities,
}

/// Reads who it is, and checks everything that can be checked without the others.
pub(super) async fn greet(
    cluster: &Cluster,
    fleet: &Fleet,
    inbound: &mut Inbound,
    allowed: &Allowed,
) -> Result<AttachRequest, Status> {
    let first = tokio::time::timeout(PATIENCE, inbound.said()).await;
    let first = first.map_err(|_| Status::unavailable("no hello came in time"))??;
    let Some(Said::Message(Some(first))) = first else {
        return Err(Status::invalid_argument("the first message must be `hello`"));
    };
    let Message::Hello(hello) = *first else {
        return Err(Status::invalid_argument("the first message must be `hello`"));
    };
    let serving = cluster.serving();
    // An adapter's name is not a model's.
    let named = serving.names.get(&hello.model).filter(|named| named.adapter.is_none());
    let served = named.map(|named| Arc::clone(&serving.models[named.model]));
    let request = request(hello, served)?;
    may_speak_for(fleet, &request, allowed)?;
    let is_open = request.served.config.discovery.contains(&Discovery::Shim {});
    let is_written_down = fleet.is_written_down(request.served.name(), &request.authority);
    if !(is_open || is_written_down) {
        return Err(Status::not_found("this model has no `discovery` of kind `shim`"));
    }
    if !is_written_down {
        admit(cluster, request.authority.host()).await?;
    }
    if let Some(bootstrap) = &request.config.bootstrap
        && let Some(Ok(authority)) = bootstrap.strip_prefix("http://").map(str::parse::<Authority>)
        && authority.host() != request.authority.host()
    {
        admit(cluster, authority.host()).await?;
    }
    Ok(request)
}

/// Whether a caller with these credentials may speak for the worker that it names, and for the
/// one that is known at the address that it gives.
fn may_speak_for(fleet: &Fleet, request: &AttachRequest, allowed: &Allowed) -> Result<(), Status> {
    let (model, id) = (request.served.name(), request.config.id.as_str());
    let there = fleet.name_at(model, &request.authority);
    if let Some(id) =
        [Some(id), there.as_deref()].into_iter().flatten().find(|id| !allowed.permits(id))
    {
        let message = format!("this credential is not for worker {id}");
        return Err(Status::permission_denied(message));
    }
    if fleet.is_written_elsewhere(model, id, &request.authority) {
        let message =
            format!("worker {id} is written down at another address than {}", request.config.url);
        return Err(Status::permission_denied(message));
    }
    Ok(())
}

fn request(hello: v1::Hello, served: Option<Arc<Served>>) -> Result<AttachRequest, Status> {
    if hello.protocol != PROTOCOL {
        let message = format!("protocol {} is not spoken here, but {PROTOCOL}", hello.protocol);
        return Err(Status::failed_precondition(message));
    }
    let role = match hello.role() {
        v1::WorkerRole::Prefill => Role::Prefill,
        v1::WorkerRole::Decode => Role::Decode,
        v1::WorkerRole::Both => Role::Both,
        v1::WorkerRole::Unspecified => return Err(invalid("role", "prefill, decode or both")),
    };
    let v1::Hello { worker_id, instance_id, url, mirror_id, capabilities, .. } = hello;
    let secret = hello.instance_secret;
    if !secret.is_empty() && !SECRET_BYTES.contains(&secret.len()) {
        return Err(invalid("instance_secret", "16 to 64 random bytes, or none"));
    }
    let in_ids = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
    if worker_id.is_empty() || worker_id.len() > ID_MAX || !worker_id.chars().all(in_ids) {
        return Err(invalid("worker_id", "1 to 128 of A-Z a-z 0-9 . _ : -"));
    }
    let short = |text: &str| text.len() <= TEXT_MAX && !text.chars().any(char::is_control);
    if instance_id.is_empty() || !short(&instance_id) {
        return Err(invalid("instance_id", "a short text, made anew with each process"));
    }
    if !short(&mirror_id) {
        return Err(invalid("mirror_id", "a short text"));
    }
    let url = address("url", &url)?;
    let capabilities = capabilities.unwrap_or_default();
    check(&capabilities)?;
    let bootstrap = match capabilities.bootstrap.as_str() {
        "" => None,
        bootstrap => Some(address("capabilities.bootstrap", bootstrap)?),
    };
    let Some(served) = served else {
        return Err(Status::not_found("this model is not served here"));
    };
    let authority = url.trim_start_matches("http://").parse();
    let authority = authority.map_err(|_| invalid("url", "`http://HOST:PORT`"))?;
    let config = WorkerConfig {
        id: worker_id,
        role,
        url,
        kv_events: None,
        kv_replay: None,
        bootstrap,
        shim: true,
        honours_threshold: None,
        costs: None,
        data_parallel_ranks: None,
        takes_rank_header: None,
    };
    Ok(AttachRequest { served, config, authority, secret, mirror_id, capabilities })
}

/// Whether what is told of an engine is of a sane size.
pub(super) fn check(capabilities: &v1::Capabilities) -> Result<(), Status> {
    let v1::Capabilities { engine, engine_version, connector, connector_engine_id, .. } =
        capabilities;
    for text in [engine, engine_version, connector, connector_engine_id, &capabilities.bootstrap] {
        if text.len() > TEXT_MAX || text.chars().any(char::is_control) {
            return Err(invalid("capabilities", "short texts"));
        }
    }
    if capabilities.ranks.is_some_and(|ranks| ranks == 0 || ranks > super::RANKS_MAX) {
        return Err(invalid("capabilities.ranks", "1 to 256"));
    }
    if capabilities.block_size.is_some_and(|tokens| tokens == 0 || tokens > 65_536) {
        return Err(invalid("capabilities.block_size", "1 to 65536"));
    }
    Ok(())
}

fn address(what: &str, url: &str) -> Result<String, Status> {
    http_address(url).map_err(|why| invalid(what, &why))
}

fn invalid(what: &str, why: &str) -> Status {
    Status::invalid_argument(format!("hello.{what}: {why}"))
}

/// Whether a worker may be at a host: each of its addresses lies in the allowed networks.
async fn admit(cluster: &Cluster, host: &str) -> Result<(), Status> {
    let outside =
        || Status::permission_denied("its address lies outside `fleet.networks` of this router");
    let addresses: Vec<IpAddr> = match literal(host) {
        Some(address) => vec![address],
        None => {
            let found = tokio::time::timeout(LOOK_UP, tokio::net::lookup_host((host, 0))).await;
            let unknown = || Status::unavailable("the host of its address cannot be looked up");
            let found = found.map_err(|_| unknown())?.map_err(|_| unknown())?;
            found.map(|address| address.ip()).collect()
        }
    };
    match !addresses.is_empty() && addresses.iter().all(|address| cluster.networks.admit(*address))
    {
        true => Ok(()),
        false => Err(outside()),
    }
}

/// Adds the worker of a request to the fleet, unless its id belongs to a worker at another address.
pub(super) fn claim(fleet: &Fleet, request: &AttachRequest) -> Result<Arc<crate::Worker>, Status> {
    let (model, id) = (request.served.name(), request.config.id.as_str());
    match fleet.claim(model, Source::Shim, request.config.clone()) {
        Ok(worker) if worker.authority == request.authority => Ok(worker),
        Ok(_) => {
            fleet.revoke(model, Source::Shim, id);
            Err(Status::already_exists("another shim speaks for this worker"))
        }
        Err(error) => Err(Status::not_found(error.to_string())),
    }
}
