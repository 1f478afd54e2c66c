//! Rules about traces.

use std::path::Path;

use crate::model::{OtlpConfig, OtlpProtocol, OtlpTarget, TracingConfig};
use crate::tls::authorities;
use crate::value::typed;
use splitrail_settings::endpoint::{BadEndpoint, is_loopback};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::{Node, Value};

/// Headers that the protocol itself sets.
const OF_THE_PROTOCOL: [&str; 8] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "host",
    "te",
    "transfer-encoding",
    "user-agent",
];

/// Reports every violation of a rule about `tracing`.
pub(super) fn check(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let section = root.get("tracing").and_then(|tracing| tracing.get("otlp"));
    let Some(section) = section.filter(|node| node.value != Value::Null) else { return };
    let Some(mut tracing) = typed::<TracingConfig>(root, "tracing") else { return };
    tracing.anchor(base_dir);
    let Some(otlp) = tracing.otlp else { return };
    let target = endpoint(section, &otlp, report);
    headers(section, &otlp, report);
    if let Some(ca) = &otlp.ca {
        let at = section.get("ca").unwrap_or(section).at;
        if let Err(error) = authorities("ca", ca) {
            let hint = "a PEM file; relative paths start at the configuration's folder";
            report.error(at, format!("`tracing.otlp.ca` {}", error.why), hint);
        } else if target.is_some_and(|target| !target.uses_tls()) {
            let message = "`tracing.otlp.ca` is of no use without an https endpoint".to_owned();
            report.warn(at, message, "write `https://HOST:PORT`, or delete the key");
        }
    }
}

fn endpoint(section: &Node, otlp: &OtlpConfig, report: &mut ProblemReport) -> Option<OtlpTarget> {
    let at = section.get("endpoint").unwrap_or(section).at;
    let target = match otlp.target() {
        Ok(target) => target,
        Err(BadEndpoint { why, hint }) => {
            report.error(at, format!("`tracing.otlp.endpoint` {why}"), hint);
            return None;
        }
    };
    let other = match otlp.protocol {
        OtlpProtocol::Grpc if target.origin.ends_with(":4318") => Some(("HTTP", "protocol: http")),
        OtlpProtocol::Http if target.origin.ends_with(":4317") => Some(("gRPC", "protocol: grpc")),
        _ => None,
    };
    if let Some((name, fix)) = other {
        let message = format!("`tracing.otlp.endpoint` has the usual port of OTLP/{name}");
        report.warn(
            at,
            message,
            format!("write `{fix}` if the collector expects OTLP/{name} there"),
        );
    }
    if !otlp.headers.is_empty() && !target.uses_tls() && !is_loopback(target.authority()) {
        let message = "`tracing.otlp.headers` are sent without TLS".to_owned();
        report.warn(at, message, "write `https://HOST:PORT`, so that nobody can read them");
    }
    Some(target)
}

fn headers(section: &Node, otlp: &OtlpConfig, report: &mut ProblemReport) {
    let nodes = section.get("headers").map(Node::items).unwrap_or_default();
    for (index, (header, node)) in otlp.headers.iter().zip(nodes).enumerate() {
        let path = format!("tracing.otlp.headers[{index}]");
        let at = |key| node.get(key).unwrap_or(node).at;
        let name = header.name.as_str();
        if OF_THE_PROTOCOL.contains(&name) || name.starts_with("grpc-") {
            let message = format!("`{path}.name` is a header that the protocol itself sets");
            report.error(at("name"), message, "delete the entry");
        }
        if otlp.headers[..index].iter().any(|earlier| earlier.name == name) {
            let message = format!("`{path}.name` is in the list already");
            report.error(at("name"), message, "give each header one entry");
        }
        if let Err(error) = header.value.resolve_header() {
            let hint = "the file or the variable must hold the value of the header only";
            report.error(at("value"), format!("`{path}.value`: {error}"), hint);
        }
    }
}
