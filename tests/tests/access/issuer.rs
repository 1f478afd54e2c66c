//! An issuer of JSON Web Tokens: its keys, its tokens, and those that an attacker would make.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{
    Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256, RsaKeyPair, RsaPublicKeyComponents,
};
use serde_json::{Value, json};

/// The issuer in the configuration of the tests.
pub(crate) const ISSUER: &str = "https://id.example";

/// A key pair with a name.
pub(crate) struct Signer {
    id: &'static str,
    pair: Pair,
}

enum Pair {
    Rsa(Box<RsaKeyPair>),
    Ed(Ed25519KeyPair),
}

impl Signer {
    /// A new Ed25519 key.
    pub(crate) fn ed(id: &'static str) -> Self {
        let der = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        Self { id, pair: Pair::Ed(Ed25519KeyPair::from_pkcs8(der.as_ref()).unwrap()) }
    }

    /// The RSA key of the fixtures.
    pub(crate) fn rsa(id: &'static str) -> Self {
        let der = include_bytes!("../../../crates/access/tests/fixtures/jwt/rsa_a.pk8");
        Self { id, pair: Pair::Rsa(Box::new(RsaKeyPair::from_pkcs8(der).unwrap())) }
    }

    /// The public key as a JSON Web Key.
    pub(crate) fn jwk(&self) -> Value {
        match &self.pair {
            Pair::Rsa(pair) => {
                let public = RsaPublicKeyComponents::<Vec<u8>>::from(pair.public());
                let (n, e) = (encode(&public.n), encode(&public.e));
                json!({ "kty": "RSA", "kid": self.id, "use": "sig", "n": n, "e": e })
            }
            Pair::Ed(pair) => {
                let x = encode(pair.public_key().as_ref());
                json!({ "kty": "OKP", "kid": self.id, "crv": "Ed25519", "x": x })
            }
        }
    }

    /// The public key in forms that an attacker might use as the secret of an HMAC: DER, the JSON
    /// Web Key, and the modulus or point.
    pub(crate) fn public_forms(&self) -> [Vec<u8>; 3] {
        let der = match &self.pair {
            Pair::Rsa(pair) => pair.public().as_ref().to_vec(),
            Pair::Ed(pair) => pair.public_key().as_ref().to_vec(),
        };
        let jwk = self.jwk();
        let number = jwk["n"].as_str().or(jwk["x"].as_str()).unwrap();
        [der, jwk.to_string().into_bytes(), URL_SAFE_NO_PAD.decode(number).unwrap()]
    }

    /// A token with these claims, signed by this key.
    pub(crate) fn token(&self, claims: &Value) -> String {
        self.token_of(self.id, claims)
    }

    /// The same with another name of the key in the header.
    pub(crate) fn token_of(&self, id: &str, claims: &Value) -> String {
        let algorithm = match self.pair {
            Pair::Rsa(_) => "RS256",
            Pair::Ed(_) => "EdDSA",
        };
        let signed = first_parts(&json!({ "alg": algorithm, "typ": "JWT", "kid": id }), claims);
        let signature = match &self.pair {
            Pair::Rsa(pair) => {
                let mut signature = vec![0; pair.public().modulus_len()];
                let random = SystemRandom::new();
                pair.sign(&RSA_PKCS1_SHA256, &random, signed.as_bytes(), &mut signature).unwrap();
                signature
            }
            Pair::Ed(pair) => pair.sign(signed.as_bytes()).as_ref().to_vec(),
        };
        format!("{signed}.{}", encode(signature))
    }

    /// Tokens with `alg: none` that name this key: without a signature, and with that of a valid
    /// token.
    pub(crate) fn unsigned(&self, claims: &Value) -> [String; 2] {
        let signed = first_parts(&json!({ "alg": "none", "typ": "JWT", "kid": self.id }), claims);
        let valid = self.token(claims);
        let (_, signature) = valid.rsplit_once('.').unwrap();
        [format!("{signed}."), format!("{signed}.{signature}")]
    }

    /// Tokens with HS256, whose secret is the public key in one of its forms.
    pub(crate) fn confused(&self, claims: &Value) -> [String; 3] {
        let signed = first_parts(&json!({ "alg": "HS256", "typ": "JWT", "kid": self.id }), claims);
        self.public_forms().map(|secret| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
            format!("{signed}.{}", encode(hmac::sign(&key, signed.as_bytes())))
        })
    }
}

fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Header and claims of a token, as they are signed.
pub(crate) fn first_parts(header: &Value, claims: &Value) -> String {
    format!("{}.{}", encode(header.to_string()), encode(claims.to_string()))
}

/// The time now, in seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// The claims of a token for a tenant that is valid for ten minutes.
pub(crate) fn claims(tenant: &str) -> Value {
    let now = now();
    json!({
        "iss": ISSUER, "aud": "splitrail", "sub": "user-7", "org": tenant,
        "iat": now, "nbf": now, "exp": now + 600
    })
}

/// The same claims with some of them replaced.
pub(crate) fn claims_with(tenant: &str, replaced: &Value) -> Value {
    let mut claims = claims(tenant);
    for (name, value) in replaced.as_object().unwrap() {
        claims[name] = value.clone();
    }
    claims
}

/// The key set of these signers.
pub(crate) fn jwks(signers: &[&Signer]) -> String {
    let keys: Vec<_> = signers.iter().map(|signer| signer.jwk()).collect();
    json!({ "keys": keys }).to_string()
}

/// Puts a text in a file, which has the old content or the new one at any time.
pub(crate) fn replace(file: &Path, text: &str) {
    let next = file.with_extension("next");
    std::fs::write(&next, text).unwrap();
    std::fs::rename(next, file).unwrap();
}

/// The item of `auth` that accepts the tokens of the issuer with the keys of this file or URL.
pub(crate) fn jwt(keys: &str) -> String {
    format!(
        "{{ kind: jwt, issuer: \"{ISSUER}\", audience: splitrail, jwks: {keys:?}, \
         tenant_claim: org, role_claim: roles }}"
    )
}
