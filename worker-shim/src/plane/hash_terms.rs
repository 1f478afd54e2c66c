//! The routers' hash settings. The shim asks all routers, which must agree.

use std::time::Duration;

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::{Broker, names};
use splitrail_proto::v1::{Capabilities, PlaneAsk, Welcome};
use splitrail_settings::log_throttle::KeyedLogThrottle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use super::config::PlaneConfig;
use super::session::PlaneSession;
use crate::attach::IncompatibleRouter;

/// How long the shim waits for further replies after the first one.
const FURTHER_REPLIES_TIMEOUT: Duration = Duration::from_millis(200);
/// How long the shim waits for the first reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval between two requests while no router replies.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Interval between two checks of known settings.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of replies to one request.
const REPLIES_MAX: usize = 64;

/// Whether two routers produce the same hashes.
fn hash_alike(one: &Welcome, other: &Welcome) -> bool {
    (one.hash_seed, &one.model, one.block_size) == (other.hash_seed, &other.model, other.block_size)
}

/// Asks until a router replies. Prefers the `earlier` settings if any router still uses them.
pub(super) async fn wait_for_terms(
    config: &PlaneConfig,
    broker: &Broker,
    capabilities: &watch::Receiver<Capabilities>,
    earlier: Option<&Welcome>,
) -> Welcome {
    let mut log_throttle = KeyedLogThrottle::default();
    loop {
        broker.until_connected().await;
        let block_size = capabilities.borrow().block_size;
        let answers = ask(config, broker, block_size, &mut log_throttle).await;
        let same =
            earlier.and_then(|earlier| answers.iter().find(|other| hash_alike(earlier, other)));
        if let Some(terms) = same.or(answers.first()) {
            return terms.clone();
        }
        if log_throttle.may_log("no_terms") {
            tracing::warn!(
                model = config.model,
                "no router has sent its hash settings yet: waiting"
            );
        }
        sleep(RETRY_INTERVAL).await;
    }
}

/// Waits until every router that replies uses other settings than the agreed ones.
pub(super) async fn wait_for_change(plane: &PlaneSession) {
    let mut log_throttle = KeyedLogThrottle::default();
    loop {
        sleep(CHECK_INTERVAL).await;
        let block_size = plane.capabilities.borrow().block_size;
        let answers = ask(&plane.config, &plane.broker, block_size, &mut log_throttle).await;
        let others = answers.iter().filter(|other| !hash_alike(&plane.terms, other)).count();
        if others > 0 && others == answers.len() {
            return;
        }
        if others > 0 && log_throttle.may_log("others") {
            tracing::error!(
                others,
                "some routers use other hash settings: they will refuse this worker"
            );
        }
    }
}

/// Asks all routers once. Returns the acceptable replies, completed with a block size.
async fn ask(
    config: &PlaneConfig,
    broker: &Broker,
    block_size: Option<u32>,
    log_throttle: &mut KeyedLogThrottle,
) -> Vec<Welcome> {
    let inbox = broker.client.new_inbox();
    let Ok(mut replies) = broker.client.subscribe(inbox.clone()).await else { return Vec::new() };
    let question = PlaneAsk {
        who: config.worker_id.clone(),
        reason: "terms".to_owned(),
        model: config.model.clone(),
    };
    let subject = names::terms(&config.model);
    let payload = question.encode_to_vec().into();
    if broker.client.publish_with_reply(subject, inbox, payload).await.is_err() {
        return Vec::new();
    }
    let mut until = Instant::now() + REPLY_TIMEOUT;
    let mut answers = Vec::new();
    while answers.len() < REPLIES_MAX
        && let Ok(Some(reply)) = timeout_at(until, replies.next()).await
    {
        // This also skips the broker's own reply if there is no subscriber.
        let Ok(mut terms) = Welcome::decode(reply.payload) else { continue };
        if terms.model.is_empty() {
            break;
        }
        if terms.block_size == 0 {
            let Some(tokens) = block_size else {
                if log_throttle.may_log("unknown") {
                    tracing::warn!(
                        "the engine has not reported its block size yet, and the router has none \
                         configured: waiting for the engine"
                    );
                }
                continue;
            };
            terms.block_size = tokens;
        }
        match IncompatibleRouter::check(&terms, block_size) {
            Ok(()) => {
                answers.push(terms);
                until = until.min(Instant::now() + FURTHER_REPLIES_TIMEOUT);
            }
            Err(error) if log_throttle.may_log("refused") => {
                tracing::error!(%error, router = terms.router_id, "a router is incompatible");
                config.status.update(|status| status.last_error = Some(error.to_string()));
            }
            Err(_) => {}
        }
    }
    answers
}
