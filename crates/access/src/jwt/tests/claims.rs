//! What is required of the claims, and what is read from them.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::support::{NOW, Signer, acme, auth, claims_but, outcome, verifier, with};
use crate::OperatorRole;
use crate::jwt::{Claims, JwtRefusal, Verifier};

fn refused(claims: &Value, refusal: JwtRefusal) {
    let signer = Signer::ed("k");
    assert_eq!(outcome(&signer, &signer.token(claims)), Err(refusal), "{claims}");
}

fn accepted(claims: &Value) -> Claims {
    let signer = Signer::ed("k");
    outcome(&signer, &signer.token(claims)).unwrap_or_else(|error| panic!("{claims}: {error}"))
}

#[test]
fn a_token_is_good_for_less_than_30_s_after_its_end_and_up_to_30_s_before_its_start() {
    for (expired_for, result) in [(29, Ok(())), (30, Err(())), (31, Err(()))] {
        let claims = claims_but("exp", NOW - expired_for);
        match result {
            Ok(()) => assert_eq!(accepted(&claims).expires_unix_s, NOW - expired_for),
            Err(()) => refused(&claims, JwtRefusal::Expired),
        }
    }
    for name in ["nbf", "iat"] {
        accepted(&claims_but(name, NOW + 29));
        accepted(&claims_but(name, NOW + 30));
        refused(&claims_but(name, NOW + 31), JwtRefusal::NotYetValid);
        accepted(&claims_but(name, Value::Null));
        accepted(&claims_but(name, 0));
        accepted(&claims_but(name, -5));
    }
}

#[test]
fn a_token_must_expire() {
    refused(&claims_but("exp", Value::Null), JwtRefusal::Malformed);
    refused(&claims_but("exp", -1), JwtRefusal::Expired);
    refused(&claims_but("exp", 0), JwtRefusal::Expired);
    for value in [json!("1900000000"), json!(true), json!([NOW + 600]), json!({})] {
        for name in ["exp", "nbf", "iat"] {
            refused(&claims_but(name, value.clone()), JwtRefusal::Malformed);
        }
    }
    assert_eq!(accepted(&claims_but("exp", NOW as f64 + 0.75)).expires_unix_s, NOW);
    assert_eq!(accepted(&claims_but("exp", u64::MAX)).expires_unix_s, u64::MAX);
    assert_eq!(accepted(&claims_but("exp", 1e300)).expires_unix_s, u64::MAX);
    refused(&claims_but("nbf", 1e300), JwtRefusal::NotYetValid);
}

#[test]
fn a_number_beyond_all_bounds_is_refused() {
    let signer = Signer::ed("k");
    let text = super::support::claims().to_string();
    let huge = text.replace(&format!("\"exp\":{}", NOW + 600), "\"exp\":1e999");
    assert_ne!(text, huge);
    let token = signer.sign(&signer.header().to_string(), &huge);
    assert_eq!(outcome(&signer, &token), Err(JwtRefusal::Malformed));
}

#[test]
fn the_issuer_must_be_the_configured_one() {
    let other = ["https://id.example/", "https://ID.example", "https://id.example.attacker", ""];
    let values = other.map(Value::from).into_iter();
    let values = values.chain([Value::Null, json!(5), json!(["https://id.example"])]);
    values.for_each(|value| refused(&claims_but("iss", value), JwtRefusal::Issuer));
}

#[test]
fn the_audience_is_a_text_or_one_of_a_list() {
    accepted(&claims_but("aud", json!(["splitrail"])));
    accepted(&claims_but("aud", json!(["other", "splitrail"])));
    for value in [
        Value::Null,
        json!("other"),
        json!("Splitrail"),
        json!("splitrail other"),
        json!([]),
        json!(["other"]),
        json!([["splitrail"]]),
        json!([5, "splitrail"]),
        json!({ "splitrail": true }),
        json!(5),
    ] {
        refused(&claims_but("aud", value), JwtRefusal::Audience);
    }
}

#[test]
fn the_tenant_is_the_text_of_the_configured_claim() {
    assert_eq!(accepted(&claims_but("org", "Ünïcode org")).tenant, "Ünïcode org");
    let longest = "t".repeat(2048);
    assert_eq!(accepted(&claims_but("org", longest.clone())).tenant, longest);
    for value in [
        Value::Null,
        json!(""),
        json!(5),
        json!(["acme"]),
        json!({ "name": "acme" }),
        json!("t".repeat(2049)),
    ] {
        refused(&claims_but("org", value), JwtRefusal::NoTenant);
    }
    // Any claim may name the tenant, even one that is also checked.
    let signer = Signer::ed("k");
    let auth = splitrail_config::JwtAuth { tenant_claim: "iss".to_owned(), ..auth() };
    let verifier = Verifier::with_keys(&auth, &super::support::jwks(&[&signer])).unwrap();
    let claims = verifier.verify(&signer.token(&super::support::claims()), NOW).unwrap();
    assert_eq!(claims.tenant, "https://id.example");
}

#[test]
fn the_role_is_the_greatest_of_those_named() {
    for (value, role) in [
        (json!("read"), Some(OperatorRole::Read)),
        (json!("admin"), Some(OperatorRole::Admin)),
        (json!(["read"]), Some(OperatorRole::Read)),
        (json!(["read", "other", "admin"]), Some(OperatorRole::Admin)),
        (json!(["admin", "read"]), Some(OperatorRole::Admin)),
        (Value::Null, None),
        (json!("Admin"), None),
        (json!("admin read"), None),
        (json!([]), None),
        (json!(["admin", 5]), None),
        (json!({ "admin": true }), None),
        (json!(true), None),
    ] {
        assert_eq!(accepted(&claims_but("roles", value.clone())).role, role, "{value}");
    }
}

#[test]
fn tokens_have_no_role_unless_a_claim_is_configured_for_it() {
    let signer = Signer::ed("k");
    let auth = splitrail_config::JwtAuth { role_claim: None, ..auth() };
    let verifier = Verifier::with_keys(&auth, &super::support::jwks(&[&signer])).unwrap();
    let claims = with(claims_but("roles", "admin"), "role", "admin".into());
    assert_eq!(verifier.verify(&signer.token(&claims), NOW), Ok(acme()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_remembered_token_has_the_result_of_a_fresh_one_at_all_times(
        times in prop::collection::vec(0_u64..2000, 1..8),
        expires in 0_u64..2000,
        valid_from in 0_u64..2000,
    ) {
        let signer = Signer::ed("k");
        let claims = with(claims_but("exp", NOW + expires), "nbf", (NOW + valid_from).into());
        let token = signer.token(&claims);
        let remembering = verifier(&[&signer]);
        for time in times {
            let fresh = verifier(&[&signer]).verify(&token, NOW + time);
            prop_assert_eq!(remembering.verify(&token, NOW + time), fresh);
        }
    }
}
