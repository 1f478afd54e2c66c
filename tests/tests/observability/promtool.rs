//! `promtool` accepts the rules, each alert fires for its fault and for no other, and a scrape is
//! free of lint.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use splitrail_tests::{Cluster, Spec};

use crate::alert_cases::{CASES, Case, HEALTHY, QUIET};
use crate::files::{path, rules};
use crate::server::tool;

fn promtool(args: &[&str], input: Option<&str>) -> Output {
    let mut child = Command::new(tool("promtool"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    if let Some(input) = input {
        std::io::Write::write_all(&mut stdin, input.as_bytes()).unwrap();
    }
    drop(stdin);
    child.wait_with_output().unwrap()
}

fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

fn rule_files() -> [PathBuf; 2] {
    ["recording.yaml", "alerts.yaml"].map(path)
}

#[test]
fn promtool_accepts_the_rules() {
    let [recording, alerts] = rule_files().map(|file| file.display().to_string());
    let checked = promtool(&["check", "rules", "--lint-fatal", &recording, &alerts], None);
    assert!(checked.status.success(), "{}", said(&checked));
}

#[test]
fn promtool_accepts_the_example_that_scrapes_routers_and_shims() {
    let example = path("prometheus.yaml");
    let checked = promtool(&["check", "config", &example.display().to_string()], None);
    assert!(checked.status.success(), "{}", said(&checked));
    let text = std::fs::read_to_string(example).unwrap();
    let shims = text.split("- job_name: ").find(|job| job.starts_with("splitrail-shim\n"));
    assert!(shims.unwrap().contains("metrics_path: /splitrail/metrics"), "{text}");
}

#[test]
fn promtool_accepts_the_configuration_of_the_compose_file() {
    // The container has the rules beside the configuration.
    let folder = tempfile::tempdir().unwrap();
    for file in rule_files() {
        std::fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    let config = folder.path().join("prometheus.yaml");
    std::fs::copy(path("../compose/prometheus.yaml"), &config).unwrap();
    let checked = promtool(&["check", "config", &config.display().to_string()], None);
    assert!(checked.status.success(), "{}", said(&checked));
}

/// A test of `promtool`: these changes to a healthy router, and the alerts that fire for them.
fn put_test(out: &mut String, changes: &[(&str, &str)], firing: &BTreeSet<&str>) {
    let changed = |series: &str| changes.iter().find(|(other, _)| *other == series);
    out.push_str("  - interval: 1m\n    input_series:\n");
    for (series, values) in HEALTHY {
        let values = changed(series).map_or(*values, |(_, values)| *values);
        writeln!(out, "      - {{ series: '{series}', values: '{values}' }}").unwrap();
    }
    for (series, _) in changes {
        let known = HEALTHY.iter().any(|(healthy, _)| healthy == series);
        assert!(known, "{series} has no healthy value");
    }
    out.push_str("    promql_expr_test:\n");
    out.push_str("      - expr: 'group by (alertname) (ALERTS{alertstate=\"firing\"})'\n");
    out.push_str("        eval_time: 60m\n        exp_samples:\n");
    for alert in firing {
        writeln!(out, "          - {{ labels: '{{alertname=\"{alert}\"}}', value: 1 }}").unwrap();
    }
}

#[test]
fn each_alert_fires_for_its_fault_and_for_no_other() {
    let cases: BTreeSet<&str> = CASES.iter().map(|case| case.alert).collect();
    let alerts = rules("alerts.yaml");
    let alerts: BTreeSet<&str> = alerts.iter().map(|alert| alert.name.as_str()).collect();
    assert_eq!(cases, alerts, "there is a case for each alert");
    let mut tests = String::from("rule_files:\n");
    for file in rule_files() {
        writeln!(tests, "  - {}", file.canonicalize().unwrap().display()).unwrap();
    }
    tests.push_str("evaluation_interval: 1m\ntests:\n");
    put_test(&mut tests, &[], &BTreeSet::new());
    for changes in QUIET {
        put_test(&mut tests, changes, &BTreeSet::new());
    }
    for Case { alert, also, changes } in CASES {
        let firing = also.iter().chain([alert]).copied().collect();
        put_test(&mut tests, changes, &firing);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("alerts.test.yaml");
    std::fs::write(&file, tests).unwrap();
    let tested = promtool(&["test", "rules", file.to_str().unwrap()], None);
    assert!(tested.status.success(), "{}", said(&tested));
}

#[tokio::test]
async fn a_scrape_is_free_of_lint() {
    let cluster = Cluster::start(Spec::default()).await;
    let text = cluster.admin.get("/metrics").await.text();
    let checked = promtool(&["check", "metrics"], Some(&text));
    assert!(checked.status.success(), "{}", said(&checked));
}
