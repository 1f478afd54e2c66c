//! The flags by which commands name the replicas.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use http::HeaderValue;
use rustls::ClientConfig;
use splitrail_config::engine_tls::{EngineTlsFiles, SystemAuthorities};
use splitrail_config::model::EngineTls;
use splitrail_settings::Secret;
use splitrail_settings::command::{Failure, exit};
use splitrail_settings::scalar::parse_duration;

use super::address::AdminAddress;
use super::replica::Replica;

/// Maximum number of replicas of one command.
const REPLICAS_MAX: usize = 256;

/// The name of the variable with a key for the admin listener.
const KEY_VARIABLE: &str = "SPLITRAIL_ADMIN_KEY";

/// The replicas that a command asks.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Routers")]
pub(crate) struct AdminArgs {
    /// The admin listener of a router: `HOST:PORT`, `http://HOST:PORT` or `https://HOST:PORT`. Name
    /// all replicas: repeat the flag, or separate addresses by commas.
    #[arg(
        long,
        value_name = "URL",
        env = "SPLITRAIL_ADMIN",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:9090",
        value_parser = AdminAddress::parse
    )]
    admin: Vec<AdminAddress>,
    /// Takes each address to which a host name resolves as a replica of its own, for example those
    /// of a headless service in Kubernetes.
    #[arg(long)]
    all_addresses: bool,
    /// A PEM file with the authorities that the listeners' certificates must be from. By default,
    /// these are the authorities that the system trusts.
    #[arg(long, value_name = "FILE")]
    admin_ca: Option<PathBuf>,
    /// A PEM file with a client certificate, for listeners that ask for one.
    #[arg(long, value_name = "FILE", requires = "admin_cert_key")]
    admin_cert: Option<PathBuf>,
    /// The private key of `--admin-cert`.
    #[arg(long, value_name = "FILE", requires = "admin_cert")]
    admin_cert_key: Option<PathBuf>,
    /// A file with an operator's key, if the admin listener needs one. Without it, the variable
    /// SPLITRAIL_ADMIN_KEY of the environment is used, if it is set.
    #[arg(long, value_name = "FILE")]
    admin_key_file: Option<PathBuf>,
    /// How long each reply may take.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = positive)]
    admin_timeout: Duration,
}

/// A duration that is not zero.
pub(crate) fn positive(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        Ok(_) => Err("must be longer than 0s".to_owned()),
        Err(why) => Err(format!("{why}: write `10s`, `500ms` or `5m`")),
    }
}

impl AdminArgs {
    /// The replicas, each once. Nothing is sent to them yet.
    ///
    /// # Errors
    /// A file cannot be used, or a host name has no address.
    pub(crate) async fn replicas(&self) -> Result<Vec<Replica>, Failure> {
        let key = self.key()?;
        let tls = match self.admin.iter().any(AdminAddress::is_tls) {
            true => Some(self.tls()?),
            false => None,
        };
        let mut replicas: Vec<Replica> = Vec::new();
        for address in &self.admin {
            let resolved = match self.all_addresses {
                true => resolve(address).await?.into_iter().map(Some).collect(),
                false => vec![None],
            };
            for resolved in resolved {
                let tls = tls.clone().filter(|_| address.is_tls());
                let (address, key, time_max) = (address.clone(), key.clone(), self.admin_timeout);
                let replica = Replica { address, resolved, tls, key, time_max };
                if !replicas.iter().any(|other| other.name() == replica.name()) {
                    replicas.push(replica);
                }
            }
        }
        if replicas.len() > REPLICAS_MAX {
            let message = format!("{} replicas are named, {REPLICAS_MAX} may be", replicas.len());
            return Err(Failure::new(exit::USAGE, message));
        }
        Ok(replicas)
    }

    /// The credential for the admin listeners, if there is one.
    fn key(&self) -> Result<Option<HeaderValue>, Failure> {
        let secret = match &self.admin_key_file {
            Some(path) => Secret::File { path: path.clone() },
            None if std::env::var_os(KEY_VARIABLE).is_some() => {
                Secret::Env { name: KEY_VARIABLE.into() }
            }
            None => return Ok(None),
        };
        let key = secret.resolve().map_err(|error| {
            Failure::new(exit::NO_INPUT, format!("the key for the admin listener: {error}"))
        })?;
        Ok(Some(key.bearer()))
    }

    fn tls(&self) -> Result<Arc<ClientConfig>, Failure> {
        let (ca, cert, key) = (&self.admin_ca, &self.admin_cert, &self.admin_cert_key);
        let (ca, cert, key) = (ca.clone(), cert.clone(), key.clone());
        client_tls(&EngineTls { ca, cert, key, server_name: None }, |key| match key {
            "cert" => "--admin-cert",
            "key" => "--admin-cert-key",
            _ => "--admin-ca",
        })
    }
}

/// The TLS configuration of a command's connections to routers. `flag` is the flag for a key of
/// `files`.
///
/// # Errors
/// A file cannot be used; the message names its flag.
pub(crate) fn client_tls(
    files: &EngineTls,
    flag: impl Fn(&str) -> &'static str,
) -> Result<Arc<ClientConfig>, Failure> {
    let config = EngineTlsFiles::read(files).and_then(|files| match files.has_own_authorities() {
        true => files.client_config(None),
        false => files.client_config(Some(&SystemAuthorities::read())),
    });
    config
        .map_err(|error| Failure::new(exit::NO_INPUT, format!("{} {}", flag(error.key), error.why)))
}

/// The addresses of a host name.
async fn resolve(address: &AdminAddress) -> Result<Vec<std::net::SocketAddr>, Failure> {
    let found = tokio::net::lookup_host((address.host(), address.port())).await;
    let mut found: Vec<_> = found
        .map_err(|error| {
            let message = format!("{} has no address: {error}", address.host());
            Failure::new(exit::UNAVAILABLE, message)
        })?
        .collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}
