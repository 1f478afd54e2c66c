//! Rules about limits that routers share.

use std::time::Duration;

use crate::support::{only_problem, parse};
use splitrail_config::Quotas;

/// A configuration with these `quotas`.
fn with(quotas: &str) -> String {
    format!(
        "quotas: {quotas}\nmodels:\n  - name: m\n    tokenizer: {{ kind: none }}\n    \
         flow: aggregated\n    workers: [{{ id: w, role: both, url: 'http://w:1' }}]\n"
    )
}

/// The share of `quotas` of this router alone.
fn share(text: &str) -> f64 {
    let Quotas::Local(quotas) = parse(text).unwrap().config.quotas else { panic!("shared") };
    quotas.share
}

#[test]
fn a_router_admits_the_whole_of_each_limit_by_default() {
    assert_eq!(share(&with("{ kind: local }")), 1.0);
    assert_eq!(share(&with("{ kind: local, share: 0.25 }")), 0.25);
}

#[test]
fn shared_quotas_have_a_broker_a_bucket_and_a_lease() {
    let quotas = |quotas| {
        let loaded = parse(&with(quotas)).unwrap();
        assert_eq!(loaded.warnings.len(), 0, "{:?}", loaded.warnings);
        let Quotas::Nats(quotas) = loaded.config.quotas else { panic!("local") };
        quotas
    };
    let plain = quotas("{ kind: nats, servers: ['nats://127.0.0.1:4222'] }");
    assert_eq!((plain.bucket.as_str(), plain.stream_replicas), ("splitrail-quotas", 1));
    assert_eq!(plain.lease, Duration::from_secs(120));
    let full = quotas(
        "{ kind: nats, servers: ['nats://127.0.0.1:4222', 'tls://b:4222'], bucket: q, lease: 30s, \
         stream_replicas: 3, login: { kind: user, name: u, password: { kind: file, path: engine.key } } }",
    );
    assert_eq!((full.servers.len(), full.bucket.as_str(), full.stream_replicas), (2, "q", 3));
    assert_eq!(full.lease, Duration::from_secs(30));
}

#[test]
fn a_broker_elsewhere_wants_a_login_that_cannot_be_read_on_the_way() {
    let login = "login: { kind: user, name: u, password: { kind: file, path: engine.key } }";
    for (broker, part) in [
        ("servers: ['nats://127.0.0.1:1']".to_owned(), None),
        ("servers: ['tls://a:1']".to_owned(), Some("can change the shares")),
        (format!("servers: ['nats://a:1'], {login}"), Some("travels in clear text")),
        (format!("servers: ['tls://a:1'], {login}"), None),
    ] {
        let warnings = parse(&with(&format!("{{ kind: nats, {broker} }}"))).unwrap().warnings;
        assert_eq!(warnings.len(), usize::from(part.is_some()), "{broker}: {warnings:?}");
        let said = |part| warnings.iter().any(|warning| warning.message.contains(part));
        assert!(part.is_none_or(said), "{broker}: {warnings:?}");
    }
}

#[test]
fn quotas_that_no_router_could_serve_are_refused() {
    let nats = |more: &str| format!("{{ kind: nats, servers: ['nats://127.0.0.1:1'], {more} }}");
    for (quotas, part) in [
        ("{ kind: local, share: 0 }".to_owned(), "share"),
        ("{ kind: local, share: 1.5 }".to_owned(), "share"),
        ("{ kind: local, servers: ['nats://a:1'] }".to_owned(), "servers"),
        ("{ kind: nats }".to_owned(), "servers"),
        ("{ kind: nats, servers: [] }".to_owned(), "servers"),
        ("{ kind: nats, servers: ['nats://u:p@a:4222'] }".to_owned(), "has a user or password"),
        ("{ kind: nats, servers: ['nats://a'] }".to_owned(), "has no port"),
        (nats("tls_ca: absent.pem"), "`quotas.tls_ca` cannot be read"),
        (nats("login: { kind: token, token: { kind: file, path: absent } }"), "`quotas.login`"),
        (nats("bucket: 'a.b'"), "bucket"),
    ] {
        let (line, _, told) = only_problem(&with(&quotas));
        assert!(line == 1 && told.contains(part), "{quotas}: {told}");
    }
}
