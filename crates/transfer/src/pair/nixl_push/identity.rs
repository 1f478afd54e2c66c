//! Asks engines that push KV who they are: where decode engines register with them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_engine::connectors::hand_off_trial::prefill_body;
use splitrail_engine::connectors::nixl_push::{PushEngine, PushReply};
use splitrail_engine::identity::TRIAL_PATH;
use splitrail_engine_client::{Engine, NoReply, Question, random_request_id};
use splitrail_fleet::{ServedModel, Worker};
use tokio::time::{Instant, timeout};

/// Maximum size of the reply to a question, in bytes.
const REPLY_MAX_BYTES: usize = 1 << 20;

/// The prompt of a question: a few tokens, whose block the engine keeps until its lease ends.
const PROMPT: &str = "splitrail";

/// The rank to which both the question for an identity and a prefill leg are pinned, so that decode
/// registers with the rank that pushes: the chosen one, or none if the engine has only one.
///
/// # Errors
/// The engine chooses among several ranks by itself, so nothing says with which one to register.
pub(super) fn pinned_rank(worker: &Worker, chosen: Option<u16>) -> Result<Option<u32>, Error> {
    if chosen.is_none() && worker.ranks.are_chosen_by_the_engine() {
        let what = "cannot hand over by push: it chooses the data-parallel rank by itself";
        return Err(Error::engine(worker.id(), what));
    }
    Ok(chosen.map(u32::from))
}

/// The identity of a worker's engine, asked by a prompt of a few tokens if it is not known. A decode
/// engine has one as well, which shows that it does not pull. `patience` is the time for the reply, and
/// for that to a question which another request has asked.
///
/// # Errors
/// The engine gives no identity, or one with a host that the router does not allow.
pub(super) async fn engine(
    served: &ServedModel,
    worker: &Worker,
    rank: Option<u32>,
    patience: Duration,
) -> Result<Arc<PushEngine>, UnknownIdentity> {
    if let Some(engine) = worker.transfer.push.known(rank) {
        return Ok(engine);
    }
    let waits_since = Instant::now();
    let unknown = |what: &str| {
        Error::engine(worker.id(), &format!("cannot hand over, its engine is not known: {what}"))
    };
    let Ok(mut failed) = timeout(patience, worker.transfer.push.asking()).await else {
        return Err(UnknownIdentity::Late(unknown("it has not answered yet")));
    };
    if let Some(engine) = worker.transfer.push.known(rank) {
        return Ok(engine);
    }
    // Requests that waited for a question that failed do not each ask again.
    if failed.is_some_and(|at| at >= waits_since) {
        return Err(UnknownIdentity::Late(unknown("it did not answer a moment ago")));
    }
    match ask(served, worker, rank, patience).await {
        Ok(engine) => {
            *failed = None;
            worker.transfer.push.learn(rank, engine.clone());
            Ok(worker.transfer.push.known(rank).unwrap_or_else(|| Arc::new(engine)))
        }
        Err(error) => {
            *failed = Some(Instant::now());
            Err(match error {
                NoIdentity::Failed(error) => UnknownIdentity::Failed(error),
                NoIdentity::Unusable(what) => UnknownIdentity::Failed(unknown(what.as_str())),
                NoIdentity::Late => UnknownIdentity::Late(unknown("it did not answer in time")),
            })
        }
    }
}

/// Why the identity of an engine is not known.
pub(super) enum UnknownIdentity {
    /// The engine cannot be reached, or what it says cannot be used.
    Failed(Error),
    /// The engine has not answered yet: it may only be busy.
    Late(Error),
}

impl From<UnknownIdentity> for Error {
    fn from(unknown: UnknownIdentity) -> Self {
        match unknown {
            UnknownIdentity::Failed(error) | UnknownIdentity::Late(error) => error,
        }
    }
}

/// Why a question was not answered with an identity.
enum NoIdentity {
    Failed(Error),
    Unusable(String),
    Late,
}

async fn ask(
    served: &ServedModel,
    worker: &Worker,
    rank: Option<u32>,
    patience: Duration,
) -> Result<PushEngine, NoIdentity> {
    let question = Question {
        path: TRIAL_PATH,
        body: Some(Bytes::from(prefill_body(served.name(), PROMPT))),
        rank,
        request_id: &random_request_id(),
        max_bytes: REPLY_MAX_BYTES,
        deadline: Instant::now() + patience,
    };
    let reply = served.client.question(worker, question).await;
    let reply = reply.map_err(|why| no_reply(worker, &why))?;
    if reply.status != 200 {
        let what = format!("it answered with status {}", reply.status);
        return Err(NoIdentity::Unusable(what));
    }
    let said = PushReply::from_body(&reply.body);
    let said = said.map_err(|error| NoIdentity::Unusable(error.to_string()))?;
    served.admit_host(worker, said.engine.host(), reply.peer).map_err(NoIdentity::Failed)?;
    Ok(said.engine)
}

fn no_reply(worker: &Worker, why: &NoReply) -> NoIdentity {
    match why {
        NoReply::Connect { cause, .. } | NoReply::Name { cause } | NoReply::Tls { cause } => {
            worker.set_unreachable(format_args!("it cannot be reached: {cause}"));
            let message = format!("worker {} cannot be reached", worker.id());
            NoIdentity::Failed(Error::new(ErrorKind::EngineUnreachable, message))
        }
        NoReply::Late => NoIdentity::Late,
        _ => NoIdentity::Unusable("it gave no complete reply".to_owned()),
    }
}
