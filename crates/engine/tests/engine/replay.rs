//! Recorded events through decoder and index: the overlap of each recorded prompt, at its time,
//! equals what the engine reported as cached.

use splitrail_engine::kv_events::{DecodeLimits, Decoder};
use splitrail_kv::{
    HashSeed, Index, IndexConfig, KvEvent, Namespace, Overlaps, WorkerKey, chain_hashes,
    estimate_cached_tokens,
};

use crate::support::{fixture_text, recorded_payloads};
use crate::usage::recorded;

const BLOCK_SIZE: u32 = 32;
const SEED: HashSeed = HashSeed(7);

/// Where a prompt's tokens are recorded.
enum Tokens {
    /// In the request.
    Request,
    /// In the first stored event of this batch, except for an incomplete last block.
    Batch(usize),
}
use Tokens::{Batch, Request};

/// The recording, the number of its batches before the exchange, the exchange, and the tokens.
const EXCHANGES: [(&str, usize, &str, Tokens); 13] = [
    ("a", 0, "completion_cold", Batch(0)),
    ("a", 1, "completion_warm", Batch(0)),
    ("a", 1, "chat_cold", Batch(1)),
    ("a", 3, "chat_warm", Batch(1)),
    ("a", 3, "completion_stream_cold", Batch(3)),
    ("a", 4, "completion_stream_warm", Batch(3)),
    ("a", 4, "chat_stream_cold", Batch(4)),
    ("a", 6, "chat_stream_warm", Batch(4)),
    ("a", 7, "completion_stream_continuous", Batch(0)),
    ("a", 7, "completion_tokenids", Request),
    ("a", 8, "completion_tokenids_return", Request),
    ("dp1", 2, "dp_r1", Request),
    ("dp1", 3, "dp_r1_again", Request),
];

fn tokens_of(recording: &str, exchange: &str, tokens: &Tokens, prompt_tokens: u32) -> Vec<u32> {
    let mut found: Vec<u32> = match tokens {
        Request => {
            let text = fixture_text(&format!("http/{exchange}.txt"));
            let body: serde_json::Value =
                serde_json::from_str(text.lines().nth(1).unwrap()).unwrap();
            serde_json::from_value(body["prompt"].clone()).unwrap()
        }
        Batch(number) => {
            let payload = &recorded_payloads(recording)[*number];
            let batch = Decoder::new(DecodeLimits::default()).decode(payload).unwrap();
            let first = batch.events.iter().find_map(|event| match event {
                KvEvent::Stored { parent: None, blocks, .. } => Some(blocks),
                _ => None,
            });
            first.unwrap().iter().flat_map(|block| block.tokens.clone()).collect()
        }
    };
    let missing = prompt_tokens as usize - found.len();
    assert!(missing < BLOCK_SIZE as usize, "no full block is made up");
    found.resize(prompt_tokens as usize, 0);
    found
}

#[test]
fn every_recorded_prompt_overlaps_by_what_the_engine_had_cached() {
    for (recording, before, exchange, tokens) in &EXCHANGES {
        let (model, max_blocks_per_worker) = ("tiny".to_owned(), 10_000);
        let config =
            IndexConfig { model, block_size: BLOCK_SIZE, seed: SEED, max_blocks_per_worker };
        let mut index = Index::new(config);
        let mut decoder = Decoder::new(DecodeLimits::default());
        let mut worker = WorkerKey { worker: 0, rank: 0 };
        for payload in &recorded_payloads(recording)[..*before] {
            let batch = decoder.decode(payload).unwrap();
            worker.rank = batch.rank.unwrap_or(0);
            for event in &batch.events {
                let applied = index.apply(worker, event);
                let lost = applied.aside + applied.orphaned + applied.unknown + applied.malformed;
                assert_eq!(lost, 0, "{recording}: {applied:?}");
            }
        }
        assert_eq!(index.check(), Ok(()));
        let usage = recorded(exchange).pop().unwrap().unwrap();
        let tokens = tokens_of(recording, exchange, tokens, usage.prompt_tokens);
        let namespace =
            Namespace { salt: None, model: "tiny", adapter: None, block_size: BLOCK_SIZE };
        let (mut hashes, mut overlaps) = (Vec::new(), Overlaps::new());
        chain_hashes(&namespace, SEED, &tokens, &mut hashes);
        index.find(&hashes, &mut overlaps);
        let overlap = overlaps.get(worker).blocks;
        let expected = estimate_cached_tokens(overlap, usage.prompt_tokens, BLOCK_SIZE);
        assert_eq!(Some(expected), usage.cached_tokens, "{exchange}: {overlap} blocks");
    }
}
