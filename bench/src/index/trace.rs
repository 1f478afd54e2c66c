//! Traces of block ids, read from Mooncake's JSONL format or generated with the same statistics.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::splitmix::mix;

/// Number of requests of Mooncake's conversation trace.
const REQUESTS: usize = 12_031;

/// Reads the member `hash_ids` of one JSON object per line.
///
/// # Errors
/// The file cannot be read, or a line is not such an object; the message names the line.
pub fn load(path: &Path) -> Result<Vec<Vec<u32>>, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let ids = |(at, line): (usize, &str)| {
        let wrong = || format!("{}:{}: no array of ids in `hash_ids`", path.display(), at + 1);
        let object: Value = serde_json::from_str(line).map_err(|_| wrong())?;
        let ids = object.get("hash_ids").and_then(Value::as_array).ok_or_else(wrong)?;
        let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong);
        ids.iter().map(id).collect()
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(ids).collect()
}

/// Generates conversations with the statistics of Mooncake's conversation trace: 12,031 requests of
/// 24 blocks on average (half of them with fewer than 14, one in a hundred with more than 160), all
/// with the same first block. More than a third of the requests are the next turn of an earlier
/// one, and 37 % of all blocks occur in an earlier request.
pub fn generate() -> Vec<Vec<u32>> {
    let mut draws = (0_u64..).map(|n| mix(n ^ 0x7ACE));
    let mut draw = move || draws.next().unwrap_or_default() as f64 / u64::MAX as f64;
    let mut requests: Vec<Vec<u32>> = Vec::with_capacity(REQUESTS);
    let mut open: Vec<usize> = Vec::new();
    let mut next_id = 1;
    for request in 0..REQUESTS {
        let turn = draw() < 0.36 && !open.is_empty();
        let (mut ids, fresh) = if turn {
            let at = (draw() * open.len() as f64) as usize;
            let mut ids = requests[open.swap_remove(at.min(open.len() - 1))].clone();
            // The last block was partly filled, so the next turn has another block in its place.
            if ids.len() > 1 {
                ids.pop();
            }
            (ids, length(draw(), 2.5, 1.3))
        } else {
            (vec![0], length(draw(), 11.0, 1.0))
        };
        ids.extend(next_id..next_id + fresh);
        next_id += fresh;
        ids.truncate(250);
        requests.push(ids);
        open.push(request);
    }
    requests
}

/// A log-normally distributed number of blocks, from 1 to 250. `uniform` is a random number from 0
/// to 1. The quantile of the normal distribution is approximated by the logistic one.
fn length(uniform: f64, median: f64, sigma: f64) -> u32 {
    let uniform = uniform.clamp(0.000_1, 0.999_9);
    let normal = (uniform / (1.0 - uniform)).ln() / 1.702;
    (median * (sigma * normal).exp()).round().clamp(1.0, 250.0) as u32
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_stand_in_has_the_statistics_of_the_trace() {
        let requests = generate();
        let blocks: usize = requests.iter().map(Vec::len).sum();
        let distinct: HashSet<_> = requests.iter().flatten().collect();
        let mean = blocks as f64 / requests.len() as f64;
        let seen = 1.0 - distinct.len() as f64 / blocks as f64;
        let mut lengths: Vec<_> = requests.iter().map(Vec::len).collect();
        lengths.sort_unstable();
        let rank = |share: f64| lengths[(lengths.len() as f64 * share) as usize];
        assert!((22.0..26.0).contains(&mean), "mean {mean}");
        assert!((0.34..0.40).contains(&seen), "seen before {seen}");
        assert!((11..17).contains(&rank(0.5)), "median {}", rank(0.5));
        assert!((44..60).contains(&rank(0.9)), "p90 {}", rank(0.9));
        assert!((140..220).contains(&rank(0.99)), "p99 {}", rank(0.99));
    }

    #[test]
    fn a_wrong_line_is_named() {
        let file = std::env::temp_dir().join(format!("splitrail-trace-{}", std::process::id()));
        fs::write(&file, "{\"hash_ids\": [0, 1]}\n{\"hash_ids\": 3}\n").unwrap();
        let error = load(&file).unwrap_err();
        fs::remove_file(&file).unwrap();
        assert!(error.contains(":2:"), "{error}");
    }
}
