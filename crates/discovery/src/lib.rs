//! Sources of workers that are not in the configuration.
//!
//! A source reports its complete list of workers whenever the list changes. It does not know the
//! fleet: the receiver compares the list with the current workers. A source that cannot be reached
//! reports nothing, so nothing changes.

use std::net::{IpAddr, SocketAddr};

use prometheus::{IntCounter, IntGauge};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

pub mod dns;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;

use splitrail_config::model::{Discovery, Model, WorkerConfig};
use splitrail_telemetry::{Metrics, TaskName, restart_on_panic};

/// Maximum number of workers of one source. Further ones are ignored and logged as an error.
pub const WORKERS_MAX: usize = 4096;

/// The complete list of workers of a source. Replaces its earlier list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FoundWorkers {
    /// The workers, each once, sorted by id. A worker whose address has changed keeps its id.
    pub workers: Vec<WorkerConfig>,
}

/// The metrics of one source.
#[derive(Clone, Debug)]
pub struct Tally {
    workers: IntGauge,
    successful: IntGauge,
    errors: IntCounter,
}

impl Tally {
    /// The metrics of one source of one model; both labels come from the configuration.
    #[must_use]
    pub fn new(metrics: &Metrics, model: &str, source: &str) -> Self {
        let labels = [model, source];
        let successful = metrics.discovery_successful.with_label_values(&labels);
        successful.set(1);
        Self {
            successful,
            workers: metrics.discovery_workers.with_label_values(&labels),
            errors: metrics.discovery_errors.with_label_values(&labels),
        }
    }

    fn found(&self, workers: usize) {
        self.workers.set(i64::try_from(workers).unwrap_or(i64::MAX));
    }

    fn succeeded(&self) {
        self.successful.set(1);
    }

    fn failed(&self) {
        self.successful.set(0);
        self.errors.inc();
    }
}

/// A source that is being followed.
#[derive(Debug)]
pub struct SourceFollower {
    /// The lists of the source. The first one is sent when the source has been reached, even if it
    /// is empty.
    pub found: mpsc::Receiver<FoundWorkers>,
    /// The task that follows the source. The source is no longer followed once this is dropped.
    pub task: JoinSet<()>,
}

/// Follows a source of `model`; `None` if it is that of shims. A task that panics is restarted.
pub fn follow(model: &str, discovery: &Discovery, metrics: &Metrics) -> Option<SourceFollower> {
    // Shims connect to the router, which counts them as attached.
    if matches!(discovery, Discovery::Shim {}) {
        return None;
    }
    let name = discovery.name();
    let tally = Tally::new(metrics, model, &name);
    let log_name =
        TaskName { source: Some(name.clone()), ..TaskName::of_model("discovery", model) };
    // The receiver only needs the latest list, and a source waits until its list is taken.
    let (sink, found) = mpsc::channel(1);
    let mut task = JoinSet::new();
    match discovery {
        Discovery::Shim {} => return None,
        Discovery::Dns(config) => {
            let config = config.clone();
            let run = move || dns::run(config.clone(), sink.clone(), tally.clone());
            task.spawn(restart_on_panic(log_name, run));
        }
        #[cfg(feature = "kubernetes")]
        Discovery::Kubernetes(config) => {
            let config = config.clone();
            let run = move || kubernetes::run(config.clone(), sink.clone(), tally.clone());
            task.spawn(restart_on_panic(log_name, run));
        }
        #[cfg(not(feature = "kubernetes"))]
        Discovery::Kubernetes(_) => {
            drop((sink, tally, log_name));
            tracing::error!(source = name, "this build does not include Kubernetes discovery");
        }
    }
    Some(SourceFollower { found, task })
}

/// Removes the metrics of the sources of `before` that `now`, the same model's later configuration,
/// no longer has.
pub fn forget(before: &Model, now: &Model, metrics: &Metrics) {
    let kept: Vec<_> = now.discovery.iter().map(Discovery::name).collect();
    for source in before.discovery.iter().map(Discovery::name) {
        if !kept.contains(&source) {
            metrics.forget_source(&before.name, &source);
        }
    }
}

/// Formats `SCHEME://IP:PORT`.
fn address(scheme: &str, ip: IpAddr, port: u16) -> String {
    format!("{scheme}://{}", SocketAddr::new(ip, port))
}

/// Drops entries beyond [`WORKERS_MAX`]. The list is sorted, so the same ones are dropped each
/// time.
fn bounded<T>(source: &str, mut sorted: Vec<T>) -> Vec<T> {
    if sorted.len() > WORKERS_MAX {
        tracing::error!(
            source,
            found = sorted.len(),
            WORKERS_MAX,
            "too many workers: the last ones are ignored"
        );
        sorted.truncate(WORKERS_MAX);
    }
    sorted
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_source_of_a_model_is_followed_until_its_task_ends() {
        let model: Model = serde_json::from_str(
            r#"{
                "name": "m", "tokenizer": { "kind": "none" }, "flow": "aggregated",
                "discovery": [
                    { "kind": "shim" },
                    { "kind": "dns", "name": "localhost", "port": 8000, "role": "both" },
                    { "kind": "dns", "name": "localhost", "port": 8001, "role": "decode" }
                ]
            }"#,
        )
        .unwrap();
        let metrics = Metrics::new().unwrap();
        let followed = [0, 1, 2].map(|place| follow("m", &model.discovery[place], &metrics));
        let [None, Some(mut first), Some(mut second)] = followed else {
            panic!("shims are not followed, the others are");
        };
        let text = metrics.encode();
        assert!(!text.contains("source=\"shim\""), "nothing would ever count there: {text}");
        let sources = [(&mut first, "dns:localhost:8000"), (&mut second, "dns:localhost:8001")];
        for (source, name) in sources {
            assert_eq!(source.found.recv().await.unwrap().workers.len(), 1);
            let workers = metrics.discovery_workers.with_label_values(&["m", name]);
            assert_eq!(workers.get(), 1);
        }
        drop(first.task);
        assert_eq!(first.found.recv().await, None);
    }
}
