//! The API whose form a reply has: OpenAI completions and chats, OpenAI responses, or Anthropic messages.

/// The forms of reply that engines give, as far as they differ in where usage stands, what
/// ends a stream and what an error looks like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's chats and completions, and what is modelled on them: a stream is of unnamed
    /// chunks with choices, and ends with `[DONE]`.
    #[default]
    Chunks,
    /// OpenAI's Responses: a stream is of named events; the last one holds the whole response.
    Responses,
    /// Anthropic's Messages: a stream is of named events, from `message_start` to
    /// `message_stop`.
    Messages,
}

impl Dialect {
    /// Whether a stream's events are named, and one of them is its end.
    pub fn names_events(self) -> bool {
        self != Self::Chunks
    }
}
