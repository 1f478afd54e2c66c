//! Workers from the pods of a Kubernetes cluster.
//!
//! Pods are listed, then watched from that version. A watch that ends or breaks is resumed at its last
//! version; where the API server no longer has this version (410 Gone) the pods are listed again,
//! and pods that are missing from the list have left. Until then the known pods stay.

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

use super::{Found, Tally};
use pods::Pods;
use splitrail_config::model::{Discovery, KubernetesDiscovery};
use splitrail_telemetry::LogThrottle;

/// After this long the API server ends a watch, which then goes on: so a connection that died
/// silently is noticed.
const WATCH_S: u32 = 60;
/// No answer of the API server has a longer pause; bookmarks come in between.
const SILENCE: Duration = Duration::from_secs(75);
/// Between two attempts to begin.
const PAUSE: Duration = Duration::from_secs(5);
/// Requests to the API server within [`RATE_PERIOD`]: one that ends each watch at once
/// would otherwise be asked as fast as it can answer.
const RATE_REQUESTS: u64 = 20;
const RATE_PERIOD: Duration = Duration::from_secs(10);

/// Follows pods until the task is ended or nobody listens.
pub async fn run(config: KubernetesDiscovery, sink: Sender<Found>, tally: Tally) {
    let source = Discovery::Kubernetes(config.clone()).name();
    let mut following = Following {
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
                if let Nobody::Listens = following.watch(client).await {
                    return;
                }
            }
            Err(error) => following.fault("no way to the API server", error.as_ref()),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

struct Following {
    source: String,
    config: KubernetesDiscovery,
    pods: Pods,
    sink: Sender<Found>,
    tally: Tally,
    log: LogThrottle,
}

/// Why a watch was given up.
enum Nobody {
    /// The receiver is gone.
    Listens,
    /// It has to begin anew.
    Knows,
}

impl Following {
    async fn watch(&mut self, client: Client) -> Nobody {
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
                        return Nobody::Listens;
                    }
                }
                Err(error) => {
                    self.fault("the API server cannot be followed", &error);
                    // The same as an event, and then it is listed again; as a reply it would
                    // be tried for ever.
                    if let watcher::Error::WatchStartFailed(kube::Error::Api(status)) = &error
                        && status.code == 410
                    {
                        return Nobody::Knows;
                    }
                }
            }
        }
        Nobody::Knows
    }

    fn fault(&self, what: &str, error: &dyn std::error::Error) {
        self.tally.failed();
        if self.log.may_log() {
            // The outermost text says least.
            let mut causes = error.to_string();
            let mut next = error.source();
            while let Some(cause) = next {
                causes.push_str(": ");
                causes.push_str(&cause.to_string());
                next = cause.source();
            }
            tracing::warn!(source = self.source, error = causes, "{what}: what was found holds");
        }
    }
}

/// A way to the API server, by the service account or a kubeconfig.
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
