//! Rules about the discovery of a model's workers.

use std::collections::HashMap;
use std::path::Path;

use super::workers::Workers;
use crate::model::{Connector, Discovery, KubernetesDiscovery, Role};
use crate::value::{typed, typed_or};
use splitrail_settings::endpoint;
use splitrail_settings::problem::{Place, ProblemReport};
use splitrail_settings::tree::{Node, Value};
use splitrail_settings::words::shown;

mod labels;

/// Checks the sources of `model`, and adds the workers that they may find to `workers`.
pub(super) fn check<'n>(
    model: &'n Node,
    path: &str,
    base_dir: &Path,
    workers: &mut Workers<'n>,
    report: &mut ProblemReport,
) {
    let connector = typed_or(model, "connector", Connector::default());
    let mut seen: HashMap<String, Place> = HashMap::new();
    let list = model.get("discovery").map(Node::items).unwrap_or_default();
    for (index, node) in list.iter().enumerate() {
        let path = format!("{path}.discovery[{index}]");
        let source = serde_json::from_value::<Discovery>(node.to_json()).ok();
        count(source.as_ref(), workers);
        if let Some(source) = &source {
            twice(&mut seen, source, node.at, &path, report);
        }
        match node.get("kind").and_then(Node::text) {
            Some("dns") => dns(node, &path, report),
            Some("kubernetes") => kubernetes(node, &path, base_dir, report),
            _ => continue,
        }
        ports(node, &path, connector, report);
    }
}

/// Adds the workers of a source. An invalid source counts as one of unknown workers, so that its
/// mistake is reported once.
fn count(source: Option<&Discovery>, workers: &mut Workers<'_>) {
    match source {
        Some(Discovery::Dns(dns)) => {
            // An engine whose port is not written down is asked for it.
            workers.add_found(Some(dns.role), true, dns.shim);
        }
        // A pod's annotation may name its port for KV events.
        Some(Discovery::Kubernetes(pods)) => workers.add_found(pods.role, true, pods.shim),
        Some(Discovery::Shim {}) | None => workers.add_unknown(),
    }
}

fn twice(
    seen: &mut HashMap<String, Place>,
    source: &Discovery,
    at: Place,
    path: &str,
    report: &mut ProblemReport,
) {
    let name = source.name();
    if let Some(first) = seen.get(&name) {
        let message = format!("`{path}` finds the same workers as {}:{}", first.line, first.column);
        report.error(at, message, "one entry per source: delete one");
    } else {
        seen.insert(name, at);
    }
}

/// The value under `key`, unless it is absent or null.
fn given<'n>(node: &'n Node, key: &str) -> Option<&'n Node> {
    node.get(key).filter(|value| value.value != Value::Null)
}

fn dns(node: &Node, path: &str, report: &mut ProblemReport) {
    if let Some((name, at)) = node.get("name").and_then(|name| Some((name.text()?, name.at))) {
        // A trailing dot keeps resolvers from trying their search domains.
        let host = name.strip_suffix('.').unwrap_or(name);
        if host.parse::<std::net::IpAddr>().is_ok() {
            let message = format!("`{path}.name` is an address, not a name");
            report.error(at, message, "an engine whose address is known belongs into `workers`");
        } else if !name.is_empty() && endpoint::parse(&format!("http://{host}:1"), "http").is_err()
        {
            let message = format!("`{path}.name` \"{}\" is not a host name", shown(name));
            let hint = "only the name, as in `engines.default.svc.cluster.local`; ports have keys \
                        of their own";
            report.error(at, message, hint);
        }
    }
}

/// Checks that a source says which pods it finds: by a selector and a port, or by a pool.
fn pods(node: &Node, path: &str, report: &mut ProblemReport) {
    let pool = given(node, "inference_pool");
    for key in ["selector", "port"] {
        match (pool, given(node, key)) {
            (Some(_), Some(other)) => {
                let message = format!("`{path}.{key}` is of no use beside `inference_pool`");
                report.error(other.at, message, "the pool has the labels and the ports: delete it");
            }
            (None, None) => {
                let hint = "with `inference_pool`, the pool has the labels and the ports";
                report.error(node.at, format!("`{path}` has no `{key}`"), hint);
            }
            _ => {}
        }
    }
    if let Some((name, at)) = pool.and_then(|pool| Some((pool.text()?, pool.at)))
        && !name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c))
    {
        let message = format!("`{path}.inference_pool` \"{}\" is not a name", shown(name));
        report.error(at, message, "as `kubectl get inferencepools` shows it: only its name");
    }
}

fn kubernetes(node: &Node, path: &str, base_dir: &Path, report: &mut ProblemReport) {
    pods(node, path, report);
    if let Some((selector, at)) =
        node.get("selector").and_then(|node| Some((node.text()?, node.at)))
        && !selector.is_empty()
        && let Err(why) = labels::selector(selector)
    {
        let message = format!("`{path}.selector` \"{}\" {why}", shown(selector));
        report.error(at, message, "as `kubectl get pods -l` takes it: `app=vllm,tier in (a, b)`");
    }
    for (key, example) in [
        ("role_label", KubernetesDiscovery::ROLE_LABEL),
        ("transfer_group_label", KubernetesDiscovery::TRANSFER_GROUP_LABEL),
    ] {
        if let Some((label, at)) = node.get(key).and_then(|node| Some((node.text()?, node.at)))
            && !label.is_empty()
            && !labels::is_key(label)
        {
            let message = format!("`{path}.{key}` \"{}\" is not a label's key", shown(label));
            report.error(at, message, format!("such as `{example}`"));
        }
    }
    if let Some(label) = given(node, "role_label")
        && given(node, "role").is_some()
    {
        let message = format!("`{path}.role_label` is of no use beside `role`");
        report.error(label.at, message, "`role` is that of all the pods: delete one of the two");
    }
    let kubeconfig = node.get("kubeconfig").and_then(|node| Some((node.text()?, node.at)));
    if let Some((file, at)) = kubeconfig
        && (file.is_empty() || !base_dir.join(file).is_file())
    {
        let message = format!("`{path}.kubeconfig` \"{}\" is not a file", shown(file));
        report.error(at, message, "relative paths start at the configuration's folder");
    }
    if let Some(context) = given(node, "context")
        && kubeconfig.is_none()
    {
        let message = format!("`{path}.context` is of no use without `kubeconfig`");
        report.error(context.at, message, "a service account has no contexts: delete it");
    }
}

/// Checks the ports of a DNS or Kubernetes source, including whether the connector needs them.
fn ports(node: &Node, path: &str, connector: Option<Connector>, report: &mut ProblemReport) {
    let role = typed::<Role>(node, "role");
    if let Some(replay) = given(node, "kv_replay_port")
        && given(node, "kv_events_port").is_none()
    {
        let message = format!("`{path}.kv_replay_port` is of no use without `kv_events_port`");
        report.error(replay.at, message, "add `kv_events_port`, or delete it");
    }
    let keys = ["port", "kv_events_port", "kv_replay_port", "bootstrap_port"];
    let mut taken: Vec<(&str, String)> = Vec::new();
    for (key, port) in keys.iter().filter_map(|key| Some((*key, given(node, key)?))) {
        let number = port.to_json().to_string();
        if let Some((other, _)) = taken.iter().find(|(_, other)| *other == number) {
            let message = format!("`{path}.{key}` is the same as `{other}`");
            report.error(port.at, message, "each of an engine's servers has its own port");
        }
        taken.push((key, number));
    }
    let Some(connector) = connector else { return };
    if let Some(bootstrap) = given(node, "bootstrap_port")
        && (!connector.has_bootstrap() || role == Some(Role::Decode))
    {
        let message = format!("`{path}.bootstrap_port` is of no use");
        let hint = "only prefill workers have one, with `connector: mooncake` or `sglang`";
        report.error(bootstrap.at, message, hint);
    }
    if let Some(node) = node.get("role")
        && role == Some(Role::Both)
        && !connector.serves_alone()
    {
        let connector = connector.name();
        let message = format!("`{path}.role: both` is not possible with `connector: {connector}`");
        report.error(node.at, message, "an engine has one role there: `prefill` or `decode`");
    }
}
