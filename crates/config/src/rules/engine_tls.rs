//! Rules about TLS towards the engines of one model.

use std::path::Path;

use crate::engine_tls::EngineTlsFiles;
use crate::model::{EngineTls, UrlScheme};
use crate::value::typed;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::{Node, Value};

/// Reports files of `engine_tls` that cannot be used, and a section that nothing uses.
pub(super) fn check(model: &Node, path: &str, base_dir: &Path, report: &mut ProblemReport) {
    let section = model.get("engine_tls").filter(|node| node.value != Value::Null);
    let Some(section) = section else { return };
    let Some(Some(mut tls)) = typed::<Option<EngineTls>>(model, "engine_tls") else { return };
    tls.anchor(base_dir);
    if let Err(error) = EngineTlsFiles::read(&tls) {
        let at = section.get(error.key).unwrap_or(section).at;
        let hint = match error.key {
            "server_name" => "the name in the engines' certificates, such as `engines.example`",
            _ if tls.cert.is_some() != tls.key.is_some() => {
                "name both: the router's certificate and its private key"
            }
            _ => "a PEM file; relative paths start at the configuration's folder",
        };
        report.error(at, format!("`{path}.engine_tls.{}` {}", error.key, error.why), hint);
    }
    if !may_have_https(model) {
        let message = format!("`{path}.engine_tls` is of no use: no worker has an https URL");
        let hint = "write `https://HOST:PORT` as the `url` of workers, or delete the section";
        report.warn(section.at, message, hint);
    }
}

/// Whether a listed worker or a source of workers has `https`, or a shim may announce it.
fn may_have_https(model: &Node) -> bool {
    let items = |key| model.get(key).map(Node::items).unwrap_or_default();
    let is_https = |worker: &Node| {
        worker.get("url").and_then(Node::text).is_some_and(|url| url.starts_with("https://"))
    };
    let finds_https = |source: &Node| {
        source.get("kind").and_then(Node::text) == Some("shim")
            || typed::<UrlScheme>(source, "scheme") == Some(UrlScheme::Https)
    };
    items("workers").iter().any(is_https) || items("discovery").iter().any(finds_https)
}
