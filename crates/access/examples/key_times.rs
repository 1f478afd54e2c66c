//! Measures whether the time of a check of an API key depends on the key: accepted keys, wrong keys
//! whose hashes begin like that of an entry, and random keys, in turn in one run.
//!
//! `cargo run --release -p splitrail-access --example key_times [TRIES]` prints a table of the
//! times in nanoseconds, for `KeySource::holder` and for `Access::client`. Random keys have two
//! rows: the difference between these is the noise of the measurement.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::time::{Instant, SystemTime};

use http::{HeaderMap, HeaderValue};
use splitrail_access::Access;
use splitrail_access::keys::{Grant, KeySource, generate};
use splitrail_config::keys::KeyEntry;
use splitrail_telemetry::Metrics;

/// Number of keys of each kind, so that a kind has no key that is always in the processor's cache.
const KEYS: usize = 1024;

const KINDS: [&str; 4] = ["accepted", "same beginning of the hash", "random", "random again"];

/// Number of hexadecimal digits of a hash by which entries are found.
const BEGINNING_DIGITS: usize = 16;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Keys of all kinds, and the entries of the file.
struct Keys {
    of_kind: [Vec<String>; KINDS.len()],
    entries: Vec<KeyEntry>,
}

fn keys() -> Outcome<Keys> {
    let mut of_kind: [Vec<String>; KINDS.len()] = Default::default();
    let mut entries = Vec::new();
    for _ in 0..KEYS {
        for (kind, keys) in of_kind.iter_mut().enumerate() {
            let grant = Grant::Tenant("acme".into());
            let (key, mut entry) = generate(&grant, None, None, SystemTime::now())?;
            keys.push(key);
            match kind {
                0 => entries.push(entry),
                1 => {
                    // All digits after the beginning are wrong.
                    let (beginning, rest) = entry.sha256.split_at(BEGINNING_DIGITS);
                    let rest: String =
                        rest.chars().map(|digit| if digit == '0' { '1' } else { '0' }).collect();
                    entry.sha256 = format!("{beginning}{rest}");
                    entries.push(entry);
                }
                _ => {}
            }
        }
    }
    Ok(Keys { of_kind, entries })
}

/// The access of a router whose keys are in this file.
fn access(folder: &Path, file: &Path) -> Outcome<Access> {
    let yaml = format!(
        "auth: [ {{ kind: keys, file: {:?} }} ]
tenants: [ {{ name: acme }} ]
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    workers: [ {{ id: w0, role: both, url: \"http://127.0.0.1:1\" }} ]
",
        file.display().to_string()
    );
    let loaded = splitrail_config::parse("splitrail.yaml", &yaml, folder);
    let config = loaded.map_err(|problems| problems.to_string())?.config;
    Ok(Access::new(&config, &Metrics::new()?, None)?)
}

/// Measures the kinds in turn, each time in another order, and prints a table.
fn measure<T>(what: &str, tries: usize, of_kind: &[Vec<T>], check: impl Fn(&T) -> bool) {
    let mut times: Vec<Vec<u64>> = of_kind.iter().map(|_| Vec::with_capacity(tries)).collect();
    for number in 0..tries {
        for turn in 0..of_kind.len() {
            let kind = (turn + number) % of_kind.len();
            // Not the order in which the keys were made.
            let key = &of_kind[kind][number.wrapping_mul(389) % KEYS];
            let start = Instant::now();
            let is_accepted = black_box(check(black_box(key)));
            times[kind].push(start.elapsed().as_nanos() as u64);
            assert_eq!(is_accepted, kind == 0, "a {} key", KINDS[kind]);
        }
    }
    println!("\n{what}, {tries} tries of each kind, ns\n");
    println!("| key | 10 % | median | mean of the middle half | 90 % |\n|---|---:|---:|---:|---:|");
    for (name, times) in KINDS.iter().zip(&mut times) {
        times.sort_unstable();
        let at = |percent: usize| times[times.len() * percent / 100];
        let middle = &times[times.len() / 4..times.len() * 3 / 4];
        let mean = middle.iter().sum::<u64>() as f64 / middle.len() as f64;
        println!("| {name} | {} | {} | {mean:.1} | {} |", at(10), at(50), at(90));
    }
}

fn main() -> Outcome<()> {
    let tries = std::env::args().nth(1).map_or(Ok(100_000), |text| text.parse())?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("keys.yaml");
    let Keys { of_kind, entries } = keys()?;
    std::fs::write(&file, serde_json::json!({ "keys": entries }).to_string())?;
    let source = KeySource::open(&file).map_err(|problems| problems.to_string())?;
    let now = SystemTime::now();
    measure("KeySource::holder", tries, &of_kind, |key| source.holder(key, now).is_ok());

    let access = access(folder.path(), &file)?;
    let headers = of_kind.map(|keys| {
        let of_key = |key: String| {
            let value = HeaderValue::from_str(&format!("Bearer {key}")).ok();
            value.map(|value| HeaderMap::from_iter([(http::header::AUTHORIZATION, value)]))
        };
        keys.into_iter().filter_map(of_key).collect::<Vec<_>>()
    });
    measure("Access::client", tries, &headers, |headers| {
        access.client(headers, None, now).is_ok_and(|tenant| tenant.is_some())
    });
    Ok(())
}
