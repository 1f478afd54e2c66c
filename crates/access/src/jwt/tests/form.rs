//! The form of a token: three parts in base64url, two of them JSON objects.

use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::support::{NOW, Signer, acme, claims, claims_but, encode, outcome, verifier, with};
use crate::jwt::{JwtRefusal, TOKEN_MAX_BYTES, Verifier};

fn malformed(signer: &Signer, token: &str) {
    assert_eq!(outcome(signer, token), Err(JwtRefusal::Malformed), "{token}");
}

#[test]
fn a_cut_token_is_refused_wherever_it_is_cut() {
    for signer in Signer::all() {
        let token = signer.token(&claims());
        let verifier = verifier(&[&signer]);
        assert_eq!(verifier.verify(&token, NOW), Ok(acme()));
        for end in 0..token.len() {
            assert!(verifier.verify(&token[..end], NOW).is_err(), "{end}");
            assert!(verifier.verify(&token[end + 1..], NOW).is_err(), "{end}");
        }
    }
}

#[test]
fn a_token_has_at_most_16_kib() {
    let signer = Signer::ed("k");
    let of_size = |bytes: usize| {
        // Three bytes are four letters of base64.
        let base = signer.token(&claims_but("pad", "")).len();
        let mut padding = "x".repeat((bytes - base) / 4 * 3);
        while signer.token(&claims_but("pad", padding.clone())).len() < bytes {
            padding.push('x');
        }
        signer.token(&claims_but("pad", padding))
    };
    let largest = of_size(TOKEN_MAX_BYTES - 3);
    assert!(largest.len() <= TOKEN_MAX_BYTES, "{}", largest.len());
    assert_eq!(outcome(&signer, &largest), Ok(acme()));
    malformed(&signer, &of_size(TOKEN_MAX_BYTES + 1));
    malformed(&signer, &"a.".repeat(1 << 20));
}

#[test]
fn base64_has_no_padding_white_space_or_unused_bits() {
    let signer = Signer::ed("k");
    let (header, body) = (signer.header().to_string(), claims().to_string());
    // Texts whose length is no multiple of three, so that there are unused bits and padding.
    let header = format!("{header}{}", " ".repeat((4 - header.len() % 3) % 3));
    let body = format!("{body}{}", " ".repeat((4 - body.len() % 3) % 3));
    let good = (encode(&header), encode(&body));
    assert_eq!(
        outcome(&signer, &signer.sign_encoded(&format!("{}.{}", good.0, good.1))),
        Ok(acme())
    );
    let unused_bit = |part: &str| {
        let last = part.chars().last().unwrap();
        let next = char::from(last as u8 + 1);
        format!("{}{next}", part.strip_suffix(last).unwrap())
    };
    let newline = |part: &str| format!("{}\n{}", &part[..8], &part[8..]);
    for (header, body) in [
        (URL_SAFE.encode(&header), good.1.clone()),
        (good.0.clone(), URL_SAFE.encode(&body)),
        (newline(&good.0), good.1.clone()),
        (good.0.clone(), newline(&good.1)),
        (good.0.clone(), format!("{}\n", good.1)),
        (format!(" {}", good.0), good.1.clone()),
        (unused_bit(&good.0), good.1.clone()),
        (good.0.clone(), unused_bit(&good.1)),
        (good.0.clone(), format!("{}%", good.1)),
    ] {
        malformed(&signer, &signer.sign_encoded(&format!("{header}.{body}")));
    }
    // The other alphabet.
    let texts = (0..3).map(|shift| claims_but("x", format!("{}>>>???", " ".repeat(shift))));
    let mut texts = texts.map(|text| STANDARD.encode(text.to_string()).replace('=', ""));
    let other = texts.find(|text| text.contains(['+', '/'])).unwrap();
    malformed(&signer, &signer.sign_encoded(&format!("{}.{other}", good.0)));
    let token = signer.token(&claims());
    for end in ["=", "==", "\n", " ", "."] {
        malformed(&signer, &format!("{token}{end}"));
    }
}

#[test]
fn a_token_has_three_parts() {
    let signer = Signer::ed("k");
    let token = signer.token(&claims());
    let parts: Vec<_> = token.split('.').collect();
    let [header, body, signature] = parts.as_slice() else { panic!("{token}") };
    for token in [
        String::new(),
        ".".to_owned(),
        "..".to_owned(),
        "....".to_owned(),
        header.to_string(),
        format!("{header}.{body}"),
        format!("{header}.{body}."),
        format!("{header}..{signature}"),
        format!(".{body}.{signature}"),
        format!("{header}.{body}.{signature}."),
        format!("{header}.{body}.{signature}.{signature}"),
        format!("{header}.{body}.{signature}.{signature}.{signature}"),
        format!("{header}.{body}.{}", encode(vec![0; 1025])),
        format!("Bearer {token}"),
    ] {
        malformed(&signer, &token);
    }
}

#[test]
fn header_and_claims_are_json_objects() {
    let signer = Signer::ed("k");
    let (header, body) = (signer.header().to_string(), claims().to_string());
    for wrong in ["", "{", "{}}", "[]", "null", "5", "\"text\"", "{'alg':'EdDSA'}", "{\"a\":1,}"] {
        malformed(&signer, &signer.sign(wrong, &body));
        malformed(&signer, &signer.sign(&header, wrong));
    }
    let not_utf8 = [b"{\"x\":\"\xff\"}".as_slice(), b"\xef\xbb\xbf{}", b"{\"\xc0\x80\":1}"];
    for wrong in not_utf8.map(encode) {
        malformed(&signer, &signer.sign_encoded(&format!("{wrong}.{}", encode(&body))));
        malformed(&signer, &signer.sign_encoded(&format!("{}.{wrong}", encode(&header))));
    }
}

#[test]
fn deeply_nested_and_wide_objects_are_refused() {
    let signer = Signer::ed("k");
    let (header, body) = (signer.header().to_string(), claims().to_string());
    let and = |object: &str, member: &str| format!("{},{member}}}", &object[..object.len() - 1]);
    for (open, close, depth) in [("[", "]", 5000), ("[", "]", 200), ("{\"a\":", "}", 900)] {
        let value = if open == "[" { "" } else { "1" };
        let deep = format!("\"x\":{}{value}{}", open.repeat(depth), close.repeat(depth));
        malformed(&signer, &signer.sign(&and(&header, &deep), &body));
        malformed(&signer, &signer.sign(&header, &and(&body, &deep)));
    }
    let shallow = format!("\"x\":{}{}", "[".repeat(50), "]".repeat(50));
    assert_eq!(outcome(&signer, &signer.sign(&header, &and(&body, &shallow))), Ok(acme()));
    let wide: Vec<_> = (0..300).map(|number| format!("\"{number}\":1")).collect();
    malformed(&signer, &signer.sign(&header, &and(&body, &wide.join(","))));
    malformed(&signer, &signer.sign(&and(&header, &wide.join(",")), &body));
}

#[test]
fn a_name_that_occurs_twice_is_refused() {
    let signer = Signer::ed("k");
    let (header, body) = (signer.header().to_string(), claims().to_string());
    let and = |object: &str, member: &str| format!("{},{member}}}", &object[..object.len() - 1]);
    for twice in
        ["\"org\":\"acme\"", "\"org\":\"other\"", "\"\\u006frg\":\"other\"", "\"a\":1,\"a\":1"]
    {
        malformed(&signer, &signer.sign(&header, &and(&body, twice)));
    }
    for twice in ["\"alg\":\"none\"", "\"alg\":\"EdDSA\"", "\"a\\u006cg\":\"EdDSA\""] {
        malformed(&signer, &signer.sign(&and(&header, twice), &body));
    }
    // An escaped name is the same name.
    let escaped = body.replace("\"org\"", "\"\\u006frg\"");
    assert_eq!(outcome(&signer, &signer.sign(&header, &escaped)), Ok(acme()));
}

#[test]
fn extensions_that_must_be_understood_are_refused() {
    let signer = Signer::ed("k");
    for (name, value) in [
        ("crit", json!(["exp"])),
        ("crit", json!(["b64"])),
        ("crit", json!([])),
        ("crit", json!("text")),
        ("b64", json!(false)),
        ("b64", json!(true)),
    ] {
        malformed(&signer, &signer.with_header(&with(signer.header(), name, value)));
    }
    let header = signer.header().to_string().replace("\"typ\"", "\"crit\":null,\"typ\"");
    malformed(&signer, &signer.sign(&header, &claims().to_string()));
}

#[test]
fn tokens_for_other_purposes_are_refused() {
    let signer = Signer::ed("k");
    let token = |typ: Value| signer.with_header(&with(signer.header(), "typ", typ));
    for typ in ["JWT", "jwt", "at+jwt", "application/at+jwt", "AT+JWT", "Bearer"] {
        assert_eq!(outcome(&signer, &token(typ.into())), Ok(acme()), "{typ}");
    }
    assert_eq!(outcome(&signer, &token(Value::Null)), Ok(acme()));
    for typ in ["logout+jwt", "secevent+jwt", "dpop+jwt", "application/Logout+JWT"] {
        malformed(&signer, &token(typ.into()));
    }
    for value in [json!(5), json!(["JWT"])] {
        malformed(&signer, &token(value));
    }
    for value in [json!(5), json!(["k"]), json!({})] {
        malformed(&signer, &signer.with_header(&with(signer.header(), "kid", value)));
    }
}

/// A verifier and valid tokens of all algorithms, one of which has been verified.
static VALID: LazyLock<(Verifier, Vec<String>)> = LazyLock::new(|| {
    let all = Signer::all();
    let verifier = verifier(&all.each_ref());
    let tokens: Vec<_> = all.iter().map(|signer| signer.token(&claims())).collect();
    assert_eq!(verifier.verify(&tokens[0], NOW), Ok(acme()));
    (verifier, tokens)
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_valid_token_with_one_changed_byte_is_refused(
        which in 0_usize..3,
        at in any::<prop::sample::Index>(),
        byte in 0_u8..128,
    ) {
        let (verifier, tokens) = &*VALID;
        let mut bytes = tokens[which].clone().into_bytes();
        let at = at.index(bytes.len());
        prop_assume!(bytes[at] != byte);
        bytes[at] = byte;
        let changed = String::from_utf8(bytes).unwrap();
        prop_assert!(verifier.verify(&changed, NOW).is_err(), "{}", at);
    }

    #[test]
    fn any_text_is_refused(text in "[ -~]{0,40}(\\.[A-Za-z0-9_-]{0,40}){0,4}") {
        prop_assert!(VALID.0.verify(&text, NOW).is_err());
    }
}
