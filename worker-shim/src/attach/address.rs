//! Addresses of routers.

use std::fmt;
use std::str::FromStr;

/// The address of a router's `listen.fleet`: `HOST:PORT`, where the host is an IP address or a
/// name. A name can resolve to several routers, as that of a headless Kubernetes service does.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// An IPv6 address is stored without brackets.
    host: String,
    port: u16,
}

/// The text is not the address of a router.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not of the form HOST:PORT")]
pub struct AddressError;

impl Address {
    /// The host, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for Address {
    type Err = AddressError;

    /// Accepts and ignores a prefix `http://`, `https://` or `dns+`. TLS is configured elsewhere.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let bare =
            ["http://", "https://", "dns+"].iter().find_map(|before| text.strip_prefix(before));
        let bare = bare.unwrap_or(text);
        let (host, port) = bare.rsplit_once(':').ok_or(AddressError)?;
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_host = |host: &str| {
            !host.is_empty()
                && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
        };
        let host = match bracketed {
            Some(address) if address.parse::<std::net::Ipv6Addr>().is_ok() => address,
            None if is_host(host) => host,
            _ => return Err(AddressError),
        };
        let port = port.parse().ok().filter(|port| *port > 0).ok_or(AddressError)?;
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn router_addresses_are_a_host_and_a_port() {
        for (text, shown) in [
            ("router-0.router.ns.svc:8002", "router-0.router.ns.svc:8002"),
            ("dns+router.ns:8002", "router.ns:8002"),
            ("http://10.0.0.1:1", "10.0.0.1:1"),
            ("https://[::1]:65535", "[::1]:65535"),
        ] {
            let address = text.parse::<Address>();
            assert_eq!(address.map(|address| address.to_string()), Ok(shown.to_owned()));
        }
        for text in
            ["", "router", "router:", ":1", "router:0", "r:65536", "::1:80", "r/x:1", "u@r:1"]
        {
            assert_eq!(text.parse::<Address>(), Err(AddressError), "{text}");
        }
    }
}
