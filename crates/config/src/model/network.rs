//! IP networks: `10.0.0.0/8`, or one address.

use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// An IP network: `10.0.0.0/8`, or one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix_bits: u8,
}

/// The text is not an IP network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an IP network")]
pub struct NotANetwork;

impl Network {
    /// The addresses that share their first bits with this one.
    pub(super) const fn new(address: IpAddr, prefix_bits: u8) -> Self {
        Self { address, prefix_bits }
    }

    /// The length of the prefix in bits.
    pub fn prefix_bits(&self) -> u8 {
        self.prefix_bits
    }

    /// Whether an address lies in it. An IPv4-mapped IPv6 address counts as its IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let (ours, theirs) = match (self.address, address.to_canonical()) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                (u128::from(ours.to_bits()) << 96, u128::from(theirs.to_bits()) << 96)
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => (ours.to_bits(), theirs.to_bits()),
            _ => return false,
        };
        let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix_bits)).unwrap_or(0);
        (ours ^ theirs) & mask == 0
    }
}

impl FromStr for Network {
    type Err = NotANetwork;

    fn from_str(text: &str) -> Result<Self, NotANetwork> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| NotANetwork)?;
        let widest = if address.is_ipv4() { 32 } else { 128 };
        let digits = |bits: &&str| !bits.is_empty() && bits.bytes().all(|b| b.is_ascii_digit());
        let prefix_bits = match bits {
            None => widest,
            Some(bits) => Some(bits)
                .filter(digits)
                .and_then(|bits| bits.parse().ok())
                .filter(|bits| *bits <= widest)
                .ok_or(NotANetwork)?,
        };
        Ok(Self { address, prefix_bits })
    }
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl Serialize for Network {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}/{}", self.address, self.prefix_bits))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_lie_in_their_networks_only() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
            ("10.1.2.3", "10.1.2.3", "10.1.2.4"),
            ("192.168.4.0/22", "192.168.7.255", "192.168.8.0"),
            ("fd00::/8", "fdff::1", "fe80::1"),
            ("::1", "::1", "127.0.0.1"),
            ("10.0.0.0/8", "::ffff:10.0.0.1", "::ffff:11.0.0.1"),
        ] {
            let network: Network = network.parse().unwrap();
            assert!(network.contains(inside.parse().unwrap()), "{inside}");
            assert!(!network.contains(outside.parse().unwrap()), "{outside}");
        }
        let all: Network = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("203.0.113.9".parse().unwrap()));
        for text in ["", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/+8", "::/129", "host", "10.0.0/8"] {
            assert_eq!(text.parse::<Network>(), Err(NotANetwork), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_network_contains_what_shares_its_first_bits(
            ours: u32, theirs: u32, prefix_bits in 0u8..=32,
        ) {
            let text = format!("{}/{prefix_bits}", std::net::Ipv4Addr::from_bits(ours));
            let network: Network = text.parse().unwrap();
            let equal_bits = (ours ^ theirs).leading_zeros() >= u32::from(prefix_bits);
            let theirs = std::net::Ipv4Addr::from_bits(theirs);
            prop_assert_eq!(network.contains(theirs.into()), equal_bits);
        }
    }
}
