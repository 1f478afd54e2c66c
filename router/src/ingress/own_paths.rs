//! The paths of the HTTP API that the router answers without an engine.

use std::sync::Arc;

use axum::response::Response;
use axum::routing::{MethodRouter, get};

use super::models::{list_models, show_model};
use super::openapi::{show_document, show_page, show_style};
use super::reply::{health, ready, reply_error};
use crate::core::Core;
use splitrail_api::error::{Error, ErrorKind};

/// A path that the router answers itself.
pub(super) struct OwnPath {
    /// The path as a pattern of axum.
    pub(super) path: &'static str,
    /// The path as the description of the API shows it.
    pub(super) shown_path: &'static str,
    /// The methods in small letters, each with what it does.
    pub(super) methods: &'static [(&'static str, &'static str)],
    /// Whether the sender must be known.
    pub(super) needs_credential: bool,
    /// What answers.
    pub(super) replies: MethodRouter<Arc<Core>>,
}

/// All paths that the router answers itself, in the order in which they are described.
pub(super) fn own_paths() -> Vec<OwnPath> {
    let own = |path, methods, needs_credential, replies| OwnPath {
        path,
        shown_path: path,
        methods,
        needs_credential,
        replies,
    };
    const NO_RESPONSE: &str = "404: responses are not stored";
    let responses: &[_] = &[("get", NO_RESPONSE), ("delete", NO_RESPONSE)];
    vec![
        own("/v1/responses/{id}", responses, true, get(no_response).delete(no_response)),
        own("/v1/models", &[("get", "Lists the models")], true, get(list_models)),
        OwnPath {
            shown_path: "/v1/models/{id}",
            // Names may contain slashes: `Qwen/Qwen3-8B`.
            ..own("/v1/models/{*id}", &[("get", "Shows one model")], true, get(show_model))
        },
        own("/health", &[("get", "Whether the process is alive")], false, get(health)),
        own("/ready", &[("get", "Whether the router can serve")], false, get(ready)),
        own("/openapi.json", &[("get", "This API for programs")], false, get(show_document)),
        own("/docs", &[("get", "This API for people")], false, get(show_page)),
        own("/docs/docs.css", &[("get", "The style sheet of `/docs`")], false, get(show_style)),
    ]
}

/// Responses are not stored.
async fn no_response() -> Response {
    let message = "there is no such response: responses are not kept here";
    reply_error(Error::new(ErrorKind::UnknownPath, message).with_code("response_not_found"))
}
