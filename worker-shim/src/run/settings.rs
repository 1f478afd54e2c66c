//! Converts the configuration into that of each module.

use std::net::SocketAddr;

use http::uri::Authority;
use splitrail_engine::EngineKind;
use splitrail_proto::v1::WorkerRole;
use splitrail_settings::Secret;

use super::StartError;
use crate::attach;
use crate::config::{Config, Connector, Role, TOKEN_VARIABLE};
use crate::{engine, proxy};

pub(super) fn engine(config: &Config) -> Result<engine::EngineConfig, StartError> {
    let key = config.engine_api_key.as_ref().map(Secret::resolve).transpose();
    let key = key.map_err(|source| StartError::Secret { key: "engine_api_key", source })?;
    let engine = authority(config)?;
    let endpoint = |key, text: &Option<String>| {
        let parsed = text.as_deref().map(str::parse).transpose();
        parsed.map_err(|_| StartError::Address(key))
    };
    Ok(engine::EngineConfig {
        kind: config.connector.map_or(EngineKind::Vllm, Connector::engine),
        url: config.engine.clone(),
        host: engine.host().to_owned(),
        authorization: key.map(|key| key.bearer()),
        load_interval: config.load_interval,
        model: config.model.clone(),
        kv_events: endpoint("kv_events", &config.kv_events)?,
        kv_replay: endpoint("kv_replay", &config.kv_replay)?,
        connector: config.connector.map(|connector| connector.name().to_owned()),
        connector_engine_id: config.connector_engine_id.clone(),
        bootstrap: config.bootstrap.clone(),
        lease: config.lease,
    })
}

/// The host and port of the engine.
fn authority(config: &Config) -> Result<Authority, StartError> {
    let address = config.engine.strip_prefix("http://").unwrap_or(&config.engine);
    address.parse().map_err(|_| StartError::Address("engine"))
}

pub(super) fn proxy(config: &Config) -> Result<proxy::ProxyConfig, StartError> {
    let mut settings = proxy::ProxyConfig::new(authority(config)?);
    settings.limits.connections_max = config.limits.connections_max;
    settings.limits.requests_max = config.limits.requests_max;
    settings.lease = config.lease.unwrap_or(settings.lease);
    Ok(settings)
}

pub(super) fn attach(
    config: &Config,
    bound: SocketAddr,
    status: attach::RouterStatuses,
) -> Result<attach::AttachConfig, StartError> {
    let routers: Result<Vec<Authority>, _> =
        config.router.iter().map(|router| router.parse()).collect();
    let token = match &config.token {
        Some(Secret::File { path }) => Some(attach::Token::File(path.clone())),
        Some(secret) => {
            let tokens = secret.resolve_lines();
            let tokens = tokens.map_err(|source| StartError::Secret { key: "token", source })?;
            tokens.into_iter().next().map(attach::Token::Text)
        }
        None => {
            let set = std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.is_empty());
            set.map(attach::Token::Text)
        }
    };
    if let Some(tls) = &config.tls {
        // Checks now that the files can be read, rather than at the first connection.
        attach::read_tls(tls).map_err(StartError::Tls)?;
    }
    Ok(attach::AttachConfig {
        routers: routers.map_err(|_| StartError::Address("router"))?,
        worker_id: config.id.clone(),
        role: role(config),
        url: url(config, bound),
        // Replaced by the engine's model once the engine is known.
        model: config.model.clone().unwrap_or_default(),
        grace: config.drain.grace,
        token,
        tls: config.tls.clone(),
        timing: attach::Timing::default(),
        status,
    })
}

fn role(config: &Config) -> WorkerRole {
    match config.role {
        Role::Prefill => WorkerRole::Prefill,
        Role::Decode => WorkerRole::Decode,
        Role::Both => WorkerRole::Both,
    }
}

fn url(config: &Config, bound: SocketAddr) -> String {
    config.advertise.clone().unwrap_or_else(|| format!("http://{bound}"))
}
