//! Hand-offs: blocks that a prefill engine keeps for one decode engine.

mod table;

use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::request::SampleParams;
use crate::cache::Namespace;
use crate::error::ApiError;
pub(crate) use table::{HandOffTable, TakenHandOff};

/// `kv_transfer_params` of a prefill reply, in vLLM's NIXL shape.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HandOff {
    pub(crate) block_ids: Vec<u32>,
    pub(crate) engine_id: String,
    pub(crate) request_id: String,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) num_tokens: usize,
    /// Missing in hand-offs of older engines.
    pub(crate) prefill_cached_tokens: Option<usize>,
    /// Whether the engine pushes the blocks by itself.
    pub(crate) is_pushed: bool,
    /// For blocks of a decode leg that a prefill leg may read: when the pin ends, in seconds of the
    /// engine's own clock.
    pub(crate) pinned_until_s: Option<f64>,
}

impl HandOff {
    /// The hand-off with a host that is reserved for documentation.
    pub(crate) fn of_a_stranger(self) -> Self {
        Self { host: "192.0.2.1".to_owned(), ..self }
    }

    /// The hand-off without its last block and a token.
    pub(crate) fn shortened(mut self) -> Self {
        self.block_ids.pop();
        self.num_tokens -= 1;
        self
    }

    pub(crate) fn to_json(&self) -> Value {
        let mut params = json!({
            "do_remote_prefill": self.pinned_until_s.is_none(),
            "do_remote_decode": self.pinned_until_s.is_some(),
            "remote_block_ids": [self.block_ids],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.num_tokens,
        });
        if self.is_pushed {
            params["transfer_mode"] = json!("push");
        } else {
            params["remote_blocks_expiry_time"] = json!(self.pinned_until_s);
            params["transfer_mode"] = json!("pull");
        }
        if let Some(cached) = self.prefill_cached_tokens {
            params["remote_prefill_cached_tokens"] = json!(cached);
        }
        params
    }
}

/// Where a decode engine fetches its prompt's KV.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Source {
    /// The prefill engine's name for the prefill request.
    pub(crate) name: String,
    /// The prefill engine's id, if the decode leg contains it.
    pub(crate) engine_id: Option<String>,
    /// The blocks, if the decode leg contains them.
    pub(crate) block_ids: Option<Vec<u32>>,
    /// The number of tokens in these blocks, if the decode leg contains it.
    pub(crate) num_tokens: Option<u64>,
    pub(crate) host: String,
    pub(crate) port: u16,
    /// The prefill engine's cached tokens, if the decode leg contains them.
    pub(crate) prefill_cached_tokens: Option<usize>,
    /// Whether the legs were sent at once, so that the prefill leg may be late.
    pub(crate) waits: bool,
    /// Whether the prefill engine pushes: the decode engine keeps its blocks until they arrive,
    /// whatever happens.
    pub(crate) is_pushed: bool,
    /// Whether the prefill engine finds the other leg by the id of the request.
    pub(crate) is_found_by_id: bool,
}

impl Source {
    /// Parses NIXL's parameters of a decode leg. `None` if a field is missing or has another type.
    pub(crate) fn from_nixl(params: &Value) -> Option<Self> {
        let groups = params["remote_block_ids"].as_array()?;
        let ids = groups.first()?.as_array()?;
        let block_ids =
            ids.iter().map(|id| id.as_u64()?.try_into().ok()).collect::<Option<Vec<u32>>>()?;
        Some(Self {
            name: params["remote_request_id"].as_str()?.to_owned(),
            engine_id: Some(params["remote_engine_id"].as_str()?.to_owned()),
            block_ids: Some(block_ids),
            num_tokens: Some(params["remote_num_tokens"].as_u64()?),
            host: params["remote_host"].as_str()?.to_owned(),
            port: params["remote_port"].as_u64()?.try_into().ok()?,
            prefill_cached_tokens: params["remote_prefill_cached_tokens"]
                .as_u64()
                .map(|n| n as usize),
            waits: false,
            is_pushed: false,
            is_found_by_id: false,
        })
    }

    /// Parses the parameters of a decode leg that is pushed; `name` is its own, by which the prefill
    /// engine finds the other leg.
    pub(crate) fn from_push(params: &Value, name: &str) -> Option<Self> {
        // The real engine needs it, and does not use its value.
        params["remote_request_id"].as_str()?;
        params["tp_size"].as_u64()?;
        let (host, port) = (params["remote_host"].as_str()?, params["remote_port"].as_u64()?);
        Some(Self {
            engine_id: Some(params["remote_engine_id"].as_str()?.to_owned()),
            is_pushed: true,
            is_found_by_id: true,
            ..Self::meeting(base_name(name), host, port.try_into().ok()?)
        })
    }

    /// Parses Mooncake's parameters of a decode leg.
    pub(crate) fn from_mooncake(params: &Value) -> Option<Self> {
        let bootstrap = params["remote_bootstrap_addr"].as_str()?.strip_prefix("http://")?;
        let (host, port) = bootstrap.rsplit_once(':')?;
        Some(Self {
            engine_id: Some(params["remote_engine_id"].as_str()?.to_owned()),
            is_pushed: true,
            ..Self::meeting(params["transfer_id"].as_str()?, host, port.parse().ok()?)
        })
    }

    /// A source at which the legs meet under a name that both contain.
    pub(crate) fn meeting(name: &str, host: &str, port: u16) -> Self {
        Self {
            name: name.to_owned(),
            engine_id: None,
            block_ids: None,
            num_tokens: None,
            host: host.to_owned(),
            port,
            prefill_cached_tokens: None,
            waits: true,
            is_pushed: false,
            is_found_by_id: false,
        }
    }
}

/// A decode engine's request for a hand-off's KV.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PullRequest {
    pub(crate) engine_id: Option<String>,
    pub(crate) request_id: String,
    pub(crate) block_ids: Option<Vec<u32>>,
    /// Number of tokens that the decode engine expects in these blocks.
    pub(crate) num_tokens: Option<u64>,
    /// [`sampling_fingerprint`] of the decode leg, if the prefill engine samples its first token.
    pub(crate) sampling_fingerprint: Option<u64>,
    /// Whether the prefill engine may still be computing.
    pub(crate) waits: bool,
    /// Whether the prefill engine finds the other leg by the id of the request, for which the decode
    /// engine waits for ever.
    pub(crate) is_found_by_id: bool,
    /// The data type of the decode engine's KV.
    pub(crate) kv_dtype: String,
    /// [`prompt_fingerprint`] of the prompt that the decode engine continues.
    pub(crate) prompt_fingerprint: u64,
    /// Number of blocks that the decode engine lacks.
    pub(crate) wanted_blocks: u64,
    /// Number of leading tokens that a prefill engine reads back; `None` for a decode engine that
    /// pulls a hand-off. The fingerprint is that of these tokens then.
    pub(crate) read_tokens: Option<usize>,
}

/// An engine's name for a request without the random suffix: the same for both legs of a push.
pub(crate) fn base_name(name: &str) -> &str {
    name.rsplit_once('-').map_or(name, |(base, _)| base)
}

/// Equal only for equal prompts with equal images and adapters, whose KV is interchangeable.
pub(crate) fn prompt_fingerprint(prompt: &[u32], namespace: &Namespace) -> u64 {
    let mut bytes: Vec<u8> = prompt.iter().flat_map(|token| token.to_le_bytes()).collect();
    bytes.extend_from_slice(namespace.adapter_path.as_deref().unwrap_or_default().as_bytes());
    for one in &namespace.media {
        bytes.extend_from_slice(one.identifier.as_bytes());
    }
    xxh3_64_with_seed(&bytes, prompt.len() as u64)
}

/// Equal for legs with the same sampling: SGLang's prefill engine samples the first token.
pub(crate) fn sampling_fingerprint(params: &SampleParams) -> u64 {
    let bounds =
        (params.max_tokens, params.min_tokens, params.ignore_eos, params.variation, &params.stops);
    xxh3_64_with_seed(format!("{bounds:?}").as_bytes(), 0)
}

/// An error about a hand-off. The status is 400 for errors of the client, and 500 if the cause is
/// time or another engine.
pub(crate) fn refused(code: &str, what: &str) -> ApiError {
    let status = match code {
        "hand_off_reused" | "hand_off_mismatch" => StatusCode::BAD_REQUEST,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    ApiError {
        param: Some("kv_transfer_params"),
        ..ApiError::new(status, format!("The hand-off {what}."))
    }
    .with_code(code)
}
