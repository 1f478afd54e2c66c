//! Computes the block hashes of a prompt's exact tokens, or the reason why the tokens are unknown.

use bytes::Bytes;
use serde_json::{Map, Value};
use splitrail_engine::json;
use splitrail_engine::tokenize::text_body;
use splitrail_kv::{BlockHash, Chain};

use splitrail_api::JsonObject;
use splitrail_api::error::Error;
use splitrail_api::memory_budget::Allowance;
use splitrail_api::request::Prompt;
use splitrail_fleet::ServedModel;
use splitrail_prompt::template::rendered_max_bytes;
use splitrail_prompt::{
    ChatRequestView, Extent, PromptError, engine_chat, messages, request, responses,
};
use splitrail_telemetry::clock::unix_ms;

use super::short::of_levels;

/// Bytes of memory of a JSON value, including the copies that a template gets.
const VALUE_BYTES: usize = 128;

/// Bytes of memory of a member's name and entry, including copies.
const MEMBER_BYTES: usize = 160;

/// The number of copies of a text: in the JSON value, in the template and in the prompt.
const TEXT_COPIES: usize = 3;

/// The number of copies of what a template adds to a text: in a filter's result and in the prompt,
/// each in a buffer that doubles as it grows.
const PRINTED_COPIES: usize = 4;

/// Members of a chat of which a template makes no more than this length in bytes are not charged in
/// addition to the request.
const SMALL_BYTES: usize = 4 << 10;

/// What is known of a prompt's tokens.
pub(super) enum Tokens {
    /// The tokens, appended to the chain.
    Known(Extent),
    /// They cannot be known: the reason.
    Unknown(&'static str),
    /// An engine can be asked for them with this request.
    OfEngine(Bytes),
}

/// Appends the blocks of the exact tokens to `chain`, or returns how they can be known, or the reason
/// why they cannot; the router never guesses. Tenants whose chains have other roots share no cached text,
/// as engines share no blocks between them.
pub(super) fn tokenize(
    served: &ServedModel,
    body: &JsonObject,
    prompt: Prompt,
    bytes: usize,
    allowance: Allowance<'_, '_>,
    chain: &mut Chain,
) -> Result<Tokens, Error> {
    const TOO_LONG: &str = "longer than limits.tokenize_size_max";
    let Allowance { limits, work } = allowance;
    if bytes > limits.tokenize_max_bytes {
        return Ok(Tokens::Unknown(TOO_LONG));
    }
    if !matches!(body.raw("truncate_prompt_tokens"), None | Some("null")) {
        return Ok(Tokens::Unknown("truncate_prompt_tokens"));
    }
    let block_size = served.pool.block_size().max(1) as usize;
    let hashes_bytes = |text_bytes: usize| text_bytes / block_size * size_of::<BlockHash>();
    let member = if matches!(prompt, Prompt::Responses) { "input" } else { "messages" };
    let done = match (prompt, &served.prompt) {
        (Prompt::Opaque(reason), _) => return Ok(Tokens::Unknown(reason)),
        (Prompt::Recording(_), _) => return Ok(Tokens::Unknown("recording")),
        (Prompt::Tokens(ids), _) => {
            work.take(hashes_bytes(bytes))?;
            chain.append(&ids);
            Ok(Tokens::Known(Extent::Whole))
        }
        (_, None) if !served.config.tokenizer.makes_tokens() => {
            return Ok(Tokens::Unknown("no_tokenizer"));
        }
        (Prompt::Text(text), model) => {
            work.take(hashes_bytes(bytes))?;
            let special = body.get::<bool>("add_special_tokens", "true or false")?.unwrap_or(true);
            match model {
                Some(model) => {
                    let chained = model.chain_text(&text, special, chain);
                    chained.map(|()| Tokens::Known(Extent::Whole))
                }
                None => Ok(question(&text_body(&engine_name(body)?, &text, special))),
            }
        }
        (prompt, model) => {
            let read = PromptMembers::of(&prompt);
            let (members_bytes, values_bytes, rendered_bytes) = read.weigh(body);
            if members_bytes > limits.tokenize_max_bytes {
                return Ok(Tokens::Unknown(TOO_LONG));
            }
            work.take(hashes_bytes(bytes.max(rendered_bytes)) + values_bytes)?;
            let fields = read.fields(body)?;
            match model {
                Some(model) => {
                    let now_unix_s = (unix_ms() / 1000) as i64;
                    let extent = with_chat(&prompt, fields, |view| {
                        model.chain_chat(view, now_unix_s, chain)
                    });
                    extent.map(Tokens::Known)
                }
                None => {
                    let name = engine_name(body)?;
                    let request = with_chat(&prompt, fields, |view| engine_chat(view, &name));
                    request.map(|request| question(&request))
                }
            }
        }
    };
    match done {
        Ok(tokens) => Ok(tokens),
        Err(PromptError::Unsupported(reason)) => Ok(Tokens::Unknown(reason)),
        Err(PromptError::Client(message)) => Err(Error::invalid(member, message)),
        Err(PromptError::Internal(message)) => {
            tracing::error!(model = served.name(), error = message, "a prompt cannot be tokenised");
            Ok(Tokens::Unknown("tokenizer_failed"))
        }
    }
}

/// The token ids of a prompt that [`tokenize`] could tokenise by itself; `None` otherwise.
pub(super) fn ids(served: &ServedModel, body: &JsonObject, prompt: Prompt) -> Option<Vec<u32>> {
    let model = served.prompt.as_deref();
    match prompt {
        Prompt::Opaque(_) | Prompt::Recording(_) => None,
        Prompt::Tokens(ids) => Some(ids),
        Prompt::Text(text) => {
            let special = body.get::<bool>("add_special_tokens", "true or false").ok()?;
            Some(model?.tokenize_text(&text, special.unwrap_or(true)).ok()?.ids)
        }
        prompt => {
            let (model, now_unix_s) = (model?, (unix_ms() / 1000) as i64);
            let fields = PromptMembers::of(&prompt).fields(body).ok()?;
            with_chat(&prompt, fields, |view| Ok(model.tokenize_chat(view, now_unix_s)?.ids)).ok()
        }
    }
}

/// The name by which engines know the model or the adapter of a request.
fn engine_name(body: &JsonObject) -> Result<String, Error> {
    Ok(body.get("model", "text")?.unwrap_or_default())
}

fn question(request: &Value) -> Tokens {
    Tokens::OfEngine(request.to_string().into())
}

/// Calls `run` with a chat, or with the chat that a request is converted to.
fn with_chat<T>(
    prompt: &Prompt,
    fields: Map<String, Value>,
    run: impl FnOnce(ChatRequestView<'_>) -> Result<T, PromptError>,
) -> Result<T, PromptError> {
    let mut fields = match prompt {
        Prompt::Messages => messages::chat_of(&fields)?,
        Prompt::Responses => responses::chat_of(&fields)?,
        _ => fields,
    };
    run(ChatRequestView::taken_from(&mut fields)?)
}

/// The members of a body that determine the prompt of a chat. No values are made of other members.
#[derive(Clone, Copy)]
struct PromptMembers {
    /// Members whose values are needed.
    members: &'static [&'static str],
    /// Members of which only the presence is needed, with their names for logs.
    engine_only: &'static [(&'static str, &'static str)],
}

impl PromptMembers {
    fn of(prompt: &Prompt) -> Self {
        let (members, engine_only): (&[_], &[_]) = match prompt {
            Prompt::Messages => (&messages::MEMBERS, &[]),
            Prompt::Responses => (&responses::MEMBERS, &responses::ENGINE_ONLY),
            _ => (&request::MEMBERS, &request::ENGINE_ONLY),
        };
        Self { members, engine_only }
    }

    /// The length of the members' JSON, the memory of their values and of the texts that a template
    /// makes of them, and the length of the prompt if the template prints them with an indentation;
    /// all in bytes.
    fn weigh(self, body: &JsonObject) -> (usize, usize, usize) {
        let raws = || self.members.iter().filter_map(|member| body.raw(member));
        let bytes = raws().map(str::len).sum();
        let (mut values, mut printed) = (0, 0_usize);
        for raw in raws() {
            let weight = json::weigh(raw.as_bytes(), usize::MAX);
            values += weight.values * VALUE_BYTES + weight.members * MEMBER_BYTES;
            printed += raw.len() + of_levels(&weight);
        }
        let rendered = printed.min(rendered_max_bytes(bytes));
        if rendered <= SMALL_BYTES {
            return (bytes, 0, rendered);
        }
        let longer = rendered.saturating_sub(bytes);
        (bytes, bytes * TEXT_COPIES + longer * PRINTED_COPIES + values, rendered)
    }

    /// The values of the members.
    fn fields(self, body: &JsonObject) -> Result<Map<String, Value>, Error> {
        let mut fields = Map::new();
        for member in self.members {
            if let Some(raw) = body.raw(member) {
                fields.insert((*member).to_owned(), json::value(raw)?);
            }
        }
        for (member, _) in self.engine_only {
            if !matches!(body.raw(member), None | Some("null" | "[]")) {
                fields.insert((*member).to_owned(), Value::Bool(true));
            }
        }
        Ok(fields)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_template_reads_becomes_values() {
        let text = r#"{"model":"m","messages":[{"role":"user"}],"x":[0,0,0],"tools":null,
            "chat_template":"{{ 1 }}","media_io_kwargs":null,"reasoning_effort":"low"}"#;
        let body = JsonObject::parse_str(text).unwrap();
        let fields = PromptMembers::of(&Prompt::Chat).fields(&body).unwrap();
        let names: Vec<&str> = fields.keys().map(String::as_str).collect();
        assert_eq!(names, ["messages", "tools", "reasoning_effort", "chat_template"]);
        assert_eq!(fields["chat_template"], Value::Bool(true), "its text is not needed");
    }

    #[test]
    fn values_weigh_what_they_take() {
        let body = |zeros: usize| {
            let text = format!(
                r#"{{"messages":[0{}],"x":[{}]}}"#,
                ",0".repeat(zeros),
                "1,".repeat(9000) + "1"
            );
            PromptMembers::of(&Prompt::Chat).weigh(&JsonObject::parse_str(&text).unwrap())
        };
        assert_eq!(body(100), (203, 0, 607), "small ones take no more than any request");
        let (bytes, values_bytes, rendered_bytes) = body(9999);
        assert_eq!((bytes, rendered_bytes), (20_001, 60_001), "each zero may get its own line");
        let text_bytes = bytes * TEXT_COPIES + 40_000 * PRINTED_COPIES;
        assert_eq!(values_bytes, text_bytes + 10_001 * VALUE_BYTES);
    }
}
