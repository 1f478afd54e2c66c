//! One router: attach, and attach again.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use splitrail_proto::v1::{Capabilities, Load};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::claims::Claims;
use super::refusal::Ended;
use super::status::{Entry, Stage};
use super::{Address, Config, Timing, call};
use crate::mirror::{Mirror, Quiet};

/// What all routers are told.
#[derive(Clone, Debug)]
pub(super) struct Told {
    /// Made for each process.
    pub(super) instance_id: String,
    pub(super) secret: Secret,
    pub(super) mirror: Mirror,
    pub(super) capabilities: watch::Receiver<Capabilities>,
    pub(super) load: watch::Receiver<Load>,
    pub(super) leaving: CancellationToken,
}

/// Shown to routers, so that a stream of another process does not take this one's place.
#[derive(Clone)]
pub(super) struct Secret(pub(super) [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Secret(..)")
    }
}

/// One router, at one address.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) config: Arc<Config>,
    pub(super) told: Told,
    /// The configured address that it was found under.
    pub(super) name: Address,
    pub(super) address: SocketAddr,
    /// Who it said it was; empty until then.
    pub(super) router_id: String,
    pub(super) claims: Arc<Claims>,
    pub(super) entry: Arc<Entry>,
}

impl Link {
    /// Attaches again and again, as long as the address is `listed`; once it is not, until
    /// the stream ends.
    pub(super) async fn run(mut self, mut listed: watch::Receiver<bool>) {
        let mut pause = Pause::new(&self.config.timing);
        let mut quiet = Quiet::default();
        while *listed.borrow() {
            let mut attached_at = None;
            let ended = call::attach(&mut self, &mut attached_at).await;
            self.say(&ended, attached_at.is_some(), &mut quiet);
            let waiting = async {
                sleep(pause.next(&ended, attached_at)).await;
                if self.claims.is_other(&self.router_id, self.address) {
                    self.entry.update(|status| status.stage = Stage::Duplicate);
                }
                self.claims.until_free(&self.router_id, self.address).await;
            };
            tokio::select! {
                () = waiting => {}
                _ = listed.wait_for(|listed| !listed) => {}
            }
        }
    }

    fn say(&self, ended: &Ended, was_attached: bool, quiet: &mut Quiet) {
        let stage = if ended.is_for_good() { Stage::Refused } else { Stage::Connecting };
        let error = ended.to_string();
        self.entry.update(|status| {
            status.stage = stage;
            status.last_error = Some(error.clone());
        });
        let (router, name) = (self.address, &self.name);
        match (ended, stage) {
            (Ended::Superseded, _) => {}
            (_, Stage::Refused) if quiet.may_log("refused") => {
                tracing::error!(%router, %name, error, "a router cannot be attached to");
            }
            (_, Stage::Connecting) if was_attached && quiet.may_log("detached") => {
                tracing::warn!(%router, %name, error, "no longer attached to a router");
            }
            (_, Stage::Connecting) if !was_attached && quiet.may_log("connecting") => {
                tracing::warn!(%router, %name, error, "cannot attach to a router yet");
            }
            _ => tracing::debug!(%router, %name, error, "not attached to a router"),
        }
    }
}

/// Pauses between attempts.
#[derive(Debug)]
struct Pause {
    timing: Timing,
    next: Duration,
}

impl Pause {
    fn new(timing: &Timing) -> Self {
        Self { timing: timing.clone(), next: timing.retry_min }
    }

    /// The next pause: longer with each failure, never twice the same, so that many shims
    /// do not come at once.
    fn next(&mut self, ended: &Ended, attached_at: Option<Instant>) -> Duration {
        let Timing { retry_min, retry_max, refused_retry, .. } = self.timing;
        if attached_at.is_some_and(|at| at.elapsed() >= retry_max) {
            self.next = retry_min;
        }
        let pause = if ended.is_for_good() { refused_retry } else { self.next };
        self.next = (self.next * 2).min(retry_max);
        pause.mul_f64(rand::random_range(0.5..1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_begin_anew_after_a_stream_that_lasted() {
        let timing = Timing { retry_max: Duration::from_secs(1), ..Timing::default() };
        let mut pause = Pause::new(&timing);
        for millis in [100, 200, 400, 800, 1000, 1000] {
            let next = pause.next(&Ended::Closed, None);
            let most = Duration::from_millis(millis);
            assert!(next >= most / 2 && next <= most, "{next:?} of {most:?}");
        }
        let refused = pause.next(&Ended::NotWelcome, None);
        assert!(refused >= timing.refused_retry / 2);
        // A router that takes whoever comes and drops them at once is not worth a hurry.
        assert!(pause.next(&Ended::Closed, Some(Instant::now())) >= timing.retry_max / 2);
        let long_ago = Instant::now().checked_sub(timing.retry_max);
        if long_ago.is_some() {
            assert!(pause.next(&Ended::Closed, long_ago) <= timing.retry_min);
        }
    }
}
