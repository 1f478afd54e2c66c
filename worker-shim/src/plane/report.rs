//! Signs of life: how busy the engine is, up to where its changes are in the stream, and now
//! and then who it is.

use std::time::Duration;

use prost::Message as _;
use splitrail_event_plane::names;
use splitrail_proto::v1::{Bye, Load, PlaneReport};
use tokio::time::Instant;

use super::Plane;
use crate::attach::LoadReporter;

/// Between two times that it says who it is, unless somebody asks.
const HELLO: Duration = Duration::from_secs(1);
/// How long the broker may take nothing before what is in the stream is not said to be all.
const STUCK: Duration = Duration::from_secs(5);

/// Reports. Never ends.
pub(super) async fn run(plane: &Plane) {
    let mut load = LoadReporter::new(plane.load.clone());
    load.set_interval(plane.terms.load_interval_ms);
    let mut capabilities = plane.capabilities.clone();
    let mut hello_at = Instant::now();
    let mut is_leaving = false;
    let mut knows_more = true;
    loop {
        tokio::select! {
            () = load.wait() => {}
            () = plane.asked.notified() => hello_at = Instant::now(),
            () = plane.leaving.cancelled(), if !is_leaving => is_leaving = true,
            changed = capabilities.changed(), if knows_more => {
                knows_more = changed.is_ok();
                hello_at = Instant::now();
            }
        }
        if !plane.broker.is_connected() {
            // What is old when it arrives is of no use. Nothing is due for a while, then.
            load.due();
            continue;
        }
        let says_hello = Instant::now() >= hello_at;
        if says_hello {
            hello_at = Instant::now() + HELLO;
        }
        let report = plane.report(load.due(), says_hello, is_leaving);
        let (model, worker) = plane.names();
        let sent = plane
            .broker
            .client
            .publish(names::load(model, worker), report.encode_to_vec().into())
            .await;
        if let Err(error) = sent {
            plane.failed("report", &error);
        }
    }
}

impl Plane {
    fn report(&self, load: Option<Load>, says_hello: bool, is_leaving: bool) -> PlaneReport {
        let generation = self.mirror.id().0;
        let (mirror_id, sequence) = {
            let published = self.published.borrow();
            let is_stuck = published.stuck_since.is_some_and(|since| since.elapsed() >= STUCK);
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
            hello: says_hello.then(|| self.hello()),
            terms: says_hello.then(|| self.terms.clone()),
            bye: is_leaving.then(|| Bye { reason: "stopping".to_owned(), grace_ms }),
        }
    }
}
