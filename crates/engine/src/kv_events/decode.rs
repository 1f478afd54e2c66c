//! KV events: the msgpack payload that an engine publishes for each step in which its cache
//! changed.
//!
//! A batch is `[timestamp, [events], rank]`; vLLM 0.32 sends each event as a map
//! tagged `type`, vLLM up to 0.23 as an array that starts with the tag. Arrays
//! and maps are accepted at both levels, with keys in any order, unknown keys
//! and trailing items skipped.
//!
//! An event that cannot be used costs neither the other events of its batch nor, unless it may have
//! removed blocks, what is known of the engine. The rule never leaves a block that may be gone:
//!
//! | event | becomes |
//! |---|---|
//! | stores blocks, as its name says, and is unknown or cannot be used | nothing |
//! | a removal that cannot be used | [`KvEvent::Dropped`] of the blocks whose hashes can be read: no event that could be used has stored the others |
//! | unknown, in map form, with usable `block_hashes` | [`KvEvent::Dropped`] of these blocks |
//! | another unknown event | [`KvEvent::Cleared`] |
//!
//! To read all events again would help with none of them, because the engine would send the same.

use splitrail_kv::{EngineHash, KvEvent, StoredBlock, Tier};

mod cursor;
mod error;
mod extra;
mod group;
mod kind;
mod stored;

pub use error::{DecodeError, DecodeProblem};
pub use group::{KnownGroups, OtherGroups};

use cursor::Cursor;
use group::{GroupUse, StoredUse};
use kind::EventKind;
use stored::{RemovedEvent, StoredEvent, cleared_tier, readable_hashes};

/// The chunk of Llama 4 (`attention_chunk_size`), the only model with such layers in vLLM.
const CHUNK_TOKENS: u32 = 8192;

/// Bounds on one payload. Exceeding one is a [`DecodeError`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Maximum length of a payload in bytes.
    pub max_payload_bytes: usize,
    /// Maximum number of events in a batch, of known and unknown kinds together.
    pub max_events: usize,
    /// Maximum number of blocks in one event.
    pub max_blocks_per_event: usize,
    /// Maximum number of blocks in all events of a batch.
    pub max_blocks_per_batch: usize,
    /// Maximum nesting of values that are skipped; values above [`DecodeLimits::MAX_DEPTH`] count
    /// as that.
    pub max_depth: u8,
    /// The chunk of chunked local attention in tokens, which no event has.
    pub attention_chunk_tokens: u32,
}

impl DecodeLimits {
    /// The maximum of any configuration: skipping recurses, so the use of the stack must not depend
    /// on a setting.
    pub const MAX_DEPTH: u8 = 64;
}

impl Default for DecodeLimits {
    fn default() -> Self {
        Self {
            max_payload_bytes: 16 << 20,
            max_events: 65_536,
            max_blocks_per_event: 131_072,
            max_blocks_per_batch: 524_288,
            max_depth: 16,
            attention_chunk_tokens: CHUNK_TOKENS,
        }
    }
}

/// The content of one payload.
#[derive(Clone, Debug, PartialEq)]
pub struct EventBatch {
    /// When the engine made the batch, in seconds since the Unix epoch.
    pub timestamp_s: f64,
    /// The data-parallel rank, if the engine reports it.
    pub rank: Option<u16>,
    /// The changes, in the order in which they took place, except that blocks of the spine come before
    /// those of other cache groups.
    pub events: Vec<KvEvent>,
    /// The numbers of events that are not in `events` as the engine sent them.
    pub skipped: SkippedEvents,
}

impl EventBatch {
    /// About how much memory the events take, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let of_event = |event: &KvEvent| match event {
            KvEvent::Stored { blocks, .. } => {
                // All blocks of an event have as many tokens.
                let tokens = blocks.first().map_or(0, |block| block.tokens.len());
                blocks.len() * (size_of::<StoredBlock>() + tokens * size_of::<u32>())
            }
            KvEvent::Removed { hashes, .. }
            | KvEvent::Dropped { hashes }
            | KvEvent::GroupStored { hashes, .. }
            | KvEvent::GroupRemoved { hashes, .. } => hashes.len() * size_of::<EngineHash>(),
            KvEvent::TierCleared { .. } | KvEvent::Cleared => 0,
        };
        let lists: usize = self.events.iter().map(of_event).sum();
        self.events.len() * size_of::<KvEvent>() + lists
    }
}

/// Events of a batch that were left out, or replaced because they may have removed blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SkippedEvents {
    /// Events with a tag that this decoder does not know, or without one.
    pub unknown_events: u32,
    /// Events of a known kind that cannot be used: a field is missing, or has a wrong type or an
    /// impossible value. vLLM with CPU offloading sends such an event, without tokens, for blocks
    /// that it offloads.
    pub unusable_events: u32,
    /// Those of the above that may have removed any block: each is a [`KvEvent::Cleared`].
    pub replaced_by_clear: u32,
    /// Events of cache groups that are not followed, and of beginnings of blocks.
    pub other_groups: u32,
    /// The groups that are not followed, as far as stored events say which they are. An engine uses a
    /// block only if all its groups hold what they need, so the overlap in the index of an engine with
    /// such groups is an upper bound.
    pub unfollowed_groups: OtherGroups,
    /// The groups beside the spine that are followed: their events are not skipped.
    pub followed_groups: OtherGroups,
    /// Events without any block.
    pub empty_events: u32,
}

/// Decodes the payloads of one engine's stream. Each stream needs its own decoder, which learns
/// from the stream which cache groups there are.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    limits: DecodeLimits,
    groups: KnownGroups,
}

impl Decoder {
    /// A decoder that has not seen any payload.
    pub fn new(limits: DecodeLimits) -> Self {
        Self { limits, groups: KnownGroups::default() }
    }

    /// Decodes the next payload of the stream.
    ///
    /// # Errors
    /// The payload is not a batch, or exceeds a limit. What an event says is no error.
    pub fn decode(&mut self, payload: &[u8]) -> Result<EventBatch, DecodeError> {
        decode_with(payload, &self.limits, &mut self.groups)
    }

    /// Forgets what was learned about cache groups; for an engine that has restarted and may now
    /// serve another model.
    pub fn forget_groups(&mut self) {
        self.groups = KnownGroups::default();
    }
}

/// Decodes one payload on its own. For a stream, use [`Decoder`]: a removal gives a cache group
/// only by number, and an earlier payload said what the number means.
///
/// # Errors
/// The payload is larger than `limits` allow, or is not a batch of KV events.
pub fn decode_batch(payload: &[u8], limits: &DecodeLimits) -> Result<EventBatch, DecodeError> {
    decode_with(payload, limits, &mut KnownGroups::default())
}

fn decode_with(
    payload: &[u8],
    limits: &DecodeLimits,
    groups: &mut KnownGroups,
) -> Result<EventBatch, DecodeError> {
    if payload.len() > limits.max_payload_bytes {
        let limit = limits.max_payload_bytes;
        return Err(DecodeError::new(0, "payload", DecodeProblem::TooMany { limit }));
    }
    let mut cursor = Cursor::new(payload, limits.max_depth);
    let mut reader = BatchReader { limits, groups, blocks_left: limits.max_blocks_per_batch };
    let batch = reader.batch(&mut cursor)?;
    if !cursor.is_at_end() {
        return Err(cursor.error("payload", DecodeProblem::TrailingBytes));
    }
    Ok(batch)
}

/// The state of decoding one payload.
struct BatchReader<'a> {
    limits: &'a DecodeLimits,
    groups: &'a mut KnownGroups,
    blocks_left: usize,
}

impl BatchReader<'_> {
    fn batch(&mut self, cursor: &mut Cursor<'_>) -> Result<EventBatch, DecodeError> {
        let mut timestamp_s = None;
        let mut events = None;
        let mut rank = None;
        if cursor.next_is_map() {
            for _ in 0..cursor.map_len("batch")? {
                match cursor.str("batch key")? {
                    "ts" => timestamp_s = Some(cursor.seconds("ts")?),
                    "events" => events = Some(self.events(cursor)?),
                    "data_parallel_rank" | "dp_rank" | "attn_dp_rank" => {
                        rank = cursor.optional("rank", |c| c.u16("rank"))?;
                    }
                    _ => cursor.skip("batch")?,
                }
            }
        } else {
            for index in 0..cursor.array_len("batch")? {
                match index {
                    0 => timestamp_s = Some(cursor.seconds("ts")?),
                    1 => events = Some(self.events(cursor)?),
                    2 => rank = cursor.optional("rank", |c| c.u16("rank"))?,
                    _ => cursor.skip("batch")?,
                }
            }
        }
        let (events, skipped) =
            events.ok_or_else(|| cursor.error("events", DecodeProblem::Missing))?;
        let timestamp_s = timestamp_s.ok_or_else(|| cursor.error("ts", DecodeProblem::Missing))?;
        Ok(EventBatch { timestamp_s, rank, events, skipped })
    }

    fn events(
        &mut self,
        cursor: &mut Cursor<'_>,
    ) -> Result<(Vec<KvEvent>, SkippedEvents), DecodeError> {
        let count = cursor.array_len("events")?;
        if count > self.limits.max_events {
            let limit = self.limits.max_events;
            return Err(cursor.error("events", DecodeProblem::TooMany { limit }));
        }
        let mut events = Vec::with_capacity(count);
        let mut skipped = SkippedEvents::default();
        // A group's blocks are placed by the spine's blocks of the same names, which an engine may name
        // later in the same batch.
        let mut beside = Vec::new();
        for _ in 0..count {
            match self.event(cursor, &mut skipped)? {
                Some(event @ (KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. })) => {
                    beside.push(event);
                }
                Some(event @ (KvEvent::Stored { .. } | KvEvent::Removed { .. })) => {
                    events.push(event);
                }
                Some(event) => {
                    events.append(&mut beside);
                    events.push(event);
                }
                None => {}
            }
        }
        let stored = beside.iter().filter_map(|event| match event {
            KvEvent::GroupStored { group, .. } => Some(group.number),
            _ => None,
        });
        if self.groups.lacks_spine(stored.collect()) {
            let all = OtherGroups::named("no_full_attention");
            skipped.unfollowed_groups = skipped.unfollowed_groups | all;
        }
        events.append(&mut beside);
        Ok((events, skipped))
    }

    /// One event, or `None` if it was left out and counted.
    fn event(
        &mut self,
        cursor: &mut Cursor<'_>,
        skipped: &mut SkippedEvents,
    ) -> Result<Option<KvEvent>, DecodeError> {
        let start = cursor.clone();
        let (kind, is_map) = kind(cursor)?;
        if kind.is_unknown() {
            skipped.unknown_events += 1;
        }
        match self.usable_event(kind, is_map, cursor, skipped) {
            Err(error) if error.problem.is_of_one_value() => {
                // What is left of the event must have an end nevertheless.
                let mut again = start.clone();
                *cursor = start;
                cursor.skip_event()?;
                if !kind.is_unknown() {
                    skipped.unusable_events += 1;
                }
                if kind == EventKind::Removed {
                    let max_blocks = self.limits.max_blocks_per_event.min(self.blocks_left);
                    let hashes = readable_hashes(&mut again, is_map, max_blocks)?;
                    self.blocks_left -= hashes.len();
                    return Ok((!hashes.is_empty()).then_some(KvEvent::Dropped { hashes }));
                }
                if !kind.may_remove() {
                    return Ok(None);
                }
                skipped.replaced_by_clear += 1;
                Ok(Some(KvEvent::Cleared))
            }
            result => result,
        }
    }

    /// [`Self::event`], with an error if it cannot be used.
    fn usable_event(
        &mut self,
        kind: EventKind,
        is_map: bool,
        cursor: &mut Cursor<'_>,
        skipped: &mut SkippedEvents,
    ) -> Result<Option<KvEvent>, DecodeError> {
        let start = cursor.clone();
        let max_blocks = self.limits.max_blocks_per_event.min(self.blocks_left);
        let event = match kind {
            EventKind::Stored => {
                let mut stored = StoredEvent::new(max_blocks);
                fields(cursor, is_map, StoredEvent::key, |key, c| stored.field(key, c))?;
                let usage =
                    self.groups.learn(stored.said_of_group(self.limits.attention_chunk_tokens));
                let named = OtherGroups::of(stored.group, stored.spec_kind);
                match usage {
                    StoredUse::Spine => {
                        self.blocks_left -= stored.block_count();
                        stored.into_event(&start)?
                    }
                    StoredUse::Beside(group) => {
                        self.blocks_left -= stored.block_count();
                        skipped.followed_groups = skipped.followed_groups | named;
                        return stored.into_group_event(group, &start);
                    }
                    StoredUse::Unfollowed => {
                        skipped.unfollowed_groups = skipped.unfollowed_groups | named;
                        skipped.other_groups += 1;
                        return Ok(None);
                    }
                    StoredUse::Part => {
                        if stored.spec_kind == Some("mamba") && stored.is_resident() {
                            let parts = OtherGroups::named("mamba_in_parts");
                            skipped.unfollowed_groups = skipped.unfollowed_groups | parts;
                        }
                        skipped.other_groups += 1;
                        return Ok(None);
                    }
                }
            }
            EventKind::Removed | EventKind::Unknown => {
                let mut removed = RemovedEvent::new(max_blocks);
                let key = if kind.is_unknown() { |_| "" } else { RemovedEvent::key };
                fields(cursor, is_map, key, |key, c| removed.field(key, c))?;
                let usage = match kind.is_unknown() {
                    true => GroupUse::Spine,
                    false => self.groups.removal(removed.group),
                };
                if usage == GroupUse::Unfollowed {
                    skipped.other_groups += 1;
                    return Ok(None);
                }
                self.blocks_left -= removed.block_count();
                let is_of_all = removed.group.is_none() && self.groups.are_several();
                match removed.into_event(kind, usage, &start)? {
                    // Any of the groups may have lost them.
                    Some(KvEvent::Removed { hashes, tier: Tier::Device }) if is_of_all => {
                        Some(KvEvent::Dropped { hashes })
                    }
                    event => event,
                }
            }
            EventKind::TierCleared => return cleared_tier(cursor, is_map).map(Some),
            EventKind::Cleared => {
                cursor.skip_event()?;
                return Ok(Some(KvEvent::Cleared));
            }
            EventKind::Added => {
                cursor.skip_event()?;
                return Ok(None);
            }
        };
        skipped.empty_events += u32::from(event.is_none());
        Ok(event)
    }
}

/// Calls a function with the key of each field of an event, and the cursor at its value. `name`
/// gives the key of an item in the array form.
fn fields<'a>(
    cursor: &mut Cursor<'a>,
    is_map: bool,
    name: fn(usize) -> &'static str,
    mut field: impl FnMut(&str, &mut Cursor<'a>) -> Result<(), DecodeError>,
) -> Result<(), DecodeError> {
    let items = if is_map { cursor.map_len("event")? } else { cursor.array_len("event")? };
    for index in 0..items {
        let key = if is_map { cursor.key("event key")? } else { name(index) };
        field(key, cursor)?;
    }
    Ok(())
}

/// The kind of the event at the cursor, and whether the event is a map. The cursor stays at the
/// event's start: the tag decides how to read all other fields, but may be a map's last key.
fn kind(cursor: &Cursor<'_>) -> Result<(EventKind, bool), DecodeError> {
    let mut ahead = cursor.clone();
    let kind = |tag: Result<&str, DecodeError>| tag.map_or(EventKind::Unknown, EventKind::of);
    if !cursor.next_is_map() {
        let is_empty = ahead.array_len("event")? == 0;
        return Ok((if is_empty { EventKind::Unknown } else { kind(ahead.str("type")) }, false));
    }
    for _ in 0..ahead.map_len("event")? {
        if ahead.key("event key")? == "type" {
            return Ok((kind(ahead.str("type")), true));
        }
        ahead.skip("event")?;
    }
    Ok((EventKind::Unknown, true))
}
