//! Addresses of engines, as flags give them.

use std::net::IpAddr;

use splitrail_settings::endpoint;

/// An engine, or all engines behind a DNS name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EngineAddress {
    /// A URL, in normal form.
    Url(String),
    /// The addresses of a name.
    Dns { name: String, port: u16 },
}

impl EngineAddress {
    /// Reads a URL, whose scheme is `http` if it is left out, or `dns://NAME:PORT`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim().trim_end_matches('/');
        if let Some(name) = text.strip_prefix("dns://") {
            return Self::parse_dns(name);
        }
        let url = match text.contains("://") {
            true => endpoint::parse_http(text),
            false => endpoint::parse_http(&format!("http://{text}")),
        };
        url.map(Self::Url).map_err(|bad| {
            let why = bad.why;
            format!("the address {why}: write HOST:PORT, http://HOST:PORT or dns://NAME:PORT")
        })
    }

    fn parse_dns(text: &str) -> Result<Self, String> {
        let url = endpoint::parse_http(&format!("http://{text}"))
            .map_err(|bad| format!("the DNS name {}: write dns://NAME:PORT", bad.why))?;
        let (name, port) = url.trim_start_matches("http://").rsplit_once(':').unwrap_or_default();
        if name.starts_with('[') || name.parse::<IpAddr>().is_ok() {
            return Err("is an address and no DNS name: write HOST:PORT without dns://".to_owned());
        }
        let port = port.parse().map_err(|_| "has no port: write dns://NAME:PORT".to_owned())?;
        Ok(Self::Dns { name: name.to_owned(), port })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_leave_out_its_scheme() {
        let url = |text: &str| EngineAddress::Url(text.to_owned());
        assert_eq!(EngineAddress::parse("10.0.0.1:8000"), Ok(url("http://10.0.0.1:8000")));
        assert_eq!(EngineAddress::parse("https://e:8443/"), Ok(url("https://e:8443")));
        let why = EngineAddress::parse("http://u:secret@e:1").unwrap_err();
        assert!(why.contains("user or password") && !why.contains("secret"), "{why}");
    }

    #[test]
    fn a_dns_name_is_not_an_address() {
        let name = "decode.llm.svc.cluster.local".to_owned();
        assert_eq!(
            EngineAddress::parse("dns://decode.llm.svc.cluster.local:8000"),
            Ok(EngineAddress::Dns { name, port: 8000 })
        );
        for text in ["dns://10.0.0.1:8000", "dns://[::1]:8000", "dns://decode", "dns://u:p@d:1"] {
            let why = EngineAddress::parse(text).unwrap_err();
            assert!(why.contains("write") && !why.contains("u:p"), "{text}: {why}");
        }
    }
}
