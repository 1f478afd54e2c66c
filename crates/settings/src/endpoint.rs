//! Addresses of servers (engines, brokers, sockets of KV events): exactly `SCHEME://HOST:PORT`.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Why a text is not an address. No member repeats the text, which may contain a password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadEndpoint {
    /// The end of the message, which begins with the name of the value.
    pub why: String,
    /// How to write the address.
    pub hint: String,
}

/// Checks `text` and returns it in a normal form, so that equal addresses are equal texts.
///
/// # Errors
/// The text is not such an address.
pub fn parse(text: &str, scheme: &str) -> Result<String, BadEndpoint> {
    let form = format!("write `{scheme}://HOST:PORT`");
    if scheme == "http" && scheme_of(text).is_some_and(|found| found.eq_ignore_ascii_case("https"))
    {
        let why = "uses https, which is not supported here".to_owned();
        return Err(BadEndpoint { why, hint: form });
    }
    parse_one_of(text, &[scheme], form)
}

/// Like [`parse`], for the address of a server that may use TLS: the scheme is `http` or `https`.
///
/// # Errors
/// The text is not such an address.
pub fn parse_http(text: &str) -> Result<String, BadEndpoint> {
    let form = "write `http://HOST:PORT` or `https://HOST:PORT`".to_owned();
    parse_one_of(text, &["http", "https"], form)
}

fn scheme_of(text: &str) -> Option<&str> {
    text.split_once("://").map(|(scheme, _)| scheme)
}

fn parse_one_of(text: &str, schemes: &[&str], form: String) -> Result<String, BadEndpoint> {
    let bad = |why: &str| Err(BadEndpoint { why: why.to_owned(), hint: form.clone() });
    let Some((found, rest)) = text.split_once("://") else {
        return bad("has no scheme");
    };
    let Some(scheme) = schemes.iter().find(|scheme| **scheme == found) else {
        return bad("has another scheme");
    };
    if rest.contains('@') {
        return bad("has a user or password");
    }
    if rest.contains(['?', '#']) {
        return bad("has a query or fragment");
    }
    if let Some((_, path)) = rest.split_once('/') {
        return bad(if path.is_empty() { "ends with a slash" } else { "has a path" });
    }
    let Some((host, port)) = rest.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) else {
        return bad("has no port");
    };
    let digits = port.chars().all(|c| c.is_ascii_digit());
    let port = match port.parse::<u16>() {
        Ok(port) if digits && port > 0 => port,
        _ => return bad("has a port that is not from 1 to 65535"),
    };
    if host == "*" {
        let hint = "`*` is what an engine binds; write the address to connect to".to_owned();
        return Err(BadEndpoint { why: "has no host".to_owned(), hint });
    }
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inner) => match inner.parse::<Ipv6Addr>() {
            Ok(ip) => Ok(format!("{scheme}://[{ip}]:{port}")),
            Err(_) => bad("has a host that is not an IPv6 address"),
        },
        None if is_host(host) => Ok(format!("{scheme}://{}:{port}", host.to_ascii_lowercase())),
        None if host.is_empty() => bad("has no host"),
        None => bad("has a host that is neither a name nor an IP address"),
    }
}

/// A host name (RFC 1123, plus underscores, which names in clusters have) or an IPv4 address.
fn is_host(host: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    // A host whose last label has only digits must be an IPv4 address.
    let numeric = host
        .rsplit('.')
        .next()
        .is_some_and(|last| !last.is_empty() && last.chars().all(|c| c.is_ascii_digit()));
    if numeric {
        return host.parse::<Ipv4Addr>().is_ok();
    }
    host.len() <= 253 && host.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_scheme_a_host_and_a_port_only() {
        for text in [
            "http://10.0.0.1:8000",
            "http://[fe80::1]:80",
            "http://d-0.engines.svc.cluster.local:65535",
            "http://localhost:1",
        ] {
            assert_eq!(parse(text, "http"), Ok(text.to_owned()));
        }
        for text in [
            "",
            "10.0.0.1:8000",
            "https://a:1",
            "tcp://a:1",
            "http://a",
            "http://[::1]",
            "http://:80",
            "http://a:0",
            "http://a:+80",
            "http://a:65536",
            "http://a:80/",
            "http://a:80/v1",
            "http://a:80?x",
            "http://a:80#x",
            "http://u:p@a:80",
            "http://a b:80",
            "http://10.0.0.256:80",
            "http://*:80",
            "http://::1:80",
            "http://a..b:80",
        ] {
            assert!(parse(text, "http").is_err(), "{text}");
        }
    }

    #[test]
    fn addresses_of_servers_that_may_use_tls_have_one_of_two_schemes() {
        for text in ["http://a:1", "https://a:1", "https://[::1]:443"] {
            assert_eq!(parse_http(text), Ok(text.to_owned()));
        }
        for text in ["HTTPS://a:1", "tcp://a:1", "https://a", "https://u:p@a:1", "https://a:1/v1"] {
            let BadEndpoint { hint, .. } = parse_http(text).unwrap_err();
            assert_eq!(hint, "write `http://HOST:PORT` or `https://HOST:PORT`", "{text}");
        }
        assert_eq!(parse_http("https://Host:0443"), Ok("https://host:443".to_owned()));
    }

    #[test]
    fn equal_addresses_have_one_spelling() {
        assert_eq!(parse("http://Host:08000", "http"), parse("http://host:8000", "http"));
        assert_eq!(parse("tcp://[0:0::1]:5557", "tcp"), parse("tcp://[::1]:5557", "tcp"));
    }
}
