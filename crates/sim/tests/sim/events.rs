//! KV events: a mirror that follows them has the engine's content.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::{Value, json};
use splitrail_sim::{EventForm, Fault, FaultKind, HashForm, SimConfig, SimEngine};
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use crate::msgpack;
use crate::support::*;

/// A subscription that is in effect, and the number of the last batch that it has read. A
/// subscription takes effect with a delay, so requests are sent until the batch of one arrives.
async fn subscribe(engine: &SimEngine) -> (SubSocket, u64) {
    let mut socket = SubSocket::new();
    socket.connect(engine.kv_events_endpoint().unwrap()).await.unwrap();
    socket.subscribe("").await.unwrap();
    for last in 0.. {
        complete(engine, &prompt(1000 + last as u32, 40), 1).await; // one batch each
        let soon = std::time::Duration::from_millis(100);
        if let Ok(message) = tokio::time::timeout(soon, socket.recv()).await {
            let frames = message.unwrap().into_vec();
            let mut seen = u64::from_be_bytes(frames[1].as_ref().try_into().unwrap());
            while seen < last {
                seen = next(&mut socket).await.0;
            }
            return (socket, seen);
        }
    }
    unreachable!()
}

/// The next batch: sequence number and payload.
async fn next(socket: &mut SubSocket) -> (u64, Bytes) {
    let message = tokio::time::timeout(PATIENCE, socket.recv()).await.unwrap().unwrap().into_vec();
    let [topic, sequence, payload] = message.as_slice() else { panic!("{message:?}") };
    assert!(topic.starts_with(b"kv@127.0.0.1:"));
    (u64::from_be_bytes(sequence.as_ref().try_into().unwrap()), payload.clone())
}

/// All batches that the engine can replay from `start` on.
async fn replay(engine: &SimEngine, start: u64) -> Vec<(u64, Bytes)> {
    let mut socket = DealerSocket::new();
    socket.connect(engine.kv_replay_endpoint().unwrap()).await.unwrap();
    let ask = vec![Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())];
    socket.send(ZmqMessage::try_from(ask).unwrap()).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let reply = tokio::time::timeout(PATIENCE, socket.recv()).await.unwrap().unwrap();
        let reply = reply.into_vec();
        let [_, _, sequence, payload] = reply.as_slice() else { panic!("{reply:?}") };
        if sequence.as_ref() == [0xff; 8] {
            assert!(payload.is_empty());
            return batches;
        }
        batches.push((u64::from_be_bytes(sequence.as_ref().try_into().unwrap()), payload.clone()));
    }
}

fn events(payload: &Bytes) -> Vec<Value> {
    let mut input = payload.as_ref();
    let batch = msgpack::read(&mut input);
    assert!(input.is_empty() && batch[0].is_f64() && batch[2] == 0);
    batch[1].as_array().unwrap().clone()
}

/// Number of physical blocks per hash, as counted by a follower of the events.
#[derive(Default, PartialEq, Debug)]
struct Mirror(BTreeMap<u64, usize>);

impl Mirror {
    fn follow(&mut self, batches: &[(u64, Bytes)]) {
        for event in batches.iter().flat_map(|(_, payload)| events(payload)) {
            // Both formats: a tagged map, or an array that begins with the name.
            let field = |name: &str, place: usize| match &event {
                Value::Array(fields) => fields[place].clone(),
                map => map[name].clone(),
            };
            let hashes = || {
                let hashes = field("block_hashes", 1);
                hashes.as_array().unwrap().iter().map(|h| h.as_u64().unwrap()).collect::<Vec<_>>()
            };
            match field("type", 0).as_str().unwrap() {
                "BlockStored" => {
                    for hash in hashes() {
                        *self.0.entry(hash).or_default() += 1;
                    }
                }
                "BlockRemoved" => {
                    for hash in hashes() {
                        let copies = self.0.get_mut(&hash).unwrap();
                        *copies -= 1;
                        if *copies == 0 {
                            self.0.remove(&hash);
                        }
                    }
                }
                "AllBlocksCleared" => self.0.clear(),
                other => panic!("{other}"),
            }
        }
    }
}

/// Requests that repeat, evict, clear, and fill blocks while decoding.
async fn churn(engine: &SimEngine) {
    for seed in [1, 2, 1, 3, 4, 1, 5, 6, 2, 7, 1] {
        complete(engine, &prompt(seed, 64 + seed as usize % 2), 40).await;
        if seed == 4 {
            assert_eq!(post(engine, "/reset_prefix_cache", json!({})).await.status, 200);
        }
    }
}

#[tokio::test]
async fn events_reproduce_the_contents_of_the_cache() {
    for event_form in [EventForm::Map, EventForm::Array] {
        let config = SimConfig { kv_blocks: 20, event_form, ..SimConfig::default() };
        let engine = start(config).await;
        let (mut socket, seen) = subscribe(&engine).await;
        churn(&engine).await;
        let replayed = replay(&engine, 0).await;
        let numbers: Vec<u64> = replayed.iter().map(|(sequence, _)| *sequence).collect();
        assert_eq!(numbers, (0..replayed.len() as u64).collect::<Vec<_>>());
        let mut mirror = Mirror::default();
        mirror.follow(&replayed);
        let resident: BTreeMap<u64, usize> = engine.resident().into_iter().collect();
        assert_eq!(mirror.0, resident);
        assert!(resident.len() < 20 && !resident.is_empty());
        // The live batches are equal to the replayed ones.
        for (sequence, payload) in &replayed[seen as usize + 1..] {
            assert_eq!(&next(&mut socket).await, &(*sequence, payload.clone()));
        }
        let tail = replay(&engine, replayed.len() as u64 - 2).await;
        assert_eq!(tail, replayed[replayed.len() - 2..]);
    }
}

#[tokio::test]
async fn events_have_the_recorded_fields() {
    let config = SimConfig { adapters: vec!["pirate".to_owned()], ..SimConfig::default() };
    let engine = start(config).await;
    let body = json!({"prompt": prompt(1, 40), "max_tokens": 1, "cache_salt": "tenant", "model": "pirate"});
    post(&engine, "/v1/completions", body).await;
    let stored = events(&replay(&engine, 0).await[0].1)[0].clone();
    let keys: Vec<&str> = stored.as_object().unwrap().keys().map(String::as_str).collect();
    let recorded = [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ];
    assert_eq!(keys, recorded);
    assert_eq!(stored["token_ids"], json!(prompt(1, 32)));
    assert_eq!(stored["parent_block_hash"], Value::Null);
    assert_eq!(stored["extra_keys"], json!([["pirate", "tenant"], ["pirate"]]));
    assert_eq!((&stored["lora_id"], &stored["lora_name"]), (&json!(1), &json!("pirate")));
}

#[tokio::test]
async fn hashes_can_be_sent_as_bytes() {
    let config = SimConfig { hash_form: HashForm::Bytes32, ..SimConfig::default() };
    let engine = start(config).await;
    complete(&engine, &prompt(1, 40), 1).await;
    let stored = events(&replay(&engine, 0).await[0].1)[0].clone();
    assert!(
        stored["block_hashes"].as_array().unwrap().iter().all(|h| h.as_str().unwrap().len() == 64)
    );
}

#[tokio::test]
async fn dropped_and_corrupted_batches_can_be_replayed() {
    let engine = start(SimConfig::default()).await;
    let (mut socket, first) = subscribe(&engine).await;
    engine.set_fault(Fault { kind: FaultKind::DropEventBatches, times: Some(2) });
    for seed in [1, 2, 3] {
        complete(&engine, &prompt(seed, 40), 1).await;
    }
    let (after_gap, _) = next(&mut socket).await;
    assert_eq!(after_gap, first + 3);
    engine.set_fault(Fault { kind: FaultKind::GarbageEvents, times: Some(1) });
    complete(&engine, &prompt(4, 40), 1).await;
    let (sequence, garbage) = next(&mut socket).await;
    assert_eq!(sequence, first + 4);
    let replayed = replay(&engine, first + 1).await;
    assert_eq!(replayed.len(), 4);
    assert_ne!(replayed[3].1, garbage);
    let mut mirror = Mirror::default();
    mirror.follow(&replay(&engine, 0).await);
    assert_eq!(mirror.0, engine.resident().into_iter().collect());
}
