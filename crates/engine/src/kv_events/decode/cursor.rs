//! Typed reading of msgpack from a slice. Nothing is read except as the requested type, and a
//! length is accepted only as far as bytes are left.

use rmp::Marker;

use super::{DecodeError, DecodeLimits, DecodeProblem};

type Result<T> = std::result::Result<T, DecodeError>;

/// A position in a payload.
#[derive(Clone)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    offset: usize,
    max_depth: u8,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], max_depth: u8) -> Self {
        Self { bytes, offset: 0, max_depth: max_depth.min(DecodeLimits::MAX_DEPTH) }
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.offset == self.bytes.len()
    }

    pub(super) fn error(&self, field: &'static str, problem: DecodeProblem) -> DecodeError {
        DecodeError::new(self.offset, field, problem)
    }

    fn wrong_type(&self, field: &'static str, expected: &'static str) -> DecodeError {
        self.error(field, DecodeProblem::WrongType { expected })
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.offset
    }

    fn peek(&self) -> Option<Marker> {
        self.bytes.get(self.offset).copied().map(Marker::from_u8)
    }

    fn marker(&mut self, field: &'static str) -> Result<Marker> {
        let marker = self.peek().ok_or_else(|| self.error(field, DecodeProblem::UnexpectedEnd))?;
        self.offset += 1;
        Ok(marker)
    }

    fn take(&mut self, length: usize, field: &'static str) -> Result<&'a [u8]> {
        if length > self.remaining() {
            return Err(self.error(field, DecodeProblem::UnexpectedEnd));
        }
        let taken = &self.bytes[self.offset..self.offset + length];
        self.offset += length;
        Ok(taken)
    }

    /// A big-endian unsigned number of `width` bytes, at most eight.
    fn big_endian(&mut self, width: usize, field: &'static str) -> Result<u64> {
        let bytes = self.take(width, field)?;
        Ok(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn length(&mut self, width: usize, field: &'static str) -> Result<usize> {
        let length = self.big_endian(width, field)?;
        usize::try_from(length).map_err(|_| self.error(field, DecodeProblem::UnexpectedEnd))
    }

    pub(super) fn next_is_map(&self) -> bool {
        matches!(self.peek(), Some(Marker::FixMap(_) | Marker::Map16 | Marker::Map32))
    }

    pub(super) fn next_is_array(&self) -> bool {
        matches!(self.peek(), Some(Marker::FixArray(_) | Marker::Array16 | Marker::Array32))
    }

    pub(super) fn next_is_str(&self) -> bool {
        use Marker::{FixStr, Str8, Str16, Str32};
        matches!(self.peek(), Some(FixStr(_) | Str8 | Str16 | Str32))
    }

    /// Number of items of the array that starts here. At most the number of bytes left, since each
    /// item takes at least one.
    pub(super) fn array_len(&mut self, field: &'static str) -> Result<usize> {
        let at = self.clone();
        let count = match self.marker(field)? {
            Marker::FixArray(count) => usize::from(count),
            Marker::Array16 => self.length(2, field)?,
            Marker::Array32 => self.length(4, field)?,
            _ => return Err(at.wrong_type(field, "an array")),
        };
        if count > self.remaining() {
            return Err(at.error(field, DecodeProblem::UnexpectedEnd));
        }
        Ok(count)
    }

    /// Number of entries of the map that starts here; each takes two bytes.
    pub(super) fn map_len(&mut self, field: &'static str) -> Result<usize> {
        let at = self.clone();
        let count = match self.marker(field)? {
            Marker::FixMap(count) => usize::from(count),
            Marker::Map16 => self.length(2, field)?,
            Marker::Map32 => self.length(4, field)?,
            _ => return Err(at.wrong_type(field, "a map")),
        };
        if count > self.remaining() / 2 {
            return Err(at.error(field, DecodeProblem::UnexpectedEnd));
        }
        Ok(count)
    }

    /// `None` for nil; otherwise the result of `read`.
    pub(super) fn optional<T>(
        &mut self,
        field: &'static str,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        match self.peek() {
            None => Err(self.error(field, DecodeProblem::UnexpectedEnd)),
            Some(Marker::Null) => {
                self.offset += 1;
                Ok(None)
            }
            Some(_) => read(self).map(Some),
        }
    }

    pub(super) fn str(&mut self, field: &'static str) -> Result<&'a str> {
        let at = self.clone();
        let length = match self.marker(field)? {
            Marker::FixStr(length) => usize::from(length),
            Marker::Str8 => self.length(1, field)?,
            Marker::Str16 => self.length(2, field)?,
            Marker::Str32 => self.length(4, field)?,
            _ => return Err(at.wrong_type(field, "a text")),
        };
        let bytes = self.take(length, field)?;
        std::str::from_utf8(bytes).map_err(|_| at.error(field, DecodeProblem::NotUtf8))
    }

    /// A whole number in 64 bits, of either sign: the bits, and whether the number is negative.
    fn integer(&mut self, field: &'static str) -> Result<(u64, bool)> {
        let at = self.clone();
        let signed = |value: i64| (value as u64, value < 0);
        Ok(match self.marker(field)? {
            Marker::FixPos(value) => (u64::from(value), false),
            Marker::FixNeg(value) => signed(i64::from(value)),
            Marker::U8 => (self.big_endian(1, field)?, false),
            Marker::U16 => (self.big_endian(2, field)?, false),
            Marker::U32 => (self.big_endian(4, field)?, false),
            Marker::U64 => (self.big_endian(8, field)?, false),
            Marker::I8 => signed(i64::from(self.big_endian(1, field)? as u8 as i8)),
            Marker::I16 => signed(i64::from(self.big_endian(2, field)? as u16 as i16)),
            Marker::I32 => signed(i64::from(self.big_endian(4, field)? as u32 as i32)),
            Marker::I64 => signed(self.big_endian(8, field)? as i64),
            _ => return Err(at.wrong_type(field, "a whole number")),
        })
    }

    fn unsigned<T: TryFrom<u64>>(&mut self, field: &'static str) -> Result<T> {
        let at = self.clone();
        let (value, negative) = self.integer(field)?;
        match T::try_from(value) {
            Ok(value) if !negative => Ok(value),
            _ => Err(at.error(field, DecodeProblem::OutOfRange)),
        }
    }

    pub(super) fn u16(&mut self, field: &'static str) -> Result<u16> {
        self.unsigned(field)
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32> {
        self.unsigned(field)
    }

    /// This many whole numbers of 32 bits: a prompt's tokens, which are most of a payload.
    pub(super) fn u32s(&mut self, count: usize, field: &'static str) -> Result<Vec<u32>> {
        let mut numbers = Vec::with_capacity(count.min(self.remaining()));
        while numbers.len() < count {
            // The encodings that encoders usually choose; others are read like any number.
            let mut rest = self.bytes.get(self.offset..).unwrap_or_default();
            numbers.extend((numbers.len()..count).map_while(|_| {
                let (number, behind) = match *rest {
                    [0xce, a, b, c, d, ref behind @ ..] => {
                        (u32::from_be_bytes([a, b, c, d]), behind)
                    }
                    [0xcd, a, b, ref behind @ ..] => {
                        (u32::from(u16::from_be_bytes([a, b])), behind)
                    }
                    [value @ 0..=0x7f, ref behind @ ..] => (u32::from(value), behind),
                    _ => return None,
                };
                rest = behind;
                Some(number)
            }));
            self.offset = self.bytes.len() - rest.len();
            if numbers.len() < count {
                numbers.push(self.u32(field)?);
            }
        }
        Ok(numbers)
    }

    /// A block hash: the bits of an integer, or the last eight bytes of a digest.
    pub(super) fn hash(&mut self, field: &'static str) -> Result<u64> {
        let at = self.clone();
        let width = match self.peek() {
            Some(Marker::Bin8) => 1,
            Some(Marker::Bin16) => 2,
            Some(Marker::Bin32) => 4,
            _ => return Ok(self.integer(field)?.0),
        };
        self.offset += 1;
        let length = self.length(width, field)?;
        let digest = self.take(length, field)?;
        let tail = digest
            .last_chunk()
            .ok_or_else(|| at.error(field, DecodeProblem::HashLength { bytes: length }))?;
        Ok(u64::from_be_bytes(*tail))
    }

    /// A point in time in seconds; finite.
    pub(super) fn seconds(&mut self, field: &'static str) -> Result<f64> {
        let at = self.clone();
        let seconds = match self.peek() {
            Some(Marker::F64) => {
                self.offset += 1;
                f64::from_bits(self.big_endian(8, field)?)
            }
            Some(Marker::F32) => {
                self.offset += 1;
                f64::from(f32::from_bits(self.big_endian(4, field)? as u32))
            }
            _ => self.u32(field).map(f64::from)?,
        };
        if seconds.is_finite() {
            Ok(seconds)
        } else {
            Err(at.error(field, DecodeProblem::OutOfRange))
        }
    }

    /// The key of a map's entry; empty if it is not a text that this decoder could know.
    pub(super) fn key(&mut self, field: &'static str) -> Result<&'a str> {
        let mut ahead = self.clone();
        let key = ahead.str(field);
        match key.is_ok() {
            true => *self = ahead,
            false => self.skip(field)?,
        }
        Ok(key.unwrap_or_default())
    }

    /// Skips an event, whose fields may be as deep as values that are skipped.
    pub(super) fn skip_event(&mut self) -> Result<()> {
        self.skip_within(self.max_depth + 1, "event")
    }

    /// Skips one value of any type.
    pub(super) fn skip(&mut self, field: &'static str) -> Result<()> {
        self.skip_within(self.max_depth, field)
    }

    fn skip_within(&mut self, depth: u8, field: &'static str) -> Result<()> {
        let (values, width) = match self.peek() {
            None => return Err(self.error(field, DecodeProblem::UnexpectedEnd)),
            Some(Marker::FixArray(_) | Marker::Array16 | Marker::Array32) => {
                (self.array_len(field)?, 0)
            }
            Some(Marker::FixMap(_) | Marker::Map16 | Marker::Map32) => {
                (self.map_len(field)? * 2, 0)
            }
            Some(scalar) => {
                self.offset += 1;
                (0, self.scalar_width(scalar, field)?)
            }
        };
        self.take(width, field)?;
        if values == 0 {
            return Ok(());
        }
        let depth =
            depth.checked_sub(1).ok_or_else(|| self.error(field, DecodeProblem::TooDeep))?;
        (0..values).try_for_each(|_| self.skip_within(depth, field))
    }

    /// Number of bytes after a scalar's marker and, if there is one, its length.
    fn scalar_width(&mut self, marker: Marker, field: &'static str) -> Result<usize> {
        Ok(match marker {
            Marker::U8 | Marker::I8 => 1,
            Marker::U16 | Marker::I16 | Marker::FixExt1 => 2,
            Marker::FixExt2 => 3,
            Marker::U32 | Marker::I32 | Marker::F32 => 4,
            Marker::FixExt4 => 5,
            Marker::U64 | Marker::I64 | Marker::F64 => 8,
            Marker::FixExt8 => 9,
            Marker::FixExt16 => 17,
            Marker::FixStr(length) => usize::from(length),
            Marker::Str8 | Marker::Bin8 => self.length(1, field)?,
            Marker::Str16 | Marker::Bin16 => self.length(2, field)?,
            Marker::Str32 | Marker::Bin32 => self.length(4, field)?,
            Marker::Ext8 => self.length(1, field)?.saturating_add(1),
            Marker::Ext16 => self.length(2, field)?.saturating_add(1),
            Marker::Ext32 => self.length(4, field)?.saturating_add(1),
            Marker::Reserved => return Err(self.wrong_type(field, "a msgpack value")),
            _ => 0,
        })
    }
}
