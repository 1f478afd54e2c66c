//! Addresses of servers (engines, brokers, sockets of KV events): exactly `SCHEME://HOST:PORT`.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

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

/// `HOST:PORT` with one name for the loopback of this host, so that equal texts are the same server:
/// `127.0.0.1` also for `localhost`, `[::1]`, and the unspecified addresses, which lead there.
pub fn with_one_loopback(authority: &str) -> Cow<'_, str> {
    match authority.rsplit_once(':') {
        Some((host, port)) if host != "127.0.0.1" && is_usual_loopback(host) => {
            Cow::Owned(format!("127.0.0.1:{port}"))
        }
        _ => Cow::Borrowed(authority),
    }
}

/// Whether `HOST:PORT` leads to a listener of this process that is bound to `bound`, as far as that
/// can be told without looking up a name.
pub fn leads_to(authority: &str, bound: SocketAddr) -> bool {
    let Some((host, port)) = authority.rsplit_once(':') else { return false };
    let address = address_of(host);
    let is_bound = address.is_some_and(|address| address == bound.ip().to_canonical());
    let is_any = bound.ip().is_unspecified() || bound.ip().is_loopback();
    port.parse() == Ok(bound.port()) && (is_bound || is_any && is_usual_loopback(host))
}

/// Whether `HOST:PORT`, or a host alone, is of this host by its usual name or a loopback address.
pub fn is_loopback(authority: &str) -> bool {
    let with_port = authority.rsplit_once(':').filter(|(_, port)| !port.ends_with(']'));
    let host = with_port.map_or(authority, |(host, _)| host);
    host.eq_ignore_ascii_case("localhost")
        || address_of(host).is_some_and(|address| address.is_loopback())
}

fn address_of(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.parse().ok().map(|address: IpAddr| address.to_canonical())
}

/// Whether a host is one of the names of this host's usual loopback address.
fn is_usual_loopback(host: &str) -> bool {
    const LOOPBACK: [IpAddr; 2] =
        [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    host.eq_ignore_ascii_case("localhost")
        || address_of(host).is_some_and(|at| at.is_unspecified() || LOOPBACK.contains(&at))
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn all_names_of_the_loopback_are_one_server() {
        for host in ["localhost", "LOCALHOST", "127.0.0.1", "[::1]", "0.0.0.0", "[::]"] {
            let authority = format!("{host}:8000");
            assert_eq!(with_one_loopback(&authority), "127.0.0.1:8000", "{host}");
            for bound in ["127.0.0.1:8000", "0.0.0.0:8000", "[::]:8000", "[::1]:8000"] {
                assert!(leads_to(&authority, bound.parse().unwrap()), "{host} {bound}");
            }
            for bound in ["127.0.0.1:8001", "10.0.0.1:8000"] {
                assert!(!leads_to(&authority, bound.parse().unwrap()), "{host} {bound}");
            }
        }
        for other in ["127.0.0.2:8000", "10.0.0.1:8000", "engine:8000", "[::2]:8000"] {
            assert_eq!(with_one_loopback(other), other);
            assert!(!leads_to(other, "0.0.0.0:8000".parse().unwrap()), "{other}");
        }
        assert!(leads_to("10.0.0.1:8000", "10.0.0.1:8000".parse().unwrap()));
        assert!(leads_to("[::ffff:10.0.0.1]:8000", "10.0.0.1:8000".parse().unwrap()));
    }

    #[test]
    fn every_loopback_address_is_of_this_host() {
        for text in
            ["localhost", "Localhost:1", "127.0.0.1:4222", "127.0.0.2:1", "[::1]:1", "[::1]"]
        {
            assert!(is_loopback(text), "{text}");
        }
        for text in ["10.0.0.1:4222", "nats.svc:4222", "0.0.0.0:1", "[::2]", ""] {
            assert!(!is_loopback(text), "{text}");
        }
    }

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
