//! The shim's own metrics.

use prometheus::{Gauge, GaugeVec, IntCounter, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};

/// Metrics of the engine, the mirror and the drain. The proxy and the streams to routers
/// register theirs in the same [`Metrics::registry`].
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// 1 while the engine answers.
    pub engine_up: IntGauge,
    /// Processes of the engine that were seen since the shim began.
    pub engine_processes: IntGauge,
    /// How often all that an engine can do was found out.
    pub engine_learned: IntCounter,
    /// How old the engine's own figures are.
    pub engine_figures_age: Gauge,
    /// Blocks that the engine holds, by rank and tier.
    pub mirror_blocks: IntGaugeVec,
    /// Whether the engine's events reach the mirror without a gap, by rank.
    pub mirror_current: IntGaugeVec,
    /// How often the mirror of a rank began anew.
    pub mirror_resets: GaugeVec,
    /// Memory that the mirror takes.
    pub mirror_bytes: IntGauge,
    /// Whether a router is told of changes as they come, by its address.
    pub router_live: IntGaugeVec,
    /// Changes that a router was sent and has not in its index yet.
    pub router_lag_changes: IntGaugeVec,
    /// 1 while there is a connection to the broker.
    pub broker_connected: IntGauge,
    /// Changes that are not in the broker's stream yet.
    pub broker_lag_changes: IntGauge,
    /// How often changes were lost on the way there, so that only a snapshot leads on.
    pub broker_losses: IntGauge,
    /// 1 from the stop signal on.
    pub draining: IntGauge,
}

impl Metrics {
    /// Registers them all.
    ///
    /// # Errors
    /// If two have one name, which a test excludes.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let opts = |name: &str, help: &str| Opts::new(format!("splitrail_shim_{name}"), help);
        let gauge = |name, help| -> prometheus::Result<IntGauge> {
            let gauge = IntGauge::with_opts(opts(name, help))?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let by = |name, help, labels: &[&str]| -> prometheus::Result<IntGaugeVec> {
            let gauge = IntGaugeVec::new(opts(name, help), labels)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let engine_learned = IntCounter::with_opts(opts(
            "engine_learned_total",
            "How often all that the engine can do was found out.",
        ))?;
        registry.register(Box::new(engine_learned.clone()))?;
        let engine_figures_age = Gauge::with_opts(opts(
            "engine_figures_age_seconds",
            "How old the engine's own figures are.",
        ))?;
        registry.register(Box::new(engine_figures_age.clone()))?;
        let mirror_resets = GaugeVec::new(
            opts("mirror_resets", "How often the mirror of a rank began anew."),
            &["rank"],
        )?;
        registry.register(Box::new(mirror_resets.clone()))?;
        Ok(Self {
            engine_up: gauge("engine_up", "Whether the engine answers: 0 or 1.")?,
            engine_processes: gauge(
                "engine_processes",
                "Processes of the engine seen since the shim began.",
            )?,
            engine_learned,
            engine_figures_age,
            mirror_blocks: by("mirror_blocks", "KV blocks of the engine.", &["rank", "tier"])?,
            mirror_current: by(
                "mirror_current",
                "Whether the engine's events arrive without a gap: 0 or 1.",
                &["rank"],
            )?,
            mirror_resets,
            mirror_bytes: gauge("mirror_bytes", "Memory that the mirror takes.")?,
            router_live: by(
                "router_live",
                "Whether the router is told of changes as they come: 0 or 1.",
                &["router"],
            )?,
            router_lag_changes: by(
                "router_lag_changes",
                "Changes that the router was sent and has not in its index yet.",
                &["router"],
            )?,
            broker_connected: gauge(
                "broker_connected",
                "Whether there is a connection to the broker: 0 or 1.",
            )?,
            broker_lag_changes: gauge(
                "broker_lag_changes",
                "Changes that are not in the broker's stream yet.",
            )?,
            broker_losses: gauge(
                "broker_losses",
                "How often changes were lost on the way to the broker: a snapshot led on.",
            )?,
            draining: gauge("draining", "Whether the shim is about to stop: 0 or 1.")?,
            registry,
        })
    }

    /// Where the shim's metrics are registered, each under its full name.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// All of them, as Prometheus reads them.
    #[must_use]
    pub fn text(&self) -> String {
        // Metrics that cannot be written are a defect, and no reason to stop.
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }
}
