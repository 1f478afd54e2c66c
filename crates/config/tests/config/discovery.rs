//! Sources of workers in the configuration.

use std::time::Duration;

use splitrail_config::model::{AddressFamily, Discovery, Role};
use splitrail_config::{Config, Parts, PodPort};

use crate::support::{only_problem, parse, problems};

/// A model without workers that are written down; `extra` are more of its keys.
fn found_by(discovery: &str, extra: &str) -> String {
    format!(
        "models:\n  - name: m\n    tokenizer: {{ kind: none }}\n    flow: aggregated\n    \
         discovery: {discovery}\n{extra}"
    )
}

fn accepted(text: &str) -> Config {
    parse(text).unwrap_or_else(|problems| panic!("{problems}\n{text}")).config
}

/// The only problem of a source, and whether it is told at the source's own line.
fn refused(discovery: &str, part: &str) {
    let (line, _, told) = only_problem(&found_by(discovery, ""));
    assert!(told.contains(part), "{discovery}: {told}");
    assert_eq!(line, 5, "{discovery}: {told}");
}

const DNS: &str = "kind: dns, name: engines.svc, port: 8000, role: both";
const PODS: &str = "kind: kubernetes, selector: app=vllm, port: http";

#[test]
fn sources_may_take_the_place_of_workers_or_join_them() {
    let all = format!("[{{ kind: shim }}, {{ {DNS} }}, {{ {PODS} }}]");
    let model = &accepted(&found_by(&all, "")).models[0];
    assert!(model.workers.is_empty());
    let [Discovery::Shim {}, Discovery::Dns(dns), Discovery::Kubernetes(pods)] =
        model.discovery.as_slice()
    else {
        panic!("{:?}", model.discovery)
    };
    assert_eq!((dns.port, dns.role, dns.family), (8000, Role::Both, AddressFamily::Auto));
    assert_eq!(
        (dns.refresh_interval, dns.empty_grace),
        (Duration::from_secs(10), Duration::from_secs(300))
    );
    assert_eq!(pods.port, Some(PodPort::Name("http".into())));
    assert_eq!(pods.kv_events_port, None);
    accepted(&found_by(&all, "    workers: []\n"));
    accepted(&found_by(&all, "    workers: [{ id: w, role: both, url: 'http://w:1' }]\n"));
    let ports = format!("[{{ {PODS}, kv_events_port: 5557, kv_replay_port: kv-replay }}]");
    accepted(&found_by(&ports, ""));
}

#[test]
fn a_model_has_workers_or_a_source_of_them() {
    for extra in ["", "    workers: []\n"] {
        let (_, _, told) = only_problem(&found_by("[]", extra));
        assert!(told.contains("has no `workers`, and no `discovery`"), "{told}");
    }
    // What is there, and wrong, is told once and not called missing.
    let (_, _, told) = only_problem(&found_by("1", ""));
    assert!(told.starts_with("`models[0].discovery` must be a list"), "{told}");
    let (_, _, told) = only_problem(&found_by("[]", "    workers: 1\n"));
    assert!(told.starts_with("`models[0].workers` must be a list"), "{told}");
    refused("[{ kind: consul }]", "`models[0].discovery[0].kind` cannot be \"consul\"");
    refused("[{ kind: shim, name: x }]", "`models[0].discovery[0]` has an unknown key `name`");
    refused("[{ kind: dns, name: a.b, port: 1 }]", "has no `role`");
}

#[test]
fn one_source_is_written_once() {
    refused("[{ kind: shim }, { kind: shim }]", "finds the same workers as 5:17");
    refused(&format!("[{{ {DNS} }}, {{ {DNS}, shim: true }}]"), "finds the same workers");
    refused(&format!("[{{ {PODS} }}, {{ {PODS}, role: both }}]"), "finds the same workers");
    let cluster = |name| format!("{{ {PODS}, kubeconfig: engine.key, context: {name} }}");
    accepted(&found_by(&format!("[{}, {}]", cluster("a"), cluster("b")), ""));
    let other = DNS.replace("8000", "8001");
    accepted(&found_by(&format!("[{{ {DNS} }}, {{ {other} }}]"), ""));
}

#[test]
fn names_are_host_names() {
    let dns = |from: &str, to: &str| {
        assert!(DNS.contains(from));
        format!("[{{ {} }}]", DNS.replace(from, to))
    };
    refused(&dns("engines.svc", "10.0.0.1"), "is an address, not a name");
    refused(&dns("engines.svc", "'http://engines.svc'"), "is not a host name");
    refused(&dns("engines.svc", "engines..svc"), "is not a host name");
    refused(&dns("engines.svc", "''"), "`models[0].discovery[0].name` is empty");
    accepted(&found_by(&dns("engines.svc", "engines_a.svc.cluster.local."), ""));
    refused(&dns("8000", "0"), "from 1 to 65535");
    refused(&dns("8000", "'8000'"), "write 8000 without quotes");
    refused(&dns("role: both", "role: both, kv_replay_port: 1"), "without `kv_events_port`");
    refused(&dns("role: both", "role: both, kv_events_port: 8000"), "is the same as `port`");
    refused(&dns("role: both", "role: both, bootstrap_port: 1"), "bootstrap_port` is of no use");
}

#[test]
fn selectors_labels_and_ports_have_kubernetes_forms() {
    let pods = |from: &str, to: &str| {
        assert!(PODS.contains(from));
        format!("[{{ {} }}]", PODS.replace(from, to))
    };
    refused(&pods("app=vllm", "app vllm"), "selector` \"app vllm\" has something that is not");
    refused(&pods("app=vllm", "'app in (a'"), "has a parenthesis without its other one");
    refused(&pods("app=vllm", "''"), "selector` is empty");
    refused(&pods("http", "0"), "from 1 to 65535");
    refused(&pods("http", "HTTP"), "may not hold \"H\"");
    refused(&pods("http", "[1]"), "must be a whole number, or a text, not a list");
    refused(&pods("http", "http, namespace: My_Space"), "may not hold");
    refused(&pods("http", "http, role_label: -x"), "is not a label's key");
    refused(&pods("http", "http, transfer_group_label: -x"), "is not a label's key");
    refused(&pods("http", "http, role_label: x, role: both"), "is of no use beside `role`");
    refused(&pods("http", "http, kubeconfig: no-such-file"), "kubeconfig` \"no-such-file\" is not");
    refused(&pods("http", "http, context: c"), "of no use without `kubeconfig`");
    // As everywhere, relative to the configuration's folder.
    let config = accepted(&found_by(&pods("http", "http, kubeconfig: engine.key"), ""));
    let Discovery::Kubernetes(found) = &config.models[0].discovery[0] else { panic!() };
    assert!(found.kubeconfig.as_ref().unwrap().starts_with(crate::support::folder()));
}

#[test]
fn pods_are_named_by_a_selector_and_a_port_or_by_a_pool() {
    accepted(&found_by("[{ kind: kubernetes, inference_pool: qwen3.8b }]", ""));
    refused("[{ kind: kubernetes, selector: a }]", "`models[0].discovery[0]` has no `port`");
    refused("[{ kind: kubernetes, port: 1 }]", "`models[0].discovery[0]` has no `selector`");
    let with = |key: &str| format!("[{{ kind: kubernetes, inference_pool: a, {key} }}]");
    refused(&with("selector: a"), "selector` is of no use beside `inference_pool`");
    refused(&with("port: 1"), "port` is of no use beside `inference_pool`");
    refused(
        "[{ kind: kubernetes, inference_pool: ns/a }]",
        "inference_pool` \"ns/a\" is not a name",
    );
    let twice = "{ kind: kubernetes, inference_pool: a }";
    refused(&format!("[{twice}, {twice}]"), "finds the same workers");
    accepted(&found_by(&format!("[{twice}, {}]", twice.replace(": a", ": b")), ""));
}

#[test]
fn a_source_has_the_roles_that_it_may_find() {
    let paired = |discovery: &str, extra: &str| {
        found_by(discovery, &format!("    connector: nixl\n{extra}"))
            .replace("flow: aggregated", "flow: prefill_first")
    };
    let of = |role: &str| format!("{{ {} }}", DNS.replace("both", role).replace("svc", role));
    accepted(&paired(&format!("[{}, {}]", of("prefill"), of("decode")), ""));
    accepted(&paired(&format!("[{{ {PODS} }}]"), ""));
    accepted(&paired("[{ kind: shim }]", ""));
    let (_, _, told) = only_problem(&paired(&format!("[{}]", of("decode")), ""));
    assert!(told.contains("no worker with role prefill or both"), "{told}");
    let written = "    workers: [{ id: p, role: prefill, url: 'http://p:1' }]\n";
    accepted(&paired(&format!("[{}]", of("decode")), written));
    let sglang = paired(&format!("[{{ {DNS} }}]"), "    on_no_prefill: fail\n    block_size: 1\n")
        .replace("nixl", "sglang");
    let (_, _, told) = only_problem(&sglang);
    assert!(
        told.contains("discovery[0].role: both` is not possible with `connector: sglang`"),
        "{told}"
    );
}

#[test]
fn policies_and_gates_may_rely_on_data_from_a_discovery_source() {
    let keys = |discovery: &str| {
        found_by(discovery, "    policy: { kind: kv_overlap }\n")
            .replace("{ kind: none }", "{ kind: huggingface, path: tokenizer }")
    };
    let warnings = |text: &str| parse(text).unwrap().warnings.len();
    assert_eq!(warnings(&keys(&format!("[{{ {DNS} }}]"))), 0);
    assert_eq!(warnings(&keys(&format!("[{{ {DNS}, kv_events_port: 5557 }}]"))), 0);
    assert_eq!(warnings(&keys(&format!("[{{ {PODS} }}]"))), 0);
    let gated = |discovery: &str| {
        keys(discovery).replace(
            "flow: aggregated",
            "flow: decode_first\n    connector: nixl\n    gate: { kind: shim }",
        )
    };
    accepted(&gated(&format!("[{{ {DNS}, shim: true }}]")));
    accepted(&gated("[{ kind: shim }]"));
    let told = problems(&gated(&format!("[{{ {DNS} }}]")));
    assert!(told.iter().any(|told| told.message.contains("gate.kind: shim` has no")), "{told:?}");
}

#[test]
fn a_build_that_lacks_pods_or_a_broker_says_so_where_the_file_asks_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.yaml");
    let text = found_by(
        &format!("[{{ {DNS} }}, {{ {PODS} }}]"),
        "quotas: { kind: nats, servers: ['nats://127.0.0.1:1'] }\n",
    );
    std::fs::write(&file, text).unwrap();
    assert!(splitrail_config::load(&file, Parts::ALL).is_ok());
    let lacking = |parts| {
        let problems = splitrail_config::load(&file, parts).unwrap_err();
        let [problem] = problems.as_slice() else { panic!("{problems}") };
        (problem.line, problem.to_string())
    };
    let (line, told) = lacking(Parts { kubernetes: false, ..Parts::ALL });
    assert_eq!(line, 5);
    assert!(
        told.contains("`models[0].discovery[1].kind: kubernetes` is not part of this build"),
        "{told}"
    );
    assert!(told.contains("--features kubernetes"), "{told}");
    let (line, told) = lacking(Parts { nats: false, ..Parts::ALL });
    assert_eq!(line, 6);
    assert!(told.contains("`quotas.kind: nats`") && told.contains("--features nats"), "{told}");
}
