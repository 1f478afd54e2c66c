//! Makes keys and tokens.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256,
    RsaKeyPair, RsaPublicKeyComponents,
};
use serde_json::{Value, json};
use splitrail_config::JwtAuth;

use crate::jwt::{Claims, JwtRefusal, Verifier};

/// The time of the tests, in seconds since 1970.
pub(super) const NOW: u64 = 1_800_000_000;

/// A key pair with a name.
pub(super) struct Signer {
    pub(super) id: &'static str,
    pair: Pair,
}

enum Pair {
    Rsa(RsaKeyPair),
    Ec(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

impl Signer {
    pub(super) fn rsa(id: &'static str) -> Self {
        let der = include_bytes!("../../../tests/fixtures/jwt/rsa_a.pk8");
        Self { id, pair: Pair::Rsa(RsaKeyPair::from_pkcs8(der).unwrap()) }
    }

    pub(super) fn other_rsa(id: &'static str) -> Self {
        let der = include_bytes!("../../../tests/fixtures/jwt/rsa_b.pk8");
        Self { id, pair: Pair::Rsa(RsaKeyPair::from_pkcs8(der).unwrap()) }
    }

    pub(super) fn ec(id: &'static str) -> Self {
        let (kind, random) = (&ECDSA_P256_SHA256_FIXED_SIGNING, SystemRandom::new());
        let der = EcdsaKeyPair::generate_pkcs8(kind, &random).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(kind, der.as_ref(), &random).unwrap();
        Self { id, pair: Pair::Ec(pair) }
    }

    pub(super) fn ed(id: &'static str) -> Self {
        let der = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        Self { id, pair: Pair::Ed(Ed25519KeyPair::from_pkcs8(der.as_ref()).unwrap()) }
    }

    /// One key of each kind, named by its algorithm.
    pub(super) fn all() -> [Self; 3] {
        [Self::rsa("RS256"), Self::ec("ES256"), Self::ed("EdDSA")]
    }

    pub(super) fn algorithm(&self) -> &'static str {
        match self.pair {
            Pair::Rsa(_) => "RS256",
            Pair::Ec(_) => "ES256",
            Pair::Ed(_) => "EdDSA",
        }
    }

    /// The public key as a JSON Web Key.
    pub(super) fn jwk(&self) -> Value {
        match &self.pair {
            Pair::Rsa(pair) => {
                let public = RsaPublicKeyComponents::<Vec<u8>>::from(pair.public());
                let (n, e) = (encode(&public.n), encode(&public.e));
                json!({ "kty": "RSA", "kid": self.id, "use": "sig", "n": n, "e": e })
            }
            Pair::Ec(pair) => {
                let point = pair.public_key().as_ref();
                let (x, y) = (encode(&point[1..33]), encode(&point[33..]));
                json!({ "kty": "EC", "kid": self.id, "crv": "P-256", "x": x, "y": y })
            }
            Pair::Ed(pair) => {
                let x = encode(pair.public_key().as_ref());
                json!({ "kty": "OKP", "kid": self.id, "crv": "Ed25519", "x": x })
            }
        }
    }

    /// The public key in forms that an attacker knows: DER, the JSON Web Key, and the bare number.
    pub(super) fn public_forms(&self) -> Vec<Vec<u8>> {
        let public = match &self.pair {
            Pair::Rsa(pair) => pair.public().as_ref().to_vec(),
            Pair::Ec(pair) => pair.public_key().as_ref().to_vec(),
            Pair::Ed(pair) => pair.public_key().as_ref().to_vec(),
        };
        let jwk = self.jwk();
        let number = jwk["n"].as_str().or(jwk["x"].as_str()).unwrap().to_owned();
        vec![public, jwk.to_string().into_bytes(), number.into_bytes(), Vec::new()]
    }

    /// The usual header of a token.
    pub(super) fn header(&self) -> Value {
        json!({ "alg": self.algorithm(), "typ": "JWT", "kid": self.id })
    }

    /// A token with these claims.
    pub(super) fn token(&self, claims: &Value) -> String {
        self.sign(&self.header().to_string(), &claims.to_string())
    }

    /// A token with the usual claims and another header.
    pub(super) fn with_header(&self, header: &Value) -> String {
        self.sign(&header.to_string(), &claims().to_string())
    }

    /// A token with these texts as header and claims.
    pub(super) fn sign(&self, header: &str, claims: &str) -> String {
        self.sign_encoded(&format!("{}.{}", encode(header), encode(claims)))
    }

    /// A token whose first two parts are this text, signed as it is.
    pub(super) fn sign_encoded(&self, signed: &str) -> String {
        let (text, random) = (signed.as_bytes(), SystemRandom::new());
        let signature = match &self.pair {
            Pair::Rsa(pair) => {
                let mut signature = vec![0; pair.public().modulus_len()];
                pair.sign(&RSA_PKCS1_SHA256, &random, text, &mut signature).unwrap();
                signature
            }
            Pair::Ec(pair) => pair.sign(&random, text).unwrap().as_ref().to_vec(),
            Pair::Ed(pair) => pair.sign(text).as_ref().to_vec(),
        };
        format!("{signed}.{}", encode(signature))
    }
}

/// Base64url without padding.
pub(super) fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// The configuration of the tests.
pub(super) fn auth() -> JwtAuth {
    JwtAuth {
        issuer: "https://id.example".to_owned(),
        audience: "splitrail".to_owned(),
        jwks: "jwks.json".to_owned(),
        jwks_ca: None,
        refresh_interval: Duration::from_secs(3600),
        tenant_claim: "org".to_owned(),
        role_claim: Some("roles".to_owned()),
        tenants: None,
    }
}

/// The claims of a token that is valid at [`NOW`].
pub(super) fn claims() -> Value {
    json!({
        "iss": "https://id.example", "aud": "splitrail", "sub": "user-7", "org": "acme",
        "iat": NOW, "nbf": NOW, "exp": NOW + 600
    })
}

/// The usual claims with one of them replaced; `null` removes it.
pub(super) fn claims_but(name: &str, value: impl Into<Value>) -> Value {
    with(claims(), name, value.into())
}

/// An object with one member replaced; `null` removes it.
pub(super) fn with(mut object: Value, name: &str, value: Value) -> Value {
    let members = object.as_object_mut().unwrap();
    match value {
        Value::Null => drop(members.remove(name)),
        value => drop(members.insert(name.to_owned(), value)),
    }
    object
}

/// What the usual claims say.
pub(super) fn acme() -> Claims {
    Claims { tenant: "acme".to_owned(), role: None, expires_unix_s: NOW + 600 }
}

/// The key set of these signers.
pub(super) fn jwks(signers: &[&Signer]) -> Vec<u8> {
    let keys: Vec<_> = signers.iter().map(|signer| signer.jwk()).collect();
    json!({ "keys": keys }).to_string().into_bytes()
}

/// A verifier with the keys of these signers.
pub(super) fn verifier(signers: &[&Signer]) -> Verifier {
    Verifier::with_keys(&auth(), &jwks(signers)).unwrap()
}

/// The result for a token at [`NOW`] with the key of the signer, twice: fresh, and possibly
/// remembered.
pub(super) fn outcome(signer: &Signer, token: &str) -> Result<Claims, JwtRefusal> {
    let verifier = verifier(&[signer]);
    let fresh = verifier.verify(token, NOW);
    assert_eq!(verifier.verify(token, NOW), fresh, "the second result differs");
    fresh
}
