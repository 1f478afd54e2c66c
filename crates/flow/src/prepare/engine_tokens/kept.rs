//! The block hashes of recent prompts of one model. The oldest are dropped when there is no room for
//! another one.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::mem::size_of;
use std::time::{Duration, Instant};

use splitrail_kv::BlockHash;

use super::KnownTokens;

/// How long a prompt is kept: an engine may be replaced by one with another tokenizer.
const KEPT_FOR: Duration = Duration::from_secs(300);

/// Memory of a prompt without its hashes, in both collections, in bytes.
const PROMPT_BYTES: usize = 2 * size_of::<Key>() + size_of::<KeptPrompt>() + 64;

/// The name of a prompt: two hashes with secrets, so that no client can make two prompts alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key([u64; 2]);

/// Makes the keys of one model.
#[derive(Default)]
pub(super) struct Keys([RandomState; 2]);

impl Keys {
    /// The key of the request for a prompt's tokens. `root` stands for salt, model and adapter: who
    /// may not share blocks learns nothing from what is kept.
    pub(super) fn of(&self, root: BlockHash, request: &[u8]) -> Key {
        Key(self.0.each_ref().map(|state| state.hash_one((root.0, request))))
    }
}

struct KeptPrompt {
    known: KnownTokens,
    since: Instant,
}

/// Tokens of recent prompts, within bounds of time and memory.
#[derive(Default)]
pub(super) struct KeptPrompts {
    prompts: HashMap<Key, KeptPrompt>,
    /// The keys of all prompts, the oldest first.
    order: VecDeque<Key>,
    bytes: usize,
}

impl KeptPrompts {
    /// The tokens of a prompt, if they are kept.
    pub(super) fn find(&self, key: Key, now: Instant) -> Option<KnownTokens> {
        let kept = self.prompts.get(&key)?;
        let is_young = now.saturating_duration_since(kept.since) < KEPT_FOR;
        is_young.then(|| kept.known.clone())
    }

    /// Keeps the tokens of a prompt, with at most `max_bytes` for all prompts.
    pub(super) fn add(&mut self, key: Key, known: KnownTokens, max_bytes: usize, now: Instant) {
        self.remove(key);
        let bytes = bytes_of(&known);
        if bytes > max_bytes {
            return;
        }
        while self.bytes + bytes > max_bytes {
            let Some(oldest) = self.order.front().copied() else { break };
            self.remove(oldest);
        }
        self.bytes += bytes;
        self.order.push_back(key);
        self.prompts.insert(key, KeptPrompt { known, since: now });
    }

    fn remove(&mut self, key: Key) {
        let Some(kept) = self.prompts.remove(&key) else { return };
        self.bytes -= bytes_of(&kept.known);
        // Mostly the first one.
        if let Some(at) = self.order.iter().position(|other| *other == key) {
            self.order.remove(at);
        }
    }
}

fn bytes_of(known: &KnownTokens) -> usize {
    PROMPT_BYTES + size_of_val(&*known.hashes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(blocks: usize) -> KnownTokens {
        KnownTokens { tokens: blocks as u32 * 16, hashes: vec![BlockHash(7); blocks].into() }
    }

    #[test]
    fn the_oldest_prompts_make_room_and_old_ones_are_not_used() {
        let (mut kept, keys, now) = (KeptPrompts::default(), Keys::default(), Instant::now());
        let key = |text: &str| keys.of(BlockHash(1), text.as_bytes());
        let room = 3 * bytes_of(&known(10));
        for text in ["a", "b", "c", "b", "d"] {
            kept.add(key(text), known(10), room, now);
            assert!(kept.bytes <= room && kept.order.len() == kept.prompts.len());
        }
        let found: Vec<bool> =
            ["a", "b", "c", "d"].map(|text| kept.find(key(text), now).is_some()).into();
        assert_eq!(found, [false, true, true, true]);
        assert_eq!(kept.find(key("d"), now).map(|known| known.tokens), Some(160));
        assert!(kept.find(key("d"), now + KEPT_FOR).is_none());
        kept.add(key("long"), known(1000), room, now);
        assert!(kept.find(key("long"), now).is_none() && kept.find(key("d"), now).is_some());
        kept.add(key("e"), known(1), 0, now);
        assert!(kept.find(key("e"), now).is_none(), "no room, nothing kept");
    }

    #[test]
    fn prompts_of_other_salts_have_other_keys() {
        let keys = Keys::default();
        assert_eq!(keys.of(BlockHash(1), b"a"), keys.of(BlockHash(1), b"a"));
        assert_ne!(keys.of(BlockHash(1), b"a"), keys.of(BlockHash(2), b"a"));
        assert_ne!(keys.of(BlockHash(1), b"a"), keys.of(BlockHash(1), b"b"));
    }
}
