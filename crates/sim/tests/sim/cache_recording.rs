//! Compares the cache with what a real engine announced for the same requests: which blocks are
//! stored and removed, in which batch, in which order, with which parents. Hash values differ, but
//! equal hashes must stand for equal blocks.

use std::collections::HashMap;

use serde_json::Value;
use splitrail_sim::cache::{CacheEvent, KvCache, Namespace, Sequence};

const BLOCK_SIZE: usize = 32;

fn tokens(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Runs groups of requests (a group starts in one step) and returns the batches of events.
fn replay(recording: &Value) -> Vec<Vec<CacheEvent>> {
    let total_blocks = recording["total_blocks"].as_u64().unwrap() as u32;
    let mut cache = KvCache::new(total_blocks, BLOCK_SIZE);
    let mut batches = Vec::new();
    for group in recording["requests"].as_array().unwrap() {
        let mut running = Vec::new();
        for request in group.as_array().unwrap() {
            let prompt = tokens(&request["prompt"]);
            let mut sequence = Sequence::new(prompt, Namespace::default(), BLOCK_SIZE, 0);
            cache.admit(&mut sequence, 0).unwrap();
            let computed = sequence.tokens().len();
            cache.register(&mut sequence, computed);
            if let Some(ids) = request.get("block_ids") {
                assert_eq!(sequence.blocks(), tokens(ids), "{}", request["name"]);
            }
            running.push((sequence, tokens(&request["generated"])));
        }
        batches.push(cache.take_events());
        let steps = running.iter().map(|(_, generated)| generated.len()).max().unwrap();
        for step in 1..steps {
            for (sequence, generated) in &mut running {
                sequence.push(generated[step - 1]);
                let computed = sequence.tokens().len();
                assert!(cache.grow(sequence, computed));
                cache.register(sequence, computed);
            }
            batches.push(cache.take_events());
        }
        for (mut sequence, _) in running {
            cache.release(&mut sequence);
        }
    }
    batches.retain(|batch| !batch.is_empty());
    batches
}

/// An event whose hashes are replaced by numbers in the order of their first appearance.
#[derive(Debug, PartialEq)]
enum Shape {
    Stored { blocks: Vec<usize>, parent: Option<usize>, tokens: Vec<u32> },
    Removed { block: usize },
}

#[derive(Default)]
struct Names(HashMap<String, usize>);

impl Names {
    fn of(&mut self, hash: &str) -> usize {
        let next = self.0.len();
        *self.0.entry(hash.to_owned()).or_insert(next)
    }
}

fn simulated_shapes(batches: &[Vec<CacheEvent>]) -> Vec<Vec<Shape>> {
    let mut names = Names::default();
    let mut shape = |event: &CacheEvent| match event {
        CacheEvent::Stored(stored) => Shape::Stored {
            blocks: stored.hashes.iter().map(|hash| names.of(&hash.to_string())).collect(),
            parent: stored.parent.map(|hash| names.of(&hash.to_string())),
            tokens: stored.tokens.clone(),
        },
        CacheEvent::Removed { hash, .. } => Shape::Removed { block: names.of(&hash.to_string()) },
        other => panic!("no other event was recorded: {other:?}"),
    };
    batches.iter().map(|batch| batch.iter().map(&mut shape).collect()).collect()
}

fn recorded_shapes(batches: &Value) -> Vec<Vec<Shape>> {
    let mut names = Names::default();
    let mut shape = |event: &Value| {
        let hashes = event["hashes"].as_array().unwrap();
        let blocks = hashes.iter().map(|hash| names.of(hash.as_str().unwrap())).collect::<Vec<_>>();
        match event["type"].as_str().unwrap() {
            "BlockStored" => Shape::Stored {
                blocks,
                parent: event["parent"].as_str().map(|hash| names.of(hash)),
                tokens: tokens(&event["token_ids"]),
            },
            "BlockRemoved" => Shape::Removed { block: blocks[0] },
            other => panic!("unexpected {other}"),
        }
    };
    let batches = batches.as_array().unwrap().iter();
    batches.map(|batch| batch.as_array().unwrap().iter().map(&mut shape).collect()).collect()
}

fn check(series: &str) {
    let fixture = include_str!("../fixtures/kv-vllm-0.32.0.json");
    let recordings: Value = serde_json::from_str(fixture).unwrap();
    let recording = &recordings[series];
    let simulated = simulated_shapes(&replay(recording));
    let recorded = recorded_shapes(&recording["batches"]);
    for (index, (ours, theirs)) in simulated.iter().zip(&recorded).enumerate() {
        assert_eq!(ours, theirs, "batch {index} of {series}");
    }
    assert_eq!(simulated.len(), recorded.len(), "{series}");
}

/// 24 blocks: duplicates of a tail, blocks filled while decoding, eviction from the tail.
#[test]
fn a_small_cache_evicts_as_the_engine_does() {
    check("small_cache");
}

/// Prompts that end at a block boundary store their last block again; others store nothing.
#[test]
fn repeated_prompts_store_what_the_engine_stores() {
    check("repeats");
}

/// Prefills for a hand-off: the physical block ids are also those of the engine.
#[test]
fn handed_off_block_ids_are_those_of_the_engine() {
    check("hand_offs");
}
