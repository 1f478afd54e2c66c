//! What routers and shims must agree on before they can exchange hashes.

use splitrail_kv::HashSeed;

use super::Mirror;

/// How a cluster hashes blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The seed of all hashes.
    pub seed: HashSeed,
    /// The model's name in namespaces.
    pub model: String,
    /// Tokens per KV block.
    pub block_size: u32,
    /// Most blocks of one rank that a router indexes; 0 if it does not say. Routers may
    /// differ in this: the first one's counts.
    pub blocks_max: u64,
}

/// A router that hashes in another way than those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    /// Another seed than the configured one.
    #[error("the router's hash_seed is not the one that is configured here")]
    Pinned,
    /// Another seed.
    #[error("the router's hash_seed is not that of the routers before it")]
    Seed,
    /// Another name of the model.
    #[error("the router's name of the model is not that of the routers before it")]
    Model,
    /// Another block size.
    #[error("the router's block_size is {theirs}, that of the routers before it {ours}")]
    BlockSize {
        /// What was agreed on before.
        ours: u32,
        /// What the router says.
        theirs: u32,
    },
}

impl Terms {
    /// Whether hashes made in one way mean the same in the other.
    pub(super) fn agree(&self, other: &Self) -> Result<(), Disagreement> {
        if self.seed != other.seed {
            return Err(Disagreement::Seed);
        }
        if self.model != other.model {
            return Err(Disagreement::Model);
        }
        if self.block_size != other.block_size {
            let (ours, theirs) = (self.block_size, other.block_size);
            return Err(Disagreement::BlockSize { ours, theirs });
        }
        Ok(())
    }
}

/// One of those who have agreed; until it is dropped, nothing else can be agreed on.
#[derive(Debug)]
pub struct Agreement(Mirror);

impl Agreement {
    pub(super) fn new(mirror: Mirror) -> Self {
        Self(mirror)
    }
}

impl Drop for Agreement {
    fn drop(&mut self) {
        self.0.leave();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::mirror::Config;

    #[test]
    fn a_seed_that_is_configured_decides_before_any_router_does() {
        let terms = |seed| Terms {
            seed: HashSeed(seed),
            model: "m".to_owned(),
            block_size: 16,
            blocks_max: 0,
        };
        let mirror = Mirror::new(Config { seed: Some(HashSeed(7)), ..Config::default() });
        assert_eq!(mirror.agree(terms(8)).unwrap_err(), Disagreement::Pinned);
        let _agreement = mirror.agree(terms(7)).unwrap();
        assert_eq!(mirror.agree(terms(8)).unwrap_err(), Disagreement::Pinned);
    }
}
