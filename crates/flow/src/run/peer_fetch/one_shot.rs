//! A prefill leg that takes a prefix itself, from the hand-off that the source has given.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::Instant as TokioInstant;

use super::Fetching;
use crate::decide::place::PlacedLeg;
use crate::run::kv_read::reading_body;
use crate::run::prefill::{PrefillReply, send};
use crate::run::read_back::{check_tokens, read_failed};
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_engine_client::LegHeaders;
use splitrail_fleet::Worker;
use splitrail_transfer::peer_fetch::{GivenPrefix, PeerFetchOutcome};
use splitrail_transfer::staged::{HandOffSend, PrefillResult};
use splitrail_workload::fetches::{FetchBooking, Prefix};

/// A hand-off for a prefill leg.
pub(super) struct OneShotHandOff {
    booking: FetchBooking,
    /// The worker that keeps the blocks.
    source: Arc<Worker>,
    given: GivenPrefix,
    /// The parameters of the leg: the hand-off, cut to the prefix.
    params: String,
    /// The length of the prefix in tokens.
    tokens: u32,
}

impl OneShotHandOff {
    /// # Errors
    /// If the hand-off cannot be cut exactly.
    pub(super) fn new(
        booking: FetchBooking,
        source: Arc<Worker>,
        given: GivenPrefix,
        prefix: Prefix,
        block_size: u32,
    ) -> Result<Self, PeerFetchOutcome> {
        let params = given.hand_off.prefix_params(prefix.blocks, block_size);
        let params = params.ok_or(PeerFetchOutcome::Unusable)?;
        Ok(Self { booking, source, given, params, tokens: prefix.blocks * block_size })
    }

    pub(super) fn recomputed_tokens(&self) -> u32 {
        self.given.recomputed_tokens
    }
}

/// A fetch whose rest the prefill leg does. If it is dropped before any byte of the leg was sent, the
/// hand-off is released; otherwise the source keeps the blocks until they are read or the lease ends.
pub(crate) struct OneShot<'a> {
    fetching: Fetching<'a>,
    offer: OneShotHandOff,
}

impl<'a> OneShot<'a> {
    pub(super) fn new(fetching: Fetching<'a>, offer: OneShotHandOff) -> Self {
        Self { fetching, offer }
    }

    /// The number of leading blocks of the prompt that the worker holds after the leg.
    pub(crate) fn blocks(&self) -> u32 {
        self.fetching.prefix.blocks
    }

    /// The same in tokens.
    pub(crate) fn tokens(&self) -> u32 {
        self.offer.tokens
    }

    /// The end of the lease. The source may use the blocks for another prompt afterwards, and nobody
    /// would see it, so the leg must have ended.
    pub(crate) fn lease_ends(&self) -> TokioInstant {
        self.offer.given.hand_off.lease().ends()
    }

    /// Sends the leg, and checks that its engine computed the prompt that the router knows.
    pub(crate) async fn send(
        self,
        leg_headers: &LegHeaders,
        placed: &PlacedLeg,
    ) -> Result<PrefillReply, Error> {
        let Self { mut fetching, offer } = self;
        let OneShotHandOff { booking, source, given, params, tokens } = offer;
        let (prompt, worker) = (fetching.prompt, &placed.worker);
        fetching.outcome = PeerFetchOutcome::Failed;
        let (body, send_state) = reading_body(prompt, worker, &params)?;
        let GivenPrefix { mut hand_off, recomputed_tokens, .. } = given;
        let spent = hand_off.spend();
        let (own, staged) = (leg_headers.clone(), Some(hand_off));
        let prefilled = PrefillResult { worker: source, leg_headers: own, staged };
        // Releases the hand-off if it is dropped before a byte of it was sent.
        let mut under_way = HandOffSend::new(Some(prefilled), spent, send_state);
        fetching.outcome = PeerFetchOutcome::Cancelled;
        worker.transfer.read_back.begin(Instant::now());
        let (outcome, ended) = match send(prompt, leg_headers, placed, body, None).await {
            Ok(said) => match check_tokens(prompt, worker, said.reply()) {
                Err(error) => (PeerFetchOutcome::Mismatch, Err(error)),
                Ok(()) if said.cached_tokens().is_some_and(|cached| cached != tokens) => {
                    (PeerFetchOutcome::Declined, Ok(said))
                }
                Ok(()) => (GivenPrefix::taken(recomputed_tokens), Ok(said)),
            },
            Err(error) if error.kind() == ErrorKind::EngineTimeout => {
                (PeerFetchOutcome::TimedOut, Err(error))
            }
            Err(error) => (PeerFetchOutcome::Failed, Err(error)),
        };
        fetching.outcome = outcome;
        let now = Instant::now();
        match &ended {
            Ok(_) => {
                worker.transfer.read_back.ended(true, now);
                booking.both_did(true, now);
                // Others that wait for the prefix find it in the worker's cache, fetched or computed.
                booking.arrived();
            }
            // An engine that refuses what the client asks for says nothing of fetching.
            Err(error) if error.fault() == Fault::Client => {}
            Err(_) => {
                booking.both_did(false, now);
                if under_way.take_back().is_none() {
                    read_failed(&prompt.context.served, worker, now);
                }
            }
        }
        ended
    }
}
