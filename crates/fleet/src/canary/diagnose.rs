//! Derives a diagnosis from a canary's result. Pure.

use super::Cause;
use crate::event_stats::EventCounts;

/// Tokens of the prompt in its two forms, as far as they are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tokens {
    /// As a chat, by the template.
    pub(super) chat: Option<Vec<u32>>,
    /// As plain text.
    pub(super) plain: Option<Vec<u32>>,
}

/// What a canary says of its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It agrees with the router.
    Agree,
    /// It does not.
    Differ(Cause),
    /// Nobody can tell; why, in a word.
    Unclear(&'static str),
}

/// What came of the prompt's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Blocks {
    /// Full blocks of the prompt.
    pub(super) wanted: u32,
    /// Leading blocks of it that the index has of the worker.
    pub(super) found: u32,
    /// Whether the index has all of it without its salt.
    pub(super) unsalted: bool,
    /// Whether the index has it under another adapter.
    pub(super) other_adapter: bool,
    /// Whether the index has it with other special tokens.
    pub(super) other_special: bool,
    /// Tokens per block that the router goes by.
    pub(super) block_size: u32,
    /// Tokens per block by the engine's own report.
    pub(super) engine_block_size: Option<u32>,
    /// Tokens that the engine found in its cache, under a salt that nobody ever had.
    pub(super) cached_tokens: Option<u64>,
    /// Whether the index lacks blocks of the worker for want of room.
    pub(super) is_truncated: bool,
    /// What became of the worker's events meanwhile, whoever's blocks they were of.
    pub(super) witnessed: EventCounts,
}

impl Blocks {
    /// Whether waiting longer changes nothing.
    pub(super) fn is_settled(&self) -> bool {
        self.found == self.wanted || self.unsalted || self.other_adapter || self.other_special
    }
}

/// How two token sequences differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Difference {
    None,
    /// By tokens at the ends only.
    Ends,
    Other,
}

/// A BOS and an EOS at most.
const SPECIAL_MAX: usize = 2;

fn difference(ours: &[u32], engines: &[u32]) -> Difference {
    if ours == engines {
        return Difference::None;
    }
    let (short, long) = if ours.len() < engines.len() { (ours, engines) } else { (engines, ours) };
    let surplus = long.len() - short.len();
    let within = (0..=surplus).any(|at| long[at..at + short.len()] == *short);
    match within && (1..=SPECIAL_MAX).contains(&surplus) && !short.is_empty() {
        true => Difference::Ends,
        false => Difference::Other,
    }
}

/// Whether any form is known on both sides.
pub(super) fn is_compared(ours: &Tokens, engines: &Tokens) -> bool {
    let both = |a: &Option<Vec<u32>>, b: &Option<Vec<u32>>| a.is_some() && b.is_some();
    both(&ours.chat, &engines.chat) || both(&ours.plain, &engines.plain)
}

/// Why the tokens differ, if they do.
pub(super) fn tokens(ours: &Tokens, engines: &Tokens) -> Option<Cause> {
    let compare = |ours: &Option<Vec<u32>>, engines: &Option<Vec<u32>>| {
        Some(difference(ours.as_deref()?, engines.as_deref()?))
    };
    let chat = compare(&ours.chat, &engines.chat);
    match (compare(&ours.plain, &engines.plain), chat) {
        // Whatever a template does, it cannot be told from here.
        (Some(Difference::Other), _) => Some(Cause::Vocabulary),
        (Some(Difference::Ends), _) | (_, Some(Difference::Ends)) => Some(Cause::SpecialTokens),
        (_, Some(Difference::Other)) => Some(Cause::Template),
        _ => None,
    }
}

/// Why the engine counts the served prompt's tokens otherwise, if it does.
pub(super) fn count(is_chat: bool, ours: usize, engines: Option<u64>) -> Option<Cause> {
    match (ours as u64).abs_diff(engines?) {
        0 => None,
        surplus if surplus <= SPECIAL_MAX as u64 => Some(Cause::SpecialTokens),
        _ if is_chat => Some(Cause::Template),
        _ => Some(Cause::Vocabulary),
    }
}

/// Why the blocks are not where they should be, if they are not: what is found elsewhere
/// first, then what the engine says of itself, then what became of its events.
pub(super) fn blocks(seen: &Blocks) -> Verdict {
    let Blocks { wanted, found, witnessed, .. } = *seen;
    let cached = seen.cached_tokens.is_some_and(|tokens| tokens > 0);
    let other_size = seen.engine_block_size.is_some_and(|tokens| tokens != seen.block_size);
    let nothing_stored = witnessed.stored == 0;
    if wanted == 0 {
        return Verdict::Unclear("context_too_short");
    }
    if cached || seen.unsalted {
        return Verdict::Differ(Cause::Salt);
    }
    match seen {
        _ if found == wanted => Verdict::Agree,
        _ if seen.other_adapter => Verdict::Differ(Cause::Adapter),
        _ if seen.other_special => Verdict::Differ(Cause::SpecialTokens),
        _ if other_size || (witnessed.malformed > 0 && nothing_stored) => {
            Verdict::Differ(Cause::BlockSize)
        }
        _ if witnessed.events == 0 => Verdict::Differ(Cause::EventsAbsent),
        _ if seen.is_truncated || witnessed.over_limit > 0 => Verdict::Unclear("over_limit"),
        _ if found > 0 => Verdict::Unclear("evicted"),
        _ if witnessed.other_rank > 0 && nothing_stored => Verdict::Differ(Cause::Rank),
        _ if witnessed.parentless > 0 => Verdict::Differ(Cause::UnknownParent),
        _ => Verdict::Differ(Cause::Unmatched),
    }
}

#[cfg(test)]
mod tests;
