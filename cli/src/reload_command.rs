//! `splitrail reload`: has all replicas read their configuration files again.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{HeaderMap, Method};
use serde_json::{Value, json};
use splitrail_settings::command::Failure;

use crate::admin::{AdminArgs, AskError, Replica};
use crate::change::{ChangeResult, code, summary};
use crate::cluster::ask_all;
use crate::output::Output;
use crate::safe_text::printable;

/// Minimum time for a reload: loading a tokenizer may take long.
const RELOAD_TIME: Duration = Duration::from_secs(120);

/// Maximum number of changes that are listed of one replica.
const LISTED_MAX: usize = 20;

/// Maximum width of a value in the list of changes.
const VALUE_MAX_COLUMNS: usize = 60;

/// The arguments.
#[derive(Args)]
pub(crate) struct ReloadArgs {
    /// Prints JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// Asks the replicas; returns what the command prints.
///
/// # Errors
/// The replicas cannot be named.
pub(crate) async fn run(args: ReloadArgs) -> Result<Output, Failure> {
    let replicas = args.admin.replicas().await?;
    let replies = ask_all(&replicas, async |replica: Replica| {
        let replica = replica.with_time(RELOAD_TIME);
        let reply = replica.send(Method::POST, "/admin/reload", HeaderMap::new(), Bytes::new());
        let report = reply.await?;
        replica.member(&report, "config_digest")?;
        Ok(report)
    })
    .await;
    let changed: Vec<ChangeResult<Value>> =
        replicas.iter().map(Replica::name).zip(replies).collect();
    let text = match args.json {
        true => format!("{:#}", to_json(&changed)),
        false => to_text(&changed),
    };
    Ok(Output { text, code: code(&changed) })
}

fn to_json(changed: &[ChangeResult<Value>]) -> Value {
    let replica = |(name, reply): &ChangeResult<Value>| match reply {
        Ok(report) => json!({ "admin": name, "done": true, "report": report }),
        Err(error) => json!({
            "admin": name, "done": false, "error": error.message(),
            "problems": error.reply["problems"],
        }),
    };
    json!({ "replicas": changed.iter().map(replica).collect::<Vec<_>>() })
}

fn to_text(changed: &[ChangeResult<Value>]) -> String {
    let mut text = Vec::new();
    let mut digests = BTreeSet::new();
    for (name, reply) in changed {
        match reply {
            Ok(report) => {
                let shown = |key: &str| {
                    printable(report[key].as_str().unwrap_or_default(), VALUE_MAX_COLUMNS)
                };
                let (digest, result) = (shown("config_digest"), shown("result"));
                text.push(format!("{name}: {result}, configuration {digest}"));
                digests.insert(digest);
                text.extend(report_lines(report));
            }
            Err(error) => {
                text.push(format!("{name}: {}", error.to_string().replace('\n', "\n  ")));
                text.extend(problem_lines(error));
            }
        }
    }
    if digests.len() > 1 {
        text.push("warning: the replicas run different configurations".to_owned());
    }
    let again = "correct the file or the router, and run the command again";
    text.extend(summary(changed, "reloaded", again));
    text.join("\n")
}

fn report_lines(report: &Value) -> Vec<String> {
    let list = |key: &str| report[key].as_array().cloned().unwrap_or_default();
    let shown = |value: &Value| printable(&value.to_string(), VALUE_MAX_COLUMNS);
    let mut text: Vec<String> = Vec::new();
    for change in list("changes") {
        let path = printable(change["path"].as_str().unwrap_or_default(), 120);
        text.push(match (change["old"].is_null(), change["new"].is_null()) {
            (true, false) => format!("  {path}: added"),
            (false, true) => format!("  {path}: removed"),
            _ => format!("  {path}: {} -> {}", shown(&change["old"]), shown(&change["new"])),
        });
    }
    for renewed in list("renewed") {
        text.push(format!("  {}: read again", shown(&renewed)));
    }
    for warning in list("warnings") {
        text.push(format!("  warning: {}", problem(&warning)));
    }
    shortened(text)
}

fn problem_lines(error: &AskError) -> Vec<String> {
    let problems = error.reply["problems"].as_array().into_iter().flatten();
    shortened(problems.map(|found| format!("  {}", problem(found))).collect())
}

fn shortened(mut text: Vec<String>) -> Vec<String> {
    if text.len() > LISTED_MAX {
        let more = text.len() - LISTED_MAX;
        text.truncate(LISTED_MAX);
        text.push(format!("  and {more} more, which --json lists"));
    }
    text
}

/// A problem with its place, as `splitrail check` prints it.
fn problem(found: &Value) -> String {
    let shown = |key: &str| printable(found[key].as_str().unwrap_or_default(), 300);
    let (file, message, hint) = (shown("file"), shown("message"), shown("hint"));
    let place = format!("{file}:{}:{}", found["line"], found["column"]);
    match hint.is_empty() {
        true => format!("{place}: {message}"),
        false => format!("{place}: {message}\n    hint: {hint}"),
    }
}
