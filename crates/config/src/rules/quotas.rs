//! Rules about limits that routers share.

use std::path::Path;

use crate::model::BrokerLogin;
use crate::value::typed;
use splitrail_settings::endpoint::{self, is_loopback};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::process::open_regular;
use splitrail_settings::tree::{Node, Value};

/// Reports every violation of a rule about `quotas`.
pub(super) fn check(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let Some(section) = root.get("quotas") else { return };
    if section.get("kind").and_then(Node::text) != Some("nats") {
        return;
    }
    broker(section, base_dir, report);
}

/// Checks how the broker is reached.
fn broker(section: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let servers = section.get("servers").map(Node::items).unwrap_or_default();
    for (index, node) in servers.iter().enumerate() {
        let Some(text) = node.text() else { continue };
        if let Err(why) = server(text) {
            let message = format!("`quotas.servers[{index}]` {why}");
            report.error(node.at, message, "write `nats://HOST:PORT` or `tls://HOST:PORT`");
        }
    }
    exposed(section, report);
    if let Some(node) = section.get("login")
        && let Some(mut login) = typed::<Option<BrokerLogin>>(section, "login").flatten()
    {
        login.secret_mut().anchor(base_dir);
        if let Err(error) = login.secret().resolve() {
            let hint = "a file that can be read here, or a variable that is set here";
            report.error(node.at, format!("`quotas.login`: {error}"), hint);
        }
    }
    if let Some(node) = section.get("tls_ca")
        && let Some(path) = node.text()
        && let Err(error) = open_regular(&base_dir.join(path))
    {
        let message = format!("`quotas.tls_ca` cannot be read: {error}");
        report.error(node.at, message, "name a PEM file");
    }
}

/// Warns of a broker on another host without a login, and of a login that is sent in clear text.
fn exposed(section: &Node, report: &mut ProblemReport) {
    let login = section.get("login").filter(|login| login.value != Value::Null);
    let servers = section.get("servers").map(Node::items).unwrap_or_default();
    let elsewhere = servers.iter().find(|node| node.text().is_some_and(|text| !is_here(text)));
    let in_clear = |text: &str| text.starts_with("nats://") && !is_here(text);
    let clear = servers.iter().find(|node| node.text().is_some_and(in_clear));
    if let (Some(node), None) = (elsewhere, login) {
        let message = "`quotas.login` is missing: any program that reaches the broker can change \
                       the shares of limits"
            .to_owned();
        report.warn(node.at, message, "give the routers a user of the broker: docs/quotas.md");
    }
    if let (Some(node), Some(_)) = (clear, login) {
        let message = "`quotas.login` travels in clear text".to_owned();
        let hint = "`tls://HOST:PORT`, with `tls_ca` for an authority of your own";
        report.warn(node.at, message, hint);
    }
}

/// Whether a server is on this host. Texts that are not addresses are reported elsewhere.
fn is_here(text: &str) -> bool {
    is_loopback(text.split_once("://").map_or(text, |(_, address)| address))
}

/// Checks that a text names a server; the error does not repeat the text.
fn server(text: &str) -> Result<(), String> {
    let scheme = if text.starts_with("tls://") { "tls" } else { "nats" };
    endpoint::parse(text, scheme).map(|_| ()).map_err(|bad| bad.why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_a_scheme_and_no_password() {
        assert!(server("nats://10.0.0.1:4222").is_ok() && server("tls://nats.svc:4222").is_ok());
        for text in ["10.0.0.1:4222", "nats://u:p@a:1", "nats://a", "http://a:1", "nats://a:1/x"] {
            assert!(server(text).is_err(), "{text}");
        }
    }
}
