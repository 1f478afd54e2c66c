//! The load in vLLM's `/metrics`.

use crate::load::{EngineLoad, Line, LoadSum, add, read_load};

/// Reads vLLM's metrics, in which each data-parallel engine is a value of the label `engine`.
pub(crate) fn load(metrics: &[u8]) -> EngineLoad {
    read_load(metrics, "vllm:", is_read, take)
}

/// Prefix of metrics that only an engine with the NIXL connector has.
const NIXL: &str = "nixl_";
/// The names of all other metrics that are read, of hundreds of lines.
const NAMES: [&str; 12] = [
    "num_requests_running",
    "num_requests_waiting",
    "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prompt_tokens_by_source_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "cache_config_info",
    "engine_sleep_state",
];

fn is_read(name: &[u8]) -> bool {
    NAMES.iter().any(|read| read.as_bytes() == name) || name.starts_with(NIXL.as_bytes())
}

fn take(sum: &mut LoadSum, line: &Line<'_>) {
    let engine = line.label("engine");
    let load = &mut sum.load;
    match line.name {
        "num_requests_running" => {
            add(&mut load.running, line.count());
            sum.add_requests(engine, line.count());
        }
        "num_requests_waiting" => {
            add(&mut load.waiting, line.count());
            sum.add_requests(engine, line.count());
        }
        "kv_cache_usage_perc" => sum.add_kv_used_ratio(line.value),
        "num_preemptions_total" => add(&mut load.preemptions_total, line.count()),
        "prefix_cache_queries_total" => {
            add(&mut load.prefix_cache_queries_total, line.count());
        }
        "generation_tokens_total" | "prompt_tokens_total" => {
            add(&mut load.tokens_total, line.count());
        }
        "prompt_tokens_by_source_total" => {
            let by_source = &mut load.prompt_tokens_by_source;
            let figure = match line.label("source") {
                Some("local_compute") => &mut by_source.local_compute,
                Some("external_kv_transfer") => &mut by_source.external_kv_transfer,
                _ => return,
            };
            add(figure, line.count());
        }
        "cache_config_info" => {
            let number = |name| line.label(name).and_then(|value| value.parse::<u32>().ok());
            // Of hybrid models and with decode context parallelism, the blocks of events are larger than
            // what was configured.
            let block_size =
                || number("effective_attention_block_size").or_else(|| number("block_size"));
            load.block_size = load.block_size.or_else(block_size);
            let name = |name| line.label(name).filter(|value| is_name(value)).map(str::to_owned);
            load.kv_dtype = load.kv_dtype.take().or_else(|| name("cache_dtype"));
            load.kv_layout = load.kv_layout.take().or_else(|| name("kv_cache_layout"));
            // Each engine's line has the total over all engines.
            load.total_blocks = load.total_blocks.max(number("num_gpu_blocks"));
            // With several API servers, vLLM's default for several ranks, an engine's requests
            // are not reported before its first one, but its configuration is.
            sum.add_requests(engine, None);
        }
        "engine_sleep_state" if line.label("sleep_state") == Some("awake") => {
            load.is_asleep = Some(load.is_asleep == Some(true) || line.value == 0.0);
        }
        name if name.starts_with(NIXL) => load.has_nixl = true,
        _ => load.add_inter_token(line),
    }
}

/// Whether the value of a label names something. vLLM writes `None` for what was not set.
fn is_name(value: &str) -> bool {
    const MAX_BYTES: usize = 32;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    value != "None" && (1..=MAX_BYTES).contains(&value.len()) && value.bytes().all(is_plain)
}
