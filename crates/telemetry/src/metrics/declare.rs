//! Creates the series whose labels are known, at 0, and removes those of workers and models that have
//! left.

use prometheus::IntGaugeVec;
use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::proto::{Metric, MetricFamily};

use super::{Definition, LabelDefinition, MetricKind, Metrics};

/// The owner of series: the router, a model, a worker, a tenant or a listener. The series are
/// created when it joins.
#[derive(Clone, Copy, Debug)]
pub enum Scope<'a> {
    /// The router itself.
    Router,
    /// A model; `none` stands for requests that named no known model.
    Model(&'a str),
    /// A worker, with the legs that it serves.
    Worker {
        /// The model of the worker.
        model: &'a str,
        /// The id of the worker.
        worker: &'a str,
        /// The role of the worker.
        role: &'a str,
        /// The legs that the worker serves.
        legs: &'a [&'static str],
    },
    /// A tenant, by its label.
    Tenant(&'a str),
    /// A listener.
    Listener(&'a str),
}

impl<'a> Scope<'a> {
    /// The labels that the scope fixes. The last one is the scope's own.
    fn labels(&self) -> Vec<(&'static str, &'a str)> {
        match *self {
            Self::Router => Vec::new(),
            Self::Model(model) => vec![("model", model)],
            Self::Worker { model, worker, role, .. } => {
                vec![("model", model), ("role", role), ("worker", worker)]
            }
            Self::Tenant(tenant) => vec![("tenant", tenant)],
            Self::Listener(listener) => vec![("listener", listener)],
        }
    }

    /// The values of the labels of each series of a metric that belongs to this scope.
    fn series(&self, metric: &Definition) -> Vec<Vec<&'a str>> {
        let fixed = self.labels();
        if fixed.last().is_some_and(|(own, _)| !metric.has_label(own)) {
            return Vec::new();
        }
        // Requests without a model are counted by few metrics, which say so by their case.
        let no_model = matches!(self, Self::Model("none")) && metric.case.is_none();
        if no_model {
            return Vec::new();
        }
        let legs = |label: &LabelDefinition| match self {
            Self::Worker { legs, .. } if label.name == "leg" => Some(*legs),
            _ => label.values,
        };
        let mut all = combinations(metric, &fixed, legs).unwrap_or_default();
        all.retain(|values| metric.case.is_none_or(|exists| exists(values)));
        all
    }
}

/// The values of the labels of each series of a metric with these `fixed` labels; `None` if the values
/// of another label are not known.
fn combinations<'a>(
    metric: &Definition,
    fixed: &[(&str, &'a str)],
    known: impl Fn(&LabelDefinition) -> Option<&'a [&'static str]>,
) -> Option<Vec<Vec<&'a str>>> {
    let mut all = vec![Vec::new()];
    for label in metric.labels {
        let named = fixed.iter().find(|(name, _)| *name == label.name).map(|(_, value)| *value);
        let values: Vec<&str> = match named {
            Some(value) => vec![value],
            None => known(label)?.to_vec(),
        };
        let with = |series: Vec<&'a str>| {
            let extended = values.iter().map(move |value| [&series[..], &[*value]].concat());
            extended.collect::<Vec<_>>()
        };
        all = all.into_iter().flat_map(with).collect();
    }
    Some(all)
}

/// A metric with all its series.
pub(super) trait Family {
    /// Creates a series.
    fn create(&self, values: &[&str]);
    /// Removes a series, if it exists.
    fn remove(&self, values: &[&str]);
    /// All series.
    fn families(&self) -> Vec<MetricFamily>;
}

impl<T: MetricVecBuilder> Family for MetricVec<T> {
    fn create(&self, values: &[&str]) {
        self.with_label_values(values);
    }

    fn remove(&self, values: &[&str]) {
        // The series may not exist, or another thread may have removed it.
        let _gone = self.remove_label_values(values);
    }

    fn families(&self) -> Vec<MetricFamily> {
        self.collect()
    }
}

impl Metrics {
    /// Creates the counters and histograms of what has joined, if the values of all their labels are
    /// known. Series that exist stay as they are.
    pub fn declare(&self, scope: &Scope<'_>) {
        self.each(&mut |metric, family| {
            if metric.kind != MetricKind::Gauge {
                scope.series(metric).iter().for_each(|values| family.create(values));
            }
        });
    }

    /// Removes the series of a worker that has left.
    pub fn forget_worker(&self, model: &str, worker: &str) {
        let own = [("model", model), ("worker", worker)];
        self.each(&mut |metric, family| forget_series(metric, family, &own));
    }

    /// Removes the series of a discovery source that the model no longer has.
    pub fn forget_source(&self, model: &str, source: &str) {
        let families: [&dyn Family; 3] =
            [&self.discovery_workers, &self.discovery_successful, &self.discovery_errors];
        families.iter().for_each(|family| family.remove(&[model, source]));
    }

    /// Removes the series of issuers that are not configured any more.
    pub fn forget_issuers(&self, is_configured: impl Fn(&str) -> bool) {
        for known in self.jwks_keys.collect() {
            for series in known.get_metric() {
                let issuer = series.get_label().iter().find(|pair| pair.name() == "issuer");
                let issuer = issuer.map_or("", |pair| pair.value());
                if !is_configured(issuer) {
                    self.each(&mut |metric, family| {
                        forget_series(metric, family, &[("issuer", issuer)]);
                    });
                }
            }
        }
    }

    /// Removes the series of a model that is no longer served, and of its workers. Requests of the
    /// model that are still in flight may count on; [`scrape`](Self::scrape) does not show it.
    pub fn forget_model(&self, model: &str) {
        let own = [("model", model)];
        self.each(&mut |metric, family| forget_series(metric, family, &own));
        self.exemplars.forget(own[0]);
    }
}

/// The last label and the value of each series of a gauge; the label is empty for a gauge without labels.
pub fn values_of(gauge: &IntGaugeVec) -> Vec<(String, i64)> {
    let all = gauge.collect();
    let series = all.iter().flat_map(|family| family.get_metric());
    let value = |series: &Metric| {
        let label = series.get_label().last().map_or("", |pair| pair.value());
        (label.to_owned(), series.get_gauge().get_value() as i64)
    };
    series.map(value).collect()
}

/// The last label of each series of a gauge that is 0.
pub fn labels_of_zeros(gauge: &IntGaugeVec) -> Vec<String> {
    let zeros = values_of(gauge).into_iter().filter(|(_, value)| *value == 0);
    zeros.map(|(label, _)| label).collect()
}

/// Removes the series of a metric that have these labels, if the metric has them.
fn forget_series(metric: &Definition, family: &dyn Family, own: &[(&str, &str)]) {
    if !own.iter().all(|(name, _)| metric.has_label(name)) {
        return;
    }
    // Otherwise all series of the metric would be read, for each of a thousand workers that leave.
    if let Some(all) = combinations(metric, own, |label| label.values) {
        all.iter().for_each(|values| family.remove(values));
        return;
    }
    for family_now in family.families() {
        for series in family_now.get_metric() {
            let value = |name: &str| {
                let pair = series.get_label().iter().find(|pair| pair.name() == name);
                pair.map_or("", |pair| pair.value())
            };
            if own.iter().all(|(name, own)| value(name) == *own) {
                let values: Vec<_> = metric.labels.iter().map(|label| value(label.name)).collect();
                family.remove(&values);
            }
        }
    }
}
