//! The known addresses of a name, and how long they are kept.

use std::net::IpAddr;
use std::time::{Duration, Instant};

/// What became of a lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// At least one address.
    Addresses(Vec<IpAddr>),
    /// DNS says that there is no such name, or no address that counts.
    NoSuchName,
    /// DNS says nothing.
    None,
}

/// What has been told of a name.
#[derive(Debug, Default)]
pub(super) struct Known {
    reported: Option<Vec<IpAddr>>,
    /// Since when DNS has said that there is no address, where others were told.
    absent_since: Option<Instant>,
}

impl Known {
    /// Whether anything has been told yet.
    pub(super) fn is_told(&self) -> bool {
        self.reported.is_some()
    }

    /// Takes an answer; returns the addresses if they are to be reported: at first, and when they
    /// have changed. A name that has lost its addresses keeps them for `keep`: a resolver that
    /// has just started, or a Service that is made anew, says the same for a moment.
    pub(super) fn take(
        &mut self,
        answer: Answer,
        now: Instant,
        keep: Duration,
    ) -> Option<Vec<IpAddr>> {
        let addresses = match answer {
            Answer::Addresses(addresses) => {
                self.absent_since = None;
                addresses
            }
            Answer::NoSuchName => {
                let has_reported =
                    self.reported.as_ref().is_some_and(|addresses| !addresses.is_empty());
                let since = *self.absent_since.get_or_insert(now);
                if has_reported && now.saturating_duration_since(since) < keep {
                    return None;
                }
                Vec::new()
            }
            Answer::None => return None,
        };
        if self.reported.as_ref() == Some(&addresses) {
            return None;
        }
        self.reported = Some(addresses.clone());
        Some(addresses)
    }
}
