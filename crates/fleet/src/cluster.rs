//! The state that all workers of a router share: the served models and fixed settings.

use std::sync::Arc;

use arc_swap::ArcSwap;
use splitrail_kv::HashSeed;
use splitrail_telemetry::Metrics;
use splitrail_telemetry::metrics::Scope;

use super::served::{Served, Serving};
use splitrail_config::model::{Config, Events, FleetConfig};
use splitrail_engine_client::networks::Networks;

/// The served models, and the settings of the configuration that only a restart changes.
pub struct Cluster {
    serving: ArcSwap<Serving>,
    /// Seed of the block hashes.
    pub hash_seed: HashSeed,
    /// The settings for shims that attach.
    pub fleet: FleetConfig,
    /// The event plane.
    pub events: Events,
    /// The port of the HTTP listener, as configured.
    pub http_port: u16,
    /// The networks in which workers may be that are not listed in the configuration.
    pub networks: Networks,
    /// The router's metrics.
    pub metrics: Arc<Metrics>,
}

impl Cluster {
    /// A cluster that serves `models`.
    pub fn new(models: Vec<Arc<Served>>, config: Arc<Config>, metrics: Arc<Metrics>) -> Self {
        let fleet = config.fleet.clone();
        models.iter().for_each(|served| metrics.declare(&Scope::Model(served.name())));
        Self {
            hash_seed: HashSeed(config.hash_seed),
            networks: Networks::new(&fleet.networks),
            fleet,
            events: config.events.clone(),
            http_port: config.listen.http.address.port(),
            metrics,
            serving: ArcSwap::from_pointee(Serving::new(models, config)),
        }
    }

    /// What is served now. A request loads this once and uses it until its end.
    pub fn serving(&self) -> Arc<Serving> {
        self.serving.load_full()
    }

    /// Replaces what is served. Called by the fleet after the workers have been added.
    pub(super) fn serve(&self, serving: Arc<Serving>) {
        for served in &serving.models {
            self.metrics.declare(&Scope::Model(served.name()));
        }
        self.serving.store(serving);
    }
}
