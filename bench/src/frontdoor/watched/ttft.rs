//! Compares the time to first token in the access log with that of the client, for each of many
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

use super::super::client::{REPLY_TIMEOUT, http1_request, read_first_event};
use super::super::report::{Goal, Row};
use super::super::targets::{Kind, Settings, Target};
use super::super::text::{SIZES, Text};
use super::super::{BLOCK_SIZE, Bench, Failure, MODEL};

/// Number of streams of all clients.
const STREAMS: usize = 1000;
/// Number of concurrent clients.
const CLIENTS: usize = 4;

/// The name of the router and of its rows.
const NAME: &str = "watched ttft";

/// Measures by how much the client's time to first token exceeds the time in the access log.
///
/// # Errors
/// The router does not become ready, a stream does not begin or is not in the log, or a time in the
/// log is longer than the client's.
pub(super) fn ttft(bench: &Bench<'_>, text: &Text, folder: &Path) -> Result<Vec<Row>, Failure> {
    let engines = bench.engine_runtime.block_on(engines())?;
    let log = folder.join("ttft.jsonl");
    let further = format!("access_log: {{ enabled: true, path: {log:?} }}\n");
    let settings = Settings { further: &further, ..Kind::Simulated(&engines).into() };
    let program = &bench.options.splitrail;
    let variables = [("RUST_LOG", "warn")];
    let starting = Target::ours_in(NAME, settings, program, folder, &variables);
    let target = bench.engine_runtime.block_on(starting)?;
    let bodies = text.prompts(SIZES[0]).iter().map(|prompt| prompt.chat(true)).collect::<Vec<_>>();
    let client_ms = bench.client_runtime.block_on(client_ttft_ms(target.streams, bodies))?;
    let logged_ms = bench.client_runtime.block_on(logged_ttft_ms(&log))?;
    let mut difference_ms = Vec::with_capacity(client_ms.len());
    for (id, client_ms) in &client_ms {
        let logged_ms = logged_ms.get(id).ok_or("a stream is not in the access log")?;
        if logged_ms > client_ms {
            return Err(
                format!("{id}: {logged_ms} ms in the log, {client_ms} ms at the client").into()
            );
        }
        difference_ms.push(client_ms - logged_ms);
    }
    difference_ms.sort_by(f64::total_cmp);
    let at = |share: f64| difference_ms[((difference_ms.len() - 1) as f64 * share) as usize];
    let row = |measure, share, goal| Row::alone(NAME, measure, (at(share), "ms"), goal);
    Ok(vec![
        row("client's TTFT over ours, median", 0.5, Some(Goal::AtMost(2.0))),
        row("client's TTFT over ours, p99", 0.99, None),
    ])
}

/// Starts a prefill and a decode engine that take as long as those of a small model.
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
async fn client_ttft_ms(
    address: SocketAddr,
    bodies: Vec<String>,
) -> Result<HashMap<String, f64>, Failure> {
    let mut clients = JoinSet::new();
    let bodies = std::sync::Arc::new(bodies);
    for client in 0..CLIENTS {
        let bodies = std::sync::Arc::clone(&bodies);
        clients.spawn(async move {
            let mut times_ms = Vec::with_capacity(STREAMS / CLIENTS);
            for turn in (client..STREAMS).step_by(CLIENTS) {
                let id = format!("ttft-{turn}");
                let field = format!("x-request-id: {id}\r\n");
                let request = http1_request(&field, bodies[turn % bodies.len()].as_bytes());
                let took = read_first_event(address, &request).await?;
                times_ms.push((id, took.as_secs_f64() * 1e3));
            }
            Ok::<_, Failure>(times_ms)
        });
    }
    let mut all = HashMap::new();
    while let Some(times_ms) = clients.join_next().await {
        all.extend(times_ms??);
    }
    Ok(all)
}

/// The time to first token in the access log, in milliseconds, by request id.
async fn logged_ttft_ms(log: &Path) -> Result<HashMap<String, f64>, Failure> {
    let started = Instant::now();
    loop {
        let text = fs::read_to_string(log)?;
        // The last line may be incomplete.
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let logged_ms: HashMap<String, f64> = lines
            .filter_map(|line| {
                Some((line["request_id"].as_str()?.to_owned(), line["ttft_ms"].as_f64()?))
            })
            .collect();
        if logged_ms.len() == STREAMS {
            return Ok(logged_ms);
        }
        if started.elapsed() > REPLY_TIMEOUT {
            return Err(
                format!("{} of {STREAMS} streams are in the access log", logged_ms.len()).into()
            );
        }
        sleep(Duration::from_millis(50)).await;
    }
}
