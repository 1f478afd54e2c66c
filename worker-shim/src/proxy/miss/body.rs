//! What a request's body says of the shape of its answer.

use std::fmt;

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::proxy::paths::Kind;
use crate::proxy::refusal::Refusal;

/// Choices that are made up for one request at most.
const CHOICES_MAX: u64 = 4096;

/// The shape of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// The model as the request names it; empty if it names none.
    pub(super) model: String,
    /// Whether it is streamed.
    pub(super) stream: bool,
    /// All samples of all prompts.
    pub(super) choices: u32,
}

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    n: Option<u64>,
    #[serde(default)]
    sampling_params: Option<Sampling>,
    #[serde(default)]
    prompt: Prompts,
}

#[derive(Deserialize)]
struct Sampling {
    #[serde(default)]
    n: Option<u64>,
}

impl Shape {
    /// Reads a body; on nothing but the request does the answer depend.
    pub(super) fn read(kind: Kind, body: &[u8]) -> Result<Self, Refusal> {
        // What is wrong with it is not repeated: the message would have content in it.
        let is_object = body.trim_ascii_start().starts_with(b"{");
        let body = is_object.then(|| serde_json::from_slice::<Body>(body).ok()).flatten();
        let body = body.ok_or(Refusal::BodyMalformed)?;
        let samples = match kind {
            Kind::Generate => body.sampling_params.and_then(|sampling| sampling.n),
            _ => body.n,
        };
        let prompts = if kind == Kind::Completions { body.prompt.0 } else { 1 };
        match samples.unwrap_or(1).saturating_mul(prompts) {
            0 => Err(Refusal::BodyMalformed),
            choices @ 1..=CHOICES_MAX => Ok(Self {
                model: body.model.unwrap_or_default(),
                stream: body.stream.unwrap_or(false),
                choices: choices as u32,
            }),
            _ => Err(Refusal::BodyUnread),
        }
    }
}

/// How many prompts a completion has: text or token ids are one, a list of those is many.
#[derive(Debug, PartialEq, Eq)]
struct Prompts(u64);

impl Default for Prompts {
    fn default() -> Self {
        Self(1)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("text, token ids, or a list of either")
    }

    fn visit_unit<E>(self) -> Result<Prompts, E> {
        Ok(Prompts(1))
    }

    fn visit_str<E>(self, _: &str) -> Result<Prompts, E> {
        Ok(Prompts(1))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompts, A::Error> {
        let (mut count, mut ids) = (0, true);
        while let Some(item) = items.next_element::<Item>()? {
            count += 1;
            ids &= item == Item::Id;
        }
        Ok(Prompts(if ids { 1 } else { count }))
    }
}

/// An element of a list that is a prompt, or a list of prompts.
#[derive(Debug, PartialEq, Eq)]
enum Item {
    Id,
    Prompt,
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemVisitor)
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = Item;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a token id, text or token ids")
    }

    fn visit_u64<E>(self, _: u64) -> Result<Item, E> {
        Ok(Item::Id)
    }

    fn visit_str<E>(self, _: &str) -> Result<Item, E> {
        Ok(Item::Prompt)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Item::Prompt)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn choices(kind: Kind, body: &str) -> Result<u32, Refusal> {
        Shape::read(kind, body.as_bytes()).map(|shape| shape.choices)
    }

    #[test]
    fn a_completion_has_a_choice_for_each_sample_of_each_prompt() {
        for (body, expected) in [
            (r#"{"prompt":"a"}"#, Ok(1)),
            (r#"{"prompt":"a","n":3}"#, Ok(3)),
            (r#"{"prompt":"a","n":null,"stream":null,"model":null}"#, Ok(1)),
            (r#"{"prompt":[1,2,3]}"#, Ok(1)),
            (r#"{"prompt":["a"]}"#, Ok(1)),
            (r#"{"prompt":["a","b\n"],"n":2}"#, Ok(4)),
            (r#"{"prompt":[[1,2],[3]]}"#, Ok(2)),
            (r#"{"prompt":[]}"#, Ok(1)),
            (r#"{"prompt":null,"prompt_embeds":"x"}"#, Ok(1)),
            (r#"{}"#, Ok(1)),
            (r#"{"prompt":"a","n":4097}"#, Err(Refusal::BodyUnread)),
            (r#"{"prompt":"a","n":18446744073709551615}"#, Err(Refusal::BodyUnread)),
            (r#"{"prompt":"a","n":0}"#, Err(Refusal::BodyMalformed)),
            (r#"{"prompt":"a","n":-1}"#, Err(Refusal::BodyMalformed)),
            (r#"{"prompt":{"a":1}}"#, Err(Refusal::BodyMalformed)),
            (r#"{"prompt":"a","stream":"yes"}"#, Err(Refusal::BodyMalformed)),
            (r#"{"prompt":"a""#, Err(Refusal::BodyMalformed)),
            ("[]", Err(Refusal::BodyMalformed)),
            ("", Err(Refusal::BodyMalformed)),
        ] {
            assert_eq!(choices(Kind::Completions, body), expected, "{body}");
        }
    }

    #[test]
    fn samples_stand_elsewhere_in_generate_and_chats_have_one_prompt() {
        let body = r#"{"token_ids":[1],"n":5,"sampling_params":{"n":2}}"#;
        assert_eq!(choices(Kind::Generate, body), Ok(2));
        assert_eq!(choices(Kind::Generate, r#"{"sampling_params":{}}"#), Ok(1));
        let body = r#"{"messages":[{"role":"user","content":"a"}],"n":2}"#;
        assert_eq!(choices(Kind::Chat, body), Ok(2));
        let body = r#"{"model":"a\"b","stream":true,"messages":[]}"#;
        let shape = Shape::read(Kind::Chat, body.as_bytes()).unwrap();
        assert_eq!((shape.model.as_str(), shape.stream), ("a\"b", true));
    }
}
