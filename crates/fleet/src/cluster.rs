//! The state that all workers of a router share: the served models and fixed settings.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use splitrail_kv::HashSeed;
use splitrail_telemetry::Metrics;
use splitrail_telemetry::metrics::Scope;
use tokio::time::Instant;

use super::releases::Releases;
use super::served_models::{ServedModel, ServedModels};
use splitrail_config::model::{Config, FleetConfig};
use splitrail_engine_client::networks::Networks;

/// The served models, and the settings of the configuration that only a restart changes.
pub struct Cluster {
    serving: ArcSwap<ServedModels>,
    /// Seed of the block hashes.
    pub hash_seed: HashSeed,
    /// The settings for shims that attach.
    pub fleet: FleetConfig,
    /// The networks in which workers may be that are not listed in the configuration.
    pub networks: Networks,
    /// The addresses of the router's own listeners, once they are bound: no worker is there.
    pub own_addresses: OnceLock<Vec<SocketAddr>>,
    /// The router's metrics.
    pub metrics: Arc<Metrics>,
    /// The tasks that free what decode engines keep for pairs of legs that were given up, of all
    /// models, be they served or not.
    pub repairs: Releases,
}

impl Cluster {
    /// A cluster that serves `models`.
    pub fn new(models: Vec<Arc<ServedModel>>, config: Arc<Config>, metrics: Arc<Metrics>) -> Self {
        let fleet = config.fleet.clone();
        models.iter().for_each(|served| metrics.declare(&Scope::Model(served.name())));
        Self {
            hash_seed: HashSeed(config.hash_seed),
            networks: Networks::new(&fleet.networks),
            own_addresses: OnceLock::new(),
            fleet,
            metrics,
            repairs: Releases::default(),
            serving: ArcSwap::from_pointee(ServedModels::new(models, config)),
        }
    }

    /// What is served now. A request loads this once and uses it until its end.
    pub fn serving(&self) -> Arc<ServedModels> {
        self.serving.load_full()
    }

    /// Waits until what engines keep for requests that have ended is freed, for a router that stops.
    /// What is not freed at `until` is given up.
    pub async fn finish_releases(&self, until: Instant) {
        self.repairs.finish(until).await;
        for served in &self.serving().models {
            served.releases.finish(until).await;
        }
    }

    /// Replaces what is served. Called by the fleet after the workers have been added.
    pub(super) fn serve(&self, serving: Arc<ServedModels>) {
        for served in &serving.models {
            self.metrics.declare(&Scope::Model(served.name()));
        }
        self.serving.store(serving);
    }
}
