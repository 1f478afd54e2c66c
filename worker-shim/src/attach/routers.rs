//! Finds the routers: resolves their names periodically and keeps one task for each address.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use splitrail_settings::log_throttle::KeyedLogThrottle;
use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::AttachConfig;
use super::claims::Claims;
use super::link::{Link, ShimState};

/// Maximum number of routers.
const ROUTERS_MAX: usize = 256;
/// Timeout for the resolution of one name.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The task of one router.
struct AttachedRouter {
    name: Authority,
    listed: watch::Sender<bool>,
    task: AbortHandle,
}

/// Keeps one task for each address that the routers' names resolve to. Never ends.
pub(super) async fn attach_to_all(config: AttachConfig, shim: ShimState) {
    let config = Arc::new(config);
    let claims = Arc::new(Claims::default());
    let mut tasks = JoinSet::new();
    let mut routers: BTreeMap<SocketAddr, AttachedRouter> = BTreeMap::new();
    let mut log_throttle = KeyedLogThrottle::default();
    loop {
        let found = resolve_all(&config.routers, &routers, &mut log_throttle).await;
        while let Some(ended) = tasks.try_join_next() {
            if let Err(error) = ended {
                // The error is not logged: it quotes the panic's message, which may contain
                // private content.
                let is_panic = error.is_panic();
                tracing::error!(is_panic, "the task of a router has ended unexpectedly");
            }
        }
        routers.retain(|address, router| {
            let listed = found.contains_key(address);
            router.listed.send_replace(listed);
            !router.task.is_finished()
        });
        for (address, name) in found {
            if routers.contains_key(&address) {
                continue;
            }
            if routers.len() == ROUTERS_MAX {
                if log_throttle.may_log("too_many") {
                    tracing::error!(most = ROUTERS_MAX, "too many routers: some are left out");
                }
                break;
            }
            let entry = Arc::new(config.status.entry(name.to_string(), address));
            let link = Link {
                config: Arc::clone(&config),
                shim: shim.clone(),
                name: name.clone(),
                address,
                router_id: String::new(),
                claims: Arc::clone(&claims),
                entry,
            };
            let (listed, is_listed) = watch::channel(true);
            let task = tasks.spawn(link.run(is_listed));
            routers.insert(address, AttachedRouter { name, listed, task });
        }
        sleep(config.timing.resolve_interval).await;
    }
}

/// Resolves all names. Returns each address with its name. A name that cannot be resolved now
/// keeps its previous addresses.
async fn resolve_all(
    names: &[Authority],
    routers: &BTreeMap<SocketAddr, AttachedRouter>,
    log_throttle: &mut KeyedLogThrottle,
) -> BTreeMap<SocketAddr, Authority> {
    let mut found = BTreeMap::new();
    for name in names {
        match resolve(name).await {
            Ok(addresses) => {
                found.extend(addresses.into_iter().map(|address| (address, name.clone())));
            }
            Err(error) => {
                if log_throttle.may_log("resolve") {
                    tracing::warn!(router = %name, %error, "a router's name cannot be resolved");
                }
                let kept = routers.iter().filter(|(_, router)| router.name == *name);
                found.extend(kept.map(|(address, _)| (*address, name.clone())));
            }
        }
    }
    found
}

async fn resolve(name: &Authority) -> io::Result<Vec<SocketAddr>> {
    let found = timeout(RESOLVE_TIMEOUT, lookup_host(name.as_str()));
    let found = found.await.map_err(io::Error::other)??;
    let found: Vec<_> = found.collect();
    if found.is_empty() {
        return Err(io::Error::other("it has no address"));
    }
    Ok(found)
}
