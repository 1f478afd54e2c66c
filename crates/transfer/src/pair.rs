//! Connectors whose two legs are sent at once: by what both legs of a pair find each other.
//!
//! Each connector has a module. What differs between them is a method of [`Pair`] with an exhaustive
//! match, so that the compiler names each place that a further connector has to fill.

use std::net::IpAddr;
use std::sync::Arc;

use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_api::{Endpoint, JsonObject};
use splitrail_config::model::Connector;
use splitrail_engine::connectors::nixl_push::PushEngine;
use splitrail_engine_client::LegHeaders;
use splitrail_fleet::bootstrap::Bootstrap;
use splitrail_fleet::{ServedModel, Worker};

use crate::lease::{Lease, within_lease};
use crate::params::{DecodeParams, PrefillParams, RoomMembers};
use crate::repair::Registration;

mod mooncake;
mod nixl_push;
mod sglang;

use mooncake::MooncakePair;
use nixl_push::PushPair;

/// The worker of a leg, and the rank that the leg is pinned to.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The worker.
    pub worker: &'a Worker,
    /// The data-parallel rank, if one was chosen.
    pub rank: Option<u16>,
}

/// The data by which both legs of one pair find each other. They name no other pair, before or after.
pub enum Pair {
    /// Mooncake: the decode engine asks the prefill engine for the blocks of a transfer id.
    Mooncake(MooncakePair),
    /// NIXL in push mode: decode registers with the prefill engine, which pushes.
    NixlPush(PushPair),
    /// SGLang: both engines meet in a bootstrap room.
    Sglang(RoomMembers),
}

/// Why a pair failed.
pub enum PairFailure {
    /// The prefill leg failed.
    Prefill(Error),
    /// The decode leg failed.
    Decode(Error),
    /// The prefill worker's engine is another one than the router knew, so the legs could not find
    /// each other.
    EngineReplaced(Error),
    /// The reply ended with the one token of the prefill leg, so there was no hand-off.
    PrefillEnded,
}

impl PairFailure {
    /// Whether the cause may also make the decode engine refuse its leg.
    pub fn may_refuse_decode(&self) -> bool {
        match self {
            Self::Prefill(error) => error.fault() == Fault::Client,
            Self::EngineReplaced(_) => true,
            Self::Decode(_) | Self::PrefillEnded => false,
        }
    }
}

impl Pair {
    /// Makes the data of a new pair.
    ///
    /// # Errors
    /// The prefill worker's engine, or the rank that the leg is placed on, is not known.
    pub async fn make(
        served: &ServedModel,
        endpoint: Endpoint,
        prefill: Target<'_>,
        leg_headers: &LegHeaders,
    ) -> Result<Self, Error> {
        match served.config.connector {
            Connector::NixlPush => {
                let pair = PushPair::make(served, endpoint, prefill, leg_headers).await?;
                Ok(Self::NixlPush(pair))
            }
            Connector::Sglang => Ok(Self::Sglang(sglang::make_room(prefill.worker)?)),
            Connector::Mooncake => {
                Ok(Self::Mooncake(MooncakePair::make(&served.client, prefill).await?))
            }
            Connector::Nixl | Connector::SharedStorage | Connector::None => {
                let message = "the legs of this connector are not sent at once";
                Err(Error::new(ErrorKind::Internal, message))
            }
        }
    }

    /// Checks that the engine of the decode worker can take part in the pair.
    ///
    /// # Errors
    /// The engine cannot, or its reply does not say so.
    pub async fn check_decode(
        &self,
        served: &ServedModel,
        decode: Target<'_>,
    ) -> Result<(), Error> {
        match self {
            Self::NixlPush(_) => PushPair::check_decode(served, decode).await,
            Self::Mooncake(_) | Self::Sglang(_) => Ok(()),
        }
    }

    /// What the body of the prefill leg says.
    pub fn prefill_params(&self) -> PrefillParams<'_> {
        match self {
            Self::Mooncake(pair) => PrefillParams::Pushed(pair.prefill_params()),
            Self::NixlPush(pair) => PrefillParams::Matched(pair.prefill_params()),
            Self::Sglang(room) => PrefillParams::Room(room),
        }
    }

    /// What the body of the decode leg says.
    pub fn decode_params(&self) -> DecodeParams<'_> {
        match self {
            Self::Mooncake(pair) => DecodeParams::Params(pair.decode_params()),
            Self::NixlPush(pair) => DecodeParams::Matched(pair.decode_params()),
            Self::Sglang(room) => DecodeParams::Room(room),
        }
    }

    /// The headers of the prefill leg, pinned to the rank of the engine whose id the decode leg
    /// carries.
    pub fn prefill_headers(&self, leg_headers: &LegHeaders) -> LegHeaders {
        let rank = match self {
            Self::Mooncake(pair) => pair.rank(),
            Self::NixlPush(pair) => pair.rank(),
            Self::Sglang(_) => None,
        };
        LegHeaders { rank, ..leg_headers.clone() }
    }

    /// Whether the prefill engine hands over only replies that were cut off by their length limit.
    pub fn hands_over_only_cut_off_replies(&self) -> bool {
        match self {
            Self::Mooncake(_) => true,
            Self::NixlPush(_) | Self::Sglang(_) => false,
        }
    }

    /// Whether a decode engine keeps blocks for a leg that was cancelled, until its prefill leg ends.
    pub fn decode_waits_for_prefill(&self) -> bool {
        match self {
            Self::Mooncake(_) | Self::NixlPush(_) => true,
            Self::Sglang(_) => false,
        }
    }

    /// The engine with which decode registers, if it pushes.
    pub fn pushing_engine(&self) -> Option<Arc<PushEngine>> {
        match self {
            Self::NixlPush(pair) => Some(pair.engine()),
            Self::Mooncake(_) | Self::Sglang(_) => None,
        }
    }

    /// Reads what the reply of the prefill leg says of the pair. Returns the cached tokens that only
    /// this part of the reply names.
    ///
    /// # Errors
    /// The reply is not that of the engine from which decode expects the KV.
    pub fn read_prefill_reply(
        &self,
        served: &ServedModel,
        worker: &Worker,
        reply: &JsonObject,
        peer: Option<IpAddr>,
    ) -> Result<Option<u32>, PairFailure> {
        match self {
            Self::NixlPush(pair) => pair.read_prefill_reply(served, worker, reply, peer),
            Self::Mooncake(_) | Self::Sglang(_) => Ok(None),
        }
    }

    /// Waits for a decode leg whose prefill leg has finished, for as long as its blocks are kept.
    ///
    /// # Errors
    /// As the decode leg, or its lease is over.
    pub async fn await_decode<T>(
        &self,
        decode: &Worker,
        is_streamed: bool,
        lease: Lease,
        registration: &Registration,
        decoding: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        match self {
            Self::NixlPush(_) => {
                within_lease(decode, is_streamed, lease, registration, decoding).await
            }
            Self::Mooncake(_) | Self::Sglang(_) => decoding.await,
        }
    }

    /// Forgets the engine with which a pair failed, and asks the prefill worker for its engine after
    /// a failure of the decode leg. If that is another engine now, the change was the cause of the
    /// failure.
    pub async fn recheck_engine(
        &self,
        served: &ServedModel,
        worker: &Worker,
        failed: PairFailure,
    ) -> PairFailure {
        match (self, failed) {
            (Self::NixlPush(pair), PairFailure::Decode(error))
                if error.fault() == Fault::Engine =>
            {
                match pair.is_of_another_engine(served, worker).await {
                    Ok(true) => PairFailure::EngineReplaced(error),
                    Ok(false) => PairFailure::Decode(error),
                    Err(prefill) => PairFailure::Prefill(prefill),
                }
            }
            (Self::Mooncake(pair), PairFailure::Decode(error))
                if error.fault() == Fault::Engine =>
            {
                match pair.is_of_another_engine(&served.client, worker).await {
                    true => PairFailure::EngineReplaced(error),
                    false => PairFailure::Decode(error),
                }
            }
            (pair, PairFailure::Prefill(error)) if error.fault() == Fault::Engine => {
                match pair {
                    Self::NixlPush(pair) => pair.forget(worker),
                    Self::Mooncake(pair) => pair.forget(worker),
                    Self::Sglang(_) => {}
                }
                PairFailure::Prefill(error)
            }
            (_, failed) => failed,
        }
    }
}

/// The bootstrap server of a prefill worker.
fn bootstrap(worker: &Worker) -> Result<&Bootstrap, Error> {
    let malformed = || Error::new(ErrorKind::Internal, "a bootstrap server's address is malformed");
    worker.transfer.bootstrap.as_ref().ok_or_else(malformed)
}
