//! The sections of docs/guides/alerts.md, followed while their alert fires.

use std::net::SocketAddr;
use std::process::Command;

use splitrail_tests::cluster::eventually;

use crate::server::Prometheus;

/// Addresses in the guide that are not the router's admin listener.
const OTHER_ADDRESSES: [&str; 3] = ["ENGINE_URL", "HOST:PORT", "JWKS_URL"];

/// Programs in the guide that need what is not here: a log file, a network, another program.
const ELSEWHERE: [&str; 10] =
    ["cat", "chronyc", "df", "grep", "journalctl", "kubectl", "nats", "nc", "openssl", "splitrail"];

/// Checks what the guide says is to be checked for an alert that fires: commands succeed and say
/// something, and one query at least has data.
pub(crate) async fn follow(prometheus: &Prometheus, admin: SocketAddr, alert: &str) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guides/alerts.md");
    let guide = std::fs::read_to_string(path).unwrap();
    let section = guide.split(&format!("### {alert}\n")).nth(1).unwrap();
    let block = section.split("**Check**:").nth(1).unwrap().split("```").nth(1).unwrap();
    let labels = prometheus.labels(alert).await;
    let mut queries = Vec::new();
    for line in block.lines().filter(|line| !line.is_empty()) {
        let mut line = line.to_owned();
        for label in ["model", "worker", "tenant", "leg"] {
            let value = labels[label].as_str().unwrap_or_default();
            line = line.replace(&label.to_uppercase(), value);
        }
        let program = line.split_whitespace().next().unwrap();
        match program {
            program if ELSEWHERE.contains(&program) => {}
            _ if OTHER_ADDRESSES.iter().any(|address| line.contains(address)) => {}
            "curl" => {
                let command = line.replace("127.0.0.1:9090", &admin.to_string());
                let shell = ["-c".to_owned(), command.clone()];
                // The router may run in this thread.
                let run = move || Command::new("sh").args(shell).output().unwrap();
                let run = tokio::task::spawn_blocking(run).await.unwrap();
                assert!(run.status.success() && !run.stdout.is_empty(), "{alert}: {command}");
            }
            _ => queries.push(line),
        }
    }
    eventually(&format!("a query of the section of {alert} has data"), async || {
        let mut is_any = queries.is_empty();
        for query in &queries {
            is_any |= !prometheus.query(query).await.is_empty();
        }
        is_any
    })
    .await;
}
