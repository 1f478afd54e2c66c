//! Recordings of real hybrid models: vLLM 0.32.0 on a CPU with tiny random weights, one request after
//! the other (cold, warm, shared prefixes, chats, eviction). Each line of a recording is
//!
//! - `group NUMBER KIND BLOCK_SIZE TOKENS`, of which the last is a window or chunk,
//! - `drops`: the engine drops the last block that it finds in full attention,
//! - `request PROMPT_TOKENS CACHED_TOKENS HASHES`: what the engine reported for the prompt, whose
//!   blocks have these hashes at the block size of the spine,
//! - `batch`: the events that follow came in one message, after the request,
//! - `stored GROUP PARENT TOKENS HASHES` and `removed GROUP HASHES`, as in the engine's events.
//!
//! Hashes are numbered, `.` is an empty list, and parent 0 is none. Files that begin with `scheduler`
//! are of vLLM's own scheduler and block pool without a model, for layouts that need an accelerator.

use splitrail_kv::GroupRule;

use crate::engine::Engine;
use crate::twin::Twin;

fn hashes(text: &str) -> Vec<u64> {
    let number = |text: &str| text.parse::<u64>().unwrap();
    let range = |text: &str| match text.split_once('-') {
        Some((first, last)) => number(first)..=number(last),
        None => number(text)..=number(text),
    };
    text.split(',').filter(|part| *part != ".").flat_map(range).collect()
}

/// Replays a recording; returns the number of requests, and of those of which full attention held
/// more than the engine used.
fn replay(recording: &str) -> (u32, u32) {
    let (mut engine, mut twin) = (Engine::default(), Twin::default());
    let (mut requests, mut partly_usable, mut drops) = (0, 0, false);
    for line in recording.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u32>().unwrap();
        match words[0] {
            "group" => {
                let rule = match words[2] {
                    "full" => GroupRule::Prefix,
                    "window" => GroupRule::Window { tokens: number(4) },
                    "chunk" => GroupRule::Chunk { tokens: number(4) },
                    "state" => GroupRule::State,
                    kind => panic!("{kind}"),
                };
                engine.learn(number(1), rule, number(3));
                twin.learn(number(1), rule, number(3));
            }
            "drops" => drops = true,
            "request" => {
                engine.flush();
                let (tokens, cached, prompt) = (number(1), number(2), hashes(words[3]));
                let unit = twin.unit();
                let hash_at = |end: u32| prompt[(end / unit) as usize - 1];
                let drops_in = engine.spine.filter(|_| drops);
                assert_eq!(twin.cached(tokens, drops_in, hash_at), cached, "the rule: {line}");
                let per_block = engine.block_size() / unit;
                let blocks = tokens / engine.block_size();
                let ends = (1..=blocks).map(|block| prompt[(block * per_block) as usize - 1]);
                let found = engine.find(tokens, &ends.collect::<Vec<_>>());
                let usable = if drops { found.without_last_block } else { found.usable_tokens };
                assert_eq!(usable, cached, "the index: {line}");
                requests += 1;
                partly_usable += u32::from(found.spine_tokens > cached);
            }
            "batch" => engine.flush(),
            "stored" => {
                let stored = hashes(words[4]);
                engine.stored(number(1), u64::from(number(2)), number(3), &stored);
                twin.store(number(1), &stored);
            }
            "removed" => {
                let removed = hashes(words[2]);
                engine.removed(number(1), &removed);
                removed.iter().for_each(|hash| twin.remove(number(1), *hash));
            }
            other => panic!("{other}"),
        }
    }
    (requests, partly_usable)
}

macro_rules! recordings {
    ($($name:ident: $file:literal, $partly_usable:literal of $requests:literal;)*) => {$(
        #[test]
        fn $name() {
            let recording = include_str!(concat!("recordings/", $file, ".txt"));
            assert_eq!(replay(recording), ($requests, $partly_usable));
        }
    )*};
}

recordings! {
    gpt_oss_uses_what_the_index_says: "gptoss", 16 of 60;
    gemma_3_uses_what_the_index_says: "gemma3", 13 of 60;
    qwen_3_next_uses_what_the_index_says: "qwen3next", 19 of 60;
    llama_4_uses_what_the_index_says: "llama4", 3 of 60;
    a_hit_without_its_last_block: "scheduler_last_block_dropped", 55 of 60;
    states_and_a_hit_without_its_last_block: "scheduler_last_block_dropped_states", 53 of 60;
    windows_and_a_hit_without_its_last_block: "scheduler_last_block_dropped_windows", 49 of 60;
    groups_with_blocks_smaller_than_the_spines: "scheduler_finer_groups", 18 of 60;
    groups_that_keep_all_smaller_blocks: "scheduler_finer_groups_kept", 1 of 40;
    groups_with_blocks_larger_than_the_spines: "scheduler_larger_groups", 18 of 60;
    windows_and_states_together: "scheduler_states_and_windows", 17 of 60;
}
