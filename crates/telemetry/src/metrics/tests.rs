//! The metrics: their names, series and documentation, and the text formats in which they are
//! served.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::TraceId;
use crate::trace_context::TraceContext;

fn trace() -> Option<TraceId> {
    let sent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    TraceContext::parse(sent).map(TraceId::from)
}

#[test]
fn a_scrape_shows_nothing_of_who_has_left_and_forgets_it() {
    let metrics = Metrics::new().unwrap();
    let up = |worker| metrics.worker_up.with_label_values(&["m", worker, "both"]).set(1);
    up("w");
    up("v");
    let text = metrics.scrape(
        TextFormat::Prometheus,
        |_| true,
        |_, worker, _| worker == "v",
        |_, worker| worker == "v",
    );
    assert!(text.contains("worker=\"v\"") && !text.contains("worker=\"w\""), "{text}");
    assert!(!metrics.encode().contains("worker=\"w\""));
    // One that came back meanwhile keeps what is counted for it.
    up("w");
    assert!(
        !metrics
            .scrape(TextFormat::Prometheus, |_| true, |_, worker, _| worker == "v", |_, _| true)
            .contains("worker=\"w\"")
    );
    assert!(metrics.encode().contains("worker=\"w\""));
}

#[test]
fn names_are_unique_and_prefixed() {
    let metrics = Metrics::new().unwrap();
    metrics.shed.with_label_values(&["m", "full"]).inc();
    assert!(metrics.encode().contains("splitrail_shed_total{model=\"m\",reason=\"full\"} 1"));
}

#[test]
fn the_series_of_a_worker_that_left_are_gone_and_no_others() {
    let metrics = Metrics::new().unwrap();
    for (model, worker) in [("m", "w"), ("m", "v"), ("n", "w")] {
        metrics.worker_up.with_label_values(&[model, worker, "both"]).set(1);
        metrics.index_event_lag.with_label_values(&[model, worker]).observe(0.1);
    }
    metrics.forget_worker("m", "w");
    let text = metrics.encode();
    assert!(!text.contains("model=\"m\",role=\"both\",worker=\"w\""), "{text}");
    assert!(!text.contains("model=\"m\",worker=\"w\""), "{text}");
    for left in ["model=\"m\",worker=\"v\"", "model=\"n\",worker=\"w\""] {
        assert!(text.contains(left), "{text}");
    }
}

#[test]
fn the_series_of_a_model_that_is_not_served_any_more_are_gone_and_no_others() {
    let metrics = Metrics::new().unwrap();
    let trace = trace();
    for model in ["m", "n"] {
        metrics.declare(&Scope::Model(model));
        metrics.queue_depth.with_label_values(&[model]).set(9);
        metrics.worker_up.with_label_values(&[model, "w", "both"]).set(1);
        crate::ModelSeries::default().begun(&metrics, model, "aggregated", 0.1, trace);
    }
    metrics.forget_model("m");
    let text = metrics.encode();
    assert!(!text.contains("model=\"m\""), "{text}");
    for left in [
        "splitrail_queue_depth{model=\"n\"} 9",
        "splitrail_worker_up{model=\"n\",role=\"both\",worker=\"w\"} 1",
        "splitrail_shed_total{model=\"none\",reason=\"in_flight_max\"} 0",
    ] {
        assert!(text.contains(left), "{left}\n{text}");
    }
    // A request of it that is still in flight counts once more.
    metrics.generation_tokens.with_label_values(&["m"]).inc();
    let shown = |format| metrics.scrape(format, |model| model == "n", |_, _, _| true, |_, _| true);
    let text = shown(TextFormat::OpenMetrics);
    assert!(!text.contains("model=\"m\"") && text.contains("model=\"n\""), "{text}");
    assert!(text.contains("model=\"none\"") && text.contains("trace_id="), "{text}");
}

#[test]
fn the_documentation_holds_the_tables_of_all_metrics() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    let documented = std::fs::read_to_string(path).unwrap();
    for table in [Metrics::reference_markdown(), Metrics::values_markdown()] {
        assert!(documented.contains(&table), "docs/metrics.md needs this table:\n{table}");
    }
}

/// The value of a series; `None` if the series does not exist.
fn value(text: &str, series: &str) -> Option<String> {
    text.lines().find_map(|line| Some(line.strip_prefix(series)?.trim().to_owned()))
}

#[test]
fn counters_exist_before_their_first_event() {
    let metrics = Metrics::new().unwrap();
    let zero = |series: &str| {
        assert_eq!(value(&metrics.encode(), series).as_deref(), Some("0"), "{series}");
    };
    zero("splitrail_reloads_total{result=\"refused\"}");
    zero("splitrail_ledger_records_total{result=\"write_failed\"}");
    zero("splitrail_shed_total{model=\"none\",reason=\"in_flight_max\"}");
    zero("splitrail_request_results_total{model=\"none\",result=\"failed\"}");
    metrics.declare(&Scope::Model("m"));
    zero("splitrail_shed_total{model=\"m\",reason=\"queue_full\"}");
    zero("splitrail_local_prefills_total{model=\"m\",reason=\"no_prefill\"}");
    zero("splitrail_prompt_length_mismatches_total{model=\"m\"}");
    zero("splitrail_retries_total{leg=\"decode\",model=\"m\",reason=\"engine_failed\"}");
    let (model, worker, role, legs) = ("m", "w", "prefill", &["prefill"][..]);
    metrics.declare(&Scope::Worker { model, worker, role, legs });
    zero("splitrail_index_rejected_total{model=\"m\",reason=\"rank\",worker=\"w\"}");
    zero("splitrail_worker_leg_seconds_count{leg=\"prefill\",model=\"m\",worker=\"w\"}");
    metrics.declare(&Scope::Tenant("t"));
    zero("splitrail_tenant_limit_refusals_total{limit=\"tokens_per_day\",tenant=\"t\"}");
    metrics.declare(&Scope::Listener("http"));
    zero("splitrail_connections_cut_total{listener=\"http\",reason=\"flood\"}");
    let text = metrics.encode();
    for absent in [
        "reason=\"queue_full\"} 0\nsplitrail_shed_total{model=\"none\"",
        "splitrail_worker_leg_seconds_count{leg=\"decode\"",
        "splitrail_local_prefills_total{model=\"none\"",
        "splitrail_canaries_total{cause=\"template\",model=\"m\",result=\"ok\"}",
    ] {
        assert!(!text.contains(absent), "{absent}");
    }
}

#[test]
fn a_series_that_counts_is_not_reset_when_it_is_declared_again() {
    let metrics = Metrics::new().unwrap();
    metrics.reloads.with_label_values(&["refused"]).inc();
    metrics.declare(&Scope::Router);
    let text = metrics.encode();
    assert_eq!(value(&text, "splitrail_reloads_total{result=\"refused\"}").as_deref(), Some("1"));
}

/// The bounds on what one object adds, which decide how many objects a Prometheus can follow.
#[test]
fn objects_have_a_bounded_number_of_series() {
    let of = |scope: &Scope<'_>| {
        let metrics = Metrics::new().unwrap();
        let lines = |metrics: &Metrics| {
            let text = metrics.encode();
            text.lines().filter(|line| line.starts_with("splitrail_")).count()
        };
        let before = lines(&metrics);
        metrics.declare(scope);
        lines(&metrics) - before
    };
    let (model, worker, role, legs) = ("m", "w", "both", &["prefill", "decode"][..]);
    let worker = of(&Scope::Worker { model, worker, role, legs });
    assert!(worker <= 150, "a worker has {worker} series");
    let model = of(&Scope::Model(model));
    assert!(model <= 610, "a model has {model} series");
    let tenant = of(&Scope::Tenant("t"));
    assert!(tenant <= 10, "a tenant has {tenant} series");
}

#[test]
fn open_metrics_have_exemplars_units_and_an_end() {
    let metrics = Metrics::new().unwrap();
    let series = crate::ModelSeries::default();
    series.begun(&metrics, "m\"\\", "aggregated", 0.12, trace());
    let text = metrics.scrape(TextFormat::OpenMetrics, |_| true, |_, _, _| true, |_, _| true);
    let labels = r#"flow="aggregated",model="m\"\\""#;
    for expected in [
        "# TYPE splitrail_ttft_seconds histogram\n# UNIT splitrail_ttft_seconds seconds\n",
        "# TYPE splitrail_reloads counter\nsplitrail_reloads_total{result=\"changed\"} 0\n",
        &format!("splitrail_ttft_seconds_bucket{{{labels},le=\"0.1\"}} 0\n"),
        &format!(
            "splitrail_ttft_seconds_bucket{{{labels},le=\"0.15\"}} 1 # \
             {{trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\"}} 0.12 "
        ),
        &format!("splitrail_ttft_seconds_bucket{{{labels},le=\"1.0\"}} 1\n"),
        &format!("splitrail_ttft_seconds_bucket{{{labels},le=\"+Inf\"}} 1\n"),
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1);
}
