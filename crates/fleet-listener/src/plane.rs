//! Shims over the event plane: a broker between them and this router.
//!
//! For each served model, a durable consumer receives the changes of all workers (`follow`), and a
//! subscription receives their heartbeats (`reports`); both go into the worker's slot (`slots`). A
//! relay (`relay`) passes the content of the slot to the worker's session in the order of a stream,
//! with a snapshot from the store where changes are missing. For the session, the relay is a shim
//! like any other.

mod follow;
mod model;
mod relay;
mod reports;
mod slots;
mod store;
mod terms;
mod waiting;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use splitrail_event_plane::{Broker, names};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use super::context::AttachContext;
use model::PlaneModel;
use slots::Slots;
use splitrail_config::model::NatsEvents;

/// Interval at which the tasks are matched to the served models.
const MODEL_CHECK: Duration = Duration::from_secs(1);
/// Time between two attempts to connect with a configuration that the client library rejects.
const UNUSABLE_RETRY: Duration = Duration::from_secs(30);
/// Maximum number of snapshots that are fetched at the same time, over all models.
const FETCHES_MAX: usize = 8;

/// Listens to the broker until the router stops.
pub(super) async fn run(context: Arc<AttachContext>, config: NatsEvents) {
    let stop = context.stop.clone();
    tokio::select! {
        () = stop.cancelled() => {}
        () = listen(context, config) => {}
    }
}

async fn listen(context: Arc<AttachContext>, config: NatsEvents) {
    let router = config.durable_name.clone().unwrap_or_else(|| router_name(&context));
    let durable = names::durable(&router);
    let broker = connect(&config, &router).await;
    tokio::join!(
        terms::run(&context, &broker),
        report_connection(&context, &broker),
        serve_models(&context, &broker, Arc::new(config), &durable),
    );
}

/// The name of this router on the broker: host and port, which stay the same over a restart.
fn router_name(context: &AttachContext) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let host = host.or_else(|_| std::env::var("HOSTNAME")).unwrap_or_default();
    match (host.trim(), context.cluster.http_port) {
        ("", _) | (_, 0) => context.router_id.clone(),
        (host, port) => format!("{host}-{port}"),
    }
}

async fn connect(config: &NatsEvents, router: &str) -> Broker {
    loop {
        match Broker::connect(&config.broker, &format!("splitrail {router}")).await {
            Ok(broker) => return broker,
            Err(error) => {
                tracing::error!(%error, "the event plane cannot be used; trying again in 30 s")
            }
        }
        sleep(UNUSABLE_RETRY).await;
    }
}

/// Keeps the metric `broker_connected` current.
async fn report_connection(context: &AttachContext, broker: &Broker) {
    let gauge = context.cluster.metrics.broker_connected.with_label_values::<&str>(&[]);
    let mut connected = broker.connected.clone();
    loop {
        gauge.set((*connected.borrow_and_update()).into());
        if connected.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Runs one task for each served model.
async fn serve_models(
    context: &Arc<AttachContext>,
    broker: &Broker,
    config: Arc<NatsEvents>,
    durable: &str,
) {
    let fetching = Arc::new(Semaphore::new(FETCHES_MAX));
    let mut tasks = JoinSet::new();
    let mut models: BTreeMap<String, AbortHandle> = BTreeMap::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let serving = context.cluster.serving();
        let is_served = |name: &String| serving.model(name).is_some();
        models.retain(|name, task| {
            if !is_served(name) {
                task.abort();
            }
            is_served(name) && !task.is_finished()
        });
        for served in &serving.models {
            if models.contains_key(served.name()) {
                continue;
            }
            let model = Arc::new(PlaneModel {
                context: Arc::clone(context),
                broker: broker.clone(),
                config: Arc::clone(&config),
                name: served.name().to_owned(),
                durable: durable.to_owned(),
                slots: Slots::new(context.config.attach_max),
                fetching: Arc::clone(&fetching),
            });
            models.insert(served.name().to_owned(), tasks.spawn(follow_model(model)));
        }
        drop(serving);
        sleep(MODEL_CHECK).await;
    }
}

/// Follows the reports of one model. Never ends.
async fn follow_model(model: Arc<PlaneModel>) {
    tokio::join!(follow::run(&model), reports::run(&model));
}
