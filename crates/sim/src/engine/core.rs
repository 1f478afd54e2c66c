//! The engine's state and its scheduler, without asynchronous code.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use http::StatusCode;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::counters::Counters;
use super::hand_off::{
    HandOff, HandOffTable, PullRequest, Source, TakenHandOff, base_name, prompt_fingerprint,
    refused, sampling_fingerprint,
};
use super::read_back::Read;
use super::request::{End, FinishReason, Output, OutputSender, RemoteKv, Request, SampleParams};
use crate::cache::{CacheEvent, KvCache};
use crate::config::{DecodeUsage, KvConnector, SimConfig, ThresholdReply};
use crate::error::ApiError;

/// One engine's requests, cache and hand-offs.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) cache: KvCache,
    pub(crate) counters: Counters,
    pub(crate) hand_offs: HandOffTable,
    /// Number of blocks of hand-offs that a decode engine is reading.
    pub(crate) pulling_blocks: usize,
    pub(crate) dead: bool,
    waiting: VecDeque<Request>,
    /// Requests whose KV is being transferred from a prefill engine.
    loading: HashMap<u64, Request>,
    /// Requests without a client whose KV a prefill engine may still push.
    orphans: HashMap<u64, Request>,
    /// Requests whose KV has arrived; they run before new requests.
    loaded: VecDeque<Request>,
    running: Vec<Request>,
    next_id: u64,
}

/// A transfer that a step wants to start.
#[derive(Debug)]
pub(crate) struct PullJob {
    pub(crate) id: u64,
    pub(crate) source: Source,
    pub(crate) body: PullRequest,
    /// Cancelled when the request is removed from the engine.
    pub(crate) gone: CancellationToken,
}

/// What one step does.
#[derive(Debug, Default)]
pub(crate) struct EngineStep {
    pub(crate) computed_prompt_tokens: u64,
    /// Blocks that are loaded from host memory first.
    pub(crate) loaded_blocks: u64,
    pub(crate) pulls: Vec<PullJob>,
    pub(crate) events: Vec<CacheEvent>,
    /// Whether any sequence is computed.
    pub(crate) runs: bool,
}

/// The last token of a reply.
struct LastToken {
    id: u32,
    end: End,
}

/// The engine's identity, which hand-offs contain so that they can be fetched.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) engine_id: String,
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Topic of the engine's KV events.
    pub(crate) topic: String,
}

impl Core {
    pub(crate) fn new(config: &SimConfig) -> Self {
        Self {
            cache: KvCache::new(config.kv_blocks, config.block_size)
                .with_host_blocks(config.host_blocks)
                .with_groups(config.cache_groups.clone())
                .dropping_last_block(config.drops_last_block),
            counters: Counters::default(),
            hand_offs: HandOffTable::default(),
            pulling_blocks: 0,
            dead: false,
            waiting: VecDeque::new(),
            loading: HashMap::new(),
            orphans: HashMap::new(),
            loaded: VecDeque::new(),
            running: Vec::new(),
            next_id: 0,
        }
    }

    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    /// Number of requests that do not run yet, including those whose KV is being transferred.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len() + self.loading.len() + self.loaded.len()
    }

    /// Number of requests without a client whose blocks are kept until their KV is pushed.
    pub(crate) fn orphans(&self) -> usize {
        self.orphans.len()
    }

    /// Puts a request into the queue.
    pub(crate) fn submit(
        &mut self,
        params: SampleParams,
        config: &SimConfig,
        choice: usize,
        out: OutputSender,
    ) -> Result<u64, ApiError> {
        if self.dead {
            return Err(ApiError::engine_dead());
        }
        if self.waiting.len() >= config.max_waiting {
            let message = "The engine's queue is full.";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message));
        }
        match (config.connector, &params.remote) {
            (KvConnector::NixlPush, RemoteKv::Stage { remote_request_id, .. }) => {
                let fingerprint = prompt_fingerprint(&params.prompt, &params.namespace);
                self.hand_offs.open_push(base_name(remote_request_id), fingerprint)?;
            }
            (connector, RemoteKv::Stage { remote_request_id, .. }) if connector.is_concurrent() => {
                self.hand_offs.open(remote_request_id)?;
            }
            _ => {}
        }
        let id = self.next_id;
        self.next_id += 1;
        self.waiting.push_back(Request::new(id, params, config, choice, out));
        Ok(id)
    }

    /// Removes a request wherever it is. Does nothing if it has ended.
    pub(crate) fn abort(&mut self, id: u64) {
        let place = |queue: &VecDeque<Request>| queue.iter().position(|request| request.id == id);
        let request = if let Some(at) = self.running.iter().position(|request| request.id == id) {
            Some(self.running.remove(at))
        } else if let Some(at) = place(&self.waiting) {
            self.waiting.remove(at)
        } else if let Some(at) = place(&self.loaded) {
            self.loaded.remove(at)
        } else if let Some(request) = self.loading.get(&id)
            && request.is_pushed()
        {
            // The prefill engine may write into the blocks at any time.
            self.counters.aborted += 1;
            self.orphans.extend(self.loading.remove(&id).map(|request| (id, request)));
            None
        } else if let Some(request) = self.loading.remove(&id) {
            Some(request)
        } else {
            self.hand_offs.remove_disconnected(id).map(|taken| taken.request)
        };
        if let Some(mut request) = request {
            self.counters.aborted += 1;
            self.forget_transfer(&request);
            self.cache.release(&mut request.sequence);
        }
    }

    /// Forgets the transfer of a prefill request that hands nothing over, with the decode engine that
    /// waits for it.
    fn forget_transfer(&mut self, request: &Request) {
        if let RemoteKv::Stage { remote_request_id, is_pushed: true } = &request.params.remote {
            self.hand_offs.forget(remote_request_id);
        }
    }

    /// Frees the blocks of hand-offs whose lease has ended.
    pub(crate) fn expire_leases(&mut self, now: Instant) {
        for TakenHandOff { mut request, held, is_pin } in self.hand_offs.expire(now) {
            match is_pin {
                true => self.counters.pins_expired += 1,
                false => self.counters.hand_offs_expired += 1,
            }
            if held.is_some() {
                let late = refused("hand_off_unmet", "was not fetched in time");
                self.fail(&mut request, late);
            } else {
                self.cache.release(&mut request.sequence);
            }
        }
    }

    /// Ends everything, like a crashed engine core.
    pub(crate) fn die(&mut self) {
        self.dead = true;
        let mut lost: Vec<Request> = self.running.drain(..).collect();
        lost.extend(self.waiting.drain(..));
        lost.extend(self.loaded.drain(..));
        lost.extend(self.loading.drain().map(|(_, request)| request));
        lost.extend(self.orphans.drain().map(|(_, request)| request));
        for mut request in lost {
            self.fail(&mut request, ApiError::engine_dead());
        }
        for TakenHandOff { mut request, held, .. } in self.hand_offs.drain() {
            match held {
                Some(_) => self.fail(&mut request, ApiError::engine_dead()),
                None => self.cache.release(&mut request.sequence),
            }
        }
    }

    /// Starts a step: first running sequences, then new ones. `None` if there is nothing to do.
    pub(crate) fn begin_step(&mut self, config: &SimConfig) -> Option<EngineStep> {
        let mut step = EngineStep::default();
        for request in &mut self.running {
            let tokens = request.sequence.tokens().len();
            // Admission reserved blocks for every running sequence's growth.
            let roomy = self.cache.grow(&mut request.sequence, tokens);
            debug_assert!(roomy, "growth was reserved at admission");
            self.cache.register(&mut request.sequence, tokens);
        }
        while self.running.len() < config.max_num_seqs {
            let Some(mut request) = self.loaded.pop_front() else {
                break;
            };
            let tokens = request.prompt_tokens();
            self.cache.register(&mut request.sequence, tokens);
            if request.params.reads.is_some() {
                step.computed_prompt_tokens += (tokens - request.cached_tokens) as u64;
            }
            self.running.push(request);
        }
        while self.running.len() < config.max_num_seqs && self.admit_next(config, &mut step) {}
        step.runs = !self.running.is_empty();
        if !step.runs && step.pulls.is_empty() {
            // Events are only published with a step: a cleared cache is announced with the next
            // request.
            return None;
        }
        step.events = self.cache.take_events();
        self.counters.kv_events += step.events.len() as u64;
        Some(step)
    }

    /// Ends a step: one token for every running sequence.
    pub(crate) fn end_step(&mut self, config: &SimConfig, origin: &Origin, now: Instant) {
        self.counters.steps += 1;
        let mut at = 0;
        while at < self.running.len() {
            self.counters.generation_tokens += 1;
            let sampled = self.running[at].sample(config.eos_one_in);
            if config.connector == KvConnector::SharedStorage && self.running[at].generated == 1 {
                let request = &self.running[at];
                let (tokens, block_size) = (request.prompt_tokens(), config.block_size);
                config.storage.store(request.sequence.hashes(), tokens, block_size);
            }
            match sampled.end {
                None => {
                    self.running[at].send(Output::Token { id: sampled.id, end: None });
                    at += 1;
                }
                Some((reason, stop)) => {
                    let request = self.running.remove(at);
                    let end = End { reason, stop, hand_off: None };
                    self.finish(request, LastToken { id: sampled.id, end }, config, origin, now);
                }
            }
        }
    }

    /// Handles the result of a transfer.
    pub(crate) fn pull_ended(&mut self, id: u64, result: Result<(), ApiError>, config: &SimConfig) {
        // The client may have disconnected meanwhile.
        let Some(mut request) = self.loading.remove(&id) else {
            if let Some(mut orphan) = self.orphans.remove(&id) {
                self.cache.release(&mut orphan.sequence);
            }
            return;
        };
        if let Some(read) = request.params.reads.clone() {
            match result {
                Err(error) if !read.is_release() => self.fail(&mut request, error),
                _ => self.read_ended(request, &read, config),
            }
            return;
        }
        match result {
            Ok(()) => {
                let hit = request.cached_tokens as u64;
                let moved = request.prompt_tokens() as u64 - hit;
                self.counters.external_kv_transfer_tokens += moved;
                self.counters.prompt_tokens += request.prompt_tokens() as u64;
                self.counters.local_cache_hit_tokens += hit;
                let cached_tokens = reported_after_transfer(&request, config);
                if request.params.preempted && request.params.threshold.is_some_and(|t| t > 0.0) {
                    self.refuse_below_threshold(&request, 0, config);
                    self.cache.release(&mut request.sequence);
                    return;
                }
                request.send(Output::Started { cached_tokens });
                self.loaded.push_back(request);
            }
            Err(error) => self.fail(&mut request, error),
        }
    }

    /// Lets a prefill leg run whose KV has been read, or whose owner knows that it is not needed.
    fn read_ended(&mut self, mut request: Request, read: &Read, config: &SimConfig) {
        let hit = request.cached_tokens;
        let moved = read.wanted_tokens(hit, config);
        request.cached_tokens += moved;
        let computed = request.prompt_tokens() - request.cached_tokens;
        self.counters.external_kv_transfer_tokens += moved as u64;
        self.counters.prompt_tokens += request.prompt_tokens() as u64;
        self.counters.local_cache_hit_tokens += hit as u64;
        self.counters.local_compute_tokens += computed as u64;
        request.send(Output::Started { cached_tokens: request.cached_tokens });
        self.loaded.push_back(request);
    }

    /// Takes the next waiting request. False if there is none or it does not fit.
    fn admit_next(&mut self, config: &SimConfig, step: &mut EngineStep) -> bool {
        let Some(mut request) = self.waiting.pop_front() else {
            return false;
        };
        let hit_tokens = self.cache.hit_blocks(&request.sequence) * config.block_size;
        let hit_blocks = hit_tokens / config.block_size;
        let (held_blocks, loaded_blocks) =
            self.cache.loadable_blocks(&request.sequence, hit_blocks);
        let stored_tokens =
            stored_tokens(&request, hit_tokens, config).max(held_blocks * config.block_size);
        if self.gate(&request, hit_tokens + stored_tokens, config) {
            return true;
        }
        if self.would_wait_for_ever(&request, hit_tokens, config) {
            self.fail(&mut request, refused("hand_off_refused", "is to be read into a full cache"));
            return true;
        }
        let prompt_blocks = request.prompt_tokens().div_ceil(config.block_size);
        let keep_free = self.reserved_blocks() + request.blocks_at_most() - prompt_blocks;
        if self.cache.admit(&mut request.sequence, keep_free).is_none() {
            self.waiting.push_front(request);
            return false;
        }
        request.cached_tokens = hit_tokens;
        if let RemoteKv::Pull(source) = &request.params.remote {
            let lacking = prompt_blocks - hit_tokens / config.block_size;
            if source.block_ids.as_ref().is_some_and(|ids| ids.len() < lacking) {
                self.counters.hand_offs_misused += 1;
                self.fail(&mut request, ApiError::engine_dead());
                self.die();
                return false;
            }
            step.pulls.push(pull_job(&request, source.clone(), config));
            self.loading.insert(request.id, request);
            return true;
        }
        if let Some(read) = request.params.reads.clone() {
            let body = read.question(&request, config);
            let (id, source, gone) = (request.id, read.source, request.gone());
            step.pulls.push(PullJob { id, source, body, gone });
            self.loading.insert(id, request);
            return true;
        }
        request.cached_tokens += stored_tokens;
        step.loaded_blocks += loaded_blocks as u64;
        let prompt_tokens = request.prompt_tokens();
        self.cache.register(&mut request.sequence, prompt_tokens);
        let computed = (prompt_tokens - request.cached_tokens) as u64;
        self.counters.external_kv_transfer_tokens += stored_tokens as u64;
        step.computed_prompt_tokens += computed;
        self.counters.prompt_tokens += prompt_tokens as u64;
        self.counters.local_compute_tokens += computed;
        self.counters.local_cache_hit_tokens += hit_tokens as u64;
        request.send(Output::Started { cached_tokens: request.cached_tokens });
        self.running.push(request);
        true
    }

    /// Whether a leg that reads KV comes when nearly all blocks are in use. The real engine may
    /// preempt it for another request, and then neither continues it nor frees its blocks.
    fn would_wait_for_ever(
        &self,
        request: &Request,
        hit_tokens: usize,
        config: &SimConfig,
    ) -> bool {
        let reads = request.params.reads.as_ref();
        let wanted = reads.map_or(0, |read| read.wanted_tokens(hit_tokens, config));
        wanted > 0 && self.cache.free_blocks() < self.cache.usable_blocks() / 20
    }

    /// Refuses a request whose cached share is below its threshold. KV that comes from a prefill
    /// engine counts as cached here.
    fn gate(&mut self, request: &Request, hit_tokens: usize, config: &SimConfig) -> bool {
        let threshold = request.params.threshold.unwrap_or(0.0);
        let pulls = matches!(request.params.remote, RemoteKv::Pull(_));
        // The comparison is multiplied out, so that an empty prompt causes no division by zero.
        let enough = hit_tokens as f64 >= threshold * request.prompt_tokens() as f64
            && hit_tokens >= request.params.needed_blocks * config.block_size;
        if pulls || enough {
            return false;
        }
        self.refuse_below_threshold(request, hit_tokens, config);
        true
    }

    fn refuse_below_threshold(
        &mut self,
        request: &Request,
        cached_tokens: usize,
        config: &SimConfig,
    ) {
        self.counters.finished_cache_threshold += 1;
        // A status can only be sent before anything else.
        if config.threshold_reply != ThresholdReply::Status412 {
            request.send(Output::Started { cached_tokens });
        }
        request.send(Output::BelowThreshold);
    }

    /// Ends a request with its last token; its blocks are freed, or kept for a decode engine.
    fn finish(
        &mut self,
        mut request: Request,
        last: LastToken,
        config: &SimConfig,
        origin: &Origin,
        now: Instant,
    ) {
        let LastToken { id, mut end } = last;
        match end.reason {
            FinishReason::Length => self.counters.finished_length += 1,
            FinishReason::Stop => self.counters.finished_stop += 1,
        }
        // The front end finds stop strings, and aborts the request: nothing of it is kept.
        let is_aborted = end.stop.is_some();
        // Only a reply that ended because of its length is continued by another engine; an engine
        // that pushes does so in any case.
        let continues = !is_aborted
            && (end.reason == FinishReason::Length || config.connector == KvConnector::NixlPush);
        let name = match &request.params.remote {
            RemoteKv::Stage { remote_request_id, .. } if continues => remote_request_id.clone(),
            RemoteKv::Pull(_) if config.bidirectional_ttl_ms.is_some() && !is_aborted => {
                let ttl = Duration::from_millis(config.bidirectional_ttl_ms.unwrap_or(0));
                let name = request.params.name.clone();
                let hand_off = hand_off_of(&request, name.clone(), config, origin);
                let pinned_until_s = Some(now.elapsed().as_secs_f64() + ttl.as_secs_f64());
                end.hand_off = Some(HandOff { pinned_until_s, ..hand_off });
                self.counters.pins_made += 1;
                request.send(Output::Token { id, end: Some(end) });
                self.hand_offs.pin(name, request, now + ttl);
                return;
            }
            _ => {
                self.forget_transfer(&request);
                request.send(Output::Token { id, end: Some(end) });
                self.cache.release(&mut request.sequence);
                return;
            }
        };
        self.counters.hand_offs_staged += 1;
        let lease = Duration::from_millis(match config.connector {
            KvConnector::Sglang => config.rendezvous_timeout_ms,
            _ => config.lease_ms,
        });
        if config.connector == KvConnector::Sglang {
            // The prefill leg ends only when the decode engine has its KV.
            self.hand_offs.stage(name, request, Some((id, end)), now + lease);
            return;
        }
        if matches!(config.connector, KvConnector::Nixl | KvConnector::NixlPush) {
            end.hand_off = Some(hand_off_of(&request, name.clone(), config, origin));
        }
        request.send(Output::Token { id, end: Some(end) });
        self.hand_offs.stage(name, request, None, now + lease);
    }

    fn fail(&mut self, request: &mut Request, error: ApiError) {
        self.counters.failed += 1;
        self.counters.hand_offs_misused += u64::from(error.is_misuse());
        request.send(Output::Failed(error));
        self.cache.release(&mut request.sequence);
    }

    /// Number of blocks that admitted requests may still need.
    fn reserved_blocks(&self) -> usize {
        let admitted = self.running.iter().chain(self.loading.values()).chain(&self.loaded);
        admitted.map(Request::growth_blocks).sum()
    }
}

fn hand_off_of(request: &Request, name: String, config: &SimConfig, origin: &Origin) -> HandOff {
    HandOff {
        block_ids: request.sequence.blocks().to_vec(),
        engine_id: origin.engine_id.clone(),
        request_id: name,
        host: origin.host.clone(),
        port: origin.port,
        // The last token was sampled, but its KV was not computed.
        num_tokens: request.sequence.tokens().len() - 1,
        prefill_cached_tokens: match config.decode_usage {
            DecodeUsage::RemotePrefill => Some(request.cached_tokens),
            DecodeUsage::WholePrompt => None,
        },
        is_pushed: config.connector == KvConnector::NixlPush,
        pinned_until_s: None,
    }
}

/// Number of tokens in the shared storage beyond those hit here.
fn stored_tokens(request: &Request, hit_tokens: usize, config: &SimConfig) -> usize {
    if config.connector != KvConnector::SharedStorage {
        return 0;
    }
    let (hashes, block_size) = (request.sequence.hashes(), config.block_size);
    let from = hit_tokens / block_size;
    config.storage.found(hashes, from, request.prompt_tokens(), block_size) * block_size
}

fn pull_job(request: &Request, source: Source, config: &SimConfig) -> PullJob {
    let prompt_blocks = request.prompt_tokens().div_ceil(config.block_size);
    let params = &request.params;
    let samples_alike = config.connector == KvConnector::Sglang;
    let body = PullRequest {
        engine_id: source.engine_id.clone(),
        request_id: source.name.clone(),
        block_ids: source.block_ids.clone(),
        num_tokens: source.num_tokens,
        sampling_fingerprint: samples_alike.then(|| sampling_fingerprint(params)),
        waits: source.waits,
        is_found_by_id: source.is_found_by_id,
        kv_dtype: config.kv_dtype.clone(),
        prompt_fingerprint: prompt_fingerprint(&params.prompt, &params.namespace),
        wanted_blocks: (prompt_blocks - request.cached_tokens / config.block_size) as u64,
        read_tokens: None,
    };
    PullJob { id: request.id, source, body, gone: request.gone() }
}

/// The cached tokens that the decode leg reports. Without the prefill leg's figure in the hand-off,
/// every version reports the whole prompt.
fn reported_after_transfer(request: &Request, config: &SimConfig) -> usize {
    match (&request.params.remote, config.decode_usage) {
        (RemoteKv::Pull(source), DecodeUsage::RemotePrefill) => {
            source.prefill_cached_tokens.unwrap_or_else(|| request.prompt_tokens())
        }
        _ => request.prompt_tokens(),
    }
}
