//! What the router reads and changes in the replies and events of each dialect.
//!
//! Of an event with a name, the lines are kept as received. Of a chunk, only the data is kept.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::json;
use splitrail_engine::usage::EngineUsage;

use super::choices::{Failure, ReadChoices, each};
use splitrail_api::JsonObject;
use splitrail_engine::sse;

/// What the router reads in an event.
#[derive(Default)]
pub struct Chunk<'a> {
    /// Why the engine gives the reply up with this event, if it does.
    pub failure: Option<Failure>,
    /// Whether the event has no part of the reply: engines send such events before they run a
    /// request.
    pub only_opens: bool,
    /// The number of generated tokens; 1 for an event with output that does not name them.
    pub tokens: u32,
    /// Whether the event names the ids of all of its tokens.
    pub has_ids: bool,
    /// The indices of the choices that end with this event.
    pub ended: Vec<u64>,
    /// Whether no event follows, apart from `[DONE]`.
    pub is_last: bool,
    /// Whether the event only keeps the connection open.
    pub is_ping: bool,
    /// Whether a message ends with this event for no reason. If nothing came before, the engine has
    /// aborted it.
    pub lacks_reason: bool,
    /// The usage, which is rewritten for the client.
    pub usage: Option<Usage<'a>>,
    /// The usage in an event with a part of the reply: a running total, which is that of the whole
    /// reply if no other usage follows.
    pub running_total: Option<&'a str>,
    /// Whether the event says where KV blocks are, which clients must not see.
    pub has_hand_off: bool,
}

/// Usage in an event.
pub struct Usage<'a> {
    /// The usage object as raw JSON.
    pub raw: &'a str,
    /// Whether this is the usage of the whole reply. The first event of a message has usage before
    /// anything is generated.
    pub is_final: bool,
}

/// The members of an event that are read; `null` counts as absent.
#[derive(Default)]
struct EventMembers<'a> {
    /// The `type` in the data, which repeats the name of a named event.
    name: Cow<'a, str>,
    error: Option<&'a str>,
    usage: Option<&'a str>,
    choices: Option<&'a str>,
    message: Option<&'a str>,
    delta: Option<&'a str>,
    response: Option<&'a str>,
    hand_off: Option<&'a str>,
}

/// The `object` of an error whose members are not in an object of their own.
const FLAT_ERROR: &str = "\"error\"";

/// The `status` of a response that the engine has aborted.
const CANCELLED: &str = "\"cancelled\"";

/// The member that says where KV blocks are.
const HAND_OFF: &str = "kv_transfer_params";

impl<'a> EventMembers<'a> {
    fn read(dialect: Dialect, data: &'a [u8]) -> Option<Self> {
        if dialect.names_events() {
            let names = ["type", "error", "usage", "message", "delta", "response", HAND_OFF];
            let [name, error, usage, message, delta, response, hand_off] =
                json::pick_from_slice(data, names).ok()?;
            let name = name.map_or(Some(Cow::default()), json::string)?;
            Some(Self { name, error, usage, message, delta, response, hand_off, choices: None })
        } else {
            let names = ["error", "usage", "choices", "object", HAND_OFF];
            let [error, usage, choices, object, hand_off] =
                json::pick_from_slice(data, names).ok()?;
            let error = error.or_else(|| object.filter(|object| *object == FLAT_ERROR));
            Some(Self { error, usage, choices, hand_off, ..Self::default() })
        }
    }

    fn failure(&self) -> Option<Failure> {
        self.error.map(|_| Failure::Error)
    }

    fn has_choices(&self) -> bool {
        self.choices.is_some_and(|raw| !raw.trim_matches(['[', ']', ' ']).is_empty())
    }
}

/// The members of an object in an event; none if it is no object.
fn held<'a, const N: usize>(holder: Option<&'a str>, names: [&str; N]) -> [Option<&'a str>; N] {
    let picked = holder.and_then(|holder| json::pick(holder, names).ok());
    picked.unwrap_or([None; N])
}

impl<'a> Chunk<'a> {
    /// Reads an event's data; `None` if it is no JSON object.
    pub fn read(dialect: Dialect, data: &'a [u8]) -> Option<Self> {
        let event = EventMembers::read(dialect, data)?;
        Some(match dialect {
            Dialect::Chunks => {
                // Running totals have no details in present engines, so usage in an event without
                // choices has more reliable figures.
                let (usage, running_total) = match event.has_choices() {
                    true => (None, event.usage),
                    false => (event.usage, None),
                };
                let usage = usage.map(|raw| Usage { raw, is_final: true });
                let has_hand_off = event.hand_off.is_some();
                let read = event.choices.map(ReadChoices::read).unwrap_or_default();
                let ReadChoices { tokens, lacks_ids, ended, failure } = read;
                let failure = event.failure().or(failure);
                let chunk = Self { failure, usage, running_total, ended, ..Self::default() };
                Self { tokens, has_ids: !lacks_ids, has_hand_off, ..chunk }
            }
            Dialect::Responses => Self::of_response(&event),
            Dialect::Messages => Self::of_message(&event),
        })
    }

    fn of_response(event: &EventMembers<'a>) -> Self {
        let name = &*event.name;
        let is_last = matches!(name, "response.completed" | "response.incomplete");
        let fails = matches!(name, "error" | "response.failed");
        let [usage, status, hand_off] = held(event.response, ["usage", "status", HAND_OFF]);
        let aborts = is_last && status == Some(CANCELLED);
        let failure = event.failure().or(fails.then_some(Failure::Error));
        let usage = usage.filter(|_| is_last);
        Self {
            failure: failure.or(aborts.then_some(Failure::Abort)),
            only_opens: matches!(
                name,
                "response.created" | "response.queued" | "response.in_progress"
            ),
            tokens: name.ends_with(".delta").into(),
            is_last,
            usage: usage.map(|raw| Usage { raw, is_final: true }),
            has_hand_off: hand_off.is_some() || event.hand_off.is_some(),
            ..Self::default()
        }
    }

    fn of_message(event: &EventMembers<'a>) -> Self {
        let name = &*event.name;
        let [of_message, hand_off] = held(event.message, ["usage", HAND_OFF]);
        let ends = name == "message_delta";
        let [stop_reason] = held(event.delta.filter(|_| ends), ["stop_reason"]);
        let usage = match name {
            "message_start" => of_message.map(|raw| Usage { raw, is_final: false }),
            "message_delta" => event.usage.map(|raw| Usage { raw, is_final: true }),
            _ => None,
        };
        Self {
            failure: event.failure().or((name == "error").then_some(Failure::Error)),
            only_opens: matches!(name, "message_start" | "ping"),
            tokens: (name == "content_block_delta").into(),
            is_last: name == "message_stop",
            is_ping: name == "ping",
            lacks_reason: ends && stop_reason.is_none(),
            usage,
            has_hand_off: event.hand_off.is_some() || hand_off.is_some(),
            ..Self::default()
        }
    }
}

/// Deserialises an event's data. UTF-8 is checked once for the data as a whole and not for each
/// member.
pub fn read<'a, T: Deserialize<'a>>(data: &'a [u8]) -> Option<T> {
    match std::str::from_utf8(data) {
        Ok(text) => serde_json::from_str(text).ok(),
        // Invalid UTF-8 may be in a part that is not read.
        Err(_) => serde_json::from_slice(data).ok(),
    }
}

/// The data of an event.
pub fn data_of(dialect: Dialect, event: &Bytes) -> Cow<'_, [u8]> {
    match dialect.names_events() {
        false => Cow::Borrowed(event),
        true => sse::data_of(event).unwrap_or_default(),
    }
}

/// Changes the object in an event that holds the usage; `None` if there is no such object. The rest
/// of the event stays unchanged.
pub fn edit(dialect: Dialect, event: &Bytes, edit: impl FnOnce(&mut JsonObject)) -> Option<Bytes> {
    edit_event(dialect, event, |object| match holder_of(dialect, object) {
        None => {
            edit(object);
            Some(())
        }
        Some(holder) => edit_member(object, holder, edit),
    })
}

/// Changes the object of an event, and the object in it that holds the usage, if there is one.
pub fn edit_all(
    dialect: Dialect,
    event: &Bytes,
    mut edit: impl FnMut(&mut JsonObject),
) -> Option<Bytes> {
    edit_event(dialect, event, |object| {
        edit(object);
        let holder = holder_of(dialect, object).filter(|holder| object.raw(holder).is_some());
        holder.map_or(Some(()), |holder| edit_member(object, holder, &mut edit))
    })
}

/// The member of an event that holds the usage; `None` if the event itself does.
fn holder_of(dialect: Dialect, event: &JsonObject) -> Option<&'static str> {
    match dialect {
        Dialect::Chunks => None,
        Dialect::Responses => Some("response"),
        Dialect::Messages => event.raw("message").map(|_| "message"),
    }
}

fn edit_member(
    object: &mut JsonObject,
    name: &'static str,
    edit: impl FnOnce(&mut JsonObject),
) -> Option<()> {
    let mut member = JsonObject::parse_str(object.raw(name)?).ok()?;
    edit(&mut member);
    object.set(name, member.to_string());
    Some(())
}

fn edit_event(
    dialect: Dialect,
    event: &Bytes,
    edit: impl FnOnce(&mut JsonObject) -> Option<()>,
) -> Option<Bytes> {
    let data = match dialect.names_events() {
        false => event.clone(),
        true => Bytes::copy_from_slice(&sse::data_of(event)?),
    };
    let mut object = JsonObject::parse(data).ok()?;
    edit(&mut object)?;
    let data = object.to_bytes();
    Some(if dialect.names_events() { sse::with_data(event, &data) } else { data })
}

/// Why the engine gave up a reply that is whole, although its status is that of a good one.
pub fn failure_of(dialect: Dialect, reply: &JsonObject) -> Option<Failure> {
    let said = |key| reply.raw(key).filter(|raw| *raw != "null");
    if said("error").is_some() || said("object") == Some(FLAT_ERROR) {
        return Some(Failure::Error);
    }
    match dialect {
        Dialect::Chunks => ReadChoices::read(said("choices")?).failure,
        Dialect::Responses => (said("status") == Some(CANCELLED)).then_some(Failure::Abort),
        // A message has no word for it: its reason is left out.
        Dialect::Messages => {
            let is_empty = said("content").is_some_and(|raw| raw == "[]");
            (is_empty && said("stop_reason").is_none()).then_some(Failure::Abort)
        }
    }
}

/// Whether the reply of a prefill leg ended with its first token by itself. An engine returns a
/// hand-off only for a reply that was cut off by its length limit.
pub fn ended(dialect: Dialect, reply: &JsonObject) -> bool {
    #[derive(Deserialize)]
    struct EndedChoice {
        finish_reason: Option<String>,
    }
    let text = |key| reply.raw(key).and_then(|raw| serde_json::from_str::<String>(raw).ok());
    let (reason, cut_off) = match dialect {
        Dialect::Chunks => {
            let mut first = None;
            let keep = |choice: EndedChoice| {
                first.get_or_insert(choice);
            };
            let read = reply.raw("choices").and_then(|raw| each(raw, keep));
            let first = first.filter(|_| read.is_some());
            (first.and_then(|choice| choice.finish_reason), "length")
        }
        Dialect::Responses => (text("status"), "incomplete"),
        Dialect::Messages => (text("stop_reason"), "max_tokens"),
    };
    reason.is_some_and(|reason| reason != cut_off)
}

/// The usage in a reply or an event, if it is valid.
pub fn usage_of(dialect: Dialect, reply: &Bytes) -> Option<EngineUsage> {
    let reply = JsonObject::parse(reply.clone()).ok()?;
    EngineUsage::parse(dialect, reply.raw("usage")?).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(dialect: Dialect, data: &str) -> Chunk<'_> {
        Chunk::read(dialect, data.as_bytes()).unwrap()
    }

    #[test]
    fn the_end_of_a_stream_follows_from_the_event_type_and_never_from_text() {
        for (dialect, event, expected) in [
            (Dialect::Messages, "event: message_stop\ndata: {\"type\":\"message_stop\"}", true),
            (Dialect::Messages, "data: {\"type\":\"message_stop\"}", true),
            (
                Dialect::Messages,
                "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"message_stop\"}}",
                false,
            ),
            (
                Dialect::Responses,
                "event: response.completed\ndata: {\"response\":{},\"type\":\"response.completed\"}",
                true,
            ),
            (
                Dialect::Responses,
                "event: response.output_text.delta\ndata: {\"delta\":\"response.completed\",\"type\":\"response.output_text.delta\"}",
                false,
            ),
            (Dialect::Chunks, "{\"type\":\"message_stop\"}", false),
        ] {
            let event = Bytes::from(event);
            let chunk = Chunk::read(dialect, &data_of(dialect, &event)).map(|chunk| chunk.is_last);
            assert_eq!(chunk, Some(expected), "{event:?}");
        }
    }

    #[test]
    fn a_type_counts_only_where_events_are_named_and_may_be_escaped() {
        assert!(read(Dialect::Chunks, r#"{"error":{},"type":7}"#).failure.is_some());
        assert!(read(Dialect::Chunks, r#"{"type":"error"}"#).failure.is_none());
        assert!(read(Dialect::Messages, r#"{"type":"m\u0065ssage_stop"}"#).is_last);
        assert!(!read(Dialect::Messages, r#"{"type":null}"#).is_last);
        for data in [r#"{"type":7}"#, r#"["message_stop"]"#, r#"{"type":"ping","type":"ping"}"#] {
            assert!(Chunk::read(Dialect::Messages, data.as_bytes()).is_none(), "{data}");
        }
    }

    #[test]
    fn usage_is_that_of_the_whole_reply_where_it_stands_by_itself() {
        for (dialect, data, usage) in [
            (Dialect::Chunks, r#"{"choices":[ ],"usage":{"a":1},"error":null}"#, Some(true)),
            (Dialect::Chunks, r#"{"choices":[{"index":0}],"usage":{"a":1}}"#, None),
            (Dialect::Chunks, r#"{"choices":[],"usage":null}"#, None),
            (Dialect::Messages, r#"{"type":"message_delta","usage":{"a":1}}"#, Some(true)),
            (
                Dialect::Messages,
                r#"{"type":"message_start","message":{"usage":{"a":1}}}"#,
                Some(false),
            ),
            (
                Dialect::Responses,
                r#"{"type":"response.completed","response":{"usage":{"a":1}}}"#,
                Some(true),
            ),
            (Dialect::Responses, r#"{"type":"response.completed","response":null}"#, None),
        ] {
            let found = read(dialect, data).usage;
            assert_eq!(found.as_ref().map(|usage| usage.is_final), usage, "{data}");
            assert!(found.is_none_or(|usage| usage.raw == r#"{"a":1}"#), "{data}");
        }
    }

    #[test]
    fn usage_beside_a_part_of_the_reply_is_a_running_total() {
        for (data, total) in [
            (r#"{"choices":[{"index":0}],"usage":{"a":1}}"#, Some(r#"{"a":1}"#)),
            (r#"{"choices":[{"index":0}],"usage":null}"#, None),
            (r#"{"choices":[],"usage":{"a":1}}"#, None),
        ] {
            assert_eq!(read(Dialect::Chunks, data).running_total, total, "{data}");
        }
    }

    #[test]
    fn only_what_opens_a_reply_proves_nothing() {
        for (dialect, data, only_opens) in [
            (Dialect::Responses, r#"{"type":"response.created","response":{}}"#, true),
            (Dialect::Responses, r#"{"type":"response.in_progress","response":{}}"#, true),
            (Dialect::Responses, r#"{"type":"response.output_item.added"}"#, false),
            (Dialect::Messages, r#"{"type":"message_start","message":{}}"#, true),
            (Dialect::Messages, r#"{"type":"ping"}"#, true),
            (Dialect::Messages, r#"{"type":"content_block_start"}"#, false),
            (Dialect::Chunks, r#"{"choices":[]}"#, false),
        ] {
            assert_eq!(read(dialect, data).only_opens, only_opens, "{data}");
        }
        for (dialect, data) in [
            (Dialect::Responses, r#"{"type":"error","message":"x"}"#),
            (Dialect::Responses, r#"{"type":"response.failed","response":{}}"#),
            (Dialect::Messages, r#"{"type":"error","error":{"message":"x"}}"#),
            (Dialect::Chunks, r#"{"error":{"message":"x"}}"#),
            (Dialect::Chunks, r#"{"object":"error","message":"x"}"#),
            (Dialect::Chunks, r#"{"choices":[{"finish_reason":"error"}]}"#),
        ] {
            assert_eq!(read(dialect, data).failure, Some(Failure::Error), "{data}");
        }
    }

    #[test]
    fn the_end_of_a_stream_can_say_that_the_engine_gave_it_up() {
        let completed = r#"{"type":"response.completed","response":{"status":"cancelled"}}"#;
        assert_eq!(read(Dialect::Responses, completed).failure, Some(Failure::Abort));
        for (data, lacks_reason) in [
            (r#"{"type":"message_delta","delta":{"stop_reason":null},"usage":{}}"#, true),
            (r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"}}"#, false),
            (r#"{"type":"content_block_delta","delta":{"text":"a"}}"#, false),
        ] {
            assert_eq!(read(Dialect::Messages, data).lacks_reason, lacks_reason, "{data}");
        }
    }

    #[test]
    fn a_whole_reply_can_say_that_the_engine_gave_it_up() {
        for (reply, failure) in [
            (r#"{"choices":[{"finish_reason":"abort"}]}"#, Some(Failure::Abort)),
            (r#"{"choices":[{"finish_reason":"error"}]}"#, Some(Failure::Error)),
            (r#"{"object":"error","message":"x"}"#, Some(Failure::Error)),
            (r#"{"error":{"message":"x"}}"#, Some(Failure::Error)),
            (
                r#"{"object":"chat.completion","error":null,"choices":[{"finish_reason":"stop"}]}"#,
                None,
            ),
        ] {
            let object = JsonObject::parse_str(reply).unwrap();
            assert_eq!(failure_of(Dialect::Chunks, &object), failure, "{reply}");
        }
        for (dialect, reply, aborted) in [
            (Dialect::Responses, r#"{"status":"cancelled","output":[]}"#, true),
            (Dialect::Responses, r#"{"status":"incomplete","error":null}"#, false),
            (Dialect::Messages, r#"{"content":[],"usage":{}}"#, true),
            (Dialect::Messages, r#"{"content":[],"stop_reason":"end_turn"}"#, false),
            (Dialect::Messages, r#"{"content":[{"type":"text","text":"a"}]}"#, false),
        ] {
            let object = JsonObject::parse_str(reply).unwrap();
            assert_eq!(failure_of(dialect, &object).is_some(), aborted, "{reply}");
        }
    }

    #[test]
    fn an_edit_of_the_usage_leaves_the_rest_of_the_event_as_it_came() {
        let set = |object: &mut JsonObject| object.set("usage", "1");
        for (dialect, event, expected) in [
            (Dialect::Chunks, r#"{"a": [1 ,2],"usage":{}}"#, r#"{"a":[1 ,2],"usage":1}"#),
            (
                Dialect::Responses,
                "id: 7\nevent: response.completed\ndata: {\"response\":{\"x\":[1 ,2],\"usage\":{}},\"type\":\"response.completed\"}",
                "id: 7\nevent: response.completed\ndata: {\"response\":{\"x\":[1 ,2],\"usage\":1},\"type\":\"response.completed\"}",
            ),
            (
                Dialect::Messages,
                "event: message_start\r\ndata: {\"message\":{\"usage\":{}}}",
                "event: message_start\r\ndata: {\"message\":{\"usage\":1}}",
            ),
            (
                Dialect::Messages,
                "event: message_delta\ndata: {\"delta\":{},\ndata: \"usage\":{}}",
                "event: message_delta\ndata: {\"delta\":{},\"usage\":1}",
            ),
        ] {
            let edited = edit(dialect, &Bytes::from(event), set).unwrap();
            assert_eq!(String::from_utf8_lossy(&edited), expected);
        }
    }

    #[test]
    fn a_prefill_leg_that_its_length_cut_off_has_not_ended() {
        for (dialect, reply, expected) in [
            (Dialect::Chunks, r#"{"choices":[{"finish_reason":"length"}]}"#, false),
            (Dialect::Chunks, r#"{"choices":[{"finish_reason":"stop"}]}"#, true),
            (Dialect::Responses, r#"{"status":"incomplete"}"#, false),
            (Dialect::Responses, r#"{"status":"completed"}"#, true),
            (Dialect::Messages, r#"{"stop_reason":"max_tokens"}"#, false),
            (Dialect::Messages, r#"{"stop_reason":"end_turn"}"#, true),
            (Dialect::Messages, r#"{"stop_reason":null}"#, false),
        ] {
            let object = JsonObject::parse_str(reply).unwrap();
            assert_eq!(ended(dialect, &object), expected, "{reply}");
        }
    }
}
