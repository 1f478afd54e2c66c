//! The state of the cluster as a whole: all models and their workers.

use std::sync::Arc;

use arc_swap::ArcSwap;
use splitrail_kv::HashSeed;
use splitrail_telemetry::Metrics;

use super::served::{Served, Serving};
use splitrail_config::model::{Config, Events, FleetConfig};
use splitrail_engine_client::networks::Networks;

/// What all workers of a router have in common: the models that are served, and the settings of
/// the configuration that only a restart changes.
pub struct Cluster {
    serving: ArcSwap<Serving>,
    /// Seed of the block hashes.
    pub hash_seed: HashSeed,
    /// How shims attach.
    pub fleet: FleetConfig,
    /// How events of shims reach the router.
    pub events: Events,
    /// The port of the HTTP listener, as configured.
    pub http_port: u16,
    /// Where workers may be that the configuration does not name.
    pub networks: Networks,
    /// The router's metrics.
    pub metrics: Arc<Metrics>,
}

impl Cluster {
    /// A cluster that serves `models`.
    pub fn new(models: Vec<Arc<Served>>, config: Arc<Config>, metrics: Arc<Metrics>) -> Self {
        let fleet = config.fleet.clone();
        Self {
            hash_seed: HashSeed(config.hash_seed),
            networks: Networks::new(&fleet.networks),
            fleet,
            events: config.events.clone(),
            http_port: config.listen.http.port(),
            metrics,
            serving: ArcSwap::from_pointee(Serving::new(models, config)),
        }
    }

    /// What is served now. A request takes it once, and keeps to it.
    pub fn serving(&self) -> Arc<Serving> {
        self.serving.load_full()
    }

    /// From now on, this is served. The fleet calls it once the workers are there.
    pub(super) fn serve(&self, serving: Arc<Serving>) {
        self.serving.store(serving);
    }
}
