//! One `Attach` call, from connecting to the end of the stream.

use std::sync::Arc;
use std::time::Duration;

use splitrail_proto::v1::attach_response::Message;
use splitrail_proto::v1::fleet_service_client::FleetServiceClient;
use splitrail_proto::v1::{AttachResponse, Welcome};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};

use super::claims::Claim;
use super::link::Link;
use super::outgoing::{OutgoingMessages, RouterInstructions, SendProgress, StreamStart};
use super::status::Stage;
use super::stream_end::{IncompatibleRouter, StreamEnd};
use super::tls::client_config;
use crate::mirror::{Agreement, HashTerms};
use crate::tasks::ConnectionTasks;

/// Maximum size of a router's message in bytes. All of them are short.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Maximum interval between two checks of whether a router accepts messages.
const STALL_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A stream that the router has accepted with a welcome message.
struct AttachedStream {
    incoming: Streaming<AttachResponse>,
    instructions: watch::Sender<RouterInstructions>,
    progress: Arc<SendProgress>,
    _agreement: Agreement,
    _claim: Claim,
    /// Last, because fields are dropped in order and the others may use the connection.
    _tasks: ConnectionTasks,
}

/// Attaches once and returns why the stream ended. `attached_at` is set when the router has
/// accepted the stream.
pub(super) async fn attach(link: &mut Link, attached_at: &mut Option<Instant>) -> StreamEnd {
    match open(link).await {
        Ok(stream) => {
            *attached_at = Some(Instant::now());
            handle_messages(link, stream).await
        }
        Err(end) => end,
    }
}

async fn open(link: &mut Link) -> Result<AttachedStream, StreamEnd> {
    let tasks = ConnectionTasks::default();
    let channel = connect(link, &tasks).await?;
    let (instructions, received) = watch::channel(RouterInstructions::default());
    let progress = Arc::new(SendProgress::default());
    let outgoing = OutgoingMessages::new(link, received, Arc::clone(&progress));
    let mut request = Request::new(outgoing.messages());
    if let Some(token) = &link.config.token {
        let bearer = token.bearer().await.map_err(StreamEnd::Token)?;
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
        .map_err(|_| StreamEnd::NoWelcome)??;
    let Some(Message::Welcome(welcome)) = first.ok_or(StreamEnd::Closed)?.message else {
        return Err(StreamEnd::NotWelcome);
    };
    let engine_block_size = link.shim.capabilities.borrow().block_size;
    IncompatibleRouter::check(&welcome, engine_block_size)?;
    let agreement =
        link.shim.mirror.agree(HashTerms::from(&welcome)).map_err(IncompatibleRouter::from)?;
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
    instructions.send_modify(|instructions| {
        instructions.start = Some(StreamStart { known_sequence, load_interval_ms })
    });
    Ok(AttachedStream {
        incoming,
        instructions,
        progress,
        _agreement: agreement,
        _claim: claim,
        _tasks: tasks,
    })
}

/// Handles the router's messages until the stream ends.
async fn handle_messages(link: &Link, mut stream: AttachedStream) -> StreamEnd {
    let stalled = wait_for_stall(Arc::clone(&stream.progress), link.config.timing.stall_timeout);
    tokio::pin!(stalled);
    loop {
        let message = tokio::select! {
            message = stream.incoming.message() => message,
            () = &mut stalled => return StreamEnd::Stalled,
        };
        match message {
            Ok(Some(AttachResponse { message })) => match message {
                Some(Message::Ack(ack)) => {
                    link.entry.update(|status| status.acked_sequence = ack.sequence);
                }
                Some(Message::Resync(resync)) => {
                    let (router, reason) = (link.address, resync.reason.as_str());
                    tracing::info!(%router, reason, "a router asks for everything again");
                    stream.instructions.send_modify(|instructions| instructions.resyncs += 1);
                }
                // Unknown messages of later versions must not end the stream.
                Some(Message::Welcome(_)) | None => {}
            },
            Ok(None) => return StreamEnd::Closed,
            Err(status) if link.claims.is_claimed_by_other(&link.router_id, link.address) => {
                tracing::debug!(%status, router = %link.address, "superseded");
                return StreamEnd::Superseded;
            }
            Err(status) => return status.into(),
        }
    }
}

/// Waits until the router has accepted no message for `timeout`, or has not finished a snapshot
/// after twice that time. Snapshots are limited because other routers may wait for one.
async fn wait_for_stall(progress: Arc<SendProgress>, timeout: Duration) {
    let (mut last_count, mut progress_at, mut snapshot_since) = (0, Instant::now(), None);
    loop {
        sleep(STALL_CHECK_INTERVAL.min(timeout)).await;
        let (count, now) = (progress.message_count(), Instant::now());
        if std::mem::replace(&mut last_count, count) != count {
            progress_at = now;
        }
        snapshot_since = progress.is_sending_snapshot().then(|| snapshot_since.unwrap_or(now));
        let snapshot_is_late = snapshot_since.is_some_and(|since| now - since >= 2 * timeout);
        if snapshot_is_late || now - progress_at >= timeout {
            return;
        }
    }
}

async fn connect(link: &Link, tasks: &ConnectionTasks) -> Result<Channel, StreamEnd> {
    let timing = &link.config.timing;
    let scheme = if link.config.tls.is_some() { "https" } else { "http" };
    let failed = |error: tonic::transport::Error| StreamEnd::Connect(root_cause(&error));
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
        let host = link.name.host().trim_matches(['[', ']']);
        let tls = client_config(tls, host).await.map_err(StreamEnd::Certificates)?;
        endpoint = endpoint.tls_config(tls).map_err(StreamEnd::Tls)?;
    }
    match timeout(timing.connect_timeout, endpoint.connect()).await {
        Ok(connected) => connected.map_err(failed),
        Err(_) => Err(StreamEnd::Connect("no reply in time".to_owned())),
    }
}

/// The innermost cause of an error. The outermost text is only "transport error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.last().map_or_else(|| error.to_string(), ToString::to_string)
}
