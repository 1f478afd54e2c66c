//! Rules about the fleet listener and about where workers may be.

use std::net::IpAddr;
use std::time::Duration;

use crate::support::{only_problem, parse};

/// A configuration with these `listen` and `fleet`.
fn with(listen: &str, fleet: &str) -> String {
    format!(
        "listen: {listen}\nfleet: {fleet}\nmodels:\n  - name: m\n    tokenizer: {{ kind: none }}\n    \
         flow: aggregated\n    workers: [{{ id: w, role: both, url: 'http://w:1' }}]\n"
    )
}

fn refused(listen: &str, fleet: &str, at: (usize, usize), part: &str) {
    let (line, column, told) = only_problem(&with(listen, fleet));
    assert!(told.contains(part), "{fleet}: {told}");
    assert_eq!((line, column), at, "{fleet}: {told}");
}

fn warnings(listen: &str, fleet: &str) -> Vec<String> {
    let loaded = parse(&with(listen, fleet)).unwrap_or_else(|problems| panic!("{problems}"));
    loaded.warnings.into_iter().map(|warning| warning.message).collect()
}

const OPEN: &str = "{ fleet: 0.0.0.0:8002 }";
const TOKEN: &str = "token: { kind: file, path: engine.key }";
const CERT: &str = "cert: tls/router.pem, key: tls/router.key";

#[test]
fn shims_are_not_let_in_from_elsewhere_without_proof() {
    refused(OPEN, "{}", (1, 18), "let anybody who reaches it attach");
    refused(OPEN, &format!("{{ tls: {{ {CERT} }} }}"), (1, 18), "let anybody");
    refused(OPEN, "{ token: null, tokens: [] }", (1, 18), "let anybody");
    refused(OPEN, &format!("{{ tls: {{ {CERT}, client_ca: null }} }}"), (1, 18), "let anybody");
    assert_eq!(warnings("{}", "{ token: null, tokens: [], tls: null }"), [""; 0]);
    let told = warnings("{ fleet: 127.0.0.1:8002 }", "{}");
    assert!(told.len() == 1 && told[0].contains("every program on this host"), "{told:?}");
    let told = warnings("{}", &format!("{{ {TOKEN} }}"));
    assert!(told.len() == 1 && told[0].contains("has no listener"), "{told:?}");
    refused("{ fleet: 0.0.0.0:8000 }", &format!("{{ {TOKEN} }}"), (1, 18), "`listen.http`");
}

#[test]
fn credentials_off_loopback_are_encrypted_and_bound_to_workers() {
    let (clear, shared) = ("travels in clear text", "all shims share a credential");
    let bound = |workers: &str| {
        format!("tokens: [{{ token: {{ kind: file, path: engine.key }}, workers: [{workers}] }}]")
    };
    let tls = |more: &str| format!("tls: {{ {CERT}{more} }}");
    let (ca, by_name) = (", client_ca: tls/ca.pem", ", client_workers: dns_names");
    for (fleet, expected) in [
        (TOKEN.to_owned(), &[clear, shared][..]),
        (format!("{TOKEN}, {}", tls("")), &[shared]),
        (format!("{TOKEN}, {}", bound("w")), &[clear, shared]),
        (bound("w"), &[clear]),
        (format!("{}, {}", bound("w, 'd*'"), tls("")), &[]),
        (format!("{}, {}", bound("'*'"), tls("")), &[shared]),
        (tls(ca), &[shared]),
        (tls(&format!("{ca}{by_name}")), &[]),
        (format!("{TOKEN}, {}", tls(&format!("{ca}{by_name}"))), &[]),
    ] {
        let fleet = format!("{{ {fleet} }}");
        let said = warnings(OPEN, &fleet);
        assert_eq!(said.len(), expected.len(), "{fleet}: {said:?}");
        for part in expected {
            assert!(said.iter().any(|said| said.contains(part)), "{fleet}: {said:?}");
        }
        assert_eq!(warnings("{ fleet: 127.0.0.1:8002 }", &fleet), [""; 0]);
    }
    let wrong = format!("{{ {TOKEN}, {} }}", tls(by_name));
    assert!(only_problem(&with(OPEN, &wrong)).2.contains("needs certificates of shims"));
    for workers in ["", "''", "'a b'", "'*a'"] {
        let wrong = with(OPEN, &format!("{{ {} }}", bound(workers)));
        assert!(parse(&wrong).is_err(), "{workers}");
    }
}

#[test]
fn tokens_are_bound_to_models_that_there_are() {
    let model = |name: &str| {
        format!(
            "{{ name: {name}, block_size: 16, tokenizer: {{ kind: none }}, flow: aggregated, \
             policy: {{ kind: round_robin }}, discovery: [{{ kind: shim }}] }}"
        )
    };
    let with_token = |more: &str| {
        let token = format!("{{ token: {{ kind: file, path: engine.key }}, workers: [w]{more} }}");
        let listen = "{ http: 127.0.0.1:8000, fleet: 127.0.0.1:8002 }";
        let models = format!("models: [{}, {}]", model("a"), model("b"));
        parse(&format!("listen: {listen}\nfleet: {{ tokens: [{token}] }}\n{models}\n"))
    };
    let bound = with_token(", models: [a]").unwrap();
    assert_eq!(bound.config.fleet.tokens[0].models.as_deref(), Some(&["a".to_owned()][..]));
    let [warning] = &bound.warnings[..] else { panic!("{:?}", bound.warnings) };
    assert!(
        warning.message.starts_with("`models[1]` waits for shims, but no token"),
        "{warning:?}"
    );
    assert!(with_token(", models: [a, b]").unwrap().warnings.is_empty());
    let unbound = with_token("").unwrap();
    let [warning] = &unbound.warnings[..] else { panic!("{:?}", unbound.warnings) };
    assert!(warning.message.contains("of every model that accepts shims"), "{warning:?}");
    let unknown = with_token(", models: [c]").unwrap_err().to_string();
    assert!(unknown.contains("`fleet.tokens[0].models` names"), "{unknown}");
}

#[test]
fn tokens_and_certificates_are_there_and_can_be_used() {
    let refused = |fleet: &str, part: &str| {
        let (line, _, told) = only_problem(&with(OPEN, fleet));
        assert!(line == 2 && told.contains(part), "{told}");
    };
    refused("{ token: { kind: file, path: nowhere } }", "`fleet.token`: the secret's file");
    refused("{ token: { kind: file, path: valid.yaml } }", "no header can carry");
    let second = "{ kind: file, path: nowhere }";
    let second = format!("{{ {TOKEN}, tokens: [{{ token: {second}, workers: [w] }}] }}");
    refused(&second, "`fleet.tokens[0].token`: the secret's file");
    let tls = |cert: &str, key: &str, ca: &str| {
        format!("{{ {TOKEN}, tls: {{ cert: {cert}, key: {key}{ca} }} }}")
    };
    let (cert, key) = ("tls/router.pem", "tls/router.key");
    refused(&tls("nowhere", key, ""), "`fleet.tls.cert` cannot be read");
    refused(&tls(cert, "nowhere", ""), "`fleet.tls.key` cannot be read");
    refused(&tls(cert, "engine.key", ""), "cannot be used");
    refused(&tls(cert, key, ", client_ca: engine.key"), "`fleet.tls.client_ca` cannot be used");
    let told = only_problem(&with(OPEN, "{ token: open-sesame }")).2;
    assert!(!told.contains("sesame"), "{told}");
}

#[test]
fn invalid_networks_and_load_times_are_refused() {
    let open = format!("{{ {TOKEN}, networks: [10.0.0.0/8, 300.0.0.0] }}");
    refused(OPEN, &open, (2, 74), "`fleet.networks[1]` \"300.0.0.0\" is not an IP network");
    let times = |times: &str| format!("{{ {TOKEN}, {times} }}");
    refused(OPEN, &times("load_interval: 3s"), (2, 8), "less than two of");
    let config =
        parse(&with(OPEN, &times("load_interval: 100ms, load_stale_after: 1s"))).unwrap().config;
    assert_eq!(config.fleet.load_stale_after, Duration::from_secs(1));
    let allowed = |address: &str| {
        let address: IpAddr = address.parse().unwrap();
        config.fleet.networks.iter().any(|network| network.contains(address))
    };
    assert!(allowed("10.1.2.3") && allowed("127.0.0.1") && !allowed("8.8.8.8"));
}

#[test]
fn a_model_that_waits_for_shims_wants_a_listener() {
    let text =
        with("{}", "{}").replace("    workers:", "    discovery: [{ kind: shim }]\n    workers:");
    let warnings = parse(&text).unwrap().warnings;
    assert!(warnings.len() == 1 && warnings[0].message.contains("no fleet listener"));
    // A shim that attaches to no router mirrors nothing.
    let behind = with("{}", "{}").replace("http://w:1'", "http://w:1', shim: true");
    let dns = "discovery: [{ kind: dns, name: engines, port: 8000, role: both, shim: true }]";
    let found = with("{}", "{}").replace("    workers:", &format!("    {dns}\n    workers:"));
    for text in [behind, found] {
        let warnings = parse(&text).unwrap().warnings;
        assert!(warnings.len() == 1, "{warnings:?}");
        assert!(warnings[0].message.contains("no fleet listener"), "{warnings:?}");
        let listening = text.replace("listen: {}", "listen: { fleet: 127.0.0.1:8002 }");
        let warnings = parse(&listening.replace("fleet: {}", &format!("fleet: {{ {TOKEN} }}")));
        assert!(warnings.unwrap().warnings.is_empty());
    }
}
