//! The known addresses of a name, and how long they are kept.

use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The result of a lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// At least one address.
    Addresses(Vec<IpAddr>),
    /// DNS says that there is no such name, or it has no usable address.
    NoSuchName,
    /// DNS did not answer.
    None,
}

/// The addresses of a name that were last reported.
#[derive(Debug, Default)]
pub(super) struct KnownAddresses {
    reported: Option<Vec<IpAddr>>,
    /// Since when DNS has said that the name has no address.
    absent_since: Option<Instant>,
}

impl KnownAddresses {
    /// Whether any list has been reported yet.
    pub(super) fn has_reported(&self) -> bool {
        self.reported.is_some()
    }

    /// Takes a reply. Returns the addresses if they are to be reported: the first time, and when
    /// they have changed. A name that has lost its addresses keeps them for `keep`, because a
    /// resolver that has just started and a Service that is being recreated briefly give the same
    /// answer.
    pub(super) fn take(
        &mut self,
        lookup: Lookup,
        now: Instant,
        keep: Duration,
    ) -> Option<Vec<IpAddr>> {
        let addresses = match lookup {
            Lookup::Addresses(addresses) => {
                self.absent_since = None;
                addresses
            }
            Lookup::NoSuchName => {
                let has_reported =
                    self.reported.as_ref().is_some_and(|addresses| !addresses.is_empty());
                let since = *self.absent_since.get_or_insert(now);
                if has_reported && now.saturating_duration_since(since) < keep {
                    return None;
                }
                Vec::new()
            }
            Lookup::None => return None,
        };
        if self.reported.as_ref() == Some(&addresses) {
            return None;
        }
        self.reported = Some(addresses.clone());
        Some(addresses)
    }
}
