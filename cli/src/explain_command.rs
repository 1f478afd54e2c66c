//! `splitrail explain`: asks running routers for the reasons of a request's placement.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use clap::{ArgGroup, Args};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde_json::Value;
use splitrail_settings::command::{Failure, Paint, exit, print_error};

use crate::admin::{AdminArgs, AskError, AskErrorKind, Replica, percent_encoded};
use crate::cluster::{ask_all, worst_code};
use search::SearchArgs;
use table::Layout;

mod candidates;
mod reason;
mod search;
mod table;

/// Maximum size of a request in bytes: no router takes a larger one (`limits.body_size_max`).
const BODY_MAX_BYTES: u64 = 1 << 30;

/// The arguments.
#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true).args([
    "request", "request_id", "worker", "since", "at", "failed", "slowest",
]))]
pub(crate) struct ExplainArgs {
    /// A file with a request's JSON body, or `-` for standard input; the request is not served.
    #[arg(long, value_name = "FILE", conflicts_with = "search")]
    request: Option<PathBuf>,
    /// The id (`x-request-id`) of a recently served request.
    #[arg(long, value_name = "ID", conflicts_with_all = ["request", "endpoint", "header", "search"])]
    request_id: Option<String>,
    /// The path for which the request is meant. Derived from the body's members by default.
    #[arg(long, value_name = "PATH")]
    endpoint: Option<String>,
    /// A header of the request: `x-splitrail-flow: decode_first`.
    #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// The tenant whose request it is.
    #[arg(long, value_name = "NAME", conflicts_with = "request_id")]
    tenant: Option<String>,
    #[command(flatten)]
    search: SearchArgs,
    /// Prints the router's reply as JSON.
    #[arg(long)]
    json: bool,
    /// The routers; the first one that has a reply counts.
    #[command(flatten)]
    admin: AdminArgs,
}

/// Asks the routers, and returns the text to print.
pub(crate) async fn run(args: ExplainArgs) -> Result<String, Failure> {
    if args.search.is_given() {
        return search::run(&args.search, &args.admin, args.json).await;
    }
    let body = match &args.request {
        Some(path) => read_body(path).map_err(|error| {
            Failure::new(exit::NO_INPUT, format!("{}: {error}", path.display()))
        })?,
        None => Vec::new(),
    };
    let path = path(&args);
    let headers: HeaderMap = args.header.into_iter().collect();
    let replicas = args.admin.replicas().await?;
    let replies = ask(&replicas, &path, &headers, body.into()).await;
    let FoundExplanation { reply, not_asked } =
        find(&replicas, replies, args.request_id.is_some())?;
    if args.json {
        not_asked.iter().for_each(|line| print_error(line));
        return Ok(format!("{reply:#}"));
    }
    Ok([&[explanation_text(&reply)], &not_asked[..]].concat().join("\n"))
}

/// A reply of `POST /admin/explain` as text for the terminal.
pub(crate) fn explanation_text(reply: &Value) -> String {
    let mut text = String::new();
    table::write(&mut text, reply, Layout { paint: Paint::of_stdout(), width: terminal_width() });
    text.trim_end().to_owned()
}

/// The columns of the terminal; `None` if the output goes elsewhere.
fn terminal_width() -> Option<usize> {
    let width = || crossterm::terminal::size().ok().map(|(columns, _)| usize::from(columns));
    io::stdout().is_terminal().then(width).flatten()
}

/// The content of a file; `-` is standard input.
fn read_body(path: &Path) -> io::Result<Vec<u8>> {
    let file: Box<dyn Read> = match path.to_str() {
        Some("-") => Box::new(io::stdin()),
        _ => Box::new(File::open(path)?),
    };
    let mut body = Vec::new();
    file.take(BODY_MAX_BYTES + 1).read_to_end(&mut body)?;
    if body.len() as u64 > BODY_MAX_BYTES {
        return Err(io::Error::other(format!("more than {BODY_MAX_BYTES} bytes")));
    }
    Ok(body)
}

/// The path with its query.
fn path(args: &ExplainArgs) -> String {
    let members =
        [("request_id", &args.request_id), ("tenant", &args.tenant), ("endpoint", &args.endpoint)];
    let given = members.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)));
    let query: Vec<String> =
        given.map(|(name, value)| format!("{name}={}", percent_encoded(value))).collect();
    format!("/admin/explain?{}", query.join("&"))
}

/// The replies of all replicas, which are asked at the same time.
async fn ask(
    replicas: &[Replica],
    path: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Vec<Result<Value, AskError>> {
    ask_all(replicas, |replica| {
        let (path, headers, body) = (path.to_owned(), headers.clone(), body.clone());
        async move {
            let reply = replica.send(Method::POST, &path, headers, body).await?;
            replica.member(&reply, "dry_run")?;
            Ok(reply)
        }
    })
    .await
}

/// An explanation.
struct FoundExplanation {
    /// The reply of the first replica that has one.
    reply: Value,
    /// A line for each replica that could not be asked.
    not_asked: Vec<String>,
}

/// Finds the reply of the first replica that has one. A past request (`is_past`) is known to the
/// replica that served it.
///
/// # Errors
/// No replica has a reply. A refusal is shown before a replica that could not be asked, but decides
/// the exit code only if that replica cannot know more.
fn find(
    replicas: &[Replica],
    replies: Vec<Result<Value, AskError>>,
    is_past: bool,
) -> Result<FoundExplanation, Failure> {
    let (mut found, mut refusal, mut missing) = (None, None, Vec::new());
    for (replica, reply) in replicas.iter().zip(replies) {
        match reply {
            Ok(reply) => found = found.or(Some(reply)),
            Err(error) if error.kind == AskErrorKind::Refused => {
                refusal = refusal.or(Some(error));
            }
            Err(error) => missing.push((replica.name(), error)),
        }
    }
    let line =
        |(name, error): &(String, AskError)| format!("not asked: {name} ({})", error.message());
    let lines = |missing: &[(String, AskError)]| missing.iter().map(line).collect::<Vec<_>>();
    if let Some(reply) = found {
        return Ok(FoundExplanation { reply, not_asked: lines(&missing) });
    }
    let errors = || missing.iter().map(|(_, error)| error);
    let (code, said, others) = match (&refusal, &missing[..]) {
        (None, []) => return Err(Failure::new(exit::USAGE, "no router is named")),
        (None, [(_, first), others @ ..]) => {
            (worst_code(errors(), exit::UNAVAILABLE), first.to_string(), others)
        }
        (Some(refusal), all) if is_past => {
            (worst_code(errors(), refusal.exit_code()), refusal.to_string(), all)
        }
        (Some(refusal), all) => (refusal.exit_code(), refusal.to_string(), all),
    };
    Err(Failure::new(code, [&[said], &lines(others)[..]].concat().join("\n")))
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("must be `NAME: VALUE`")?;
    let name = name.trim().parse().map_err(|_| format!("`{name}` is not a header name"))?;
    let value = value.trim().parse().map_err(|_| format!("`{value}` is not a header value"))?;
    Ok((name, value))
}
