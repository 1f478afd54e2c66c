//! A leg that generates the client's reply, and the bodies that it is sent with.

use std::time::Duration;

use crate::context::PromptContext;
use crate::decide::place::PlacedLeg;
use crate::reply::migrate::is_exact;
use crate::run::read_back;
use splitrail_api::error::Error;
use splitrail_api::{JsonObject, Parts};
use splitrail_engine_client::LegHeaders;
use splitrail_fleet::{LegLimit, LegWait};
use splitrail_policy::Leg;
use splitrail_transfer::bodies;
use splitrail_transfer::params::DecodeParams;

/// A leg that generates the client's reply, with everything needed to send it.
#[derive(Clone, Copy)]
pub(crate) struct ReplyLeg<'a> {
    pub(crate) prompt: PromptContext<'a>,
    pub(crate) leg_headers: &'a LegHeaders,
    pub(crate) placed: &'a PlacedLeg,
    /// The value of `cache_hit_threshold` in the body.
    pub(crate) threshold: Option<f64>,
}

impl ReplyLeg<'_> {
    /// Records that the first event of a stream has arrived, this long after the leg was sent.
    pub(crate) fn observe_first_event(&self, took: Duration) {
        self.placed.worker.counts.series.leg_took("decode", took.as_secs_f64());
    }

    /// How the leg is waited for.
    pub(crate) fn wait(&self, limit: LegLimit) -> LegWait<'_> {
        let (served, worker) = (&self.prompt.context.served, &self.placed.worker);
        LegWait { served, worker, leg: Leg::Decode, limit }
    }

    /// Whether the worker may reject the leg. If so, events are held back until they show output.
    pub(crate) fn is_gated(&self) -> bool {
        self.leg_headers.gate.is_some() || self.threshold.is_some_and(|threshold| threshold > 0.0)
    }

    /// Whether a leg of its own takes the hand-off first. One hand-off cannot serve several
    /// samples; after that leg, the samples find the prompt in the worker's own cache.
    pub(crate) fn takes_hand_off_first(&self) -> bool {
        self.prompt.context.options.samples > 1
    }

    /// The body of the leg that generates the reply.
    pub(crate) fn body(&self, carried: DecodeParams<'_>) -> Result<Parts, Error> {
        let PromptContext { context, unit, .. } = self.prompt;
        if unit.recording.is_some() {
            return Ok(unit.parts(&bodies::transcription(unit.body.clone(), context.options)));
        }
        let mut body = self.gated_body(self.threshold);
        if matches!(carried, DecodeParams::Params(_)) && read_back::asks_for_ids(self) {
            body.set("return_token_ids", "true");
        }
        bodies::generate(body, context.endpoint, context.options, carried)
    }

    /// The body of the leg that takes a hand-off first.
    pub(crate) fn take_body(&self, carried: DecodeParams<'_>) -> Result<Parts, Error> {
        let body = self.gated_body(self.threshold.map(|_| 0.0));
        bodies::take_hand_off(&body, self.prompt.context.endpoint, carried)
    }

    fn gated_body(&self, threshold: Option<f64>) -> JsonObject {
        let mut body = self.prompt.unit.body.clone();
        if let Some(threshold) = threshold {
            body.set("cache_hit_threshold", threshold.to_string());
        }
        if is_exact(self.prompt.context, &self.prompt.unit.body) {
            body.set("return_token_ids", "true");
        }
        body
    }
}
