//! `splitrail workers`: all workers, over all replicas.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use splitrail_settings::command::Failure;
use splitrail_telemetry::clock::unix_ms;

use crate::admin::{AdminArgs, AskError, Replica};
use crate::cluster::{
    MergedWorker, WorkerSnapshot, ask_all, known_model, merge, model_names, workers, worst_code,
};
use crate::output::Output;
use crate::table::{Column, lines};

/// The arguments.
#[derive(Args)]
pub(crate) struct WorkersArgs {
    /// Shows the workers of this model only.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// Asks the replicas; returns what the command prints.
///
/// # Errors
/// The replicas cannot be named, none of them can be asked, or no router serves the model.
pub(crate) async fn run(args: WorkersArgs) -> Result<Output, Failure> {
    let replicas = args.admin.replicas().await?;
    let mut replies = ask_all(&replicas, workers).await;
    if let [Err(error)] = &replies[..] {
        return Err(error.clone().into());
    }
    if let Some(model) = &args.model {
        for workers in replies.iter_mut().flatten() {
            workers.retain(|worker| worker.model == *model);
        }
        if replies.iter().flatten().all(Vec::is_empty) {
            check_model(&replicas, model).await?;
        }
    }
    let code = worst_code(replies.iter().filter_map(|reply| reply.as_ref().err()), 0);
    let known = replies.iter().enumerate();
    let known = known.filter_map(|(at, reply)| Some((at, &reply.as_ref().ok()?[..])));
    let merged = merge(known);
    let text = match args.json {
        true => format!("{:#}", to_json(&replicas, &replies, &merged)),
        false => to_text(&replies, &merged, unix_ms()),
    };
    Ok(Output { text, code })
}

/// Checks that a router serves the model. A router that cannot be asked is taken to serve it.
async fn check_model(replicas: &[Replica], model: &str) -> Result<(), Failure> {
    let replies = ask_all(replicas, model_names).await;
    match replies.into_iter().collect::<Result<Vec<_>, _>>() {
        Ok(names) => known_model(model, names.into_iter().flatten()),
        Err(_) => Ok(()),
    }
}

type Replies = [Result<Vec<WorkerSnapshot>, AskError>];

fn to_json(replicas: &[Replica], replies: &Replies, merged: &[MergedWorker<'_>]) -> Value {
    let replica = |(replica, reply): (&Replica, &Result<_, AskError>)| {
        let error = reply.as_ref().err().map(AskError::message);
        json!({ "admin": replica.name(), "reached": error.is_none(), "error": error })
    };
    let worker = |worker: &MergedWorker<'_>| {
        let (_, first) = worker.seen[0];
        let seen = worker.seen.iter().map(|(at, seen)| {
            json!({
                "admin": replicas[*at].name(),
                "state": seen.state,
                "state_since_unix_ms": seen.state_since_unix_ms,
                "state_why": seen.state_why,
                "requests": seen.requests,
                "prefill_tokens": seen.prefill_tokens,
                "kv_routing": seen.kv_routing,
                "parity": seen.parity,
                "prewarm": seen.prewarm,
                "needs_attention": seen.needs_attention,
            })
        });
        json!({
            "model": worker.model,
            "id": worker.id,
            "role": first.role,
            "transfer_group": first.transfer_group,
            "url": first.url,
            "requests": worker.sum(|seen| seen.requests),
            "prefill_tokens": worker.sum(|seen| seen.prefill_tokens),
            "engine_waiting": worker.largest(waiting),
            "engine_kv_used_ratio": worker.largest(|seen| seen.engine_kv_used_ratio),
            "slowdown": worker.largest(|seen| seen.slowdown.largest()),
            "replicas": seen.collect::<Vec<_>>(),
        })
    };
    json!({
        "replicas": replicas.iter().zip(replies).map(replica).collect::<Vec<_>>(),
        "workers": merged.iter().map(worker).collect::<Vec<_>>(),
    })
}

/// The place of the column with the transfer group, which is left out if no worker has one.
const GROUP: usize = 4;

fn to_text(replies: &Replies, merged: &[MergedWorker<'_>], now_unix_ms: u64) -> String {
    let titles = [
        Column::text("model", 20),
        Column::text("id", 24),
        Column::text("address", 48),
        Column::text("role", 8),
        Column::text("group", 20),
        Column::text("state", 40),
        Column::text("since", 24),
        Column::figure("requests"),
        Column::figure("prefill tokens"),
        Column::figure("waiting"),
        Column::figure("KV used"),
        Column::figure("slowdown"),
        Column::text("KV routing", 16),
        Column::text("parity", 24),
        Column::text("why", 80),
    ];
    let reached = replies.iter().filter(|reply| reply.is_ok()).count();
    let row = |worker: &MergedWorker<'_>| {
        let (_, first) = worker.seen[0];
        let mut states = worker.texts(state);
        if worker.seen.len() < reached {
            states += &format!(" (known to {} of {reached} routers)", worker.seen.len());
        }
        let ratio = worker.largest(|seen| seen.engine_kv_used_ratio);
        let slowdown = worker.largest(|seen| seen.slowdown.largest());
        let figure = |figure: Option<f64>| figure.map_or("-".to_owned(), |f| format!("{f:.0}"));
        let newest = worker.seen.iter().map(|(_, seen)| seen.state_since_unix_ms).max();
        vec![
            worker.model.to_owned(),
            worker.id.to_owned(),
            worker.texts(address),
            first.role.clone(),
            first.transfer_group.clone().unwrap_or_else(|| "-".to_owned()),
            states,
            age(now_unix_ms, newest.unwrap_or_default()),
            worker.sum(|seen| seen.requests).to_string(),
            worker.sum(|seen| seen.prefill_tokens).to_string(),
            figure(worker.largest(waiting)),
            ratio.map_or("-".to_owned(), |ratio| format!("{:.0} %", ratio * 100.0)),
            slowdown.map_or("-".to_owned(), |times| format!("{times:.1}x")),
            worker.texts(|seen| if seen.kv_routing { "yes" } else { "no" }.to_owned()),
            worker.texts(parity),
            worker.texts(why),
        ]
    };
    let mut rows: Vec<Vec<String>> = merged.iter().map(row).collect();
    let mut titles = titles.to_vec();
    if merged.iter().all(|worker| worker.seen[0].1.transfer_group.is_none()) {
        titles.remove(GROUP);
        rows.iter_mut().for_each(|row| _ = row.remove(GROUP));
    }
    let mut text = lines(&titles, &rows);
    if merged.is_empty() {
        text = vec!["there are no workers".to_owned()];
    }
    text.extend(replies.iter().filter_map(|reply| reply.as_ref().err().map(ToString::to_string)));
    text.join("\n")
}

/// The address, without the usual scheme.
fn address(worker: &WorkerSnapshot) -> String {
    worker.url.strip_prefix("http://").unwrap_or(&worker.url).to_owned()
}

fn waiting(worker: &WorkerSnapshot) -> Option<f64> {
    worker.engine_waiting.map(|waiting| waiting as f64)
}

/// The state, and whether the worker is being prewarmed.
fn state(worker: &WorkerSnapshot) -> String {
    match worker.prewarm.is_some_and(|prewarm| prewarm.running) {
        true => format!("{}, prewarming", worker.state),
        false => worker.state.clone(),
    }
}

/// Why the worker is in its state, and what is to be known of its index.
fn why(worker: &WorkerSnapshot) -> String {
    // Its state is the first part, and its parity has a column.
    let others = worker.needs_attention.iter().filter(|attention| {
        !matches!(attention.kind.as_str(), "state" | "draining")
            && !attention.kind.starts_with("parity")
    });
    let others = others.map(|attention| attention.message.clone());
    std::iter::once(worker.state_why.clone()).chain(others).collect::<Vec<_>>().join("; ")
}

fn parity(worker: &WorkerSnapshot) -> String {
    match &worker.parity_cause {
        Some(cause) => format!("{} ({cause})", worker.parity),
        None => worker.parity.clone(),
    }
}

/// How long ago a time was, in the two largest units.
pub(crate) fn age(now_unix_ms: u64, then_unix_ms: u64) -> String {
    let age = Duration::from_millis(now_unix_ms.saturating_sub(then_unix_ms));
    let text = humantime::format_duration(Duration::from_secs(age.as_secs())).to_string();
    text.split_whitespace().take(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_neither_leaves_its_cell_nor_steers_the_terminal() {
        let worker = WorkerSnapshot {
            model: "m".into(),
            id: "\u{1b}[2J\nd0 serving".into(),
            role: "decode".into(),
            state: "down".into(),
            state_why: "模".repeat(100),
            ..Default::default()
        };
        let replies = [Ok(vec![worker])];
        let merged = merge([(0, &replies[0].as_ref().unwrap()[..])]);
        let text = to_text(&replies, &merged, 0);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains(" role") && !text.contains(" group"), "{text}");
        assert!(!text.contains('\u{1b}') && text.contains("\\u{1b}[2J\\nd0 serving "), "{text}");
    }

    #[test]
    fn a_worker_that_is_prewarmed_is_shown_as_that() {
        let of = |text: &str| state(&serde_json::from_str::<WorkerSnapshot>(text).unwrap());
        let prewarm = r#"{"running": true, "prefixes": 1, "tokens": 2}"#;
        let worker = format!(r#"{{"state": "warming", "prewarm": {prewarm}}}"#);
        assert_eq!(of(&worker), "warming, prewarming");
        assert_eq!(of(&worker.replace("true", "false")), "warming");
        assert_eq!(of(r#"{"state": "warming", "prewarm": null}"#), "warming");
    }

    #[test]
    fn an_age_has_two_units() {
        assert_eq!(age(90_061_000, 0), "1day 1h");
        assert_eq!(age(61_000, 0), "1m 1s");
        assert_eq!(age(0, 5), "0s");
    }
}
