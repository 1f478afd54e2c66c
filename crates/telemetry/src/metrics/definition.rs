//! One line of the table of metrics.

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// A count that only grows.
    Counter,
    /// A value that goes up and down.
    Gauge,
    /// A distribution.
    Histogram,
}

impl MetricKind {
    /// The name of the type in the text formats.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A label of a metric.
#[derive(Clone, Copy, Debug)]
pub struct LabelDefinition {
    /// The name of the label.
    pub name: &'static str,
    /// Its values, if they are known when the router starts.
    pub values: Option<&'static [&'static str]>,
}

/// Says whether a combination of values of labels exists from the start.
pub(crate) type Case = fn(&[&str]) -> bool;

/// A metric, as the table has it.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// The name, without the prefix `splitrail_`.
    pub name: &'static str,
    /// The type.
    pub kind: MetricKind,
    /// The labels, in the order in which the code gives their values.
    pub labels: &'static [LabelDefinition],
    /// The meaning, for operators.
    pub help: &'static str,
    /// Which combinations of known values exist from the start; `None` for all.
    pub(crate) case: Option<Case>,
}

impl Definition {
    /// Whether the metric has a label.
    pub fn has_label(&self, name: &str) -> bool {
        self.labels.iter().any(|label| label.name == name)
    }
}
