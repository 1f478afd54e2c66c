//! The lines of `splitrail check --connect` about what fits: one for each topic of a worker.

use splitrail_config::model::Model;

use crate::facts::{
    BootstrapFact, EventsFact, FetchOutcome, ReplayFact, ShimFact, ShimStatus, StagedFact,
    TokensFact, TrialFact, WorkerFacts,
};

/// What is right about a worker, one line for each topic. Contains texts of engines, whose control
/// characters are not escaped.
#[must_use]
pub fn confirmations(model: &Model, worker: &WorkerFacts) -> Vec<String> {
    if !worker.is_reached() {
        return Vec::new();
    }
    let lines =
        [engine(model, worker), events(worker), tokens(worker), usage(worker), gate(worker)];
    let mut lines: Vec<String> = lines.into_iter().flatten().collect();
    lines.extend(connector(model, worker));
    lines.extend(hand_offs(worker));
    lines.extend(shim(worker));
    lines
}

fn engine(model: &Model, worker: &WorkerFacts) -> Option<String> {
    let engine = &worker.engine;
    let served = engine.model(&model.name)?;
    let mut line = format!("the engine serves {}", served.name);
    if let Some(version) = &engine.version {
        line.push_str(&format!(", version {version}"));
    }
    if let Some(block_size) = engine.block_size {
        line.push_str(&format!(", block size {block_size}"));
    }
    if let Some(context_tokens) = served.context_tokens {
        line.push_str(&format!(", up to {context_tokens} tokens"));
    }
    if let Some(ranks) = engine.ranks.filter(|ranks| *ranks > 1) {
        line.push_str(&format!(", {ranks} data-parallel ranks"));
    }
    Some(line)
}

fn events(worker: &WorkerFacts) -> Option<String> {
    let at = |what: &str, address: Option<&str>| match address {
        Some(address) => format!("{what} ({address})"),
        None => what.to_owned(),
    };
    let publisher = worker.config.written_events();
    let arrive = match worker.events {
        EventsFact::Arrived => Some(at("KV events arrive", publisher)),
        EventsFact::Connected => {
            Some(at("the publisher of KV events accepts connections", publisher))
        }
        _ => None,
    };
    let replays = worker.replay == ReplayFact::Answers;
    let replay = worker.config.kv_replay.as_deref().filter(|_| replays);
    match (arrive, replays) {
        (Some(arrive), true) => Some(at(&format!("{arrive}, and can be replayed"), replay)),
        (Some(arrive), false) => Some(arrive),
        (None, true) => Some(at("the replay of KV events answers", replay)),
        (None, false) => None,
    }
}

/// The connector, and how it is known.
fn connector(model: &Model, worker: &WorkerFacts) -> Option<String> {
    let expected = model.connector;
    if !expected.hands_over() {
        return None;
    }
    Some(match worker.shown_connector(expected) {
        Some(shown) if shown == expected => format!("the engine shows connector {}", shown.name()),
        _ => {
            format!("connector {} as configured: the engine does not tell its own", expected.name())
        }
    })
}

fn tokens(worker: &WorkerFacts) -> Option<String> {
    let agree = |what, fact: &TokensFact| match fact {
        TokensFact::Agree(count) => Some(format!("{count} of a {what}")),
        _ => None,
    };
    let chat = agree("chat", &worker.chat_tokens);
    let parts: Vec<String> = chat.into_iter().chain(agree("text", &worker.text_tokens)).collect();
    (!parts.is_empty())
        .then(|| format!("router and engine make the same tokens: {}", parts.join(", ")))
}

fn usage(worker: &WorkerFacts) -> Option<String> {
    let what = match worker.trial {
        TrialFact::Served { reports_cached_tokens: true } => {
            "a prompt is served, and usage has cached tokens"
        }
        TrialFact::Embedded => "an embedding is computed; the engine generates nothing",
        _ => return None,
    };
    Some(what.to_owned())
}

fn gate(worker: &WorkerFacts) -> Option<String> {
    let supports = worker.supports_cache_hit_threshold?;
    Some(match supports {
        true => "the engine supports cache_hit_threshold".to_owned(),
        false if worker.config.shim => "the shim gates (the engine does not)".to_owned(),
        false => "the router gates (the engine does not)".to_owned(),
    })
}

fn hand_offs(worker: &WorkerFacts) -> Vec<String> {
    let staged = worker.staged == StagedFact::Usable;
    let mut lines: Vec<String> =
        staged.then(|| "a prefill returns a hand-off".to_owned()).into_iter().collect();
    lines.extend(worker.fetched.iter().filter_map(|fetched| match fetched.outcome {
        FetchOutcome::Transferred => Some(format!("KV arrives from {}", fetched.from)),
        FetchOutcome::Served => Some(format!("a hand-off from {} is served", fetched.from)),
        _ => None,
    }));
    if worker.bootstrap == BootstrapFact::Answers {
        lines.push("the bootstrap server answers".to_owned());
    }
    lines
}

fn shim(worker: &WorkerFacts) -> Option<String> {
    let ShimFact::Reports(status) = &worker.shim else { return None };
    let ShimStatus { id, current_ranks, ranks, live_routers, routers, .. } = status;
    Some(format!(
        "shim {id}: mirror current for {current_ranks} of {ranks} ranks, {live_routers} of {routers} routers"
    ))
}
