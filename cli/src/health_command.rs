//! `splitrail health`: whether a router answers, for containers without an HTTP client.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use splitrail_config::model::EngineTls;
use splitrail_settings::command::{Failure, exit};

use crate::admin::{AdminAddress, AskError, Replica, client_tls, positive};

/// The paths that need no credential and have no effect.
const PATHS: [&str; 2] = ["/health", "/ready"];

/// The arguments.
#[derive(Args)]
pub(crate) struct HealthArgs {
    /// What to ask: `http://HOST:PORT` or `https://HOST:PORT` of any listener, with `/health` (the
    /// process answers; the default) or `/ready` (requests can be served).
    #[arg(
        long,
        value_name = "URL",
        default_value = "http://127.0.0.1:8000/health",
        value_parser = HealthUrl::parse
    )]
    url: HealthUrl,
    /// How long the whole check may take.
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = positive)]
    timeout: Duration,
    /// Connects to this IP address, whatever the host of the URL is. The certificate is checked for
    /// the host.
    #[arg(long, value_name = "IP")]
    connect_to: Option<IpAddr>,
    /// A PEM file with the authorities that the listener's certificate must be from. By default,
    /// these are the authorities that the system trusts.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// A PEM file with a client certificate, for a listener that asks for one.
    #[arg(long, value_name = "FILE", requires = "cert_key")]
    cert: Option<PathBuf>,
    /// The private key of `--cert`.
    #[arg(long, value_name = "FILE", requires = "cert")]
    cert_key: Option<PathBuf>,
}

/// An address with the path that is asked.
#[derive(Clone, Debug)]
struct HealthUrl {
    address: AdminAddress,
    path: &'static str,
}

impl HealthUrl {
    /// Reads a URL, whose scheme and path can be left out.
    fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let start = text.find("://").map_or(0, |at| at + 3);
        let end = text[start..].find('/').map_or(text.len(), |at| start + at);
        let (address, path) = text.split_at(end);
        let path = match path {
            "" | "/" => Some(PATHS[0]),
            _ => PATHS.into_iter().find(|known| *known == path),
        };
        let path = path.ok_or_else(|| format!("the path must be {}", PATHS.join(" or ")))?;
        Ok(Self { address: AdminAddress::parse(address)?, path })
    }
}

/// Asks the router; returns what to print.
///
/// # Errors
/// The router cannot be reached in time, or is not ready.
pub(crate) async fn run(args: HealthArgs) -> Result<String, Failure> {
    let HealthUrl { address, path } = args.url;
    let tls = match address.is_tls() {
        true => {
            let files =
                EngineTls { ca: args.ca, cert: args.cert, key: args.cert_key, server_name: None };
            Some(client_tls(&files, |key| match key {
                "cert" => "--cert",
                "key" => "--cert-key",
                _ => "--ca",
            })?)
        }
        false => None,
    };
    let resolved = args.connect_to.map(|ip| SocketAddr::from((ip, address.port())));
    let replica = Replica { address, resolved, tls, key: None, time_max: args.timeout };
    if path == PATHS[0] {
        replica.get_text(path).await.map_err(|error| failure(&error))?;
        return Ok("healthy".to_owned());
    }
    match replica.readiness().await.map_err(|error| failure(&error))? {
        None => Ok("ready".to_owned()),
        Some(reason) => Err(Failure::new(exit::ATTENTION, format!("not ready: {reason}"))),
    }
}

/// The failure for a listener that does not answer as it should.
fn failure(error: &AskError) -> Failure {
    let hint = "--url names a listener of the router, --ca the authority of its certificate, and \
                --timeout how long to wait";
    Failure::new(error.exit_code(), format!("{}\n  hint: {hint}", error.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_one_of_two_paths() {
        for (text, path, is_tls) in [
            ("http://127.0.0.1:8000/health", "/health", false),
            ("127.0.0.1:9090/ready", "/ready", false),
            ("https://router:8443", "/health", true),
            ("https://[::1]:8443/", "/health", true),
        ] {
            let url = HealthUrl::parse(text).unwrap_or_else(|why| panic!("{text}: {why}"));
            assert_eq!((url.path, url.address.is_tls()), (path, is_tls), "{text}");
        }
        for text in ["", "router", "http://a:1/metrics", "ftp://a:1/health", "http://u:p@a:1"] {
            let why = HealthUrl::parse(text).err().unwrap_or_else(|| panic!("{text}"));
            assert!(!why.contains("u:p"), "{why}");
        }
    }
}
