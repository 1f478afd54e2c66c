//! The connection to one router: attaches, and attaches again after each end.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use splitrail_proto::v1::{Capabilities, Load};
use splitrail_settings::log_throttle::KeyedLogThrottle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::claims::Claims;
use super::status::{Stage, StatusEntry};
use super::stream_end::StreamEnd;
use super::{AttachConfig, Timing, call};
use crate::mirror::Mirror;

/// The parts of the shim that are reported to every router.
#[derive(Clone, Debug)]
pub(super) struct ShimState {
    /// Random, one per process.
    pub(super) instance_id: String,
    pub(super) secret: InstanceSecret,
    pub(super) mirror: Mirror,
    pub(super) capabilities: watch::Receiver<Capabilities>,
    pub(super) load: watch::Receiver<Load>,
    pub(super) leaving: CancellationToken,
}

/// Proves to a router that a new stream belongs to the same process as an earlier one.
#[derive(Clone)]
pub(super) struct InstanceSecret(pub(super) [u8; 32]);

impl fmt::Debug for InstanceSecret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("InstanceSecret(..)")
    }
}

/// One router at one address.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) config: Arc<AttachConfig>,
    pub(super) shim: ShimState,
    /// The configured address that was resolved to `address`.
    pub(super) name: Authority,
    pub(super) address: SocketAddr,
    /// The router's id from its last welcome; empty before the first.
    pub(super) router_id: String,
    pub(super) claims: Arc<Claims>,
    pub(super) entry: Arc<StatusEntry>,
}

impl Link {
    /// Attaches repeatedly while the address is `listed`. Once the address is no longer listed,
    /// returns at the end of the current stream.
    pub(super) async fn run(mut self, mut listed: watch::Receiver<bool>) {
        let mut backoff = Backoff::new(&self.config.timing);
        let mut log_throttle = KeyedLogThrottle::default();
        while *listed.borrow() {
            let mut attached_at = None;
            let end = call::attach(&mut self, &mut attached_at).await;
            self.report_end(&end, attached_at.is_some(), &mut log_throttle);
            let waiting = async {
                sleep(backoff.next(&end, attached_at)).await;
                if self.claims.is_claimed_by_other(&self.router_id, self.address) {
                    self.entry.update(|status| status.stage = Stage::Duplicate);
                }
                self.claims.wait_until_free(&self.router_id, self.address).await;
            };
            tokio::select! {
                () = waiting => {}
                _ = listed.wait_for(|listed| !listed) => {}
            }
        }
    }

    /// Updates the status and logs why the stream ended.
    fn report_end(&self, end: &StreamEnd, was_attached: bool, log_throttle: &mut KeyedLogThrottle) {
        let stage = if end.is_permanent() { Stage::Refused } else { Stage::Connecting };
        let error = end.to_string();
        self.entry.update(|status| {
            status.stage = stage;
            status.last_error = Some(error.clone());
        });
        let (router, name) = (self.address, &self.name);
        match (end, stage) {
            (StreamEnd::Superseded, _) => {}
            (_, Stage::Refused) if log_throttle.may_log("refused") => {
                tracing::error!(%router, %name, error, "a router cannot be attached to");
            }
            (_, Stage::Connecting) if was_attached && log_throttle.may_log("detached") => {
                tracing::warn!(%router, %name, error, "no longer attached to a router");
            }
            (_, Stage::Connecting) if !was_attached && log_throttle.may_log("connecting") => {
                tracing::warn!(%router, %name, error, "cannot attach to a router yet");
            }
            _ => tracing::debug!(%router, %name, error, "not attached to a router"),
        }
    }
}

/// The delays between attempts to attach.
#[derive(Debug)]
struct Backoff {
    timing: Timing,
    next: Duration,
}

impl Backoff {
    fn new(timing: &Timing) -> Self {
        Self { timing: timing.clone(), next: timing.retry_min }
    }

    /// Returns the next delay. The delay grows with each failure, and is randomised so that many
    /// shims do not reconnect at the same time.
    fn next(&mut self, end: &StreamEnd, attached_at: Option<Instant>) -> Duration {
        let Timing { retry_min, retry_max, refused_retry, .. } = self.timing;
        if attached_at.is_some_and(|at| at.elapsed() >= retry_max) {
            self.next = retry_min;
        }
        let delay = if end.is_permanent() { refused_retry } else { self.next };
        self.next = (self.next * 2).min(retry_max);
        delay.mul_f64(rand::random_range(0.5..1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconnect_delays_grow_to_a_limit_and_restart_after_a_long_stream() {
        let timing = Timing { retry_max: Duration::from_secs(1), ..Timing::default() };
        let mut backoff = Backoff::new(&timing);
        for millis in [100, 200, 400, 800, 1000, 1000] {
            let next = backoff.next(&StreamEnd::Closed, None);
            let most = Duration::from_millis(millis);
            assert!(next >= most / 2 && next <= most, "{next:?} of {most:?}");
        }
        let refused = backoff.next(&StreamEnd::NotWelcome, None);
        assert!(refused >= timing.refused_retry / 2);
        // A stream that ended at once does not shorten the delay.
        assert!(backoff.next(&StreamEnd::Closed, Some(Instant::now())) >= timing.retry_max / 2);
        let long_ago = Instant::now().checked_sub(timing.retry_max);
        if long_ago.is_some() {
            assert!(backoff.next(&StreamEnd::Closed, long_ago) <= timing.retry_min);
        }
    }
}
