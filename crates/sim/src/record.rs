//! What the engine received and holds, for tests.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use http::HeaderMap;
use serde::Serialize;
use serde_json::Value;

use crate::engine::{Counters, Engine};

/// Maximum number of recorded requests.
const KEPT_REQUESTS: usize = 256;

/// One request as it arrived.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecordedRequest {
    /// Path of the endpoint.
    pub path: String,
    /// All headers, names in lower case, in their order of arrival.
    pub headers: Vec<(String, String)>,
    /// The body as JSON; null if it was not JSON.
    pub body: Value,
}

impl RecordedRequest {
    /// A header's first value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(given, _)| given == name).map(|(_, value)| value.as_str())
    }
}

/// The latest requests, oldest first.
#[derive(Debug, Default)]
pub(crate) struct RequestLog(Mutex<VecDeque<RecordedRequest>>);

impl RequestLog {
    pub(crate) fn push(&self, path: &str, headers: &HeaderMap, body: &[u8]) {
        let headers = headers
            .iter()
            .map(|(name, value)| {
                (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
            })
            .collect();
        let body = serde_json::from_slice(body).unwrap_or(Value::Null);
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        log.push_back(RecordedRequest { path: path.to_owned(), headers, body });
        if log.len() > KEPT_REQUESTS {
            log.pop_front();
        }
    }

    pub(crate) fn list(&self) -> Vec<RecordedRequest> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// The state of an engine at one time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SimState {
    /// Random for each start; contained in hand-offs.
    pub engine_id: String,
    /// Number of requests that are being computed.
    pub running: usize,
    /// Number of waiting requests, including those whose KV is being transferred.
    pub waiting: usize,
    /// Number of requests without a client whose blocks are kept until a prefill engine pushes
    /// their KV.
    pub orphans: usize,
    /// Number of blocks that requests can hold.
    pub blocks_total: usize,
    /// Number of blocks that requests and hand-offs hold.
    pub blocks_used: usize,
    /// Of these, the number of blocks that are kept for decode engines.
    pub blocks_pinned: usize,
    /// Number of blocks in the prefix cache.
    pub resident_blocks: usize,
    /// Number of blocks in host memory.
    pub host_blocks: usize,
    /// Number of decode engines' legs that wait for a prefill leg on this engine.
    pub registered: usize,
    /// Number of hand-offs that wait to be pulled.
    pub staged_hand_offs: usize,
    /// Number of decode legs whose blocks are kept for a prefill leg to read.
    pub read_back_pins: usize,
    /// Whether the engine has died (see `do_remote_prefill` without block ids).
    pub dead: bool,
    /// Totals since the start.
    pub totals: Counters,
}

impl SimState {
    /// The sum over two ranks of one engine.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            engine_id: self.engine_id,
            running: self.running + other.running,
            waiting: self.waiting + other.waiting,
            orphans: self.orphans + other.orphans,
            blocks_total: self.blocks_total + other.blocks_total,
            blocks_used: self.blocks_used + other.blocks_used,
            blocks_pinned: self.blocks_pinned + other.blocks_pinned,
            resident_blocks: self.resident_blocks + other.resident_blocks,
            host_blocks: self.host_blocks + other.host_blocks,
            registered: self.registered + other.registered,
            read_back_pins: self.read_back_pins + other.read_back_pins,
            staged_hand_offs: self.staged_hand_offs + other.staged_hand_offs,
            dead: self.dead || other.dead,
            totals: self.totals.with(&other.totals),
        }
    }
}

impl Engine {
    pub(crate) fn state(&self) -> SimState {
        let core = self.core();
        SimState {
            engine_id: self.origin.engine_id.clone(),
            running: core.running(),
            waiting: core.waiting(),
            orphans: core.orphans(),
            blocks_total: core.cache.usable_blocks(),
            blocks_used: core.cache.usable_blocks() - core.cache.free_blocks(),
            blocks_pinned: core.hand_offs.pinned_blocks() + core.pulling_blocks,
            resident_blocks: core.cache.resident_blocks(),
            host_blocks: core.cache.host_blocks(),
            registered: self.registered(),
            staged_hand_offs: core.hand_offs.len(),
            read_back_pins: core.hand_offs.pins(),
            dead: core.dead,
            totals: core.counters.clone(),
        }
    }
}
