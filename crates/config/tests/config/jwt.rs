//! JSON Web Tokens in the configuration: where the keys of their issuer come from.

use std::time::Duration;

use splitrail_config::model::{Auth, JwtAuth};

use crate::support::{VALID, folder, only_problem, parse, problems};

/// A configuration with one credential, whose keys are these.
fn with_keys(jwks: &str, more: &str) -> String {
    format!(
        "{VALID}\nauth:\n  - kind: jwt\n    issuer: https://id.example\n    audience: splitrail\n    \
         jwks: {jwks}\n{more}"
    )
}

fn accepted(jwks: &str, more: &str) -> (JwtAuth, Vec<String>) {
    let text = with_keys(jwks, more);
    let loaded = parse(&text).unwrap_or_else(|problems| panic!("{problems}\n{text}"));
    let [Auth::Jwt(auth)] = loaded.config.auth.as_slice() else { panic!("{text}") };
    let warnings = loaded.warnings.iter().map(|problem| problem.message.clone());
    (auth.clone(), warnings.filter(|message| message.contains("auth[0]")).collect())
}

/// Asserts that the only problem is at the line that is `after` lines after `auth:`.
fn refused(jwks: &str, more: &str, after: usize, part: &str) {
    let (line, _, told) = only_problem(&with_keys(jwks, more));
    assert!(told.contains(part), "{jwks} {more}: {told}");
    assert_eq!(line, VALID.lines().count() + 2 + after, "{told}");
}

#[test]
fn keys_are_in_a_file_or_at_a_url() {
    let (auth, warnings) = accepted("jwks.json", "");
    assert_eq!(auth.jwks_file(), Some(folder().join("jwks.json").as_path()));
    assert_eq!(auth.tenant_claim, "sub");
    assert!(warnings.is_empty(), "{warnings:?}");
    let (auth, warnings) = accepted("https://id.example/keys", "    jwks_ca: tls/ca.pem\n");
    assert_eq!(auth.jwks_file(), None);
    assert_eq!(auth.jwks, "https://id.example/keys");
    assert_eq!(auth.jwks_ca, Some(folder().join("tls/ca.pem")));
    assert_eq!(auth.refresh_interval, Duration::from_secs(3600));
    assert!(warnings.is_empty(), "{warnings:?}");
    accepted("http://127.0.0.1:8080/keys", "    refresh_interval: 10s\n");
    accepted("'http://[::1]/keys'", "");
}

#[test]
fn a_file_of_keys_is_readable_and_has_a_usable_key() {
    refused("missing.json", "", 4, "`auth[0].jwks` \"missing.json\" cannot be read");
    refused("tls", "", 4, "`auth[0].jwks` \"tls\" cannot be read");
    refused("tls/ca.pem", "", 4, "is not a JSON object with a list `keys`");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.json");
    let write = |text: &str| std::fs::write(&file, text).unwrap();
    let path = file.display().to_string();
    write(r#"{"keys":[{"kty":"oct","k":"c2VjcmV0"}]}"#);
    refused(&path, "", 4, "has no public key for RS256");
    write(r#"{"keys":[]}"#);
    refused(&path, "", 4, "has no public key for RS256");
    write(&" ".repeat((1 << 20) + 1));
    refused(&path, "", 4, "is larger than 1 MiB");
    let public = std::fs::read_to_string(crate::support::folder().join("jwks.json")).unwrap();
    write(&public.replace("\"use\": \"sig\"", "\"d\": \"cHJpdmF0ZQ\""));
    let (_, warnings) = accepted(&path, "");
    assert!(warnings.len() == 1 && warnings[0].contains("a private key"), "{warnings:?}");
    assert!(!warnings[0].contains("cHJpdmF0ZQ"));
}

#[test]
fn a_url_of_keys_is_safe_to_use() {
    for (url, part) in [
        ("http://id.example/keys", "uses http for another machine"),
        ("ftp://id.example/keys", "has another scheme than https"),
        ("https:///keys", "is not a URL"),
        ("https://id.example/keys#first", "has a fragment"),
        ("https://user:word@id.example/keys", "has a user or password"),
    ] {
        refused(url, "", 4, part);
        let told = only_problem(&with_keys(url, "")).2;
        assert!(!told.contains("word@"), "{told}");
    }
}

#[test]
fn the_authority_of_a_url_is_a_certificate() {
    let url = "https://id.example/keys";
    refused(url, "    jwks_ca: missing.pem\n", 5, "`auth[0].jwks_ca` cannot be read");
    refused(url, "    jwks_ca: jwks.json\n", 5, "`auth[0].jwks_ca` cannot be used");
}

#[test]
fn settings_of_urls_do_nothing_for_files_and_plain_urls() {
    let ca = "    jwks_ca: tls/ca.pem\n";
    for (jwks, more, expected) in [
        ("jwks.json", ca, 1),
        ("jwks.json", "    refresh_interval: 1h\n", 1),
        ("http://127.0.0.1/keys", ca, 1),
        ("http://127.0.0.1/keys", "    refresh_interval: 1h\n", 0),
    ] {
        let (_, warnings) = accepted(jwks, more);
        assert_eq!(warnings.len(), expected, "{jwks} {more}: {warnings:?}");
    }
}

#[test]
fn each_credential_is_checked() {
    let two = with_keys(
        "missing.json",
        "  - { kind: jwt, issuer: i, audience: a, jwks: 'http://id.example' }\n",
    );
    let told: Vec<_> = problems(&two).iter().map(|problem| problem.message.clone()).collect();
    assert!(told.len() == 2 && told[1].starts_with("`auth[1].jwks` uses http"), "{told:?}");
}

#[test]
fn an_issuer_that_can_name_the_tenants_of_another_is_a_warning() {
    let item = |issuer: &str, tenants: &str| {
        format!(
            "  - {{ kind: jwt, issuer: {issuer}, audience: a, jwks: \"https://id.example/keys\"{tenants} }}\n"
        )
    };
    let warned = |items: &[String]| {
        let text = format!("{VALID}\ntenants: [ {{ name: acme }} ]\nauth:\n{}", items.concat());
        let loaded = parse(&text).unwrap_or_else(|problems| panic!("{problems}\n{text}"));
        let told = loaded.warnings.iter().map(|problem| problem.message.clone());
        told.filter(|message| message.contains("tenants of the other issuers")).count()
    };
    let named = ", tenants: [acme]";
    assert_eq!(warned(&[item("one", "")]), 0);
    assert_eq!(warned(&[item("one", ""), item("one", "")]), 0, "two audiences of one issuer");
    assert_eq!(warned(&[item("one", ""), item("two", "")]), 2);
    assert_eq!(warned(&[item("one", named), item("two", "")]), 1);
    assert_eq!(warned(&[item("one", named), item("two", named)]), 0);
}

#[test]
fn an_issuer_names_tenants_that_exist() {
    refused(
        "jwks.json",
        "    tenants: [acme]\n",
        5,
        "`auth[0].tenants`: no tenant is called \"acme\"",
    );
}
