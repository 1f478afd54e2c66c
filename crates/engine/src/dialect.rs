//! The API whose form a reply has: OpenAI completions and chats, OpenAI responses, or Anthropic
//! messages.

/// The forms of replies, as far as they differ in the place of usage, the end of a stream, and the
/// shape of errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI chats and completions, and endpoints modelled on them: a stream consists of unnamed
    /// chunks with choices and ends with `[DONE]`.
    #[default]
    Chunks,
    /// OpenAI Responses: a stream consists of named events, the last of which holds the whole
    /// response.
    Responses,
    /// Anthropic Messages: a stream consists of named events, from `message_start` to
    /// `message_stop`.
    Messages,
}

impl Dialect {
    /// Whether a stream's events are named, and one of them marks the end.
    pub fn names_events(self) -> bool {
        self != Self::Chunks
    }
}
