//! The fields of stored and removed events, collected in any order, then turned into a [`KvEvent`].

use splitrail_kv::{BlockAdapter, CacheGroup, EngineHash, KvEvent, StoredBlock, Tier};

use super::cursor::Cursor;
use super::extra::{self, BlockExtra, OtherKeys};
use super::group::{GroupUse, SaidOfGroup};
use super::kind::EventKind;
use super::{DecodeError, DecodeProblem, fields};

/// A `BlockStored` event.
#[derive(Default)]
pub(super) struct StoredEvent<'a> {
    max_blocks: usize,
    hashes: Option<Vec<EngineHash>>,
    parent: Option<EngineHash>,
    /// All tokens; divided into blocks once the block size is known.
    tokens: Option<Vec<u32>>,
    block_size: Option<u32>,
    /// The engine's number of the adapter's load; 0 if it names the load otherwise.
    adapter_load: Option<u64>,
    adapter: Option<&'a str>,
    extras: Vec<BlockExtra<'a>>,
    /// The cache salt, if the event names it apart from `extras`.
    salt: Option<&'a str>,
    tier: Tier,
    pub(super) group: Option<u32>,
    pub(super) spec_kind: Option<&'a str>,
    window: Option<u32>,
}

impl<'a> StoredEvent<'a> {
    pub(super) fn new(max_blocks: usize) -> Self {
        Self { max_blocks, ..Self::default() }
    }

    /// The name of an item in the array form.
    pub(super) fn key(index: usize) -> &'static str {
        const KEYS: [&str; 12] = [
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
            "kv_cache_spec_sliding_window",
        ];
        KEYS.get(index).copied().unwrap_or_default()
    }

    pub(super) fn field(&mut self, key: &str, c: &mut Cursor<'a>) -> Result<(), DecodeError> {
        match key {
            "block_hashes" => self.hashes = Some(hashes(c, self.max_blocks)?),
            "parent_block_hash" => {
                let parent = c.optional("parent_block_hash", |c| c.hash("parent_block_hash"))?;
                self.parent = parent.map(EngineHash);
            }
            "token_ids" => {
                let count = c.array_len("token_ids")?;
                self.tokens = Some(c.u32s(count, "token_ids")?);
            }
            "block_size" => self.block_size = Some(c.u32("block_size")?),
            "lora_id" => {
                self.adapter_load = c.optional("lora_id", adapter_load)?;
            }
            "medium" => self.tier = tier(c)?,
            "lora_name" => self.adapter = c.optional("lora_name", |c| c.str("lora_name"))?,
            // SGLang names the salt here, and vLLM in the first block's extra keys.
            "cache_salt" => self.salt = c.optional("cache_salt", |c| c.str("cache_salt"))?,
            "extra_keys" => {
                let limit = self.max_blocks;
                let extras = c.optional("extra_keys", |c| extra::read(c, limit))?;
                self.extras = extras.unwrap_or_default();
            }
            "group_idx" => self.group = c.optional("group_idx", |c| c.u32("group_idx"))?,
            "kv_cache_spec_kind" => {
                self.spec_kind =
                    c.optional("kv_cache_spec_kind", |c| c.str("kv_cache_spec_kind"))?;
            }
            "kv_cache_spec_sliding_window" => {
                let window = |c: &mut Cursor<'a>| c.u32("kv_cache_spec_sliding_window");
                self.window = c.optional("kv_cache_spec_sliding_window", window)?;
            }
            _ => c.skip("event")?,
        }
        Ok(())
    }

    pub(super) fn block_count(&self) -> usize {
        self.hashes.as_ref().map_or(0, Vec::len)
    }

    /// Whether the event's blocks are in the engine's own cache. Offloading names blocks of other
    /// groups without a size.
    pub(super) fn is_resident(&self) -> bool {
        self.tier == Tier::Device && self.block_size != Some(0)
    }

    /// What the event says of its cache group.
    pub(super) fn said_of_group(&self, chunk: u32) -> SaidOfGroup<'a> {
        SaidOfGroup {
            number: self.group,
            kind: self.spec_kind,
            window: self.window,
            chunk,
            block_size: self.block_size.unwrap_or(0),
        }
    }

    /// The event of a group beside the spine; `None` if its blocks are in a slower tier, of which no
    /// other event says which blocks are there. An event without blocks names its group.
    pub(super) fn into_group_event(
        self,
        group: CacheGroup,
        start: &Cursor<'_>,
    ) -> Result<Option<KvEvent>, DecodeError> {
        let missing = |field| start.error(field, DecodeProblem::Missing);
        let hashes = self.hashes.ok_or_else(|| missing("block_hashes"))?;
        let tokens = self.tokens.ok_or_else(|| missing("token_ids"))?.len() as u32;
        let event = KvEvent::GroupStored { group, parent: self.parent, tokens, hashes };
        Ok((self.tier == Tier::Device).then_some(event))
    }

    /// The event; `None` if it names no block. `start` is the position at which it began.
    pub(super) fn into_event(self, start: &Cursor<'_>) -> Result<Option<KvEvent>, DecodeError> {
        let missing = |field| start.error(field, DecodeProblem::Missing);
        let hashes = self.hashes.ok_or_else(|| missing("block_hashes"))?;
        let tokens = self.tokens.ok_or_else(|| missing("token_ids"))?;
        let block_size = self.block_size.ok_or_else(|| missing("block_size"))? as usize;
        if block_size == 0 {
            return Err(start.error("block_size", DecodeProblem::OutOfRange));
        }
        if hashes.len().checked_mul(block_size) != Some(tokens.len()) {
            let problem = DecodeProblem::TokenCount {
                tokens: tokens.len(),
                blocks: hashes.len(),
                block_size,
            };
            return Err(start.error("token_ids", problem));
        }
        if hashes.is_empty() {
            return Ok(None);
        }
        // Adapters that are known only by number cannot be distinguished, and extra keys beyond the
        // number of blocks cannot be assigned to a block.
        let all_opaque = (self.adapter_load.is_some() && self.adapter.is_none())
            || self.extras.len() > hashes.len();
        let mut salt = self.salt.map(str::to_owned);
        let blocks = hashes.iter().zip(tokens.chunks_exact(block_size)).enumerate();
        let blocks = blocks.map(|(index, (hash, tokens))| {
            let extra = self.extras.get(index).copied().unwrap_or_default();
            let opaque = match extra.without(self.adapter) {
                OtherKeys::Nothing => false,
                OtherKeys::Text(text) if index == 0 && self.parent.is_none() => {
                    salt = Some(text.to_owned());
                    false
                }
                OtherKeys::Text(_) | OtherKeys::NotUnderstood => true,
            };
            StoredBlock { hash: *hash, tokens: tokens.to_vec(), opaque: opaque || all_opaque }
        });
        let blocks = blocks.collect();
        Ok(Some(KvEvent::Stored {
            parent: self.parent,
            blocks,
            adapter: self.adapter.map(|name| BlockAdapter {
                name: name.to_owned(),
                load: self.adapter_load.unwrap_or(0),
            }),
            salt,
            tier: self.tier,
        }))
    }
}

/// A `BlockRemoved` event, or an unknown event that names blocks.
pub(super) struct RemovedEvent {
    max_blocks: usize,
    hashes: Option<Vec<EngineHash>>,
    tier: Tier,
    pub(super) group: Option<u32>,
}

impl RemovedEvent {
    pub(super) fn new(max_blocks: usize) -> Self {
        Self { max_blocks, hashes: None, tier: Tier::Device, group: None }
    }

    /// The name of an item in the array form.
    pub(super) fn key(index: usize) -> &'static str {
        const KEYS: [&str; 4] = ["type", "block_hashes", "medium", "group_idx"];
        KEYS.get(index).copied().unwrap_or_default()
    }

    pub(super) fn field(&mut self, key: &str, c: &mut Cursor<'_>) -> Result<(), DecodeError> {
        match key {
            "block_hashes" => self.hashes = Some(hashes(c, self.max_blocks)?),
            "medium" => self.tier = tier(c)?,
            "group_idx" => self.group = c.optional("group_idx", |c| c.u32("group_idx"))?,
            _ => c.skip("event")?,
        }
        Ok(())
    }

    pub(super) fn block_count(&self) -> usize {
        self.hashes.as_ref().map_or(0, Vec::len)
    }

    /// The event; `None` if it names no block. `start` is the position at which it began.
    pub(super) fn into_event(
        self,
        kind: EventKind,
        usage: GroupUse,
        start: &Cursor<'_>,
    ) -> Result<Option<KvEvent>, DecodeError> {
        let hashes =
            self.hashes.ok_or_else(|| start.error("block_hashes", DecodeProblem::Missing))?;
        if let GroupUse::Beside(_) = usage {
            let group = self.group.unwrap_or_default();
            let event = KvEvent::GroupRemoved { group, hashes };
            return Ok((self.tier == Tier::Device).then_some(event));
        }
        let is_empty = hashes.is_empty();
        let event = match kind.is_unknown() {
            true => KvEvent::Dropped { hashes },
            false => KvEvent::Removed { hashes, tier: self.tier },
        };
        Ok((!is_empty).then_some(event))
    }
}

/// Reads a `TierBlocksCleared` event.
pub(super) fn cleared_tier(c: &mut Cursor<'_>, is_map: bool) -> Result<KvEvent, DecodeError> {
    let (start, mut medium) = (c.clone(), None);
    let name = |index| if index == 1 { "medium" } else { "" };
    fields(c, is_map, name, |key, c| {
        match key {
            "medium" => medium = c.optional("medium", |c| c.str("medium"))?,
            _ => c.skip("event")?,
        }
        Ok(())
    })?;
    let medium = medium.ok_or_else(|| start.error("medium", DecodeProblem::Missing))?;
    Ok(KvEvent::TierCleared { tier: tier_of(medium) })
}

/// The hashes of a removal that cannot be used, as far as they can be read.
pub(super) fn readable_hashes(
    c: &mut Cursor<'_>,
    is_map: bool,
    limit: usize,
) -> Result<Vec<EngineHash>, DecodeError> {
    let mut hashes = Vec::new();
    fields(c, is_map, RemovedEvent::key, |key, c| {
        let start = c.clone();
        let Some(count) = c.array_len("block_hashes").ok().filter(|_| key == "block_hashes") else {
            *c = start;
            return c.skip("event");
        };
        if count > limit {
            return Err(c.error("block_hashes", DecodeProblem::TooMany { limit }));
        }
        for _ in 0..count {
            let start = c.clone();
            match c.hash("block_hashes") {
                Ok(hash) => hashes.push(EngineHash(hash)),
                Err(_) => {
                    *c = start;
                    c.skip("event")?;
                }
            }
        }
        Ok(())
    })?;
    Ok(hashes)
}

fn hashes(c: &mut Cursor<'_>, limit: usize) -> Result<Vec<EngineHash>, DecodeError> {
    let count = c.array_len("block_hashes")?;
    if count > limit {
        return Err(c.error("block_hashes", DecodeProblem::TooMany { limit }));
    }
    let mut hashes = Vec::with_capacity(count);
    for _ in 0..count {
        hashes.push(EngineHash(c.hash("block_hashes")?));
    }
    Ok(hashes)
}

/// The number of an adapter's load: vLLM counts loads from 1. 0 if it is no number.
fn adapter_load(c: &mut Cursor<'_>) -> Result<u64, DecodeError> {
    let start = c.clone();
    if let Ok(load) = c.u32("lora_id") {
        return Ok(load.into());
    }
    *c = start;
    c.skip("lora_id").map(|_| 0)
}

/// The tier of a `medium`. Nil is the engine's own cache.
fn tier(c: &mut Cursor<'_>) -> Result<Tier, DecodeError> {
    Ok(c.optional("medium", |c| c.str("medium"))?.map_or(Tier::Device, tier_of))
}

/// vLLM writes `GPU`, its offloading `CPU`; SGLang writes `GPU`, `CPU_TIER1` and so on.
fn tier_of(medium: &str) -> Tier {
    let starts_with =
        |name: &str| medium.get(..name.len()).is_some_and(|start| start.eq_ignore_ascii_case(name));
    let is_any = |names: &[&str]| names.iter().any(|name| starts_with(name));
    if is_any(&["GPU", "DEVICE", "HBM"]) {
        Tier::Device
    } else if is_any(&["CPU", "HOST", "DRAM"]) {
        Tier::Host
    } else if is_any(&["DISK", "SSD", "NVME", "FILE", "FS"]) {
        Tier::Disk
    } else {
        Tier::Remote
    }
}
