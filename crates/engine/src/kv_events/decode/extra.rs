//! `extra_keys`: what a block's content depends on besides its tokens.
//!
//! vLLM puts the cache salt, the adapter's name and the identities of images
//! and other embeddings into one untyped list per block.

use super::cursor::Cursor;
use super::{DecodeError, DecodeProblem};

/// The extra keys of one block, as far as they can be distinguished.
#[derive(Clone, Copy, Default)]
pub(super) struct BlockExtra<'a> {
    /// Up to two plain texts: at most a salt and an adapter's name are supported.
    texts: [Option<&'a str>; 2],
    /// Whether there are further keys.
    more: bool,
}

/// The rest of a block's extra keys without the adapter's name.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OtherKeys<'a> {
    Nothing,
    Text(&'a str),
    NotUnderstood,
}

impl<'a> BlockExtra<'a> {
    fn read(cursor: &mut Cursor<'a>) -> Result<Self, DecodeError> {
        let mut extra = Self::default();
        for _ in 0..cursor.array_len("extra_keys")? {
            let free = extra.texts.iter_mut().find(|text| text.is_none());
            match free {
                Some(free) if cursor.next_is_str() => *free = Some(cursor.str("extra_keys")?),
                _ => {
                    cursor.skip("extra_keys")?;
                    extra.more = true;
                }
            }
        }
        Ok(extra)
    }

    pub(super) fn without(&self, adapter: Option<&str>) -> OtherKeys<'a> {
        let is_adapter = |text: Option<&str>| text.is_some() && text == adapter;
        match self.texts {
            _ if self.more => OtherKeys::NotUnderstood,
            [None, None] => OtherKeys::Nothing,
            [Some(text), None] if is_adapter(Some(text)) => OtherKeys::Nothing,
            [Some(text), None] => OtherKeys::Text(text),
            [first, Some(text)] if is_adapter(first) => OtherKeys::Text(text),
            [Some(text), second] if is_adapter(second) => OtherKeys::Text(text),
            _ => OtherKeys::NotUnderstood,
        }
    }
}

/// The extra keys of an event's blocks, one for each.
pub(super) fn read<'a>(
    cursor: &mut Cursor<'a>,
    limit: usize,
) -> Result<Vec<BlockExtra<'a>>, DecodeError> {
    let count = cursor.array_len("extra_keys")?;
    if count > limit {
        return Err(cursor.error("extra_keys", DecodeProblem::TooMany { limit }));
    }
    // Allocated at the first block with extra keys, because most blocks have none.
    let mut extras = Vec::new();
    for index in 0..count {
        let extra = if cursor.next_is_array() {
            Some(BlockExtra::read(cursor)?)
        } else {
            cursor.optional("extra_keys", |c| {
                c.skip("extra_keys")?;
                Ok(BlockExtra { more: true, ..BlockExtra::default() })
            })?
        };
        if let Some(extra) = extra {
            extras.resize(index, BlockExtra::default());
            extras.push(extra);
        }
    }
    Ok(extras)
}
