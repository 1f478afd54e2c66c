//! Identifies the shim of a new stream and decides whether it may attach.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use tonic::Status;

use super::credentials::AllowedWorkers;
use super::inbound::Inbound;
use splitrail_config::model::{Discovery, Role, WorkerConfig};
use splitrail_config::{engine_address, http_address};
use splitrail_engine_client::networks::literal;
use splitrail_fleet::Cluster;
use splitrail_fleet::ServedModel;
use splitrail_fleet::{ClaimError, Fleet, WorkerSource};

/// Maximum number of cache groups that a shim reports as not followed.
const GROUPS_MAX: usize = 64;

/// The version of the protocol between shims and routers.
pub(super) const PROTOCOL: u32 = 1;
/// Maximum time between the start of a stream and its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time to resolve a host name.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a worker's id in characters, as in the configuration.
const ID_MAX: usize = 128;
/// Maximum length of any other text in characters.
const TEXT_MAX: usize = 256;
/// Length of the secret of a shim's process in bytes.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=64;

/// What a hello asks for: the worker, and the proofs that its shim gave.
pub(super) struct CheckedHello {
    pub(super) served: Arc<ServedModel>,
    /// The worker in the form of the configuration.
    pub(super) config: WorkerConfig,
    pub(super) authority: Authority,
    /// Proves that two streams are of the same process.
    pub(super) secret: Vec<u8>,
    pub(super) mirror_id: String,
    pub(super) capabilities: v1::Capabilities,
}

/// Reads the hello of a new stream, and checks everything that does not depend on other sessions.
pub(super) async fn read_hello(
    cluster: &Cluster,
    fleet: &Fleet,
    inbound: &mut Inbound,
    allowed: &AllowedWorkers,
) -> Result<CheckedHello, Status> {
    let first = tokio::time::timeout(HELLO_TIMEOUT, inbound.next()).await;
    let first = first.map_err(|_| Status::unavailable("the shim sent no `hello` in time"))??;
    let Some(Some(Message::Hello(hello))) = first else {
        return Err(Status::invalid_argument("the first message must be `hello`"));
    };
    let serving = cluster.serving();
    // A shim must name a model, not an adapter.
    let named = serving.names.get(&hello.model).filter(|named| named.adapter.is_none());
    let served = named.map(|named| Arc::clone(&serving.models[named.model]));
    let hello = check_hello(hello, served)?;
    may_speak_for(fleet, &hello, allowed)?;
    let is_open = hello.served.config.discovery.contains(&Discovery::Shim {});
    let is_listed = fleet.is_written_down(hello.served.name(), &hello.authority);
    if !(is_open || is_listed) {
        return Err(Status::not_found("this model has no `discovery` of kind `shim`"));
    }
    if !is_listed {
        admit(cluster, hello.authority.host()).await?;
    }
    if let Some(bootstrap) = &hello.config.bootstrap
        && let Some(Ok(authority)) = bootstrap.strip_prefix("http://").map(str::parse::<Authority>)
        && authority.host() != hello.authority.host()
    {
        admit(cluster, authority.host()).await?;
    }
    Ok(hello)
}

/// Checks that the client's credentials allow the worker that it names and the worker that is
/// already known at the address that it gives.
fn may_speak_for(
    fleet: &Fleet,
    hello: &CheckedHello,
    allowed: &AllowedWorkers,
) -> Result<(), Status> {
    let (model, id) = (hello.served.name(), hello.config.id.as_str());
    let known_there = fleet.name_at(model, &hello.authority);
    if let Some(id) = [Some(id), known_there.as_deref()]
        .into_iter()
        .flatten()
        .find(|id| !allowed.permits(model, id))
    {
        let message = format!("this credential is not for worker {id} of model {model}");
        return Err(Status::permission_denied(message));
    }
    if fleet.is_written_elsewhere(model, id, &hello.authority) {
        let message =
            format!("worker {id} is listed with another address than {}", hello.config.url);
        return Err(Status::permission_denied(message));
    }
    Ok(())
}

fn check_hello(hello: v1::Hello, served: Option<Arc<ServedModel>>) -> Result<CheckedHello, Status> {
    if hello.protocol != PROTOCOL {
        let message = format!(
            "protocol {} is not supported; this router supports {PROTOCOL}",
            hello.protocol
        );
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
    if !SECRET_BYTES.contains(&secret.len()) {
        return Err(invalid("instance_secret", "16 to 64 random bytes"));
    }
    let in_ids = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
    if worker_id.is_empty() || worker_id.len() > ID_MAX || !worker_id.chars().all(in_ids) {
        return Err(invalid("worker_id", "1 to 128 of A-Z a-z 0-9 . _ : -"));
    }
    let short = |text: &str| text.len() <= TEXT_MAX && !text.chars().any(char::is_control);
    if instance_id.is_empty() || !short(&instance_id) {
        return Err(invalid("instance_id", "a short text, new for each process"));
    }
    if !short(&mirror_id) {
        return Err(invalid("mirror_id", "a short text"));
    }
    let url = engine_address(&url).map_err(|why| invalid("url", &why))?;
    let capabilities = capabilities.unwrap_or_default();
    check(&capabilities)?;
    let bootstrap = match capabilities.bootstrap.as_str() {
        "" => None,
        bootstrap => {
            let bootstrap = http_address(bootstrap);
            Some(bootstrap.map_err(|why| invalid("capabilities.bootstrap", &why))?)
        }
    };
    let Some(served) = served else {
        return Err(Status::not_found("this model is not served here"));
    };
    let authority = url.split_once("://").and_then(|(_, authority)| authority.parse().ok());
    let authority = authority.ok_or_else(|| invalid("url", "`http://HOST:PORT`"))?;
    let config = WorkerConfig {
        id: worker_id,
        role,
        url,
        kv_events: None,
        kv_replay: None,
        bootstrap,
        shim: true,
        supports_cache_hit_threshold: None,
        costs: None,
        data_parallel_ranks: None,
        transfer_group: None,
        location: None,
        takes_rank_header: None,
    };
    Ok(CheckedHello { served, config, authority, secret, mirror_id, capabilities })
}

/// Checks that the texts and numbers of reported capabilities are within bounds.
pub(super) fn check(capabilities: &v1::Capabilities) -> Result<(), Status> {
    let v1::Capabilities { engine, engine_version, connector, connector_engine_id, .. } =
        capabilities;
    let texts = [engine, engine_version, connector, connector_engine_id, &capabilities.bootstrap];
    let groups = &capabilities.unfollowed_cache_groups;
    if groups.len() > GROUPS_MAX {
        return Err(invalid("capabilities.unfollowed_cache_groups", "at most 64"));
    }
    for text in texts.into_iter().chain(groups) {
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

fn invalid(what: &str, why: &str) -> Status {
    Status::invalid_argument(format!("hello.{what}: {why}"))
}

/// Checks that all addresses of a worker's host lie within the allowed networks.
async fn admit(cluster: &Cluster, host: &str) -> Result<(), Status> {
    let outside =
        || Status::permission_denied("its address lies outside `fleet.networks` of this router");
    let addresses: Vec<IpAddr> = match literal(host) {
        Some(address) => vec![address],
        None => {
            let found =
                tokio::time::timeout(LOOKUP_TIMEOUT, tokio::net::lookup_host((host, 0))).await;
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
pub(super) fn claim(
    fleet: &Fleet,
    hello: &CheckedHello,
) -> Result<Arc<splitrail_fleet::Worker>, Status> {
    let (model, id) = (hello.served.name(), hello.config.id.as_str());
    match fleet.claim(model, WorkerSource::Shim, hello.config.clone()) {
        Ok(worker) if worker.address.authority == hello.authority => Ok(worker),
        Ok(_) => {
            fleet.revoke(model, WorkerSource::Shim, id);
            Err(Status::already_exists("another shim speaks for this worker"))
        }
        Err(error @ ClaimError::Taken { .. }) => Err(Status::already_exists(error.to_string())),
        Err(error @ ClaimError::OwnAddress { .. }) => {
            Err(Status::permission_denied(error.to_string()))
        }
        Err(error) => Err(Status::not_found(error.to_string())),
    }
}
