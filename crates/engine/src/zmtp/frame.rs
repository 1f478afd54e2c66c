//! Frames: flags, a length of one byte or eight, and the body.

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// A frame's header.
pub(super) struct Header {
    pub(super) more: bool,
    pub(super) is_command: bool,
    /// Length of the header itself.
    pub(super) bytes: usize,
    /// Length that the header claims for the body.
    pub(super) body_bytes: u64,
}

impl Header {
    /// The header at the start of `bytes`, or `None` if it is incomplete.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (flags, rest) = bytes.split_first()?;
        let (length, body_bytes) = if flags & LONG == 0 {
            (1, u64::from(*rest.first()?))
        } else {
            (8, u64::from_be_bytes(*rest.first_chunk()?))
        };
        Some(Self {
            more: flags & MORE != 0,
            is_command: flags & COMMAND != 0,
            bytes: 1 + length,
            body_bytes,
        })
    }
}

/// Appends a frame of a message.
pub(super) fn encode(body: &[u8], more: bool, into: &mut Vec<u8>) {
    encode_with(body, if more { MORE } else { 0 }, into);
}

/// Appends a command.
pub(super) fn encode_command(body: &[u8], into: &mut Vec<u8>) {
    encode_with(body, COMMAND, into);
}

fn encode_with(body: &[u8], flags: u8, into: &mut Vec<u8>) {
    match u8::try_from(body.len()) {
        Ok(length) => into.extend([flags, length]),
        Err(_) => {
            into.push(flags | LONG);
            into.extend((body.len() as u64).to_be_bytes());
        }
    }
    into.extend(body);
}
