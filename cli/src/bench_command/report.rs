//! What a load has shown, as a table and for a picture.

use std::collections::BTreeMap;
use std::time::Duration;

use splitrail_replay::report::Spread;
use splitrail_replay::svg::Panel;

use super::client::Outcome;
use crate::table::{Column, lines};

/// The figures of one policy.
#[derive(Clone, Debug, Default)]
pub(super) struct PolicyFigures {
    policy: String,
    /// Number of requests.
    requests: usize,
    /// Number of complete replies.
    pub(super) served: usize,
    /// The failures by name.
    errors: BTreeMap<String, usize>,
    ttft: Spread,
    inter_token: Spread,
    /// Cached prompt tokens as a share of all.
    hit_percent: f64,
    served_per_s: f64,
}

impl PolicyFigures {
    /// The figures of requests that were served within `busy`.
    pub(super) fn of(policy: String, outcomes: &[Outcome], busy: Duration) -> Self {
        let mut errors = BTreeMap::new();
        for name in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
            *errors.entry(name.clone()).or_default() += 1;
        }
        let served = || outcomes.iter().filter_map(|outcome| outcome.as_ref().ok());
        let count = served().count();
        let [prompt, cached] = [
            served().map(|served| served.prompt_tokens).sum::<u64>(),
            served().map(|served| served.cached_tokens).sum::<u64>(),
        ];
        Self {
            policy,
            requests: outcomes.len(),
            served: count,
            errors,
            ttft: Spread::of(served().map(|served| served.ttft_ns).collect()),
            inter_token: Spread::of(served().filter_map(|served| served.inter_token_ns).collect()),
            hit_percent: 100.0 * cached as f64 / prompt.max(1) as f64,
            served_per_s: count as f64 / busy.as_secs_f64().max(f64::MIN_POSITIVE),
        }
    }
}

const COLUMNS: [Column; 11] = [
    Column::text("policy", 30),
    Column::figure("requests"),
    Column::figure("errors"),
    Column::figure("hit %"),
    Column::figure("TTFT mean ms"),
    Column::figure("p50"),
    Column::figure("p90"),
    Column::figure("p99"),
    Column::figure("ITL p50 ms"),
    Column::figure("p99"),
    Column::figure("replies/s"),
];

fn row(figures: &PolicyFigures) -> Vec<String> {
    let ms = |seconds: f64| format!("{:.1}", seconds * 1e3);
    let PolicyFigures { ttft, inter_token, .. } = figures;
    vec![
        figures.policy.clone(),
        figures.requests.to_string(),
        (figures.requests - figures.served).to_string(),
        format!("{:.1}", figures.hit_percent),
        ms(ttft.mean_s),
        ms(ttft.p50_s),
        ms(ttft.p90_s),
        ms(ttft.p99_s),
        ms(inter_token.p50_s),
        ms(inter_token.p99_s),
        format!("{:.1}", figures.served_per_s),
    ]
}

/// The table, what was gained over the second policy, and the errors.
pub(super) fn text(all: &[PolicyFigures]) -> String {
    let rows: Vec<_> = all.iter().map(row).collect();
    let mut text = lines(&COLUMNS, &rows);
    if let [ours, other] = all
        && ours.served > 0
        && other.served > 0
    {
        let change = |ours: f64, other: f64| match other > 0.0 {
            true => format!("{:+.0} %", 100.0 * (ours / other - 1.0)),
            false => "-".to_owned(),
        };
        text.extend([
            String::new(),
            format!(
                "{} against {}: TTFT mean {}, p99 {}; hits {:+.1} points; replies per second {}",
                ours.policy,
                other.policy,
                change(ours.ttft.mean_s, other.ttft.mean_s),
                change(ours.ttft.p99_s, other.ttft.p99_s),
                ours.hit_percent - other.hit_percent,
                change(ours.served_per_s, other.served_per_s),
            ),
        ]);
    }
    for figures in all {
        for (error, count) in &figures.errors {
            text.push(format!("{}: {count} x {error}", figures.policy));
        }
    }
    text.join("\n")
}

/// A name below bars, and what they show.
type Group = (&'static str, fn(&PolicyFigures) -> f64);

/// The panels of the picture.
pub(super) fn panels(all: &[PolicyFigures]) -> [Panel; 3] {
    let panel = |title: &str, groups: &[Group]| Panel {
        title: title.to_owned(),
        groups: groups.iter().map(|(name, _)| (*name).to_owned()).collect(),
        series: all
            .iter()
            .map(|figures| {
                let values = groups.iter().map(|(_, value)| value(figures)).collect();
                (figures.policy.clone(), values)
            })
            .collect(),
    };
    [
        panel(
            "TTFT in ms",
            &[
                ("mean", |figures| figures.ttft.mean_s * 1e3),
                ("p50", |figures| figures.ttft.p50_s * 1e3),
                ("p90", |figures| figures.ttft.p90_s * 1e3),
                ("p99", |figures| figures.ttft.p99_s * 1e3),
            ],
        ),
        panel(
            "time between tokens in ms",
            &[
                ("p50", |figures| figures.inter_token.p50_s * 1e3),
                ("p99", |figures| figures.inter_token.p99_s * 1e3),
            ],
        ),
        panel("prompt tokens from caches in %", &[("hits", |figures| figures.hit_percent)]),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::client::Served;
    use super::*;

    #[test]
    fn figures_are_of_complete_replies_and_failures_are_named() {
        let served = |ttft_ns, cached_tokens| {
            Ok(Served { ttft_ns, inter_token_ns: None, prompt_tokens: 100, cached_tokens })
        };
        let failed = || Err("engine_timeout".to_owned());
        let ours = [served(1_000_000, 50), served(3_000_000, 100)];
        let other = [served(4_000_000, 25), failed(), failed()];
        let figures = [
            PolicyFigures::of("predicted_ttft".to_owned(), &ours, Duration::from_secs(1)),
            PolicyFigures::of("round_robin".to_owned(), &other, Duration::from_secs(1)),
        ];
        let text = text(&figures);
        let cells = |line: usize| -> Vec<&str> {
            text.lines().nth(line).unwrap_or_default().split_whitespace().collect()
        };
        assert_eq!(cells(1)[..6], ["predicted_ttft", "2", "0", "75.0", "2.0", "1.0"]);
        assert_eq!(cells(2)[..5], ["round_robin", "3", "2", "25.0", "4.0"]);
        assert!(text.contains("TTFT mean -50 %, p99 -25 %; hits +50.0 points"), "{text}");
        assert!(text.ends_with("round_robin: 2 x engine_timeout"), "{text}");
    }
}
