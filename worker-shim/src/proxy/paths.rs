//! The engine's paths that are reachable through the shim. All others are refused, because an
//! engine has paths that stop it, change its weights or read its environment.

use http::Method;

/// The kind of an endpoint, as far as the proxy distinguishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndpointKind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/inference/v1/generate`, with token ids as input and output.
    Generate,
    /// Another endpoint that needs the accelerator.
    Compute,
    /// An endpoint that does not need the accelerator. Its requests do not count as load.
    Inexpensive,
}

impl EndpointKind {
    /// Whether the endpoint needs the accelerator.
    pub(super) fn computes(self) -> bool {
        self != Self::Inexpensive
    }

    /// Whether replies of the endpoint can express that too little is cached.
    pub(super) fn can_be_gated(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Generate)
    }
}

/// The result of looking up a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathMatch {
    /// The path is forwarded to the engine.
    Path(EndpointKind),
    /// The path is only known with other methods.
    WrongMethod,
    /// The path is not forwarded.
    Unknown,
}

/// Looks up a path. Paths are compared byte by byte: nothing is decoded or normalised, so that
/// no other spelling of a path is accepted.
pub(super) fn find(method: &Method, path: &str) -> PathMatch {
    let (kind, gets, posts) = match path {
        "/v1/chat/completions" => (EndpointKind::Chat, false, true),
        "/v1/completions" => (EndpointKind::Completions, false, true),
        "/inference/v1/generate" => (EndpointKind::Generate, false, true),
        "/v1/responses"
        | "/v1/messages"
        | "/v1/embeddings"
        | "/v1/audio/transcriptions"
        | "/v1/audio/translations" => (EndpointKind::Compute, false, true),
        "/tokenize"
        | "/detokenize"
        | "/v1/messages/count_tokens"
        | "/v1/chat/completions/render"
        | "/v1/completions/render" => (EndpointKind::Inexpensive, false, true),
        "/ping" => (EndpointKind::Inexpensive, true, true),
        "/health" | "/version" | "/load" | "/metrics" | "/v1/models" | "/kv_event_sources"
        | "/is_paused" | "/is_sleeping" => (EndpointKind::Inexpensive, true, false),
        _ => return PathMatch::Unknown,
    };
    match *method {
        Method::GET if gets => PathMatch::Path(kind),
        Method::POST if posts => PathMatch::Path(kind),
        _ => PathMatch::WrongMethod,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unlisted_paths_are_unknown_in_every_spelling() {
        for path in [
            "/",
            "",
            "*",
            "/v1/chat/completions/",
            "//v1/chat/completions",
            "/v1/%63hat/completions",
            "/v1/../v1/completions",
            "/V1/completions",
            "/health/../shutdown",
            "/sleep",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/v1/load_lora_adapter",
            "/server_info",
            "/sim/state",
        ] {
            assert_eq!(find(&Method::GET, path), PathMatch::Unknown, "{path}");
            assert_eq!(find(&Method::POST, path), PathMatch::Unknown, "{path}");
        }
        assert_eq!(find(&Method::GET, "/v1/completions"), PathMatch::WrongMethod);
        assert_eq!(find(&Method::DELETE, "/v1/models"), PathMatch::WrongMethod);
    }
}
