//! The hosts that a hand-off may name. A decode engine opens connections to the host in its
//! hand-off.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr};

use http::uri::Authority;

use splitrail_config::model::Network;

/// The hosts of one model's workers.
#[derive(Debug)]
pub struct Hosts {
    names: HashSet<String>,
    addresses: HashSet<IpAddr>,
}

impl Hosts {
    /// The hosts of these workers.
    pub fn new<'a>(workers: impl Iterator<Item = &'a Authority>) -> Self {
        let mut hosts = Self { names: HashSet::new(), addresses: HashSet::new() };
        for worker in workers {
            match read(worker.host()) {
                Host::Address(address) => hosts.addresses.insert(address),
                Host::Name(name) => hosts.names.insert(name),
            };
        }
        hosts
    }

    /// Whether a hand-off may name `host`: the host of a worker, or one in the allowed networks.
    /// `peer` is the address that sent the hand-off: a worker that is configured by name is
    /// recognised by the address of the connection.
    pub fn admit(&self, host: &str, peer: Option<IpAddr>, networks: &[Network]) -> bool {
        match read(host) {
            Host::Name(name) => self.names.contains(&name),
            Host::Address(address) => {
                let is_peer = peer.is_some_and(|peer| plain(peer) == address);
                is_peer
                    || self.addresses.contains(&address)
                    || networks.iter().any(|network| network.contains(address))
            }
        }
    }
}

enum Host {
    Address(IpAddr),
    Name(String),
}

/// Normalises a host so that equal hosts compare equal: vLLM names its own host `localhost` unless
/// configured otherwise.
fn read(host: &str) -> Host {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if bare.eq_ignore_ascii_case("localhost") {
        return Host::Address(plain(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    }
    match bare.parse::<IpAddr>() {
        Ok(address) => Host::Address(plain(address)),
        Err(_) => Host::Name(bare.trim_end_matches('.').to_ascii_lowercase()),
    }
}

/// Maps all loopback addresses to 127.0.0.1, and IPv4-mapped IPv6 addresses to IPv4.
fn plain(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        address if address.is_loopback() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        address => address,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn hosts(workers: &[&str]) -> Hosts {
        let workers: Vec<Authority> = workers.iter().map(|w| w.parse().unwrap()).collect();
        Hosts::new(workers.iter())
    }

    #[test]
    fn only_members_and_allowed_networks_are_admitted() {
        let fleet = hosts(&["10.0.0.1:8000", "Prefill-1.pods:8000", "[fd00::1]:80"]);
        for host in ["10.0.0.1", "prefill-1.pods", "PREFILL-1.pods.", "fd00::1", "[fd00::1]"] {
            assert!(fleet.admit(host, None, &[]), "{host}");
        }
        for host in
            ["10.0.0.2", "evil.example", "169.254.169.254", "localhost", "", "10.0.0.1.evil", "::1"]
        {
            assert!(!fleet.admit(host, None, &[]), "{host}");
        }
        let wide = ["192.168.0.0/16".parse().unwrap()];
        assert!(fleet.admit("192.168.3.4", None, &wide));
        assert!(!fleet.admit("192.169.3.4", None, &wide));
    }

    #[test]
    fn the_address_that_answered_is_a_member() {
        let fleet = hosts(&["prefill-1:8000"]);
        let peer = Some("10.9.8.7".parse().unwrap());
        assert!(fleet.admit("10.9.8.7", peer, &[]));
        assert!(!fleet.admit("10.9.8.8", peer, &[]));
        assert!(fleet.admit("::ffff:10.9.8.7", peer, &[]));
    }

    #[test]
    fn all_names_of_this_host_are_recognised() {
        let fleet = hosts(&["127.0.0.1:8000"]);
        for host in ["localhost", "127.0.0.1", "::1", "127.0.1.1"] {
            assert!(fleet.admit(host, None, &[]), "{host}");
        }
    }
}
