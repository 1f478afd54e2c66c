//! The lists of models, in the forms of OpenAI and of Anthropic.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, State};
use axum::response::Response;
use http::header::{HeaderMap, HeaderName};
use serde_json::{Value, json};
use splitrail_engine::dialect::Dialect;

use super::identify::Sender;
use super::reply::{error_in, json_reply};
use crate::core::Core;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::request::unknown_model;
use splitrail_fleet::{ServedModels, ServedName};

/// The header that Anthropic's clients send with each request.
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

/// The dialect in which a client expects models.
fn dialect(headers: &HeaderMap) -> Dialect {
    match headers.contains_key(ANTHROPIC_VERSION) {
        true => Dialect::Messages,
        false => Dialect::Chunks,
    }
}

/// Lists the models that the sender may use. Anthropic's `limit` is not applied: the list is one page.
pub(super) async fn list_models(
    State(core): State<Arc<Core>>,
    Extension(sender): Extension<Sender>,
    headers: HeaderMap,
) -> Response {
    let serving = core.serving();
    let list = ModelList { core: &core, serving: &serving, sender: &sender };
    let names = serving.names.iter().filter(|(name, _)| sender.may_use(name));
    let names = names.filter(|(_, named)| serving.may_serve(named));
    json_reply(match dialect(&headers) {
        Dialect::Messages => {
            let models: Vec<_> =
                names.map(|(name, named)| list.describe_to_anthropic(name, named)).collect();
            let id = |model: Option<&Value>| model.map_or(Value::Null, |model| model["id"].clone());
            let (first, last) = (id(models.first()), id(models.last()));
            json!({"data": models, "has_more": false, "first_id": first, "last_id": last})
        }
        Dialect::Chunks | Dialect::Responses => {
            let models: Vec<_> = names.map(|(name, named)| list.describe(name, named)).collect();
            json!({"object": "list", "data": models})
        }
    })
}

/// Shows one model.
pub(super) async fn show_model(
    State(core): State<Arc<Core>>,
    Extension(sender): Extension<Sender>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let dialect = dialect(&headers);
    let Ok(Path(id)) = id else {
        let message = "the path is not valid UTF-8";
        return error_in(dialect, Error::new(ErrorKind::InvalidRequest, message));
    };
    let serving = core.serving();
    let list = ModelList { core: &core, serving: &serving, sender: &sender };
    match (serving.names.get(&id), dialect) {
        (Some(_), _) if !sender.may_use(&id) => {
            let message = format!("the tenant may not use the model `{id}`");
            let error = Error::new(ErrorKind::NotPermitted, message).with_param("model");
            error_in(dialect, error)
        }
        (Some(named), _) if !serving.may_serve(named) => {
            let message = format!("no worker has loaded the adapter `{id}`");
            let error = Error::new(ErrorKind::UnknownModel, message).with_param("model");
            error_in(dialect, error)
        }
        (Some(named), Dialect::Messages) => json_reply(list.describe_to_anthropic(&id, named)),
        (Some(named), _) => json_reply(list.describe(&id, named)),
        (None, _) => {
            let known = serving.names.keys().filter(|name| sender.may_use(name));
            let known: Vec<String> = known.cloned().collect();
            error_in(dialect, unknown_model(&id, &known))
        }
    }
}

/// The models as one sender sees them.
struct ModelList<'a> {
    core: &'a Core,
    serving: &'a ServedModels,
    sender: &'a Sender,
}

impl ModelList<'_> {
    /// A model by one of its names. A tenant that may not use the configured name is not told it.
    fn describe(&self, name: &str, named: &ServedName) -> Value {
        let served = &self.serving.models[named.model];
        let configured = served.name();
        let root = if self.sender.may_use(configured) { configured } else { name };
        let mut model = json!({
            "id": name, "object": "model", "created": self.core.started_unix_s,
            "owned_by": "splitrail", "root": root,
        });
        // Clients plan their prompts by it, as vLLM and SGLang name it.
        if let Some(tokens) = served.pool.least_context_tokens() {
            model["max_model_len"] = tokens.into();
        }
        model
    }

    fn describe_to_anthropic(&self, name: &str, named: &ServedName) -> Value {
        let created = SystemTime::UNIX_EPOCH + Duration::from_secs(self.core.started_unix_s);
        let created = humantime::format_rfc3339_seconds(created).to_string();
        let mut model =
            json!({"type": "model", "id": name, "display_name": name, "created_at": created});
        let served = &self.serving.models[named.model];
        if let Some(tokens) = served.pool.least_context_tokens() {
            model["max_input_tokens"] = tokens.into();
        }
        model
    }
}
