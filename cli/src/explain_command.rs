//! `splitrail explain`: asks a running router for the reasons of a request's placement.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use clap::{ArgGroup, Args};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde_json::Value;
use splitrail_settings::command::{Failure, Paint, exit};

use crate::admin::{AdminArgs, AskErrorKind, Replica, percent_encoded};

mod table;

/// Maximum size of a request in bytes: no router takes a larger one (`limits.body_size_max`).
const BODY_MAX_BYTES: u64 = 1 << 30;

/// The arguments.
#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true).args(["request", "request_id"]))]
pub(crate) struct ExplainArgs {
    /// A file with a request's JSON body, or `-` for standard input; the request is not served.
    #[arg(long, value_name = "FILE")]
    request: Option<PathBuf>,
    /// The id (`x-request-id`) of a recently served request.
    #[arg(long, value_name = "ID", conflicts_with_all = ["request", "endpoint", "header"])]
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
    /// Prints the router's reply as JSON.
    #[arg(long)]
    json: bool,
    /// The routers; the first one that has a reply counts.
    #[command(flatten)]
    admin: AdminArgs,
}

/// Asks the router, and returns the text to print.
pub(crate) async fn run(args: ExplainArgs) -> Result<String, Failure> {
    let body = match &args.request {
        Some(path) => read_body(path).map_err(|error| {
            Failure::new(exit::NO_INPUT, format!("{}: {error}", path.display()))
        })?,
        None => Vec::new(),
    };
    let path = path(&args);
    let headers: HeaderMap = args.header.into_iter().collect();
    let replicas = args.admin.replicas().await?;
    let reply = first_reply(&replicas, &path, &headers, body.into()).await?;
    if args.json {
        return Ok(format!("{reply:#}"));
    }
    let mut text = String::new();
    table::write(&mut text, &reply, Paint::of_stdout());
    Ok(text)
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

/// The reply of the first replica that has one. A request is known to the replica that served it.
async fn first_reply(
    replicas: &[Replica],
    path: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Value, Failure> {
    let mut refusal = None;
    for replica in replicas {
        let reply = replica.send(Method::POST, path, headers.clone(), body.clone()).await;
        let reply = reply.and_then(|reply| {
            replica.member(&reply, "dry_run")?;
            Ok(reply)
        });
        match reply {
            Ok(reply) => return Ok(reply),
            // A refusal says more than a replica that is not there.
            Err(error) if error.kind == AskErrorKind::Refused || refusal.is_none() => {
                refusal = Some(error);
            }
            Err(_) => {}
        }
    }
    Err(refusal.map_or_else(|| Failure::new(exit::USAGE, "no router is named"), Failure::from))
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("must be `NAME: VALUE`")?;
    let name = name.trim().parse().map_err(|_| format!("`{name}` is no header's name"))?;
    let value = value.trim().parse().map_err(|_| format!("`{value}` is no header's value"))?;
    Ok((name, value))
}
