//! TLS towards engines in the configuration.

use crate::support::{VALID, folder, only_problem, parse, valid_but};
use splitrail_config::engine_tls::EngineTlsFiles;
use splitrail_config::{Discovery, EngineTls, UrlScheme};

const URL: &str = "http://10.0.2.1:8000";
const SMALL: &str = "name: small\n";

/// The valid configuration whose second model has an https worker and this section.
fn with(section: &str) -> String {
    let secured = VALID.replacen(URL, "https://10.0.2.1:8000", 1);
    secured.replacen(SMALL, &format!("{SMALL}    engine_tls: {section}\n"), 1)
}

fn refused(section: &str, column: usize, part: &str) {
    let (line, found, told) = only_problem(&with(section));
    assert!(told.contains(part), "{section}: {told}");
    assert_eq!((line, found), (33, column), "{section}: {told}");
}

#[test]
fn paths_start_at_the_folder_of_the_file() {
    let config = parse(&with("{ ca: tls/ca.pem, cert: tls/router.pem, key: tls/router.key }"));
    let tls = config.unwrap().config.models[1].engine_tls.clone().unwrap();
    let at = |name: &str| Some(folder().join("tls").join(name));
    let expected = EngineTls {
        ca: at("ca.pem"),
        cert: at("router.pem"),
        key: at("router.key"),
        server_name: None,
    };
    assert_eq!(tls, expected);
    let files = EngineTlsFiles::read(&tls).unwrap();
    assert!(files.has_own_authorities() && files == EngineTlsFiles::read(&tls).unwrap());
    assert!(!format!("{files:?}").contains("45, 45"), "no content is shown");
}

#[test]
fn files_that_cannot_be_used_are_reported_where_they_are_named() {
    refused("{ ca: tls/none.pem }", 23, "`models[1].engine_tls.ca` cannot be read");
    refused("{ ca: engine.key }", 23, "`models[1].engine_tls.ca` cannot be used");
    refused("{ cert: tls/router.pem }", 25, "`models[1].engine_tls.cert` is given without `key`");
    refused("{ key: tls/router.key }", 24, "`models[1].engine_tls.key` is given without `cert`");
    let others = "{ cert: tls/router.pem, key: ../../../../../tests/fixtures/tls/shim.key }";
    refused(others, 25, "`models[1].engine_tls.cert` cannot be used");
    let no_key = "{ cert: tls/router.pem, key: tls/router.pem }";
    refused(no_key, 46, "`models[1].engine_tls.key` cannot be used");
    refused("{ server_name: 'a b' }", 32, "neither a host name nor an IP address");
    refused("{ authority: x }", 19, "unknown key `authority`");
}

#[test]
fn names_and_addresses_are_names_of_certificates() {
    for name in ["engines.example", "10.0.0.1", "'::1'", "a_b.example"] {
        parse(&with(&format!("{{ server_name: {name} }}"))).unwrap();
    }
}

#[test]
fn a_section_that_no_worker_needs_is_a_warning() {
    let warnings = |text: &str| {
        let found = parse(text).unwrap().warnings;
        found.iter().filter(|warning| warning.message.contains("engine_tls")).count()
    };
    let section = format!("{SMALL}    engine_tls: {{}}\n");
    assert_eq!(warnings(&with("{}")), 0);
    assert_eq!(warnings(&valid_but(SMALL, &section)), 1);
    for (source, count) in [
        ("{ kind: dns, name: engines, port: 8000, role: both }", 1),
        ("{ kind: dns, name: engines, port: 8000, role: both, scheme: https }", 0),
        ("{ kind: kubernetes, selector: app=vllm, port: 8000, role: both, scheme: https }", 0),
        ("{ kind: shim }", 0),
    ] {
        let found = format!("{section}    discovery: [{source}]\n");
        assert_eq!(warnings(&valid_but(SMALL, &found)), count, "{source}");
    }
}

#[test]
fn sources_of_workers_have_a_scheme() {
    let scheme = |more: &str| {
        let source = format!("{{ kind: dns, name: engines, port: 8000, role: both{more} }}");
        let text = valid_but(SMALL, &format!("{SMALL}    discovery: [{source}]\n"));
        match &parse(&text).unwrap().config.models[1].discovery[0] {
            Discovery::Dns(dns) => dns.scheme,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(scheme(""), UrlScheme::Http);
    assert_eq!(scheme(", scheme: https"), UrlScheme::Https);
}
