//! Finds past requests by worker, by time, by failure and by slowness.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{ArgGroup, Args};
use serde_json::{Value, json};
use splitrail_settings::command::{Failure, exit, print_error};

use super::candidates::text;
use crate::admin::{AdminArgs, AskError, Replica, percent_encoded};
use crate::cluster::{ask_all, worst_code};
use crate::table::{Column, lines};

/// Number of requests that are listed.
const LISTED: usize = 20;

/// How far from the given time requests may be.
const NEAR: Duration = Duration::from_secs(60);

/// What past requests are looked for by.
#[derive(Args)]
#[command(group = ArgGroup::new("search").multiple(true).args([
    "worker", "since", "at", "failed", "slowest",
]))]
pub(super) struct SearchArgs {
    /// Lists past requests of this worker.
    #[arg(long, value_name = "ID")]
    worker: Option<String>,
    /// Lists past requests of this last time: `15m`.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    since: Option<Duration>,
    /// Lists past requests within a minute of this time: `2026-11-25T14:03Z`.
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "since")]
    at: Option<SystemTime>,
    /// Lists past requests that failed.
    #[arg(long)]
    failed: bool,
    /// Lists the slowest of the past requests: by the time to the first token, or of whole replies by
    /// the whole time.
    #[arg(long)]
    slowest: bool,
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; for example `15m` or `2h`"))
}

/// A time in UTC, with or without seconds.
fn time(text: &str) -> Result<SystemTime, String> {
    let minutes = format!("{}:00", text.trim_end_matches('Z'));
    let parsed = humantime::parse_rfc3339_weak(text);
    let parsed = parsed.or_else(|error| humantime::parse_rfc3339_weak(&minutes).map_err(|_| error));
    parsed.map_err(|error| format!("{error}; for example `2026-11-25T14:03Z`, in UTC"))
}

impl SearchArgs {
    pub(super) fn is_given(&self) -> bool {
        let has_time = self.since.is_some() || self.at.is_some();
        self.worker.is_some() || has_time || self.failed || self.slowest
    }

    /// The path with its query.
    fn path(&self, now: SystemTime) -> String {
        let unix_ms = |time: SystemTime| {
            time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis()).to_string()
        };
        let from = self.since.map(|since| now - since).or(self.at.map(|at| at - NEAR));
        let members = [
            ("worker", self.worker.clone()),
            ("from_unix_ms", from.map(unix_ms)),
            ("to_unix_ms", self.at.map(|at| unix_ms(at + NEAR))),
            ("failed", self.failed.then(|| "true".to_owned())),
            ("slowest", self.slowest.then(|| "true".to_owned())),
            ("limit", Some(LISTED.to_string())),
        ];
        let given = members.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let query: Vec<_> =
            given.map(|(name, value)| format!("{name}={}", percent_encoded(&value))).collect();
        format!("/admin/decisions?{}", query.join("&"))
    }
}

/// Lists the requests that the routers have kept.
///
/// # Errors
/// No router could be asked.
pub(super) async fn run(
    args: &SearchArgs,
    admin: &AdminArgs,
    as_json: bool,
) -> Result<String, Failure> {
    let replicas = admin.clone().replicas().await?;
    let path = args.path(SystemTime::now());
    let replies = ask_all(&replicas, |replica| {
        let path = path.clone();
        async move { decisions(&replica, &path).await }
    })
    .await;
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    for (replica, reply) in replicas.iter().zip(replies) {
        match reply {
            Ok(decisions) => found.extend(decisions),
            Err(error) => {
                print_error(&format!("not asked: {} ({})", replica.name(), error.message()));
                errors.push(error);
            }
        }
    }
    if errors.len() == replicas.len() {
        let message = errors.first().map(ToString::to_string).unwrap_or_default();
        return Err(Failure::new(worst_code(errors.iter(), exit::UNAVAILABLE), message));
    }
    let slow_ms = |decision: &Value| decision["ttft_ms"].as_f64().or(decision["total_ms"].as_f64());
    found.sort_by(|one, other| match args.slowest {
        true => slow_ms(other).unwrap_or(0.0).total_cmp(&slow_ms(one).unwrap_or(0.0)),
        false => other["decided_unix_ms"].as_u64().cmp(&one["decided_unix_ms"].as_u64()),
    });
    found.truncate(LISTED);
    Ok(match as_json {
        true => format!("{:#}", json!({ "decisions": found })),
        false => list(&found, args.slowest),
    })
}

async fn decisions(replica: &Replica, path: &str) -> Result<Vec<Value>, AskError> {
    let reply = replica.get(path).await?;
    Ok(replica.member(&reply, "decisions")?.as_array().cloned().unwrap_or_default())
}

fn list(found: &[Value], slowest: bool) -> String {
    if found.is_empty() {
        return "no such request is kept: the last ones are (limits.decisions_kept), and for hours the \
                slowest, failed and retried ones of each minute. What is refused before a worker is \
                chosen is in the access log only"
            .to_owned();
    }
    let titles = [
        Column::text("time", 24),
        Column::text("request", 40),
        Column::text("model", 30),
        Column::text("prefill", 24),
        Column::text("decode", 24),
        Column::figure("tokens"),
        Column::figure("cached"),
        Column::figure("ttft ms"),
        Column::figure("total ms"),
        Column::text("outcome", 24),
    ];
    let shown = |value: &Value| if value.is_null() { "-".to_owned() } else { text(value) };
    let ms = |value: &Value| value.as_f64().map_or("-".to_owned(), |ms| format!("{ms:.0}"));
    let rows = found.iter().map(|decision| {
        let at = UNIX_EPOCH
            + Duration::from_millis(decision["decided_unix_ms"].as_u64().unwrap_or_default());
        vec![
            humantime::format_rfc3339_seconds(at).to_string(),
            shown(&decision["request_id"]),
            shown(&decision["model"]),
            shown(&decision["prefill_worker"]),
            shown(&decision["decode_worker"]),
            shown(&decision["prompt_tokens"]),
            shown(&decision["cached_tokens"]),
            ms(&decision["ttft_ms"]),
            ms(&decision["total_ms"]),
            shown(&decision["outcome"]),
        ]
    });
    let order = if slowest { "the slowest" } else { "the newest" };
    let head =
        format!("{} requests, {order} first; --request-id explains one of them", found.len());
    let table = lines(&titles, &rows.collect::<Vec<_>>());
    [vec![head, String::new()], table].concat().join("\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_time_needs_no_seconds_and_mistakes_name_an_example() {
        let at = |text: &str| time(text).map(|at| humantime::format_rfc3339(at).to_string());
        for text in ["2026-11-25T14:03Z", "2026-11-25 14:03", "2026-11-25T14:03:00Z"] {
            assert_eq!(at(text).unwrap(), "2026-11-25T14:03:00Z", "{text}");
        }
        assert!(at("14:03").unwrap_err().contains("for example `2026-11-25T14:03Z`"));
        assert!(duration("x").unwrap_err().contains("for example `15m`"));
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
    }
}
