//! Rules about the event plane.

use std::time::Duration;

use crate::support::{only_problem, parse};
use splitrail_config::Events;

/// A configuration with these `events`, and a model that waits for shims.
fn with(events: &str) -> String {
    format!(
        "events: {events}\nmodels:\n  - name: m\n    tokenizer: {{ kind: none }}\n    \
         flow: aggregated\n    discovery: [{{ kind: shim }}]\n"
    )
}

fn refused(events: &str, part: &str) {
    let (line, _, told) = only_problem(&with(events));
    assert!(line == 1 && told.contains(part), "{events}: {told}");
}

#[test]
fn shims_come_over_a_broker_without_a_listener_for_them() {
    let text = with(
        "{ kind: nats, servers: ['nats://127.0.0.1:4222', 'tls://b:4222'], durable_name: r0, disconnect_grace: 5s, \
         login: { kind: user, name: u, password: { kind: file, path: engine.key } } }",
    );
    let loaded = parse(&text).unwrap();
    assert_eq!(loaded.warnings.len(), 0, "{:?}", loaded.warnings);
    let Events::Nats(events) = loaded.config.events else { panic!("nats") };
    assert_eq!((events.disconnect_grace, events.stream_replicas), (Duration::from_secs(5), 1));
    assert_eq!(events.broker.servers.len(), 2);

    let direct = parse(&with("{ kind: direct }")).unwrap();
    assert_eq!(direct.warnings.len(), 1, "there is no way for a shim");
}

#[test]
fn a_broker_elsewhere_wants_a_login_that_cannot_be_read_on_the_way() {
    let login = "login: { kind: user, name: u, password: { kind: file, path: engine.key } }";
    for (events, part) in [
        ("servers: ['nats://127.0.0.1:1']".to_owned(), None),
        ("servers: ['tls://a:1']".to_owned(), Some("can speak for any worker")),
        (format!("servers: ['nats://a:1'], {login}"), Some("travels in clear text")),
        (format!("servers: ['tls://a:1'], {login}"), None),
    ] {
        let warnings = parse(&with(&format!("{{ kind: nats, {events} }}"))).unwrap().warnings;
        assert_eq!(warnings.len(), usize::from(part.is_some()), "{events}: {warnings:?}");
        let said = |part| warnings.iter().any(|warning| warning.message.contains(part));
        assert!(part.is_none_or(said), "{events}: {warnings:?}");
    }
}

#[test]
fn broker_addresses_that_cannot_work_are_refused() {
    refused("{ kind: nats, servers: ['nats://u:p@a:4222'] }", "has a user or password");
    refused("{ kind: nats, servers: ['nats://a'] }", "has no port");
    refused("{ kind: nats, servers: [] }", "servers");
    refused("{ kind: nats }", "servers");
    refused("{ kind: nats, servers: ['nats://a:1'], tls_ca: absent.pem }", "cannot be read");
    let login = "login: { kind: token, token: { kind: file, path: absent } }";
    refused(&format!("{{ kind: nats, servers: ['nats://a:1'], {login} }}"), "`events.login`");
    refused(
        "{ kind: nats, servers: ['nats://a:1'], disconnect_grace: 1s }",
        "`events.disconnect_grace`",
    );
    refused("{ kind: nats, servers: ['nats://a:1'], stream_max_age: 1s }", "too short");
    refused("{ kind: direct, servers: ['nats://a:1'] }", "servers");
}
