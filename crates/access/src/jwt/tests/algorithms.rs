//! The key determines the algorithm, whatever a token says.

use ring::hmac;
use serde_json::{Value, json};

use super::support::{NOW, jwks};
use super::support::{Signer, acme, claims, encode, outcome, verifier, with};
use crate::jwt::{JwtRefusal, Verifier};

#[test]
fn tokens_of_all_three_algorithms_are_accepted() {
    let all = Signer::all();
    let verifier = verifier(&all.each_ref());
    for signer in &all {
        let token = signer.token(&claims());
        assert_eq!(verifier.verify(&token, NOW), Ok(acme()), "{}", signer.algorithm());
        let unnamed = signer.with_header(&json!({ "alg": signer.algorithm() }));
        assert_eq!(verifier.verify(&unnamed, NOW), Ok(acme()), "{}", signer.algorithm());
    }
    let ed = &all[2];
    let token = ed.with_header(&with(ed.header(), "alg", "Ed25519".into()));
    assert_eq!(verifier.verify(&token, NOW), Ok(acme()));
}

#[test]
fn none_is_refused_in_all_casings_with_and_without_a_signature() {
    let signer = Signer::rsa("a");
    for case in 0..16_u32 {
        let letter = |(at, letter): (usize, char)| match case >> at & 1 {
            0 => letter,
            _ => letter.to_ascii_uppercase(),
        };
        let name: String = "none".chars().enumerate().map(letter).collect();
        for header in [with(signer.header(), "alg", name.clone().into()), json!({ "alg": name })] {
            let signed = signer.with_header(&header);
            let (text, _) = signed.rsplit_once('.').unwrap();
            for token in [&signed, &format!("{text}."), &format!("{text}.AA")] {
                assert_eq!(outcome(&signer, token), Err(JwtRefusal::Algorithm), "{header}");
            }
            assert_eq!(outcome(&signer, text), Err(JwtRefusal::Malformed), "{header}");
        }
    }
}

#[test]
fn a_public_key_is_never_used_as_the_secret_of_an_hmac() {
    for signer in &Signer::all() {
        for secret in signer.public_forms() {
            let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
            for (name, refusal) in [
                ("HS256", JwtRefusal::Algorithm),
                ("hs256", JwtRefusal::Algorithm),
                (signer.algorithm(), JwtRefusal::Signature),
            ] {
                let header = with(signer.header(), "alg", name.into());
                let text =
                    format!("{}.{}", encode(header.to_string()), encode(claims().to_string()));
                let tag = hmac::sign(&key, text.as_bytes());
                let token = format!("{text}.{}", encode(tag));
                assert_eq!(outcome(signer, &token), Err(refusal), "{name}");
            }
        }
    }
}

#[test]
fn other_algorithms_and_other_spellings_are_refused() {
    let signer = Signer::rsa("a");
    for name in
        ["HS384", "HS512", "RS384", "RS512", "PS256", "ES384", "ES256K", "rs256", "RS256 ", ""]
    {
        let token = signer.with_header(&with(signer.header(), "alg", name.into()));
        assert_eq!(outcome(&signer, &token), Err(JwtRefusal::Algorithm), "{name}");
    }
    for value in [Value::Null, json!(5), json!(["RS256"]), json!({ "RS256": 1 })] {
        let token = signer.with_header(&with(signer.header(), "alg", value.clone()));
        assert_eq!(outcome(&signer, &token), Err(JwtRefusal::Malformed), "{value}");
    }
    let token = signer.sign(r#"{"alg":null,"kid":"a"}"#, &claims().to_string());
    assert_eq!(outcome(&signer, &token), Err(JwtRefusal::Malformed));
}

#[test]
fn a_key_is_used_for_its_own_algorithm_only() {
    let all = Signer::all();
    let verifier = verifier(&all.each_ref());
    for owner in &all {
        for signer in all.iter().filter(|signer| signer.id != owner.id) {
            // Signed by one key, in the name of another one.
            let named = with(signer.header(), "kid", owner.id.into());
            let token = signer.with_header(&named);
            assert_eq!(verifier.verify(&token, NOW), Err(JwtRefusal::Algorithm));
            let posed = with(named, "alg", owner.algorithm().into());
            let token = signer.with_header(&posed);
            assert_eq!(verifier.verify(&token, NOW), Err(JwtRefusal::Signature));
        }
    }
}

#[test]
fn a_token_of_an_unknown_key_is_refused() {
    let (known, stranger) = (Signer::rsa("known"), Signer::other_rsa("stranger"));
    let token = stranger.token(&claims());
    assert_eq!(outcome(&known, &token), Err(JwtRefusal::UnknownKey));
    let posed = stranger.with_header(&known.header());
    assert_eq!(outcome(&known, &posed), Err(JwtRefusal::Signature));
    let unnamed = stranger.with_header(&json!({ "alg": "RS256" }));
    assert_eq!(outcome(&known, &unnamed), Err(JwtRefusal::Signature));
    let unnamed = Signer::ec("other").with_header(&json!({ "alg": "ES256" }));
    assert_eq!(outcome(&known, &unnamed), Err(JwtRefusal::UnknownKey));
    // Names are compared exactly.
    for id in ["Known", "known ", ""] {
        let token = known.with_header(&with(known.header(), "kid", id.into()));
        assert_eq!(outcome(&known, &token), Err(JwtRefusal::UnknownKey), "{id:?}");
    }
}

#[test]
fn keys_may_share_a_name() {
    let signers = [Signer::rsa("k"), Signer::other_rsa("k"), Signer::ec("k"), Signer::ed("k")];
    let verifier = verifier(&signers.each_ref());
    for signer in &signers {
        assert_eq!(verifier.verify(&signer.token(&claims()), NOW), Ok(acme()));
    }
    let stranger = Signer::ec("k").token(&claims());
    assert_eq!(verifier.verify(&stranger, NOW), Err(JwtRefusal::Signature));
}

#[test]
fn a_token_costs_at_most_four_checks() {
    let signers: Vec<_> = (0..6).map(|_| Signer::ed("k")).collect();
    let verifier = verifier(&signers.iter().collect::<Vec<_>>());
    for header in [signers[0].header(), json!({ "alg": "EdDSA" })] {
        let is_accepted: Vec<_> = signers
            .iter()
            .map(|signer| verifier.verify(&signer.with_header(&header), NOW).is_ok())
            .collect();
        assert_eq!(is_accepted, [true, true, true, true, false, false]);
    }
}

#[test]
fn keys_inside_a_token_are_ignored() {
    let (known, stranger) = (Signer::ed("known"), Signer::ed("known"));
    let header = with(known.header(), "jwk", stranger.jwk());
    let header = with(header, "jku", "https://attacker.example/keys".into());
    let token = stranger.with_header(&header);
    assert_eq!(outcome(&known, &token), Err(JwtRefusal::Signature));
    assert_eq!(outcome(&known, &known.with_header(&header)), Ok(acme()));
}

#[test]
fn a_key_that_is_no_point_of_the_curve_verifies_nothing() {
    let signer = Signer::ec("a");
    let mut jwk = signer.jwk();
    jwk["y"] = encode([1; 32]).into();
    let keys = json!({ "keys": [jwk] }).to_string();
    let verifier = Verifier::with_keys(&super::support::auth(), keys.as_bytes()).unwrap();
    let token = signer.token(&claims());
    assert_eq!(verifier.verify(&token, NOW), Err(JwtRefusal::Signature));
    assert!(Verifier::with_keys(&super::support::auth(), &jwks(&[])).is_err());
}
