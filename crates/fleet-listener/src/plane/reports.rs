//! Receives the heartbeats of workers, which carry their load, and starts a relay for each worker
//! that sends them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::async_nats::{Message, Subscriber};
use splitrail_event_plane::names;
use splitrail_proto::v1;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::model::PlaneModel;
use super::relay;
use super::slots::{LatestReports, Slot};

/// Interval at which it is checked which workers need a relay.
const RELAY_CHECK: Duration = Duration::from_millis(100);
/// Minimum time after its last heartbeat for which a process keeps others from reporting for its
/// worker.
const OCCUPIED: Duration = Duration::from_secs(3);
/// The same time in multiples of `fleet.load_interval`; the longer one applies.
const OCCUPIED_INTERVALS: u32 = 3;
/// Maximum size of a report in bytes: about twice that of the longest hello that is valid.
const REPORT_MAX_BYTES: usize = 8 << 10;
/// Pause before subscribing again.
const PAUSE: Duration = Duration::from_secs(1);

/// Receives heartbeats. Never ends.
pub(super) async fn run(model: &Arc<PlaneModel>) {
    let mut relays = JoinSet::new();
    loop {
        match model.broker.client.subscribe(names::load_of_all(&model.name)).await {
            Ok(reports) => listen(model, reports, &mut relays).await,
            Err(error) => tracing::warn!(%error, "cannot subscribe to the reports of shims"),
        }
        sleep(PAUSE).await;
    }
}

/// Receives heartbeats until the subscription ends.
async fn listen(model: &Arc<PlaneModel>, mut reports: Subscriber, relays: &mut JoinSet<()>) {
    let mut look = interval(RELAY_CHECK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut connected = model.broker.connected.clone();
    connected.mark_changed();
    loop {
        tokio::select! {
            report = reports.next() => match report {
                Some(report) => take_report(model, &report),
                None => return,
            },
            // After a connection is made, all shims are asked to report immediately instead of at
            // their next interval.
            Ok(()) = connected.changed() => {
                let is_connected = *connected.borrow_and_update();
                if is_connected {
                    model.ask(names::ask_all(&model.name), "who").await;
                }
            }
            _ = look.tick() => {
                while let Some(ended) = relays.try_join_next() {
                    if ended.is_err() {
                        tracing::error!(model = model.name, "a relay panicked and is restarted");
                    }
                }
                model.slots.forget(Instant::now());
                for slot in model.slots.all() {
                    if wants_relay(model, &slot) {
                        let mark = slot.relay(relay::PAUSE_AFTER_REFUSAL);
                        relays.spawn(relay::serve(Arc::clone(model), mark));
                    }
                }
            }
        }
    }
}

fn wants_relay(model: &PlaneModel, slot: &Slot) -> bool {
    let latest = slot.latest.borrow();
    latest.hello.is_some()
        && latest.terms.is_some()
        && latest.at.elapsed() < model.config.disconnect_grace
        && slot.may_be_relayed(Instant::now())
}

fn take_report(model: &PlaneModel, message: &Message) {
    let token = names::last(&message.subject);
    // The last report of each worker is kept.
    let payload = Some(&message.payload).filter(|payload| payload.len() <= REPORT_MAX_BYTES);
    let Some(Ok(report)) = payload.map(|payload| v1::PlaneReport::decode(&payload[..])) else {
        model.count_refused("nonsense");
        return;
    };
    let is_from_sender = |hello: &v1::Hello| {
        hello.worker_id == report.worker_id && hello.instance_id == report.instance_id
    };
    let is_for_subject = names::token(&report.worker_id) == token;
    if !is_for_subject || !report.hello.as_ref().is_none_or(is_from_sender) {
        model.count_refused("spoofed");
        return;
    }
    let Some(slot) = model.slots.slot(token) else {
        model.count_refused("full");
        return;
    };
    model.count_message("report");
    let occupied = OCCUPIED.max(OCCUPIED_INTERVALS * model.context.config.load_interval);
    let mut is_taken = false;
    slot.latest.send_if_modified(|latest| {
        is_taken = accept_report(latest, report, Instant::now(), occupied);
        is_taken
    });
    if !is_taken {
        model.count_refused("occupied");
    }
}

/// Stores a report, and returns whether it was accepted. A report of another process, or with
/// another address, is refused until the known process has been silent for `occupied`; then the new
/// process must introduce itself with a hello.
fn accept_report(
    latest: &mut LatestReports,
    report: v1::PlaneReport,
    now: Instant,
    occupied: Duration,
) -> bool {
    let is_other = latest.instance_id != report.instance_id;
    if let Some(known) = &latest.hello {
        let is_silent = now.saturating_duration_since(latest.at) >= occupied;
        let may_change = is_silent && report.hello.is_some();
        let is_elsewhere = report.hello.as_ref().is_some_and(|hello| hello.url != known.url);
        if (is_other || is_elsewhere) && !may_change {
            return false;
        }
    }
    if is_other {
        (latest.hello, latest.terms, latest.load, latest.bye) = (None, None, None, None);
        latest.instance_id.clone_from(&report.instance_id);
    }
    let number = latest.load.map_or(0, |(number, _)| number);
    latest.at = now;
    latest.mirror_id = report.mirror_id;
    latest.sequence = report.sequence;
    latest.load = report.load.map(|load| (number + 1, load)).or(latest.load);
    latest.hello = report.hello.or(latest.hello.take());
    latest.terms = report.terms.or(latest.terms.take());
    latest.bye = report.bye.or(latest.bye.take());
    true
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::slots::Slots;
    use super::*;

    fn report(instance_id: &str, url: Option<&str>) -> v1::PlaneReport {
        let hello = url.map(|url| v1::Hello { url: url.to_owned(), ..v1::Hello::default() });
        let load = Some(v1::Load::default());
        let instance_id = instance_id.to_owned();
        v1::PlaneReport { instance_id, hello, load, ..v1::PlaneReport::default() }
    }

    #[test]
    fn one_process_reports_for_a_worker_until_it_is_silent() {
        let slot = Slots::new(1).slot("w").unwrap();
        let mut latest = slot.latest.borrow().clone();
        let now = Instant::now();
        let note =
            |latest: &mut LatestReports, report, now| accept_report(latest, report, now, OCCUPIED);
        assert!(note(&mut latest, report("first", Some("http://a:1")), now));
        // No other process replaces it, whatever its address, and it cannot move to another
        // address.
        for (instance_id, url) in [
            ("second", None),
            ("second", Some("http://a:1")),
            ("second", Some("http://b:1")),
            ("first", Some("http://b:1")),
        ] {
            let bye = Some(v1::Bye::default());
            let other = v1::PlaneReport { bye, ..report(instance_id, url) };
            assert!(!note(&mut latest, other, now), "{instance_id} {url:?}");
        }
        assert!(latest.bye.is_none());
        assert!(note(&mut latest, report("first", None), now));
        assert_eq!(latest.load.map(|(number, _)| number), Some(2));
        assert_eq!(latest.hello.as_ref().map(|hello| hello.url.as_str()), Some("http://a:1"));
        // Once the process is silent, one that sends a hello replaces it.
        let later = now + OCCUPIED;
        assert!(!note(&mut latest, report("other", None), later));
        assert!(note(&mut latest, report("other", Some("http://b:1")), later));
        assert_eq!(latest.instance_id, "other");
    }
}
