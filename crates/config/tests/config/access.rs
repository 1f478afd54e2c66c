//! Rules about credentials, tenants and listeners that others reach.

use std::path::Path;

use splitrail_config::model::{Auth, CacheGroup, Listener};
use splitrail_config::{LoadedConfig, Problems};

const HASH: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

const MODELS: &str = "models:
- name: m
  aliases: [other]
  tokenizer: { kind: none }
  flow: aggregated
  workers: [ { id: w, role: both, url: 'http://w:1' } ]
";

/// Loads a configuration with these top-level sections, beside a file of keys.
fn load(top: &str, keys: &str) -> Result<LoadedConfig, Problems> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("keys.yaml"), keys.replace("HASH", HASH)).unwrap();
    std::fs::write(folder.path().join("salt.key"), "secret\n").unwrap();
    splitrail_config::parse("x.yaml", &format!("{top}\n{MODELS}"), folder.path())
}

const KEYS: &str = "keys: [ { id: k, tenant: acme, sha256: HASH } ]";
const AUTH: &str = "auth: [ { kind: keys, file: keys.yaml } ]";
const LOOPBACK: &str = "listen: { http: 127.0.0.1:8000 }";

#[test]
fn a_complete_section_is_read() {
    let top = format!(
        "{LOOPBACK}\n{AUTH}
cache_salt_key: {{ kind: file, path: salt.key }}
defaults: {{ tenant: guest }}
tenants:
- {{ name: acme, identities: ['spiffe://x/acme'], models: [m, other], weight: 2, priority_max: 1,
    limits: {{ requests_per_minute: 600, tokens_per_day: 5, requests_in_flight: 3 }}, debug: true }}
- {{ name: guest, cache: shared }}
- {{ name: third, cache: {{ shared: group }} }}"
    );
    let loaded = load(&top, KEYS).unwrap_or_else(|problems| panic!("{problems}"));
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    let config = loaded.config;
    let [acme, guest, third] = &config.tenants[..] else { panic!("{:?}", config.tenants) };
    assert_eq!((&acme.cache, acme.limits.requests_per_minute), (&CacheGroup::Own, Some(600)));
    assert_eq!(guest.cache, CacheGroup::Shared("shared".into()));
    assert_eq!(third.cache, CacheGroup::Shared("group".into()));
    let Auth::Keys { file } = &config.auth[0] else { panic!("{:?}", config.auth) };
    assert!(file.is_absolute(), "relative paths start at the configuration's folder");
    let shown = serde_json::to_string(&config).unwrap();
    let again = splitrail_config::parse("x", &shown, Path::new("/")).unwrap_err().to_string();
    assert!(!again.contains("unknown"), "the running configuration is one: {again}");
}

#[test]
fn mistakes_have_their_place() {
    let tenants = "tenants: [ { name: acme } ]";
    for (top, keys, expected) in [
        (format!("{AUTH}\n{tenants}"), "", "1:29: `auth[0].file`: line 1: "),
        (format!("{AUTH}\n{tenants}"), "keys: [ { id: k } ]", "1:29: `auth[0].file`: line 1: "),
        ("auth: [ { kind: keys, file: none.yaml } ]".into(), KEYS, "1:29: `auth[0].file`"),
        ("auth: [ { kind: basic } ]".into(), KEYS, "1:17: `auth[0].kind` cannot be \"basic\""),
        (
            "auth: [ { kind: client_certificate, tenant: san_uri } ]".into(),
            KEYS,
            "1:9: `auth` accepts client certificates, which no listener asks for",
        ),
        ("defaults: { tenant: no }".into(), KEYS, "1:21: `defaults.tenant`: no tenant"),
        ("tenants: [ { name: a }, { name: a } ]".into(), KEYS, "are both \"a\""),
        ("tenants: [ { name: a, identities: [a] } ]".into(), KEYS, "are both \"a\""),
        ("tenants: [ { name: a, models: [x] } ]".into(), KEYS, "no model is called \"x\""),
        ("tenants: [ { name: 'a b' } ]".into(), KEYS, "may not hold \" \""),
        ("tenants: [ { name: a, cache: mine } ]".into(), KEYS, "`tenants[0].cache`"),
        ("tenants: [ { name: a, weight: 0 } ]".into(), KEYS, "`tenants[0].weight`"),
        (
            "cache_salt_key: { kind: file, path: none }".into(),
            KEYS,
            "1:17: `cache_salt_key`: the secret's file cannot be read",
        ),
    ] {
        let told = load(&top, keys).unwrap_err().to_string();
        assert!(told.contains(expected), "{top}: {told}");
        assert!(!told.contains(HASH), "{told}");
    }
}

fn warnings(top: &str) -> Vec<String> {
    let loaded = load(top, KEYS).unwrap_or_else(|problems| panic!("{top}: {problems}"));
    loaded.warnings.iter().map(|warning| warning.to_string()).collect()
}

#[test]
fn listeners_that_others_reach_ask_for_credentials_over_tls() {
    let tenants = "tenants: [ { name: acme } ]";
    let open = "listen: { http: 10.0.0.1:8000 }";
    assert_eq!(warnings(LOOPBACK), [""; 0]);
    let told = warnings(open);
    assert!(told.len() == 1 && told[0].contains("anyone who reaches 10.0.0.1:8000"), "{told:?}");
    assert!(told[0].starts_with("x.yaml:1:17"), "{told:?}");
    let told = warnings("");
    assert!(told.len() == 1 && told[0].contains("anyone who reaches 0.0.0.0:8000"), "{told:?}");
    let told = warnings(&format!("{open}\n{AUTH}\n{tenants}"));
    assert!(told.len() == 1 && told[0].contains("in clear text"), "{told:?}");
    let told = warnings(&format!("{LOOPBACK}\n{tenants}"));
    assert!(told.len() == 1 && told[0].contains("`tenants` has no effect"), "{told:?}");
    let told = warnings(&format!("{LOOPBACK}\n{AUTH}"));
    assert!(told.len() == 1 && told[0].starts_with("x.yaml:2:29"), "{told:?}");
    assert!(told[0].contains("`auth[0].file`: no tenant is called \"acme\""), "{told:?}");
    let guests = "defaults: { tenant: acme }";
    assert_eq!(warnings(&format!("{LOOPBACK}\n{tenants}\n{guests}")), [""; 0]);
}

#[test]
fn a_listener_is_an_address_or_a_mapping() {
    let of = |http: &str| {
        let loaded = load(&format!("listen: {{ http: {http} }}"), KEYS);
        loaded.map(|loaded| loaded.config.listen.http).map_err(|problems| problems.to_string())
    };
    let plain = Listener::from(std::net::SocketAddr::from(([127, 0, 0, 1], 1)));
    assert_eq!(of("127.0.0.1:1"), Ok(plain.clone()));
    assert_eq!(of("{ address: 127.0.0.1:1 }"), Ok(plain));
    for (wrong, expected) in [
        ("{}", "1:17: `listen.http` has no `address`"),
        ("{ address: here }", "1:28: `listen.http.address` \"here\" is not an address"),
        ("{ address: 127.0.0.1:1, tls: {} }", "`listen.http.tls` has no `cert`"),
        ("8000", "`listen.http` must be an address"),
    ] {
        let told = of(wrong).unwrap_err();
        assert!(told.contains(expected), "{wrong}: {told}");
    }
}
