//! The engine's HTTP API.

mod audio;
pub(crate) mod connection;
mod control;
mod embed;
pub(crate) mod endpoint;
mod guard;
mod metrics;
mod named;
mod pooling;
mod rank;
mod remote;
mod reply;
pub(crate) mod request_body;
mod scoring;
mod shape;
mod side_channel;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{ConnectInfo, DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use serde_json::{Map, Value, json};

use crate::adapters::Adapters;
use crate::config::{KvConnector, Role};
use crate::engine::Engine;
use crate::error::{ApiError, json_response};
use crate::events::Endpoints;
use crate::faults::{FaultBoard, RequestFaults};
use crate::record::RequestLog;
use crate::tokenizer;
use connection::ConnectionControl;
use endpoint::Endpoint;
use reply::PendingReply;
use request_body::random_hex;
use shape::Shape;

pub(crate) use side_channel::router as side_channel_router;

/// Maximum size of a body in bytes: long prompts as token ids take a few bytes per token.
const BODY_LIMIT_BYTES: usize = 64 * 1024 * 1024;

/// The state that handlers share.
#[derive(Debug)]
pub(crate) struct App {
    /// Rank 0, which is used where all ranks are equal.
    pub(crate) engine: Arc<Engine>,
    pub(crate) ranks: Vec<Arc<Engine>>,
    /// The rank of the next request without a rank.
    pub(crate) next_rank: AtomicUsize,
    pub(crate) faults: Arc<FaultBoard>,
    pub(crate) log: RequestLog,
    /// When the engine began, since 1970.
    pub(crate) started_at: Duration,
    pub(crate) fingerprint: String,
    /// The adapters that are loaded.
    pub(crate) adapters: Adapters,
    /// The event addresses by rank.
    pub(crate) event_sources: Vec<Endpoints>,
}

/// The endpoint that counts the tokens of messages.
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

type Shared = State<Arc<App>>;

/// All routes of the public listener.
pub(crate) fn router(app: Arc<App>) -> Router {
    let routes = match app.engine.config.connector {
        KvConnector::Sglang => Router::new().route("/server_info", get(server_info)),
        _ => Router::new()
            .route("/version", get(version))
            .route("/kv_event_sources", get(event_sources))
            .route("/v1/load_lora_adapter", post(control::load_adapter))
            .route("/v1/unload_lora_adapter", post(control::unload_adapter))
            .route(Endpoint::Generate.path(), inference(Endpoint::Generate)),
    };
    let routes = routes
        .route(Endpoint::Chat.path(), inference(Endpoint::Chat))
        .route(Endpoint::Completions.path(), inference(Endpoint::Completions))
        .merge(pooling::routes())
        .route(Endpoint::Responses.path(), inference(Endpoint::Responses))
        .route(Endpoint::Messages.path(), inference(Endpoint::Messages))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/ping", get(health))
        .route("/load", get(load))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route(COUNT_TOKENS, post(count_tokens))
        .route("/reset_prefix_cache", post(control::reset_prefix_cache))
        .route("/metrics", get(metrics::metrics))
        .route("/sim/state", get(control::state))
        .route("/sim/resident", get(control::resident))
        .route("/sim/requests", get(control::requests))
        .route(
            "/sim/faults",
            get(control::faults).post(control::set_faults).delete(control::clear_faults),
        )
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "Not Found").into_response())
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES))
        .with_state(Arc::clone(&app));
    guard::around(routes, app)
}

/// The time since 1970.
pub(crate) fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

pub(crate) fn unix_seconds() -> u64 {
    unix_time().as_secs()
}

fn inference(endpoint: Endpoint) -> MethodRouter<Arc<App>> {
    post(
        move |State(app): Shared,
              ConnectInfo(connection): ConnectInfo<ConnectionControl>,
              headers: HeaderMap,
              body: Bytes| infer(app, endpoint, connection, headers, body),
    )
}

async fn infer(
    app: Arc<App>,
    endpoint: Endpoint,
    connection: ConnectionControl,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    app.log.push(endpoint.path(), &headers, &body);
    if app.engine.config.embeds {
        return ApiError::new(StatusCode::NOT_FOUND, "Not Found").into_response();
    }
    if app.faults.poisons(&body) {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        return ApiError::new(status, "A fault was injected.").in_reply_of(endpoint);
    }
    let body = match parse(&body) {
        Ok(body) => body,
        Err(error) => return error.in_reply_of(endpoint),
    };
    let staging = body["kv_transfer_params"]["do_remote_decode"] == true;
    let prefill = staging || app.engine.config.role == Role::Prefill;
    let pull = body["kv_transfer_params"]["do_remote_prefill"] == true;
    let faults = app.faults.of_request(prefill, pull);
    let refuse = |error: ApiError| error.in_reply_of(endpoint);
    if let Some(refused) = apply_faults(&faults, &connection, refuse).await {
        return refused;
    }
    match answer(&app, endpoint, &headers, &body, &faults).await {
        Ok(response) => response,
        Err(error) => error.in_reply_of(endpoint),
    }
}

/// Applies the faults that occur before a reply. `refuse` gives an error the form of the reply.
async fn apply_faults(
    faults: &RequestFaults,
    connection: &ConnectionControl,
    refuse: impl Fn(ApiError) -> Response,
) -> Option<Response> {
    if let Some(delay) = faults.delay {
        tokio::time::sleep(delay).await;
    }
    if faults.hang {
        std::future::pending::<()>().await;
    }
    if faults.reset {
        connection.cut_in_head();
        return Some(StatusCode::INTERNAL_SERVER_ERROR.into_response()); // never sent
    }
    if let Some(seconds) = faults.full {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let mut response = refuse(ApiError::new(status, "The request queue is full."));
        response.headers_mut().insert("retry-after", seconds.into());
        return Some(response);
    }
    let status = StatusCode::from_u16(faults.status?).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Some(refuse(ApiError::new(status, "A fault was injected.")))
}

async fn answer(
    app: &App,
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: &Value,
    faults: &RequestFaults,
) -> Result<Response, ApiError> {
    let engine = app.of_request(headers)?;
    let config = &engine.config;
    if engine.core().dead {
        return Err(ApiError::engine_dead());
    }
    let prefix = endpoint.id_prefix();
    let given_id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let id = match (endpoint, body["request_id"].as_str(), given_id) {
        // The real engine takes the id of a response from its body, and otherwise makes one.
        (Endpoint::Responses, Some(id), _) => id.to_owned(),
        (Endpoint::Responses, None, _) if config.connector == KvConnector::NixlPush => {
            format!("{prefix}_{}", random_hex(16))
        }
        (_, _, Some(id)) => format!("{prefix}-{id}"),
        (_, _, None) => format!("{prefix}-{}", random_hex(8)),
    };
    let mut request = request_body::read(endpoint, body, config, &app.adapters, &id)?;
    if request.deadly {
        app.die();
        return Err(ApiError::engine_dead());
    }
    let shape = Shape {
        endpoint,
        id,
        created: unix_seconds(),
        model: request.model.clone(),
        fingerprint: app.fingerprint.clone(),
        names_hand_offs: config.names_hand_offs,
        report: config.usage_report,
        is_sglang: config.connector == KvConnector::Sglang,
        threshold_reply: config.threshold_reply,
        asked: body.clone(),
    };
    for params in &mut request.samples {
        params.preempted = faults.preempt;
    }
    if config.honour_gate_header {
        let needed_blocks = request_body::gate_header(headers, config)?;
        for params in &mut request.samples {
            params.needed_blocks = needed_blocks;
        }
    }
    let submission = engine.submit(request.samples.clone())?;
    let stream = std::mem::take(&mut request.stream);
    let pending = PendingReply::new(shape, request, config.block_size, faults.clone());
    match stream {
        true => reply::streamed(submission, pending, config.early_stream_headers).await,
        false => reply::whole(submission, pending).await,
    }
}

fn parse(body: &[u8]) -> Result<Value, ApiError> {
    match serde_json::from_slice::<Value>(body) {
        Ok(value) if value.is_object() => Ok(value),
        Ok(_) => Err(ApiError::new(StatusCode::BAD_REQUEST, "The body must be a JSON object.")),
        Err(error) => {
            let message = format!("The body is no JSON: {error}");
            Err(ApiError::new(StatusCode::BAD_REQUEST, message))
        }
    }
}

async fn health(State(app): Shared) -> StatusCode {
    let is_dead = app.faults.is_active("dead_core");
    match is_dead || app.ranks.iter().any(|engine| engine.core().dead) {
        true => StatusCode::SERVICE_UNAVAILABLE,
        false => StatusCode::OK,
    }
}

async fn version(State(app): Shared) -> Response {
    json_response(StatusCode::OK, &json!({"version": app.engine.config.version}))
}

async fn load(State(app): Shared) -> Response {
    let state = app.state();
    json_response(StatusCode::OK, &json!({"server_load": state.running + state.waiting}))
}

async fn models(State(app): Shared) -> Response {
    let config = &app.engine.config;
    let owner = if config.connector == KvConnector::Sglang { "sglang" } else { "vllm" };
    let model = |name: &String, root: &String, parent: Option<&String>| {
        json!({
            "id": name,
            "object": "model",
            "created": app.started_at.as_secs(),
            "owned_by": owner,
            "root": root,
            "parent": parent,
            "max_model_len": config.sequence_limit_tokens(),
            "permission": [],
        })
    };
    let loaded = app.adapters.loaded();
    let adapters = loaded.iter().map(|(name, one)| model(name, &one.path, Some(&config.model)));
    let own = std::iter::once(model(&config.model, &config.model, None));
    let data: Vec<Value> = own.chain(adapters).collect();
    json_response(StatusCode::OK, &json!({"object": "list", "data": data}))
}

/// Like vLLM, which repeats its own configuration: it is started with `*` in place of a host.
/// What SGLang says of itself; rank r publishes r ports after rank 0.
async fn server_info(State(app): Shared) -> Response {
    let config = &app.engine.config;
    let first = app.event_sources.first();
    let port = first.and_then(Endpoints::events_port);
    let publisher = port.map(|port| {
        let mut publisher = json!({
            "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port,
            "topic": app.topic(), "block_size": config.block_size, "dp_size": app.ranks.len(),
        });
        if let Some(port) = first.and_then(Endpoints::replay_port) {
            publisher["replay_endpoint_port_base"] = port.into();
        }
        publisher
    });
    let info = json!({
        "version": config.version, "page_size": config.block_size,
        "disable_radix_cache": false, "kv_events": publisher,
    });
    json_response(StatusCode::OK, &info)
}

async fn event_sources(State(app): Shared) -> Response {
    let bound = |endpoint: &Option<String>| {
        let port = endpoint.as_ref()?.rsplit_once(':')?.1;
        Some(format!("tcp://*:{port}"))
    };
    let source = |source: &Endpoints| {
        json!({
            "enable_kv_cache_events": source.events.is_some(),
            "publisher": if source.events.is_some() { "zmq" } else { "null" },
            "endpoint": bound(&source.events),
            "replay_endpoint": bound(&source.replay),
            "buffer_steps": app.engine.config.replay_batches,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": app.topic(),
        })
    };
    let sources = app.event_sources.iter().enumerate();
    let sources: Map<String, Value> =
        sources.map(|(rank, endpoints)| (rank.to_string(), source(endpoints))).collect();
    json_response(StatusCode::OK, &Value::Object(sources))
}

async fn tokenize(State(app): Shared, headers: HeaderMap, body: Bytes) -> Response {
    app.log.push("/tokenize", &headers, &body);
    let config = &app.engine.config;
    if !config.offers_tokenize {
        return ApiError::new(StatusCode::NOT_FOUND, "Not Found").into_response();
    }
    let tokens = parse(&body).and_then(|body| {
        request_body::read_model(&body, config, &app.adapters)?;
        let tokens = match body.get("messages") {
            Some(_) => request_body::chat_prompt(&body, config.dialect)?.0,
            None => match body["prompt"].as_str() {
                Some(text) => request_body::text_prompt(text, config.dialect),
                None => return Err(ApiError::bad_request("prompt", "prompt must be a string.")),
            },
        };
        Ok((tokens, body["return_token_strs"] == true))
    });
    let (tokens, with_text) = match tokens {
        Ok(tokens) => tokens,
        Err(error) => return error.into_response(),
    };
    let text: Option<Vec<String>> =
        with_text.then(|| tokens.iter().map(|id| tokenizer::token_text(*id)).collect());
    let body = json!({
        "count": tokens.len(),
        "max_model_len": config.sequence_limit_tokens(),
        "tokens": tokens,
        "token_strs": text,
    });
    json_response(StatusCode::OK, &body)
}

async fn detokenize(State(app): Shared, headers: HeaderMap, body: Bytes) -> Response {
    app.log.push("/detokenize", &headers, &body);
    let config = &app.engine.config;
    if !config.offers_tokenize {
        return ApiError::new(StatusCode::NOT_FOUND, "Not Found").into_response();
    }
    let ids = parse(&body).and_then(|body| {
        request_body::read_model(&body, config, &app.adapters)?;
        let ids = body["tokens"].as_array().and_then(|ids| {
            ids.iter().map(|id| id.as_u64()?.try_into().ok()).collect::<Option<Vec<u32>>>()
        });
        ids.ok_or_else(|| ApiError::bad_request("tokens", "tokens must be a list of token ids."))
    });
    match ids {
        Ok(ids) => {
            let body = json!({"prompt": tokenizer::decode(&ids, false)});
            json_response(StatusCode::OK, &body)
        }
        Err(error) => error.into_response(),
    }
}

async fn count_tokens(State(app): Shared, headers: HeaderMap, body: Bytes) -> Response {
    app.log.push(COUNT_TOKENS, &headers, &body);
    let config = &app.engine.config;
    if !config.offers_tokenize {
        return ApiError::new(StatusCode::NOT_FOUND, "Not Found").into_response();
    }
    let tokens = parse(&body).and_then(|body| {
        let chat = named::of_message(&body)?;
        request_body::read_model(&chat, config, &app.adapters)?;
        request_body::chat_prompt(&chat, config.dialect).map(|(tokens, _)| tokens)
    });
    match tokens {
        Ok(tokens) => json_response(StatusCode::OK, &json!({"input_tokens": tokens.len()})),
        Err(error) => error.in_reply_of(Endpoint::Messages),
    }
}

/// A plain reply of another type than JSON.
fn text_response(content_type: &'static str, body: String) -> Response {
    ([(header::CONTENT_TYPE, content_type)], body).into_response()
}

impl App {
    /// The topic of this engine's events.
    pub(crate) fn topic(&self) -> String {
        self.engine.origin.topic.clone()
    }
}
