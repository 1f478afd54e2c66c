//! Whether the engine can be reached at all.

use std::io::ErrorKind;

use super::list::Findings;
use crate::facts::{Reachability, WorkerFacts};
use crate::finding::FindingKind;

pub(super) fn check(found: &mut Findings<'_>, worker: &WorkerFacts) {
    let url = &worker.config.url;
    match &worker.reach {
        Reachability::Answers => {}
        Reachability::Connect { kind: ErrorKind::ConnectionRefused, .. } => {
            found.add(FindingKind::Refused, format!("nothing accepts connections at {url}"));
        }
        Reachability::Connect { kind: ErrorKind::TimedOut, .. } => {
            found.add(FindingKind::Late, format!("no connection to {url} in time"));
        }
        Reachability::Connect { cause, .. } => {
            found.add(
                FindingKind::Unreachable,
                format!("the network rejects connections to {url}: {cause}"),
            );
        }
        Reachability::Late => {
            found.add(
                FindingKind::Late,
                format!("{url} accepts connections and sends no reply in time"),
            );
        }
        Reachability::Name(cause) => {
            found.add(
                FindingKind::UnknownHost,
                format!("the host of {url} has no address: {cause}"),
            );
        }
        Reachability::Outside => {
            let what = format!("the address of {url} lies outside `fleet.networks`");
            found.add(FindingKind::OutsideNetworks, what);
        }
        Reachability::Tls(cause) => {
            found.add(FindingKind::TlsFailed, format!("TLS with {url} fails: {cause}"))
        }
        Reachability::NotHttp(cause) => {
            found.add(FindingKind::NotHttp, format!("no HTTP at {url}: {cause}"));
        }
        Reachability::Forbidden => {
            let what =
                format!("{url} refuses with status 403, which no engine does for /v1/models");
            found.add(FindingKind::Forbidden, what);
        }
        Reachability::KeyRefused(status) => {
            let what = format!("the engine at {url} refuses the request with status {status}");
            found.add(FindingKind::KeyRefused, what);
        }
        Reachability::NotAnEngine(status) => {
            let what = format!("{url} answers, but not as an engine (/v1/models: status {status})");
            found.add(FindingKind::NotAnEngine, what);
        }
        Reachability::TimeOver => {
            found.add(
                FindingKind::NotAsked,
                "the time was over before this worker was asked".to_owned(),
            );
        }
    }
}
