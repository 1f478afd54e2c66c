//! `splitrail status`: whether all is well, over all replicas.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::{Value, json};
use splitrail_settings::command::{Failure, exit};

use crate::admin::{AdminArgs, AskError, Replica};
use crate::cluster::{
    Attention, MergedWorker, ReplicaState, WorkerSnapshot, ask_all, merge, snapshot, worst_code,
};
use crate::output::Output;
use crate::safe_text::printable;
use crate::table::{Column, lines};

mod groups;

/// Maximum number of lines about what needs attention, so that the status fits on a screen.
const ATTENTION_LINES_MAX: usize = 16;

/// Maximum width of a text in such a line.
const ATTENTION_MAX_COLUMNS: usize = 200;

/// Maximum number of workers that a line names.
const WORKERS_NAMED_MAX: usize = 8;

/// Maximum number of workers that a line names with their addresses.
const ADDRESSES_MAX: usize = 3;

/// The arguments.
#[derive(Args)]
pub(crate) struct StatusArgs {
    /// Prints JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// What all replicas said, in the order in which they were named.
struct Status {
    replicas: Vec<(Replica, Result<ReplicaState, AskError>)>,
}

/// Something that needs attention, and on which replicas.
struct AttentionItem {
    attention: Attention,
    /// Places of the replicas.
    replicas: Vec<usize>,
}

/// Asks the replicas; returns what the command prints.
///
/// # Errors
/// The replicas cannot be named.
pub(crate) async fn run(args: StatusArgs) -> Result<Output, Failure> {
    let replicas = args.admin.replicas().await?;
    let replies = ask_all(&replicas, snapshot).await;
    let status = Status { replicas: replicas.into_iter().zip(replies).collect() };
    let text = match args.json {
        true => format!("{:#}", status.to_json()),
        false => status.to_text(),
    };
    Ok(Output { text, code: status.code() })
}

impl Status {
    fn reached(&self) -> impl Iterator<Item = (usize, &ReplicaState)> {
        let all = self.replicas.iter().enumerate();
        all.filter_map(|(at, (_, reply))| Some((at, reply.as_ref().ok()?)))
    }

    fn code(&self) -> u8 {
        let errors = self.replicas.iter().filter_map(|(_, reply)| reply.as_ref().err());
        let is_well =
            self.found().iter().all(|found| found.attention.is_note) && !self.config_differs();
        worst_code(errors, if is_well { 0 } else { exit::ATTENTION })
    }

    fn config_differs(&self) -> bool {
        let mut hashes = self.reached().map(|(_, snapshot)| &snapshot.config_hash);
        let first = hashes.next();
        hashes.any(|hash| Some(hash) != first)
    }

    /// What needs attention, each once, with the replicas that say so.
    fn found(&self) -> Vec<AttentionItem> {
        let mut all: Vec<AttentionItem> = Vec::new();
        for (at, snapshot) in self.reached() {
            for attention in &snapshot.needs_attention {
                match all.iter_mut().find(|found| found.attention == *attention) {
                    Some(found) => found.replicas.push(at),
                    None => {
                        all.push(AttentionItem { attention: attention.clone(), replicas: vec![at] })
                    }
                }
            }
        }
        // What is about a replica comes before what is about models and workers, and notes come last.
        let about =
            |about: &Attention| (about.is_note, !about.workers.is_empty(), about.model.is_some());
        all.sort_by_key(|found| about(&found.attention));
        all
    }

    fn to_json(&self) -> Value {
        let replica = |(replica, reply): &(Replica, Result<ReplicaState, AskError>)| match reply {
            Err(error) => json!({
                "admin": replica.name(), "reached": false, "error": error.message(),
            }),
            Ok(snapshot) => json!({
                "admin": replica.name(),
                "reached": true,
                "version": snapshot.version,
                "ready": snapshot.not_ready.is_none(),
                "not_ready_reason": snapshot.not_ready,
                "config_hash": snapshot.config_hash,
                "models": snapshot.models,
                "workers": workers_by_state(snapshot),
                "needs_attention": snapshot.needs_attention,
            }),
        };
        json!({
            "ok": self.code() == 0,
            "config_differs": self.config_differs(),
            "replicas": self.replicas.iter().map(replica).collect::<Vec<_>>(),
        })
    }

    fn to_text(&self) -> String {
        let mut text = self.replica_lines();
        let models = self.model_lines();
        if models.len() > 1 {
            text.push(String::new());
            text.extend(models);
        }
        let groups = groups::group_lines(&self.workers());
        if !groups.is_empty() {
            text.push(String::new());
            text.extend(groups);
        }
        let attention = self.attention_lines();
        text.push(String::new());
        if self.code() == 0 {
            text.push("all is well".to_owned());
        }
        text.extend(attention);
        text.join("\n")
    }

    fn replica_lines(&self) -> Vec<String> {
        let titles = [
            Column::text("router", 40),
            Column::text("version", 20),
            Column::text("state", 24),
            Column::text("configuration", 14),
            Column::figure("in flight"),
            Column::figure("queued"),
            Column::figure("workers"),
        ];
        let row = |(replica, reply): &(Replica, Result<ReplicaState, AskError>)| {
            let mut row = vec![replica.name()];
            match reply {
                Err(_) => row.extend(["-", "not reached", "-", "-", "-", "-"].map(str::to_owned)),
                Ok(snapshot) => {
                    let models = snapshot.models.iter();
                    let in_flight: u64 = models.clone().map(|model| model.requests_in_flight).sum();
                    let queued: u64 = models.filter_map(|model| model.queue_requests).sum();
                    let is_ready = snapshot.not_ready.is_none();
                    row.extend([
                        snapshot.version.clone(),
                        if is_ready { "ready" } else { "not ready" }.to_owned(),
                        snapshot.config_hash.clone(),
                        in_flight.to_string(),
                        queued.to_string(),
                        snapshot.workers.len().to_string(),
                    ]);
                }
            }
            row
        };
        lines(&titles, &self.replicas.iter().map(row).collect::<Vec<_>>())
    }

    fn workers(&self) -> Vec<MergedWorker<'_>> {
        merge(self.reached().map(|(at, snapshot)| (at, &snapshot.workers[..])))
    }

    fn model_lines(&self) -> Vec<String> {
        let titles = [
            Column::text("model", 30),
            Column::text("flow", 14),
            Column::figure("in flight"),
            Column::figure("queued"),
            Column::text("prefill", 40),
            Column::text("decode", 40),
            Column::text("both", 40),
        ];
        // The flow, requests in flight and in the queue, of all replicas.
        let mut models: BTreeMap<&str, (&str, u64, u64)> = BTreeMap::new();
        for (_, snapshot) in self.reached() {
            for model in &snapshot.models {
                let sums = models.entry(&model.name).or_insert((&model.flow, 0, 0));
                sums.1 += model.requests_in_flight;
                sums.2 += model.queue_requests.unwrap_or(0);
            }
        }
        let workers = self.workers();
        let rows = models.iter().map(|(name, (flow, in_flight, queued))| {
            let mut row = vec![(*name).to_owned(), (*flow).to_owned()];
            row.extend([in_flight.to_string(), queued.to_string()]);
            let states =
                |role| states_of(workers.iter().filter(|worker| worker.model == *name), role);
            row.extend(["prefill", "decode", "both"].map(states));
            row
        });
        lines(&titles, &rows.collect::<Vec<_>>())
    }

    /// The addresses of the workers that need attention, if they are few.
    fn addresses(&self, attention: &Attention, replicas: &[usize]) -> Vec<String> {
        let known = self.reached().filter(|(at, _)| replicas.contains(at));
        let known: Vec<_> = known.flat_map(|(_, snapshot)| &snapshot.workers).collect();
        let url = |id: &String| {
            let is_it = |worker: &&&WorkerSnapshot| {
                worker.id == *id && attention.model.as_ref() == Some(&worker.model)
            };
            let url = &known.iter().find(is_it)?.url;
            Some(printable(url.strip_prefix("http://").unwrap_or(url), ATTENTION_MAX_COLUMNS))
        };
        match attention.workers.len() {
            1..=ADDRESSES_MAX => attention.workers.iter().filter_map(url).collect(),
            _ => Vec::new(),
        }
    }

    fn attention_lines(&self) -> Vec<String> {
        let mut text = Vec::new();
        for (_, reply) in &self.replicas {
            if let Err(error) = reply {
                text.push(error.to_string());
            }
        }
        if self.config_differs() {
            text.push("warning: the replicas run different configurations".to_owned());
            text.push(
                "  hint: compare their files, then `splitrail reload` has all read theirs again"
                    .to_owned(),
            );
        }
        let found = self.found();
        let several = self.reached().count() > 1;
        let show = |text: &str| printable(text, ATTENTION_MAX_COLUMNS);
        for AttentionItem { attention, replicas } in found.iter().take(ATTENTION_LINES_MAX) {
            let names: Vec<_> = replicas.iter().map(|at| self.replicas[*at].0.name()).collect();
            let on = match (several, replicas.len() == self.reached().count()) {
                (true, false) => format!("{}: ", names.join(", ")),
                _ => String::new(),
            };
            let addresses = self.addresses(attention, &replicas[..]);
            let message = show(&attention.message);
            text.push(format!("{on}{}{message}", about(attention, &addresses)));
            text.extend(
                attention.advice.as_deref().map(|advice| format!("  hint: {}", show(advice))),
            );
        }
        if found.len() > ATTENTION_LINES_MAX {
            let more = found.len() - ATTENTION_LINES_MAX;
            text.push(format!("and {more} more, which --json lists"));
        }
        text
    }
}

/// The model and the workers that need attention, with their addresses and a colon; empty if it is
/// the replica itself.
fn about(attention: &Attention, addresses: &[String]) -> String {
    let show = |text: &str| printable(text, ATTENTION_MAX_COLUMNS);
    let Some(model) = &attention.model else { return String::new() };
    let workers: Vec<_> = attention.workers.iter().map(|worker| show(worker)).collect();
    let at = match addresses {
        [] => String::new(),
        addresses => format!(" ({})", addresses.join(", ")),
    };
    match &workers[..] {
        [] => format!("model {}: ", show(model)),
        [worker] => format!("worker {worker} of {}{at}: ", show(model)),
        [first @ .., last] if workers.len() <= WORKERS_NAMED_MAX => {
            format!("workers {} and {last} of {}{at}: ", first.join(", "), show(model))
        }
        _ => {
            let (named, all) = (workers[..WORKERS_NAMED_MAX].join(", "), workers.len());
            format!("{all} workers of {} ({named}, ...): ", show(model))
        }
    }
}

/// The number of workers by role and state.
fn workers_by_state(snapshot: &ReplicaState) -> BTreeMap<&str, BTreeMap<&str, usize>> {
    let mut roles: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    for worker in &snapshot.workers {
        *roles.entry(&worker.role).or_default().entry(&worker.state).or_default() += 1;
    }
    roles
}

/// How many of these workers have a role and are in which state: `2 serving, 1 down`.
fn states_of<'w, 's: 'w>(
    workers: impl Iterator<Item = &'w MergedWorker<'s>>,
    role: &str,
) -> String {
    let mut states: BTreeMap<String, usize> = BTreeMap::new();
    for worker in workers {
        let (_, first) = worker.seen[0];
        if first.role == role {
            let is_same = worker.seen.iter().all(|(_, other)| other.state == first.state);
            let state = if is_same { first.state.clone() } else { "mixed".to_owned() };
            *states.entry(state).or_default() += 1;
        }
    }
    match states.is_empty() {
        true => "-".to_owned(),
        false => {
            let parts = states.iter().map(|(state, count)| format!("{count} {state}"));
            parts.collect::<Vec<_>>().join(", ")
        }
    }
}
