//! Findings from the report of a worker's shim.

use super::list::Findings;
use crate::facts::{ShimFact, ShimStatus, WorkerFacts};
use crate::finding::FindingKind;

pub(super) fn check(found: &mut Findings<'_>, worker: &WorkerFacts) {
    let status = match &worker.shim {
        ShimFact::Untested => return,
        ShimFact::Absent => {
            // An address that does not answer has a finding already.
            if worker.is_reached() {
                let what = format!("no shim answers at {}", worker.config.url);
                found.add(FindingKind::NotAShim, what);
            }
            return;
        }
        ShimFact::Reports(status) => status,
    };
    let ShimStatus { unready, current_ranks, ranks, live_routers, routers, .. } = status;
    let role = worker.config.role.name();
    if status.id != worker.config.id || status.role != role {
        let what = format!(
            "the shim is worker `{}` with the role {}, the configuration says `{}` with the role {role}",
            status.id, status.role, worker.config.id
        );
        found.add(FindingKind::ShimMismatch, what);
    }
    if let Some(why) = unready {
        found.add(FindingKind::ShimUnready, format!("the shim takes no work: {why}"));
    }
    if current_ranks < ranks || *ranks == 0 {
        let what = format!("the shim's mirror is current for {current_ranks} of {ranks} ranks");
        found.add(FindingKind::ShimMirrorStale, what);
    }
    if live_routers < routers {
        let error = status.router_error.as_ref().map(|error| format!(": {error}"));
        let what = format!(
            "the shim reports to {live_routers} of {routers} routers{}",
            error.unwrap_or_default()
        );
        found.add(FindingKind::ShimDetached, what);
    }
}
