//! What the router knows of engines that push KV (`connector: nixl_push`): where decode engines
//! register with a prefill worker, and how many decode legs are stranded on a decode worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use arc_swap::ArcSwap;
use splitrail_engine::connectors::nixl_push::PushEngine;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::ranks::RANKS_MAX;

/// The engine to which the legs that are pinned to a rank go; all legs, without a rank.
type Identity = (Option<u32>, Arc<PushEngine>);

/// What is known of one worker whose engine pushes KV, or has KV pushed to it.
#[derive(Debug, Default)]
pub struct PushState {
    /// The identity of each rank to which legs are pinned; of the engine, if legs are not pinned.
    known: ArcSwap<Vec<Identity>>,
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

    /// The identities as the admin listener shows them; `None` if the engine has not shown that it
    /// pushes.
    pub fn view(&self) -> Option<Vec<serde_json::Value>> {
        let known = self.known.load();
        let view = known.iter().map(|(rank, engine)| engine.view(*rank)).collect::<Vec<_>>();
        (!view.is_empty()).then_some(view)
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

    /// Waits until no other request asks for an identity. The value is the time of the last question
    /// that failed.
    pub async fn asking(&self) -> MutexGuard<'_, Option<Instant>> {
        self.asking.lock().await
    }

    /// Forgets an identity with which a pair failed, unless a newer one is known by now.
    pub fn forget(&self, engine: &Arc<PushEngine>) {
        self.known.rcu(|known| {
            let others = known.iter().filter(|(_, other)| !Arc::ptr_eq(other, engine));
            others.cloned().collect::<Vec<_>>()
        });
    }

    /// Forgets who the engine is, since its process is or may be another one.
    pub fn forget_identities(&self) {
        self.known.store(Arc::default());
    }

    /// Forgets stranded legs, since the engine's own reports are those of a new process.
    pub fn forget_stranded_legs(&self) {
        self.stranded.store(0, Relaxed);
    }

    /// Counts a decode leg whose KV never comes.
    pub fn strand(&self) {
        self.stranded.fetch_add(1, Relaxed);
    }

    /// Takes over the stranded legs of the same engine under its earlier description.
    pub fn succeed_to(&self, before: &Self) {
        self.stranded.store(before.stranded(), Relaxed);
    }

    /// Number of decode legs whose KV never comes, since the engine's process is the present one.
    pub fn stranded(&self) -> u32 {
        self.stranded.load(Relaxed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_engine::connectors::nixl_push::PushReply;

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
        state.forget_identities();
        assert_eq!(state.stranded(), 1, "it was only out of reach");
        state.forget_stranded_legs();
        assert_eq!(state.stranded(), 0);
    }
}
