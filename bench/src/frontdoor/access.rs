//! What API keys and the limits of a tenant cost a request: routers with and without them, in turn.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::client::Load;
use super::engines::Engines;
use super::report::{Goal, Row};
use super::settings::{Requests, Variant, compare, row_of};
use super::targets::{Kind, Settings, Target};
use super::text::{SIZES, Text};
use super::{Bench, Failure};
use crate::fleet::http;

/// The name of the tenant.
pub(super) const TENANT: &str = "bench";

/// The limits of the tenant, which are the highest that can be configured, so that no request is
/// refused.
pub(super) const OPEN_LIMITS: &str = "limits: { requests_per_minute: 1000000000, \
                                      tokens_per_minute: 1000000000000, requests_in_flight: 1000000 }";

/// The router without keys, and those with keys: the names of their rows.
const OPEN: &str = "open";
const ACCESS: &str = "access";
const ACCESS_DEBUG: &str = "access debug";

/// A router that asks for a key and counts a tenant's use, against a router that does not; once with
/// a tenant that is told how its requests were routed, as all clients are without tenants, and once
/// with a tenant that is not. All get the same requests, each with a key.
///
/// # Errors
/// A router that does not become ready, a request that is not answered, or is answered without its
/// key.
pub(super) fn access(
    bench: &Bench<'_>,
    engines: &Engines,
    text: &Text,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    let options = bench.options;
    if !options.wants("access") || (options.quick && options.only.is_none()) {
        return Ok(Vec::new());
    }
    let file = folder.join("keys.yaml");
    let key = new_key(&options.splitrail, &file)?;
    let [quiet, debug] = [false, true].map(|debug| members(&file, debug));
    let log = ("RUST_LOG", options.log.as_str());
    let variants = [(OPEN, ""), (ACCESS, &*quiet), (ACCESS_DEBUG, &*debug)]
        .map(|(name, further)| Variant { name, further, variable: log });
    check_that_a_key_is_needed(bench, engines, &quiet, folder)?;
    let load = Load::with_key(&text.prompts(SIZES[0]), &key);
    let requests = Requests { workload: "access", clients: 16, load };
    let cell = compare(bench, engines, folder, requests, &variants)?;
    let goal = Some(Goal::RatioAtMost(1.03));
    let row = |name| row_of(&cell, (name, OPEN), ("CPU per request", "us", |f| f.cpu_us), goal);
    Ok(vec![row(ACCESS), row(ACCESS_DEBUG)])
}

/// Has the router's program make a key of the tenant.
fn new_key(program: &Path, file: &Path) -> Result<String, Failure> {
    let args = ["keys", "new", "--tenant", TENANT, "--json", "--file"];
    let made = Command::new(program).args(args).arg(file).output()?;
    let made: Value = serde_json::from_slice(&made.stdout)
        .map_err(|_| format!("no key: {}", String::from_utf8_lossy(&made.stderr)))?;
    Ok(made["key"].as_str().ok_or("no key")?.to_owned())
}

/// The members of the configuration by which the tenant needs a key of the file.
fn members(file: &Path, debug: bool) -> String {
    format!(
        "auth: [{{ kind: keys, file: {file:?} }}]
tenants:
  - name: {TENANT}
    weight: 2
    debug: {debug}
    {OPEN_LIMITS}
"
    )
}

/// Fails if the router serves a request without a key: what is measured would not be the check of
/// keys.
fn check_that_a_key_is_needed(
    bench: &Bench<'_>,
    engines: &Engines,
    further: &str,
    folder: &Path,
) -> Result<(), Failure> {
    let settings = Settings { further, ..Kind::Aggregated(engines).into() };
    let program = &bench.options.splitrail;
    let starting = Target::ours_in(ACCESS, settings, program, folder, &[]);
    let target = bench.behind.block_on(starting)?;
    let asking = http::request(target.whole, "POST", "/v1/chat/completions", "{}");
    match bench.behind.block_on(asking)? {
        (401, _) => Ok(()),
        (status, _) => Err(format!("a request without a key is answered with {status}").into()),
    }
}
