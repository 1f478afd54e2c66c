//! The description of the API: `/openapi.json` for programs, `/docs` for people. Both are made from
//! the endpoints, from [`own_paths`] and from the table of fields, and are the same for every router
//! of a version: they name no model and no worker, so that they need no credential.

use std::fmt::Write as _;
use std::sync::LazyLock;

use axum::response::Response;
use serde_json::{Map, Value, json};

use super::own_paths::own_paths;
use super::reply::json_text_reply;
use crate::admin::page::file_reply;
use splitrail_api::Endpoint;
use splitrail_api::sanitise::place_of;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::fields::{FIELDS, Places, Rule};

/// What a path does with a method.
#[derive(Clone, Copy, Debug)]
struct Operation {
    path: &'static str,
    method: &'static str,
    summary: &'static str,
    needs_credential: bool,
    /// The endpoint, if an engine answers.
    endpoint: Option<Endpoint>,
}

/// All operations, in the order in which they are shown.
fn operations() -> Vec<Operation> {
    let of_engines = Endpoint::ALL.into_iter().map(|endpoint| Operation {
        path: endpoint.path(),
        method: "post",
        summary: summary(endpoint),
        needs_credential: true,
        endpoint: Some(endpoint),
    });
    let own = own_paths().into_iter().flat_map(|own| {
        own.methods.iter().map(move |(method, summary)| Operation {
            path: own.shown_path,
            method,
            summary,
            needs_credential: own.needs_credential,
            endpoint: None,
        })
    });
    of_engines.chain(own).collect()
}

fn summary(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Chat => "OpenAI chat, streamed or not",
        Endpoint::Completions => "OpenAI completions, streamed or not",
        Endpoint::Generate => "vLLM: token ids in, token ids out",
        Endpoint::Responses => "OpenAI Responses, streamed or not; none is stored",
        Endpoint::Messages => "Anthropic Messages, streamed or not",
        Endpoint::Embeddings => "Vectors of texts",
        Endpoint::ScoreV1 | Endpoint::Score => "How well texts fit other texts",
        Endpoint::RerankV1 | Endpoint::RerankV2 | Endpoint::Rerank => {
            "Documents by their relevance to a query"
        }
        Endpoint::Classify => "The probabilities of a model's classes",
        Endpoint::Pooling => "The output of a model's pooler",
        Endpoint::Tokenize => "A text or a chat to token ids",
        Endpoint::Detokenize => "Token ids to text",
        Endpoint::CountTokens => "The length of the prompt of an Anthropic message in tokens",
        Endpoint::Transcriptions => "The text of a recording, streamed or not",
        Endpoint::Translations => "The text of a recording in English, streamed or not",
    }
}

/// The names of the fields that are forwarded in a place, with the place of their own members.
fn fields(place: Places) -> impl Iterator<Item = (&'static str, Option<Places>)> {
    let forwarded = FIELDS.iter().filter(move |field| field.rule.passes_in(place));
    forwarded.map(|field| match field.rule {
        Rule::PassesWith(_, members) => (field.name, Some(members)),
        _ => (field.name, None),
    })
}

/// The fields of an endpoint's body. `cache_hit_threshold` is in none of the table's places.
fn body_fields(endpoint: Endpoint) -> impl Iterator<Item = (&'static str, Option<Places>)> {
    fields(place_of(endpoint))
        .filter(move |(name, _)| endpoint.generates() || *name != "cache_hit_threshold")
}

/// An object with these fields, and others: engines have more, which `pass_unknown` may allow.
fn object(fields: impl Iterator<Item = (&'static str, Option<Places>)>) -> Value {
    let properties: Map<String, Value> = fields
        .map(|(name, members)| {
            let schema = members.map_or_else(|| json!({}), |place| object(self::fields(place)));
            (name.to_owned(), schema)
        })
        .collect();
    json!({"type": "object", "properties": properties, "additionalProperties": true})
}

impl Operation {
    fn describe(&self) -> Value {
        let mut described = json!({
            "summary": self.summary,
            "responses": {
                "200": {"description": "The reply"},
                "default": {"$ref": "#/components/responses/Error"},
            },
        });
        if !self.needs_credential {
            described["security"] = json!([]);
        }
        if self.path.contains("{id}") {
            described["parameters"] = json!([
                {"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}
            ]);
        }
        let Some(endpoint) = self.endpoint else { return described };
        let mut body = object(body_fields(endpoint));
        if endpoint.names_model() {
            body["required"] = json!(["model"]);
        }
        let mut content = json!({"application/json": {}});
        if endpoint.generates() || endpoint.transcribes() {
            content["text/event-stream"] = json!({});
        }
        let mut accepted = "application/json";
        if endpoint.transcribes() {
            accepted = "multipart/form-data";
            body["required"] = json!(["file", "model"]);
            body["properties"]["file"] = json!({"type": "string", "format": "binary"});
            content["text/plain"] = json!({});
        }
        described["requestBody"] =
            json!({"required": true, "content": {accepted: {"schema": body}}});
        described["responses"]["200"]["content"] = content;
        if endpoint.dialect() == Dialect::Messages {
            described["responses"]["default"]["$ref"] =
                "#/components/responses/AnthropicError".into();
        }
        described
    }
}

/// An OpenAPI 3.1 document.
fn document() -> Value {
    let mut paths = Map::new();
    for operation in operations() {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = operation.describe();
    }
    let error = json!({
        "type": "object",
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]},
        },
    });
    let reply = |properties: Value| {
        let schema = json!({"type": "object", "properties": properties});
        json!({"description": "An error", "content": {"application/json": {"schema": schema}}})
    };
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Splitrail",
            "version": "1",
            "description": "Bodies have the fields that are forwarded to engines. Other fields are \
                removed, unless the operator has allowed them; the reply names the removed ones in \
                the header x-splitrail-removed-fields.",
        },
        "paths": paths,
        // An operator may serve without credentials.
        "security": [{"bearer": []}, {"api_key": []}, {}],
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "responses": {
                "Error": reply(json!({"error": error})),
                "AnthropicError": reply(json!({
                    "type": {"const": "error"}, "error": error, "request_id": {"type": "string"},
                })),
            },
        },
    })
}

/// The document as a page. All its text is the router's own.
fn page() -> String {
    let mut out = String::from(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Splitrail API</title>\
         <meta name=viewport content=\"width=device-width, initial-scale=1\">\
         <link rel=stylesheet href=/docs/docs.css><h1>Splitrail API</h1>\
         <p>The API of OpenAI, of Anthropic, and endpoints of vLLM and SGLang. \
         <a href=/openapi.json>/openapi.json</a> describes it to programs, and \
         <a href=/v1/models>/v1/models</a> lists the models. If a credential is required, send it \
         as <code>authorization: Bearer KEY</code> or <code>x-api-key: KEY</code>.</p>",
    );
    for Operation { path, method, summary, endpoint, .. } in operations() {
        let method = method.to_uppercase();
        let _ = write!(out, "<h2><code>{method} {path}</code></h2><p>{summary}.</p>");
        let Some(endpoint) = endpoint else { continue };
        out += "<details><summary>Fields</summary><p>";
        for (name, members) in body_fields(endpoint) {
            let _ = write!(out, "<code>{name}</code> ");
            let Some(place) = members else { continue };
            let names: Vec<_> = fields(place).map(|(name, _)| name).collect();
            let _ = write!(out, "(with {}) ", names.join(", "));
        }
        out += "</p></details>";
    }
    out + "</html>"
}

const STYLE: &str = "\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1rem; margin: 1.5rem 0 0; }
p { margin: 0.25rem 0; overflow-wrap: anywhere; }
";

/// Answers `/openapi.json`.
pub(super) async fn show_document() -> Response {
    static TEXT: LazyLock<String> = LazyLock::new(|| document().to_string());
    json_text_reply(TEXT.as_str())
}

/// Answers `/docs`.
pub(super) async fn show_page() -> Response {
    static TEXT: LazyLock<String> = LazyLock::new(page);
    file_reply("text/html", TEXT.as_str())
}

/// Answers `/docs/docs.css`.
pub(super) async fn show_style() -> Response {
    file_reply("text/css", STYLE)
}
