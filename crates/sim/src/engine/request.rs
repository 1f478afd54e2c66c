//! A request inside the engine.

use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::hand_off::{HandOff, Source};
use super::read_back::Read;
use crate::cache::{Namespace, Sequence};
use crate::config::SimConfig;
use crate::error::ApiError;
use crate::tokenizer::{EOS_TOKEN, byte_token};

/// Why a reply ended; clients see [`FinishReason::as_str`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FinishReason {
    Length,
    Stop,
}

impl FinishReason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop => "stop",
        }
    }
}

/// The use of another engine's KV by a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RemoteKv {
    None,
    /// Keeps the blocks for a decode engine.
    Stage {
        remote_request_id: String,
        /// Whether the engine pushes the blocks, and forgets who waits for them if it cannot.
        is_pushed: bool,
    },
    /// Fetches the blocks from a prefill engine.
    Pull(Source),
}

/// The parameters of one choice.
#[derive(Debug, Clone)]
pub(crate) struct SampleParams {
    pub(crate) prompt: Vec<u32>,
    pub(crate) namespace: Namespace,
    /// What distinguishes this sample from others of the same prompt: the seed and the index among
    /// `n`. At temperature 0 all samples are equal.
    pub(crate) variation: u64,
    pub(crate) max_tokens: usize,
    pub(crate) min_tokens: usize,
    pub(crate) ignore_eos: bool,
    pub(crate) stops: Vec<String>,
    pub(crate) threshold: Option<f64>,
    /// Number of leading blocks that must be cached; otherwise the request is refused.
    pub(crate) needed_blocks: usize,
    /// Whether the request loses the KV that it pulls, because of a fault.
    pub(crate) preempted: bool,
    pub(crate) remote: RemoteKv,
    /// The pinned KV of a decode engine that a prefill leg reads first.
    pub(crate) reads: Option<Read>,
    /// The engine's own name for the request.
    pub(crate) name: String,
    /// Whether only the first token is computed here, whatever it is and however many are
    /// requested: another engine continues.
    pub(crate) first_token_only: bool,
}

/// The outputs of a request, in order.
#[derive(Debug)]
pub(crate) enum Output {
    /// The request runs; `cached_tokens` of its prompt count as cached.
    Started {
        cached_tokens: usize,
    },
    /// One token, with the reply's end if it is the last.
    Token {
        id: u32,
        end: Option<End>,
    },
    /// The request was refused by `cache_hit_threshold`.
    BelowThreshold,
    Failed(ApiError),
}

/// The end of a reply.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) reason: FinishReason,
    /// The stop string that was found.
    pub(crate) stop: Option<String>,
    pub(crate) hand_off: Option<HandOff>,
}

/// A sampled token.
#[derive(Debug)]
pub(crate) struct SampledToken {
    pub(crate) id: u32,
    pub(crate) end: Option<(FinishReason, Option<String>)>,
}

/// Outputs of all choices of one HTTP request, with the index of the choice.
pub(crate) type OutputSender = mpsc::Sender<(usize, Output)>;

/// A request that the engine holds.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) params: SampleParams,
    pub(crate) sequence: Sequence,
    pub(crate) cached_tokens: usize,
    pub(crate) generated: usize,
    choice: usize,
    out: OutputSender,
    /// Hash of all tokens so far: the next token depends on each of them.
    state: u64,
    text: String,
    /// Cancels `gone` when the request is dropped.
    _gone: DropGuard,
    gone: CancellationToken,
}

impl Request {
    pub(crate) fn new(
        id: u64,
        params: SampleParams,
        config: &SimConfig,
        choice: usize,
        out: OutputSender,
    ) -> Self {
        let sequence = Sequence::new(
            params.prompt.clone(),
            params.namespace.clone(),
            config.block_size,
            config.hash_seed,
        );
        let mut state = xxh3_64(config.model.as_bytes());
        if let Some(adapter) = &params.namespace.adapter_path {
            state = xxh3_64_with_seed(adapter.as_bytes(), state);
        }
        for token in &params.prompt {
            state = mix(state, u64::from(*token));
        }
        if params.variation > 0 {
            state = mix(state, params.variation);
        }
        let gone = CancellationToken::new();
        Self {
            id,
            params,
            sequence,
            cached_tokens: 0,
            generated: 0,
            choice,
            out,
            state,
            text: String::new(),
            _gone: gone.clone().drop_guard(),
            gone,
        }
    }

    /// Cancelled when the request has ended or was removed from the engine.
    pub(crate) fn gone(&self) -> CancellationToken {
        self.gone.clone()
    }

    /// Whether a prefill engine pushes the KV of the prompt.
    pub(crate) fn is_pushed(&self) -> bool {
        matches!(&self.params.remote, RemoteKv::Pull(source) if source.is_pushed)
    }

    pub(crate) fn prompt_tokens(&self) -> usize {
        self.params.prompt.len()
    }

    /// Number of blocks at the end, if the reply becomes as long as requested. The last token is
    /// never computed.
    pub(crate) fn blocks_at_most(&self) -> usize {
        let tokens = self.prompt_tokens() + self.params.max_tokens.max(1) - 1;
        tokens.div_ceil(self.sequence.block_size())
    }

    /// Number of blocks that it may still need.
    pub(crate) fn growth_blocks(&self) -> usize {
        self.blocks_at_most().saturating_sub(self.sequence.blocks().len())
    }

    /// Samples the next token.
    pub(crate) fn sample(&mut self, eos_one_in: u64) -> SampledToken {
        let id = self.next_token(eos_one_in);
        self.generated += 1;
        self.state = mix(self.state, u64::from(id));
        self.sequence.push(id);
        if self.params.first_token_only {
            return SampledToken { id, end: Some((FinishReason::Length, None)) };
        }
        if id == EOS_TOKEN {
            return SampledToken { id, end: Some((FinishReason::Stop, None)) };
        }
        self.text.push_str(&crate::tokenizer::decode(&[id], false));
        let stop = self.params.stops.iter().find(|stop| self.text.ends_with(stop.as_str()));
        let end = match stop {
            Some(stop) if self.generated >= self.params.min_tokens => {
                Some((FinishReason::Stop, Some(stop.clone())))
            }
            _ if self.generated >= self.params.max_tokens => Some((FinishReason::Length, None)),
            _ => None,
        };
        SampledToken { id, end }
    }

    /// Sends an output to the client. The channel has room for every output of a request, so only a
    /// client that disconnected misses one.
    pub(crate) fn send(&self, output: Output) {
        let _ = self.out.try_send((self.choice, output));
    }

    fn next_token(&self, eos_one_in: u64) -> u32 {
        let may_end = !self.params.ignore_eos && self.generated >= self.params.min_tokens;
        if may_end && eos_one_in > 0 && (self.state >> 32).is_multiple_of(eos_one_in) {
            return EOS_TOKEN;
        }
        const PRINTABLE: u64 = (b'~' - b' ' + 1) as u64;
        byte_token(b' ' + (self.state % PRINTABLE) as u8)
    }
}

fn mix(state: u64, value: u64) -> u64 {
    xxh3_64_with_seed(&value.to_le_bytes(), state)
}
