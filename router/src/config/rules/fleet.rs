//! Rules about the fleet listener and about where workers may be.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use super::typed;
use crate::config::model::{FleetConfig, FleetTls, Network, Secret};
use crate::config::problem::{Place, Report};
use crate::config::scalar::parse_duration;
use crate::config::tree::Node;
use crate::config::words::shown;
use crate::fleet::attach::{Tokens, read_tls};

/// Reports every broken rule about `fleet` and `listen.fleet`.
pub(super) fn check(root: &Node, base_dir: &Path, report: &mut Report) {
    let section = root.get("fleet");
    let listener = root.get("listen").and_then(|listen| {
        let address: SocketAddr = typed::<Option<SocketAddr>>(listen, "fleet").flatten()?;
        Some((listen.get("fleet")?.at, address))
    });
    match listener {
        Some((at, address)) => proven(section, at, address, report),
        None if super::events::is_plane(root) => {}
        None => open_models(root, report),
    }
    let Some(section) = section else { return };
    networks(section, report);
    durations(section, report);
    token(section, base_dir, report);
    tls(section, base_dir, report);
    if listener.is_none() {
        for node in ["token", "tls"].into_iter().filter_map(|key| section.get(key)) {
            let message = "the fleet has no listener that would need this".to_owned();
            report.warn(node.at, message, "add `listen.fleet: IP:PORT`, or delete it");
        }
    }
}

/// Whoever reaches the listener can send prompts to any address it is allowed to name.
fn proven(section: Option<&Node>, at: Place, address: SocketAddr, report: &mut Report) {
    let client_ca = section.and_then(|fleet| fleet.get("tls")?.get("client_ca"));
    if client_ca.or(section.and_then(|fleet| fleet.get("token"))).is_some() {
        return;
    }
    let hint = "add `fleet.token: { kind: file, path: ... }`, or `fleet.tls` with a `client_ca`";
    if address.ip().is_loopback() {
        let message = "`listen.fleet` lets every program on this host attach as a worker";
        report.warn(at, message.to_owned(), hint);
    } else {
        let message = "`listen.fleet` would let anybody who reaches it attach as a worker";
        report.error(at, message.to_owned(), hint);
    }
}

/// Models that wait for side-cars which have nowhere to go.
fn open_models(root: &Node, report: &mut Report) {
    for (index, model) in root.get("models").map(Node::items).unwrap_or_default().iter().enumerate()
    {
        let sources = model.get("discovery").map(Node::items).unwrap_or_default();
        let is_shim = |source: &&Node| source.get("kind").and_then(Node::text) == Some("shim");
        if let Some(source) = sources.iter().find(is_shim) {
            let message = format!(
                "`models[{index}].discovery` waits for side-cars, but there is no fleet listener"
            );
            report.warn(source.at, message, "add `listen.fleet: IP:PORT`");
        }
    }
}

fn networks(section: &Node, report: &mut Report) {
    let list = section.get("networks").map(Node::items).unwrap_or_default();
    for (index, node) in list.iter().enumerate() {
        let Some(text) = node.text() else { continue };
        if text.parse::<Network>().is_err() {
            let shown = shown(text);
            let message = format!("`fleet.networks[{index}]` \"{shown}\" is not an IP network");
            report.error(node.at, message, "an address, or `10.0.0.0/8`");
        }
    }
}

fn durations(section: &Node, report: &mut Report) {
    let defaults = FleetConfig::default();
    let duration = |key: &str, default: Duration| match section.get(key) {
        Some(node) => node.text().and_then(|text| parse_duration(text).ok()),
        None => Some(default),
    };
    let (Some(interval), Some(stale)) = (
        duration("load_interval", defaults.load_interval),
        duration("load_stale", defaults.load_stale),
    ) else {
        return;
    };
    let at = |key: &str| section.get(key).unwrap_or(section).at;
    if interval < Duration::from_millis(10) {
        let message = "`fleet.load_interval` is too short".to_owned();
        report.error(at("load_interval"), message, "at least `10ms`; `1s` is usual");
    } else if stale < interval * 2 {
        let message = "`fleet.load_stale` is less than two of `fleet.load_interval`".to_owned();
        let hint = "a single report that comes late would count: five intervals are usual";
        report.error(at("load_stale"), message, hint);
    }
}

fn token(section: &Node, base_dir: &Path, report: &mut Report) {
    let Some(node) = section.get("token") else { return };
    let Some(Some(mut secret)) = typed::<Option<Secret>>(section, "token") else { return };
    if let Secret::File { path } = &mut secret {
        *path = base_dir.join(&*path);
    }
    if let Err(error) = Tokens::read(&secret) {
        let hint = match secret {
            Secret::File { .. } => {
                "the file must be readable by the router and hold one token to a line"
            }
            Secret::Env { .. } => "set the variable where the router runs, and for checks as well",
        };
        report.error(node.at, format!("`fleet.token`: {error}"), hint);
    }
}

fn tls(section: &Node, base_dir: &Path, report: &mut Report) {
    let Some(node) = section.get("tls") else { return };
    let Some(Some(mut tls)) = typed::<Option<FleetTls>>(section, "tls") else { return };
    for path in [&mut tls.cert, &mut tls.key].into_iter().chain(&mut tls.client_ca) {
        *path = base_dir.join(&*path);
    }
    if let Err((key, why)) = read_tls(&tls) {
        let at = node.get(key).unwrap_or(node).at;
        let hint = "a PEM file; relative paths start at the configuration's folder";
        report.error(at, format!("`fleet.tls.{key}` {why}"), hint);
    }
}
