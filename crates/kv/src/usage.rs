//! Converts an overlap in blocks to cached tokens in the client's usage.

/// The number of cached tokens that an engine would report for a prompt of which it holds
/// `overlap_blocks` blocks.
///
/// An engine always computes the last token of a prompt, since its logits give the first output
/// token. So even if every block is resident, at most `(prompt_tokens - 1) / block_size` of them
/// count: of 288 tokens in blocks of 32, at most 256 can be cached. Zero for an empty prompt or a
/// block size of zero.
pub fn estimate_cached_tokens(overlap_blocks: u32, prompt_tokens: u32, block_size: u32) -> u32 {
    let Some(before_last) = prompt_tokens.checked_sub(1) else {
        return 0;
    };
    let Some(usable_blocks) = before_last.checked_div(block_size) else {
        return 0;
    };
    // At most `prompt_tokens - 1`, so the product fits.
    overlap_blocks.min(usable_blocks) * block_size
}
