//! Who may use the router and how much of it, from outside: credentials, tenants and roles, limits,
//! and TLS towards clients, operators and engines.
#![allow(missing_docs, clippy::unwrap_used)]

mod admin;
mod certificates;
mod engine_tls;
mod floods;
mod isolation;
mod issuer;
mod issuers;
mod keys;
mod leaving;
mod limits;
mod secrets;
mod tenants;
mod tls;
mod tokens;
