//! What an engine reports about itself without computation.

use std::time::SystemTime;

use splitrail_engine::EngineKind;
use splitrail_engine::identity::SourcesError;
use splitrail_engine_client::{NoReply, WholeReply};

use super::{Asker, ahead_s, no_reply, shortened};
use crate::facts::{EngineReport, Reachability, SourcesFact, WorkerFacts};

/// Maximum size of `/metrics`, in bytes.
const METRICS_MAX_BYTES: usize = 4 << 20;
/// Maximum size of the other reports, in bytes.
const REPORT_MAX_BYTES: usize = 1 << 20;

type ReplyResult = Result<WholeReply, NoReply>;

/// Fills in what the engine reports, and whether it answers at all.
pub(crate) async fn ask(asker: &Asker<'_>, facts: &mut WorkerFacts) {
    let paths = asker.kind.paths();
    let (models, health, version, metrics, sources) = tokio::join!(
        asker.get(paths.models, REPORT_MAX_BYTES),
        asker.get(paths.liveness, REPORT_MAX_BYTES),
        asker.get(paths.version, REPORT_MAX_BYTES),
        asker.get(paths.metrics, METRICS_MAX_BYTES),
        asker.get(paths.event_sources, REPORT_MAX_BYTES),
    );
    // The clock is compared right after the replies; each of them took a part of a second.
    let now = SystemTime::now();
    let dates = [&models, &health, &version].into_iter();
    let date = dates.filter_map(|reply| reply.as_ref().ok()?.date).next();
    facts.clock_ahead_s = date.map(|date| ahead_s(date, now));
    facts.reach = reach(asker.kind, &models, &version);
    facts.engine = engine_report(asker, &models, &health, &version, &metrics, &sources);
}

/// Whether an engine answers, from the list of its models and its version.
fn reach(kind: EngineKind, models: &ReplyResult, version: &ReplyResult) -> Reachability {
    let reply = match models {
        Ok(reply) => reply,
        Err(why) => return unreached(why),
    };
    match reply.status {
        // vLLM and SGLang answer with 401 to a wrong key, and list their models to everyone else.
        403 => Reachability::Forbidden,
        401 => Reachability::KeyRefused(reply.status),
        200 if text(models).and_then(|text| kind.served_models(&text)).is_some() => {
            Reachability::Answers
        }
        // An engine that is about to stop, or a proxy without one.
        _ if text(version).and_then(|text| kind.version(&text)).is_some() => Reachability::Answers,
        status => Reachability::NotAnEngine(status),
    }
}

fn unreached(why: &NoReply) -> Reachability {
    match why {
        NoReply::Connect { kind, cause } => {
            Reachability::Connect { kind: *kind, cause: shortened(cause) }
        }
        NoReply::Name { cause } => Reachability::Name(shortened(cause)),
        NoReply::Outside => Reachability::Outside,
        NoReply::Tls { cause } => Reachability::Tls(shortened(cause)),
        NoReply::Closed | NoReply::NotHttp(_) | NoReply::TooLong => {
            Reachability::NotHttp(no_reply(why))
        }
        NoReply::Late => Reachability::Late,
    }
}

fn engine_report(
    asker: &Asker<'_>,
    models: &ReplyResult,
    health: &ReplyResult,
    version: &ReplyResult,
    metrics: &ReplyResult,
    sources: &ReplyResult,
) -> EngineReport {
    let kind = asker.kind;
    let mut listed = text(models).and_then(|text| kind.served_models(&text)).unwrap_or_default();
    for model in &mut listed {
        model.name = shortened(&model.name);
    }
    let load = text(metrics).map(|text| kind.load(text.as_bytes()));
    EngineReport {
        kind,
        health: health.as_ref().ok().map(|reply| reply.status),
        version: text(version).and_then(|text| kind.version(&text)),
        models: listed,
        block_size: load.as_ref().and_then(|load| load.block_size),
        ranks: load.as_ref().and_then(|load| load.ranks),
        kv_dtype: load.as_ref().and_then(|load| load.kv_dtype.clone()),
        kv_layout: load.as_ref().and_then(|load| load.kv_layout.clone()),
        has_nixl: load.as_ref().map(|load| load.has_nixl),
        sources: match text(sources).map(|text| kind.event_sources(&text, asker.subject.host())) {
            None | Some(Err(SourcesError::Shape)) => SourcesFact::Unknown,
            Some(Err(SourcesError::Endpoint { .. })) => SourcesFact::NotTcp,
            Some(Ok(listed)) if listed.is_empty() => SourcesFact::None,
            Some(Ok(listed)) => SourcesFact::Listed(listed),
        },
    }
}

/// The text of a reply with status 200.
fn text(answered: &ReplyResult) -> Option<String> {
    let reply = answered.as_ref().ok().filter(|reply| reply.status == 200)?;
    String::from_utf8(reply.body.to_vec()).ok()
}
