//! TCP endpoints of ZeroMQ sockets.

use std::fmt;
use std::str::FromStr;

/// A TCP endpoint of a ZeroMQ socket, written `tcp://host:port`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// `host:port`; IPv6 addresses in brackets.
    address: String,
}

/// A text that is not an endpoint to which to connect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an endpoint of the form tcp://host:port")]
pub struct EndpointError;

impl Endpoint {
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// The host; IPv6 addresses in brackets.
    pub fn host(&self) -> &str {
        self.address.rsplit_once(':').map_or(&self.address, |(host, _)| host)
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let address = text.strip_prefix("tcp://").ok_or(EndpointError)?;
        let (host, port) = address.rsplit_once(':').ok_or(EndpointError)?;
        let bracketed = host.strip_prefix('[').is_some_and(|host| host.ends_with(']'));
        let is_host = !host.is_empty() && host != "*" && (bracketed || !host.contains([':', '/']));
        let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
        if is_host && is_port {
            Ok(Self { address: address.to_owned() })
        } else {
            Err(EndpointError)
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}", self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_connected_to_is_an_endpoint() {
        for text in ["tcp://10.0.0.1:5557", "tcp://engine-0.svc:1", "tcp://[::1]:65535"] {
            assert_eq!(text.parse::<Endpoint>().map(|e| e.to_string()), Ok(text.to_owned()));
        }
        for text in [
            "10.0.0.1:5557",
            "ipc:///run/x",
            "tcp://host",
            "tcp://:1",
            "tcp://*:5557",
            "tcp://host:0",
            "tcp://host:65536",
            "tcp://::1:5557",
            "tcp://host/x:1",
        ] {
            assert_eq!(text.parse::<Endpoint>(), Err(EndpointError), "{text}");
        }
    }
}
