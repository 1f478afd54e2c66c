//! The settings on which routers and shims must agree before they can exchange block hashes.

use splitrail_kv::HashSeed;
use splitrail_proto::v1::Welcome;

use super::Mirror;

/// How the routers of a cluster hash blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashTerms {
    /// The seed of all hashes.
    pub seed: HashSeed,
    /// The model's name in namespaces.
    pub model: String,
    /// Tokens per KV block.
    pub block_size: u32,
    /// Maximum number of blocks per rank that a router indexes; 0 if unknown. Routers may differ
    /// in this value. The value of the first router applies.
    pub blocks_max: u64,
}

impl From<&Welcome> for HashTerms {
    fn from(welcome: &Welcome) -> Self {
        Self {
            seed: HashSeed(welcome.hash_seed),
            model: welcome.model.clone(),
            block_size: welcome.block_size,
            blocks_max: welcome.blocks_max,
        }
    }
}

/// A router's hash settings differ from those of earlier routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    /// The seed differs from the configured one.
    #[error("the router's hash_seed differs from the configured one")]
    Pinned,
    /// The seed differs.
    #[error("the router's hash_seed differs from that of earlier routers")]
    Seed,
    /// The model's name differs.
    #[error("the router's model name differs from that of earlier routers")]
    Model,
    /// The block size differs.
    #[error("the router's block_size is {theirs}, that of earlier routers {ours}")]
    BlockSize {
        /// The block size of earlier routers.
        ours: u32,
        /// The block size of this router.
        theirs: u32,
    },
}

impl HashTerms {
    /// Checks that both settings lead to the same hashes.
    ///
    /// # Errors
    /// The first difference.
    pub(super) fn check_equal(&self, other: &Self) -> Result<(), Disagreement> {
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

/// The agreement of one router. Until all agreements are dropped, no other settings are
/// accepted.
#[derive(Debug)]
pub struct Agreement(Mirror);

impl Agreement {
    pub(super) fn new(mirror: Mirror) -> Self {
        Self(mirror)
    }
}

impl Drop for Agreement {
    fn drop(&mut self) {
        self.0.end_agreement();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::mirror::MirrorConfig;

    #[test]
    fn a_configured_seed_overrides_the_routers() {
        let terms = |seed| HashTerms {
            seed: HashSeed(seed),
            model: "m".to_owned(),
            block_size: 16,
            blocks_max: 0,
        };
        let mirror =
            Mirror::new(MirrorConfig { seed: Some(HashSeed(7)), ..MirrorConfig::default() });
        assert_eq!(mirror.agree(terms(8)).unwrap_err(), Disagreement::Pinned);
        let _agreement = mirror.agree(terms(7)).unwrap();
        assert_eq!(mirror.agree(terms(8)).unwrap_err(), Disagreement::Pinned);
    }
}
