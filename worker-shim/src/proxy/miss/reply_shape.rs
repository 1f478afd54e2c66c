//! Derives the shape of a reply from the body of its request.

use std::fmt;

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::proxy::paths::EndpointKind;
use crate::proxy::refusal::Refusal;

/// Maximum number of choices in one reply. A router sends one prompt, with at most as many samples
/// (`limits.n_max`).
pub(super) const CHOICES_MAX: u64 = 1024;

/// Maximum size in bytes of a model's name, which each event of a reply repeats.
pub(super) const MODEL_MAX_BYTES: usize = 512;

/// The shape of a reply.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ReplyShape {
    /// The model's name in the request; empty if the request names none.
    pub(super) model: String,
    /// Whether the reply is streamed.
    pub(super) stream: bool,
    /// The number of choices: all samples of all prompts.
    pub(super) choices: u32,
}

#[derive(Deserialize)]
struct RequestFields {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    n: Option<u64>,
    #[serde(default)]
    sampling_params: Option<SamplingFields>,
    #[serde(default)]
    prompt: PromptCount,
}

#[derive(Deserialize)]
struct SamplingFields {
    #[serde(default)]
    n: Option<u64>,
}

impl ReplyShape {
    /// Reads the body of a request.
    pub(super) fn read(kind: EndpointKind, body: &[u8]) -> Result<Self, Refusal> {
        // The error is not repeated, because its message may contain private content.
        let is_object = body.trim_ascii_start().starts_with(b"{");
        let body = is_object.then(|| serde_json::from_slice::<RequestFields>(body).ok()).flatten();
        let body = body.ok_or(Refusal::MalformedBody)?;
        let samples = match kind {
            EndpointKind::Generate => body.sampling_params.and_then(|sampling| sampling.n),
            _ => body.n,
        };
        let model = body.model.unwrap_or_default();
        if model.len() > MODEL_MAX_BYTES {
            return Err(Refusal::UnreadableBody);
        }
        let prompts = if kind == EndpointKind::Completions { body.prompt.0 } else { 1 };
        match samples.unwrap_or(1).saturating_mul(prompts) {
            0 => Err(Refusal::MalformedBody),
            choices @ 1..=CHOICES_MAX => {
                Ok(Self { model, stream: body.stream.unwrap_or(false), choices: choices as u32 })
            }
            _ => Err(Refusal::UnreadableBody),
        }
    }
}

/// The number of prompts of a completion. Text or a list of token ids is one prompt; a list of
/// either has several.
#[derive(Debug, PartialEq, Eq)]
struct PromptCount(u64);

impl Default for PromptCount {
    fn default() -> Self {
        Self(1)
    }
}

impl<'de> Deserialize<'de> for PromptCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptCountVisitor)
    }
}

struct PromptCountVisitor;

impl<'de> Visitor<'de> for PromptCountVisitor {
    type Value = PromptCount;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("text, token ids, or a list of either")
    }

    fn visit_unit<E>(self) -> Result<PromptCount, E> {
        Ok(PromptCount(1))
    }

    fn visit_str<E>(self, _: &str) -> Result<PromptCount, E> {
        Ok(PromptCount(1))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PromptCount, A::Error> {
        let (mut count, mut ids) = (0, true);
        while let Some(item) = items.next_element::<PromptElement>()? {
            count += 1;
            ids &= item == PromptElement::Id;
        }
        Ok(PromptCount(if ids { 1 } else { count }))
    }
}

/// An element of a list that is either a prompt or a list of prompts.
#[derive(Debug, PartialEq, Eq)]
enum PromptElement {
    Id,
    Prompt,
}

impl<'de> Deserialize<'de> for PromptElement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptElementVisitor)
    }
}

struct PromptElementVisitor;

impl<'de> Visitor<'de> for PromptElementVisitor {
    type Value = PromptElement;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a token id, text or token ids")
    }

    fn visit_u64<E>(self, _: u64) -> Result<PromptElement, E> {
        Ok(PromptElement::Id)
    }

    fn visit_str<E>(self, _: &str) -> Result<PromptElement, E> {
        Ok(PromptElement::Prompt)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PromptElement, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(PromptElement::Prompt)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn choices(kind: EndpointKind, body: &str) -> Result<u32, Refusal> {
        ReplyShape::read(kind, body.as_bytes()).map(|shape| shape.choices)
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
            (r#"{"prompt":"a","n":1024}"#, Ok(1024)),
            (r#"{"prompt":"a","n":1025}"#, Err(Refusal::UnreadableBody)),
            (r#"{"prompt":"a","n":18446744073709551615}"#, Err(Refusal::UnreadableBody)),
            (r#"{"prompt":"a","n":0}"#, Err(Refusal::MalformedBody)),
            (r#"{"prompt":"a","n":-1}"#, Err(Refusal::MalformedBody)),
            (r#"{"prompt":{"a":1}}"#, Err(Refusal::MalformedBody)),
            (r#"{"prompt":"a","stream":"yes"}"#, Err(Refusal::MalformedBody)),
            (r#"{"prompt":"a""#, Err(Refusal::MalformedBody)),
            ("[]", Err(Refusal::MalformedBody)),
            ("", Err(Refusal::MalformedBody)),
        ] {
            assert_eq!(choices(EndpointKind::Completions, body), expected, "{body}");
        }
    }

    #[test]
    fn generate_has_its_own_sample_count_and_chats_have_one_prompt() {
        let body = r#"{"token_ids":[1],"n":5,"sampling_params":{"n":2}}"#;
        assert_eq!(choices(EndpointKind::Generate, body), Ok(2));
        assert_eq!(choices(EndpointKind::Generate, r#"{"sampling_params":{}}"#), Ok(1));
        let body = r#"{"messages":[{"role":"user","content":"a"}],"n":2}"#;
        assert_eq!(choices(EndpointKind::Chat, body), Ok(2));
        let body = r#"{"model":"a\"b","stream":true,"messages":[]}"#;
        let shape = ReplyShape::read(EndpointKind::Chat, body.as_bytes()).unwrap();
        assert_eq!((shape.model.as_str(), shape.stream), ("a\"b", true));
    }

    #[test]
    fn a_name_of_a_model_has_at_most_512_bytes() {
        let body = |bytes| format!(r#"{{"model":"{}"}}"#, "a".repeat(bytes));
        assert_eq!(choices(EndpointKind::Chat, &body(512)), Ok(1));
        assert_eq!(choices(EndpointKind::Chat, &body(513)), Err(Refusal::UnreadableBody));
    }
}
