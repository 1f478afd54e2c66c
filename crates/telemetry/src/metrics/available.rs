//! The gauge of workers that can take a leg, which stays when the workers leave.

use std::collections::BTreeSet;

use prometheus::core::Collector;

use super::Metrics;

/// How many workers of a model can take a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvailableWorkers<'a> {
    /// The model's name.
    pub model: &'a str,
    /// The leg: `prefill` or `decode`.
    pub leg: &'static str,
    /// The number of workers.
    pub workers: usize,
}

impl Metrics {
    /// Sets the gauge for these models and legs, and removes its series of all others: models that
    /// are no longer served, and legs that a model no longer has.
    pub fn set_available_workers(&self, now: &[AvailableWorkers<'_>]) {
        let gauge = &self.available_workers;
        let kept: BTreeSet<(&str, &str)> = now.iter().map(|one| (one.model, one.leg)).collect();
        for one in now {
            let workers = i64::try_from(one.workers).unwrap_or(i64::MAX);
            gauge.with_label_values(&[one.model, one.leg]).set(workers);
        }
        for family in gauge.collect() {
            for series in family.get_metric() {
                let value = |name: &str| {
                    let pair = series.get_label().iter().find(|pair| pair.name() == name);
                    pair.map_or("", |pair| pair.value())
                };
                let labels = [value("model"), value("leg")];
                if !kept.contains(&(labels[0], labels[1])) {
                    // Another scrape may have removed it.
                    let _gone = gauge.remove_label_values(&labels);
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_model_without_workers_has_a_series_and_a_model_that_is_gone_has_none() {
        let metrics = Metrics::new().unwrap();
        let of = |model, leg, workers| AvailableWorkers { model, leg, workers };
        metrics.set_available_workers(&[of("m", "prefill", 2), of("m", "decode", 0)]);
        let shown = |metrics: &Metrics| {
            let text = metrics.encode();
            let lines = text.lines().filter(|line| line.starts_with("splitrail_available_workers"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(
            shown(&metrics),
            [
                "splitrail_available_workers{leg=\"decode\",model=\"m\"} 0",
                "splitrail_available_workers{leg=\"prefill\",model=\"m\"} 2",
            ]
        );
        metrics.set_available_workers(&[of("n", "decode", 1)]);
        assert_eq!(shown(&metrics), ["splitrail_available_workers{leg=\"decode\",model=\"n\"} 1"]);
    }
}
