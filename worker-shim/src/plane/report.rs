//! Regular reports: the engine's load, the position of the published changes, and periodically
//! the worker's identity.

use std::time::Duration;

use prost::Message as _;
use splitrail_event_plane::names;
use splitrail_proto::v1::{Bye, Load, PlaneReport};
use tokio::time::Instant;

use super::session::PlaneSession;
use crate::attach::LoadReporter;

/// Interval between two reports that include the worker's identity, unless a router asks.
const HELLO_INTERVAL: Duration = Duration::from_secs(1);
/// Time without an acknowledgement after which reports no longer name a position, because
/// the stream may be incomplete.
const STUCK_AFTER: Duration = Duration::from_secs(5);

/// Publishes reports. Never ends.
pub(super) async fn run(plane: &PlaneSession) {
    let mut load = LoadReporter::new(plane.load.clone());
    load.set_interval(plane.terms.load_interval_ms);
    let mut capabilities = plane.capabilities.clone();
    let mut hello_at = Instant::now();
    let mut is_leaving = false;
    let mut capabilities_can_change = true;
    loop {
        tokio::select! {
            () = load.wait() => {}
            () = plane.hello_requested.notified() => hello_at = Instant::now(),
            () = plane.leaving.cancelled(), if !is_leaving => is_leaving = true,
            changed = capabilities.changed(), if capabilities_can_change => {
                capabilities_can_change = changed.is_ok();
                hello_at = Instant::now();
            }
        }
        if !plane.broker.is_connected() {
            // A report that is delivered late is of no use. It counts as sent.
            load.due();
            continue;
        }
        let includes_hello = Instant::now() >= hello_at;
        if includes_hello {
            hello_at = Instant::now() + HELLO_INTERVAL;
        }
        let report = plane.report(load.due(), includes_hello, is_leaving);
        let (model, worker) = plane.model_and_worker();
        let sent = plane
            .broker
            .client
            .publish(names::load(model, worker), report.encode_to_vec().into())
            .await;
        if let Err(error) = sent {
            plane.record_failure("report", &error);
        }
    }
}

impl PlaneSession {
    fn report(&self, load: Option<Load>, includes_hello: bool, is_leaving: bool) -> PlaneReport {
        let generation = self.mirror.id().0;
        let (mirror_id, sequence) = {
            let published = self.published.borrow();
            let is_stuck =
                published.stuck_since.is_some_and(|since| since.elapsed() >= STUCK_AFTER);
            let position = published
                .position
                .filter(|position| position.generation == generation && !is_stuck);
            (published.mirror_id.clone(), position.map(|position| position.sequence))
        };
        let grace_ms = u64::try_from(self.config.grace.as_millis()).unwrap_or(u64::MAX);
        PlaneReport {
            worker_id: self.config.worker_id.clone(),
            instance_id: self.instance_id.clone(),
            mirror_id,
            sequence,
            load,
            hello: includes_hello.then(|| self.hello()),
            terms: includes_hello.then(|| self.terms.clone()),
            bye: is_leaving.then(|| Bye { reason: "stopping".to_owned(), grace_ms }),
        }
    }
}
