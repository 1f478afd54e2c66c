//! Hand-offs: blocks that a prefill engine keeps for one decode engine.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::request::Request;
use crate::cache::{Identity, Sequence};
use crate::error::ApiError;

/// Hand-offs that are over are remembered, so that a late or second use gets
/// an error that says so.
const REMEMBERED: usize = 4096;

/// `kv_transfer_params` of a prefill reply, in vLLM's NIXL shape.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Handoff {
    pub(crate) block_ids: Vec<u32>,
    pub(crate) engine_id: String,
    pub(crate) request_id: String,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) num_tokens: usize,
    /// Missing in hand-offs of older engines.
    pub(crate) prefill_cached_tokens: Option<usize>,
}

impl Handoff {
    pub(crate) fn to_json(&self) -> Value {
        let mut params = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [self.block_ids],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.num_tokens,
            "remote_blocks_expiry_time": null,
            "transfer_mode": "pull",
        });
        if let Some(cached) = self.prefill_cached_tokens {
            params["remote_prefill_cached_tokens"] = json!(cached);
        }
        params
    }

    /// Reads what a decode leg got. `None` when a field is missing or has another type.
    pub(crate) fn from_json(params: &Value) -> Option<Self> {
        let groups = params["remote_block_ids"].as_array()?;
        let ids = groups.first()?.as_array()?;
        let block_ids =
            ids.iter().map(|id| id.as_u64()?.try_into().ok()).collect::<Option<Vec<u32>>>()?;
        Some(Self {
            block_ids,
            engine_id: params["remote_engine_id"].as_str()?.to_owned(),
            request_id: params["remote_request_id"].as_str()?.to_owned(),
            host: params["remote_host"].as_str()?.to_owned(),
            port: params["remote_port"].as_u64()?.try_into().ok()?,
            num_tokens: params["remote_num_tokens"].as_u64()?.try_into().ok()?,
            prefill_cached_tokens: params["remote_prefill_cached_tokens"]
                .as_u64()
                .map(|n| n as usize),
        })
    }
}

/// What a decode engine sends to fetch a hand-off's KV.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PullRequest {
    pub(crate) engine_id: String,
    pub(crate) request_id: String,
    pub(crate) block_ids: Vec<u32>,
    /// [`prompt_fingerprint`] of what the decode engine wants to continue.
    pub(crate) prompt_fingerprint: u64,
    /// Blocks that the decode engine lacks.
    pub(crate) wanted_blocks: u64,
}

/// Equal only for equal prompts under equal adapters: the KV of one serves the other.
pub(crate) fn prompt_fingerprint(prompt: &[u32], identity: &Identity) -> u64 {
    let mut bytes: Vec<u8> = prompt.iter().flat_map(|token| token.to_le_bytes()).collect();
    bytes.extend_from_slice(identity.adapter.as_deref().unwrap_or_default().as_bytes());
    xxh3_64_with_seed(&bytes, prompt.len() as u64)
}

#[derive(Debug)]
struct Staged {
    sequence: Sequence,
    prompt_fingerprint: u64,
    ends: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Pulled,
    Expired,
}

/// All hand-offs of one prefill engine.
#[derive(Debug, Default)]
pub(crate) struct HandoffTable {
    staged: HashMap<String, Staged>,
    fates: HashMap<String, Fate>,
    fate_order: VecDeque<String>,
}

impl HandoffTable {
    pub(crate) fn len(&self) -> usize {
        self.staged.len()
    }

    pub(crate) fn pinned_blocks(&self) -> usize {
        self.staged.values().map(|staged| staged.sequence.blocks().len()).sum()
    }

    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.staged.values().map(|staged| staged.ends).min()
    }

    /// Keeps a finished request's blocks until they are pulled or the lease ends.
    pub(crate) fn stage(&mut self, name: String, request: Request, now: Instant, lease: Duration) {
        let prompt_fingerprint = prompt_fingerprint(&request.ask.prompt, &request.ask.identity);
        let staged = Staged { sequence: request.sequence, prompt_fingerprint, ends: now + lease };
        self.staged.insert(name, staged);
    }

    /// Hand-offs whose lease is over; their blocks are the caller's to release.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Sequence> {
        if self.next_expiry().is_none_or(|ends| ends > now) {
            return Vec::new();
        }
        let over: Vec<String> = self
            .staged
            .iter()
            .filter(|(_, staged)| staged.ends <= now)
            .map(|(name, _)| name.clone())
            .collect();
        let mut freed = Vec::with_capacity(over.len());
        for name in over {
            if let Some(staged) = self.staged.remove(&name) {
                freed.push(staged.sequence);
            }
            self.remember(name, Fate::Expired);
        }
        freed
    }

    /// Everything that is staged, for an engine that dies.
    pub(crate) fn drain(&mut self) -> Vec<Sequence> {
        self.staged.drain().map(|(_, staged)| staged.sequence).collect()
    }

    /// Takes a hand-off for a decode engine, once, if everything fits.
    pub(crate) fn take(&mut self, pull: &PullRequest) -> Result<Sequence, ApiError> {
        let Some(staged) = self.staged.get(&pull.request_id) else {
            return Err(match self.fates.get(&pull.request_id) {
                Some(Fate::Pulled) => refused("handoff_reused", "was pulled before"),
                Some(Fate::Expired) => refused("handoff_expired", "came after its lease"),
                None => refused("handoff_unknown", "names no request staged here"),
            });
        };
        if staged.sequence.blocks() != pull.block_ids {
            return Err(refused("handoff_mismatch", "names other blocks than those staged"));
        }
        if staged.prompt_fingerprint != pull.prompt_fingerprint {
            return Err(refused("handoff_mismatch", "belongs to another prompt"));
        }
        self.remember(pull.request_id.clone(), Fate::Pulled);
        match self.staged.remove(&pull.request_id) {
            Some(staged) => Ok(staged.sequence),
            None => Err(refused("handoff_unknown", "names no request staged here")),
        }
    }

    fn remember(&mut self, name: String, fate: Fate) {
        if self.fates.insert(name.clone(), fate).is_none() {
            self.fate_order.push_back(name);
        }
        while self.fate_order.len() > REMEMBERED {
            if let Some(oldest) = self.fate_order.pop_front() {
                self.fates.remove(&oldest);
            }
        }
    }
}

/// An error about a hand-off. What the client got wrong is 400, what time or
/// another engine took away is 500.
pub(crate) fn refused(code: &str, what: &str) -> ApiError {
    let status = match code {
        "handoff_reused" | "handoff_mismatch" => StatusCode::BAD_REQUEST,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    ApiError {
        param: Some("kv_transfer_params"),
        ..ApiError::new(status, format!("The hand-off {what}."))
    }
    .with_code(code)
}
