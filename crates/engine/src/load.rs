//! An engine's load, from the Prometheus text of its `/metrics`.

use std::collections::BTreeMap;

mod line;

use line::Line;

/// An engine's load as it reports it. A process with several data-parallel engines lists each under
/// an `engine` label; the figures here are sums. A figure that is missing or not a count is `None`,
/// never 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Number of requests that are being computed.
    pub running: Option<u64>,
    /// Number of requests that wait in the engine.
    pub waiting: Option<u64>,
    /// Used part of the KV cache, from 0 to 1; the mean over the engines that report it, all of
    /// which have the same number of blocks.
    pub kv_used_ratio: Option<f64>,
    /// Number of times a request lost its KV to others, since the engine's start.
    pub preemptions_total: Option<u64>,
    /// Number of tokens looked up in the prefix cache, since the engine's start.
    pub prefix_cache_queries_total: Option<u64>,
    /// Number of tokens found in the prefix cache.
    pub prefix_cache_hits_total: Option<u64>,
    /// Prompt tokens by the source of their KV.
    pub prompt_tokens_by_source: PromptTokensBySource,
    /// Tokens per KV block.
    pub block_size: Option<u32>,
    /// Number of KV blocks in accelerator memory, of all engines together.
    pub total_blocks: Option<u32>,
    /// Number of data-parallel engines in the process.
    pub ranks: Option<u32>,
    /// For each of several engines, in the order of their numbers, the requests that it computes or
    /// that wait for it; 0 for an engine that has had no request yet, for which vLLM may report
    /// nothing. Empty if there is one engine, or they are not numbered from 0.
    pub requests_by_rank: Vec<u64>,
    /// The data type of the KV as the engine names it: `auto`, `fp8`, ...
    pub kv_dtype: Option<String>,
    /// The layout of the KV as the engine names it, if it was started with one: `HND`, ...
    pub kv_layout: Option<String>,
    /// Start time of the process, in seconds since 1970.
    pub started_at_s: Option<f64>,
    /// Number of prompt tokens and generated tokens since the start: it grows while the engine works.
    pub tokens_total: Option<u64>,
    /// Intervals between tokens since the start.
    pub inter_token: Option<InterToken>,
    /// Whether there is a metric that only an engine with the NIXL connector has.
    pub has_nixl: bool,
}

/// The intervals between two tokens of a request since the engine's start: about one engine step
/// each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct InterToken {
    /// Number of intervals.
    pub count: u64,
    /// Sum of the intervals in seconds.
    pub sum_s: f64,
}

/// Prompt tokens since the engine's start, by the source of their KV.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptTokensBySource {
    /// Computed by this engine.
    pub local_compute: Option<u64>,
    /// Found in this engine's prefix cache.
    pub local_cache_hit: Option<u64>,
    /// Received from another engine or store.
    pub external_kv_transfer: Option<u64>,
}

impl EngineLoad {
    /// Parses a text of any length in one pass. Malformed lines and other metrics are skipped
    /// quickly: they are most of the roughly 60 kB that are read from an engine several times per
    /// second.
    pub fn parse(text: &str) -> Self {
        Self::from_bytes(text.as_bytes())
    }

    /// Like [`EngineLoad::parse`], for bytes that may be invalid UTF-8.
    pub fn from_bytes(text: &[u8]) -> Self {
        let mut load = Self::default();
        let (mut ratios, mut engines) = (Mean::default(), BTreeMap::new());
        for text in lines(text) {
            if let Some(line) = Line::parse(text, is_read) {
                load.take(&line, &mut ratios, &mut engines);
            } else if let Some(value) = text.strip_prefix(STARTED_AT) {
                let value = std::str::from_utf8(value).unwrap_or_default();
                load.started_at_s = value.trim().parse().ok().filter(|at: &f64| at.is_finite());
            }
        }
        load.kv_used_ratio = ratios.value();
        load.ranks = u32::try_from(engines.len()).ok().filter(|engines| *engines > 0);
        let are_numbered = engines.keys().copied().map(usize::from).eq(0..engines.len());
        if engines.len() > 1 && are_numbered {
            load.requests_by_rank = engines.into_values().collect();
        }
        load
    }

    /// Whether these figures come from another process than those `before`: one that started at
    /// another time, or whose counters are lower.
    pub fn is_of_another_process(&self, before: &Self) -> bool {
        let began = |load: &Self| load.started_at_s;
        if let (Some(now), Some(then)) = (began(self), began(before)) {
            return now != then;
        }
        let counted = |load: &Self| {
            let by_source = &load.prompt_tokens_by_source;
            [load.prefix_cache_queries_total, load.preemptions_total, by_source.local_compute]
        };
        let fell = |(now, then): (Option<u64>, Option<u64>)| now < then && now.is_some();
        counted(self).into_iter().zip(counted(before)).any(fell)
    }

    fn take(&mut self, line: &Line<'_>, ratios: &mut Mean, engines: &mut Engines) {
        match line.name {
            "num_requests_running" => {
                add(&mut self.running, line.count());
                count_on(engines, line, line.count());
            }
            "inter_token_latency_seconds_count" => {
                let waits = self.inter_token.get_or_insert_default();
                waits.count = waits.count.saturating_add(line.count().unwrap_or(0));
            }
            "inter_token_latency_seconds_sum" if line.value >= 0.0 => {
                self.inter_token.get_or_insert_default().sum_s += line.value;
            }
            "num_requests_waiting" => {
                add(&mut self.waiting, line.count());
                count_on(engines, line, line.count());
            }
            "kv_cache_usage_perc" => ratios.add(line.value),
            "num_preemptions_total" => add(&mut self.preemptions_total, line.count()),
            "prefix_cache_queries_total" => {
                add(&mut self.prefix_cache_queries_total, line.count());
            }
            "generation_tokens_total" | "prompt_tokens_total" => {
                add(&mut self.tokens_total, line.count());
            }
            "prefix_cache_hits_total" => add(&mut self.prefix_cache_hits_total, line.count()),
            "prompt_tokens_by_source_total" => {
                let by_source = &mut self.prompt_tokens_by_source;
                let figure = match line.label("source") {
                    Some("local_compute") => &mut by_source.local_compute,
                    Some("local_cache_hit") => &mut by_source.local_cache_hit,
                    Some("external_kv_transfer") => &mut by_source.external_kv_transfer,
                    _ => return,
                };
                add(figure, line.count());
            }
            "cache_config_info" => {
                let number = |name| line.label(name).and_then(|value| value.parse::<u32>().ok());
                self.block_size = self.block_size.or(number("block_size"));
                let name =
                    |name| line.label(name).filter(|value| is_name(value)).map(str::to_owned);
                self.kv_dtype = self.kv_dtype.take().or_else(|| name("cache_dtype"));
                self.kv_layout = self.kv_layout.take().or_else(|| name("kv_cache_layout"));
                // Each engine's line has the total over all engines.
                self.total_blocks = self.total_blocks.max(number("num_gpu_blocks"));
                // With several API servers, vLLM's default for several ranks, an engine's requests
                // are not reported before its first one, but its configuration is.
                count_on(engines, line, None);
            }
            name => self.has_nixl |= name.starts_with(NIXL),
        }
    }
}

/// The process's start time, under the name that all Prometheus clients use.
const STARTED_AT: &[u8] = b"process_start_time_seconds ";

/// The lines of a text, without their line ends.
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut start = 0;
    let ends = memchr::memchr_iter(b'\n', text).chain([text.len()]);
    ends.map(move |end| &text[std::mem::replace(&mut start, end + 1)..end])
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
    "prefix_cache_hits_total",
    "prompt_tokens_by_source_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "cache_config_info",
];

fn is_read(name: &[u8]) -> bool {
    NAMES.iter().any(|read| read.as_bytes() == name) || name.starts_with(NIXL.as_bytes())
}

/// Whether the value of a label names something. vLLM writes `None` for what was not set.
fn is_name(value: &str) -> bool {
    const MAX_BYTES: usize = 32;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    value != "None" && (1..=MAX_BYTES).contains(&value.len()) && value.bytes().all(is_plain)
}

impl InterToken {
    /// The mean interval since `before`, in microseconds; `None` if there was none.
    pub fn mean_us_since(&self, before: &Self) -> Option<u64> {
        let count = self.count.checked_sub(before.count).filter(|count| *count > 0)?;
        let mean_us = (self.sum_s - before.sum_s) / count as f64 * 1e6;
        (0.0..1e12).contains(&mean_us).then_some(mean_us.round() as u64)
    }
}

/// Number of requests by the number of the engine.
type Engines = BTreeMap<u16, u64>;

fn count_on(engines: &mut Engines, line: &Line<'_>, count: Option<u64>) {
    if let Some(engine) = line.label("engine").and_then(|engine| engine.parse().ok()) {
        let requests = engines.entry(engine).or_default();
        *requests = requests.saturating_add(count.unwrap_or(0));
    }
}

fn add(sum: &mut Option<u64>, count: Option<u64>) {
    if let Some(count) = count {
        *sum = Some(sum.unwrap_or(0).saturating_add(count));
    }
}

#[derive(Default)]
struct Mean {
    sum: f64,
    count: u32,
}

impl Mean {
    /// Adds a ratio; values outside 0 to 1 are ignored.
    fn add(&mut self, ratio: f64) {
        if (0.0..=1.0).contains(&ratio) {
            self.sum += ratio;
            self.count += 1;
        }
    }

    fn value(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}
