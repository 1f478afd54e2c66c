//! The address of an admin listener.

use splitrail_settings::endpoint;

/// The address of an admin listener: scheme, host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AdminAddress {
    /// `http://HOST:PORT` or `https://HOST:PORT`, in normal form.
    url: String,
}

impl AdminAddress {
    /// Reads `HOST:PORT`, which means `http`, or a URL, which may end with a slash.
    ///
    /// # Errors
    /// What is wrong, and how to write it. The message does not repeat the text, which may contain a
    /// password.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim().trim_end_matches('/');
        let url = match text.contains("://") {
            true => endpoint::parse_http(text),
            false => endpoint::parse_http(&format!("http://{text}")),
        };
        match url {
            Ok(url) => Ok(Self { url }),
            Err(bad) => Err(format!(
                "the address {}: write HOST:PORT, http://HOST:PORT or https://HOST:PORT",
                bad.why
            )),
        }
    }

    /// Whether the listener speaks TLS.
    pub(crate) fn is_tls(&self) -> bool {
        self.url.starts_with("https://")
    }

    /// `HOST:PORT`, as the `host` header and people have it.
    pub(super) fn authority(&self) -> &str {
        self.url.split_once("://").map_or(&*self.url, |(_, authority)| authority)
    }

    /// The host: a name, or an IP address without brackets.
    pub(super) fn host(&self) -> &str {
        let host = self.authority().rsplit_once(':').map_or(self.authority(), |(host, _)| host);
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
    }

    /// The port.
    pub(crate) fn port(&self) -> u16 {
        let port = self.authority().rsplit_once(':').map(|(_, port)| port);
        port.and_then(|port| port.parse().ok()).unwrap_or_default()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_url_or_a_host_with_a_port() {
        for (text, url, host, port) in [
            ("127.0.0.1:9090", "http://127.0.0.1:9090", "127.0.0.1", 9090),
            ("http://Router-0:9090/", "http://router-0:9090", "router-0", 9090),
            ("https://[::1]:9443", "https://[::1]:9443", "::1", 9443),
            (" [::1]:1 ", "http://[::1]:1", "::1", 1),
        ] {
            let address = AdminAddress::parse(text).unwrap();
            assert_eq!((&*address.url, address.host(), address.port()), (url, host, port));
            assert_eq!(address.is_tls(), url.starts_with("https"));
        }
    }

    #[test]
    fn a_refused_address_is_not_repeated() {
        for text in ["", "router", "tcp://router:1", "http://user:secret@router:1", "router:0"] {
            let why = AdminAddress::parse(text).unwrap_err();
            assert!(why.contains("HOST:PORT") && !why.contains("secret"), "{text}: {why}");
        }
    }
}
