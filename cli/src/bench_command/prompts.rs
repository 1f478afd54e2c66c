//! The prompts of a load: their lengths and which prefixes they share.

use splitrail_policy::SplitMix64;
use splitrail_sim::cluster::Workload;

/// A prompt, without its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prompt {
    /// Names of its leading blocks. Equal names are equal tokens.
    pub(super) blocks: Vec<u32>,
    /// Number of tokens, at least 1. What the blocks do not cover is the prompt's own.
    pub(super) input_tokens: u32,
    /// Number of tokens to generate, at least 1.
    pub(super) output_tokens: u32,
}

/// The prompts of all turns.
pub(super) struct Prompts {
    turns: Vec<Vec<Prompt>>,
    block_tokens: u32,
}

/// Requests of each synthetic session.
const SESSION_REQUESTS: usize = 5;
/// Tokens of the system prompt that all sessions share.
const SYSTEM_TOKENS: u32 = 512;
/// Tokens by which the history of a session grows with each request.
const GROWTH_TOKENS: u32 = 256;
/// Tokens that each request of a session generates.
const OUTPUT_TOKENS: u32 = 32;

impl Prompts {
    /// The first prompts of a trace, divided into turns of consecutive requests.
    pub(super) fn of_trace(workload: &Workload, requests: usize, turns: usize) -> Self {
        let all: Vec<Prompt> = workload
            .requests()
            .iter()
            .take(requests)
            .enumerate()
            .map(|(index, request)| Prompt {
                blocks: workload.blocks(index).to_vec(),
                input_tokens: request.input_tokens,
                output_tokens: request.output_tokens,
            })
            .collect();
        let size = all.len().div_ceil(turns).max(1);
        let turns = all.chunks(size).map(<[Prompt]>::to_vec).collect();
        Self { turns, block_tokens: workload.block_tokens() }
    }

    /// The turns, none of which is empty.
    pub(super) fn turns(&self) -> &[Vec<Prompt>] {
        &self.turns
    }

    /// Tokens per block.
    pub(super) fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
}

/// Sessions of agents: all begin with the same system prompt, and each request of a session sends the
/// session's history again, which has grown. Sessions take turns in an order that changes, so that no
/// rule that ignores the prompts keeps a session at its worker by chance.
pub(super) fn synthetic_agents(requests: usize, turns: usize, block_tokens: u32) -> Prompts {
    let size = requests.div_ceil(turns).max(1);
    let sizes = (0..requests).step_by(size).map(|from| size.min(requests - from));
    let mut random = SplitMix64::new(1);
    let turns = sizes.map(|size| sessions(size, block_tokens, &mut random)).collect();
    Prompts { turns, block_tokens }
}

fn sessions(requests: usize, block_tokens: u32, random: &mut SplitMix64) -> Vec<Prompt> {
    let blocks_of = |tokens: u32| tokens.div_ceil(block_tokens);
    let (shared, growth) = (blocks_of(SYSTEM_TOKENS), blocks_of(GROWTH_TOKENS));
    let count = requests.div_ceil(SESSION_REQUESTS);
    let mut prompts = Vec::with_capacity(requests);
    for round in 0..SESSION_REQUESTS {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, below(random, last + 1));
        }
        for session in order {
            let own = growth * SESSION_REQUESTS as u32;
            let first = shared + session as u32 * own;
            let until = first + growth * (round as u32 + 1);
            let blocks: Vec<u32> = (0..shared).chain(first..until).collect();
            let input_tokens = blocks.len() as u32 * block_tokens;
            prompts.push(Prompt { blocks, input_tokens, output_tokens: OUTPUT_TOKENS });
        }
    }
    prompts.truncate(requests);
    prompts
}

impl Prompt {
    /// The tokens of a prompt. Their ids are those of single bytes in the vocabularies of most models,
    /// and exist in all.
    pub(super) fn tokens(&self, block_tokens: u32, seed: u64, number: usize) -> Vec<u32> {
        let shared = self.blocks.iter().map(|block| u64::from(*block));
        // No block of a trace has so high a name.
        let own = u64::from(u32::MAX) + 1 + number as u64;
        let tokens = shared.flat_map(|block| tokens_of(seed, block).take(block_tokens as usize));
        tokens.chain(tokens_of(seed, own)).take(self.input_tokens as usize).collect()
    }
}

/// Endless tokens of a block.
fn tokens_of(seed: u64, block: u64) -> impl Iterator<Item = u32> {
    const FIRST: u32 = 10;
    const COUNT: usize = 240;
    let mut random = SplitMix64::new(seed ^ block.wrapping_mul(0xd6e8_feb8_6659_fd93));
    std::iter::repeat_with(move || FIRST + below(&mut random, COUNT) as u32)
}

/// A number below a limit.
fn below(random: &mut SplitMix64, limit: usize) -> usize {
    ((u128::from(random.next_u64()) * limit as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requests_are_divided_into_turns_and_a_session_sends_its_history_again() {
        for (requests, turns) in [(1, 1), (3, 3), (20, 4), (203, 4)] {
            let prompts = synthetic_agents(requests, 4, 16);
            let sizes: Vec<usize> = prompts.turns().iter().map(Vec::len).collect();
            assert_eq!((sizes.iter().sum::<usize>(), sizes.len()), (requests, turns));
        }
        let prompts = synthetic_agents(40, 1, 16);
        let turn = &prompts.turns()[0];
        for (index, prompt) in turn.iter().enumerate().skip(8) {
            assert_eq!(prompt.blocks[..32], turn[0].blocks[..32], "the system prompt");
            let own = prompt.blocks[32];
            let before = turn[..index].iter().rev().find(|other| other.blocks[32] == own);
            let before = before.map(|other| &other.blocks[..]).unwrap_or_default();
            assert!(prompt.blocks.starts_with(before) && prompt.blocks.len() == before.len() + 16);
        }
    }

    #[test]
    fn equal_blocks_have_equal_tokens_and_another_seed_has_others() {
        let prompt = |blocks: &[u32], input_tokens| Prompt {
            blocks: blocks.to_vec(),
            input_tokens,
            output_tokens: 1,
        };
        let tokens = prompt(&[7, 8], 40).tokens(16, 1, 0);
        assert_eq!(tokens.len(), 40);
        assert!(tokens.iter().all(|token| (10..250).contains(token)));
        let continued = prompt(&[7, 8, 9], 48).tokens(16, 1, 1);
        assert_eq!(continued[..32], tokens[..32]);
        assert_ne!(continued[32..40], tokens[32..], "a prompt's own end is shared with none");
        assert_ne!(prompt(&[7, 8], 40).tokens(16, 2, 0)[..16], tokens[..16]);
        assert_eq!(prompt(&[7, 8], 5).tokens(16, 1, 0), tokens[..5]);
    }
}
