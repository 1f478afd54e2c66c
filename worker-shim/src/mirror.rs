//! The exact picture of the engine's KV blocks, and the changes that lead to it.
//!
//! One index with this engine as its only worker and its data-parallel ranks beside each
//! other. It follows the engine's own events; whoever tells routers of it reads the changes
//! from a ring of the last ones, or takes a copy of everything where the ring does not reach
//! back far enough. Nothing here waits for a router.

mod cut;
mod follow;
mod log;
mod quiet;
mod source;
pub(crate) mod state;
mod status;
mod terms;
mod wire;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use splitrail_engine::vllm::subscription::Pacing;
use splitrail_kv::{BlockHash, HashSeed};
use tokio::sync::watch;
use tokio::time::timeout;

pub(crate) use self::cut::{Cut, Parts};
pub(crate) use self::log::Head;
pub(crate) use self::quiet::Quiet;
pub use self::source::Source;
pub use self::status::{RankStatus, Status};
pub use self::terms::{Agreement, Disagreement, Terms};

use self::cut::Cuts;
use self::log::Lost;
use self::state::State;
use crate::beat;

/// Bounds of a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most blocks of one rank; more are not mirrored.
    pub blocks_max: usize,
    /// The seed of hashes that routers must have; else the first one's counts.
    pub seed: Option<HashSeed>,
    /// Most bytes of the last changes that are kept for routers that come back.
    pub ring_bytes_max: usize,
    /// How long what was known is kept while the engine's events are cut off.
    pub cut_off_max: Duration,
    /// How seldom events are read while many come; zero reads them one by one. Routers are
    /// told as much later, and [`Mirror::refresh`] waits for none of it.
    pub read_every: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            blocks_max: 8 << 20,
            seed: None,
            ring_bytes_max: 8 << 20,
            cut_off_max: Duration::from_secs(10),
            read_every: beat::EVERY,
        }
    }
}

/// A handle on the mirror of one engine.
#[derive(Clone, Debug)]
pub struct Mirror {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Up to where changes are there to be read.
    head: watch::Sender<Head>,
    /// Raised when what routers agree on changes; 0 as long as there is nothing.
    epoch: watch::Sender<u64>,
    /// Whether everything that the engines kept for replays is in.
    caught_up: watch::Sender<bool>,
    cuts: Cuts,
    /// Raised by whoever cannot wait for the next read.
    asks: watch::Sender<u64>,
    /// The last of them that each rank has answered.
    answers: watch::Sender<BTreeMap<u16, u64>>,
    read_every: Duration,
}

impl Mirror {
    /// A mirror that waits for a router to say how blocks are hashed, and for
    /// [`Mirror::follow`].
    pub fn new(config: Config) -> Self {
        let read_every = config.read_every;
        let state = State::new(config);
        let head = watch::Sender::new(state.head());
        let inner = Inner {
            state: Mutex::new(state),
            head,
            epoch: watch::Sender::new(0),
            caught_up: watch::Sender::new(false),
            cuts: Cuts::default(),
            asks: watch::Sender::new(0),
            answers: watch::Sender::default(),
            read_every,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Follows the engine's events, from each of these sources, until the future is dropped.
    /// To be called once at a time; called again, the mirror begins anew.
    pub async fn follow(&self, sources: Vec<Source>) {
        self.update(|state| state.expect(sources.iter().map(|source| source.rank)));
        let ranks = sources.into_iter().map(|source| follow::follow(self.clone(), source));
        futures_util::future::join_all(ranks).await;
        // Without a source there is nothing to wait for.
        std::future::pending().await
    }

    /// Whether the engine holds the block with this chained hash and all before it, `blocks`
    /// of them altogether, in one rank's cache. The namespace need not be looked at: it is in
    /// the hash. False while the engine's events are cut off or incomplete.
    pub fn holds(&self, _namespace: BlockHash, rank: u16, blocks: u32, last: BlockHash) -> bool {
        self.state().holds(rank, blocks, last)
    }

    /// Takes in what a rank of the engine has published so far, so that [`Mirror::holds`]
    /// answers by it.
    pub async fn refresh(&self, rank: u16) {
        let Inner { asks, answers, read_every, .. } = &*self.inner;
        if read_every.is_zero() || !self.state().is_current(rank) {
            return;
        }
        let mut ask = 0;
        asks.send_modify(|last| {
            *last += 1;
            ask = *last;
        });
        let mut answers = answers.subscribe();
        let is_in = |answers: &BTreeMap<u16, u64>| answers.get(&rank).is_some_and(|at| *at >= ask);
        // After this time it would have been read without being asked for.
        let _in_time = timeout(*read_every, answers.wait_for(is_in)).await;
    }

    /// What a rank follows its engine by.
    fn pacing(&self) -> Pacing {
        Pacing { pace: beat::pace(self.inner.read_every), asks: self.inner.asks.subscribe() }
    }

    /// All that had come when this was asked for is in.
    fn answer(&self, rank: u16, ask: u64) {
        self.inner.answers.send_modify(|answers| {
            answers.insert(rank, ask);
        });
    }

    /// How things stand: for metrics and status pages. Looks at every strip of blocks.
    pub fn status(&self) -> Status {
        self.state().status()
    }

    /// Adds one of those who must agree on how blocks are hashed. The first decides, for as
    /// long as any of them is there.
    ///
    /// # Errors
    /// If others have agreed on something else.
    pub fn agree(&self, terms: Terms) -> Result<Agreement, Disagreement> {
        let begins = self.update(|state| state.join(terms))?;
        if begins {
            self.inner.epoch.send_modify(|epoch| *epoch += 1);
        }
        Ok(Agreement::new(self.clone()))
    }

    fn leave(&self) {
        self.state().leave();
    }

    /// The mirror that changes are numbered in, and up to where.
    pub(crate) fn head(&self) -> watch::Receiver<Head> {
        self.inner.head.subscribe()
    }

    /// Whether everything that the engine kept for replays is in.
    pub(crate) fn caught_up(&self) -> watch::Receiver<bool> {
        self.inner.caught_up.subscribe()
    }

    /// The changes that follow one, a few at a time.
    pub(crate) fn after(
        &self,
        generation: u64,
        sequence: u64,
    ) -> Result<Vec<Arc<splitrail_proto::v1::Events>>, Lost> {
        self.state().log.after(generation, sequence)
    }

    /// The identity of the present mirror; empty before there is one.
    pub(crate) fn id(&self) -> (u64, String) {
        let state = self.state();
        (state.log.generation(), state.log.mirror_id().to_owned())
    }

    #[cfg(test)]
    pub(crate) fn inner_epoch(&self) -> watch::Receiver<u64> {
        self.inner.epoch.subscribe()
    }

    /// Everything that is held now, shared by all who ask for it at about the same time.
    pub(crate) async fn cut(&self) -> Arc<Cut> {
        self.inner.cuts.take(self).await
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever panicked did so between two changes: each is made as a whole.
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and says so to all who wait.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let (result, head, caught_up) = {
            let mut state = self.state();
            let result = change(&mut state);
            (result, state.head(), state.is_caught_up())
        };
        self.inner.head.send_if_modified(|known| {
            // Two updates may come here in the other order.
            let is_news = head > *known;
            *known = head.max(*known);
            is_news
        });
        self.inner
            .caught_up
            .send_if_modified(|known| std::mem::replace(known, caught_up) != caught_up);
        result
    }
}
