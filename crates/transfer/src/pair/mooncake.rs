//! Pairs of legs of vLLM's `MooncakeConnector` (`connector: mooncake`): the decode engine asks the
//! prefill engine, which the bootstrap server of the prefill worker names, for the blocks of a
//! transfer id.

use std::sync::Arc;

use splitrail_api::error::Error;
use splitrail_engine::connectors::mooncake::TransferId;
use splitrail_engine_client::EngineClient;
use splitrail_fleet::Worker;
use splitrail_fleet::bootstrap::EngineIdentity;

use super::{Target, bootstrap};

/// The transfer parameters of both legs, as raw JSON, and the engine that hands over.
pub struct MooncakePair {
    prefill: String,
    decode: String,
    engine: Arc<EngineIdentity>,
    rank: Option<u32>,
}

impl MooncakePair {
    /// Makes the data of a new pair.
    ///
    /// # Errors
    /// The bootstrap server does not answer, or does not know the rank.
    pub(super) async fn make(client: &EngineClient, prefill: Target<'_>) -> Result<Self, Error> {
        let Target { worker, rank } = prefill;
        let bootstrap = bootstrap(worker)?;
        let engine = bootstrap.engine(client, worker).await?;
        let Some((id, rank)) = engine.of_rank(rank) else {
            bootstrap.forget(&engine);
            let what = "cannot hand over, its bootstrap server does not know its rank";
            return Err(Error::engine(worker.id(), what));
        };
        let transfer = random_transfer();
        let prefill = transfer.prefill_params_json();
        let decode = transfer.into_decode_params_json(&bootstrap.url(), id);
        Ok(Self { prefill, decode, engine, rank })
    }

    pub(super) fn prefill_params(&self) -> &str {
        &self.prefill
    }

    pub(super) fn decode_params(&self) -> &str {
        &self.decode
    }

    /// The rank of the engine that hands over.
    pub(super) fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// Forgets the engine with which a pair failed.
    pub(super) fn forget(&self, worker: &Worker) {
        if let Ok(bootstrap) = bootstrap(worker) {
            bootstrap.forget(&self.engine);
        }
    }

    /// Asks the bootstrap server again for the engine, after decode has failed. Returns whether that
    /// is another one by now than the one of this pair; not if the server does not say.
    pub(super) async fn is_of_another_engine(
        &self,
        client: &EngineClient,
        worker: &Worker,
    ) -> bool {
        let Ok(bootstrap) = bootstrap(worker) else { return false };
        bootstrap.forget(&self.engine);
        let now = bootstrap.engine(client, worker).await;
        now.is_ok_and(|now| *now != *self.engine)
    }
}

/// A random transfer id of 128 bits: unique, and not guessable.
fn random_transfer() -> TransferId {
    TransferId::from_random(rand::random())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_million_pairs_have_a_million_different_names() {
        const PAIRS: usize = 1_000_000;
        let transfers: HashSet<String> =
            (0..PAIRS).map(|_| random_transfer().as_str().to_owned()).collect();
        assert_eq!(transfers.len(), PAIRS);
    }
}
