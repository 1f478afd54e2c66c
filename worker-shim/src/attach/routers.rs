//! Which routers there are: names are resolved again and again.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::claims::Claims;
use super::link::{Link, Told};
use super::{Address, Config};
use crate::mirror::Quiet;

/// Most routers at once.
const ROUTERS_MAX: usize = 256;
/// How long a name may take.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// One router's task.
struct Attached {
    name: Address,
    listed: watch::Sender<bool>,
    task: AbortHandle,
}

/// Keeps one task for each address that the routers' names stand for. Never ends.
pub(super) async fn attach_all(config: Config, told: Told) {
    let config = Arc::new(config);
    let claims = Arc::new(Claims::default());
    let mut tasks = JoinSet::new();
    let mut routers: BTreeMap<SocketAddr, Attached> = BTreeMap::new();
    let mut quiet = Quiet::default();
    loop {
        let found = find(&config.routers, &routers, &mut quiet).await;
        while let Some(ended) = tasks.try_join_next() {
            if let Err(error) = ended {
                // The error's own words quote the panic's message, which may have content.
                let is_panic = error.is_panic();
                tracing::error!(is_panic, "a task of a router has ended");
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
                if quiet.may_log("too_many") {
                    tracing::error!(most = ROUTERS_MAX, "too many routers: some are left out");
                }
                break;
            }
            let entry = Arc::new(config.status.entry(name.to_string(), address));
            let link = Link {
                config: Arc::clone(&config),
                told: told.clone(),
                name: name.clone(),
                address,
                router_id: String::new(),
                claims: Arc::clone(&claims),
                entry,
            };
            let (listed, is_listed) = watch::channel(true);
            let task = tasks.spawn(link.run(is_listed));
            routers.insert(address, Attached { name, listed, task });
        }
        sleep(config.timing.resolve_interval).await;
    }
}

/// All addresses, each with its name. What cannot be resolved now keeps those it had.
async fn find(
    names: &[Address],
    routers: &BTreeMap<SocketAddr, Attached>,
    quiet: &mut Quiet,
) -> BTreeMap<SocketAddr, Address> {
    let mut found = BTreeMap::new();
    for name in names {
        match resolve(name).await {
            Ok(addresses) => {
                found.extend(addresses.into_iter().map(|address| (address, name.clone())));
            }
            Err(error) => {
                if quiet.may_log("resolve") {
                    tracing::warn!(router = %name, %error, "a router's name cannot be resolved");
                }
                let kept = routers.iter().filter(|(_, router)| router.name == *name);
                found.extend(kept.map(|(address, _)| (*address, name.clone())));
            }
        }
    }
    found
}

async fn resolve(name: &Address) -> io::Result<Vec<SocketAddr>> {
    let looking = lookup_host((name.host(), name.port()));
    let found = timeout(RESOLVE_TIMEOUT, looking).await.map_err(io::Error::other)??;
    let found: Vec<_> = found.collect();
    if found.is_empty() {
        return Err(io::Error::other("it has no address"));
    }
    Ok(found)
}
