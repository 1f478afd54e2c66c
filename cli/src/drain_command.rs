//! `splitrail drain` and `splitrail undrain`: take a worker out of service, and back into it, on all
//! replicas.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{HeaderMap, Method};
use serde::Deserialize;
use serde_json::{Value, json};
use splitrail_settings::command::{Failure, exit, print_line};
use tokio::signal::unix::{SignalKind, signal};

use crate::admin::{AdminArgs, AskError, Replica, percent_encoded};
use crate::change::{ChangeResult, code, summary};
use crate::cluster::{WorkerSnapshot, ask_all, workers};
use crate::output::Output;
use crate::safe_text::printable;

mod wait;

use wait::{Proof, WaitEnd, WorkerWait};

/// Maximum width of a worker's name in a message.
const NAME_MAX_COLUMNS: usize = 60;

/// Which worker.
#[derive(Args)]
struct Target {
    /// The worker's id.
    id: String,
    /// The worker's model; needed if several models have a worker of this id.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// The arguments of `drain`.
#[derive(Args)]
pub(crate) struct DrainArgs {
    /// Waits until no router has requests on the worker: for as long as it takes, or for at most
    /// this time. Ctrl-C ends the wait; the worker stays drained.
    #[arg(long, value_name = "DURATION", num_args = 0..=1, value_parser = crate::admin::positive)]
    wait: Option<Option<Duration>>,
    // The flags for routers come last, under their own heading.
    #[command(flatten)]
    target: Target,
}

/// The arguments of `undrain`.
#[derive(Args)]
pub(crate) struct UndrainArgs {
    #[command(flatten)]
    target: Target,
}

/// Takes a worker out of service; returns what the command prints in the end.
///
/// # Errors
/// The replicas cannot be named, or output cannot be written.
pub(crate) async fn drain(args: DrainArgs) -> Result<Output, Failure> {
    let DrainArgs { target, wait } = args;
    // From now on, Ctrl-C never ends the process without a word.
    let mut interrupts = signal(SignalKind::interrupt())?;
    let replicas = target.admin.replicas().await?;
    target.check_address(&replicas).await?;
    let changed = target.change(&replicas, Method::POST).await;
    let report = target.report(&changed, "drained");
    let drained: Vec<Replica> = replicas
        .iter()
        .zip(&changed)
        .filter(|(_, (_, reply))| reply.is_ok())
        .map(|(replica, _)| replica.clone())
        .collect();
    let model = changed.iter().find_map(|(_, reply)| Some(reply.as_ref().ok()?.model.clone()));
    let (Some(time_max), Some(model)) = (wait, model) else {
        return Ok(Output { text: target.text(&changed, &report, None), code: code(&changed) });
    };
    if !target.json {
        print_line(&report.join("\n"))?;
    }
    let waiting = WorkerWait::new(&drained, &model, &target.id, !target.json);
    let ending = waiting.run(time_max, async { interrupts.recv().await }).await;
    let code = match (&ending, code(&changed)) {
        (WaitEnd::Interrupted, _) => exit::INTERRUPTED,
        (WaitEnd::Ended(proofs), 0) if proofs.iter().all(Proof::is_proved) => 0,
        _ => exit::INCOMPLETE,
    };
    Ok(Output { text: target.text(&changed, &[], Some((&drained, &ending))), code })
}

/// Takes a worker back into service; returns what the command prints.
///
/// # Errors
/// The replicas cannot be named.
pub(crate) async fn undrain(args: UndrainArgs) -> Result<Output, Failure> {
    let UndrainArgs { target } = args;
    let replicas = target.admin.replicas().await?;
    target.check_address(&replicas).await?;
    let changed = target.change(&replicas, Method::DELETE).await;
    let report = target.report(&changed, "taken back");
    Ok(Output { text: target.text(&changed, &report, None), code: code(&changed) })
}

impl Target {
    /// The worker's name for people.
    fn name(&self) -> String {
        printable(&self.id, NAME_MAX_COLUMNS)
    }

    /// Checks that the id means the same engine on all replicas that can be asked.
    ///
    /// # Errors
    /// It means different engines: ids that routers derive depend on the reloads since their start.
    async fn check_address(&self, replicas: &[Replica]) -> Result<(), Failure> {
        if replicas.len() < 2 {
            return Ok(());
        }
        let lists = ask_all(replicas, workers).await;
        let mut urls: BTreeMap<&str, BTreeMap<&str, String>> = BTreeMap::new();
        for (replica, list) in replicas.iter().zip(&lists) {
            let named = list.iter().flatten().filter(|worker| worker.id == self.id);
            for worker in named {
                let of_model = urls.entry(&worker.model).or_default();
                of_model.entry(&worker.url).or_insert_with(|| replica.name());
            }
        }
        urls.retain(|model, urls| {
            urls.len() > 1 && self.model.as_ref().is_none_or(|wanted| wanted == model)
        });
        let Some((_, urls)) = urls.pop_first() else { return Ok(()) };
        let places = urls
            .iter()
            .map(|(url, name)| format!("{} on {name}", printable(url, NAME_MAX_COLUMNS)));
        let message = format!(
            "{} is not the same engine on all routers: {}. Nothing has changed; name one router with \
             --admin, or restart the routers, which numbers their workers anew",
            self.name(),
            places.collect::<Vec<_>>().join(", "),
        );
        Err(Failure::new(exit::DATA_ERROR, message))
    }

    /// Makes the change on all replicas.
    async fn change(
        &self,
        replicas: &[Replica],
        method: Method,
    ) -> Vec<ChangeResult<WorkerSnapshot>> {
        let mut path = format!("/admin/workers/{}/drain", percent_encoded(&self.id));
        if let Some(model) = &self.model {
            path += &format!("?model={}", percent_encoded(model));
        }
        let replies = ask_all(replicas, |replica| {
            let (path, method) = (path.clone(), method.clone());
            async move {
                let reply = replica.send(method, &path, HeaderMap::new(), Bytes::new()).await?;
                let worker = WorkerSnapshot::deserialize(replica.member(&reply, "worker")?);
                worker.map_err(|_| replica.unreadable())
            }
        })
        .await;
        replicas.iter().map(Replica::name).zip(replies).collect()
    }

    /// What came of the change, one line for each replica.
    fn report(&self, changed: &[ChangeResult<WorkerSnapshot>], done: &str) -> Vec<String> {
        let line = |(name, reply): &ChangeResult<WorkerSnapshot>| match reply {
            Ok(worker) => {
                let state = printable(&worker.state, NAME_MAX_COLUMNS);
                format!("{name}: {} is {state}, {}", self.name(), requests(worker.requests))
            }
            Err(error) => format!("{name}: {}", failed(error)),
        };
        let mut text: Vec<String> = changed.iter().map(line).collect();
        let again = "run the command again when the other ones can be asked: it may be repeated";
        text.extend(summary(changed, &format!("{} is {done}", self.name()), again));
        text
    }

    fn text(
        &self,
        changed: &[ChangeResult<WorkerSnapshot>],
        report: &[String],
        waited: Option<(&[Replica], &WaitEnd)>,
    ) -> String {
        if self.json {
            return format!("{:#}", to_json(changed, waited));
        }
        let mut text = report.to_vec();
        text.extend(waited.map(|(replicas, ending)| self.waited(changed, replicas, ending)));
        text.join("\n")
    }

    /// What came of the wait.
    fn waited(
        &self,
        changed: &[ChangeResult<WorkerSnapshot>],
        replicas: &[Replica],
        ending: &WaitEnd,
    ) -> String {
        let id = self.name();
        let WaitEnd::Ended(proofs) = ending else {
            return format!(
                "interrupted: {id} stays drained; `splitrail undrain {id}` takes it back into service"
            );
        };
        let mut text: Vec<String> = replicas
            .iter()
            .zip(proofs)
            .map(|(replica, proof)| format!("{}: {}", replica.name(), proof.text(&id)))
            .collect();
        let proved = proofs.iter().filter(|proof| proof.is_proved()).count();
        text.push(match proved == changed.len() {
            true => format!("{id} has no requests of any router: its engine can be stopped"),
            false => format!(
                "incomplete: it is proved for {proved} of {} routers that {id} has no requests; \
                 run the command again before you stop its engine",
                changed.len()
            ),
        });
        text.join("\n")
    }
}

fn failed(error: &AskError) -> String {
    match error.code.as_str() {
        "worker_not_found" => {
            format!("{}\n  hint: `splitrail workers` lists the workers", error.message())
        }
        _ => error.to_string(),
    }
}

/// A number of requests in words.
fn requests(count: u64) -> String {
    match count {
        0 => "no requests".to_owned(),
        1 => "1 request".to_owned(),
        count => format!("{count} requests"),
    }
}

fn to_json(
    changed: &[ChangeResult<WorkerSnapshot>],
    waited: Option<(&[Replica], &WaitEnd)>,
) -> Value {
    let proof_of = |name: &str| -> Value {
        let Some((replicas, WaitEnd::Ended(proofs))) = waited else { return Value::Null };
        let mut pairs = replicas.iter().zip(proofs);
        pairs.find(|(replica, _)| replica.name() == name).map_or(Value::Null, |(_, proof)| {
            json!({ "is_proved": proof.is_proved(), "message": proof.text("the worker") })
        })
    };
    let replica = |(name, reply): &ChangeResult<WorkerSnapshot>| match reply {
        Ok(worker) => json!({
            "admin": name, "done": true, "state": worker.state, "requests": worker.requests,
            "without_requests": proof_of(name),
        }),
        Err(error) => json!({ "admin": name, "done": false, "error": error.message() }),
    };
    json!({
        "replicas": changed.iter().map(replica).collect::<Vec<_>>(),
        "interrupted": matches!(waited, Some((_, WaitEnd::Interrupted))),
    })
}
