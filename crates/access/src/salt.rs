//! The cache salts of tenants.
//!
//! An engine shares cached blocks only among requests with the same `cache_salt`. The router derives
//! the salt from the cache group of the request's tenant and from the client's own salt, so that a
//! client can narrow who shares its blocks, but never reach those of another group.

use ring::hmac;
use splitrail_config::model::CacheGroup;

/// Bytes of a derived salt; it is written with twice as many hexadecimal digits.
const SALT_BYTES: usize = 16;

/// What the salts of a router's tenants are derived with.
#[derive(Clone)]
pub struct SaltKey(hmac::Key);

impl SaltKey {
    /// The key of a configured secret. Without a secret, the key is the same everywhere: salts still
    /// differ between groups, but can be computed by everyone who knows the name of a group.
    pub fn new(secret: Option<&str>) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret.unwrap_or("splitrail").as_bytes()))
    }

    /// Whether both keys derive the same salts.
    pub fn derives_as(&self, other: &Self) -> bool {
        let derived = |key: &Self| key.derive(&CacheGroup::Own, "", None);
        derived(self) == derived(other)
    }

    /// The salt of a request of a tenant: 32 hexadecimal digits.
    ///
    /// It is a keyed hash (HMAC-SHA256) of the group and of the client's own salt. The parts are
    /// separated by their lengths, so that no two pairs have the same input.
    pub fn derive(&self, group: &CacheGroup, tenant: &str, own: Option<&str>) -> String {
        let (kind, name) = match group {
            CacheGroup::Own => (0, tenant),
            CacheGroup::Shared(name) => (1, name.as_str()),
        };
        let mut hash = hmac::Context::with_key(&self.0);
        hash.update(&[kind]);
        hash.update(&(name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        if let Some(own) = own {
            hash.update(own.as_bytes());
        } else {
            // No text contains this byte: a client that sends an empty salt, or none, differs.
            hash.update(&[0xff]);
        }
        let mut salt = String::with_capacity(2 * SALT_BYTES);
        for byte in &hash.sign().as_ref()[..SALT_BYTES] {
            const DIGITS: &[u8; 16] = b"0123456789abcdef";
            salt.push(char::from(DIGITS[usize::from(byte >> 4)]));
            salt.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        salt
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn routers_with_the_same_secret_derive_the_same_salts() {
        let derive = |secret| SaltKey::new(secret).derive(&CacheGroup::Own, "acme", Some("x"));
        assert_eq!(derive(Some("secret")), derive(Some("secret")));
        assert_ne!(derive(Some("secret")), derive(Some("other")));
        assert_ne!(derive(Some("secret")), derive(None));
        assert_eq!(derive(None).len(), 2 * SALT_BYTES);
    }

    proptest! {
        /// Two requests have the same salt only if they are of the same group and the clients' own
        /// salts are equal, whatever texts clients and operators choose.
        #[test]
        fn salts_are_equal_only_within_a_group(
            groups in prop::collection::hash_set(("[a-c\0]{0,3}", any::<bool>()), 1..6),
            own in prop::collection::hash_set(prop::option::of("[a-c\0]{0,3}"), 1..6),
        ) {
            let key = SaltKey::new(Some("secret"));
            let mut salts = HashSet::new();
            for (name, is_shared) in &groups {
                let shared = CacheGroup::Shared(name.clone());
                let (group, tenant) =
                    if *is_shared { (&shared, "any") } else { (&CacheGroup::Own, name.as_str()) };
                for own in &own {
                    salts.insert(key.derive(group, tenant, own.as_deref()));
                }
            }
            prop_assert_eq!(salts.len(), groups.len() * own.len());
        }
    }
}
