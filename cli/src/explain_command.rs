//! `splitrail explain`: asks a running router for the reasons of a request's placement.

use std::fmt::Write;
use std::path::PathBuf;

use bytes::Bytes;
use clap::Args;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use splitrail_settings::Secret;
use splitrail_settings::command::{Failure, exit};

mod table;

/// Maximum size of a reply in bytes. An explanation has one line per worker and prompt, so no reply
/// is nearly as large.
const REPLY_MAX_BYTES: usize = 256 << 20;

/// The arguments.
#[derive(Args)]
pub(crate) struct ExplainArgs {
    /// The router's admin listener.
    #[arg(long, default_value = "http://127.0.0.1:9090")]
    admin: Uri,
    /// A file with a request's JSON body; the request is not served.
    #[arg(long, value_name = "FILE", required_unless_present = "request_id")]
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
    /// A file with a key of the role `read`, if the admin listener needs one. Without it, the
    /// variable SPLITRAIL_ADMIN_KEY of the environment is used, if it is set.
    #[arg(long, value_name = "FILE")]
    admin_key_file: Option<PathBuf>,
    /// Prints the router's reply as JSON.
    #[arg(long)]
    json: bool,
}

/// Asks the router, and returns the text to print.
pub(crate) async fn run(args: ExplainArgs) -> Result<String, Failure> {
    let body = match &args.request {
        Some(path) => tokio::fs::read(path).await.map_err(|error| {
            Failure::new(exit::NO_INPUT, format!("{}: {error}", path.display()))
        })?,
        None => Vec::new(),
    };
    let mut query = Vec::new();
    let escaped = |text: &str| text.bytes().map(percent).collect::<String>();
    query.extend(args.request_id.as_deref().map(|id| format!("request_id={}", escaped(id))));
    query.extend(args.tenant.as_deref().map(|name| format!("tenant={}", escaped(name))));
    query.extend(args.endpoint.as_deref().map(|path| format!("endpoint={}", escaped(path))));
    let base = args.admin.to_string();
    let uri = format!("{}/admin/explain?{}", base.trim_end_matches('/'), query.join("&"));
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(&uri)
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| Failure::new(exit::UNAVAILABLE, format!("--admin {base}: {error}")))?;
    request.headers_mut().extend(args.header);
    if let Some(key) = admin_key(args.admin_key_file)? {
        request.headers_mut().insert(AUTHORIZATION, key);
    }
    let (refused, reply) = ask(request).await.map_err(|error| {
        Failure::new(
            exit::UNAVAILABLE,
            format!("the admin listener at {base} cannot be asked: {error}"),
        )
    })?;
    if refused {
        let message = reply["error"]["message"].as_str().map_or(reply.to_string(), str::to_owned);
        return Err(Failure::new(exit::DATA_ERROR, message));
    }
    if args.json {
        return Ok(format!("{reply:#}"));
    }
    let mut text = String::new();
    table::write(&mut text, &reply);
    Ok(text)
}

/// The name of the variable with a key for the admin listener.
const KEY_VARIABLE: &str = "SPLITRAIL_ADMIN_KEY";

/// The credential for the admin listener, if there is one.
fn admin_key(file: Option<PathBuf>) -> Result<Option<HeaderValue>, Failure> {
    let secret = match file {
        Some(path) => Secret::File { path },
        None if std::env::var_os(KEY_VARIABLE).is_some() => {
            Secret::Env { name: KEY_VARIABLE.into() }
        }
        None => return Ok(None),
    };
    let key = secret.resolve().map_err(|error| {
        Failure::new(exit::NO_INPUT, format!("the key for the admin listener: {error}"))
    })?;
    Ok(Some(key.bearer()))
}

/// Sends the request; returns whether the router refused, and its reply.
async fn ask(
    request: Request<Full<Bytes>>,
) -> Result<(bool, Value), Box<dyn std::error::Error + Send + Sync>> {
    let client: Client<HttpConnector, Full<Bytes>> =
        Client::builder(TokioExecutor::new()).build_http();
    let reply = client.request(request).await?;
    let refused = !reply.status().is_success();
    let body = Limited::new(reply.into_body(), REPLY_MAX_BYTES).collect().await?.to_bytes();
    Ok((refused, serde_json::from_slice(&body)?))
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("must be `NAME: VALUE`")?;
    let name = name.trim().parse().map_err(|_| format!("`{name}` is no header's name"))?;
    let value = value.trim().parse().map_err(|_| format!("`{value}` is no header's value"))?;
    Ok((name, value))
}

/// A byte in the encoding of a query.
fn percent(byte: u8) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _written = match byte.is_ascii_alphanumeric() || b"-_./".contains(&byte) {
        true => write!(text, "{}", char::from(byte)),
        false => write!(text, "%{byte:02X}"),
    };
    text
}
