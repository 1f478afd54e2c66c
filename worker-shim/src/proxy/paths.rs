//! The paths of the engine that are reachable through the shim, and no others: an
//! engine has paths that stop it, change its weights or read its environment.

use http::Method;

/// What a path is, as far as the proxy cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/inference/v1/generate`: token ids in and out.
    Generate,
    /// Other work for the accelerator.
    Compute,
    /// Anything else: cheap, and counted nowhere.
    Tell,
}

impl Kind {
    /// Whether the engine computes for it.
    pub(super) fn computes(self) -> bool {
        self != Self::Tell
    }

    /// Whether its reply has a form for "too little is cached".
    pub(super) fn can_be_gated(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Generate)
    }
}

/// Where a request leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// To the engine.
    Path(Kind),
    /// Nowhere: the path is only known with other methods.
    WrongMethod,
    /// Nowhere.
    Unknown,
}

/// A path that is forwarded besides the listed ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtraPath {
    /// Its method.
    pub method: Method,
    /// The path itself, compared byte by byte.
    pub path: String,
    /// Whether the engine's accelerator works for it: its requests then count as load.
    pub computes: bool,
}

/// Compared byte by byte: nothing is decoded or normalised, so that nothing slips by.
pub(super) fn find(extra: &[ExtraPath], method: &Method, path: &str) -> Found {
    let of_extra = |extra: &ExtraPath| match extra.computes {
        true => Kind::Compute,
        false => Kind::Tell,
    };
    if let Some(extra) = extra.iter().find(|e| e.path == path && e.method == *method) {
        return Found::Path(of_extra(extra));
    }
    let (kind, gets, posts) = match path {
        "/v1/chat/completions" => (Kind::Chat, false, true),
        "/v1/completions" => (Kind::Completions, false, true),
        "/inference/v1/generate" => (Kind::Generate, false, true),
        "/v1/responses" | "/v1/messages" | "/v1/embeddings" => (Kind::Compute, false, true),
        "/tokenize"
        | "/detokenize"
        | "/v1/messages/count_tokens"
        | "/v1/chat/completions/render"
        | "/v1/completions/render" => (Kind::Tell, false, true),
        "/ping" => (Kind::Tell, true, true),
        "/health" | "/version" | "/load" | "/metrics" | "/v1/models" | "/kv_event_sources"
        | "/is_paused" | "/is_sleeping" => (Kind::Tell, true, false),
        _ if extra.iter().any(|extra| extra.path == path) => return Found::WrongMethod,
        _ => return Found::Unknown,
    };
    match *method {
        Method::GET if gets => Found::Path(kind),
        Method::POST if posts => Found::Path(kind),
        _ => Found::WrongMethod,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_listed_is_not_there_however_it_is_spelt() {
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
            assert_eq!(find(&[], &Method::GET, path), Found::Unknown, "{path}");
            assert_eq!(find(&[], &Method::POST, path), Found::Unknown, "{path}");
        }
        assert_eq!(find(&[], &Method::GET, "/v1/completions"), Found::WrongMethod);
        assert_eq!(find(&[], &Method::DELETE, "/v1/models"), Found::WrongMethod);
    }

    #[test]
    fn what_is_configured_is_there_too() {
        let post = |path: &str, computes| ExtraPath {
            method: Method::POST,
            path: path.to_owned(),
            computes,
        };
        let extra = [post("/v1/score", true), post("/health", false)];
        assert_eq!(find(&extra, &Method::POST, "/v1/score"), Found::Path(Kind::Compute));
        assert_eq!(find(&extra, &Method::GET, "/v1/score"), Found::WrongMethod);
        assert_eq!(find(&extra, &Method::POST, "/health"), Found::Path(Kind::Tell));
        assert_eq!(find(&extra, &Method::GET, "/health"), Found::Path(Kind::Tell));
    }
}
