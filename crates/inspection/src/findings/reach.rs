//! Whether the engine can be reached at all.

use std::io::ErrorKind;

use super::list::Findings;
use crate::facts::{Reach, WorkerFacts};
use crate::finding::FindingKind;

pub(super) fn check(found: &mut Findings<'_>, worker: &WorkerFacts) {
    let url = &worker.config.url;
    match &worker.reach {
        Reach::Answers => {}
        Reach::Connect { kind: ErrorKind::ConnectionRefused, .. } => {
            found.add(FindingKind::Refused, format!("nothing accepts connections at {url}"));
        }
        Reach::Connect { kind: ErrorKind::TimedOut, .. } => {
            found.add(FindingKind::Late, format!("no connection to {url} in time"));
        }
        Reach::Connect { cause, .. } => {
            found.add(
                FindingKind::Unreachable,
                format!("the network rejects connections to {url}: {cause}"),
            );
        }
        Reach::Late => {
            found.add(
                FindingKind::Late,
                format!("{url} accepts connections and sends no reply in time"),
            );
        }
        Reach::Name(cause) => {
            found.add(
                FindingKind::UnknownHost,
                format!("the host of {url} has no address: {cause}"),
            );
        }
        Reach::Outside => {
            let what = format!("the address of {url} lies outside `fleet.networks`");
            found.add(FindingKind::OutsideNetworks, what);
        }
        Reach::Tls(cause) => {
            found.add(FindingKind::TlsFailed, format!("TLS with {url} fails: {cause}"))
        }
        Reach::NotHttp(cause) => {
            found.add(FindingKind::NotHttp, format!("no HTTP at {url}: {cause}"));
        }
        Reach::Forbidden => {
            let what =
                format!("{url} refuses with status 403, which no engine does for /v1/models");
            found.add(FindingKind::Forbidden, what);
        }
        Reach::KeyRefused(status) => {
            let what = format!("the engine at {url} refuses the request with status {status}");
            found.add(FindingKind::KeyRefused, what);
        }
        Reach::NotAnEngine(status) => {
            let what = format!("{url} answers, but not as an engine (/v1/models: status {status})");
            found.add(FindingKind::NotAnEngine, what);
        }
        Reach::TimeOver => {
            found.add(
                FindingKind::NotAsked,
                "the time was over before this worker was asked".to_owned(),
            );
        }
    }
}
