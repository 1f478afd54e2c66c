//! A JSON Web Token. The input is a token; and, cut at its first line feed, a header and claims
//! that are signed by the issuer of the checks before they are read.

use std::sync::LazyLock;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use splitrail_access::jwt::{Claims, JwtRefusal, LEEWAY_S, TOKEN_MAX_BYTES, Verifier};
use splitrail_config::JwtAuth;

/// The time of the checks, in seconds since 1970.
const NOW: u64 = 1_800_000_000;

static ISSUER: LazyLock<Ed25519KeyPair> =
    LazyLock::new(|| Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap());

pub(crate) fn check(data: &[u8]) {
    if let Ok(token) = std::str::from_utf8(data)
        && let Ok(claims) = verify(token)
    {
        assert!(has_signed(token), "accepted without a signature of the issuer");
        agrees(token, &claims);
    }
    let (header, claims) = match data.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&data[..end], &data[end + 1..]),
        None => (b"{\"alg\":\"EdDSA\"}".as_slice(), data),
    };
    let text = format!("{}.{}", encode(header), encode(claims));
    let token = format!("{text}.{}", encode(ISSUER.sign(text.as_bytes())));
    if let Ok(claims) = verify(&token) {
        agrees(&token, &claims);
    }
}

static VERIFIER: LazyLock<Verifier> = LazyLock::new(|| {
    let auth = JwtAuth {
        issuer: "i".to_owned(),
        audience: "a".to_owned(),
        jwks: "jwks.json".to_owned(),
        jwks_ca: None,
        refresh_interval: Duration::from_secs(3600),
        tenant_claim: "sub".to_owned(),
        role_claim: Some("roles".to_owned()),
        tenants: None,
    };
    let x = encode(ISSUER.public_key());
    let key = json!({ "kty": "OKP", "crv": "Ed25519", "kid": "k", "x": x });
    let keys = json!({ "keys": [key] }).to_string();
    Verifier::with_keys(&auth, keys.as_bytes()).unwrap()
});

/// The result for the token, which is the same when the token is remembered.
fn verify(token: &str) -> Result<Claims, JwtRefusal> {
    let result = VERIFIER.verify(token, NOW);
    assert_eq!(VERIFIER.verify(token, NOW), result, "a remembered token has another result");
    if let Ok(claims) = &result {
        let end = claims.expires_unix_s.saturating_add(LEEWAY_S);
        assert!(NOW < end);
        assert_eq!(VERIFIER.verify(token, end), Err(JwtRefusal::Expired));
    }
    result
}

/// Asserts that a plain reader of the token finds the same claims and nothing to refuse.
fn agrees(token: &str, claims: &Claims) {
    assert!(token.len() <= TOKEN_MAX_BYTES);
    let parts: Vec<_> = token.split('.').collect();
    assert_eq!(parts.len(), 3);
    let read = |part: &str| -> Value {
        let bytes = URL_SAFE_NO_PAD.decode(part).unwrap();
        assert_eq!(encode(&bytes), part, "several texts are read as the same bytes");
        serde_json::from_slice(&bytes).unwrap()
    };
    let (header, body) = (read(parts[0]), read(parts[1]));
    assert!(header["alg"] == "EdDSA" || header["alg"] == "Ed25519", "{header}");
    assert!(header.get("crit").is_none() && header.get("b64").is_none(), "{header}");
    assert!(header.get("kid").is_none_or(|id| id == "k"), "{header}");
    assert_eq!(body["iss"], "i");
    let audiences = body["aud"].as_array().cloned().unwrap_or(vec![body["aud"].clone()]);
    assert!(audiences.contains(&"a".into()), "{body}");
    assert_eq!(body["sub"], *claims.tenant);
    assert!(!claims.tenant.is_empty());
    let time = |name: &str| body.get(name).map(|time| time.as_f64().unwrap());
    let leeway = LEEWAY_S as f64;
    assert!((NOW as f64) < time("exp").unwrap() + leeway, "{body}");
    for name in ["nbf", "iat"] {
        let rounded = time(name).unwrap_or(0.0).floor();
        assert!(rounded <= NOW as f64 + leeway, "{body}");
    }
    let names = |name: &str| {
        body["roles"] == name
            || body["roles"].as_array().is_some_and(|names| names.contains(&name.into()))
    };
    let role = claims.role.map(|role| format!("{role:?}").to_lowercase());
    assert!(role.is_none_or(|role| names(&role)), "{body}");
}

fn has_signed(token: &str) -> bool {
    let Some((text, signature)) = token.rsplit_once('.') else { return false };
    encode(ISSUER.sign(text.as_bytes())) == signature
}

fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}
