//! An event of a stream of OpenAI's API in types, as the API over gRPC passes it on.

use serde::Deserialize;

use super::dialect::read;

/// The members of a chunk that messages of gRPC have.
#[derive(Debug, Deserialize)]
pub struct OpenAiChunk {
    /// The choices that go on with this chunk.
    #[serde(default)]
    pub choices: Vec<ChunkChoice>,
    /// The usage, in the last chunk.
    pub usage: Option<ChunkUsage>,
}

/// The members of an engine's chunk that reach the client as they are.
#[derive(Deserialize)]
struct Choices {
    #[serde(default, rename = "choices")]
    _choices: Vec<ChunkChoice>,
}

/// What is new of a choice.
#[derive(Debug, Deserialize)]
pub struct ChunkChoice {
    /// The position of the choice.
    #[serde(default)]
    pub index: u32,
    /// The text of a completion.
    pub text: Option<String>,
    /// The text of a chat.
    pub delta: Option<ChunkDelta>,
    /// Why the choice ends, in its last chunk.
    pub finish_reason: Option<String>,
}

/// What is new of a choice of a chat.
#[derive(Debug, Deserialize)]
pub struct ChunkDelta {
    /// The text.
    pub content: Option<String>,
    /// The reasoning before the text.
    #[serde(alias = "reasoning_content")]
    pub reasoning: Option<String>,
}

/// The usage of a reply.
#[derive(Debug, Deserialize)]
pub struct ChunkUsage {
    /// Tokens of the prompt; `None` if the engine's count cannot be read.
    pub prompt_tokens: Option<u64>,
    /// Generated tokens.
    #[serde(default)]
    pub completion_tokens: u64,
    /// More about the tokens of the prompt.
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

/// More about the tokens of a prompt.
#[derive(Debug, Deserialize)]
pub struct PromptTokensDetails {
    /// The part of the tokens that was cached.
    pub cached_tokens: Option<u64>,
}

impl OpenAiChunk {
    /// Reads an event's data; `None` if a member has another type than in OpenAI's API.
    pub fn read(data: &[u8]) -> Option<Self> {
        read(data)
    }

    /// Whether the choices in an engine's event can be read. Its usage is not looked at: clients get
    /// another one.
    pub fn has_readable_choices(data: &[u8]) -> bool {
        read::<Choices>(data).is_some()
    }
}
