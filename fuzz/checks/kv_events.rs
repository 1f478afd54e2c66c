//! A KV event payload, as it comes from an engine's socket.

use splitrail_engine::kv_events::{DecodeLimits, Decoder, EventBatch, decode_batch};
use splitrail_kv::{HashSeed, Index, IndexConfig, KvEvent, WorkerKey};

pub(crate) fn check(payload: &[u8]) {
    let tight = DecodeLimits {
        max_payload_bytes: 1024,
        max_events: 3,
        max_blocks_per_event: 4,
        max_blocks_per_batch: 6,
        max_depth: 2,
        ..DecodeLimits::default()
    };
    let batch = decode_batch(payload, &DecodeLimits::default());
    let within = decode_batch(payload, &tight);
    match batch {
        Ok(batch) => {
            sound(&batch);
            ends_where_it_ends(payload);
            if let Ok(within) = within {
                assert_eq!(within, batch, "a limit is no reason to read something else");
                assert!(batch.events.len() <= tight.max_events);
                assert!(batch.events.iter().map(blocks).sum::<usize>() <= 6);
            }
            let mut decoder = Decoder::new(DecodeLimits::default());
            assert_eq!(decoder.decode(payload).as_ref(), Ok(&batch));
            index(&batch);
        }
        Err(error) => {
            assert!(error.offset <= payload.len(), "{error}");
            assert!(within.is_err(), "tighter limits accept no more");
        }
    }
}

fn blocks(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { blocks, .. } => blocks.len(),
        KvEvent::Removed { hashes, .. }
        | KvEvent::Dropped { hashes }
        | KvEvent::GroupStored { hashes, .. }
        | KvEvent::GroupRemoved { hashes, .. } => hashes.len(),
        KvEvent::TierCleared { .. } | KvEvent::Cleared => 0,
    }
}

fn sound(batch: &EventBatch) {
    assert!(batch.timestamp_s.is_finite());
    for event in &batch.events {
        let clears = matches!(event, KvEvent::TierCleared { .. } | KvEvent::Cleared);
        // A stored event without blocks names its cache group.
        let is_beside = matches!(event, KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. });
        assert!(clears || is_beside || blocks(event) > 0);
        if let KvEvent::Stored { blocks, parent, salt, .. } = event {
            let block_size = blocks[0].tokens.len();
            assert!(block_size > 0);
            assert!(blocks.iter().all(|block| block.tokens.len() == block_size));
            assert!(salt.is_none() || parent.is_none(), "a salt stands on a first block");
        }
    }
}

/// A payload has one end: no byte may be missing, and none may follow.
fn ends_where_it_ends(payload: &[u8]) {
    let limits = DecodeLimits::default();
    for cut in [payload.len() - 1, payload.len() / 2] {
        assert!(decode_batch(&payload[..cut], &limits).is_err());
    }
    assert!(decode_batch(&[payload, &[0]].concat(), &limits).is_err());
}

/// Whatever was decoded leaves the index consistent.
fn index(batch: &EventBatch) {
    let block_size = batch.events.iter().find_map(|event| match event {
        KvEvent::Stored { blocks, .. } => u32::try_from(blocks[0].tokens.len()).ok(),
        _ => None,
    });
    let mut index = Index::new(IndexConfig {
        model: "m".to_owned(),
        block_size: block_size.unwrap_or(16),
        seed: HashSeed(7),
        max_blocks_per_worker: 64,
    });
    for event in &batch.events {
        index.apply(WorkerKey { worker: 0, rank: batch.rank.unwrap_or(0) }, event);
    }
    assert_eq!(index.check(), Ok(()));
}
