//! Which keys of a set are used, and which URLs.

use serde_json::{Value, json};

use super::*;

fn number_of(bits: usize) -> String {
    let mut bytes = vec![0; bits.div_ceil(8)];
    bytes[0] = 1 << ((bits - 1) % 8);
    *bytes.last_mut().unwrap() |= 1;
    URL_SAFE_NO_PAD.encode(bytes)
}

fn rsa_key() -> Value {
    json!({ "kty": "RSA", "kid": "a", "n": number_of(2048), "e": "AQAB" })
}

fn ec_key() -> Value {
    let coordinate = URL_SAFE_NO_PAD.encode([7; 32]);
    json!({ "kty": "EC", "crv": "P-256", "x": coordinate, "y": coordinate })
}

fn ed_key() -> Value {
    json!({ "kty": "OKP", "crv": "Ed25519", "x": URL_SAFE_NO_PAD.encode([9; 32]) })
}

fn parse(keys: Value) -> Result<KeySet, JwksError> {
    KeySet::parse(json!({ "keys": keys }).to_string().as_bytes())
}

fn with(mut key: Value, member: &str, value: impl Into<Value>) -> Value {
    key[member] = value.into();
    key
}

#[test]
fn the_three_kinds_of_keys_are_read() {
    let set = parse(json!([rsa_key(), ec_key(), ed_key()])).unwrap();
    let [rsa, ec, ed] = set.keys.as_slice() else { panic!("{set:?}") };
    assert_eq!((set.unusable, set.has_secrets, rsa.id.as_deref()), (0, false, Some("a")));
    assert!(matches!(&rsa.key, PublicKey::Rsa { modulus, exponent }
        if modulus.len() == 256 && *exponent == [1, 0, 1]));
    assert!(matches!(ec.key, PublicKey::P256(point) if point[0] == 4 && point[64] == 7));
    assert_eq!(ed.key, PublicKey::Ed25519([9; 32]));
}

#[test]
fn rsa_keys_have_from_2048_to_8192_bits() {
    for (bits, is_usable) in
        [(1024, false), (2047, false), (2048, true), (4096, true), (8192, true), (8193, false)]
    {
        let key = with(rsa_key(), "n", number_of(bits));
        assert_eq!(parse(json!([key])).is_ok(), is_usable, "{bits}");
    }
    let with_zeros = [&[0, 0][..], &URL_SAFE_NO_PAD.decode(number_of(2048)).unwrap()].concat();
    let key = with(rsa_key(), "n", URL_SAFE_NO_PAD.encode(with_zeros));
    assert_eq!(parse(json!([key])), parse(json!([rsa_key()])));
    for exponent in [&[1][..], &[0, 1], &[2], &[], &[0], &[1, 0, 0, 0, 1]] {
        let key = with(rsa_key(), "e", URL_SAFE_NO_PAD.encode(exponent));
        assert_eq!(parse(json!([key])), Err(JwksError::NoUsableKey), "{exponent:?}");
    }
}

#[test]
fn a_key_for_another_purpose_is_left_out() {
    let others = [
        with(rsa_key(), "use", "enc"),
        with(rsa_key(), "key_ops", json!(["encrypt"])),
        with(rsa_key(), "alg", "RS512"),
        with(rsa_key(), "alg", "HS256"),
        with(rsa_key(), "alg", "none"),
        with(rsa_key(), "n", format!("{}=", number_of(2048))),
        with(rsa_key(), "kid", 5),
        with(ec_key(), "crv", "P-384"),
        with(ec_key(), "alg", "RS256"),
        with(ec_key(), "x", URL_SAFE_NO_PAD.encode([7; 31])),
        with(ed_key(), "crv", "X25519"),
        with(ed_key(), "x", URL_SAFE_NO_PAD.encode([9; 33])),
        json!({ "kty": "oct", "k": "c2VjcmV0" }),
        json!("text"),
    ];
    let count = others.len();
    for other in &others {
        assert_eq!(parse(json!([other])), Err(JwksError::NoUsableKey), "{other}");
    }
    let mut keys = others.to_vec();
    keys.push(with(with(ed_key(), "use", "sig"), "key_ops", json!(["verify"])));
    let set = parse(keys.into()).unwrap();
    assert_eq!((set.keys.len(), set.unusable, set.has_secrets), (1, count, true));
}

#[test]
fn a_set_that_is_broken_or_beyond_its_bounds_is_refused() {
    for text in ["", "[]", "{}", "{\"keys\":{}}", "{\"keys\":[]", "\u{feff}{\"keys\":[]}"] {
        assert_eq!(KeySet::parse(text.as_bytes()), Err(JwksError::NotAKeySet), "{text:?}");
    }
    let deep = format!("{{\"keys\":[{}{}]}}", "[".repeat(500_000), "]".repeat(500_000));
    assert!(KeySet::parse(deep.as_bytes()).is_err());
    assert_eq!(parse(json!([])), Err(JwksError::NoUsableKey));
    assert_eq!(parse(vec![ed_key(); 256].into()).unwrap().keys.len(), 256);
    assert_eq!(parse(vec![ed_key(); 257].into()), Err(JwksError::TooManyKeys));
    let large = vec![b' '; JWKS_MAX_BYTES + 1];
    assert_eq!(KeySet::parse(&large), Err(JwksError::TooLarge));
}

#[test]
fn a_private_part_is_noticed_and_not_kept() {
    let set = parse(json!([with(ed_key(), "d", "cHJpdmF0ZQ")])).unwrap();
    assert!(set.has_secrets);
    assert!(!format!("{set:?}").contains("cHJpdmF0ZQ"));
}

#[test]
fn keys_come_over_https_or_from_this_machine() {
    let url = JwksUrl::parse("https://id.example/keys?v=1").unwrap();
    assert_eq!((url.is_tls, url.host.as_str(), url.port), (true, "id.example", 443));
    assert_eq!((url.authority.as_str(), url.target.as_str()), ("id.example", "/keys?v=1"));
    let url = JwksUrl::parse("http://[::1]:8000").unwrap();
    assert_eq!((url.is_tls, url.host.as_str(), url.port), (false, "::1", 8000));
    assert_eq!((url.authority.as_str(), url.target.as_str()), ("[::1]:8000", "/"));
    assert_eq!(JwksUrl::parse("http://127.0.0.9/k").unwrap().port, 80);
    assert!(JwksUrl::parse("http://localhost:1/k").is_ok());
    for (text, error) in [
        ("http://id.example/k", BadJwksUrl::Plain),
        ("http://127.0.0.1.example/k", BadJwksUrl::Plain),
        ("http://localhost.example/k", BadJwksUrl::Plain),
        ("http://0.0.0.0/k", BadJwksUrl::Plain),
        ("ftp://id.example/k", BadJwksUrl::Scheme),
        ("file:///etc/keys", BadJwksUrl::NotAUrl),
        ("https://", BadJwksUrl::NotAUrl),
        ("https://id.example:0/k", BadJwksUrl::NotAUrl),
        ("https://id.example:99999/k", BadJwksUrl::NotAUrl),
        ("https://id example/k", BadJwksUrl::NotAUrl),
        ("https://user:word@id.example/k", BadJwksUrl::User),
        ("https://id.example/k#f", BadJwksUrl::Fragment),
    ] {
        assert_eq!(JwksUrl::parse(text), Err(error), "{text}");
    }
}
