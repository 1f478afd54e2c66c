//! Shims over the event plane: a broker between them and this router.
//!
//! For each model that is served, a durable consumer brings all workers' changes (`follow`)
//! and a subscription their signs of life (`reports`); both go into the worker's slot
//! (`slots`). What lies there a relay (`relay`) says to the worker's session in the order of
//! a stream, with snapshots from the store where the way is broken: for the session it is a
//! shim like any other.

mod follow;
mod relay;
mod reports;
mod slots;
mod store;
mod terms;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use splitrail_event_plane::{Broker, names};
use splitrail_proto::v1;
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use super::House;
use slots::Slots;
use splitrail_config::model::NatsEvents;

/// Between two looks at which models are served.
const LOOK: Duration = Duration::from_secs(1);
/// Between two attempts to use a configuration that cannot be used.
const UNUSABLE_RETRY: Duration = Duration::from_secs(30);
/// Snapshots that are fetched at once, of all models.
const FETCHES_MAX: usize = 8;

/// One model on the plane.
struct Model {
    house: Arc<House>,
    broker: Broker,
    config: Arc<NatsEvents>,
    /// As the configuration calls it.
    name: String,
    durable: String,
    slots: Slots,
    fetching: Arc<Semaphore>,
}

/// Listens to the broker until the router stops.
pub(super) async fn run(house: Arc<House>, config: NatsEvents) {
    let stop = house.stop.clone();
    tokio::select! {
        () = stop.cancelled() => {}
        () = listen(house, config) => {}
    }
}

async fn listen(house: Arc<House>, config: NatsEvents) {
    let router = config.durable.clone().unwrap_or_else(|| place(&house));
    let durable = names::durable(&router);
    let broker = connect(&config, &router).await;
    tokio::join!(
        terms::run(&house, &broker),
        show(&house, &broker),
        serve_models(&house, &broker, Arc::new(config), &durable),
    );
}

/// What tells this router from others: where it is.
fn place(house: &House) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let host = host.or_else(|_| std::env::var("HOSTNAME")).unwrap_or_default();
    match (host.trim(), house.cluster.http_port) {
        ("", _) | (_, 0) => house.router_id.clone(),
        (host, port) => format!("{host}-{port}"),
    }
}

async fn connect(config: &NatsEvents, router: &str) -> Broker {
    loop {
        match Broker::connect(&config.broker(), &format!("splitrail {router}")).await {
            Ok(broker) => return broker,
            Err(error) => tracing::error!(%error, "no event plane"),
        }
        sleep(UNUSABLE_RETRY).await;
    }
}

/// Shows whether the broker is there.
async fn show(house: &House, broker: &Broker) {
    let gauge = house.cluster.metrics.broker_connected.with_label_values::<&str>(&[]);
    let mut connected = broker.connected.clone();
    loop {
        gauge.set((*connected.borrow_and_update()).into());
        if connected.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Keeps a task for each model that is served.
async fn serve_models(house: &Arc<House>, broker: &Broker, config: Arc<NatsEvents>, durable: &str) {
    let fetching = Arc::new(Semaphore::new(FETCHES_MAX));
    let mut tasks = JoinSet::new();
    let mut models: BTreeMap<String, AbortHandle> = BTreeMap::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let serving = house.cluster.serving();
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
            let model = Arc::new(Model {
                house: Arc::clone(house),
                broker: broker.clone(),
                config: Arc::clone(&config),
                name: served.name().to_owned(),
                durable: durable.to_owned(),
                slots: Slots::new(house.config.attach_max),
                fetching: Arc::clone(&fetching),
            });
            models.insert(served.name().to_owned(), tasks.spawn(model.run()));
        }
        drop(serving);
        sleep(LOOK).await;
    }
}

impl Model {
    /// Never ends.
    async fn run(self: Arc<Self>) {
        tokio::join!(follow::run(&self), reports::run(&self));
    }

    /// Asks shims for something.
    async fn ask(&self, subject: String, reason: &str) {
        let who = self.house.router_id.clone();
        let ask = v1::PlaneAsk { who, reason: reason.to_owned(), model: self.name.clone() };
        let payload = ask.encode_to_vec().into();
        if let Err(error) = self.broker.client.publish(subject, payload).await {
            tracing::debug!(%error, "the broker");
        }
    }

    /// How this router hashes the model's blocks; the block size is 0 while no engine has
    /// said it.
    fn terms(&self) -> Option<v1::Welcome> {
        let serving = self.house.cluster.serving();
        Some(terms::of(&self.house, serving.model(&self.name)?))
    }

    fn count_refused(&self, reason: &str) {
        let refused = &self.house.cluster.metrics.plane_refused;
        refused.with_label_values(&[self.name.as_str(), reason]).inc();
    }

    fn count_message(&self, kind: &str) {
        let messages = &self.house.cluster.metrics.plane_messages;
        messages.with_label_values(&[self.name.as_str(), kind]).inc();
    }

    fn count_snapshot(&self, result: &str) {
        let snapshots = &self.house.cluster.metrics.plane_snapshots;
        snapshots.with_label_values(&[self.name.as_str(), result]).inc();
    }
}
