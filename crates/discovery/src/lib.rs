//! Sources of workers that are not in the configuration.
//!
//! A source reports its complete list of workers whenever the list changes. It does not know the
//! fleet: the receiver compares the list with the current workers. A source that cannot be reached
//! reports nothing, so nothing changes.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use prometheus::{IntCounter, IntGauge};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

pub mod dns;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;

use splitrail_config::model::{Discovery, Model, Worker};
use splitrail_telemetry::Metrics;

/// Maximum number of workers of one source. Further ones are ignored and logged as an error.
pub const WORKERS_MAX: usize = 4096;

/// The complete list of workers of a source. Replaces its earlier list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FoundWorkers {
    /// The workers, each once, sorted by id. A worker whose address has changed keeps its id.
    pub workers: Vec<Worker>,
}

/// The metrics of one source.
#[derive(Clone, Debug)]
pub struct Tally {
    workers: IntGauge,
    errors: IntCounter,
}

impl Tally {
    /// The metrics of one source of one model; both labels come from the configuration.
    #[must_use]
    pub fn new(metrics: &Metrics, model: &str, source: &str) -> Self {
        let labels = [model, source];
        Self {
            workers: metrics.discovery_workers.with_label_values(&labels),
            errors: metrics.discovery_errors.with_label_values(&labels),
        }
    }

    fn found(&self, workers: usize) {
        self.workers.set(i64::try_from(workers).unwrap_or(i64::MAX));
    }

    fn failed(&self) {
        self.errors.inc();
    }
}

/// A source that is being followed.
#[derive(Debug)]
pub struct Followed {
    /// The index of the source in the model's `discovery`.
    pub place: usize,
    /// The name of the source in logs and metrics.
    pub name: String,
    /// The lists of the source. The first one is sent when the source has been reached, even if it
    /// is empty.
    pub found: mpsc::Receiver<FoundWorkers>,
}

/// Follows the sources of `model` except its shims. The tasks run in `tasks` and end with it. A
/// task that panics is restarted.
pub fn follow(model: &Model, metrics: &Metrics, tasks: &mut JoinSet<()>) -> Vec<Followed> {
    let mut sources = Vec::new();
    for (place, discovery) in model.discovery.iter().enumerate() {
        let name = discovery.name();
        let tally = Tally::new(metrics, &model.name, &name);
        // The receiver only needs the latest list, and a source waits until its list is taken.
        let (sink, found) = mpsc::channel(1);
        match discovery {
            // Shims connect to the router.
            Discovery::Shim {} => continue,
            Discovery::Dns(config) => {
                let config = config.clone();
                let run = move || dns::run(config.clone(), sink.clone(), tally.clone());
                tasks.spawn(restart_on_panic(name.clone(), run));
            }
            #[cfg(feature = "kubernetes")]
            Discovery::Kubernetes(config) => {
                let config = config.clone();
                let run = move || kubernetes::run(config.clone(), sink.clone(), tally.clone());
                tasks.spawn(restart_on_panic(name.clone(), run));
            }
            #[cfg(not(feature = "kubernetes"))]
            Discovery::Kubernetes(_) => {
                drop((sink, tally));
                tracing::error!(source = name, "this build does not include Kubernetes discovery");
            }
        }
        sources.push(Followed { place, name, found });
    }
    sources
}

/// Removes the metrics of the sources of `before` that `now`, the same model's later configuration,
/// has not any more.
pub fn forget(before: &Model, now: &Model, metrics: &Metrics) {
    let kept: Vec<_> = now.discovery.iter().map(Discovery::name).collect();
    for source in before.discovery.iter().map(Discovery::name) {
        if !kept.contains(&source) {
            metrics.forget_source(&before.name, &source);
        }
    }
}

/// Runs a source, and runs it again if it panics: otherwise its last list would stay in use
/// forever.
async fn restart_on_panic<F>(source: String, run: impl Fn() -> F + Send)
where
    F: Future<Output = ()> + Send + 'static,
{
    const PAUSE: Duration = Duration::from_secs(1);
    loop {
        let mut running = JoinSet::new();
        running.spawn(run());
        match running.join_next().await {
            Some(Err(error)) if error.is_panic() => {
                tracing::error!(source, "discovery panicked and is restarted");
                tokio::time::sleep(PAUSE).await;
            }
            _ => return,
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
    async fn every_source_of_a_model_is_followed_until_its_tasks_end() {
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
        let mut tasks = JoinSet::new();
        let mut sources = follow(&model, &metrics, &mut tasks);
        let names: Vec<_> =
            sources.iter().map(|source| (source.place, source.name.as_str())).collect();
        assert_eq!(names, [(1, "dns:localhost:8000"), (2, "dns:localhost:8001")]);
        for source in &mut sources {
            assert_eq!(source.found.recv().await.unwrap().workers.len(), 1);
            let workers = metrics.discovery_workers.with_label_values(&["m", &source.name]);
            assert_eq!(workers.get(), 1);
        }
        drop(tasks);
        assert_eq!(sources[0].found.recv().await, None);
    }

    #[tokio::test]
    async fn a_source_that_panics_is_started_again() {
        let begun = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        let counted = std::sync::Arc::clone(&begun);
        let run = move || {
            let before = counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            async move { assert!(before > 0, "a defect") }
        };
        restart_on_panic("s".to_owned(), run).await;
        assert_eq!(begun.load(std::sync::atomic::Ordering::Relaxed), 2);
    }
}
