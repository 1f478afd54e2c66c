//! Who may use the router: credentials, tenants and roles, from outside.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "access/admin.rs"]
mod admin;
#[path = "access/certificates.rs"]
mod certificates;
#[path = "access/floods.rs"]
mod floods;
#[path = "access/isolation.rs"]
mod isolation;
#[path = "access/issuer.rs"]
mod issuer;
#[path = "access/issuers.rs"]
mod issuers;
#[path = "access/keys.rs"]
mod keys;
#[path = "access/limits.rs"]
mod limits;
#[path = "access/secrets.rs"]
mod secrets;
#[path = "access/support.rs"]
mod support;
#[path = "access/tenants.rs"]
mod tenants;
#[path = "access/tokens.rs"]
mod tokens;

/// A router with TLS; some of its tools are for the suite `tls` alone.
#[path = "tls/support.rs"]
#[allow(dead_code)]
mod secured;
