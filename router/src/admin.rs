//! The admin listener: metrics, health, the state of the router, a page that shows it live, and
//! changes by operators. It is on loopback by default, and shows addresses and decisions, but no
//! content and no keys.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::middleware::from_fn;
use axum::response::Response;
use axum::routing::{delete, get, post};

use crate::core::Core;
use crate::ingress::reply::{health, ready, reply_error};
use splitrail_api::error::{Error, ErrorKind};

mod change;
mod context;
mod explain;
mod guard;
mod index;
mod live;
mod lookup;
mod metrics;
pub(crate) mod page;
mod playground;
mod query;
mod refusal;
mod show;
mod workers;

pub use context::Admin;

/// Maximum size in bytes of a body that describes a worker.
const BODY_MAX_BYTES: usize = 64 << 10;

/// The path to which a request of a client is sent for its placement to be explained.
const EXPLAIN: &str = "/admin/explain";

/// The path to which the live page sends a prompt.
const PLAYGROUND: &str = "/admin/playground";

/// The path of the metrics.
const METRICS: &str = "/metrics";

/// The routes of the listener for metrics, which may be public.
pub fn metrics_routes(core: Arc<Core>) -> Router {
    let probed = Arc::clone(&core);
    Router::new()
        .route(METRICS, get(metrics::public))
        .route("/health", get(health))
        // Probes of kubelets have no certificate, which the listener of clients may require.
        .route("/ready", get(move || ready(State(Arc::clone(&probed)))))
        .fallback(async || reply_error(Error::new(ErrorKind::UnknownPath, "there is no such path")))
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(0))
        .with_state(metrics::PublicMetrics::new(core))
}

async fn no_such_method() -> Response {
    let message = "the path exists, but not with this method";
    reply_error(Error::new(ErrorKind::MethodNotAllowed, message))
}

/// The admin listener's routes; `bound` is its own address.
pub fn routes(admin: Admin, bound: SocketAddr) -> Router {
    let core = Arc::clone(&admin.core);
    page::add_routes(Router::new())
        .route(METRICS, get(metrics::metrics))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/admin/attention", get(show::attention))
        .route("/admin/config", get(show::config))
        .route("/admin/decisions", get(show::decisions))
        .route(EXPLAIN, post(explain::show))
        .route("/admin/live", get(live::stream))
        .route("/admin/live/history", get(live::history))
        .route("/admin/models", get(show::models))
        .route(PLAYGROUND, post(playground::send))
        .route("/admin/requests", get(show::requests))
        .route("/admin/workers", get(workers::list).post(change::add))
        .route("/admin/workers/{id}", delete(change::remove))
        .route("/admin/workers/{id}/index", get(index::show))
        .route("/admin/workers/{id}/drain", post(change::drain).delete(change::undrain))
        .route("/admin/reload", post(change::reload))
        .fallback(async || reply_error(Error::new(ErrorKind::UnknownPath, "there is no such path")))
        .method_not_allowed_fallback(no_such_method)
        // The guard bounds bodies before they are read.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn(move |peer, request, next| {
            guard::guard(bound, Arc::clone(&core), peer, request, next)
        }))
        .with_state(admin)
}
