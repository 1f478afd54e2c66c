//! Rules about the event plane.

use std::path::Path;
use std::time::Duration;

use crate::model::{Events, FleetConfig};
use crate::value::typed;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;

/// Whether shims can report over a broker.
pub(super) fn is_plane(root: &Node) -> bool {
    root.get("events").and_then(|events| events.get("kind")?.text()) == Some("nats")
}

/// Reports every violation of a rule about `events`.
pub(super) fn check(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let Some(section) = root.get("events").filter(|_| is_plane(root)) else { return };
    splitrail_event_plane::config::check(section, "events", base_dir, report);
    let Some(Events::Nats(events)) = typed::<Events>(root, "events") else { return };
    let fleet = root.get("fleet").map(|_| typed::<FleetConfig>(root, "fleet"));
    let Some(fleet) = fleet.unwrap_or_else(|| Some(FleetConfig::default())) else { return };
    if events.disconnect_grace < fleet.load_interval * 2 {
        let at = section.get("disconnect_grace").unwrap_or(section).at;
        let message =
            "`events.disconnect_grace` is less than two of `fleet.load_interval`".to_owned();
        report.error(at, message, "a single report that is lost would count: `10s` is usual");
    }
    if events.stream_max_age < Duration::from_secs(60) {
        let at = section.get("stream_max_age").unwrap_or(section).at;
        let message = "`events.stream_max_age` is too short".to_owned();
        report.error(at, message, "at least `60s`: a router must be able to start meanwhile");
    }
}
