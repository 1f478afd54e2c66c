//! The part of MessagePack that event batches use.

use rmp::Marker;
use rmp::decode::*;
use serde_json::{Value, json};

/// Reads one value; binary data becomes lower-case hex.
pub(crate) fn read(input: &mut &[u8]) -> Value {
    let whole = *input;
    match read_marker(input).unwrap() {
        Marker::Null => Value::Null,
        Marker::F64 => {
            *input = whole;
            json!(read_f64(input).unwrap())
        }
        Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => {
            *input = whole;
            let len = read_array_len(input).unwrap();
            Value::Array((0..len).map(|_| read(input)).collect())
        }
        Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => {
            *input = whole;
            let len = read_map_len(input).unwrap();
            let pairs = (0..len).map(|_| (read(input).as_str().unwrap().to_owned(), read(input)));
            Value::Object(pairs.collect())
        }
        Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => {
            *input = whole;
            let len = read_str_len(input).unwrap() as usize;
            json!(std::str::from_utf8(take(input, len)).unwrap())
        }
        Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => {
            *input = whole;
            let len = read_bin_len(input).unwrap() as usize;
            json!(take(input, len).iter().map(|byte| format!("{byte:02x}")).collect::<String>())
        }
        _ => {
            *input = whole;
            json!(read_int::<u64, _>(input).unwrap())
        }
    }
}

fn take<'a>(input: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (taken, rest) = input.split_at(len);
    *input = rest;
    taken
}
