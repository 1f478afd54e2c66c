//! The configuration of the connection to the broker, shared by both programs.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_settings::Secret;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::{Node, Value};

/// The broker, and the credentials for it.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BrokerConfig {
    /// Servers of one NATS cluster, `nats://HOST:PORT` or `tls://HOST:PORT`. Further servers are
    /// learned from them. JetStream must be enabled.
    #[schemars(length(min = 1, max = 32))]
    pub servers: Vec<String>,
    /// The credentials with which the program authenticates to the broker. They are read again for
    /// each connection. Without them, the program does not authenticate.
    #[serde(default)]
    pub login: Option<Login>,
    /// The certificates (PEM) of the authorities that may sign the certificate of a `tls://`
    /// server. Defaults to those of the system.
    #[serde(default)]
    pub tls_ca: Option<PathBuf>,
}

/// The credentials with which a program authenticates to the broker.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Login {
    /// A user of the broker with a password.
    User {
        /// The name of the user.
        name: String,
        /// The password of the user.
        password: Secret,
    },
    /// A token of the broker.
    Token {
        /// The token.
        token: Secret,
    },
}

impl Login {
    /// The secret of the login.
    #[must_use]
    pub fn secret(&self) -> &Secret {
        match self {
            Self::User { password, .. } => password,
            Self::Token { token } => token,
        }
    }

    fn secret_mut(&mut self) -> &mut Secret {
        match self {
            Self::User { password, .. } => password,
            Self::Token { token } => token,
        }
    }
}

impl BrokerConfig {
    /// Resolves relative paths against the folder of the configuration file.
    pub fn anchor(&mut self, base_dir: &Path) {
        self.login.iter_mut().for_each(|login| login.secret_mut().anchor(base_dir));
        if let Some(path) = &mut self.tls_ca {
            *path = base_dir.join(&*path);
        }
    }
}

/// Reports every violated rule for the broker, which is configured in `section` (`name` in
/// messages).
pub fn check(section: &Node, name: &str, base_dir: &Path, report: &mut ProblemReport) {
    let servers = section.get("servers").map(Node::items).unwrap_or_default();
    for (index, node) in servers.iter().enumerate() {
        let Some(text) = node.text() else { continue };
        if let Err(why) = server(text) {
            let message = format!("`{name}.servers[{index}]` {why}");
            report.error(node.at, message, "write `nats://HOST:PORT` or `tls://HOST:PORT`");
        }
    }
    exposed(section, name, report);
    if let Some(node) = section.get("login")
        && let Ok(mut login) = serde_json::from_value::<Login>(node.to_json())
    {
        login.secret_mut().anchor(base_dir);
        if let Err(error) = login.secret().resolve() {
            let hint = "a file that can be read here, or a variable that is set here";
            report.error(node.at, format!("`{name}.login`: {error}"), hint);
        }
    }
    if let Some(node) = section.get("tls_ca")
        && let Some(path) = node.text()
        && let Err(error) = std::fs::File::open(base_dir.join(path))
    {
        let message = format!("`{name}.tls_ca` cannot be read: {error}");
        report.error(node.at, message, "name a PEM file");
    }
}

/// Warns of a broker on another host without a login, and of a login that is sent in clear text.
fn exposed(section: &Node, name: &str, report: &mut ProblemReport) {
    let login = section.get("login").filter(|login| login.value != Value::Null);
    let servers = section.get("servers").map(Node::items).unwrap_or_default();
    let elsewhere = servers.iter().find(|node| node.text().is_some_and(|text| !is_here(text)));
    let in_clear = |text: &str| text.starts_with("nats://") && !is_here(text);
    let clear = servers.iter().find(|node| node.text().is_some_and(in_clear));
    if let (Some(node), None) = (elsewhere, login) {
        let message = format!(
            "`{name}.login` is missing: any program that reaches the broker can speak for any worker"
        );
        report.warn(node.at, message, "give each shim a user of its own: docs/event-plane.md");
    }
    if let (Some(node), Some(_)) = (clear, login) {
        let message = format!("`{name}.login` travels in clear text");
        report.warn(
            node.at,
            message,
            "`tls://HOST:PORT`, with `tls_ca` for an authority of your own",
        );
    }
}

/// Whether a server is on this host. Texts that are not addresses are reported elsewhere.
fn is_here(text: &str) -> bool {
    let address = text.split_once("://").map_or(text, |(_, address)| address);
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
}

/// Checks that a text names a server; the error does not repeat the text.
fn server(text: &str) -> Result<(), String> {
    let scheme = if text.starts_with("tls://") { "tls" } else { "nats" };
    splitrail_settings::endpoint::parse(text, scheme).map(|_| ()).map_err(|bad| bad.why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_on_this_host_are_recognized() {
        for (text, here) in [
            ("nats://127.0.0.1:4222", true),
            ("tls://[::1]:4222", true),
            ("nats://localhost:4222", true),
            ("nats://10.0.0.1:4222", false),
            ("nats://nats.svc:4222", false),
        ] {
            assert_eq!(is_here(text), here, "{text}");
        }
    }

    #[test]
    fn servers_have_a_scheme_and_no_password() {
        assert!(server("nats://10.0.0.1:4222").is_ok() && server("tls://nats.svc:4222").is_ok());
        for text in ["10.0.0.1:4222", "nats://u:p@a:1", "nats://a", "http://a:1", "nats://a:1/x"] {
            assert!(server(text).is_err(), "{text}");
        }
    }
}
