//! What an engine reports about itself without computation.

use std::time::SystemTime;

use splitrail_engine::identity::{
    EVENT_SOURCES_PATH, HEALTH_PATH, METRICS_PATH, MODELS_PATH, SourcesError, VERSION_PATH,
    event_sources, served_models, version,
};
use splitrail_engine::load::EngineLoad;
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
    let (models, health, version, metrics, sources) = tokio::join!(
        asker.get(MODELS_PATH, REPORT_MAX_BYTES),
        asker.get(HEALTH_PATH, REPORT_MAX_BYTES),
        asker.get(VERSION_PATH, REPORT_MAX_BYTES),
        asker.get(METRICS_PATH, METRICS_MAX_BYTES),
        asker.get(EVENT_SOURCES_PATH, REPORT_MAX_BYTES),
    );
    // The clock is compared right after the replies; each of them took a part of a second.
    let now = SystemTime::now();
    let dates = [&models, &health, &version].into_iter();
    let date = dates.filter_map(|reply| reply.as_ref().ok()?.date).next();
    facts.clock_ahead_s = date.map(|date| ahead_s(date, now));
    facts.reach = reach(&models, &version);
    facts.engine = engine_report(asker, &models, &health, &version, &metrics, &sources);
}

/// Whether an engine answers, from the list of its models and its version.
fn reach(models: &ReplyResult, version: &ReplyResult) -> Reachability {
    let reply = match models {
        Ok(reply) => reply,
        Err(why) => return unreached(why),
    };
    match reply.status {
        // vLLM and SGLang answer with 401 to a wrong key, and list their models to everyone else.
        403 => Reachability::Forbidden,
        401 => Reachability::KeyRefused(reply.status),
        200 if text(models).and_then(|text| served_models(&text)).is_some() => {
            Reachability::Answers
        }
        // An engine that is about to stop, or a proxy without one.
        _ if text(version).and_then(|text| self::version(&text)).is_some() => Reachability::Answers,
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
    let mut listed = text(models).and_then(|text| served_models(&text)).unwrap_or_default();
    for model in &mut listed {
        model.name = shortened(&model.name);
    }
    let load = text(metrics).map(|text| EngineLoad::parse(&text));
    EngineReport {
        health: health.as_ref().ok().map(|reply| reply.status),
        version: text(version).and_then(|text| self::version(&text)),
        models: listed,
        block_size: load.as_ref().and_then(|load| load.block_size),
        ranks: load.as_ref().and_then(|load| load.ranks),
        kv_dtype: load.as_ref().and_then(|load| load.kv_dtype.clone()),
        kv_layout: load.as_ref().and_then(|load| load.kv_layout.clone()),
        has_nixl: load.as_ref().map(|load| load.has_nixl),
        sources: match text(sources).map(|text| event_sources(&text, asker.subject.host())) {
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
