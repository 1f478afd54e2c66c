//! The networks in which workers that the configuration does not list may be. Without this bound, a
//! client of the fleet service could make the router send requests to any address.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use splitrail_config::model::Network;

/// The networks in which a worker may be.
#[derive(Clone, Debug)]
pub struct Networks(Arc<[Network]>);

/// Addresses that are not allowed by a wide network: unspecified, broadcast, multicast and
/// link-local ones, and those at which clouds hand out credentials to any process of an instance.
const SPECIAL: [&str; 11] = [
    "0.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "255.255.255.255",
    "::",
    "fe80::/10",
    "ff00::/8",
    // AWS, Google and Alibaba, beside 169.254.169.254.
    "fd00:ec2::/32",
    "fd20:ce::/32",
    "100.100.100.200",
    // Azure.
    "168.63.129.16",
];

fn special() -> &'static [Network] {
    static PARSED: OnceLock<Vec<Network>> = OnceLock::new();
    PARSED.get_or_init(|| SPECIAL.iter().filter_map(|text| text.parse().ok()).collect())
}

impl Networks {
    /// Creates the list from the configured networks.
    pub fn new(networks: &[Network]) -> Self {
        Self(networks.into())
    }

    /// Whether a worker may be at an address. For a special address, one of the networks must be at
    /// least as narrow as the special network that contains it.
    pub fn admit(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        let narrow = special().iter().filter(|network| network.contains(address));
        let bits = narrow.map(|network| network.prefix_bits()).max().unwrap_or(0);
        self.0.iter().any(|network| network.contains(address) && network.prefix_bits() >= bits)
    }

    /// Whether a worker may be at a host. A name is accepted here and checked when it is looked up.
    pub fn admit_host(&self, host: &str) -> bool {
        literal(host).is_none_or(|address| self.admit(address))
    }
}

/// The address, if a host is an address and not a name; IPv6 addresses may have brackets.
pub fn literal(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use splitrail_config::model::FleetConfig;

    fn networks(list: &[&str]) -> Networks {
        let parsed: Vec<Network> = list.iter().map(|text| text.parse().unwrap()).collect();
        Networks::new(&parsed)
    }

    #[test]
    fn workers_are_on_private_networks_unless_others_are_listed() {
        assert_eq!(special().len(), SPECIAL.len());
        let usual = Networks::new(&FleetConfig::default().networks);
        for inside in [
            "127.0.0.1",
            "10.1.2.3",
            "172.31.0.1",
            "192.168.1.1",
            "::1",
            "fd12::1",
            "::ffff:10.0.0.1",
        ] {
            assert!(usual.admit(inside.parse().unwrap()), "{inside}");
        }
        for outside in [
            "8.8.8.8",
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "fe80::1",
            "fd00:ec2::254",
            "172.32.0.1",
            "2001:db8::1",
            "100.100.100.200",
        ] {
            assert!(!usual.admit(outside.parse().unwrap()), "{outside}");
        }
    }

    #[test]
    fn wide_networks_do_not_open_special_addresses_but_narrow_ones_do() {
        let wide = networks(&["0.0.0.0/0", "::/0"]);
        assert!(wide.admit("8.8.8.8".parse().unwrap()));
        assert!(wide.admit("2001:db8::1".parse().unwrap()));
        for special in ["169.254.169.254", "0.0.0.0", "fe80::1", "::", "255.255.255.255"] {
            assert!(!wide.admit(special.parse().unwrap()), "{special}");
        }
        let meant = networks(&["169.254.7.0/24", "fe80::/10"]);
        assert!(meant.admit("169.254.7.9".parse().unwrap()));
        assert!(!meant.admit("169.254.169.254".parse().unwrap()));
        assert!(meant.admit("fe80::1".parse().unwrap()));
    }

    #[test]
    fn addresses_in_other_notations_are_recognised() {
        let usual = Networks::new(&FleetConfig::default().networks);
        assert!(usual.admit_host("10.0.0.1") && usual.admit_host("[::1]"));
        assert!(!usual.admit_host("169.254.169.254") && !usual.admit_host("[fe80::1]"));
        assert!(usual.admit_host("pod-1.engines"), "a name is looked up first");
    }
}
