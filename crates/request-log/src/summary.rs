//! What is known of a request when it has ended, for the access log and for traces: names and
//! figures, no content.

use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use splitrail_api::name::Name;
use splitrail_api::request::Options;
use splitrail_ledger::close::UsedTokens;

use crate::identity::Identity;

/// A request that has ended.
#[derive(Clone, Debug)]
pub struct Summary<'r> {
    /// When the request ended, since 1970.
    pub ended_unix: Duration,
    /// Time from the arrival to the end.
    pub total: Duration,
    /// The id that the client sees.
    pub request_id: &'r str,
    /// The id of the trace, if the request belongs to one.
    pub trace_id: Option<u128>,
    /// `http` or `grpc`.
    pub protocol: &'static str,
    /// The address of the client.
    pub client: IpAddr,
    /// The session that the client names.
    pub session: Option<&'r str>,
    /// The tenant; `None` if the router has no tenants or the request had no valid credential.
    pub tenant: Option<&'r str>,
    /// The model's configured name, or the name that the client sent if no model has it.
    pub model: Option<&'r str>,
    /// The endpoint; `none` if the path is not one.
    pub endpoint: &'static str,
    /// The status of the reply: that of HTTP, or the code of gRPC.
    pub status: u16,
    /// `ok`, an error's name, or `cancelled`.
    pub outcome: &'static str,
    /// How the client wants the request answered, once the body was read.
    pub options: Option<Options>,
    /// The flow of the first prompt that was executed.
    pub flow: Option<&'static str>,
    /// The worker that computed the first prompt for another worker.
    pub prefill_worker: Option<Name>,
    /// The worker that generated for the first prompt.
    pub decode_worker: Option<Name>,
    /// The way of the last peer fetch of the first prompt: `two_step` or `one_shot`.
    pub peer_fetch: Option<&'static str>,
    /// The number of prompts.
    pub prompts: usize,
    /// The number of attempts of all prompts.
    pub attempts: u32,
    /// The tokens of the request, as in the ledger.
    pub used: UsedTokens,
    /// Time in the router's queue, over all prompts.
    pub queue: Option<Duration>,
    /// Time in prefill legs, over all prompts.
    pub prefill: Option<Duration>,
    /// Time from the end of prefill legs to the first token, over all prompts; `None` if the reply
    /// was not streamed.
    pub hand_off: Option<Duration>,
    /// Time to first token; `None` if the reply was not streamed or did not begin.
    pub ttft: Option<Duration>,
}

impl<'r> Summary<'r> {
    /// A request of which nothing is known yet but how it arrived, and that it ended at `now`.
    pub fn new(identity: &'r Identity, endpoint: &'static str, now: Instant) -> Self {
        let late = now.elapsed();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            ended_unix: unix.saturating_sub(late),
            total: now.saturating_duration_since(identity.arrived),
            request_id: &identity.request_id,
            trace_id: identity.trace.context().map(|context| context.trace_id),
            protocol: identity.protocol.name(),
            client: identity.client.to_canonical(),
            session: identity.session.as_deref(),
            tenant: None,
            model: None,
            endpoint,
            status: 0,
            outcome: "ok",
            options: None,
            flow: None,
            prefill_worker: None,
            decode_worker: None,
            peer_fetch: None,
            prompts: 0,
            attempts: 0,
            used: UsedTokens::default(),
            queue: None,
            prefill: None,
            hand_off: None,
            ttft: None,
        }
    }

    /// When the request arrived, since 1970.
    pub fn arrived_unix(&self) -> Duration {
        self.ended_unix.saturating_sub(self.total)
    }
}
