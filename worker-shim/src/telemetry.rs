//! The side-car's own metrics and status.

use prometheus::{Gauge, IntCounter, IntGauge, Opts, Registry, TextEncoder};

/// Metrics that this crate's parts share. The proxy and the streams to routers register
/// their own in the same [`Metrics::registry`].
pub struct Metrics {
    registry: Registry,
    /// 1 while the engine answers.
    pub engine_up: IntGauge,
    /// Processes of the engine that were seen since the side-car began.
    pub engine_processes: IntGauge,
    /// How often an engine was asked for all that it can do.
    pub engine_learned: IntCounter,
    /// Requests under way to the engine.
    pub requests: IntGauge,
    /// Prompt tokens of requests whose answer has not begun.
    pub prefill_tokens_queued: IntGauge,
    /// How old the engine's own figures are.
    pub figures_age: Gauge,
    /// 1 from the stop signal on.
    pub draining: IntGauge,
}

impl Metrics {
    /// Registers them all.
    ///
    /// # Errors
    /// If two have one name, which a test excludes.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new_custom(Some("splitrail_shim".into()), None)?;
        let gauge = |name: &str, help: &str| -> Result<IntGauge, prometheus::Error> {
            let gauge = IntGauge::with_opts(Opts::new(name, help))?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let engine_up = gauge("engine_up", "Whether the engine answers: 0 or 1.")?;
        let engine_processes =
            gauge("engine_processes", "Processes of the engine seen since the side-car began.")?;
        let requests = gauge("requests", "Requests under way to the engine.")?;
        let prefill_tokens_queued = gauge(
            "prefill_tokens_queued",
            "Prompt tokens of requests whose answer has not begun, as far as they are known.",
        )?;
        let draining = gauge("draining", "Whether the side-car is about to stop: 0 or 1.")?;
        let help = "How often all that the engine can do was found out.";
        let engine_learned = IntCounter::with_opts(Opts::new("engine_learned_total", help))?;
        registry.register(Box::new(engine_learned.clone()))?;
        let help = "How old the engine's own figures are.";
        let figures_age = Gauge::with_opts(Opts::new("engine_figures_age_seconds", help))?;
        registry.register(Box::new(figures_age.clone()))?;
        Ok(Self {
            registry,
            engine_up,
            engine_processes,
            engine_learned,
            requests,
            prefill_tokens_queued,
            figures_age,
            draining,
        })
    }

    /// Where the side-car's metrics are registered, with their common prefix.
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
