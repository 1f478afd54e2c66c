//! The one place that sends a leg: a request for which an engine works, be it for a client's request
//! or the router's own.

use std::net::IpAddr;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_engine_client::{
    EngineClient, LegHeaders, Peer, ReplyRoom, Response, RevocableBody, Shape, TimeoutError,
};
use tokio::time::Instant;

use crate::Worker;

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
    /// Sends the leg, and returns when the head of a successful reply has arrived.
    ///
    /// # Errors
    /// As [`EngineClient::post`].
    pub async fn begin(&self, body: impl Into<RevocableBody>) -> Result<Response, Error> {
        self.client.post(self.worker, self.shape, body, self.headers).await
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
        Ok(LegReply { body: self.client.whole(self.worker, response).await?, begun, peer })
    }
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
    /// Limits the duration of a leg. Callers pin large futures: a future that is passed by value is
    /// moved and takes its size again in every future around it.
    ///
    /// # Errors
    /// As the leg, or [`ErrorKind::EngineTimeout`].
    pub async fn bound<T>(
        self,
        client: &EngineClient,
        worker: &Worker,
        leg: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let done = client.timers().bound(self.duration, leg).await;
        done.unwrap_or_else(|TimeoutError| Err(self.exceeded(worker)))
    }

    /// Limits a leg whose whole reply goes to a client. The time for which the reply waits for its
    /// client to read other replies does not count.
    ///
    /// # Errors
    /// As [`bound`](Self::bound), or a refusal of the client if the reply waits for it.
    pub async fn bound_for_client<T>(
        self,
        client: &EngineClient,
        worker: &Worker,
        room: &ReplyRoom,
        leg: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let mut leg = pin!(leg);
        if let Ok(done) = client.timers().bound(self.duration, leg.as_mut()).await {
            return done;
        }
        let mut granted = Duration::ZERO;
        loop {
            let waited = room.waited()?;
            let left = waited.saturating_sub(granted);
            if left.is_zero() {
                return Err(self.exceeded(worker));
            }
            granted = waited;
            if let Ok(done) = tokio::time::timeout(left, leg.as_mut()).await {
                return done;
            }
        }
    }

    fn exceeded(self, worker: &Worker) -> Error {
        let Self { duration, key } = self;
        let message = format!("worker {} took longer than {key} ({duration:?})", worker.id());
        Error::new(ErrorKind::EngineTimeout, message)
    }
}
