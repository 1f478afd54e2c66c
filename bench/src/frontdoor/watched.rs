//! Measures what the access log and traces cost a request: routers with and without them, in turns.
//! Also compares the time to first token in the access log with that of the client.

mod collector;
mod ttft;

use std::path::Path;

use super::client::Load;
use super::engines::Engines;
use super::report::{Goal, Row};
use super::settings::{Requests, Variant, compare_and, row_of};
use super::targets::Target;
use super::text::{SIZES, Text};
use super::{Bench, Failure};
use crate::fleet::http;
use crate::fleet::report::print_line;
use collector::Collector;

/// The router without access log and traces.
const OFF: &str = "off";
/// The router with the access log alone.
const ACCESS_LOG: &str = "access log";
/// The router with access log and traces.
const WATCHED: &str = "watched";

/// Enables the access log, which is written to standard output: a file here.
const LOGGED: &str = "access_log: { enabled: true }\n";

/// The shares of lines and spans that were lost, in percent.
#[derive(Default)]
struct Lost {
    lines: f64,
    spans: f64,
}

/// Compares a router that logs and traces every request with one that does neither.
///
/// # Errors
/// A request gets no good reply, or the collector gets no spans.
pub(super) fn watched(
    bench: &Bench<'_>,
    engines: &Engines,
    text: &Text,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    let options = bench.options;
    if !options.wants("watched") || (options.quick && options.only.is_none()) {
        return Ok(Vec::new());
    }
    let collector = bench.engine_runtime.block_on(Collector::start())?;
    let endpoint = format!("http://{}", collector.address());
    let both = format!("{LOGGED}tracing: {{ otlp: {{ endpoint: {endpoint:?} }} }}\n");
    let log = ("RUST_LOG", options.log.as_str());
    let variants = [(OFF, ""), (ACCESS_LOG, LOGGED), (WATCHED, &*both)]
        .map(|(name, further)| Variant { name, further, variable: log });
    let load = Load::new(&text.prompts(SIZES[0]), false);
    let requests = Requests { workload: "watched", clients: 16, load };
    let mut lost = Lost::default();
    let check = |target: &Target| lost.read(bench, target);
    let cell = match compare_and(bench, engines, folder, requests, &variants, check) {
        Ok(cell) => cell,
        Err(error) => {
            print_line(&format!(
                "watched is left out (it needs a router with the feature `otlp`): {error}"
            ))?;
            return Ok(Vec::new());
        }
    };
    if collector.received_bytes() == 0 {
        return Err("the collector has received no spans".into());
    }
    let row =
        |name, goal| row_of(&cell, (name, OFF), ("CPU per request", "us", |f| f.cpu_us), goal);
    let mut rows = vec![row(WATCHED, Some(Goal::RatioAtMost(1.08))), row(ACCESS_LOG, None)];
    for (measure, percent) in [("lines lost", lost.lines), ("spans lost", lost.spans)] {
        rows.push(Row::alone(WATCHED, measure, (percent, "%"), Some(Goal::AtMost(0.0))));
    }
    rows.extend(ttft::ttft(bench, text, folder)?);
    Ok(rows)
}

impl Lost {
    /// Reads the losses of a router, and keeps the largest share.
    fn read(&mut self, bench: &Bench<'_>, target: &Target) -> Result<(), Failure> {
        let Some(admin) = target.admin else { return Ok(()) };
        let (_, text) =
            bench.engine_runtime.block_on(http::request(admin, "GET", "/metrics", ""))?;
        let lines = lost_percent(&text, "splitrail_access_log_lines_total", "written");
        let spans = lost_percent(&text, "splitrail_spans_total", "exported");
        *self = Self { lines: self.lines.max(lines), spans: self.spans.max(spans) };
        Ok(())
    }
}

/// The share, in percent, of a counter's events whose `result` is not `good`.
fn lost_percent(metrics: &str, name: &str, good: &str) -> f64 {
    let (mut lost, mut all) = (0.0, 0.0);
    let good = format!("result=\"{good}\"");
    for line in metrics.lines().filter(|line| line.starts_with(&format!("{name}{{"))) {
        let count: f64 =
            line.rsplit(' ').next().and_then(|count| count.parse().ok()).unwrap_or(0.0);
        all += count;
        if !line.contains(&good) {
            lost += count;
        }
    }
    if all > 0.0 { lost / all * 100.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::lost_percent;

    #[test]
    fn the_lost_share_is_computed_from_one_counter() {
        let text = "# TYPE a_total counter\na_total{result=\"written\"} 30\n\
                    a_total{result=\"queue_full\"} 10\nab_total{result=\"queue_full\"} 5\n";
        assert_eq!(lost_percent(text, "a_total", "written"), 25.0);
        assert_eq!(lost_percent(text, "c_total", "written"), 0.0);
    }
}
