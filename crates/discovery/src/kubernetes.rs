//! Workers from the pods of a Kubernetes cluster.
//!
//! Pods are listed, then watched from the version of the list. A watch that ends or fails is
//! resumed at its last version. If the API server no longer has this version (410 Gone), the pods
//! are listed again, and pods that are missing from the list have left. Until then the known pods
//! stay. With an InferencePool, the pool is watched in the same way, and says which pods count.

use std::ops::ControlFlow;
use std::time::Duration;

use futures_util::stream::{BoxStream, Stream, StreamExt, pending};
use k8s_openapi::api::core::v1::Pod;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, sleep_until};
use tower::limit::RateLimitLayer;

mod batches;
mod inference_pool;
mod pauses;
mod pods;

use super::{FoundWorkers, Tally};
use inference_pool::{InferencePool, Selection, WatchedPool};
use pods::Pods;
use splitrail_config::model::{Discovery, KubernetesDiscovery};
use splitrail_settings::log_throttle::LogThrottle;

/// Seconds after which the API server ends a watch, which is then resumed, so that a connection
/// that was lost silently is noticed.
const WATCH_S: u32 = 60;
/// Maximum pause within a reply of the API server; bookmarks are sent in between.
const SILENCE: Duration = Duration::from_secs(75);
/// Time since the last error after which the API server answers again: a watch that is resumed has no
/// event. While it fails, an error comes at least after [`SILENCE`] and a pause.
const ANSWERS_AFTER: Duration = Duration::from_secs(90);
/// Pause before discovery starts again with a new client.
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
        failed_at: None,
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
    /// When the API server last failed; `None` since it answers again.
    failed_at: Option<Instant>,
    log: LogThrottle,
}

/// Why a watch has ended.
enum WatchEnd {
    /// The receiver is gone.
    ReceiverGone,
    /// The pods must be listed again.
    Relist,
}

/// The events of a watch, several at once when many arrive.
type Events<K> = BoxStream<'static, Vec<watcher::Result<watcher::Event<K>>>>;

fn gathered<K: Send + 'static>(
    events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
) -> Events<K> {
    batches::gather(pauses::with_pauses(events)).boxed()
}

/// What is being watched.
struct Watches {
    client: Client,
    namespace: String,
    pool: WatchedPool,
    pool_events: Events<InferencePool>,
    selection: Option<Selection>,
    pod_events: Events<Pod>,
}

impl Watches {
    fn new(client: Client, namespace: Option<&str>) -> Self {
        let namespace = namespace.unwrap_or_else(|| client.default_namespace()).to_owned();
        Self {
            client,
            namespace,
            pool: WatchedPool::default(),
            pool_events: pending().boxed(),
            selection: None,
            pod_events: pending().boxed(),
        }
    }

    fn watch_pool(&mut self, name: &str) {
        let (client, resource) = (self.client.clone(), inference_pool::resource());
        let api = Api::namespaced_with(client, &self.namespace, &resource);
        let watched = watcher::Config::default().fields(&format!("metadata.name={name}"));
        self.pool_events = gathered(watcher(api, watched.timeout(WATCH_S)));
    }

    /// Watches the pods of `selection`, from their list on, unless they are watched already.
    fn watch_pods(&mut self, selection: Option<Selection>) {
        if self.selection == selection {
            return;
        }
        self.pod_events = match &selection {
            Some(Selection { selector, .. }) => {
                let api = Api::namespaced(self.client.clone(), &self.namespace);
                let watched = watcher::Config::default().labels(selector).timeout(WATCH_S);
                gathered(watcher(api, watched))
            }
            None => pending().boxed(),
        };
        self.selection = selection;
    }
}

impl PodFollower {
    async fn watch(&mut self, client: Client) -> WatchEnd {
        let mut watches = Watches::new(client, self.config.namespace.as_deref());
        let config = &self.config;
        if let Some(name) = &config.inference_pool {
            watches.watch_pool(name);
        } else if let (Some(selector), Some(port)) = (&config.selector, &config.port) {
            let selection = Selection { selector: selector.clone(), ports: vec![port.clone()] };
            self.pods.set_ports(&selection);
            watches.watch_pods(Some(selection));
        }
        loop {
            let failed_at = self.failed_at;
            let answers_again = async {
                match failed_at {
                    Some(at) => sleep_until(at + ANSWERS_AFTER).await,
                    None => std::future::pending().await,
                }
            };
            let taken = tokio::select! {
                () = answers_again => {
                    self.succeeded();
                    continue;
                }
                Some(events) = watches.pool_events.next() => self.take_pool(&mut watches, events),
                Some(events) = watches.pod_events.next() => self.take_pods(events),
                else => return WatchEnd::Relist,
            };
            if let ControlFlow::Break(end) = taken {
                return end;
            }
            let Some(found) = self.pods.report() else { continue };
            let workers = found.workers.len();
            tracing::info!(source = self.source, workers, "found in Kubernetes");
            self.tally.found(workers);
            if self.sink.send(found).await.is_err() {
                return WatchEnd::ReceiverGone;
            }
        }
    }

    fn take_pods(
        &mut self,
        events: Vec<watcher::Result<watcher::Event<Pod>>>,
    ) -> ControlFlow<WatchEnd> {
        for event in events {
            if let Some(event) = self.received(event, "the pods cannot be watched")? {
                if matches!(event, watcher::Event::InitDone) {
                    self.succeeded();
                }
                self.pods.apply(event);
            }
        }
        ControlFlow::Continue(())
    }

    fn take_pool(
        &mut self,
        watches: &mut Watches,
        events: Vec<watcher::Result<watcher::Event<InferencePool>>>,
    ) -> ControlFlow<WatchEnd> {
        for event in events {
            let event = self.received(event, "the InferencePool cannot be watched")?;
            if let Some(pool) = event.and_then(|event| watches.pool.take(event)) {
                watches.watch_pods(self.selection(pool.as_ref()));
            }
        }
        ControlFlow::Continue(())
    }

    /// Which pods are workers according to the pool; without an answer, none are.
    fn selection(&mut self, pool: Option<&InferencePool>) -> Option<Selection> {
        let selection = match pool {
            Some(pool) => inference_pool::selection(&pool.spec),
            None => Err("it does not exist"),
        };
        match selection {
            Ok(selection) => {
                self.pods.set_ports(&selection);
                Some(selection)
            }
            Err(why) => {
                let source = &self.source;
                tracing::warn!(source, "the InferencePool has no workers: {why}");
                self.pods.clear();
                None
            }
        }
    }

    /// The event, unless it is an error, which is logged.
    fn received<E>(
        &mut self,
        event: watcher::Result<E>,
        failure: &str,
    ) -> ControlFlow<WatchEnd, Option<E>> {
        let error = match event {
            Ok(event) => return ControlFlow::Continue(Some(event)),
            // The watcher lists the objects again.
            Err(watcher::Error::WatchError(status)) if status.code == 410 => {
                let (source, cause) = (&self.source, &status.message);
                tracing::info!(source, cause, "the API server wants a new list");
                return ControlFlow::Continue(None);
            }
            Err(error) => error,
        };
        self.fault(failure, &error);
        if needs_relist(&error) {
            return ControlFlow::Break(WatchEnd::Relist);
        }
        ControlFlow::Continue(None)
    }

    fn succeeded(&mut self) {
        self.failed_at = None;
        self.tally.succeeded();
    }

    fn fault(&mut self, what: &str, error: &dyn std::error::Error) {
        self.failed_at = Some(Instant::now());
        self.tally.failed();
        if self.log.may_log() {
            // The outer errors repeat what the innermost one says.
            let mut innermost = error;
            while let Some(cause) = innermost.source() {
                innermost = cause;
            }
            let error = innermost.to_string();
            tracing::warn!(source = self.source, error, "{what}: the known pods are kept");
        }
    }
}

/// Whether the watcher would retry an error forever. As an event of the watch, 410 makes the watcher
/// list the objects again, but not as a reply to the request.
fn needs_relist(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 410)
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

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn only_a_refused_version_needs_a_new_list() {
        let refused = |code| {
            let status = Status { code, ..Status::default() };
            watcher::Error::WatchStartFailed(kube::Error::Api(Box::new(status)))
        };
        assert!(needs_relist(&refused(410)));
        assert!([403, 404, 429, 500].into_iter().all(|code| !needs_relist(&refused(code))));
        // The watcher itself lists again after this one.
        let in_stream = Status { code: 410, ..Status::default() };
        assert!(!needs_relist(&watcher::Error::WatchError(Box::new(in_stream))));
    }
}
