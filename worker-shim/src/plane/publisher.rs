//! Connects to the broker, and runs the tasks of the event plane.

use std::time::Duration;

use splitrail_event_plane::Broker;
use splitrail_proto::v1::{Capabilities, Load, Welcome};
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::config::PlaneConfig;
use super::session::PlaneSession;
use super::{hash_terms, publish, report, requests, snapshots};
use crate::mirror::{HashTerms, Mirror};

/// Delay before the next attempt with a configuration that cannot be used.
const UNUSABLE_RETRY: Duration = Duration::from_secs(30);

/// Publishes until the future is dropped. When `leaving` fires, the routers are asked to send
/// no more work.
pub async fn run(
    config: PlaneConfig,
    mirror: Mirror,
    capabilities: watch::Receiver<Capabilities>,
    load: watch::Receiver<Load>,
    leaving: CancellationToken,
) {
    let broker = connect(&config).await;
    let instance_id = format!("{:032x}", rand::random::<u128>());
    let mut last_terms: Option<Welcome> = None;
    loop {
        let terms =
            hash_terms::wait_for_terms(&config, &broker, &capabilities, last_terms.as_ref()).await;
        let agreement = match mirror.agree(HashTerms::from(&terms)) {
            Ok(agreement) => agreement,
            Err(error) => {
                tracing::error!(%error, "the routers' hash settings cannot be used");
                config.status.update(|status| status.last_error = Some(error.to_string()));
                sleep(UNUSABLE_RETRY).await;
                continue;
            }
        };
        tracing::info!(
            model = terms.model,
            block_size = terms.block_size,
            "received the routers' hash settings"
        );
        let plane = PlaneSession {
            config: config.clone(),
            broker: broker.clone(),
            instance_id: instance_id.clone(),
            mirror: mirror.clone(),
            capabilities: capabilities.clone(),
            load: load.clone(),
            leaving: leaving.clone(),
            terms: terms.clone(),
            published: watch::Sender::default(),
            stored: watch::Sender::default(),
            storing: Mutex::default(),
            snapshot_requests: watch::Sender::default(),
            hello_requested: Notify::new(),
        };
        last_terms = Some(terms);
        // All tasks belong to this future and end when one branch completes.
        tokio::select! {
            () = publish::run(&plane) => {}
            () = snapshots::run(&plane) => {}
            () = report::run(&plane) => {}
            () = requests::run(&plane) => {}
            () = hash_terms::wait_for_change(&plane) => {
                tracing::warn!("the routers' hash settings have changed: starting a new mirror");
            }
        }
        drop(agreement);
    }
}

async fn connect(config: &PlaneConfig) -> Broker {
    loop {
        match Broker::connect(&config.broker, &format!("splitrail-shim {}", config.worker_id)).await
        {
            Ok(broker) => {
                config.status.connected(broker.connected.clone());
                return broker;
            }
            Err(error) => {
                tracing::error!(%error, "cannot connect to the broker");
                config.status.update(|status| status.last_error = Some(error.to_string()));
                sleep(UNUSABLE_RETRY).await;
            }
        }
    }
}
