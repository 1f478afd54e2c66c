//! The one place that sends a leg: a request for which an engine works, be it for a client's request
//! or the router's own.

use std::net::IpAddr;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_config::model::OnNoPrefill;
use splitrail_engine_client::{
    EngineClient, LegHeaders, Peer, ReplyRoom, Response, RevocableBody, Shape,
};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;
use splitrail_workload::progress::PATIENCE;
use tokio::time::Instant;

use crate::{Exclusion, ServedModel, Worker};

/// How often it is checked whether another worker can take the leg of one that has left service.
const ALTERNATIVE_INTERVAL: Duration = Duration::from_millis(250);

/// A leg without its body.
#[derive(Clone, Copy)]
pub struct LegRequest<'a> {
    /// The client of the model's engines.
    pub client: &'a EngineClient,
    /// The worker whose engine gets the leg.
    pub worker: &'a Worker,
    /// The path, and whether the reply is a stream of events.
    pub shape: Shape,
    /// Request id, rank, trace and gate.
    pub headers: &'a LegHeaders,
}

/// A whole reply to a leg.
pub struct LegReply {
    /// The body as it was received.
    pub body: Bytes,
    /// When the reply began. A prefill engine has computed the prompt and staged its blocks by then.
    pub begun: Instant,
    /// The address that the reply came from.
    pub peer: Option<IpAddr>,
}

impl LegRequest<'_> {
    /// Sends the leg, and returns when the head of a successful reply has arrived. What a refusal says
    /// of the worker is recorded.
    ///
    /// # Errors
    /// As [`EngineClient::post`].
    pub async fn begin(&self, body: impl Into<RevocableBody>) -> Result<Response, Error> {
        let begun = self.client.post(self.worker, self.shape, body, self.headers).await;
        match &begun {
            Ok(_) => self.worker.health.rest.end(),
            Err(error) => self.worker.record_refusal(error, self.shape.endpoint),
        }
        begun
    }

    /// Sends the leg, and reads the whole reply.
    ///
    /// # Errors
    /// As [`EngineClient::post`] and [`EngineClient::whole`].
    pub async fn whole(&self, body: impl Into<RevocableBody>) -> Result<LegReply, Error> {
        self.rest(self.begin(body).await?).await
    }

    /// Reads the whole of a reply that has begun just now.
    ///
    /// # Errors
    /// As [`EngineClient::whole`].
    pub async fn rest(&self, response: Response) -> Result<LegReply, Error> {
        let begun = Instant::now();
        let peer = response.peer.map(|Peer(address)| address);
        Ok(LegReply { body: self.client.whole(self.worker, response, None).await?, begun, peer })
    }
}

/// How a leg is waited for.
#[derive(Clone, Copy)]
pub struct LegWait<'a> {
    /// The model.
    pub served: &'a ServedModel,
    /// The worker whose engine has the leg.
    pub worker: &'a Worker,
    /// The leg for which the worker was chosen.
    pub leg: Leg,
    /// How long the leg may take.
    pub limit: LegLimit,
}

/// How long a leg may take.
#[derive(Clone, Copy, Debug)]
pub struct LegLimit {
    /// The limit.
    pub duration: Duration,
    /// The configuration key that an error names.
    pub key: &'static str,
}

impl LegLimit {
    /// The limit for a leg that is predicted to take `predicted`: at least [`PATIENCE`] times as long.
    #[must_use]
    pub fn at_least(self, predicted: Duration) -> Self {
        Self { duration: self.duration.max(predicted.saturating_mul(PATIENCE)), ..self }
    }
}

impl LegWait<'_> {
    /// Waits for a leg whose client has seen no output of it. If its worker leaves service and another
    /// could take the leg, the leg is given up at once. A leg that reaches its limit although its
    /// worker has worked meanwhile may go on, up to [`PATIENCE`] times the limit.
    ///
    /// Callers pin large futures: a future that is passed by value is moved and takes its size again
    /// in every future around it.
    ///
    /// # Errors
    /// As the leg, [`ErrorKind::EngineLost`], or [`ErrorKind::EngineTimeout`].
    pub async fn until_output<T>(
        self,
        leg: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let (progress, begun) = (&self.worker.health.progress, std::time::Instant::now());
        let signs = progress.signs();
        let mut leg = pin!(leg);
        let mut departure = pin!(self.departure());
        for _ in 0..PATIENCE {
            tokio::select! {
                biased;
                done = self.served.client.timers.bound(self.limit.duration, leg.as_mut()) => {
                    if let Ok(done) = done {
                        return done;
                    }
                }
                error = departure.as_mut() => return Err(error),
            }
            if progress.signs() == signs {
                progress.suspect(begun);
                return Err(self.exceeded());
            }
        }
        Err(self.exceeded().of_slow_prompt())
    }

    /// Waits for a leg whose whole reply goes to a client, like [`until_output`](Self::until_output).
    /// The time for which the reply waits for its client to read other replies does not count.
    ///
    /// # Errors
    /// As [`until_output`](Self::until_output), or a refusal of the client if the reply waits for it.
    pub async fn until_whole<T>(
        self,
        room: &ReplyRoom,
        leg: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let (progress, begun) = (&self.worker.health.progress, std::time::Instant::now());
        let signs = progress.signs();
        let mut leg = pin!(leg);
        let mut departure = pin!(self.departure());
        let (mut granted, mut left) = (Duration::ZERO, self.limit.duration);
        loop {
            tokio::select! {
                biased;
                done = self.served.client.timers.bound(left, leg.as_mut()) => {
                    if let Ok(done) = done {
                        return done;
                    }
                }
                error = departure.as_mut() => return Err(error),
            }
            let waited = room.waited()?;
            left = waited.saturating_sub(granted);
            if left.is_zero() {
                if progress.signs() == signs {
                    progress.suspect(begun);
                }
                return Err(self.exceeded());
            }
            granted = waited;
        }
    }

    /// Completes when the worker has left service and the leg can be done without it.
    async fn departure(self) -> Error {
        let lifecycle = &self.worker.health.lifecycle;
        let mut departures = lifecycle.departures();
        departures.mark_unchanged();
        // A worker may have left between the choice and the leg.
        loop {
            while self.worker.state().strands_legs() {
                if self.has_alternative() {
                    let why = lifecycle.since().why;
                    let state = self.worker.state().name();
                    let message = format!("worker {} is {state}: {why}", self.worker.id());
                    return Error::new(ErrorKind::EngineLost, message);
                }
                tokio::time::sleep(ALTERNATIVE_INTERVAL).await;
            }
            // The sender belongs to the worker, which is kept alive.
            if departures.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Whether the leg could be done without its worker.
    fn has_alternative(self) -> bool {
        let itself = [Exclusion::new(self.worker.index, VetoReason::Failed)];
        let is_local =
            self.leg == Leg::Prefill && self.served.config.on_no_prefill == OnNoPrefill::Local;
        is_local || self.served.pool.any_up(self.leg, &itself)
    }

    fn exceeded(self) -> Error {
        let LegLimit { duration, key } = self.limit;
        let message = format!("worker {} took longer than {key} ({duration:?})", self.worker.id());
        Error::new(ErrorKind::EngineTimeout, message)
    }
}
