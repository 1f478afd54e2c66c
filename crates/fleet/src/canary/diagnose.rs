//! Derives a diagnosis from a canary's result. Pure functions.

use splitrail_prompt::compare::{Difference, SPECIAL_MAX, difference};

use super::{Cause, UnclearReason};
use crate::event_stats::EventCounts;

/// The tokens of the prompt in its two forms; `None` if unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CanaryTokens {
    /// As a chat, by the template.
    pub(super) chat: Option<Vec<u32>>,
    /// As plain text.
    pub(super) plain: Option<Vec<u32>>,
}

/// The result of one canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CanaryResult {
    /// The worker agrees with the router.
    Agree,
    /// The worker does not agree with the router.
    Differ(Cause),
    /// The canary gave no clear result.
    Unclear(UnclearReason),
}

/// What was observed of the prompt's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CanaryBlocks {
    /// Number of full blocks of the prompt.
    pub(super) wanted: u32,
    /// Number of leading blocks of the prompt that the index has of the worker.
    pub(super) found: u32,
    /// Whether the index has all of the prompt's blocks without the salt.
    pub(super) unsalted: bool,
    /// Whether the index has all of them under another adapter.
    pub(super) other_adapter: bool,
    /// Whether the index has all of them with other special tokens.
    pub(super) other_special: bool,
    /// The router's block size.
    pub(super) block_size: u32,
    /// The block size that the engine reports.
    pub(super) engine_block_size: Option<u32>,
    /// Tokens that the engine found in its cache, although the salt was never used before.
    pub(super) cached_tokens: Option<u64>,
    /// Whether the index left out blocks of the worker because of its size limit.
    pub(super) is_truncated: bool,
    /// Whether the worker's events have cache groups, and none of them is full attention.
    pub(super) lacks_full_attention: bool,
    /// Counts of the worker's events since the canary began, including those of other requests.
    pub(super) witnessed: EventCounts,
}

impl CanaryBlocks {
    /// Whether waiting longer changes nothing.
    pub(super) fn is_settled(&self) -> bool {
        self.found == self.wanted || self.unsalted || self.other_adapter || self.other_special
    }
}

/// Whether any form is known on both sides.
pub(super) fn is_compared(ours: &CanaryTokens, engines: &CanaryTokens) -> bool {
    let both = |a: &Option<Vec<u32>>, b: &Option<Vec<u32>>| a.is_some() && b.is_some();
    both(&ours.chat, &engines.chat) || both(&ours.plain, &engines.plain)
}

/// Why the tokens differ, if they do.
pub(super) fn tokens(ours: &CanaryTokens, engines: &CanaryTokens) -> Option<Cause> {
    let compare = |ours: &Option<Vec<u32>>, engines: &Option<Vec<u32>>| {
        Some(difference(ours.as_deref()?, engines.as_deref()?))
    };
    let chat = compare(&ours.chat, &engines.chat);
    match (compare(&ours.plain, &engines.plain), chat) {
        // With another vocabulary, the template's effect cannot be seen.
        (Some(Difference::Other), _) => Some(Cause::Vocabulary),
        (Some(Difference::Ends), _) | (_, Some(Difference::Ends)) => Some(Cause::SpecialTokens),
        (_, Some(Difference::Other)) => Some(Cause::Template),
        _ => None,
    }
}

/// Why the engine's token count of the served prompt differs, if it does.
pub(super) fn count(is_chat: bool, ours: usize, engines: Option<u64>) -> Option<Cause> {
    match (ours as u64).abs_diff(engines?) {
        0 => None,
        surplus if surplus <= SPECIAL_MAX as u64 => Some(Cause::SpecialTokens),
        _ if is_chat => Some(Cause::Template),
        _ => Some(Cause::Vocabulary),
    }
}

/// Why the blocks are not found as expected. Considers blocks that are found under other names
/// first, then what the engine reports of itself, then the results of its events.
pub(super) fn blocks(seen: &CanaryBlocks) -> CanaryResult {
    let CanaryBlocks { wanted, found, witnessed, .. } = *seen;
    let cached = seen.cached_tokens.is_some_and(|tokens| tokens > 0);
    let other_size = seen.engine_block_size.is_some_and(|tokens| tokens != seen.block_size);
    let nothing_stored = witnessed.stored == 0;
    if wanted == 0 {
        return CanaryResult::Unclear(UnclearReason::ContextTooShort);
    }
    if cached || seen.unsalted {
        return CanaryResult::Differ(Cause::Salt);
    }
    match seen {
        _ if found == wanted => CanaryResult::Agree,
        _ if seen.other_adapter => CanaryResult::Differ(Cause::Adapter),
        _ if seen.other_special => CanaryResult::Differ(Cause::SpecialTokens),
        _ if other_size || (witnessed.malformed > 0 && nothing_stored) => {
            CanaryResult::Differ(Cause::BlockSize)
        }
        _ if witnessed.events == 0 => CanaryResult::Differ(Cause::EventsAbsent),
        _ if seen.is_truncated || witnessed.over_limit > 0 => {
            CanaryResult::Unclear(UnclearReason::OverLimit)
        }
        _ if found > 0 => CanaryResult::Unclear(UnclearReason::Evicted),
        _ if witnessed.other_rank > 0 && nothing_stored => CanaryResult::Differ(Cause::Rank),
        _ if seen.lacks_full_attention => CanaryResult::Differ(Cause::NoFullAttention),
        _ if witnessed.parentless > 0 => CanaryResult::Differ(Cause::UnknownParent),
        _ => CanaryResult::Differ(Cause::Unmatched),
    }
}

#[cfg(test)]
mod tests;
