//! Measures what API keys and the limits of a tenant cost a request: routers with and without them,
//! in turns.

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

/// The router without keys.
const OPEN: &str = "open";
/// The router with keys, and a tenant that gets no routing details (`debug: false`).
const ACCESS: &str = "access";
/// The router with keys, and a tenant that gets routing details (`debug: true`).
const ACCESS_DEBUG: &str = "access debug";

/// Compares routers that check a key and count a tenant's use with a router that does neither. One
/// tenant gets routing details in replies, as all clients do without tenants, and one does not. All
/// routers get the same requests, each with a key.
///
/// # Errors
/// A router does not become ready, a request gets no good reply, or the router serves requests
/// without a key.
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

/// Makes a key of the tenant with the router's program. Returns the key; the file gets its entry.
fn new_key(program: &Path, file: &Path) -> Result<String, Failure> {
    let args = ["keys", "new", "--tenant", TENANT, "--json", "--file"];
    let made = Command::new(program).args(args).arg(file).output()?;
    let made: Value = serde_json::from_slice(&made.stdout).map_err(|_| {
        format!("`splitrail keys new` prints no key: {}", String::from_utf8_lossy(&made.stderr))
    })?;
    Ok(made["key"].as_str().ok_or("`splitrail keys new` prints no key")?.to_owned())
}

/// The members of a configuration with which requests need a key of the file.
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

/// Checks that the router refuses a request without a key. Otherwise the workload would not measure
/// the check of keys.
fn check_that_a_key_is_needed(
    bench: &Bench<'_>,
    engines: &Engines,
    further: &str,
    folder: &Path,
) -> Result<(), Failure> {
    let settings = Settings { further, ..Kind::Aggregated(engines).into() };
    let program = &bench.options.splitrail;
    let starting = Target::ours_in(ACCESS, settings, program, folder, &[]);
    let target = bench.engine_runtime.block_on(starting)?;
    let reply = http::request(target.whole, "POST", "/v1/chat/completions", "{}");
    match bench.engine_runtime.block_on(reply)? {
        (401, _) => Ok(()),
        (status, _) => Err(format!("a request without a key is answered with {status}").into()),
    }
}
