//! Workers from the pods of a Kubernetes cluster.
//!
//! Pods are listed, then watched from the version of the list. A watch that ends or fails is
//! resumed at its last version. If the API server no longer has this version (410 Gone), the pods
//! are listed again, and pods that are missing from the list have left. Until then the known pods
//! stay.

use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::mpsc::Sender;
use tower::limit::RateLimitLayer;

mod pods;

use super::{FoundWorkers, Tally};
use pods::Pods;
use splitrail_config::model::{Discovery, KubernetesDiscovery};
use splitrail_settings::log_throttle::LogThrottle;

/// Seconds after which the API server ends a watch, which is then resumed, so that a connection
/// that was lost silently is noticed.
const WATCH_S: u32 = 60;
/// Maximum pause within a reply of the API server; bookmarks are sent in between.
const SILENCE: Duration = Duration::from_secs(75);
/// Pause between two attempts to start a watch.
const PAUSE: Duration = Duration::from_secs(5);
/// Maximum number of requests to the API server within [`RATE_PERIOD`], in case a server ends every
/// watch at once.
const RATE_REQUESTS: u64 = 20;
const RATE_PERIOD: Duration = Duration::from_secs(10);

/// Follows pods until the task is aborted or the receiver is gone.
pub async fn run(config: KubernetesDiscovery, sink: Sender<FoundWorkers>, tally: Tally) {
    let source = Discovery::Kubernetes(config.clone()).name();
    let mut following = PodFollower {
        pods: Pods::new(source.clone(), config.clone()),
        source,
        config,
        sink,
        tally,
        log: LogThrottle::default(),
    };
    loop {
        match client(&following.config).await {
            Ok(client) => {
                if let WatchEnd::ReceiverGone = following.watch(client).await {
                    return;
                }
            }
            Err(error) => following.fault("cannot connect to the API server", error.as_ref()),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

struct PodFollower {
    source: String,
    config: KubernetesDiscovery,
    pods: Pods,
    sink: Sender<FoundWorkers>,
    tally: Tally,
    log: LogThrottle,
}

/// Why a watch has ended.
enum WatchEnd {
    /// The receiver is gone.
    ReceiverGone,
    /// The pods must be listed again.
    Relist,
}

impl PodFollower {
    async fn watch(&mut self, client: Client) -> WatchEnd {
        let api: Api<Pod> = match &self.config.namespace {
            Some(namespace) => Api::namespaced(client, namespace),
            None => Api::default_namespaced(client),
        };
        let watched = watcher::Config::default().labels(&self.config.selector).timeout(WATCH_S);
        let mut events = std::pin::pin!(watcher(api, watched).default_backoff());
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    let Some(found) = self.pods.take(event) else { continue };
                    let workers = found.workers.len();
                    tracing::info!(source = self.source, workers, "found in Kubernetes");
                    self.tally.found(workers);
                    if self.sink.send(found).await.is_err() {
                        return WatchEnd::ReceiverGone;
                    }
                }
                Err(error) => {
                    self.fault("the pods cannot be watched", &error);
                    // As an event of the watch, 410 makes the watcher list the pods again; as a
                    // reply to the request, the watcher would retry forever.
                    if let watcher::Error::WatchStartFailed(kube::Error::Api(status)) = &error
                        && status.code == 410
                    {
                        return WatchEnd::Relist;
                    }
                }
            }
        }
        WatchEnd::Relist
    }

    fn fault(&self, what: &str, error: &dyn std::error::Error) {
        self.tally.failed();
        if self.log.may_log() {
            // The outermost error says least, so all causes are logged.
            let mut causes = error.to_string();
            let mut next = error.source();
            while let Some(cause) = next {
                causes.push_str(": ");
                causes.push_str(&cause.to_string());
                next = cause.source();
            }
            tracing::warn!(source = self.source, error = causes, "{what}: the known pods are kept");
        }
    }
}

/// A client for the API server, from the service account or a kubeconfig file.
async fn client(
    config: &KubernetesDiscovery,
) -> Result<Client, Box<dyn std::error::Error + Send + Sync>> {
    let mut way = match &config.kubeconfig {
        None => kube::Config::incluster()?,
        Some(path) => {
            let context = config.context.clone();
            let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
            kube::Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &options).await?
        }
    };
    way.read_timeout = Some(SILENCE);
    way.reset_reader_on_write = true;
    let rate = RateLimitLayer::new(RATE_REQUESTS, RATE_PERIOD);
    Ok(ClientBuilder::try_from(way)?.with_layer(&rate).build())
}
