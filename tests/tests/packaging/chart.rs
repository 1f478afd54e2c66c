//! The Helm chart: what it makes of its example values (deploy/helm/golden, deploy/kubernetes) is run
//! as processes, because a cluster cannot be had in a test. `deploy/helm/render --check` compares these
//! files with the chart.

use std::fs;
use std::path::{Path, PathBuf};

use splitrail_sim::write_tokenizer;
use splitrail_tests::tls;

mod release;

/// A file of the repository.
fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn text(path: &str) -> String {
    fs::read_to_string(file(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The resource of a rendered file with these lines.
fn resource<'r>(rendered: &'r str, lines: &[&str]) -> &'r str {
    let has =
        |document: &&str| lines.iter().all(|line| document.lines().any(|other| other == *line));
    rendered.split("\n---\n").find(has).unwrap_or_else(|| panic!("no {lines:?}"))
}

/// Lines without their indentation by `columns`.
fn outdented(text: &str, columns: usize) -> String {
    text.lines().map(|line| format!("{}\n", line.get(columns..).unwrap_or_default())).collect()
}

/// The lines of a block scalar of a rendered file, without their indentation.
fn block(rendered: &str, key: &str) -> String {
    let mut lines = rendered.lines().skip_while(|line| line.trim() != format!("{key}: |"));
    let key_line = lines.next().unwrap_or_else(|| panic!("no {key}"));
    let indent = key_line.len() - key_line.trim_start().len() + 2;
    let lines = lines.take_while(|line| line.is_empty() || line.starts_with(&" ".repeat(indent)));
    lines.map(|line| format!("{}\n", line.get(indent..).unwrap_or_default())).collect()
}

/// A folder in place of what pods mount: tokenizer, tokens, certificate, keys and salt.
struct Mounts(tempfile::TempDir);

impl Mounts {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path()).unwrap();
        for (name, text) in [
            ("prefill", "the-token-of-the-prefill-pool".to_owned()),
            ("decode", "the-token-of-the-decode-pool".to_owned()),
            ("salt.key", "a-secret-of-at-least-32-characters".to_owned()),
            ("keys.yaml", "keys: []\n".to_owned()),
            ("tls.crt", fs::read_to_string(tls::fixture("router.pem")).unwrap()),
            ("tls.key", fs::read_to_string(tls::fixture("router.key")).unwrap()),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A configuration with the paths of this folder.
    fn in_place(&self, config: &str) -> String {
        let here = self.path().display().to_string();
        [
            "/models/qwen3-8b",
            "/run/secrets/splitrail-fleet",
            "/run/secrets/fleet",
            "/run/secrets/access",
            "/run/secrets/tls",
        ]
        .iter()
        .fold(config.to_owned(), |config, mounted| config.replace(mounted, &here))
    }
}

#[test]
fn the_configuration_of_every_release_is_valid() {
    let mut files: Vec<_> = fs::read_dir(file("deploy/helm/golden")).unwrap().collect();
    files.extend(fs::read_dir(file("deploy/kubernetes")).unwrap());
    let mut checked = 0;
    for file in files {
        let file = file.unwrap().path();
        let rendered = fs::read_to_string(&file).unwrap();
        if !rendered.contains("splitrail.yaml: |") {
            continue;
        }
        let mounts = Mounts::new();
        let config = mounts.in_place(&block(&rendered, "splitrail.yaml"));
        if let Err(problems) = splitrail_config::parse("splitrail.yaml", &config, mounts.path()) {
            panic!("{}: {problems}\n{config}", file.display());
        }
        checked += 1;
    }
    assert_eq!(checked, 9, "releases");
}

#[test]
fn every_image_of_the_manifests_is_set_in_the_kustomization() {
    let kustomization = text("deploy/kubernetes/kustomization.yaml");
    let manifests = text("deploy/kubernetes/splitrail.yaml");
    let images = manifests.lines().filter_map(|line| line.trim().strip_prefix("image: "));
    for image in images {
        let (name, tag) = image.rsplit_once(':').unwrap();
        let line = kustomization.lines().find(|line| line.contains(&format!("name: {name},")));
        let set = line.unwrap_or_else(|| panic!("{name} is not in images"));
        assert!(set.trim_end_matches(" }").trim_end_matches('"').ends_with(tag), "{set}");
    }
}

/// The rules of a resource of the Prometheus Operator.
fn rules(name: &str) -> String {
    let rendered = text("deploy/helm/golden/monitored.yaml");
    let rule = ["kind: PrometheusRule".to_owned(), format!("  name: splitrail-{name}")];
    let rule = resource(&rendered, &rule.each_ref().map(String::as_str));
    outdented(rule.split_once("\nspec:\n").unwrap().1, 2)
}

#[test]
fn the_chart_has_the_rules_that_promtool_tests() {
    for name in ["recording", "alerts"] {
        let tested = text(&format!("deploy/observability/{name}.yaml"));
        assert_eq!(rules(name), tested, "run deploy/helm/render");
    }
}

#[test]
fn monitoring_objects_are_rendered_only_if_requested() {
    let monitored = text("deploy/helm/golden/monitored.yaml");
    let plain = text("deploy/kubernetes/splitrail.yaml");
    for kind in ["PrometheusRule", "PodMonitor"] {
        assert!(monitored.contains(kind) && !plain.contains(kind), "{kind} may be unknown");
    }
    let dashboard =
        resource(&monitored, &["kind: ConfigMap", "  name: splitrail-dashboard"]).to_owned();
    assert!(dashboard.contains("\n    grafana_dashboard: \"1\"\n"), "{dashboard}");
    let scaled = resource(&monitored, &["kind: HorizontalPodAutoscaler"]);
    let line = scaled.lines().find_map(|line| line.trim().strip_prefix("metric: { name: "));
    let metric = line.unwrap().trim_end_matches(" }");
    let documented = text("docs/metrics.md");
    assert!(documented.contains(&format!("| `{metric}` | gauge |")), "{metric}");
}

#[test]
fn only_routers_engines_and_who_reads_metrics_reach_engines() {
    let engines = ["kind: NetworkPolicy", "  name: splitrail-engines"];
    let plain = text("deploy/kubernetes/splitrail.yaml");
    assert!(!resource(&plain, &engines).contains("ports:"));
    let monitored = text("deploy/helm/golden/monitored.yaml");
    let (_, scraped) = resource(&monitored, &engines).split_once("- ports:").unwrap();
    assert!(scraped.contains("from:\n") && scraped.contains("metadata.name: monitoring"));
}

#[test]
fn the_container_for_pods_of_other_charts_is_the_one_in_the_documentation() {
    let rendered = text("deploy/helm/golden/existing-pool.yaml");
    let pods = resource(&rendered, &["kind: StatefulSet"]);
    let (_, containers) = pods.split_once("\n      containers:\n").unwrap();
    let containers = outdented(containers, 8);
    let (shim, _) = containers.split_once("- name: engine\n").unwrap();
    assert!(text("docs/shim.md").contains(shim), "docs/shim.md lacks:\n{shim}");
    let lifecycle = containers.lines().find(|line| line.trim().starts_with("command: [sh,"));
    assert!(text("docs/shim.md").contains(lifecycle.unwrap().trim()));
}
