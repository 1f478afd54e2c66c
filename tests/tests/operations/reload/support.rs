//! What the tests of reloads share.

use serde_json::Value;
use splitrail_tests::Cluster;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};

/// The configuration with one text, which must be in it, replaced.
pub(crate) fn but(yaml: &str, from: &str, to: &str) -> String {
    assert!(yaml.contains(from), "no {from:?} in\n{yaml}");
    yaml.replacen(from, to, 1)
}

/// The configuration without the lines that hold a text.
pub(crate) fn without(yaml: &str, text: &str) -> String {
    assert!(yaml.contains(text), "no {text:?} in\n{yaml}");
    yaml.lines().filter(|line| !line.contains(text)).map(|line| format!("{line}\n")).collect()
}

/// A reload that must be taken; gives the report.
pub(crate) async fn taken(cluster: &Cluster, yaml: &str) -> Value {
    let reply = cluster.reload(yaml).await;
    assert_eq!(reply.status, 200, "{}\n{yaml}", reply.text());
    reply.json()
}

/// One request, which must be served; gives its decode worker.
pub(crate) async fn served(cluster: &Cluster, salt: &str) -> String {
    let reply = cluster.http.post(COMPLETIONS, &completion(&prompt(8, salt))).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.route("decode").unwrap().to_owned()
}
