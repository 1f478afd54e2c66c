//! The time to first token as the access log has it, against that of the client: of each of many
//! streams through a prefill and a decode engine.

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use splitrail_sim::{Role, SimConfig, SimEngine};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::super::client::{PATIENCE, http1_request, read_first_event};
use super::super::report::{Goal, Row};
use super::super::targets::{Kind, Settings, Target};
use super::super::text::{SIZES, Text};
use super::super::{BLOCK_SIZE, Bench, Failure, MODEL};

/// Number of streams, and of clients that share them.
const STREAMS: usize = 1000;
const CLIENTS: usize = 4;

/// The name of the router and of its rows.
const NAME: &str = "watched ttft";

/// How much longer clients wait than the access log says, over a thousand streams.
///
/// # Errors
/// A router that does not become ready, a stream that does not begin or is not in the log, a time in
/// the log that is longer than the client's.
pub(super) fn ttft(bench: &Bench<'_>, text: &Text, folder: &Path) -> Result<Vec<Row>, Failure> {
    let engines = bench.behind.block_on(engines())?;
    let log = folder.join("ttft.jsonl");
    let further = format!("access_log: {{ enabled: true, path: {log:?} }}\n");
    let settings = Settings { further: &further, ..Kind::Simulated(&engines).into() };
    let program = &bench.options.splitrail;
    let variables = [("RUST_LOG", "warn")];
    let starting = Target::ours_in(NAME, settings, program, folder, &variables);
    let target = bench.behind.block_on(starting)?;
    let bodies = text.prompts(SIZES[0]).iter().map(|prompt| prompt.chat(true)).collect::<Vec<_>>();
    let seen_ms = bench.before.block_on(seen(target.streams, bodies))?;
    let told_ms = bench.before.block_on(told(&log))?;
    let mut late_ms = Vec::with_capacity(seen_ms.len());
    for (id, seen_ms) in &seen_ms {
        let told_ms = told_ms.get(id).ok_or("a stream is not in the access log")?;
        if told_ms > seen_ms {
            return Err(format!("{id}: {told_ms} ms in the log, {seen_ms} ms at the client").into());
        }
        late_ms.push(seen_ms - told_ms);
    }
    late_ms.sort_by(f64::total_cmp);
    let at = |share: f64| late_ms[((late_ms.len() - 1) as f64 * share) as usize];
    let row = |measure, share, goal| Row::alone(NAME, measure, (at(share), "ms"), goal);
    Ok(vec![
        row("client's TTFT over ours, median", 0.5, Some(Goal::AtMost(2.0))),
        row("client's TTFT over ours, p99", 0.99, None),
    ])
}

/// A prefill and a decode engine that take as long as a small model's.
async fn engines() -> Result<[SimEngine; 2], Failure> {
    let config = |role| SimConfig {
        role,
        model: MODEL.to_owned(),
        block_size: BLOCK_SIZE,
        kv_blocks: 65_536,
        prefill_us_per_token: 10,
        decode_us_per_step: 2_000,
        transfer_us_per_block: 50,
        ..SimConfig::default()
    };
    let [prefill, decode] = [Role::Prefill, Role::Decode].map(config);
    Ok([SimEngine::start(prefill).await?, SimEngine::start(decode).await?])
}

/// The time to first token at the client, in milliseconds, by request id.
async fn seen(address: SocketAddr, bodies: Vec<String>) -> Result<HashMap<String, f64>, Failure> {
    let mut clients = JoinSet::new();
    let bodies = std::sync::Arc::new(bodies);
    for client in 0..CLIENTS {
        let bodies = std::sync::Arc::clone(&bodies);
        clients.spawn(async move {
            let mut seen = Vec::with_capacity(STREAMS / CLIENTS);
            for turn in (client..STREAMS).step_by(CLIENTS) {
                let id = format!("ttft-{turn}");
                let field = format!("x-request-id: {id}\r\n");
                let request = http1_request(&field, bodies[turn % bodies.len()].as_bytes());
                let took = read_first_event(address, &request).await?;
                seen.push((id, took.as_secs_f64() * 1e3));
            }
            Ok::<_, Failure>(seen)
        });
    }
    let mut all = HashMap::new();
    while let Some(seen) = clients.join_next().await {
        all.extend(seen??);
    }
    Ok(all)
}

/// The time to first token in the access log, in milliseconds, by request id.
async fn told(log: &Path) -> Result<HashMap<String, f64>, Failure> {
    let since = Instant::now();
    loop {
        let text = fs::read_to_string(log)?;
        // The last line may be half written.
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let told: HashMap<String, f64> = lines
            .filter_map(|line| {
                Some((line["request_id"].as_str()?.to_owned(), line["ttft_ms"].as_f64()?))
            })
            .collect();
        if told.len() == STREAMS {
            return Ok(told);
        }
        if since.elapsed() > PATIENCE {
            return Err(format!("{} of {STREAMS} streams are in the access log", told.len()).into());
        }
        sleep(Duration::from_millis(50)).await;
    }
}
