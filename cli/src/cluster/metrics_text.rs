//! Reads Prometheus' text format, as far as the router writes it.

/// The series of `GET /metrics`.
#[derive(Clone, Debug, Default)]
pub(crate) struct MetricsText {
    series: Vec<Series>,
}

/// Names and values of labels.
type Labels = Vec<(String, String)>;

/// One series.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    name: String,
    labels: Labels,
    /// The value.
    pub(crate) value: f64,
}

impl Series {
    /// The value of a label; empty if the series does not have it.
    pub(crate) fn label(&self, name: &str) -> &str {
        let found = self.labels.iter().find(|(other, _)| other == name);
        found.map_or("", |(_, value)| value)
    }

    fn has(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(name, value)| self.label(name) == *value)
    }
}

impl MetricsText {
    /// Reads the text; lines that are not series are left out.
    pub(crate) fn read(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self { series: lines.filter_map(series).collect() }
    }

    /// The series of a metric that have these labels.
    pub(crate) fn all<'m>(
        &'m self,
        name: &'m str,
        labels: &'m [(&'m str, &'m str)],
    ) -> impl Iterator<Item = &'m Series> {
        self.series.iter().filter(move |series| series.name == name && series.has(labels))
    }

    /// The sum of these series; 0 if there is none.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.all(name, labels).map(|series| series.value).sum()
    }
}

fn series(line: &str) -> Option<Series> {
    let (name, rest) = match line.find(['{', ' ']) {
        Some(at) => line.split_at(at),
        None => return None,
    };
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => read_labels(rest)?,
        None => (Vec::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Series { name: name.to_owned(), labels, value })
}

/// The labels up to the closing brace, and what follows it.
fn read_labels(mut rest: &str) -> Option<(Labels, &str)> {
    let mut labels = Labels::new();
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.push((name.to_owned(), value));
        rest = &after[end + 1..];
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn series_are_found_by_their_labels() {
        let text = "# HELP a_total Text.\n# TYPE a_total counter\na_total{worker=\"d\\\"0\\n\",leg=\"x\"} 2\n\
                    a_total{worker=\"d1\",leg=\"x\"} 3 1700000000\nplain 1.5\nbroken{a=\"1\nworse\n";
        let metrics = MetricsText::read(text);
        assert_eq!(metrics.sum("a_total", &[("leg", "x")]), 5.0);
        assert_eq!(metrics.sum("a_total", &[("worker", "d\"0\n")]), 2.0);
        assert_eq!(metrics.sum("plain", &[]), 1.5);
        assert_eq!(metrics.sum("broken", &[]), 0.0);
        assert_eq!(metrics.all("a_total", &[]).next().unwrap().label("leg"), "x");
    }
}
