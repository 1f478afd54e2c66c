//! Conversations: which prompts continue earlier ones, and how many conversations begin alike.
//!
//! A prompt that begins with all full blocks of an earlier prompt continues the conversation of that
//! prompt; any other prompt begins a conversation. The number of conversations that go through a block
//! says whether the block is part of what many prompts have in common, such as a system prompt, or of
//! the history of one conversation: both are used often.
//!
//! Prompts are kept as a tree of runs of blocks (`runs`), so a prompt costs one step for each run that
//! it consists of, and a copy of its new blocks. A conversation is forgotten when it has not been
//! continued for a time, or when there are too many blocks; the one without a new prompt for longest
//! is forgotten first.

use std::collections::BTreeMap;

use crate::hash::BlockHash;
use crate::runs::{Note, RunId, Runs};

/// The most lengths of shared prefixes that are told of a prompt.
const PREFIXES_MAX: usize = 8;
/// The fewest conversations that are told: a block with fewer of them is part of a history.
const CONVERSATIONS_MIN: u32 = 3;
/// What the number of conversations so far, and of their blocks, keeps of its weight with each prompt.
const KEPT_WEIGHT: f64 = 1.0 - 1.0 / 4096.0;

/// The bounds of what is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConversationBounds {
    /// Maximum number of blocks of all conversations, each counted once.
    pub blocks_max: usize,
    /// Maximum number of runs of blocks: what is common, and what each conversation and each of its
    /// prompts adds. It bounds the memory of short conversations.
    pub runs_max: usize,
    /// The time in milliseconds for which a conversation is remembered after its last prompt.
    pub idle_max_ms: u64,
}

/// At most 8 MiB of hashes and about as much for runs, and an hour: longer than engines keep what is not used.
impl Default for ConversationBounds {
    fn default() -> Self {
        Self { blocks_max: 1 << 20, runs_max: 1 << 16, idle_max_ms: 3_600_000 }
    }
}

/// Leading blocks of a prompt, and how many conversations have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedPrefix {
    /// The number of leading blocks.
    pub blocks: u32,
    /// The number of conversations; at least 3.
    pub conversations: u32,
}

/// What a prompt has in common with conversations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PromptSharing {
    /// The longest first; entries after the last one are empty.
    prefixes: [SharedPrefix; PREFIXES_MAX],
    /// The mean number of blocks that the later prompts of a conversation add to it.
    pub later_blocks: f64,
}

impl PromptSharing {
    /// A prompt with these prefixes in common with others, of which the longest ones are kept.
    pub fn new(prefixes: impl IntoIterator<Item = SharedPrefix>, later_blocks: f64) -> Self {
        let mut sharing = Self { later_blocks, ..Self::default() };
        let longest = prefixes.into_iter().take(PREFIXES_MAX);
        longest.zip(&mut sharing.prefixes).for_each(|(from, to)| *to = from);
        sharing
    }

    /// The prefixes that the prompt shares, the longest first.
    pub fn prefixes(&self) -> impl Iterator<Item = SharedPrefix> {
        self.prefixes.into_iter().take_while(|prefix| prefix.blocks > 0)
    }
}

/// The recent conversations of one model. It has no clock: callers pass a time.
#[derive(Debug)]
pub struct Conversations {
    bounds: ConversationBounds,
    runs: Runs<RunConversations>,
    /// By the number of its last prompt, each conversation; the one without a new prompt for longest is
    /// first.
    last_prompts: BTreeMap<u64, LastPrompt>,
    /// The number of prompts so far.
    prompts: u64,
    runs_count: usize,
    /// The number of blocks of all runs.
    blocks: usize,
    /// Conversations so far, and the blocks that later prompts added to them, each counting less with
    /// every further prompt.
    begun: f64,
    later_blocks: f64,
}

/// The conversations that go through a run.
#[derive(Debug, Default)]
struct RunConversations {
    count: u32,
    /// The conversation whose last prompt ends with the run, by the number of that prompt.
    ends: Option<u64>,
}

impl Note for RunConversations {
    fn cut(&mut self, _first: usize, _blocks: usize) -> Self {
        Self { count: self.count, ends: None }
    }
}

#[derive(Clone, Copy, Debug)]
struct LastPrompt {
    at_ms: u64,
    tail: RunId,
}

impl Conversations {
    /// No conversations.
    pub fn new(bounds: ConversationBounds) -> Self {
        Self {
            bounds,
            runs: Runs::default(),
            last_prompts: BTreeMap::new(),
            prompts: 0,
            runs_count: 0,
            blocks: 0,
            begun: 0.0,
            later_blocks: 0.0,
        }
    }

    /// What a prompt, as the hashes of its full blocks, has in common with conversations.
    pub fn find(&self, hashes: &[BlockHash]) -> PromptSharing {
        let mut prefixes: Vec<SharedPrefix> = Vec::new();
        let (mut known, mut last) = (0, None);
        while let Some((at, alike)) = self.runs.next(last, &hashes[known..]) {
            let run = self.runs.get(at);
            known += alike;
            let prefix = SharedPrefix { blocks: known as u32, conversations: run.note.count };
            if prefix.conversations < CONVERSATIONS_MIN {
                break;
            }
            prefixes.retain(|shorter| shorter.conversations > prefix.conversations);
            prefixes.push(prefix);
            if alike < run.blocks.len() {
                break;
            }
            last = Some(at);
        }
        let later_blocks = if self.begun > 0.0 { self.later_blocks / self.begun } else { 0.0 };
        PromptSharing::new(prefixes.into_iter().rev(), later_blocks)
    }

    /// Remembers a prompt, which continues a conversation or begins one.
    pub fn record(&mut self, now_ms: u64, hashes: &[BlockHash]) {
        let hashes = &hashes[..hashes.len().min(self.bounds.blocks_max)];
        if hashes.is_empty() {
            return;
        }
        self.prompts += 1;
        let (mut known, mut path) = (0, Vec::new());
        while let Some((mut at, alike)) = self.runs.next(path.last().copied(), &hashes[known..]) {
            if alike < self.runs.get(at).blocks.len() {
                at = self.runs.cut(at, alike);
                self.runs_count += 1;
            }
            known += alike;
            path.push(at);
        }
        let (rest, last) = (&hashes[known..], path.last().copied());
        let continued = last.and_then(|last| self.runs.get_mut(last).note.ends.take());
        self.begun *= KEPT_WEIGHT;
        self.later_blocks *= KEPT_WEIGHT;
        match continued {
            Some(before) => {
                self.last_prompts.remove(&before);
                self.later_blocks += rest.len() as f64;
            }
            None => {
                path.iter().for_each(|at| self.runs.get_mut(*at).note.count += 1);
                self.begun += 1.0;
            }
        }
        let tail = match (last, rest) {
            (Some(last), []) => last,
            (last, rest) => self.runs.append(last, rest, RunConversations { count: 1, ends: None }),
        };
        self.blocks += rest.len();
        self.runs_count += usize::from(!rest.is_empty());
        self.runs.get_mut(tail).note.ends = Some(self.prompts);
        self.last_prompts.insert(self.prompts, LastPrompt { at_ms: now_ms, tail });
        self.keep_bounds(now_ms);
    }

    /// The number of conversations.
    pub fn len(&self) -> usize {
        self.last_prompts.len()
    }

    /// Whether no conversation is known.
    pub fn is_empty(&self) -> bool {
        self.last_prompts.is_empty()
    }

    /// The number of blocks of all conversations, each counted once.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    fn keep_bounds(&mut self, now_ms: u64) {
        while let Some((number, oldest)) = self.last_prompts.first_key_value() {
            let is_idle = now_ms.saturating_sub(oldest.at_ms) > self.bounds.idle_max_ms;
            let ConversationBounds { blocks_max, runs_max, .. } = self.bounds;
            if self.blocks <= blocks_max && self.runs_count <= runs_max && !is_idle {
                return;
            }
            let (number, tail) = (*number, oldest.tail);
            self.last_prompts.remove(&number);
            self.forget(tail);
        }
    }

    /// Forgets the conversation whose last prompt ends with a run.
    fn forget(&mut self, tail: RunId) {
        self.runs.get_mut(tail).note.ends = None;
        let mut next = Some(tail);
        while let Some(at) = next {
            let run = self.runs.get_mut(at);
            run.note.count -= 1;
            next = run.parent;
            if run.note.count == 0 {
                self.blocks -= run.blocks.len();
                self.runs_count -= 1;
                self.runs.remove(at);
            }
        }
    }
}
