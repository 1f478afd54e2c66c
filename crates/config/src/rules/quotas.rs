//! Rules about limits that routers share.

use std::time::Duration;

use super::events::is_plane;
use crate::model::Quotas;
use crate::value::typed;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;

/// Minimum lease of a share, of which a quarter passes between renewals.
const LEASE_MIN: Duration = Duration::from_secs(20);
/// Maximum lease of a share, for which a failed router's share is of no use.
const LEASE_MAX: Duration = Duration::from_secs(3600);

/// Reports every violation of a rule about `quotas`.
pub(super) fn check(root: &Node, report: &mut ProblemReport) {
    let Some(section) = root.get("quotas") else { return };
    let Some(Quotas::Nats(quotas)) = typed::<Quotas>(root, "quotas") else { return };
    if !is_plane(root) {
        let at = section.get("kind").unwrap_or(section).at;
        let message = "`quotas.kind: nats` needs a broker, and `events` names none".to_owned();
        let hint = "add `events: { kind: nats, servers: [...] }`, or write `quotas: { kind: local, share: 0.5 }`";
        report.error(at, message, hint);
    }
    let at = section.get("lease").unwrap_or(section).at;
    if quotas.lease < LEASE_MIN {
        let message = "`quotas.lease` is too short".to_owned();
        report.error(at, message, "at least `20s`: shares are renewed four times in a lease");
    } else if quotas.lease > LEASE_MAX {
        let message = "`quotas.lease` is too long".to_owned();
        report.error(at, message, "at most `1h`: a failed router's share is not used meanwhile");
    }
}
