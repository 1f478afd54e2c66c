//! The stages of a request.

/// A part of a request's time up to its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The body arrived.
    Receive,
    /// Chat template, tokens and block hashes were computed.
    Tokenize,
    /// The prompt waited in the router's queue.
    Admit,
    /// The workers' blocks were looked up.
    Match,
    /// A worker was chosen.
    Pick,
    /// A decode worker was asked, and held too little of the prompt.
    DecodeTry,
    /// The worker of the prefill leg took a part of the prompt from another worker, or tried to.
    PeerFetch,
    /// A prefill leg ran.
    Prefill,
    /// The leg that generates the reply ran up to its first event, or up to its end if the reply is
    /// not streamed.
    FirstToken,
    /// A leg failed.
    Failed,
}

impl Stage {
    /// All stages, in the usual order.
    pub const ALL: [Self; 10] = [
        Self::Receive,
        Self::Tokenize,
        Self::Admit,
        Self::Match,
        Self::Pick,
        Self::DecodeTry,
        Self::PeerFetch,
        Self::Prefill,
        Self::FirstToken,
        Self::Failed,
    ];

    /// The name in `server-timing`, metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Receive => "receive",
            Self::Tokenize => "tokenize",
            Self::Admit => "admit",
            Self::Match => "match",
            Self::Pick => "pick",
            Self::DecodeTry => "decode_try",
            Self::PeerFetch => "peer_fetch",
            Self::Prefill => "prefill",
            Self::FirstToken => "first_token",
            Self::Failed => "failed",
        }
    }
}
