//! The result of a check as JSON. Its members are documented in docs/cli.md and stay.

use serde_json::{Value, json};
use splitrail_config::model::Connector;
use splitrail_config::{Model, Problem};
use splitrail_inspection::facts::{
    EventsFact, FetchOutcome, Reachability, ReplayFact, TokensFact, TrialFact,
};
use splitrail_inspection::{Finding, Origin, WorkerFacts, confirmations};

use super::{CheckedConfig, InspectedModel};

/// Renders everything that is known.
pub(super) fn render(checked: &CheckedConfig) -> Value {
    let mut problems: Vec<Value> = match &checked.loaded {
        Ok(loaded) => loaded.warnings.iter().map(|problem| located(problem, "warning")).collect(),
        Err(why) => why.as_slice().iter().map(|problem| located(problem, "fault")).collect(),
    };
    let unplaced = |severity: &str, message: &String| json!({"severity": severity, "line": null, "column": null, "message": message, "hint": null});
    problems.extend(checked.notes.iter().map(|note| unplaced("warning", note)));
    let derived = checked.loaded.iter().flat_map(|loaded| &loaded.notes);
    problems.extend(derived.map(|note| unplaced("note", note)));
    problems.extend(checked.unusable.iter().map(|why| unplaced("fault", why)));
    let models =
        checked.models.as_ref().zip(checked.loaded.as_ref().ok()).map(|(models, loaded)| {
            let pairs = models.iter().zip(&loaded.config.models);
            pairs.map(|(inspected, model)| of_model(inspected, model)).collect::<Vec<_>>()
        });
    json!({
        "file": checked.file,
        "ok": checked.code() == 0,
        "exit_code": checked.code(),
        "faults": checked.faults(),
        "warnings": checked.all_warnings(),
        "problems": problems,
        "models": models,
    })
}

fn located(problem: &Problem, severity: &str) -> Value {
    json!({
        "severity": severity, "line": problem.line, "column": problem.column,
        "message": problem.message, "hint": problem.hint,
    })
}

fn of_model(inspected: &InspectedModel, model: &Model) -> Value {
    let of = |id: Option<&str>| -> Vec<&Finding> {
        let findings = inspected.findings.iter();
        findings.filter(|finding| finding.worker.as_deref() == id).collect()
    };
    let workers = inspected.facts.workers.iter();
    let workers = workers.map(|worker| of_worker(worker, model, &of(Some(&worker.config.id))));
    json!({"name": model.name, "workers": workers.collect::<Vec<_>>(), "findings": of(None)})
}

fn of_worker(worker: &WorkerFacts, model: &Model, findings: &[&Finding]) -> Value {
    let WorkerFacts { config, engine, .. } = worker;
    let source = match &worker.origin {
        Origin::Listed => None,
        Origin::Found(name) => Some(name),
    };
    let models: Vec<&str> = engine.models.iter().map(|model| model.name.as_str()).collect();
    let served = engine.model(&model.name);
    let fetched = worker.fetched.iter().map(|fetched| {
        let works = match fetched.outcome {
            FetchOutcome::Transferred | FetchOutcome::Served => Some(true),
            FetchOutcome::Untested(_) => None,
            _ => Some(false),
        };
        json!({"from": fetched.from, "works": works})
    });
    json!({
        "id": config.id, "role": config.role.name(), "url": config.url, "source": source,
        "facts": {
            "reached": worker.reach == Reachability::Answers,
            "version": engine.version,
            "models": models,
            "block_size": engine.block_size,
            "context_tokens": served.and_then(|model| model.context_tokens),
            "data_parallel_ranks": engine.ranks,
            "clock_ahead_s": worker.clock_ahead_s,
            "connector": worker.shown_connector(model.connector).map(Connector::name),
            "kv_events": config.written_events(),
            "kv_replay": config.kv_replay,
            "kv_events_arrive": arrives(&worker.events),
            "kv_events_replayed": replays(&worker.replay),
            "reports_cached_tokens": reports(&worker.trial),
            "supports_cache_hit_threshold": worker.supports_cache_hit_threshold,
            "chat_tokens_agree": agrees(&worker.chat_tokens),
            "text_tokens_agree": agrees(&worker.text_tokens),
            "hand_offs": fetched.collect::<Vec<_>>(),
        },
        "confirmations": confirmations(model, worker),
        "findings": findings,
    })
}

fn arrives(fact: &EventsFact) -> Option<bool> {
    match fact {
        EventsFact::Untested | EventsFact::Connected => None,
        EventsFact::Arrived => Some(true),
        _ => Some(false),
    }
}

fn replays(fact: &ReplayFact) -> Option<bool> {
    match fact {
        ReplayFact::Untested => None,
        ReplayFact::Answers => Some(true),
        ReplayFact::Fails(_) => Some(false),
    }
}

fn reports(fact: &TrialFact) -> Option<bool> {
    match fact {
        TrialFact::Served { reports_cached_tokens } => Some(*reports_cached_tokens),
        _ => None,
    }
}

fn agrees(fact: &TokensFact) -> Option<bool> {
    match fact {
        TokensFact::Agree(_) => Some(true),
        TokensFact::Differ(_) => Some(false),
        _ => None,
    }
}
