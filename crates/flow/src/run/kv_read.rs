//! What a prefill leg reads from another worker before it computes the rest of its prompt: KV that a
//! decode worker keeps pinned (read-back), or a prefix that any worker hands over (one shot).

use std::time::Instant;

use splitrail_engine::connectors::nixl::PREFILL_PARAMS_JSON;

use crate::context::PromptContext;
use crate::decide::place::{PlacedLeg, ReadDeadline};
use crate::run::peer_fetch::OneShot;
use crate::run::prefill::{PrefillReply, body, send};
use crate::run::read_back::{self, check_tokens, read_failed};
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, Fault};
use splitrail_engine_client::{LegHeaders, RevocableBody, SendState};
use splitrail_fleet::Worker;
use splitrail_fleet::read_back::PinReading;
use splitrail_ledger::leg::{LegFacts, LegKind};
use splitrail_transfer::params::PrefillParams;

/// What a prefill leg reads.
pub(crate) enum KvRead<'a> {
    /// Pinned KV of a decode worker.
    ReadBack(Box<PinReading>),
    /// The prefix of a peer fetch.
    OneShot(Box<OneShot<'a>>),
}

impl<'a> KvRead<'a> {
    /// What the leg reads: what a fetch has asked for, or otherwise what can be read back of
    /// `readable_blocks` leading blocks.
    pub(crate) fn of(
        prompt: PromptContext<'_>,
        placed: &PlacedLeg,
        one_shot: Option<Box<OneShot<'a>>>,
        readable_blocks: u32,
    ) -> Option<Self> {
        match one_shot {
            Some(one_shot) => Some(Self::OneShot(one_shot)),
            None => {
                let reading = read_back::take(prompt, placed, readable_blocks)?;
                Some(Self::ReadBack(Box::new(reading)))
            }
        }
    }

    /// The number of leading blocks of the prompt that the worker holds after the leg.
    fn blocks(&self) -> u32 {
        match self {
            Self::ReadBack(reading) => reading.blocks() as u32,
            Self::OneShot(one_shot) => one_shot.blocks(),
        }
    }

    /// Sends the leg, and checks that its engine computed the prompt that the router knows.
    pub(crate) async fn send(
        self,
        prompt: PromptContext<'_>,
        leg_headers: &LegHeaders,
        placed: &PlacedLeg,
    ) -> Result<PrefillReply, Error> {
        match self {
            Self::ReadBack(reading) => send_reading(prompt, leg_headers, placed, *reading).await,
            Self::OneShot(one_shot) => one_shot.send(leg_headers, placed).await,
        }
    }
}

/// Enters a prefill leg that is about to be sent in the ledger, with what it is to read.
pub(crate) fn record_leg(
    prompt: PromptContext<'_>,
    placed: &mut PlacedLeg,
    read: Option<&KvRead<'_>>,
) {
    let PromptContext { context, unit, decision, .. } = prompt;
    let expected = placed.expectation(context, unit);
    let mut leg = LegFacts::new(LegKind::Prefill, placed.worker.id(), expected);
    if let Some(read) = read {
        placed.reads(read.blocks(), context.served.pool.block_size());
        // The engine reports what it has read as cached tokens.
        leg.expected.comparable = false;
    }
    match read {
        Some(KvRead::ReadBack(reading)) => {
            leg.read_back = read_back::offer(context, reading);
            placed.read_deadline =
                reading.deadline().map(|at| ReadDeadline { at: at.into(), key: "read_back_pin" });
        }
        Some(KvRead::OneShot(one_shot)) => {
            leg.fetch_offer = Some(one_shot.tokens());
            placed.read_deadline = Some(ReadDeadline { at: one_shot.lease_ends(), key: "lease" });
        }
        None => {}
    }
    decision.enter(|entry| entry.prefill_sent(leg));
}

/// Makes the body of a leg that reads the KV of these parameters.
pub(crate) fn reading_body(
    prompt: PromptContext<'_>,
    worker: &Worker,
    params: &str,
) -> Result<(RevocableBody, SendState), Error> {
    let PromptContext { context, unit, .. } = prompt;
    let asks_for_ids = context.endpoint != Endpoint::Generate;
    let params = PrefillParams::Reads { params, asks_for_ids };
    let (revocable, send_state) = RevocableBody::new(body(context, unit, worker, params)?);
    Ok((revocable.once(), send_state))
}

async fn send_reading(
    prompt: PromptContext<'_>,
    leg_headers: &LegHeaders,
    placed: &PlacedLeg,
    mut reading: PinReading,
) -> Result<PrefillReply, Error> {
    let worker = &placed.worker;
    let params = reading.json().unwrap_or_else(|| PREFILL_PARAMS_JSON.to_owned());
    let (body, send_state) = reading_body(prompt, worker, &params)?;
    reading.is_in(send_state);
    worker.transfer.read_back.begin(Instant::now());
    let mut ending = read_back::ReadBackCount::new(prompt.context);
    match send(prompt, leg_headers, placed, body, None).await {
        Ok(said) => {
            reading.done();
            ending.outcome = Some("mismatch");
            check_tokens(prompt, worker, said.reply())?;
            ending.outcome = Some(read_back::read(prompt, worker, said.cached_tokens()));
            Ok(said)
        }
        Err(error) => {
            ending.outcome = match (reading.was_sent(), error.fault()) {
                // Another leg may read the same.
                (false, _) => None,
                // An engine that refuses what the client asks for says nothing of reading.
                (true, Fault::Client) => Some("refused"),
                (true, _) => {
                    read_failed(&prompt.context.served, worker, Instant::now());
                    Some("failed")
                }
            };
            Err(error)
        }
    }
}
