//! Merges the replies of a batch's prompts into one reply: OpenAI's choice indices and summed usage.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::{self, StreamExt};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::choices::each;
use splitrail_api::JsonObject;
use splitrail_api::error::{Error, ErrorKind};

/// A stream of events for a client; an error is its last item. Items that begin with `:` are comments
/// between events, which only keep the connection open.
pub type Events = Pin<Box<dyn Stream<Item = Result<Bytes, Error>> + Send>>;

/// The positions of the replies' choices in the merged reply.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// The number of choices of each reply.
    pub n: u32,
    /// The number of consecutive replies to one prompt. The tokens of the prompt are counted once.
    pub samples_apart: u32,
}

impl Places {
    /// Whether the prompt of this reply was counted with an earlier reply.
    fn is_counted(self, index: usize) -> bool {
        !(index as u64).is_multiple_of(u64::from(self.samples_apart.max(1)))
    }
}

/// Events that the router made.
pub fn made(events: Vec<Bytes>) -> Events {
    Box::pin(stream::iter(events.into_iter().map(Ok)))
}

/// What the streams of a batch's prompts share: they are merged under one id, with
/// `choices[].index` moved to the position of each prompt, and one usage chunk at the end.
pub struct Batch {
    /// What all chunks carry.
    first: OnceLock<FirstIds>,
    /// The last usage chunk of each prompt, of at most [`USAGE_MAX_BYTES`].
    usage: Mutex<Vec<Option<JsonObject>>>,
    places: Places,
}

impl Batch {
    /// A batch of as many streams.
    pub fn new(streams: usize, places: Places) -> Arc<Self> {
        Arc::new(Self { first: OnceLock::new(), usage: Mutex::new(vec![None; streams]), places })
    }

    /// The place of a prompt's stream.
    pub fn place(self: &Arc<Self>, prompt_index: usize) -> Place {
        Place { batch: Arc::clone(self), prompt_index }
    }

    /// A poisoned lock is still used: each value is replaced as a whole.
    fn usage(&self) -> MutexGuard<'_, Vec<Option<JsonObject>>> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The usage chunk of the merged stream, if every prompt had one.
    fn last(&self) -> Option<Bytes> {
        let chunks = std::mem::take(&mut *self.usage());
        let mut chunks = chunks.into_iter().collect::<Option<Vec<_>>>()?;
        let usage = sum(chunks.iter().filter_map(|event| event.raw("usage")), self.places)?;
        let mut event = chunks.pop()?;
        event.set("usage", usage);
        Some(event.to_bytes())
    }
}

/// The place of one prompt's stream in that of its batch.
pub struct Place {
    batch: Arc<Batch>,
    prompt_index: usize,
}

impl Place {
    /// The event of a prompt as an event of the merged stream, or nothing if it is a usage chunk,
    /// which is kept.
    ///
    /// # Errors
    /// What is wrong with the event of the engine.
    pub fn merge(&self, data: Bytes) -> Result<Option<Bytes>, &'static str> {
        let bytes = data.len();
        let mut event = JsonObject::parse(data).map_err(|_| "sent an event that is not a chunk")?;
        self.batch.first.get_or_init(|| FirstIds::of(&event)).put_into(&mut event);
        let has_usage = !matches!(event.raw("usage"), None | Some("null"));
        if has_usage && event.raw("choices").is_none_or(|raw| raw.trim() == "[]") {
            if bytes > USAGE_MAX_BYTES {
                return Err("sent usage that is too long");
            }
            if let Some(kept) = self.batch.usage().get_mut(self.prompt_index) {
                *kept = Some(event);
            }
            return Ok(None);
        }
        move_choices(&mut event, self.prompt_index, self.batch.places.n).ok_or(TOO_MANY)?;
        Ok(Some(event.to_bytes()))
    }

    /// Events that the router made for the prompt.
    pub fn made(self, events: Vec<Bytes>) -> Events {
        let defect =
            |what: &'static str| Error::new(ErrorKind::Internal, format!("the router {what}"));
        let merged = events.into_iter().filter_map(|event| self.merge(event).transpose());
        let merged: Vec<_> = merged.map(|event| event.map_err(defect)).collect();
        Box::pin(stream::iter(merged))
    }
}

/// Merges the streams of all prompts of a batch, in the order in which their events arrive. The
/// events have been merged by the [`Place`] of each stream.
pub fn streams(batch: Arc<Batch>, streams: Vec<Events>) -> Events {
    let state = (stream::select_all(streams), batch);
    Box::pin(stream::unfold(Some(state), |state| async move {
        let (mut events, batch) = state?;
        match events.next().await {
            Some(Ok(data)) => Some((Ok(data), Some((events, batch)))),
            Some(Err(error)) => Some((Err(error), None)),
            None => batch.last().map(|data| (Ok(data), None)),
        }
    }))
}

/// What is wrong with a reply or an event that has more choices than `n`.
const TOO_MANY: &str = "sent more choices than were asked for";

/// Maximum size in bytes of a usage object that is added up, and of a usage chunk that is kept.
const USAGE_MAX_BYTES: usize = 64 << 10;

/// The members of the first event that all events of a merged stream share, as raw JSON.
struct FirstIds([(&'static str, Option<String>); 2]);

impl FirstIds {
    /// Maximum size in bytes of a member; a longer one is not shared.
    const MAX_BYTES: usize = 4 << 10;

    fn of(event: &JsonObject) -> Self {
        Self(["id", "created"].map(|key| {
            let raw = event.raw(key).filter(|raw| raw.len() <= Self::MAX_BYTES);
            (key, raw.map(str::to_owned))
        }))
    }

    fn put_into(&self, event: &mut JsonObject) {
        for (key, value) in &self.0 {
            if let (Some(value), true) = (value, event.raw(key).is_some()) {
                event.set(key, value.as_str());
            }
        }
    }
}

/// The index of a choice, which tells the choices of one prompt apart.
#[derive(Deserialize)]
struct ChoiceIndex {
    #[serde(default)]
    index: Value,
}

/// Checks that the reply to one prompt of a batch can be merged: it has at most `n` choices, with
/// indices below `n`.
///
/// # Errors
/// What is wrong with the reply of the engine.
pub fn check(reply: &JsonObject, n: u32) -> Result<(), &'static str> {
    let (mut count, mut last) = (0, 0);
    let take = |choice: ChoiceIndex| {
        count += 1;
        last = last.max(choice.index.as_u64().unwrap_or(0));
    };
    let is_list = reply.raw("choices").and_then(|raw| each(raw, take));
    is_list.ok_or("sent a reply without choices")?;
    if count > n || last >= u64::from(n) { Err(TOO_MANY) } else { Ok(()) }
}

/// Merges the whole replies of several prompts, in the order of the prompts.
///
/// # Errors
/// If an engine's reply has no choices, or more than were asked for.
pub fn replies(replies: Vec<JsonObject>, places: Places) -> Result<JsonObject, Error> {
    let nonsense = || Error::new(ErrorKind::EngineFailed, "an engine's reply has no choices");
    let mut choices = Vec::new();
    for (prompt_index, reply) in replies.iter().enumerate() {
        let mut reply = reply.clone();
        move_choices(&mut reply, prompt_index, places.n).ok_or_else(nonsense)?;
        let raw = reply.raw("choices").ok_or_else(nonsense)?;
        let inner = raw.trim().strip_prefix('[').and_then(|raw| raw.strip_suffix(']'));
        let inner = inner.ok_or_else(nonsense)?.trim();
        if !inner.is_empty() {
            choices.push(inner.to_owned());
        }
    }
    let reported = |reply: &&JsonObject| !matches!(reply.raw("usage"), None | Some("null"));
    let all_reported = replies.iter().filter(reported).count() == replies.len();
    let usage = sum(replies.iter().filter_map(|reply| reply.raw("usage")), places);
    let mut merged = replies.into_iter().next().ok_or_else(nonsense)?;
    merged.set("choices", format!("[{}]", choices.join(",")));
    // The usage of some prompts must not be taken for the usage of all.
    match usage.filter(|_| all_reported) {
        Some(usage) => merged.set("usage", usage),
        None => {
            merged.remove("usage");
        }
    }
    Ok(merged)
}

/// Moves the indices of a reply's choices to the position of its prompt; `None` if there are more
/// than `n`, or an index is not below `n`, which would be that of another prompt.
fn move_choices(reply: &mut JsonObject, prompt_index: usize, n: u32) -> Option<()> {
    let Some(raw) = reply.raw("choices") else { return Some(()) };
    let base = prompt_index as u64 * u64::from(n);
    let (mut moved, mut count, mut is_foreign) = (String::with_capacity(raw.len() + 16), 0, false);
    moved.push('[');
    let put = |choice: &RawValue| {
        count += 1;
        if count > n {
            return;
        }
        if count > 1 {
            moved.push(',');
        }
        match JsonObject::parse_str(choice.get()) {
            Ok(mut choice) => {
                let index = choice.raw("index").and_then(|raw| raw.parse::<u64>().ok());
                let index = index.unwrap_or(0);
                is_foreign |= index >= u64::from(n);
                choice.set("index", base.saturating_add(index).to_string());
                moved.push_str(&choice.to_string());
            }
            Err(_) => moved.push_str(choice.get()),
        }
    };
    let is_list = each(raw, put).is_some();
    if count > n || is_foreign {
        return None;
    }
    if is_list {
        moved.push(']');
        reply.set("choices", moved);
    }
    Some(())
}

/// The sum of usage objects, member by member and also inside `*_details`. A value that is not a
/// number is taken from the first object that has it. A count that some objects lack is left out,
/// because it would be taken for the count of all. `None` if one is too long or no JSON object.
fn sum<'a>(all: impl Iterator<Item = &'a str>, places: Places) -> Option<String> {
    let mut total: Option<Value> = None;
    let mut all_say_cached = true;
    for (index, raw) in all.enumerate() {
        let raw = Some(raw).filter(|raw| raw.len() <= USAGE_MAX_BYTES)?;
        let value = serde_json::from_str(raw).ok().filter(Value::is_object);
        let mut value: Value = value?;
        if places.is_counted(index) {
            leave_prompt_out(&mut value);
        } else {
            all_say_cached &= value["prompt_tokens_details"]["cached_tokens"].is_u64();
        }
        match &mut total {
            None => total = Some(value),
            Some(total) => add(total, &value),
        }
    }
    let mut total = total?;
    // If the first replies have no details, the check in `add` cannot notice missing counts.
    if !all_say_cached
        && let Some(details) = total.get_mut("prompt_tokens_details").and_then(Value::as_object_mut)
    {
        details.remove("cached_tokens");
    }
    Some(total.to_string())
}

/// Removes the prompt's tokens from the usage of a further sample.
fn leave_prompt_out(usage: &mut Value) {
    let Some(members) = usage.as_object_mut() else { return };
    if let Some(prompt) = members.get("prompt_tokens").and_then(Value::as_u64) {
        if let Some(total) = members.get("total_tokens").and_then(Value::as_u64) {
            members.insert("total_tokens".into(), total.saturating_sub(prompt).into());
        }
        members.insert("prompt_tokens".into(), 0.into());
    }
    members.remove("prompt_tokens_details");
}

/// Whether one of two values is a count and the other is a number that cannot be added to it.
fn is_partial(sum: &Value, other: &Value) -> bool {
    sum.is_number() && !other.is_null() && !(sum.is_u64() && other.is_u64())
}

fn add(total: &mut Value, other: &Value) {
    match (total, other) {
        (Value::Object(total), Value::Object(other)) => {
            total.retain(|key, value| !value.is_number() || other.contains_key(key));
            for (key, value) in other {
                if total.get(key).is_some_and(|sum| is_partial(sum, value)) {
                    total.remove(key);
                    continue;
                }
                match total.get_mut(key) {
                    Some(sum) => add(sum, value),
                    None if value.is_number() => {}
                    None => {
                        total.insert(key.clone(), value.clone());
                    }
                }
            }
        }
        (total @ Value::Number(_), Value::Number(other)) => {
            if let (Some(a), Some(b)) = (total.as_u64(), other.as_u64()) {
                *total = a.saturating_add(b).into();
            }
        }
        (total @ Value::Null, other) => *total = other.clone(),
        _ => {}
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn places(n: u32, samples_apart: u32) -> Places {
        Places { n, samples_apart }
    }

    fn reply(text: &str) -> JsonObject {
        JsonObject::parse_str(text).unwrap()
    }

    #[test]
    fn choices_take_their_prompts_places_and_usage_adds_up() {
        let a = reply(
            r#"{"id":"a","choices":[{"index":0,"text":"x"},{"index":1,"text":"y"}],"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2,"audio_tokens":null}}}"#,
        );
        let b = reply(
            r#"{"id":"b","choices":[{"index":0,"text":"z"},{"index":1,"text":"w"}],"usage":{"prompt_tokens":4,"prompt_tokens_details":{"cached_tokens":0,"audio_tokens":1}}}"#,
        );
        let merged: Value =
            serde_json::from_slice(&replies(vec![a, b], places(2, 1)).unwrap().to_bytes()).unwrap();
        assert_eq!(merged["id"], "a");
        let texts: Vec<_> = merged["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| (c["index"].as_u64().unwrap(), c["text"].as_str().unwrap()))
            .collect();
        assert_eq!(texts, [(0, "x"), (1, "y"), (2, "z"), (3, "w")]);
        assert_eq!(
            merged["usage"],
            serde_json::json!({
                "prompt_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 1}
            })
        );
    }

    #[test]
    fn a_prompt_whose_samples_are_apart_is_counted_once() {
        let reply = |cached: u32| {
            reply(&format!(
                r#"{{"choices":[{{"index":0}}],"usage":{{"prompt_tokens":9,"total_tokens":13,"completion_tokens":4,"prompt_tokens_details":{{"cached_tokens":{cached}}}}}}}"#
            ))
        };
        let all = vec![reply(0), reply(8), reply(3), reply(8)];
        let merged = replies(all, places(1, 2)).unwrap().to_bytes();
        let merged: Value = serde_json::from_slice(&merged).unwrap();
        assert_eq!(
            merged["usage"],
            serde_json::json!({
                "prompt_tokens": 18, "total_tokens": 34, "completion_tokens": 16,
                "prompt_tokens_details": {"cached_tokens": 3},
            })
        );
        let choices = merged["choices"].as_array().unwrap();
        let indices: Vec<_> = choices.iter().map(|choice| &choice["index"]).collect();
        assert_eq!(indices, [0, 1, 2, 3]);
    }

    #[test]
    fn cached_tokens_of_some_prompts_are_not_reported_for_the_batch() {
        let reply = |details: &str| {
            reply(&format!(
                r#"{{"choices":[{{"index":0}}],"usage":{{"prompt_tokens":9,"prompt_tokens_details":{details}}}}}"#
            ))
        };
        let some = r#"{"cached_tokens":8,"audio_tokens":1}"#;
        for silent in ["null", r#"{"audio_tokens":1}"#, r#"{"cached_tokens":null}"#] {
            for details in [[some, silent, some], [silent, some, some]] {
                let merged = replies(details.map(reply).to_vec(), places(1, 1)).unwrap().to_bytes();
                let merged: Value = serde_json::from_slice(&merged).unwrap();
                assert_eq!(merged["usage"]["prompt_tokens"], 27);
                let cached = merged["usage"]["prompt_tokens_details"].get("cached_tokens");
                assert!(cached.is_none_or(Value::is_null), "{merged}");
            }
        }
    }

    #[test]
    fn usage_that_is_no_object_is_left_out() {
        for usage in ["5", "[]", "null", "true", "\"x\""] {
            let whole = || reply(&format!(r#"{{"choices":[{{"index":0}}],"usage":{usage}}}"#));
            let merged = replies(vec![whole(), whole()], places(1, 1)).unwrap().to_bytes();
            let merged: Value = serde_json::from_slice(&merged).unwrap();
            assert!(merged.get("usage").is_none_or(Value::is_null), "{merged}");
        }
    }

    #[test]
    fn a_count_of_some_prompts_is_not_told_as_that_of_the_batch() {
        let reply = |usage: &str| {
            reply(&format!(
                r#"{{"choices":[{{"index":0}}],"usage":{{"prompt_tokens":9,{usage}}}}}"#
            ))
        };
        let good = r#""completion_tokens":4"#;
        for bad in [r#""completion_tokens":4.0"#, r#""completion_tokens":"4""#, r#""x":1"#] {
            for all in [[good, bad, good], [bad, good, good], [good, good, bad]] {
                let merged = replies(all.map(reply).to_vec(), places(1, 1)).unwrap().to_bytes();
                let merged: Value = serde_json::from_slice(&merged).unwrap();
                assert_eq!(merged["usage"]["prompt_tokens"], 27);
                assert!(!merged["usage"]["completion_tokens"].is_u64(), "{bad}: {merged}");
            }
        }
    }

    #[tokio::test]
    async fn streams_share_an_id_and_end_with_one_usage_chunk() {
        let batch = Batch::new(2, places(1, 1));
        let events = |(index, name): (usize, &str)| {
            let chunks = [
                format!(r#"{{"id":"{name}","choices":[{{"index":0,"text":"{name}"}}]}}"#),
                format!(r#"{{"id":"{name}","choices":[],"usage":{{"prompt_tokens":5}}}}"#),
            ];
            batch.place(index).made(chunks.map(Bytes::from).to_vec())
        };
        let both = ["a", "b"].into_iter().enumerate().map(events).collect();
        let merged: Vec<Value> = streams(Arc::clone(&batch), both)
            .map(|event| serde_json::from_slice(&event.unwrap()).unwrap())
            .collect()
            .await;
        assert_eq!(merged.len(), 3);
        assert!(merged.iter().all(|event| event["id"] == merged[0]["id"]));
        assert_eq!(merged[2]["usage"]["prompt_tokens"], 10);
        let mut indices: Vec<_> =
            merged[..2].iter().map(|e| e["choices"][0]["index"].as_u64().unwrap()).collect();
        indices.sort_unstable();
        assert_eq!(indices, [0, 1]);
    }
}
