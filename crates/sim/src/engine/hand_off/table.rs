//! All hand-offs of one prefill engine, staged and ended.

use std::collections::{HashMap, VecDeque};

use tokio::time::Instant;

use super::{PullRequest, base_name, prompt_fingerprint, refused, sampling_fingerprint};
use crate::engine::read_back::check_read;
use crate::engine::request::{End, Request};
use crate::error::ApiError;

/// Number of ended hand-offs that are remembered, so that a late or second use gets a precise
/// error.
const REMEMBERED: usize = 4096;

/// A request whose hand-off was taken from the table, with the end for which its client still
/// waits.
#[derive(Debug)]
pub(crate) struct TakenHandOff {
    pub(crate) request: Request,
    pub(crate) held: Option<(u32, End)>,
    /// Whether the blocks are those of a decode leg, for a prefill leg to read.
    pub(crate) is_pin: bool,
}

#[derive(Debug)]
struct StagedBlocks {
    request: Request,
    held: Option<(u32, End)>,
    ends: Instant,
    /// Whether the blocks are those of a decode leg, for a prefill leg to read.
    is_pin: bool,
}

impl From<StagedBlocks> for TakenHandOff {
    fn from(StagedBlocks { request, held, is_pin, .. }: StagedBlocks) -> Self {
        Self { request, held, is_pin }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum NameState {
    /// A request has reserved the name and may stage it.
    Open,
    Pulled,
    Expired,
}

/// All hand-offs of one prefill engine.
#[derive(Debug, Default)]
pub(crate) struct HandOffTable {
    staged: HashMap<String, StagedBlocks>,
    name_states: HashMap<String, NameState>,
    /// How often the transfer of a name was forgotten.
    forgotten: HashMap<String, u32>,
    /// The prompts of pushes by their names, as fingerprints.
    pushed_prompts: HashMap<String, u64>,
    fate_order: VecDeque<String>,
}

impl HandOffTable {
    /// Number of hand-offs that wait to be pulled.
    pub(crate) fn len(&self) -> usize {
        self.staged.len() - self.pins()
    }

    /// Number of decode legs whose blocks are kept for a prefill leg to read.
    pub(crate) fn pins(&self) -> usize {
        self.staged.values().filter(|staged| staged.is_pin).count()
    }

    pub(crate) fn pinned_blocks(&self) -> usize {
        self.staged.values().map(|staged| staged.request.sequence.blocks().len()).sum()
    }

    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.staged.values().map(|staged| staged.ends).min()
    }

    /// Reserves a request's name, which may be used only once.
    pub(crate) fn open(&mut self, name: &str) -> Result<(), ApiError> {
        if self.staged.contains_key(name) || self.name_states.contains_key(name) {
            return Err(refused("hand_off_reused", "has a name that was used before"));
        }
        self.remember(name.to_owned(), NameState::Open);
        Ok(())
    }

    /// Forgets a name whose request hands nothing over. Another request may have it, but whoever has
    /// waited for it waits in vain.
    pub(crate) fn forget(&mut self, name: &str) {
        if self.forgotten.len() >= REMEMBERED {
            self.forgotten.clear();
        }
        *self.forgotten.entry(name.to_owned()).or_default() += 1;
        self.name_states.remove(name);
    }

    /// How often a name was forgotten.
    pub(crate) fn times_forgotten(&self, name: &str) -> u32 {
        self.forgotten.get(name).copied().unwrap_or_default()
    }

    /// Reserves the name of a push. A real engine would hand the KV of any prompt over under it; the
    /// same prompt may come again, so that a decode engine that still waits gets its KV.
    pub(crate) fn open_push(&mut self, name: &str, fingerprint: u64) -> Result<(), ApiError> {
        if self.pushed_prompts.len() >= REMEMBERED {
            self.pushed_prompts.clear();
        }
        match *self.pushed_prompts.entry(name.to_owned()).or_insert(fingerprint) {
            same if same == fingerprint => Ok(()),
            _ => Err(refused("hand_off_reused", "has the request id of another prompt")),
        }
    }

    /// The name under which a hand-off is staged, for a pull.
    fn staged_name(&self, pull: &PullRequest) -> Option<String> {
        if !pull.is_found_by_id {
            return self.staged.contains_key(&pull.request_id).then(|| pull.request_id.clone());
        }
        self.staged.keys().find(|name| base_name(name) == pull.request_id).cloned()
    }

    /// Keeps a finished request's blocks until they are pulled, or until `ends`.
    pub(crate) fn stage(
        &mut self,
        name: String,
        request: Request,
        held: Option<(u32, End)>,
        ends: Instant,
    ) {
        self.staged.insert(name, StagedBlocks { request, held, ends, is_pin: false });
    }

    /// Keeps a finished decode leg's blocks until they are read, or until `ends`.
    pub(crate) fn pin(&mut self, name: String, request: Request, ends: Instant) {
        self.staged.insert(name, StagedBlocks { request, held: None, ends, is_pin: true });
    }

    /// Removes hand-offs whose lease has ended; the caller must free their blocks.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<TakenHandOff> {
        if self.next_expiry().is_none_or(|ends| ends > now) {
            return Vec::new();
        }
        let over = self.staged.iter().filter(|(_, staged)| staged.ends <= now);
        let over: Vec<String> = over.map(|(name, _)| name.clone()).collect();
        let freed = over.iter().filter_map(|name| self.remove(name)).collect();
        for name in over {
            self.remember(name, NameState::Expired);
        }
        freed
    }

    /// Removes the hand-off of a request whose client has disconnected.
    pub(crate) fn remove_disconnected(&mut self, id: u64) -> Option<TakenHandOff> {
        let waits = |staged: &StagedBlocks| staged.held.is_some() && staged.request.id == id;
        let name = self.staged.iter().find(|(_, staged)| waits(staged))?.0.clone();
        self.remove(&name)
    }

    /// Removes all staged hand-offs, for an engine that dies.
    pub(crate) fn drain(&mut self) -> Vec<TakenHandOff> {
        let staged = self.staged.drain().map(|(_, staged)| staged);
        staged.map(TakenHandOff::from).collect()
    }

    /// Takes a hand-off for a decode engine, once, if everything matches; `None` while it may still
    /// be staged.
    pub(crate) fn take(&mut self, pull: &PullRequest) -> Result<Option<TakenHandOff>, ApiError> {
        let name = self.staged_name(pull);
        let Some(staged) = name.as_ref().and_then(|name| self.staged.get(name)) else {
            return match self.name_states.get(&pull.request_id) {
                Some(NameState::Pulled) => Err(refused("hand_off_reused", "was pulled before")),
                Some(NameState::Expired) => {
                    Err(refused("hand_off_expired", "came after its lease"))
                }
                _ if pull.waits => Ok(None),
                _ => Err(refused("hand_off_unknown", "names no request staged here")),
            };
        };
        let params = &staged.request.params;
        let blocks = staged.request.sequence.blocks();
        if staged.is_pin && pull.read_tokens.is_none() {
            return Err(refused("hand_off_mismatch", "is for the other direction"));
        }
        if let Some(tokens) = pull.read_tokens {
            if !staged.is_pin && tokens == 1 {
                return Err(refused("hand_off_mismatch", "is released as if it were pinned"));
            }
            check_read(&staged.request, pull, tokens)?;
            self.remember(pull.request_id.clone(), NameState::Pulled);
            return Ok(self.remove(&pull.request_id));
        }
        if pull.block_ids.as_ref().is_some_and(|ids| ids != blocks) {
            return Err(refused("hand_off_mismatch", "names other blocks than those staged"));
        }
        // The last token of a sequence has no KV.
        let staged_tokens = staged.request.sequence.tokens().len() as u64 - 1;
        if pull.num_tokens.is_some_and(|tokens| tokens != staged_tokens) {
            return Err(refused("hand_off_mismatch", "has another number of tokens"));
        }
        if prompt_fingerprint(&params.prompt, &params.namespace) != pull.prompt_fingerprint {
            return Err(refused("hand_off_mismatch", "belongs to another prompt"));
        }
        if pull.sampling_fingerprint.is_some_and(|of| of != sampling_fingerprint(params)) {
            return Err(refused("hand_off_mismatch", "was sampled otherwise than decode would"));
        }
        self.remember(pull.request_id.clone(), NameState::Pulled);
        Ok(name.and_then(|name| self.remove(&name)))
    }

    fn remove(&mut self, name: &str) -> Option<TakenHandOff> {
        self.staged.remove(name).map(TakenHandOff::from)
    }

    fn remember(&mut self, name: String, state: NameState) {
        if self.name_states.insert(name.clone(), state).is_none() {
            self.fate_order.push_back(name);
        }
        while self.fate_order.len() > REMEMBERED {
            if let Some(oldest) = self.fate_order.pop_front() {
                self.name_states.remove(&oldest);
            }
        }
    }
}
