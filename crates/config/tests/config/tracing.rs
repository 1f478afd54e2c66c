//! Rules about traces and the access log.

use crate::support::{only_problem, parse};
use splitrail_config::OtlpProtocol;

/// A configuration with these keys.
fn with(top: &str) -> String {
    format!(
        "{top}\nmodels:\n  - name: m\n    tokenizer: {{ kind: none }}\n    flow: aggregated\n    \
         workers: [{{ id: w, role: both, url: 'http://w:1' }}]\n"
    )
}

fn otlp(keys: &str) -> String {
    with(&format!("tracing: {{ otlp: {{ {keys} }} }}"))
}

#[test]
fn nothing_is_logged_and_traced_by_default() {
    let config = parse(&with("")).unwrap().config;
    assert!(config.tracing.otlp.is_none() && config.access_log.enabled);
    assert_eq!(config.access_log.sample_ratio, 1.0);
}

#[test]
fn an_endpoint_has_a_path_only_over_http() {
    for (keys, protocol, origin, path) in [
        ("endpoint: 'http://c:4317'", OtlpProtocol::Grpc, "http://c:4317", "/v1/traces"),
        (
            "endpoint: 'https://c:4318/', protocol: http",
            OtlpProtocol::Http,
            "https://c:4318",
            "/v1/traces",
        ),
        (
            "endpoint: 'http://c:80/otlp/v1/traces', protocol: http",
            OtlpProtocol::Http,
            "http://c:80",
            "/otlp/v1/traces",
        ),
    ] {
        let otlp = parse(&otlp(keys)).unwrap().config.tracing.otlp.unwrap();
        let target = otlp.target().unwrap();
        assert_eq!((otlp.protocol, &*target.origin, &*target.path), (protocol, origin, path));
    }
}

#[test]
fn an_exporter_that_could_not_work_is_refused() {
    for (keys, part) in [
        ("endpoint: 'c:4317'", "has no scheme"),
        ("endpoint: 'http://c'", "has no port"),
        ("endpoint: 'grpc://c:4317'", "has another scheme"),
        ("endpoint: 'http://u:p@c:4317'", "has a user or password"),
        ("endpoint: 'http://c:4317/v1/traces'", "OTLP/gRPC has no path"),
        ("endpoint: 'http://c:4318/a b', protocol: http", "has an invalid path"),
        ("endpoint: 'http://c:4317', protocol: json", "protocol"),
        ("endpoint: 'http://c:4317', sample_ratio: 1.5", "sample_ratio"),
        ("endpoint: 'https://c:4317', ca: absent.pem", "`tracing.otlp.ca` cannot be read"),
        (
            "endpoint: 'https://c:4317', headers: [{ name: te, value: { kind: env, name: PATH } }]",
            "the protocol itself",
        ),
        (
            "endpoint: 'https://c:4317', headers: [{ name: x, value: { kind: env, name: NO_SUCH_VARIABLE } }]",
            "is not set",
        ),
        (
            "endpoint: 'https://c:4317', headers: [{ name: 'X Y', value: { kind: env, name: PATH } }]",
            "name",
        ),
    ] {
        let (line, _, told) = only_problem(&otlp(keys));
        assert!(line == 1 && told.contains(part), "{keys}: {told}");
    }
}

#[test]
fn probable_mistakes_in_tracing_are_warnings() {
    let header = "headers: [{ name: x, value: { kind: env, name: PATH } }]";
    for (text, part) in [
        (otlp("endpoint: 'http://c:4318'"), "the usual port of OTLP/HTTP"),
        (otlp("endpoint: 'http://c:4317', protocol: http"), "the usual port of OTLP/gRPC"),
        (otlp(&format!("endpoint: 'http://c:4317', {header}")), "without TLS"),
    ] {
        let warnings = parse(&text).unwrap().warnings;
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].message.contains(part), "{}", warnings[0].message);
    }
    for quiet in [
        otlp(&format!("endpoint: 'http://127.0.0.1:4317', {header}")),
        with("access_log: { enabled: false, path: a.jsonl }"),
        with("access_log: { sample_ratio: 0.1 }"),
    ] {
        assert!(parse(&quiet).unwrap().warnings.is_empty(), "{quiet}");
    }
}
