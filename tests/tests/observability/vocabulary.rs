//! The dashboard and the rules name only what the router serves, and are explained.

use std::collections::{BTreeMap, BTreeSet};

use splitrail_telemetry::Metrics;

use crate::files::{Panel, Rule, panels, rules, text};
use crate::promql::check;

/// The recorded series. Those of a router have the label `instance`, and all others `model`.
fn recorded() -> BTreeMap<String, BTreeSet<String>> {
    let label = |rule: &Rule| match rule.name.starts_with("splitrail:router_") {
        true => "instance".to_owned(),
        false => "model".to_owned(),
    };
    let named = rules("recording.yaml").into_iter();
    named.map(|rule| (rule.name.clone(), [label(&rule)].into())).collect()
}

#[test]
fn rules_name_only_metrics_labels_and_values_that_the_router_serves() {
    let recorded = recorded();
    let all: Vec<Rule> = rules("recording.yaml").into_iter().chain(rules("alerts.yaml")).collect();
    assert!(all.len() > 40, "the rules were not found");
    for rule in all {
        check(&rule.expr, &recorded).unwrap_or_else(|why| panic!("{}: {why}", rule.name));
    }
}

#[test]
fn panels_name_only_metrics_labels_and_values_that_the_router_serves() {
    let recorded = recorded();
    let all = panels();
    assert!(all.len() > 60, "the panels were not found");
    for panel in all {
        for query in &panel.queries {
            check(query, &recorded).unwrap_or_else(|why| panic!("{}: {why}", panel.title));
        }
    }
}

#[test]
fn a_renamed_metric_label_or_value_is_noticed() {
    let none = BTreeMap::new();
    let good =
        "sum by (le, stage) (rate(splitrail_engine_stage_seconds_bucket{stage=\"prefill\"}[5m]))";
    assert_eq!(check(good, &none), Ok(()));
    for (from, to) in [
        ("splitrail_engine_stage_seconds_bucket", "splitrail_engine_stages_seconds_bucket"),
        ("_bucket", ""),
        ("stage=", "phase="),
        ("\"prefill\"", "\"prefil\""),
        ("(le, stage)", "(le, phase)"),
    ] {
        assert!(check(&good.replace(from, to), &none).is_err(), "{from} -> {to}");
    }
    assert!(check("splitrail:nobody:records_this > 0", &none).is_err());
    assert!(check("vector(1)", &none).is_err());
}

#[test]
fn every_alert_says_how_bad_it_is_and_what_to_do() {
    let guide =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guides/alerts.md"))
            .unwrap();
    let sections: BTreeSet<&str> =
        guide.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let alerts = rules("alerts.yaml");
    let names: BTreeSet<&str> = alerts.iter().map(|alert| alert.name.as_str()).collect();
    assert_eq!(sections, names, "docs/guides/alerts.md has one section for each alert");
    for alert in &alerts {
        let name = &alert.name;
        assert!(alert.is_alert);
        assert!(matches!(alert.severity.as_str(), "critical" | "warning" | "info"), "{name}");
        assert!(!alert.summary.is_empty() && !alert.description.is_empty(), "{name}");
        let anchor = format!("docs/guides/alerts.md#{}", name.to_lowercase());
        assert!(alert.runbook_url.ends_with(&anchor), "{name}");
        let section = guide.split(&format!("### {name}\n")).nth(1).unwrap_or_default();
        let section = section.split("\n### ").next().unwrap_or_default();
        for part in ["**Symptom**", "**Meaning**", "**Check**", "**Do**"] {
            assert!(section.contains(part), "{name} has no {part}");
        }
    }
}

/// Queries in the guide are checked as well: the lines in blocks that are no commands.
#[test]
fn the_guides_name_only_metrics_that_the_router_serves() {
    let recorded = recorded();
    for guide in ["alerts", "high-ttft", "low-cache-hits"] {
        let path = format!("{}/../docs/guides/{guide}.md", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let blocks = text.split("```").skip(1).step_by(2);
        let named = blocks.flat_map(str::lines).filter(|line| line.contains("splitrail_"));
        let queries: Vec<&str> = named.filter(|line| !line.starts_with("curl")).collect();
        assert!(!queries.is_empty(), "{guide}");
        for query in queries {
            let query = query.replace("MODEL", "m");
            check(&query, &recorded).unwrap_or_else(|why| panic!("{why}"));
        }
    }
}

/// Two models may have workers of the same id, and the dashboard has a variable for the model.
#[test]
fn panels_tell_the_workers_of_two_models_apart_and_follow_the_chosen_model() {
    let has_model = |series: &str| {
        let ends = ["", "_bucket", "_sum", "_count"];
        ends.into_iter().filter_map(|end| series.strip_suffix(end)).any(|name| {
            let metric = Metrics::definitions().iter().find(|metric| metric.name == name);
            metric.is_some_and(|metric| metric.labels.iter().any(|label| label.name == "model"))
        })
    };
    for Panel { title, queries, legends, .. } in panels() {
        for query in &queries {
            for group in query.split("by (").skip(1).filter_map(|rest| rest.split(')').next()) {
                let labels: BTreeSet<&str> = group.split(", ").collect();
                assert!(
                    !labels.contains("worker") || labels.contains("model"),
                    "{title} adds up workers of different models: {query}"
                );
            }
            for series in query.split("splitrail_").skip(1) {
                let end = series.find(|letter: char| letter != '_' && !letter.is_alphanumeric());
                let (name, rest) = series.split_at(end.unwrap_or(series.len()));
                assert!(
                    !has_model(name) || rest.starts_with("{model=~"),
                    "{title} shows other models than the chosen one: {query}"
                );
            }
        }
        for legend in &legends {
            assert!(
                !legend.contains("{{worker}}") || legend.contains("{{model}}"),
                "{title} names a worker without its model: {legend}"
            );
        }
    }
}

#[test]
fn every_panel_says_what_it_shows() {
    for panel in panels() {
        assert!(panel.description.len() > 20, "{} has no description", panel.title);
        assert!(!panel.queries.is_empty(), "{} has no query", panel.title);
    }
}

/// What no panel and no alert shows is either missing there, or not worth having.
#[test]
fn every_metric_is_shown_somewhere() {
    let all = ["alerts.yaml", "recording.yaml", "dashboards/splitrail.json"].map(text).concat();
    let guides = ["high-ttft", "low-cache-hits", "alerts"].map(|guide| {
        let path = format!("{}/../docs/guides/{guide}.md", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap()
    });
    let all = all + &guides.concat();
    // For people who look at one of these with a question of their own.
    let quiet = [
        "draining",
        "removed_fields_total",
        "untokenized_prompts_total",
        "resent_requests_total",
        "attach_calls_total",
        "tenant_limit",
    ];
    let shown = |name: &str| all.contains(&format!("splitrail_{name}"));
    let unseen: Vec<_> = Metrics::definitions()
        .iter()
        .map(|metric| metric.name)
        .filter(|name| !shown(name) && !quiet.contains(name))
        .collect();
    assert!(unseen.is_empty(), "{unseen:?}");
}
