//! The compact form of a signed token (RFC 7515): `header.claims.signature`, each in base64url.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use splitrail_api::json::JsonObject;

use super::JwtRefusal;

/// Maximum length of a token in bytes.
pub const TOKEN_MAX_BYTES: usize = 16 << 10;

/// Maximum number of members of the header, and of claims.
const MEMBERS_MAX: usize = 256;

/// Maximum length of an RSA signature in bytes, which is the longest.
const SIGNATURE_MAX_BYTES: usize = 1024;

/// An algorithm that is supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    /// RSASSA-PKCS1-v1_5 with SHA-256 (RFC 7518, section 3.3).
    Rs256,
    /// ECDSA with P-256 and SHA-256 (RFC 7518, section 3.4).
    Es256,
    /// Ed25519 (RFC 8037, section 3.1).
    Ed25519,
}

impl Algorithm {
    /// The algorithm with this name. Names are case-sensitive.
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "RS256" => Some(Self::Rs256),
            "ES256" => Some(Self::Es256),
            // The second name is that of RFC 9864.
            "EdDSA" | "Ed25519" => Some(Self::Ed25519),
            _ => None,
        }
    }
}

/// What the header of a token says about its signature.
pub(super) struct Header {
    pub(super) algorithm: Algorithm,
    /// The name of the key, `kid`.
    pub(super) key_id: Option<String>,
}

/// A token whose signature has not been checked.
pub(super) struct Token<'t> {
    /// The text that is signed: header and claims as they were sent.
    pub(super) signed: &'t [u8],
    pub(super) header: Header,
    pub(super) claims: JsonObject,
    pub(super) signature: Vec<u8>,
}

impl<'t> Token<'t> {
    /// Reads a token of at most [`TOKEN_MAX_BYTES`].
    ///
    /// # Errors
    /// [`JwtRefusal::Malformed`] or [`JwtRefusal::Algorithm`].
    pub(super) fn parse(text: &'t str) -> Result<Self, JwtRefusal> {
        let (signed, signature) = text.rsplit_once('.').ok_or(JwtRefusal::Malformed)?;
        let (header, claims) = signed.split_once('.').ok_or(JwtRefusal::Malformed)?;
        let header = Header::read(&object(header)?)?;
        let claims = object(claims)?;
        let signature = bytes(signature)?;
        if signature.is_empty() || signature.len() > SIGNATURE_MAX_BYTES {
            return Err(JwtRefusal::Malformed);
        }
        Ok(Self { signed: signed.as_bytes(), header, claims, signature })
    }
}

impl Header {
    fn read(header: &JsonObject) -> Result<Self, JwtRefusal> {
        // `crit` names extensions that must be understood, and none is. One of these is `b64`
        // (RFC 7797), which changes what is signed.
        if header.raw("crit").is_some() || header.raw("b64").is_some() {
            return Err(JwtRefusal::Malformed);
        }
        if text(header, "typ")?.is_some_and(|purpose| is_other_purpose(&purpose)) {
            return Err(JwtRefusal::Malformed);
        }
        let name = text(header, "alg")?.ok_or(JwtRefusal::Malformed)?;
        let algorithm = Algorithm::from_name(&name).ok_or(JwtRefusal::Algorithm)?;
        Ok(Self { algorithm, key_id: text(header, "kid")? })
    }
}

/// Whether `typ` says that the token is no access token: issuers sign other messages with the same
/// keys, for example `logout+jwt` and `secevent+jwt` (RFC 8725, section 3.11).
fn is_other_purpose(typ: &str) -> bool {
    let typ = typ.to_ascii_lowercase();
    let typ = typ.strip_prefix("application/").unwrap_or(&typ);
    typ.ends_with("+jwt") && typ != "at+jwt"
}

/// A member that is a text, if it is present.
fn text(object: &JsonObject, name: &'static str) -> Result<Option<String>, JwtRefusal> {
    let raw = object.raw(name);
    raw.map(|raw| serde_json::from_str(raw).map_err(|_| JwtRefusal::Malformed)).transpose()
}

/// A JSON object in base64url. Its depth is bounded by the reader of clients' bodies, and no name
/// occurs twice.
fn object(part: &str) -> Result<JsonObject, JwtRefusal> {
    let json = bytes(part)?.into();
    JsonObject::parse_strictly(json, MEMBERS_MAX, |_| Ok(())).map_err(|_| JwtRefusal::Malformed)
}

/// Bytes in base64url without padding, white space or unused bits.
fn bytes(part: &str) -> Result<Vec<u8>, JwtRefusal> {
    URL_SAFE_NO_PAD.decode(part).map_err(|_| JwtRefusal::Malformed)
}
