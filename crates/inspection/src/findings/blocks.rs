//! The worker's KV blocks: their size, and the events about them.

use splitrail_config::BlockSize;
use splitrail_config::model::Role;
use splitrail_engine::identity::EventSource;

use super::list::{Findings, needs_events};
use crate::facts::{EventsFact, ReplayFact, SourcesFact, WorkerFacts};
use crate::finding::FindingKind;

pub(super) fn check(found: &mut Findings<'_>, worker: &WorkerFacts) {
    if let (BlockSize::Tokens(ours), Some(engines)) =
        (found.model.block_size, worker.engine.block_size)
        && ours != engines
    {
        let what = format!("the engine's block size is {engines}, the configuration says {ours}");
        let remedy = format!("set `block_size: {engines}` or `auto`");
        found.add_with(FindingKind::BlockSizeDiffers, what, remedy);
    }
    // A shim reports the events of its engine.
    if worker.config.shim || !needs_events(found.model) {
        return;
    }
    match worker.config.written_events() {
        Some(address) => configured(found, worker, address),
        None if worker.config.asks_for_events() => unknown(found, worker),
        // The operator wants none.
        None => {}
    }
}

/// The engine was asked where it publishes, and names nothing that can be followed.
fn unknown(found: &mut Findings<'_>, worker: &WorkerFacts) {
    if worker.engine.sources == SourcesFact::NotTcp {
        return found.add(FindingKind::KvEventsOff, NOT_TCP.to_owned());
    }
    if !found.model.connector.serves_alone() && worker.config.role == Role::Decode {
        // Without a flag, a decode engine of SGLang's pairs has no prefix cache.
        return;
    }
    let what = "the engine tells of no KV events: the router does not know what this worker holds";
    found.add(FindingKind::KvEventsUnused, what.to_owned());
}

/// What is said of an engine whose publisher cannot be reached over a network.
const NOT_TCP: &str = "the engine publishes KV events at an address that is not TCP";

fn configured(found: &mut Findings<'_>, worker: &WorkerFacts, address: &str) {
    let sources = &worker.engine.sources;
    let own = match sources {
        SourcesFact::Listed(sources) => sources.first(),
        _ => None,
    };
    match &worker.events {
        EventsFact::Arrived | EventsFact::Connected => {}
        EventsFact::Untested => {}
        _ if *sources == SourcesFact::None => {
            let what = "the engine publishes no KV events, although `kv_events` is set".to_owned();
            return found.add(FindingKind::KvEventsOff, what);
        }
        _ if *sources == SourcesFact::NotTcp => {
            return found.add(FindingKind::KvEventsOff, NOT_TCP.to_owned());
        }
        EventsFact::Unreachable(cause) => {
            let what = format!("no KV events from {address}: {cause}");
            match own.map(|own| own.events.to_string()).filter(|own| own != address) {
                Some(own) => {
                    let remedy = format!("set `kv_events: \"{own}\"`, where the engine publishes");
                    found.add_with(FindingKind::KvEventsUnreachable, what, remedy);
                }
                None => found.add(FindingKind::KvEventsUnreachable, what),
            }
        }
        EventsFact::Silent => {
            let what = format!(
                "{address} accepts the connection, and no KV event came after the engine had \
                 served a prompt"
            );
            found.add(FindingKind::KvEventsSilent, what);
        }
        EventsFact::OfAnother => {
            let what =
                format!("the KV events from {address} are not those of this engine's prompts");
            found.add(FindingKind::KvEventsOfAnother, what);
        }
        EventsFact::Undecodable(cause) => {
            found.add(
                FindingKind::KvEventsUnreadable,
                format!("the KV events from {address}: {cause}"),
            );
        }
    }
    replay(found, worker, own);
}

/// `own` is where the engine says that it publishes.
fn replay(found: &mut Findings<'_>, worker: &WorkerFacts, own: Option<&EventSource>) {
    match (&worker.config.kv_replay, &worker.replay) {
        (Some(address), ReplayFact::Fails(cause)) => {
            let what = format!("no replay of KV events from {address}: {cause}");
            let own = own.map(|own| own.replay.as_ref());
            match own {
                Some(Some(own)) if own.to_string() != *address => {
                    let remedy = format!("set `kv_replay: \"{own}\"`, where the engine replays");
                    found.add_with(FindingKind::KvReplayFails, what, remedy);
                }
                Some(None) => {
                    let remedy = FindingKind::KvReplayOff.remedy().to_owned();
                    found.add_with(FindingKind::KvReplayFails, what, remedy);
                }
                _ => found.add(FindingKind::KvReplayFails, what),
            }
        }
        (None, _) => {
            let what = "no `kv_replay` is set: what this worker held before a gap is forgotten";
            match own.and_then(|own| own.replay.as_ref()) {
                Some(own) => {
                    let remedy = format!("set `kv_replay: \"{own}\"`");
                    found.add_with(FindingKind::KvReplayOff, what.to_owned(), remedy);
                }
                None => found.add(FindingKind::KvReplayOff, what.to_owned()),
            }
        }
        _ => {}
    }
}
