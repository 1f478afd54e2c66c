//! Events as an engine with a defect would send them.

use crate::cache::{CacheEvent, ExtraKey, StoredBlocks};
use crate::faults::{FaultBoard, FaultKind, OddEvent};

/// A parent that no engine has announced.
const UNKNOWN_HASH: u64 = 0x0bad_0bad_0bad_0bad;

/// One step's events in the form in which they are sent.
pub(super) struct DistortedEvents {
    pub(super) live: Vec<CacheEvent>,
    pub(super) replayed: Vec<CacheEvent>,
    /// The data-parallel rank in the events.
    pub(super) rank: u16,
    /// An event that is added.
    pub(super) odd: Option<OddEvent>,
}

/// Applies the active faults to a step's events.
pub(super) fn distort(faults: &FaultBoard, rank: u16, events: &[CacheEvent]) -> DistortedEvents {
    let salts = !faults.occurs_now("drop_salts");
    let adapters = !faults.occurs_now("drop_adapters");
    let parents = !faults.occurs_now("strange_parents");
    let told = events.iter().cloned().map(|event| match event {
        CacheEvent::Stored(mut stored) => {
            stored.parent = stored.parent.or((!parents).then_some(UNKNOWN_HASH));
            let stored = if adapters { stored } else { without_adapter(stored) };
            CacheEvent::Stored(if salts { stored } else { without_salt(stored) })
        }
        other => other,
    });
    let replayed: Vec<CacheEvent> = told.collect();
    let is_stored = |event: &&CacheEvent| matches!(event, CacheEvent::Stored(_));
    let stored = || replayed.iter().filter(is_stored).cloned().collect::<Vec<_>>();
    let (live, replayed) = match faults.take("hide_removals") {
        Some(FaultKind::HideRemovals { in_replay: true }) => (stored(), stored()),
        Some(_) => (stored(), replayed),
        None => (replayed.clone(), replayed),
    };
    let odd = match faults.take("odd_events") {
        Some(FaultKind::OddEvents { event }) => Some(event),
        _ => None,
    };
    let rank = rank + u16::from(faults.occurs_now("other_rank"));
    DistortedEvents { live, replayed, rank, odd }
}

fn without_adapter(mut stored: StoredBlocks) -> StoredBlocks {
    if let Some((_, name)) = stored.adapter.take() {
        forget_key(&mut stored, |key| *key == ExtraKey::Text(name.clone()));
    }
    stored
}

fn without_salt(mut stored: StoredBlocks) -> StoredBlocks {
    let adapter = stored.adapter.as_ref().map(|(_, name)| ExtraKey::Text(name.clone()));
    forget_key(&mut stored, |key| {
        matches!(key, ExtraKey::Text(_)) && Some(key) != adapter.as_ref()
    });
    stored
}

fn forget_key(stored: &mut StoredBlocks, forgotten: impl Fn(&ExtraKey) -> bool) {
    for keys in &mut stored.extra_keys {
        if let Some(named) = keys {
            named.retain(|key| !forgotten(key));
            if named.is_empty() {
                *keys = None;
            }
        }
    }
}
