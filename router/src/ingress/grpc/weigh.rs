//! Computes the memory of a decoded message before it is decoded.

use splitrail_proto::v1;

/// Field numbers of `GenerateRequest` whose messages may have repeated fields.
const CHAT: u64 = 3;
const TOKEN_IDS: u64 = 4;
const SAMPLING: u64 = 5;

/// The field number in `ExplainRequest` of the `GenerateRequest`.
const EXPLAINED: u64 = 1;

/// Bytes for each repeated field: the largest is a chat message, and a growing list may have twice
/// the needed capacity.
const FIELD_BYTES: usize = 2 * size_of::<v1::ChatMessage>();

/// A token id takes at least one byte encoded and four bytes decoded; the list may have twice the
/// needed capacity.
const ID_BYTES: usize = 2 * size_of::<u32>();

/// The bytes that a decoded `GenerateRequest` may take. Unreadable parts are not counted, because
/// they are not decoded either.
pub(super) fn decoded_bytes(message: &[u8]) -> usize {
    let mut bytes = 0;
    each_field(message, |number, content| {
        bytes += match number {
            TOKEN_IDS => content.len() * ID_BYTES,
            CHAT | SAMPLING => {
                let mut fields = 0;
                each_field(content, |_, _| fields += 1);
                content.len() + fields * FIELD_BYTES
            }
            _ => content.len(),
        };
    });
    bytes
}

/// The bytes that a decoded `ExplainRequest` may take.
pub(super) fn explained_bytes(message: &[u8]) -> usize {
    let mut bytes = 0;
    each_field(message, |number, content| {
        bytes += match number {
            EXPLAINED => decoded_bytes(content),
            _ => content.len(),
        };
    });
    bytes
}

/// Calls a function with the number of each field, and its bytes if it has a length.
fn each_field(mut rest: &[u8], mut take: impl FnMut(u64, &[u8])) {
    while let Some(tag) = varint(&mut rest) {
        let length = match tag & 7 {
            0 => varint(&mut rest).map(|_| 0),
            1 => Some(8),
            2 => varint(&mut rest).and_then(|length| usize::try_from(length).ok()),
            5 => Some(4),
            _ => None,
        };
        let Some((content, behind)) = length.and_then(|length| rest.split_at_checked(length))
        else {
            return;
        };
        take(tag >> 3, content);
        rest = behind;
    }
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, behind) = rest.split_first()?;
        *rest = behind;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use splitrail_proto::v1::generate_request::Prompt;

    use super::*;

    fn of(prompt: Prompt) -> (usize, usize) {
        let sampling = v1::SamplingParams { stop: vec![String::new(); 10], ..Default::default() };
        let request = v1::GenerateRequest {
            model: "m".into(),
            prompt: Some(prompt),
            sampling: Some(sampling),
            cache_hit_threshold: Some(0.5),
            extra_body_json: "{}".into(),
            ..Default::default()
        };
        let encoded = request.encode_to_vec();
        (encoded.len(), decoded_bytes(&encoded))
    }

    #[test]
    fn small_fields_are_counted_at_their_decoded_size() {
        let messages = vec![v1::ChatMessage::default(); 1000];
        let (encoded, decoded) = of(Prompt::Chat(v1::Chat { messages }));
        assert!(encoded < 2100 && decoded >= 1010 * FIELD_BYTES, "{encoded} become {decoded}");
        let (encoded, decoded) = of(Prompt::TokenIds(v1::TokenIds { ids: vec![1; 1000] }));
        assert!(encoded < 1100 && decoded >= 1000 * size_of::<u32>(), "{encoded} become {decoded}");
        let (encoded, decoded) = of(Prompt::Text("x".repeat(100_000)));
        assert!(decoded >= 100_000 && decoded < encoded + 20 * FIELD_BYTES);
    }

    #[test]
    fn malformed_messages_are_counted_as_small() {
        for bytes in [&[][..], &[0xff; 40], &[0x1a, 0xff], &[0x1a, 5, 1], &[3], &[0x09, 1]] {
            assert!(decoded_bytes(bytes) < 1000);
        }
    }
}
