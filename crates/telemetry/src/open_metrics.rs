//! Writes metrics in the text format of OpenMetrics 1.0, which has exemplars
//! (github.com/prometheus/OpenMetrics, specification/OpenMetrics.md).

use std::fmt::Write;

use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};

use crate::exemplars::{Exemplar, ExemplarStore};

/// The units that are declared; a metric has one if its name ends in it.
const UNITS: [&str; 3] = ["seconds", "bytes", "ratio"];

/// All metrics with the exemplars of their series.
pub(crate) fn encode(families: &[MetricFamily], exemplars: &ExemplarStore) -> String {
    let mut out = String::with_capacity(64 << 10);
    for family in families {
        let full = family.name();
        // The name of a counter's family has no suffix, that of its samples has.
        let name = full.strip_suffix("_total").unwrap_or(full);
        let kind = match family.get_field_type() {
            MetricType::COUNTER => "counter",
            MetricType::HISTOGRAM => "histogram",
            MetricType::GAUGE => "gauge",
            _ => "unknown",
        };
        let name = if kind == "counter" { name } else { full };
        line(&mut out, format_args!("# HELP {name} {}", EscapedText(family.help())));
        line(&mut out, format_args!("# TYPE {name} {kind}"));
        if let Some(unit) = UNITS.iter().find(|unit| has_unit(name, unit)) {
            line(&mut out, format_args!("# UNIT {name} {unit}"));
        }
        for series in family.get_metric() {
            put_series(&mut out, name, kind, series, exemplars);
        }
    }
    out.push_str("# EOF\n");
    out
}

fn has_unit(name: &str, unit: &str) -> bool {
    name.strip_suffix(unit).is_some_and(|rest| rest.ends_with('_'))
}

fn put_series(
    out: &mut String,
    name: &str,
    kind: &str,
    series: &Metric,
    exemplars: &ExemplarStore,
) {
    let labels = Labels { pairs: series.get_label(), bucket: None };
    match kind {
        "counter" => {
            let value = Number(series.get_counter().get_value());
            line(out, format_args!("{name}_total{labels} {value}"));
        }
        "histogram" => put_histogram(out, name, series, exemplars),
        _ => line(out, format_args!("{name}{labels} {}", Number(series.get_gauge().get_value()))),
    }
}

fn put_histogram(out: &mut String, name: &str, series: &Metric, exemplars: &ExemplarStore) {
    let (pairs, histogram) = (series.get_label(), series.get_histogram());
    let named: Vec<_> = pairs.iter().map(|pair| (pair.name(), pair.value())).collect();
    let exemplars = exemplars.find(name, &named);
    let count = histogram.get_sample_count();
    let bounds = histogram.get_bucket().iter();
    let buckets = bounds
        .map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()))
        .filter(|(bound, _)| bound.is_finite())
        .chain([(f64::INFINITY, count)]);
    for (at, (bound, below)) in buckets.enumerate() {
        let labels = Labels { pairs, bucket: Some(bound) };
        let exemplar = exemplars.as_ref().and_then(|exemplars| exemplars.of_bucket(at));
        // The count may be older than the exemplar: an empty bucket has none.
        let exemplar = ExemplarText(exemplar.filter(|_| below > 0));
        line(out, format_args!("{name}_bucket{labels} {below}{exemplar}"));
    }
    let labels = Labels { pairs, bucket: None };
    line(out, format_args!("{name}_count{labels} {count}"));
    line(out, format_args!("{name}_sum{labels} {}", Number(histogram.get_sample_sum())));
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a text does not fail.
    let _written = writeln!(out, "{text}");
}

/// The labels of a sample; of a bucket, with its upper bound.
struct Labels<'a> {
    pairs: &'a [LabelPair],
    bucket: Option<f64>,
}

impl std::fmt::Display for Labels<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.pairs.is_empty() && self.bucket.is_none() {
            return Ok(());
        }
        f.write_char('{')?;
        let mut separator = "";
        for pair in self.pairs {
            write!(f, "{separator}{}=\"{}\"", pair.name(), EscapedText(pair.value()))?;
            separator = ",";
        }
        if let Some(bound) = self.bucket {
            write!(f, "{separator}le=\"{}\"", CanonicalNumber(bound))?;
        }
        f.write_char('}')
    }
}

/// The exemplar of a bucket, after its count.
struct ExemplarText(Option<Exemplar>);

impl std::fmt::Display for ExemplarText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(Exemplar { trace, value, unix_ms }) = self.0 else { return Ok(()) };
        let (seconds, ms) = (unix_ms / 1000, unix_ms % 1000);
        write!(f, " # {{trace_id=\"{trace}\"}} {} {seconds}.{ms:03}", Number(value))
    }
}

/// A value of a sample.
struct Number(f64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            value if value == f64::INFINITY => f.write_str("+Inf"),
            value if value == f64::NEG_INFINITY => f.write_str("-Inf"),
            value => write!(f, "{value}"),
        }
    }
}

/// A number in the canonical form, which bounds of buckets need: `1.0`, not `1`.
struct CanonicalNumber(f64);

impl std::fmt::Display for CanonicalNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 == f64::INFINITY {
            return f.write_str("+Inf");
        }
        let text = format!("{:e}", self.0);
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        match exponent.parse::<i32>().unwrap_or(0) {
            exponent @ 6.. => write!(f, "{digits}e+{exponent:02}"),
            exponent @ ..-4 => write!(f, "{digits}e-{:02}", exponent.unsigned_abs()),
            _ if self.0.fract() == 0.0 => write!(f, "{:.1}", self.0),
            _ => write!(f, "{}", self.0),
        }
    }
}

/// A text with the escapes of both kinds of text: of a label's value, and of a help text.
struct EscapedText<'a>(&'a str);

impl std::fmt::Display for EscapedText<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}
