//! Texts and lists as shared template values.
//!
//! One of two files of this crate with `unsafe`: a shared text is preceded by two reference
//! counts (sixteen bytes), and the standard library copies the text after them in one step, which
//! is slow on some processors; see [`STEP_BYTES`].

#![allow(unsafe_code)]

use std::sync::Arc;

use minijinja::Value;
use minijinja::value::Serde;
use serde::{Serialize, Serializer};
use serde_json::Value as Json;

use super::STEP_BYTES;
use super::watched::WatchedList;

/// A JSON value; when it is serialized, long texts are copied in steps.
pub(super) struct StepwiseJson<'a>(pub(super) &'a Json);

impl Serialize for StepwiseJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Json::String(text) if text.len() > STEP_BYTES => {
                Value::from(shared(text)).serialize(serializer)
            }
            Json::Array(items) => {
                let items =
                    items.iter().map(|item| Value::from(Serde(StepwiseJson(item)))).collect();
                Value::from_object(WatchedList(items)).serialize(serializer)
            }
            Json::Object(fields) => serializer
                .collect_map(fields.iter().map(|(name, value)| (name, StepwiseJson(value)))),
            other => other.serialize(serializer),
        }
    }
}

/// A shared copy of a text.
fn shared(text: &str) -> Arc<str> {
    let mut copy = Arc::<[u8]>::new_uninit_slice(text.len());
    // The copy has only one owner so far.
    let Some(room) = Arc::get_mut(&mut copy) else { return text.into() };
    for (room, step) in room.chunks_mut(STEP_BYTES).zip(text.as_bytes().chunks(STEP_BYTES)) {
        room.write_copy_of_slice(step);
    }
    // SAFETY: both have the same length and were divided into the same steps, each of which was
    // written.
    let copy = unsafe { copy.assume_init() };
    // SAFETY: the bytes are valid UTF-8, and `Arc<str>` and `Arc<[u8]>` have the same layout: the
    // standard library converts the former to the latter in the same way.
    unsafe { Arc::from_raw(Arc::into_raw(copy) as *const str) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_copy_equals_its_text_for_any_length() {
        for len in [0, 1, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1, 5 * STEP_BYTES, 70_000] {
            let text: String = ('a'..='z').chain(['é', '本', '😀']).cycle().take(len).collect();
            let copy = shared(&text);
            let other = Arc::clone(&copy);
            assert_eq!(*copy, *text);
            drop(copy);
            assert_eq!(*other, *text);
        }
    }

    #[test]
    fn templates_see_the_same_as_without_steps() {
        let long = "long text, ".repeat(1000);
        let json = json!([
            {"role": "user", "content": long, "n": 1, "x": [1.5, true, null, "", {}, [long]]},
            {"content": [{"type": "text", "text": long}], "role": "é"},
        ]);
        let (ours, plain) = (Value::from(Serde(StepwiseJson(&json))), Value::from(Serde(&json)));
        assert_eq!(ours, plain);
        assert_eq!(ours.to_string(), plain.to_string());
        for (ours, plain) in ours.try_iter().unwrap().zip(plain.try_iter().unwrap()) {
            let content = |message: Value| message.get_attr("content").unwrap().kind();
            assert_eq!(ours.kind(), plain.kind());
            assert_eq!(content(ours), content(plain));
        }
        assert_eq!(serde_json::to_value(&ours).unwrap(), json);
    }
}
