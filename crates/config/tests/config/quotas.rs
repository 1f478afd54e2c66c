//! Rules about limits that routers share.

use std::time::Duration;

use crate::support::{only_problem, parse};
use splitrail_config::{LocalQuotas, NatsQuotas, Quotas};

const EVENTS: &str = "events: { kind: nats, servers: ['nats://127.0.0.1:4222'] }\n";

/// A configuration with these `quotas`.
fn with(quotas: &str, events: &str) -> String {
    format!(
        "quotas: {quotas}\n{events}models:\n  - name: m\n    tokenizer: {{ kind: none }}\n    \
         flow: aggregated\n    workers: [{{ id: w, role: both, url: 'http://w:1' }}]\n"
    )
}

#[test]
fn a_router_admits_the_whole_of_each_limit_by_default() {
    let text = with("{ kind: local }", "");
    assert_eq!(parse(&text).unwrap().config.quotas, Quotas::default());
    let text = with("{ kind: local, share: 0.25 }", "");
    assert_eq!(parse(&text).unwrap().config.quotas, Quotas::Local(LocalQuotas { share: 0.25 }));
}

#[test]
fn shared_quotas_have_a_bucket_and_a_lease() {
    let config = parse(&with("{ kind: nats }", EVENTS)).unwrap().config;
    assert_eq!(config.quotas, Quotas::Nats(NatsQuotas::default()));
    let config = parse(&with("{ kind: nats, bucket: q, lease: 30s }", EVENTS)).unwrap().config;
    let lease = Duration::from_secs(30);
    assert_eq!(config.quotas, Quotas::Nats(NatsQuotas { bucket: "q".to_owned(), lease }));
}

#[test]
fn quotas_that_no_router_could_serve_are_refused() {
    for (quotas, events, part) in [
        ("{ kind: local, share: 0 }", "", "share"),
        ("{ kind: local, share: 1.5 }", "", "share"),
        ("{ kind: nats }", "", "needs a broker"),
        ("{ kind: nats, lease: 5s }", EVENTS, "too short"),
        ("{ kind: nats, lease: 2h }", EVENTS, "too long"),
        ("{ kind: nats, bucket: 'a.b' }", EVENTS, "bucket"),
    ] {
        let (line, _, told) = only_problem(&with(quotas, events));
        assert!(line == 1 && told.contains(part), "{quotas}: {told}");
    }
}
