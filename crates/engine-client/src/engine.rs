//! An engine from the point of view of its client.

use std::fmt;

use http::uri::Authority;

use super::echoes::Echoes;

/// An engine to which requests are sent, and to which their results are reported.
pub trait Engine: Send + Sync {
    /// The worker's id, for messages.
    fn id(&self) -> &str;

    /// The name of its model, for logs; empty if it belongs to none.
    fn model(&self) -> &str;

    /// Host and port of its HTTP address.
    fn authority(&self) -> &Authority;

    /// A number that identifies the engine's process. It changes whenever a connection may lead to
    /// a new process.
    fn process(&self) -> u64;

    /// Whether its URL is `https`.
    fn uses_tls(&self) -> bool;

    /// Whether the host name must resolve to an address in the allowed networks.
    fn is_guarded(&self) -> bool;

    /// Whether requests reach the engine through a shim.
    fn has_shim(&self) -> bool;

    /// Which of its replies carry the id of their request.
    fn echoes(&self) -> &Echoes;

    /// Reports that the engine cannot be reached, and why.
    fn set_unreachable(&self, why: fmt::Arguments<'_>);

    /// Counts a request that was sent again because a kept connection had ended.
    fn count_resent(&self);

    /// Counts a reply to another request.
    fn count_foreign_reply(&self);

    /// Counts bytes that the engine, or a proxy in front of it, sent on a kept connection without a
    /// request.
    fn count_unsolicited(&self);
}
