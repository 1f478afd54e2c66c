//! MessagePack of event batches.

use rmp::encode::{
    write_array_len, write_bin, write_f64, write_map_len, write_nil, write_sint, write_str,
    write_uint,
};

use crate::cache::{CacheEvent, ExtraKey, Medium, StoredBlocks};
use crate::config::{EventForm, HashForm};
use crate::faults::OddEvent;

/// Writing to memory cannot fail; the trait requires the error type.
type EncodeResult<T> = Result<T, rmp::encode::ValueWriteError>;

/// Encodes batches in the format of one engine version.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Encoder {
    pub(crate) form: EventForm,
    pub(crate) hashes: HashForm,
    pub(crate) block_size: usize,
    /// The number of full attention among the cache groups.
    pub(crate) full_group: usize,
}

impl Encoder {
    /// `[timestamp, [events], data parallel rank]`.
    pub(crate) fn batch(
        &self,
        seconds: f64,
        events: &[CacheEvent],
        odd: Option<OddEvent>,
        rank: u16,
    ) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        // Writing to a `Vec<u8>` cannot fail, so there is no error to report.
        let _ = self.write_batch(&mut out, seconds, events, odd, rank);
        out
    }

    fn write_batch(
        &self,
        out: &mut Vec<u8>,
        seconds: f64,
        events: &[CacheEvent],
        odd: Option<OddEvent>,
        rank: u16,
    ) -> EncodeResult<()> {
        write_array_len(out, 3)?;
        write_f64(out, seconds)?;
        write_array_len(out, (events.len() + usize::from(odd.is_some())) as u32)?;
        if let Some(odd) = odd {
            self.odd(out, odd)?;
        }
        for event in events {
            match (event, self.form) {
                (CacheEvent::Stored(stored), EventForm::Map) => {
                    self.stored_map(out, stored, (self.full_group, "full_attention", None))?;
                }
                (CacheEvent::GroupStored { group, kind, stored }, _) => {
                    self.stored_map(out, stored, (*group, kind.name(), kind.window()))?;
                }
                (CacheEvent::GroupRemoved { group, hash }, _) => {
                    self.removed_map(out, *hash, Medium::Device, *group)?;
                }
                (CacheEvent::Stored(stored), EventForm::Array) => self.stored_array(out, stored)?,
                (CacheEvent::Removed { hash, medium }, form) => {
                    self.removed(out, *hash, *medium, form)?;
                }
                (CacheEvent::Cleared, EventForm::Map) => {
                    write_map_len(out, 1)?;
                    write_str(out, "type")?;
                    write_str(out, "AllBlocksCleared")?;
                }
                (CacheEvent::Cleared, EventForm::Array) => {
                    write_array_len(out, 1)?;
                    write_str(out, "AllBlocksCleared")?;
                }
            }
        }
        write_uint(out, rank.into())?;
        Ok(())
    }

    fn odd(&self, out: &mut Vec<u8>, odd: OddEvent) -> EncodeResult<()> {
        let (block_size, medium, group) = match odd {
            OddEvent::Unknown => {
                write_map_len(out, 1)?;
                write_str(out, "type")?;
                return write_str(out, "CacheRearranged");
            }
            OddEvent::Placeholder => (0, Medium::Host, (0, "full_attention")),
            OddEvent::SlidingWindow => (self.block_size, Medium::Device, (1, "sliding_window")),
        };
        write_map_len(out, 8)?;
        write_str(out, "type")?;
        write_str(out, "BlockStored")?;
        write_str(out, "block_hashes")?;
        self.write_hashes(out, &[1])?;
        write_str(out, "parent_block_hash")?;
        nil(out)?;
        write_str(out, "token_ids")?;
        write_tokens(out, &vec![1; block_size])?;
        write_str(out, "block_size")?;
        write_uint(out, block_size as u64)?;
        write_str(out, "medium")?;
        write_str(out, name_of(medium))?;
        write_str(out, "group_idx")?;
        write_uint(out, group.0)?;
        write_str(out, "kv_cache_spec_kind")?;
        write_str(out, group.1)
    }

    /// `group` is the number, the kind and the sliding window of the cache group.
    fn stored_map(
        &self,
        out: &mut Vec<u8>,
        stored: &StoredBlocks,
        group: (usize, &str, Option<usize>),
    ) -> EncodeResult<()> {
        let (number, kind, window) = group;
        write_map_len(out, 11 + u32::from(window.is_some()))?;
        write_str(out, "type")?;
        write_str(out, "BlockStored")?;
        write_str(out, "block_hashes")?;
        self.write_hashes(out, &stored.hashes)?;
        write_str(out, "parent_block_hash")?;
        self.write_parent(out, stored.parent)?;
        write_str(out, "token_ids")?;
        write_tokens(out, &stored.tokens)?;
        write_str(out, "block_size")?;
        write_uint(out, self.block_size as u64)?;
        write_str(out, "lora_id")?;
        write_lora_id(out, stored)?;
        write_str(out, "medium")?;
        write_str(out, name_of(stored.medium))?;
        write_str(out, "lora_name")?;
        write_lora_name(out, stored)?;
        write_str(out, "extra_keys")?;
        write_extra_keys(out, stored)?;
        write_str(out, "group_idx")?;
        write_uint(out, number as u64)?;
        if let Some(window) = window {
            write_str(out, "kv_cache_spec_sliding_window")?;
            write_uint(out, window as u64)?;
        }
        write_str(out, "kv_cache_spec_kind")?;
        write_str(out, kind)
    }

    fn stored_array(&self, out: &mut Vec<u8>, stored: &StoredBlocks) -> EncodeResult<()> {
        write_array_len(out, 9)?;
        write_str(out, "BlockStored")?;
        self.write_hashes(out, &stored.hashes)?;
        self.write_parent(out, stored.parent)?;
        write_tokens(out, &stored.tokens)?;
        write_uint(out, self.block_size as u64)?;
        write_lora_id(out, stored)?;
        write_str(out, name_of(stored.medium))?;
        write_lora_name(out, stored)?;
        write_extra_keys(out, stored)
    }

    fn removed(
        &self,
        out: &mut Vec<u8>,
        hash: u64,
        medium: Medium,
        form: EventForm,
    ) -> EncodeResult<()> {
        match form {
            EventForm::Map => self.removed_map(out, hash, medium, self.full_group)?,
            EventForm::Array => {
                write_array_len(out, 3)?;
                write_str(out, "BlockRemoved")?;
                self.write_hashes(out, &[hash])?;
                write_str(out, name_of(medium))?;
            }
        }
        Ok(())
    }

    fn removed_map(
        &self,
        out: &mut Vec<u8>,
        hash: u64,
        medium: Medium,
        group: usize,
    ) -> EncodeResult<()> {
        write_map_len(out, 4)?;
        write_str(out, "type")?;
        write_str(out, "BlockRemoved")?;
        write_str(out, "block_hashes")?;
        self.write_hashes(out, &[hash])?;
        write_str(out, "medium")?;
        write_str(out, name_of(medium))?;
        write_str(out, "group_idx")?;
        write_uint(out, group as u64).map(|_| ())
    }

    fn write_hashes(&self, out: &mut Vec<u8>, hashes: &[u64]) -> EncodeResult<()> {
        write_array_len(out, hashes.len() as u32)?;
        hashes.iter().try_for_each(|hash| self.write_hash(out, *hash))
    }

    fn write_parent(&self, out: &mut Vec<u8>, parent: Option<u64>) -> EncodeResult<()> {
        match parent {
            Some(hash) => self.write_hash(out, hash),
            None => nil(out),
        }
    }

    fn write_hash(&self, out: &mut Vec<u8>, hash: u64) -> EncodeResult<()> {
        match self.hashes {
            HashForm::U64 => write_uint(out, hash).map(|_| ()),
            HashForm::Bytes32 => {
                let mut bytes = [0u8; 32];
                for (index, part) in bytes.chunks_exact_mut(8).enumerate() {
                    part.copy_from_slice(&hash.rotate_left(index as u32 * 13).to_be_bytes());
                }
                write_bin(out, &bytes)
            }
        }
    }
}

/// The names of the media in vLLM's events.
fn name_of(medium: Medium) -> &'static str {
    match medium {
        Medium::Device => "GPU",
        Medium::Host => "CPU",
    }
}

fn write_tokens(out: &mut Vec<u8>, tokens: &[u32]) -> EncodeResult<()> {
    write_array_len(out, tokens.len() as u32)?;
    tokens.iter().try_for_each(|token| write_uint(out, u64::from(*token)).map(|_| ()))
}

fn nil(out: &mut Vec<u8>) -> EncodeResult<()> {
    write_nil(out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite)
}

fn write_lora_id(out: &mut Vec<u8>, stored: &StoredBlocks) -> EncodeResult<()> {
    match &stored.adapter {
        Some((id, _)) => write_uint(out, u64::from(*id)).map(|_| ()),
        None => nil(out),
    }
}

fn write_lora_name(out: &mut Vec<u8>, stored: &StoredBlocks) -> EncodeResult<()> {
    match &stored.adapter {
        Some((_, name)) => write_str(out, name),
        None => nil(out),
    }
}

fn write_extra_key(out: &mut Vec<u8>, key: &ExtraKey) -> EncodeResult<()> {
    match key {
        ExtraKey::Text(text) => write_str(out, text),
        ExtraKey::Media(identifier, offset) => {
            write_array_len(out, 2)?;
            write_str(out, identifier)?;
            write_sint(out, *offset).map(|_| ())
        }
    }
}

fn write_extra_keys(out: &mut Vec<u8>, stored: &StoredBlocks) -> EncodeResult<()> {
    write_array_len(out, stored.extra_keys.len() as u32)?;
    for keys in &stored.extra_keys {
        match keys {
            None => nil(out)?,
            Some(keys) => {
                write_array_len(out, keys.len() as u32)?;
                keys.iter().try_for_each(|key| write_extra_key(out, key))?;
            }
        }
    }
    Ok(())
}
