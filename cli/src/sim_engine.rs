//! `splitrail sim-engine`: one simulated engine as a process of its own.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use splitrail_router::run::{Signals, write_whole};
use splitrail_settings::command::Failure;
use splitrail_sim::{Role, SimConfig, SimEngine};
use tokio::net::lookup_host;

use crate::named_value::named;

/// The properties of the engine.
#[derive(Args)]
pub(crate) struct SimArgs {
    /// The legs that it serves.
    #[arg(long, default_value = "both", value_parser = named::<Role>(&["prefill", "decode", "both"]))]
    role: Role,
    /// The address to listen on, or a name of this host; hand-offs name it to other engines.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// HTTP port; 0 for any free port.
    #[arg(long, default_value_t = 0)]
    http_port: u16,
    /// Port of the KV events.
    #[arg(long, default_value_t = 0)]
    kv_events_port: u16,
    /// Port of the replay of KV events.
    #[arg(long, default_value_t = 0)]
    kv_replay_port: u16,
    /// Name of the model.
    #[arg(long, default_value = "sim")]
    model: String,
    /// Tokens per KV block.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65536))]
    block_size: u32,
    /// Number of KV blocks.
    #[arg(long, default_value_t = 4096)]
    kv_blocks: u32,
    /// Whether `cache_hit_threshold` gates requests.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    honour_threshold: bool,
    /// Whether it serves `/v1/embeddings`, `/score`, `/rerank`, `/classify` and `/pooling`, and nothing
    /// that generates.
    #[arg(long, default_value_t = false, action = clap::ArgAction::Set)]
    embeds: bool,
    /// Whether it also serves `/v1/audio/transcriptions` and `/v1/audio/translations`.
    #[arg(long, default_value_t = false, action = clap::ArgAction::Set)]
    transcribes: bool,
    /// Number of data-parallel ranks; rank r publishes and replays r ports further.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    data_parallel: u16,
    /// Microseconds to compute one uncached prompt token.
    #[arg(long, default_value_t = 200)]
    prefill_us_per_token: u64,
    /// Microseconds of one decode step.
    #[arg(long, default_value_t = 15_000)]
    decode_us_per_step: u64,
    /// Microseconds to transfer one KV block.
    #[arg(long, default_value_t = 100)]
    transfer_us_per_block: u64,
    /// A JSON file with its addresses that is written once everything is bound.
    #[arg(long)]
    ready_file: Option<PathBuf>,
}

/// The address of a host, at which other engines can fetch hand-offs.
async fn address_of(host: &str) -> io::Result<IpAddr> {
    let unusable = |why: &str| {
        let message = format!("--host {host}: {why}; name the address at which others reach it");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    };
    let mut found = lookup_host((host, 0)).await.map_err(|error| unusable(&error.to_string()))?;
    match found.next().map(|address| address.ip()) {
        Some(address) if address.is_unspecified() => {
            Err(unusable("is not an address of an engine"))
        }
        Some(address) => Ok(address),
        None => Err(unusable("has no address")),
    }
}

/// Runs the engine until a stop signal.
///
/// # Errors
/// The host has no address, a port is in use, or the ready file cannot be written.
pub(crate) async fn run(args: SimArgs) -> Result<(), Failure> {
    let engine = SimEngine::start(SimConfig {
        host: address_of(&args.host).await?,
        http_port: args.http_port,
        kv_events_port: Some(args.kv_events_port),
        kv_replay_port: Some(args.kv_replay_port),
        model: args.model.clone(),
        role: args.role,
        block_size: args.block_size as usize,
        kv_blocks: args.kv_blocks,
        prefill_us_per_token: args.prefill_us_per_token,
        decode_us_per_step: args.decode_us_per_step,
        transfer_us_per_block: args.transfer_us_per_block,
        honour_threshold: args.honour_threshold,
        embeds: args.embeds,
        transcribes: args.transcribes,
        data_parallel: args.data_parallel,
        ..SimConfig::default()
    })
    .await?;
    let mut signals = Signals::watch()?;
    let ready = json!({
        "http": engine.http_addr().to_string(),
        "kv_events": engine.kv_events_endpoint(),
        "kv_replay": engine.kv_replay_endpoint(),
        "models": [args.model],
    });
    tracing::info!(%ready, "simulated engine");
    if let Some(path) = args.ready_file {
        write_whole(&path, &ready.to_string()).map_err(|error| Failure::unwritten(&error))?;
    }
    signals.stopped(|| tracing::warn!("SIGHUP: an engine has nothing to reload")).await;
    engine.shutdown().await;
    Ok(())
}
