//! Requests with wrong API keys: whether the time of a refusal reveals anything about the key, and
//! what many refusals cost.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use rand::seq::SliceRandom;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use super::access::{OPEN_LIMITS, TENANT};
use super::engines::Engines;
use super::mock::{content_length, find};
use super::report::{Goal, Row};
use super::targets::{Kind, Settings, Target};
use super::{Bench, Failure};
use crate::fleet::process::Resident;
use crate::fleet::report::print_line;

/// Number of requests with each kind of key.
const TRIES: usize = 100_000;
/// Number of requests with each kind of key, with `--quick`.
const QUICK_TRIES: usize = 10_000;

/// Number of requests of the flood.
const FLOOD: usize = 1_000_000;
/// Number of requests of the flood, with `--quick`.
const QUICK_FLOOD: usize = 100_000;

/// Number of connections of the flood.
const CONNECTIONS: usize = 16;

/// Number of hexadecimal digits of a hash by which the router finds the entry of a key.
const BEGINNING_DIGITS: usize = 16;

/// Goal for the distance between the share of requests that take longer than one with a random key
/// and one half, which is the share if the kinds do not differ; in percent.
const DISTANCE_PERCENT: f64 = 1.0;

/// A kind of key.
struct KeyKind {
    name: &'static str,
    /// The request with the key.
    request: Vec<u8>,
    /// Whether the router accepts the key.
    is_accepted: bool,
}

/// Sends requests with several kinds of keys, in turns over one connection, and then many requests
/// with different wrong keys over several connections.
///
/// # Errors
/// The router does not become ready, or answers a wrong key with another status than 401.
pub(super) fn refusals(
    bench: &Bench<'_>,
    engines: &Engines,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    let options = bench.options;
    if !options.wants("refusals") || (options.quick && options.only.is_none()) {
        return Ok(Vec::new());
    }
    let file = folder.join("refused-keys.yaml");
    let kinds = kinds(&options.splitrail, &file)?;
    let further = format!(
        "auth: [{{ kind: keys, file: {file:?} }}]\ntenants: [{{ name: {TENANT}, {OPEN_LIMITS} }}]\n"
    );
    let settings = Settings { further: &further, ..Kind::Aggregated(engines).into() };
    let variables = [("RUST_LOG", options.log.as_str())];
    let starting = Target::ours_in("refusals", settings, &options.splitrail, folder, &variables);
    let target = bench.engine_runtime.block_on(starting)?;
    let (tries, flood) = match options.quick {
        true => (QUICK_TRIES, QUICK_FLOOD),
        false => (TRIES, FLOOD),
    };
    let mut rows = times(target.whole, &kinds, tries)?;
    rows.extend(measure_flood(bench, &target, &folder.join("refusals.log"), flood)?);
    Ok(rows)
}

/// Makes one key of each kind, and writes the entries of the keys to the file.
fn kinds(program: &Path, file: &Path) -> Result<Vec<KeyKind>, Failure> {
    let make = || {
        let args = ["keys", "new", "--tenant", TENANT, "--json"];
        let made = Command::new(program).args(args).output()?;
        let made: Value = serde_json::from_slice(&made.stdout).map_err(|_| {
            format!("`splitrail keys new` prints no key: {}", String::from_utf8_lossy(&made.stderr))
        })?;
        let key = made["key"].as_str().ok_or("`splitrail keys new` prints no key")?.to_owned();
        Ok::<_, Failure>((key, made["entry"].clone()))
    };
    let (accepted, entry) = make()?;
    let (same_hash, mut of_same_hash) = make()?;
    let hash = of_same_hash["sha256"].as_str().ok_or("the key's entry has no hash")?;
    let (beginning, rest) = hash.split_at(BEGINNING_DIGITS);
    of_same_hash["sha256"] = json!(format!("{beginning}{}", other_digits(rest)));
    let (expired, mut of_expired) = make()?;
    of_expired["expires"] = json!("2020-01-01T00:00:00Z");
    let (random, _) = make()?;
    let entries = [entry, of_same_hash, of_expired].map(|entry| format!("- {entry}\n")).concat();
    fs::write(file, format!("keys:\n{entries}"))?;

    let (all_but_last, last) = accepted.split_at(accepted.len() - 1);
    let neighbour = format!("{all_but_last}{}", other_digits(last));
    let kind = |name, key: &str, is_accepted| KeyKind {
        name,
        request: request(key).into_bytes(),
        is_accepted,
    };
    Ok(vec![
        kind("random", &random, false),
        kind("random again", &random, false),
        kind("all but the last digit right", &neighbour, false),
        kind("same beginning of the hash", &same_hash, false),
        kind("expired", &expired, false),
        kind("accepted", &accepted, true),
    ])
}

/// Replaces each hexadecimal digit by another one.
fn other_digits(digits: &str) -> String {
    digits.chars().map(|digit| if digit == '0' { '1' } else { '0' }).collect()
}

/// A request for a model that does not exist. The router answers it alone: with 404 if it accepts
/// the key, otherwise with 401.
fn request(key: &str) -> String {
    format!("GET /v1/models/none HTTP/1.1\r\nhost: router\r\nauthorization: Bearer {key}\r\n\r\n")
}

/// Measures the kinds in rounds, each in a random order, because a request influences the time of
/// the next one. The rows have the distance between the share of requests that took longer than one
/// with a random key and one half, which is the share if the kinds cannot be distinguished.
fn times(address: SocketAddr, kinds: &[KeyKind], tries: usize) -> Result<Vec<Row>, Failure> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut buffer = [0; 4096];
    let mut times: Vec<Vec<u64>> = kinds.iter().map(|_| Vec::with_capacity(tries)).collect();
    let mut order: Vec<usize> = (0..kinds.len()).collect();
    for _ in 0..tries {
        order.shuffle(&mut rand::rng());
        for at in order.iter().copied() {
            let kind = &kinds[at];
            let began = Instant::now();
            stream.write_all(&kind.request)?;
            let status = read_reply(&mut stream, &mut buffer)?;
            times[at].push(u64::try_from(began.elapsed().as_nanos())?);
            let expected = if kind.is_accepted { "404" } else { "401" };
            if status != expected {
                return Err(format!("{}: {status} instead of {expected}", kind.name).into());
            }
        }
    }
    times.iter_mut().for_each(|times| times.sort_unstable());
    print_line(&format!("\nrefused keys, {tries} requests each, one after another"))?;
    print_line(&format!(
        "  {:<30} {:>9} {:>9} {:>9} {:>22}",
        "key", "p10 us", "p50 us", "p90 us", "longer than random, %"
    ))?;
    let mut rows = Vec::new();
    for (kind, times_ns) in kinds.iter().zip(&times) {
        let longer = longer_percent(times_ns, &times[0]);
        let us = |percent: usize| times_ns[(tries - 1) * percent / 100] as f64 / 1e3;
        let [p10, p50, p90] = [10, 50, 90].map(us);
        print_line(&format!(
            "  {:<30} {p10:>9.2} {p50:>9.2} {p90:>9.2} {longer:>22.2}",
            kind.name
        ))?;
        let measure = format!("{}: distance", kind.name);
        if kind.name == kinds[0].name {
            continue;
        }
        // The reply to an accepted key differs, so its time reveals nothing more.
        let goal = (!kind.is_accepted).then_some(Goal::AtMost(DISTANCE_PERCENT));
        rows.push(Row::alone("refused keys", &measure, ((longer - 50.0).abs(), "%"), goal));
    }
    Ok(rows)
}

/// The share, in percent, of pairs in which the time from the first list is longer than the time
/// from the second list; equal times count half. This is the Mann-Whitney statistic U, divided by
/// the number of pairs. Both lists must be sorted.
fn longer_percent(times: &[u64], others: &[u64]) -> f64 {
    let pairs: f64 = times
        .iter()
        .map(|time| {
            let shorter = others.partition_point(|other| other < time);
            let not_longer = others.partition_point(|other| other <= time);
            shorter as f64 + (not_longer - shorter) as f64 / 2.0
        })
        .sum();
    pairs / (times.len() as f64 * others.len() as f64) * 100.0
}

/// Reads one reply. Returns its status.
fn read_reply(stream: &mut TcpStream, buffer: &mut [u8]) -> Result<String, Failure> {
    let mut filled = 0;
    loop {
        match stream.read(&mut buffer[filled..])? {
            0 => return Err("the connection was closed in the middle of a reply".into()),
            count => filled += count,
        }
        if let Some(status) = status_of(&buffer[..filled]) {
            return Ok(status);
        }
    }
}

/// The status of a reply; `None` if the reply is not complete.
fn status_of(reply: &[u8]) -> Option<String> {
    let head = find(reply, b"\r\n\r\n")? + 4;
    let text = String::from_utf8_lossy(&reply[..head]).to_ascii_lowercase();
    let is_complete = reply.len() >= head + content_length(&text);
    is_complete.then(|| text.chars().skip("http/1.1 ".len()).take(3).collect())
}

/// Sends requests with different wrong keys as fast as they are answered, and measures their cost.
fn measure_flood(
    bench: &Bench<'_>,
    target: &Target,
    log: &Path,
    requests: usize,
) -> Result<Vec<Row>, Failure> {
    let process = target.process.as_ref().ok_or("the router has no process")?;
    // The first twentieth is not counted: it makes the router allocate what any busy router holds.
    bench.client_runtime.block_on(flood(target.whole, 0, requests / 20))?;
    let (lines, cpu) = (lines_of(log)?, process.cpu()?);
    let resident = process.resident_mb(Resident::Now)?;
    let began = Instant::now();
    bench.client_runtime.block_on(flood(target.whole, requests / 20, requests))?;
    let (took, cpu) = (began.elapsed(), process.cpu()?.saturating_sub(cpu));
    let growth = process.resident_mb(Resident::Peak)? - resident;
    let sent = (requests - requests / 20) as f64;
    let row = |measure, figure, goal| Row::alone("refused keys, flood", measure, figure, goal);
    let us = |time: std::time::Duration| (time.as_secs_f64() * 1e6 / sent, "us");
    let lines = (lines_of(log)? - lines) as f64;
    Ok(vec![
        // One million requests per minute.
        row("time per request", us(took), Some(Goal::AtMost(60.0))),
        row("CPU per request", us(cpu), None),
        row("memory growth", (growth, "MB"), Some(Goal::AtMost(8.0))),
        row("lines in the log", (lines, "lines"), Some(Goal::AtMost(10.0))),
    ])
}

fn lines_of(log: &Path) -> Result<usize, Failure> {
    Ok(fs::read_to_string(log)?.lines().count())
}

/// Sends the requests with the numbers `from..to`, each with a wrong key of its own.
async fn flood(address: SocketAddr, from: usize, to: usize) -> Result<(), Failure> {
    let next = Arc::new(AtomicUsize::new(from));
    let mut clients = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let next = Arc::clone(&next);
        clients.spawn(async move {
            let mut stream = tokio::net::TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let mut buffer = Vec::with_capacity(4096);
            loop {
                let number = next.fetch_add(1, Relaxed);
                if number >= to {
                    return Ok::<_, Failure>(());
                }
                stream.write_all(request(&format!("sr-{number:064x}")).as_bytes()).await?;
                buffer.clear();
                let status = loop {
                    if stream.read_buf(&mut buffer).await? == 0 {
                        return Err("the connection was closed in the middle of a reply".into());
                    }
                    if let Some(status) = status_of(&buffer) {
                        break status;
                    }
                };
                if status != "401" {
                    return Err(format!("a wrong key is answered with {status}").into());
                }
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lists_are_longer_in_half_of_the_pairs() {
        assert_eq!(longer_percent(&[1, 2, 3], &[1, 2, 3]), 50.0);
        assert_eq!(longer_percent(&[3, 4], &[1, 2]), 100.0);
        assert_eq!(longer_percent(&[1, 2], &[3, 4]), 0.0);
        assert_eq!(longer_percent(&[2, 2], &[1, 2]), 75.0);
    }
}
