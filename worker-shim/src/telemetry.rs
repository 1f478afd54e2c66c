//! The shim's metrics.

use prometheus::core::Collector;
use prometheus::{
    Gauge, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

/// Metrics of the engine, the mirror and the drain. The proxy registers its metrics in the same
/// [`Metrics::registry`].
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Whether the engine answers: 0 or 1.
    pub engine_up: IntGauge,
    /// Engine processes seen since the shim started.
    pub engine_processes: IntCounter,
    /// How often the capabilities of an engine process were determined.
    pub engine_identifications: IntCounter,
    /// Age of the last load figures of the engine in seconds; infinite before the first.
    pub engine_figures_age: Gauge,
    /// KV blocks that the engine holds, by rank and tier.
    pub mirror_blocks: IntGaugeVec,
    /// Whether the engine's KV events arrive without a gap, by rank: 0 or 1.
    pub mirror_current: IntGaugeVec,
    /// How often the mirror of a rank was emptied and rebuilt.
    pub mirror_resets: IntCounterVec,
    /// Memory of the mirror in bytes.
    pub mirror_bytes: IntGauge,
    /// Whether a router receives changes as they occur, by its address: 0 or 1.
    pub router_live: IntGaugeVec,
    /// Changes that a router was sent and has not acknowledged, by its address.
    pub router_lag_changes: IntGaugeVec,
    /// Whether the shim drains: 0 or 1.
    pub draining: IntGauge,
}

/// Creates metrics and registers them. All names get the prefix `splitrail_shim_`.
pub(crate) struct Registrar<'r>(pub(crate) &'r Registry);

impl Registrar<'_> {
    fn register<M: Collector + Clone + 'static>(&self, metric: M) -> prometheus::Result<M> {
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    pub(crate) fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.register(IntGauge::with_opts(opts(name, help))?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntGaugeVec> {
        self.register(IntGaugeVec::new(opts(name, help), labels)?)
    }

    pub(crate) fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.register(IntCounter::with_opts(opts(name, help))?)
    }

    pub(crate) fn counters(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> prometheus::Result<IntCounterVec> {
        self.register(IntCounterVec::new(opts(name, help), labels)?)
    }
}

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("splitrail_shim_{name}"), help)
}

impl Metrics {
    /// Registers all metrics in a new registry.
    ///
    /// # Errors
    /// If two metrics have the same name, which a test excludes.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let new = Registrar(&registry);
        let version = env!("CARGO_PKG_VERSION");
        new.gauges("build_info", "The version; always 1.", &["version"])?
            .with_label_values(&[version])
            .set(1);
        Ok(Self {
            engine_up: new.gauge("engine_up", "Whether the engine answers: 0 or 1.")?,
            engine_processes: new.counter(
                "engine_processes_total",
                "Engine processes seen since the shim started. More than 1 means restarts.",
            )?,
            engine_identifications: new.counter(
                "engine_identifications_total",
                "How often the capabilities of an engine process were determined.",
            )?,
            engine_figures_age: new.register(Gauge::with_opts(opts(
                "engine_figures_age_seconds",
                "Age of the last load figures that the engine reported; +Inf before the first.",
            ))?)?,
            mirror_blocks: new.gauges(
                "mirror_blocks",
                "KV blocks that the engine holds according to its events, by rank and tier.",
                &["rank", "tier"],
            )?,
            mirror_current: new.gauges(
                "mirror_current",
                "Whether the engine's KV events arrive without a gap: 0 or 1. While 0, every gate is a \
                 miss.",
                &["rank"],
            )?,
            mirror_resets: new.counters(
                "mirror_resets_total",
                "How often the mirror of a rank was emptied and rebuilt.",
                &["rank"],
            )?,
            mirror_bytes: new.gauge("mirror_bytes", "Memory of the mirror in bytes.")?,
            router_live: new.gauges(
                "router_live",
                "Whether the router receives changes as they occur: 0 or 1.",
                &["router"],
            )?,
            router_lag_changes: new.gauges(
                "router_lag_changes",
                "Changes that were sent to the router and that the router has not acknowledged.",
                &["router"],
            )?,
            draining: new.gauge("draining", "Whether the shim drains: 0 or 1.")?,
            registry,
        })
    }

    /// The registry of all metrics of the shim.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// All metrics in the text format of Prometheus.
    #[must_use]
    pub fn text(&self) -> String {
        // A metric that cannot be written is a bug, but no reason to stop.
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }
}
