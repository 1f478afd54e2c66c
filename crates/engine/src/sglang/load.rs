//! The load in SGLang's `/metrics`.

use crate::load::{EngineLoad, Line, LoadSum, add, read_load};

/// Reads SGLang's metrics. An engine with several data-parallel ranks has the label `dp_rank`.
pub(crate) fn load(metrics: &[u8]) -> EngineLoad {
    read_load(metrics, "sglang:", is_read, take)
}

/// The names of the metrics that are read, of hundreds of lines.
const NAMES: [&[u8]; 9] = [
    b"num_running_reqs",
    b"num_queue_reqs",
    b"token_usage",
    b"page_size",
    b"num_pages",
    b"prompt_tokens_total",
    b"generation_tokens_total",
    b"inter_token_latency_seconds_count",
    b"inter_token_latency_seconds_sum",
];

fn is_read(name: &[u8]) -> bool {
    NAMES.contains(&name)
}

fn take(sum: &mut LoadSum, line: &Line<'_>) {
    let rank = line.label("dp_rank").or(Some("0"));
    let count = || line.count().and_then(|count| u32::try_from(count).ok());
    let load = &mut sum.load;
    match line.name {
        "num_running_reqs" => {
            add(&mut load.running, line.count());
            sum.add_requests(rank, line.count());
        }
        "num_queue_reqs" => {
            add(&mut load.waiting, line.count());
            sum.add_requests(rank, line.count());
        }
        "token_usage" => sum.add_kv_used_ratio(line.value),
        "page_size" => load.block_size = load.block_size.or_else(count),
        // Each rank's line has the rank's own pages.
        "num_pages" => {
            let pages = load.total_blocks.unwrap_or(0).saturating_add(count().unwrap_or(0));
            load.total_blocks = Some(pages).filter(|pages| *pages > 0);
        }
        "prompt_tokens_total" => {
            add(&mut load.prefix_cache_queries_total, line.count());
            add(&mut load.tokens_total, line.count());
        }
        "generation_tokens_total" => add(&mut load.tokens_total, line.count()),
        _ => load.add_inter_token(line),
    }
}
