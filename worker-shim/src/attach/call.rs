//! One call of `Attach`: from connecting to whatever ends it.

use std::sync::Arc;
use std::time::Duration;

use splitrail_kv::HashSeed;
use splitrail_proto::v1::attach_response::Message;
use splitrail_proto::v1::fleet_service_client::FleetServiceClient;
use splitrail_proto::v1::{AttachResponse, Welcome};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};

use super::claims::Claim;
use super::link::Link;
use super::outgoing::{Outgoing, Pulse, Start, Steer};
use super::refusal::{Ended, Refusal};
use super::status::Stage;
use crate::mirror::{Agreement, Terms};
use crate::tasks::ConnectionTasks;

/// Longest message of a router, in bytes: all are short.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// How often it is looked whether a router takes what it is told.
const LOOK: Duration = Duration::from_secs(1);

/// A stream that was welcomed.
struct Welcomed {
    incoming: Streaming<AttachResponse>,
    steer: watch::Sender<Steer>,
    pulse: Arc<Pulse>,
    _agreement: Agreement,
    _claim: Claim,
    /// Last, since the others may want to say good-bye.
    _tasks: ConnectionTasks,
}

/// Attaches once, until something ends it. `attached_at` is set when the router is content.
pub(super) async fn attach(link: &mut Link, attached_at: &mut Option<Instant>) -> Ended {
    match open(link).await {
        Ok(welcomed) => {
            *attached_at = Some(Instant::now());
            listen(link, welcomed).await
        }
        Err(ended) => ended,
    }
}

async fn open(link: &mut Link) -> Result<Welcomed, Ended> {
    let tasks = ConnectionTasks::default();
    let channel = connect(link, &tasks).await?;
    let (steer, steering) = watch::channel(Steer::default());
    let pulse = Arc::new(Pulse::default());
    let outgoing = Outgoing::new(link, steering, Arc::clone(&pulse));
    let mut request = Request::new(outgoing.messages());
    if let Some(token) = &link.config.token {
        let bearer = token.bearer().await.map_err(Ended::Token)?;
        request.metadata_mut().insert("authorization", bearer);
    }
    let mut client = FleetServiceClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let welcoming = async {
        let mut incoming = client.attach(request).await?.into_inner();
        let first = incoming.message().await?;
        Ok::<_, tonic::Status>((incoming, first))
    };
    let (incoming, first) = timeout(link.config.timing.welcome_timeout, welcoming)
        .await
        .map_err(|_| Ended::NoWelcome)??;
    let Some(Message::Welcome(welcome)) = first.ok_or(Ended::Closed)?.message else {
        return Err(Ended::NotWelcome);
    };
    let engine_block_size = link.told.capabilities.borrow().block_size;
    Refusal::check(&welcome, engine_block_size)?;
    let agreement = link.told.mirror.agree(terms(&welcome)).map_err(Refusal::from)?;
    link.router_id.clone_from(&welcome.router_id);
    let claim = link.claims.claim(&welcome.router_id, link.address);
    let acked = welcome.known_sequence.unwrap_or_default();
    link.entry.update(|status| {
        status.attached += 1;
        status.stage = Stage::Snapshot;
        status.router_id.clone_from(&welcome.router_id);
        (status.acked_sequence, status.sent_sequence) = (acked, acked);
        status.last_error = None;
    });
    let (router, router_id) = (link.address, welcome.router_id.as_str());
    tracing::info!(%router, router_id, ?welcome.known_sequence, "attached to a router");
    let Welcome { known_sequence, load_interval_ms, .. } = welcome;
    steer.send_modify(|steer| steer.start = Some(Start { known_sequence, load_interval_ms }));
    Ok(Welcomed { incoming, steer, pulse, _agreement: agreement, _claim: claim, _tasks: tasks })
}

fn terms(welcome: &Welcome) -> Terms {
    Terms {
        seed: HashSeed(welcome.hash_seed),
        model: welcome.model.clone(),
        block_size: welcome.block_size,
        blocks_max: welcome.blocks_max,
    }
}

/// Hears what the router says, until it says no more.
async fn listen(link: &Link, mut welcomed: Welcomed) -> Ended {
    let stalled = stalled(Arc::clone(&welcomed.pulse), link.config.timing.stall_timeout);
    tokio::pin!(stalled);
    loop {
        let message = tokio::select! {
            message = welcomed.incoming.message() => message,
            () = &mut stalled => return Ended::Stalled,
        };
        match message {
            Ok(Some(AttachResponse { message })) => match message {
                Some(Message::Ack(ack)) => {
                    link.entry.update(|status| status.acked_sequence = ack.sequence);
                }
                Some(Message::Resync(resync)) => {
                    let (router, reason) = (link.address, resync.reason.as_str());
                    tracing::info!(%router, reason, "a router asks for everything again");
                    welcomed.steer.send_modify(|steer| steer.resyncs += 1);
                }
                // What a later version says must not end the stream.
                Some(Message::Welcome(_)) | None => {}
            },
            Ok(None) => return Ended::Closed,
            Err(status) if link.claims.is_other(&link.router_id, link.address) => {
                tracing::debug!(%status, router = %link.address, "superseded");
                return Ended::Superseded;
            }
            Err(status) => return status.into(),
        }
    }
}

/// Waits until a router has taken nothing for so long, or is not done with a copy of
/// everything after twice as long: others may wait for a copy of theirs.
async fn stalled(pulse: Arc<Pulse>, after: Duration) {
    let (mut last, mut taken_at, mut copying_since) = (0, Instant::now(), None);
    loop {
        sleep(LOOK.min(after)).await;
        let (messages, now) = (pulse.messages(), Instant::now());
        if std::mem::replace(&mut last, messages) != messages {
            taken_at = now;
        }
        copying_since = pulse.is_copying().then(|| copying_since.unwrap_or(now));
        let copies_long = copying_since.is_some_and(|since| now - since >= 2 * after);
        if copies_long || now - taken_at >= after {
            return;
        }
    }
}

async fn connect(link: &Link, tasks: &ConnectionTasks) -> Result<Channel, Ended> {
    let timing = &link.config.timing;
    let scheme = if link.config.tls.is_some() { "https" } else { "http" };
    let failed = |error: tonic::transport::Error| Ended::Connect(chain(&error));
    let named = format!("{scheme}://{}", link.name);
    let mut endpoint = Endpoint::from_shared(format!("{scheme}://{}", link.address))
        .map_err(failed)?
        .executor(tasks.executor())
        .connect_timeout(timing.connect_timeout)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(timing.ping_interval)
        .keep_alive_timeout(timing.ping_timeout)
        .keep_alive_while_idle(true);
    if let Ok(origin) = named.parse() {
        endpoint = endpoint.origin(origin);
    }
    if let Some(tls) = &link.config.tls {
        let tls = tls.client(link.name.host()).await.map_err(Ended::Certificates)?;
        endpoint = endpoint.tls_config(tls).map_err(Ended::Tls)?;
    }
    match timeout(timing.connect_timeout, endpoint.connect()).await {
        Ok(connected) => connected.map_err(failed),
        Err(_) => Err(Ended::Connect("no answer in time".to_owned())),
    }
}

/// An error with its causes: the first alone says "transport error".
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.last().map_or_else(|| error.to_string(), ToString::to_string)
}
