//! Who may use the router: the credentials of clients, the tenants that they stand for, what a
//! tenant may use, and in whose cache its prompts are.
//!
//! [`Access`] is built from the configuration and replaced as a whole by a reload. It identifies the
//! sender of each request ([`Access::client`], [`Access::operator`]). A request belongs to one
//! [`Tenant`] from then on.

mod access;
pub mod credential;
mod file_state;
mod issuer;
pub mod jwt;
pub mod keys;
pub mod limits;
pub mod places;
mod refusal;
pub mod salt;
pub mod tenant;

pub use access::{Access, AccessError, CertificateNames, Operator};
pub use places::TenantPlaces;
pub use refusal::Refusal;
pub use splitrail_config::keys::OperatorRole;
pub use tenant::Tenant;
