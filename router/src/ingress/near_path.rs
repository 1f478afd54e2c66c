//! The path that a client probably means by one that does not exist.

use splitrail_api::Endpoint;

const MODELS: &str = "/v1/models";

/// The path of the API with which a path ends, apart from `/v1`, doubled slashes, a last slash and the
/// `s` of plurals: clients join a base URL and a path in such ways, and people write
/// `/v1/chat/completion`.
pub(super) fn near_path(path: &str) -> Option<&'static str> {
    let given: Vec<&str> = segments(path).collect();
    let ends_with = |known: &&str| {
        let known: Vec<&str> = segments(known.strip_prefix("/v1").unwrap_or(known)).collect();
        given.ends_with(&known)
    };
    let known = Endpoint::ALL.into_iter().map(Endpoint::path).chain([MODELS]);
    known.filter(ends_with).max_by_key(|known| known.len())
}

fn segments(path: &str) -> impl Iterator<Item = &str> {
    let segments = path.split('/').filter(|segment| !segment.is_empty());
    segments.map(|segment| segment.strip_suffix('s').unwrap_or(segment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_joined_in_the_wrong_way_means_the_path_that_it_ends_with() {
        for (path, near) in [
            ("//v1/chat/completions", Some("/v1/chat/completions")),
            ("/v1/chat/completions/", Some("/v1/chat/completions")),
            ("/v1/chat/completions/chat/completions", Some("/v1/chat/completions")),
            ("/v1/v1/messages", Some("/v1/messages")),
            ("/v1//messages", Some("/v1/messages")),
            ("/messages/count_tokens", Some("/v1/messages/count_tokens")),
            ("/completions", Some("/v1/completions")),
            ("/v1/tokenize", Some("/tokenize")),
            ("/models", Some("/v1/models")),
            ("/v1/model", Some("/v1/models")),
            ("/v1/chat/completion", Some("/v1/chat/completions")),
            ("/v1/models/", Some("/v1/models")),
            ("/", None),
            ("/v1", None),
            ("/v1/v1/rerank", Some("/v1/rerank")),
            ("/v1/chat", None),
            ("/xmessages", None),
        ] {
            assert_eq!(near_path(path), near, "{path}");
        }
    }
}
