//! The rule by which vLLM finds how much of a prompt it has cached, with nothing but the copies that
//! each cache group holds: the naive twin of the index.

use std::collections::BTreeMap;

use splitrail_kv::GroupRule;

/// What one worker holds: copies by cache group and hash.
#[derive(Default)]
pub(crate) struct Twin {
    groups: BTreeMap<u32, (GroupRule, u32)>,
    held: BTreeMap<(u32, u64), u32>,
}

impl Twin {
    pub(crate) fn learn(&mut self, group: u32, rule: GroupRule, block_size: u32) {
        self.groups.insert(group, (rule, block_size));
    }

    pub(crate) fn store(&mut self, group: u32, hashes: &[u64]) {
        hashes.iter().for_each(|hash| *self.held.entry((group, *hash)).or_default() += 1);
    }

    pub(crate) fn remove(&mut self, group: u32, hash: u64) {
        if let Some(copies) = self.held.get_mut(&(group, hash)) {
            *copies = copies.saturating_sub(1);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.held.clear();
    }

    /// The copies that are held, as group and hash.
    pub(crate) fn copies(&self) -> Vec<(u32, u64)> {
        self.held.iter().filter(|(_, copies)| **copies > 0).map(|(key, _)| *key).collect()
    }

    /// The number of leading tokens of a prompt that a group of full attention holds.
    pub(crate) fn spine_tokens(
        &self,
        group: u32,
        block_size: u32,
        tokens: u32,
        hash_at: impl Fn(u32) -> u64,
    ) -> u32 {
        let holds =
            |end: &u32| self.held.get(&(group, hash_at(*end))).is_some_and(|held| *held > 0);
        let ends = (1..=tokens / block_size).map(|block| block * block_size);
        ends.take_while(holds).last().unwrap_or(0)
    }

    /// The number of tokens between two hashes of a prompt.
    pub(crate) fn unit(&self) -> u32 {
        self.groups.values().fold(0, |unit, (_, block_size)| gcd(unit, *block_size))
    }

    /// The number of tokens that are cached of a prompt of `tokens` tokens. `hash_at` gives the
    /// chained hash of the prompt's first tokens. An engine that drops the last block which it finds in
    /// a group of full attention needs one more there, which may be the prompt's last if there are
    /// several groups.
    pub(crate) fn cached(
        &self,
        tokens: u32,
        drops_in: Option<u32>,
        hash_at: impl Fn(u32) -> u64,
    ) -> u32 {
        let align = self.groups.values().fold(1, |align, (_, block_size)| lcm(align, *block_size));
        let holds = |group: u32, end: u32| {
            self.held.get(&(group, hash_at(end))).is_some_and(|copies| *copies > 0)
        };
        let found_max = if self.groups.len() > 1 { tokens } else { tokens.saturating_sub(1) };
        let passes = |end: u32| {
            self.groups.iter().all(|(group, (rule, size))| {
                let dropped = end + size;
                if drops_in == Some(*group) && (dropped > found_max || !holds(*group, dropped)) {
                    return false;
                }
                let needed = match rule {
                    GroupRule::Prefix => end / size,
                    GroupRule::Window { tokens } => (tokens - 1).div_ceil(*size).min(end / size),
                    GroupRule::Chunk { tokens } => end / size - end / tokens * tokens / size,
                    GroupRule::State => 1,
                };
                (0..needed).all(|back| holds(*group, end - back * size))
            })
        };
        let last = tokens.saturating_sub(1) / align;
        (1..=last).rev().map(|point| point * align).find(|end| passes(*end)).unwrap_or(0)
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn lcm(a: u32, b: u32) -> u32 {
    a / gcd(a, b) * b
}
