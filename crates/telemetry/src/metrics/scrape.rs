//! All metrics as Prometheus reads them.

use std::collections::BTreeSet;

use prometheus::TextEncoder;
use prometheus::proto::MetricFamily;

use super::Metrics;
use crate::open_metrics;
use crate::process;

/// A text format of metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextFormat {
    /// Prometheus' text format, version 0.0.4.
    #[default]
    Prometheus,
    /// OpenMetrics 1.0, with exemplars.
    OpenMetrics,
}

impl TextFormat {
    /// The value of `content-type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

impl Metrics {
    /// All metrics of the router, in Prometheus' text format.
    pub fn encode(&self) -> String {
        self.scrape(TextFormat::Prometheus, |_| true, |_, _, _| true, |_, _| true)
    }

    /// All metrics as text, without the series of models that are not `served`, and of workers that are
    /// not `present` (model, worker, and role where that is a label). The series of such workers are
    /// also removed from the registry, unless the worker has rejoined by `now`.
    pub fn scrape(
        &self,
        format: TextFormat,
        served: impl Fn(&str) -> bool,
        present: impl Fn(&str, &str, Option<&str>) -> bool,
        now: impl Fn(&str, &str) -> bool,
    ) -> String {
        let mut families = self.registry.gather();
        let mut gone = BTreeSet::new();
        for family in &mut families {
            retain_served(family, &served);
            retain_present(family, &present, &mut gone);
        }
        families.retain(|family| !family.get_metric().is_empty());
        for (model, worker) in gone.iter().filter(|(model, worker)| !now(model, worker)) {
            self.forget_worker(model, worker);
        }
        families.extend(process::families());
        match format {
            TextFormat::Prometheus => {
                TextEncoder::new().encode_to_string(&families).unwrap_or_default()
            }
            TextFormat::OpenMetrics => open_metrics::encode(&families, &self.exemplars),
        }
    }
}

/// Removes the series of models that are not served; `none` stands for requests without a model.
fn retain_served(family: &mut MetricFamily, served: &impl Fn(&str) -> bool) {
    family.mut_metric().retain(|series| {
        let model = series.get_label().iter().find(|pair| pair.name() == "model");
        model.is_none_or(|model| model.value() == "none" || served(model.value()))
    });
}

/// Removes the series of workers that are not present, and names these workers in `gone`.
fn retain_present(
    family: &mut MetricFamily,
    present: &impl Fn(&str, &str, Option<&str>) -> bool,
    gone: &mut BTreeSet<(String, String)>,
) {
    family.mut_metric().retain(|series| {
        let label = |name| {
            let pair = series.get_label().iter().find(|pair| pair.name() == name);
            pair.map(|pair| pair.value().to_owned())
        };
        let (Some(model), Some(worker)) = (label("model"), label("worker")) else {
            return true;
        };
        let stays = present(&model, &worker, label("role").as_deref());
        if !stays {
            gone.insert((model, worker));
        }
        stays
    });
}
