//! Replaying a committed corpus as an ordinary test.

use std::panic::{RefUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Hands each file of a target's corpus to its check; and, for as many seconds as
/// `SPLITRAIL_FUZZ_S` says, what comes of changing and joining them at random
/// (`SPLITRAIL_FUZZ_SEED` repeats a run).
pub(crate) fn replay(target: &str, check: impl Fn(&[u8]) + RefUnwindSafe) {
    // This file is part of crates at several depths.
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpora = crate_folder.ancestors().map(|above| above.join("fuzz/corpus"));
    let folder = corpora.into_iter().find(|folder| folder.is_dir()).unwrap().join(target);
    let mut files: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    let inputs: Vec<_> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    let breaks = |input: &[u8]| catch_unwind(|| check(input)).is_err();
    let broken = files.iter().zip(&inputs).filter(|(_, input)| breaks(input));
    let broken: Vec<_> = broken.map(|(file, _)| file).collect();
    assert!(broken.is_empty(), "these inputs break a promise: {broken:#?}");
    if let Some(seconds) = setting("SPLITRAIL_FUZZ_S") {
        let seed = setting("SPLITRAIL_FUZZ_SEED").unwrap_or(1);
        let mut changes = Changes(seed | 1);
        let (began, mut tried) = (Instant::now(), 0u64);
        while began.elapsed() < Duration::from_secs(seconds) {
            let input = changes.input(&inputs);
            assert!(!breaks(&input), "{target}: input {tried} of seed {seed} breaks: {input:?}");
            tried += 1;
        }
        #[allow(clippy::print_stderr)]
        {
            eprintln!("{target}: {tried} inputs of seed {seed}");
        }
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// Random changes, from a number that is not 0 (xorshift64).
struct Changes(u64);

impl Changes {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }

    /// One of the inputs, changed in a few places.
    fn input(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut input = inputs[self.below(inputs.len())].clone();
        for _ in 0..=self.below(4) {
            let other = &inputs[self.below(inputs.len())];
            let at = self.below(input.len() + 1);
            let until = at + self.below((input.len() - at).min(64) + 1);
            match self.below(6) {
                0 if !input.is_empty() => {
                    let at = at.min(input.len() - 1);
                    input[at] ^= 1 << self.below(8);
                }
                1 => input.insert(at, [0, 9, 10, 13, 32, 48, 127, 255][self.below(8)]),
                2 => drop(input.drain(at..until)),
                3 => {
                    let again = input[at..until].to_vec();
                    input.splice(at..at, again);
                }
                4 => {
                    let from = self.below(other.len() + 1);
                    let piece = &other[from..(from + self.below(256)).min(other.len())];
                    input.splice(at..until, piece.iter().copied());
                }
                _ => input.truncate(at),
            }
        }
        input.truncate(4096);
        input
    }
}
