//! An engine's load, from the Prometheus text of its `/metrics`.

use std::collections::BTreeMap;

mod line;

pub(crate) use line::Line;

/// An engine's load as it reports it. A process with several data-parallel engines lists each under
/// a label of its own; the figures here are sums. A figure that is missing or not a count is `None`,
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
    /// Prompt tokens by the source of their KV.
    pub prompt_tokens_by_source: PromptTokensBySource,
    /// Tokens per KV block.
    pub block_size: Option<u32>,
    /// Number of KV blocks in accelerator memory, of all engines together.
    pub total_blocks: Option<u32>,
    /// Number of data-parallel engines in the process.
    pub ranks: Option<u32>,
    /// For each of several engines, in the order of their numbers, the requests that it computes or
    /// that wait for it; 0 for an engine that has had no request yet, for which nothing may be
    /// reported. Empty if there is one engine, or they are not numbered from 0.
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
    /// Whether the engine was put to sleep.
    pub is_asleep: Option<bool>,
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
    /// Received from another engine or store.
    pub external_kv_transfer: Option<u64>,
}

impl EngineLoad {
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

    /// Adds a sample of the intervals between tokens, whose metrics vLLM and SGLang name alike.
    pub(crate) fn add_inter_token(&mut self, line: &Line<'_>) {
        match line.name {
            "inter_token_latency_seconds_count" => {
                let waits = self.inter_token.get_or_insert_default();
                waits.count = waits.count.saturating_add(line.count().unwrap_or(0));
            }
            "inter_token_latency_seconds_sum" if line.value >= 0.0 => {
                self.inter_token.get_or_insert_default().sum_s += line.value;
            }
            _ => {}
        }
    }
}

impl InterToken {
    /// The mean interval since `before`, in microseconds; `None` if there was none.
    pub fn mean_us_since(&self, before: &Self) -> Option<u64> {
        let count = self.count.checked_sub(before.count).filter(|count| *count > 0)?;
        let mean_us = (self.sum_s - before.sum_s) / count as f64 * 1e6;
        (0.0..1e12).contains(&mean_us).then_some(mean_us.round() as u64)
    }
}

/// Reads the load in the metrics of one engine: a text of any length in one pass. Malformed lines and
/// other metrics are skipped quickly: they are most of the roughly 60 kB that are read from an engine
/// several times per second.
///
/// `prefix` begins the names of the engine's metrics, `is_read` tells by the rest of a name whether
/// a metric is read, and `take` adds a sample.
pub(crate) fn read_load(
    text: &[u8],
    prefix: &str,
    is_read: fn(&[u8]) -> bool,
    take: fn(&mut LoadSum, &Line<'_>),
) -> EngineLoad {
    let mut sum = LoadSum::default();
    for text in lines(text) {
        if let Some(line) = Line::parse(text, prefix.as_bytes(), is_read) {
            take(&mut sum, &line);
        } else if let Some(value) = text.strip_prefix(STARTED_AT) {
            let value = std::str::from_utf8(value).unwrap_or_default();
            let started_at_s = value.trim().parse().ok().filter(|at: &f64| at.is_finite());
            sum.load.started_at_s = started_at_s;
        }
    }
    sum.finish()
}

/// The load in the samples that have been read so far.
#[derive(Default)]
pub(crate) struct LoadSum {
    /// What is complete with each sample.
    pub(crate) load: EngineLoad,
    /// The sum of the used parts of all data-parallel engines' KV caches, and how many there are.
    used_ratio_sum: f64,
    used_ratios: u32,
    requests_by_rank: BTreeMap<u16, u64>,
}

impl LoadSum {
    /// Adds the used part of one data-parallel engine's KV cache; values outside 0 to 1 are ignored.
    pub(crate) fn add_kv_used_ratio(&mut self, ratio: f64) {
        if (0.0..=1.0).contains(&ratio) {
            self.used_ratio_sum += ratio;
            self.used_ratios += 1;
        }
    }

    /// Adds requests of a data-parallel engine, whose number is the value of a label; without a
    /// count, only the engine becomes known.
    pub(crate) fn add_requests(&mut self, rank: Option<&str>, count: Option<u64>) {
        if let Some(rank) = rank.and_then(|rank| rank.parse().ok()) {
            let requests = self.requests_by_rank.entry(rank).or_default();
            *requests = requests.saturating_add(count.unwrap_or(0));
        }
    }

    fn finish(self) -> EngineLoad {
        let Self { mut load, used_ratio_sum, used_ratios, requests_by_rank: by_rank } = self;
        load.kv_used_ratio = (used_ratios > 0).then(|| used_ratio_sum / f64::from(used_ratios));
        load.ranks = u32::try_from(by_rank.len()).ok().filter(|ranks| *ranks > 0);
        let are_numbered = by_rank.keys().copied().map(usize::from).eq(0..by_rank.len());
        if by_rank.len() > 1 && are_numbered {
            load.requests_by_rank = by_rank.into_values().collect();
        }
        load
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

/// Adds to the sum of a figure over all data-parallel engines.
pub(crate) fn add(sum: &mut Option<u64>, count: Option<u64>) {
    if let Some(count) = count {
        *sum = Some(sum.unwrap_or(0).saturating_add(count));
    }
}
