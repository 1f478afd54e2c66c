//! The shim's own endpoints under `/splitrail/`: health, readiness, status and metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Response, StatusCode};
use prometheus::IntCounter;
use serde_json::{Value, json};
use splitrail_kv::Tier;

use crate::attach::{self, Stage};
use crate::config::Role;
use crate::engine::Engine;
use crate::mirror::Mirror;
use crate::telemetry::Metrics;

/// Serves the shim's own endpoints.
pub struct StatusEndpoints {
    /// The worker's id.
    pub id: String,
    /// The worker's role.
    pub role: Role,
    /// The state of the engine.
    pub engine: Engine,
    /// The mirror of the engine's blocks.
    pub mirror: Mirror,
    /// The attachments to routers.
    pub routers: attach::RouterStatuses,
    /// The shim's metrics.
    pub metrics: Arc<Metrics>,
    /// Whether the shim has received a stop signal.
    pub draining: AtomicBool,
}

impl StatusEndpoints {
    /// Returns the reply to a request under `/splitrail/`, or `None` for an unknown path.
    pub fn respond(&self, method: &Method, path: &str) -> Option<Response<Bytes>> {
        let (status, kind, body) = match path {
            "/splitrail/health" => (StatusCode::OK, "text/plain", "ok\n".to_owned()),
            "/splitrail/ready" => match self.unready_reason() {
                None => (StatusCode::OK, "text/plain", "ready\n".to_owned()),
                Some(why) => (StatusCode::SERVICE_UNAVAILABLE, "text/plain", format!("{why}\n")),
            },
            "/splitrail/status" => {
                (StatusCode::OK, "application/json", self.status_json().to_string())
            }
            "/splitrail/metrics" => {
                self.refresh();
                (StatusCode::OK, "text/plain; version=0.0.4", self.metrics.text())
            }
            _ => return None,
        };
        let reads = [Method::GET, Method::HEAD].contains(method);
        let (status, body) = match reads {
            true => (status, body),
            false => (StatusCode::METHOD_NOT_ALLOWED, String::new()),
        };
        let mut response = Response::new(Bytes::from(body));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        Some(response)
    }

    /// Returns why no work should be sent, or `None` if the shim is ready.
    fn unready_reason(&self) -> Option<&'static str> {
        if self.draining.load(Ordering::Relaxed) {
            Some("draining")
        } else if self.engine.identity.borrow().is_none() {
            Some("the engine was not reached yet")
        } else if !self.engine.polled.borrow().up {
            Some("the engine does not answer")
        } else if self.routers.all_refuse() {
            Some("all routers refuse the shim")
        } else {
            None
        }
    }

    /// Updates the metrics whose values other modules keep.
    fn refresh(&self) {
        let metrics = &self.metrics;
        let age_s = self.engine.polled.borrow().at.map(|at| at.elapsed().as_secs_f64());
        metrics.engine_figures_age.set(age_s.unwrap_or(f64::INFINITY));
        let mirror = self.mirror.status();
        metrics.mirror_bytes.set(signed(mirror.index_bytes + mirror.ring_bytes));
        metrics.router_live.reset();
        metrics.router_lag_changes.reset();
        for router in self.routers.routers() {
            let address = router.address.to_string();
            let live = metrics.router_live.with_label_values(&[&address]);
            live.set((router.stage == Stage::Live).into());
            let lag = metrics.router_lag_changes.with_label_values(&[&address]);
            lag.set(i64::try_from(router.lag()).unwrap_or(i64::MAX));
        }
        for rank in &mirror.ranks {
            let name = rank.rank.to_string();
            metrics.mirror_current.with_label_values(&[&name]).set(rank.current.into());
            raise_to(&metrics.mirror_resets.with_label_values(&[&name]), rank.resets);
            for tier in Tier::ALL {
                let blocks = metrics.mirror_blocks.with_label_values(&[name.as_str(), tier.name()]);
                blocks.set(signed(rank.blocks[tier as usize]));
            }
        }
    }

    /// The load as reported to routers, with the current age of the engine's metrics.
    fn load(&self) -> Value {
        let load = *self.engine.load.borrow();
        let age = self.engine.polled.borrow().at.map(|at| at.elapsed().as_millis() as u64);
        json!({
            "up": load.up, "age_ms": age, "running": load.running, "waiting": load.waiting,
            "requests": load.requests, "prefill_tokens_queued": load.prefill_tokens_queued,
            "kv_used_ratio": load.kv_used_ratio, "kv_blocks": load.kv_blocks,
            "step_us": load.step_us,
        })
    }

    fn routers(&self) -> Vec<Value> {
        let router = |router: &attach::RouterStatus| {
            let mut shown = json!(router);
            shown["lag"] = router.lag().into();
            shown
        };
        self.routers.routers().iter().map(router).collect()
    }

    fn status_json(&self) -> Value {
        let identity = self.engine.identity.borrow().clone();
        let mirror = self.mirror.status();
        let ranks: Vec<Value> = mirror
            .ranks
            .iter()
            .map(|rank| {
                let tiers: serde_json::Map<String, Value> = Tier::ALL
                    .into_iter()
                    .map(|tier| (tier.name().to_owned(), rank.blocks[tier as usize].into()))
                    .collect();
                json!({
                    "rank": rank.rank, "blocks": tiers, "current": rank.current,
                    "truncated": rank.truncated, "resets": rank.resets,
                    "last_reset": rank.last_reset, "gaps": rank.gaps, "rejected": rank.rejected,
                })
            })
            .collect();
        json!({
            "id": self.id,
            "role": self.role,
            "ready": self.unready_reason().is_none(),
            "unready": self.unready_reason(),
            "model": identity.as_ref().map(|identity| &identity.model),
            "process": self.engine.polled.borrow().process,
            "capabilities": self.engine.capabilities.borrow().to_json(),
            "load": self.load(),
            "routers": self.routers(),
            "mirror": {
                "mirror_id": mirror.mirror_id, "sequence": mirror.sequence,
                "ring_changes": mirror.ring_changes, "ring_bytes": mirror.ring_bytes,
                "index_bytes": mirror.index_bytes, "snapshots": mirror.snapshots, "ranks": ranks,
            },
        })
    }
}

/// Raises a counter to a total that another module counts.
fn raise_to(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
