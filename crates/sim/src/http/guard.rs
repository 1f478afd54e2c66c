//! What an engine does with all requests: asks for its key, and dates its replies.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use http::{HeaderValue, StatusCode, header};
use serde_json::json;

use super::App;
use crate::error::json_response;

/// Puts the guard around the routes, if the configuration needs one.
pub(super) fn around(routes: Router, app: Arc<App>) -> Router {
    let config = &app.engine.config;
    match config.api_key.is_some() || config.clock_ahead_s != 0 {
        true => routes.layer(from_fn_with_state(app, guard)),
        false => routes,
    }
}

async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let config = &app.engine.config;
    // vLLM asks for its key under this path only.
    let is_guarded = request.uri().path().starts_with("/v1");
    let key = config.api_key.as_ref().filter(|_| is_guarded);
    let given = request.headers().get(header::AUTHORIZATION);
    let mut response = match key.map(|key| format!("Bearer {key}")) {
        Some(wanted) if given.is_none_or(|given| given.as_bytes() != wanted.as_bytes()) => {
            json_response(StatusCode::UNAUTHORIZED, &json!({"error": "Unauthorized"}))
        }
        _ => next.run(request).await,
    };
    if let Some(date) = date(config.clock_ahead_s) {
        response.headers_mut().insert(header::DATE, date);
    }
    response
}

/// The time by a clock that is off; `None` if it is not.
fn date(ahead_s: i64) -> Option<HeaderValue> {
    let off = Duration::from_secs(ahead_s.unsigned_abs());
    let now = SystemTime::now();
    let time = match ahead_s {
        0 => None,
        1.. => now.checked_add(off),
        _ => now.checked_sub(off),
    };
    HeaderValue::from_str(&httpdate::fmt_http_date(time?)).ok()
}
