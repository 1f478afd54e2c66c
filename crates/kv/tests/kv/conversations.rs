//! Conversations: which prompts continue earlier ones, and what conversations have in common.

use proptest::prelude::*;
use splitrail_kv::{BlockHash, ConversationBounds, Conversations, SharedPrefix};

const WIDE: ConversationBounds =
    ConversationBounds { blocks_max: 1 << 16, runs_max: 1 << 16, idle_max_ms: 1000 };

/// The chained hashes of blocks with these names.
fn hashes(names: &[u8]) -> Vec<BlockHash> {
    let chained = names.iter().scan(99u64, |hash, name| {
        *hash = splitrail_kv::mix(*hash ^ u64::from(*name));
        Some(BlockHash(*hash))
    });
    chained.collect()
}

fn shared(conversations: &Conversations, names: &[u8]) -> Vec<(u32, u32)> {
    let of = |prefix: SharedPrefix| (prefix.blocks, prefix.conversations);
    conversations.find(&hashes(names)).prefixes().map(of).collect()
}

#[test]
fn what_conversations_have_in_common_is_told_apart_from_their_histories() {
    let mut conversations = Conversations::new(WIDE);
    for user in 10..20 {
        let mut prompt = vec![1, 2, 3, user];
        for turn in 100..104 {
            conversations.record(0, &hashes(&prompt));
            prompt.extend([turn, turn]);
        }
    }
    assert_eq!(conversations.len(), 10);
    let prompt = [1, 2, 3, 11, 100, 100, 101, 101, 102, 102, 103];
    assert_eq!(shared(&conversations, &prompt), [(3, 10)], "a history is nobody else's");
    assert_eq!(conversations.find(&hashes(&prompt)).later_blocks.round(), 6.0);
    let side = [[1, 2, 3, 11, 100, 7].as_slice(), &[1, 2, 3, 11, 100, 8], &[1, 2, 5]];
    side.iter().for_each(|prompt| conversations.record(0, &hashes(prompt)));
    assert_eq!(shared(&conversations, &prompt), [(5, 3), (3, 12), (2, 13)]);
}

#[test]
fn conversations_are_forgotten_when_they_are_idle_or_too_many() {
    let mut conversations = Conversations::new(ConversationBounds { blocks_max: 20, ..WIDE });
    for user in 0..100 {
        conversations.record(0, &hashes(&[200, 201, user]));
        assert!(conversations.blocks() <= 20);
    }
    assert_eq!((conversations.len(), conversations.blocks()), (18, 20));
    conversations.record(900, &hashes(&[200, 201, 99, 1]));
    conversations.record(1001, &hashes(&[202]));
    assert_eq!((conversations.len(), conversations.blocks()), (2, 5));
    conversations.record(5000, &hashes(&[7; 30]));
    assert_eq!((conversations.len(), conversations.blocks()), (1, 20), "a part of the prompt");
    conversations.record(9000, &[]);
    assert!(!conversations.is_empty());
    let mut conversations = Conversations::new(ConversationBounds { runs_max: 10, ..WIDE });
    (0..100).for_each(|user| conversations.record(0, &hashes(&[user])));
    assert_eq!(conversations.len(), 10, "short conversations are bounded as well");
}

/// The same from a list of the last prompts.
#[derive(Default)]
struct Naive(Vec<Vec<u8>>);

impl Naive {
    fn record(&mut self, prompt: &[u8]) {
        let alike = |last: &Vec<u8>| last.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let most = self.0.iter().map(alike).max().unwrap_or(0);
        let continued = self.0.iter().position(|last| last.len() == most && alike(last) == most);
        match continued {
            Some(place) => self.0[place] = prompt.to_vec(),
            None => self.0.push(prompt.to_vec()),
        }
    }

    fn shared(&self, prompt: &[u8]) -> Vec<(u32, u32)> {
        let with = |blocks: usize| {
            let having = self.0.iter().filter(|last| last.starts_with(&prompt[..blocks]));
            having.count() as u32
        };
        let lengths = (1..=prompt.len()).map(|blocks| (blocks as u32, with(blocks)));
        let longest = |(blocks, count): &(u32, u32)| {
            *count >= 3 && (*blocks as usize == prompt.len() || with(*blocks as usize + 1) < *count)
        };
        let mut found: Vec<(u32, u32)> = lengths.filter(longest).collect();
        found.reverse();
        found.truncate(8);
        found
    }
}

proptest! {
    #[test]
    fn conversations_equal_those_of_a_list_of_prompts(
        prompts in proptest::collection::vec(proptest::collection::vec(0u8..3, 1..9), 1..60),
    ) {
        let (mut conversations, mut naive) = (Conversations::new(WIDE), Naive::default());
        for prompt in &prompts {
            prop_assert_eq!(shared(&conversations, prompt), naive.shared(prompt));
            conversations.record(0, &hashes(prompt));
            naive.record(prompt);
            prop_assert_eq!(conversations.len(), naive.0.len());
        }
    }
}
