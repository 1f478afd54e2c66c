//! How routers hash: each is asked, and all must say the same.

use std::time::Duration;

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::{Broker, names};
use splitrail_kv::HashSeed;
use splitrail_proto::v1::{Capabilities, PlaneAsk, Welcome};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use super::{Config, Plane};
use crate::attach::IncompatibleRouter;
use crate::mirror::{HashTerms, KeyedLogThrottle};

/// How long answers are waited for, once there is one and at all.
const MORE: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two questions while there is no answer.
const BETWEEN: Duration = Duration::from_millis(200);
/// Between two once there was one.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// Answers to one question.
const ANSWERS_MAX: usize = 64;

/// As the mirror takes them.
pub(super) fn of(terms: &Welcome) -> HashTerms {
    HashTerms {
        seed: HashSeed(terms.hash_seed),
        model: terms.model.clone(),
        block_size: terms.block_size,
        blocks_max: terms.blocks_max,
    }
}

/// Whether two routers hash alike.
fn are_same(one: &Welcome, other: &Welcome) -> bool {
    (one.hash_seed, &one.model, one.block_size) == (other.hash_seed, &other.model, other.block_size)
}

/// Asks until some router has said it. Those that are `known` are taken again if anyone
/// still has them.
pub(super) async fn ask_until_known(
    config: &Config,
    broker: &Broker,
    capabilities: &watch::Receiver<Capabilities>,
    known: Option<&Welcome>,
) -> Welcome {
    let mut log_throttle = KeyedLogThrottle::default();
    loop {
        broker.until_connected().await;
        let block_size = capabilities.borrow().block_size;
        let answers = ask(config, broker, block_size, &mut log_throttle).await;
        let same = known.and_then(|known| answers.iter().find(|other| are_same(known, other)));
        if let Some(terms) = same.or(answers.first()) {
            return terms.clone();
        }
        if log_throttle.may_log("no_terms") {
            tracing::warn!(model = config.model, "no router says how blocks are hashed: waiting");
        }
        sleep(BETWEEN).await;
    }
}

/// Waits until no router hashes as agreed any more, but some do otherwise.
pub(super) async fn until_others(plane: &Plane) {
    let mut log_throttle = KeyedLogThrottle::default();
    loop {
        sleep(LOOK_AGAIN).await;
        let block_size = plane.capabilities.borrow().block_size;
        let answers = ask(&plane.config, &plane.broker, block_size, &mut log_throttle).await;
        let others = answers.iter().filter(|other| !are_same(&plane.terms, other)).count();
        if others > 0 && others == answers.len() {
            return;
        }
        if others > 0 && log_throttle.may_log("others") {
            tracing::error!(
                others,
                "routers do not agree on how blocks are hashed: those that differ do not believe this worker"
            );
        }
    }
}

/// Asks once; the answers that can be accepted, with a block size.
async fn ask(
    config: &Config,
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
    let mut until = Instant::now() + PATIENCE;
    let mut answers = Vec::new();
    while answers.len() < ANSWERS_MAX
        && let Ok(Some(reply)) = timeout_at(until, replies.next()).await
    {
        // Also what the broker says itself, where nobody listens.
        let Ok(mut terms) = Welcome::decode(reply.payload) else { continue };
        if terms.model.is_empty() {
            break;
        }
        if terms.block_size == 0 {
            terms.block_size = block_size.unwrap_or(0);
        }
        match IncompatibleRouter::check(&terms, block_size) {
            Ok(()) => {
                answers.push(terms);
                until = until.min(Instant::now() + MORE);
            }
            Err(error) if log_throttle.may_log("refused") => {
                tracing::error!(%error, router = terms.router_id, "a router cannot be served");
                config.status.update(|status| status.last_error = Some(error.to_string()));
            }
            Err(_) => {}
        }
    }
    answers
}
