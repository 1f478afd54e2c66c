//! The inference endpoints.

/// An inference endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
    /// Token ids in, token ids out.
    Generate,
    Responses,
    Messages,
}

impl Endpoint {
    /// The path of the endpoint.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Generate => "/inference/v1/generate",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
        }
    }

    /// The prefix of its request ids.
    pub(crate) fn id_prefix(self) -> &'static str {
        match self {
            // Messages are served as chats, including their ids.
            Self::Chat | Self::Messages => "chatcmpl",
            Self::Completions => "cmpl",
            Self::Generate => "generate-tokens",
            Self::Responses => "resp",
        }
    }

    /// Whether its requests are converted to chats, and the events of its streams have names.
    pub(crate) fn names_events(self) -> bool {
        matches!(self, Self::Responses | Self::Messages)
    }
}
