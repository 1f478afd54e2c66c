//! Computes the memory of a decoded message, and of the body that is made from it, before either
//! exists.

use prost::encoding::decode_varint;
use splitrail_proto::v1;

/// Field numbers of `GenerateRequest` whose messages may have repeated fields.
const CHAT: u64 = 3;
const TOKEN_IDS: u64 = 4;
const SAMPLING: u64 = 5;

/// The field number in `ExplainRequest` of the `GenerateRequest`.
const EXPLAINED: u64 = 1;

/// Bytes in the body of a message of a chat without its texts: quotes, brackets and names.
const MESSAGE_BYTES: usize = 56;

/// A growing list or text may have twice the needed capacity.
const CAPACITY: usize = 2;

/// Bytes for each repeated field: the largest is a chat message.
const FIELD_BYTES: usize = CAPACITY * (size_of::<v1::ChatMessage>() + MESSAGE_BYTES);

/// Bytes for each encoded byte of token ids: an id of one byte is four bytes decoded, and at most
/// four in the body, as in `127,`.
const ID_BYTES: usize = CAPACITY * (size_of::<u32>() + 4);

/// Bytes that a character may take in the body beyond its own byte, as in `\u0001`.
const ESCAPE_BYTES: usize = CAPACITY * 5;

/// The bytes that a decoded `GenerateRequest` and its body may take. Unreadable parts are not
/// counted, because they are not decoded either.
pub(super) fn decoded_bytes(message: &[u8]) -> usize {
    let mut bytes = 0;
    each_field(message, |number, content| {
        bytes += match number {
            TOKEN_IDS => content.len() * ID_BYTES,
            CHAT | SAMPLING => {
                let mut fields = 0;
                each_field(content, |_, _| fields += 1);
                text_bytes(content) + fields * FIELD_BYTES
            }
            _ => text_bytes(content),
        };
    });
    bytes
}

/// The bytes that a decoded `ExplainRequest` and the body of its request may take.
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

/// The bytes of a text, with those that escapes add to it in the body.
fn text_bytes(text: &[u8]) -> usize {
    let is_escaped = |byte: &&u8| matches!(byte, ..0x20 | b'"' | b'\\');
    text.len() + text.iter().filter(is_escaped).count() * ESCAPE_BYTES
}

/// Calls a function with the number of each field, and its bytes if it has a length. The fields in a
/// group are fields like others: a decoder skips the groups, which no message here has, and goes
/// on behind them.
fn each_field(mut rest: &[u8], mut take: impl FnMut(u64, &[u8])) {
    while let Ok(tag) = decode_varint(&mut rest) {
        let length = match tag & 7 {
            0 => decode_varint(&mut rest).ok().map(|_| 0),
            1 => Some(8),
            2 => decode_varint(&mut rest).ok().and_then(|length| usize::try_from(length).ok()),
            // A group begins, and ends.
            3 | 4 => Some(0),
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;
    use prost::encoding::encode_varint;
    use splitrail_config::model::Limits;
    use splitrail_flow::prepare::Payload;
    use splitrail_proto::v1::generate_request::Prompt;

    use super::super::body::payload;
    use super::super::decode::DecodedMessage;
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

    /// A field of a message: a number, text, bytes, a message of fields, or a group of them.
    #[derive(Clone, Debug)]
    enum Field {
        Number(u64),
        Bytes(Vec<u8>),
        Message(Vec<(u64, Field)>),
        Group(Vec<(u64, Field)>),
    }

    fn put(out: &mut Vec<u8>, number: u64, field: &Field) {
        let all = |fields: &[(u64, Field)]| {
            let mut out = Vec::new();
            fields.iter().for_each(|(number, field)| put(&mut out, *number, field));
            out
        };
        let content = match field {
            Field::Number(value) => {
                encode_varint(number << 3, out);
                return encode_varint(*value, out);
            }
            Field::Group(fields) => {
                encode_varint(number << 3 | 3, out);
                out.extend(all(fields));
                return encode_varint(number << 3 | 4, out);
            }
            Field::Bytes(bytes) => bytes.clone(),
            Field::Message(fields) => all(fields),
        };
        encode_varint(number << 3 | 2, out);
        encode_varint(content.len() as u64, out);
        out.extend(content);
    }

    fn fields() -> impl Strategy<Value = Vec<(u64, Field)>> {
        let leaf = prop_oneof![
            any::<u64>().prop_map(Field::Number),
            "[a-z\"\\\\\\x00-\\x1f]{0,40}".prop_map(|text| Field::Bytes(text.into())),
            prop::collection::vec(any::<u8>(), 0..20).prop_map(Field::Bytes),
        ];
        let field = leaf.prop_recursive(3, 60, 8, |inner| {
            let fields = prop::collection::vec((1..16_u64, inner), 0..8);
            prop_oneof![fields.clone().prop_map(Field::Message), fields.prop_map(Field::Group)]
        });
        prop::collection::vec((1..16_u64, field), 0..8)
    }

    /// The bytes that a message has on the heap.
    fn heap(request: &v1::GenerateRequest) -> usize {
        let text = String::capacity;
        let more = |text: &Option<String>| text.as_ref().map_or(0, String::capacity);
        let prompt = match &request.prompt {
            None => 0,
            Some(Prompt::Text(prompt)) => text(prompt),
            Some(Prompt::TokenIds(ids)) => ids.ids.capacity() * size_of::<u32>(),
            Some(Prompt::Chat(chat)) => {
                let texts = chat.messages.iter().map(|one| {
                    text(&one.role) + text(&one.content) + more(&one.name) + more(&one.tool_call_id)
                });
                chat.messages.capacity() * size_of::<v1::ChatMessage>() + texts.sum::<usize>()
            }
        };
        let stop = request.sampling.as_ref().map_or(0, |sampling| {
            sampling.stop.capacity() * size_of::<String>()
                + sampling.stop.iter().map(text).sum::<usize>()
        });
        prompt + stop + text(&request.model) + text(&request.extra_body_json)
    }

    proptest! {
        /// Small lists and texts have capacity in reserve.
        #[test]
        fn what_is_decoded_was_counted(fields in fields()) {
            const RESERVE: usize = 2048;
            let mut encoded = Vec::new();
            fields.iter().for_each(|(number, field)| put(&mut encoded, *number, field));
            let Ok(request) = v1::GenerateRequest::decode(&*encoded) else { return Ok(()) };
            let counted = decoded_bytes(&encoded);
            prop_assert!(heap(&request) <= counted + RESERVE, "{counted}: {request:?}");
            if let Payload::Builder { build, .. } = payload(DecodedMessage::new(request.clone(), false), &encoded)
                && let Ok(made) = build(&Limits::default())
            {
                let body = made.body.to_string().len();
                prop_assert!(body <= counted + RESERVE, "{counted}: {request:?}");
            }
        }
    }

    #[test]
    fn fields_behind_a_group_are_counted() {
        let messages = vec![v1::ChatMessage::default(); 1000];
        let chat = v1::GenerateRequest {
            prompt: Some(Prompt::Chat(v1::Chat { messages })),
            ..Default::default()
        };
        let (group, chat) = ([15 << 3 | 3, 15 << 3 | 4], chat.encode_to_vec());
        let behind = [&group[..], &chat].concat();
        assert!(v1::GenerateRequest::decode(&*behind).is_ok());
        assert_eq!(decoded_bytes(&behind), decoded_bytes(&chat));
    }

    #[test]
    fn malformed_messages_are_counted_as_small() {
        for bytes in [&[][..], &[0xff; 40], &[0x1a, 0xff], &[0x1a, 5, 1], &[7], &[0x09, 1]] {
            assert!(decoded_bytes(bytes) < 1000);
        }
    }
}
