//! What the router knows of engines that push KV (`connector: nixl_push`): where decode engines
//! register with a prefill worker, and how many decode legs are stranded on a decode worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::HeaderValue;
use splitrail_api::error::{Error, Kind};
use splitrail_api::text::random_id;
use splitrail_engine::nixl_push::{PushEngine, PushReply};
use splitrail_engine::vllm::hand_off_trial::prefill_body;
use splitrail_engine::vllm::identity::TRIAL_PATH;
use splitrail_engine_client::{Engine, NoReply, Question};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::ranks::RANKS_MAX;
use super::served::Served;
use super::worker::Worker;

/// Maximum size of the reply to a question, in bytes.
const REPLY_MAX_BYTES: usize = 1 << 20;

/// The prompt of a question: a few tokens, whose block the engine keeps until its lease ends.
const PROMPT: &str = "splitrail";

/// What is known of one worker whose engine pushes KV, or has KV pushed to it.
#[derive(Debug, Default)]
pub struct PushState {
    /// The identity of each rank to which legs are pinned; of the engine, if legs are not pinned.
    known: ArcSwap<Vec<(Option<u32>, Arc<PushEngine>)>>,
    /// Allows one question at a time. Holds the time of the last failed question.
    asking: Mutex<Option<Instant>>,
    /// Decode legs whose KV never comes. The engine keeps their blocks until it restarts.
    stranded: AtomicU32,
}

impl PushState {
    /// The identity of the engine, or of one of its ranks, if it is known.
    pub fn known(&self, rank: Option<u32>) -> Option<Arc<PushEngine>> {
        let known = self.known.load();
        known.iter().find(|(of, _)| *of == rank).map(|(_, engine)| Arc::clone(engine))
    }

    /// Learns an identity from a reply. Returns whether another one was known before.
    pub fn learn(&self, rank: Option<u32>, engine: PushEngine) -> bool {
        let before = self.known(rank);
        if before.as_deref() == Some(&engine) {
            return false;
        }
        let engine = Arc::new(engine);
        self.known.rcu(|known| {
            let others = known.iter().filter(|(of, _)| *of != rank).cloned();
            let others = others.take(usize::from(RANKS_MAX));
            others.chain([(rank, Arc::clone(&engine))]).collect::<Vec<_>>()
        });
        before.is_some()
    }

    /// Forgets an identity with which a pair failed, unless a newer one is known by now.
    pub fn forget(&self, engine: &Arc<PushEngine>) {
        self.known.rcu(|known| {
            let others = known.iter().filter(|(_, other)| !Arc::ptr_eq(other, engine));
            others.cloned().collect::<Vec<_>>()
        });
    }

    /// Forgets everything, since the engine's process is or may be another one.
    pub fn forget_all(&self) {
        self.known.store(Arc::default());
        self.stranded.store(0, Relaxed);
    }

    /// Counts a decode leg whose KV never comes.
    pub fn strand(&self) {
        self.stranded.fetch_add(1, Relaxed);
    }

    /// Number of decode legs whose KV never comes, since the engine's process is the present one.
    pub fn stranded(&self) -> u32 {
        self.stranded.load(Relaxed)
    }
}

/// The rank to which both the question for an identity and a prefill leg are pinned, so that decode
/// registers with the rank that pushes: the chosen one, or none if the engine has only one.
///
/// # Errors
/// The engine chooses among several ranks by itself, so nothing says with which one to register.
pub fn pinned_rank(worker: &Worker, chosen: Option<u16>) -> Result<Option<u32>, Error> {
    if chosen.is_none() && worker.ranks.are_chosen_by_the_engine() {
        let what = "cannot hand over by push: it chooses the data-parallel rank by itself";
        return Err(Error::engine(worker.id(), what));
    }
    Ok(chosen.map(u32::from))
}

/// The identity of a worker's engine, asked by a prompt of a few tokens if it is not known. A decode
/// engine has one as well, which shows that it does not pull.
///
/// # Errors
/// The engine gives no identity, or one with a host that the router does not allow.
pub async fn engine(
    served: &Served,
    worker: &Worker,
    rank: Option<u32>,
    patience: Duration,
) -> Result<Arc<PushEngine>, Error> {
    if let Some(engine) = worker.push.known(rank) {
        return Ok(engine);
    }
    let waits_since = Instant::now();
    let mut failed = worker.push.asking.lock().await;
    if let Some(engine) = worker.push.known(rank) {
        return Ok(engine);
    }
    let unknown = |what: &str| {
        Error::engine(worker.id(), &format!("cannot hand over, its engine is not known: {what}"))
    };
    // Requests that waited for a question that failed do not each ask again.
    if failed.is_some_and(|at| at >= waits_since) {
        return Err(unknown("it gave no answer a moment ago"));
    }
    match ask(served, worker, rank, patience).await {
        Ok(engine) => {
            *failed = None;
            worker.push.learn(rank, engine.clone());
            Ok(worker.push.known(rank).unwrap_or_else(|| Arc::new(engine)))
        }
        Err(error) => {
            *failed = Some(Instant::now());
            match error {
                NoIdentity::Failed(error) => Err(error),
                NoIdentity::Unusable(what) => Err(unknown(&what)),
            }
        }
    }
}

/// Why there is no identity.
enum NoIdentity {
    Failed(Error),
    Unusable(String),
}

async fn ask(
    served: &Served,
    worker: &Worker,
    rank: Option<u32>,
    patience: Duration,
) -> Result<PushEngine, NoIdentity> {
    let request_id = HeaderValue::from_str(&random_id());
    let request_id = request_id.unwrap_or_else(|_| HeaderValue::from_static("splitrail"));
    let question = Question {
        path: TRIAL_PATH,
        body: Some(Bytes::from(prefill_body(served.name(), PROMPT))),
        rank,
        request_id: &request_id,
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
            NoIdentity::Failed(Error::new(Kind::EngineUnreachable, message))
        }
        NoReply::Late => NoIdentity::Unusable("it did not answer in time".to_owned()),
        _ => NoIdentity::Unusable("it gave no complete reply".to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn engine(id: &str) -> PushEngine {
        let raw = format!(
            r#"{{"do_remote_prefill":true,"remote_engine_id":"{id}","remote_host":"h",
            "remote_port":1,"transfer_mode":"push"}}"#
        );
        PushReply::parse(&raw).unwrap().engine
    }

    #[test]
    fn a_restarted_engine_replaces_the_earlier_one_and_ranks_are_kept_apart() {
        let state = PushState::default();
        assert!(state.known(None).is_none());
        assert!(!state.learn(Some(0), engine("a")), "the first one is no change");
        assert!(!state.learn(Some(1), engine("b")));
        assert!(!state.learn(Some(0), engine("a")));
        assert!(state.learn(Some(0), engine("c")), "the engine is another one");
        let known = |rank| (*state.known(Some(rank)).unwrap()).clone();
        assert_eq!((known(0), known(1)), (engine("c"), engine("b")));
        assert!(state.known(None).is_none());
    }

    #[test]
    fn only_the_identity_that_failed_is_forgotten() {
        let state = PushState::default();
        state.learn(None, engine("a"));
        let failed = state.known(None).unwrap();
        state.learn(None, engine("b"));
        state.forget(&failed);
        assert!(state.known(None).is_some(), "a newer one stays");
        state.forget(&state.known(None).unwrap());
        assert!(state.known(None).is_none());
    }

    #[test]
    fn another_process_holds_no_stranded_leg() {
        let state = PushState::default();
        state.strand();
        assert_eq!(state.stranded(), 1);
        state.forget_all();
        assert_eq!(state.stranded(), 0);
    }
}
