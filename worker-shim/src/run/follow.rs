//! Follows the engine's events and attaches to routers, for as long as the engine is what it
//! is. One that comes back as another is another worker: then both begin anew.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::attach;
use crate::engine::{Engine, Identity};
use crate::mirror::{Mirror, RankSource};
use crate::plane;

pub(super) struct Follow {
    /// All but the model's name, where only the engine knows it.
    pub(super) attach: attach::Config,
    /// In place of streams to routers, if there is a broker.
    pub(super) plane: Option<plane::Config>,
    pub(super) mirror: Mirror,
    pub(super) engine: Engine,
    pub(super) leaving: CancellationToken,
}

/// Runs until dropped.
pub(super) async fn run(follow: Follow) {
    let mut identities = follow.engine.identity.clone();
    loop {
        let known = identities.wait_for(Option::is_some).await;
        let Ok(Some(identity)) = known.map(|identity| identity.clone()) else { return };
        // Both are parts of this task: leaving the branch ends them.
        tokio::select! {
            () = one_identity(&follow, &identity) => {}
            next = identities.wait_for(|next| *next != Some(Arc::clone(&identity))) => {
                if next.is_err() {
                    return;
                }
                tracing::warn!(model = identity.model, "the engine is not what it was: attaching anew");
            }
        }
    }
}

async fn one_identity(follow: &Follow, identity: &Identity) {
    let source = |source: &splitrail_engine::vllm::identity::EventSource| RankSource {
        rank: source.rank,
        events: source.events.clone(),
        replay: source.replay.clone(),
    };
    let sources = identity.sources.iter().map(source).collect();
    let config = attach::Config { model: identity.model.clone(), ..follow.attach.clone() };
    let (capabilities, load) = (follow.engine.capabilities.clone(), follow.engine.load.clone());
    let (mirror, leaving) = (follow.mirror.clone(), follow.leaving.clone());
    let telling = async {
        match &follow.plane {
            Some(plane) => {
                let config = plane::Config { model: identity.model.clone(), ..plane.clone() };
                plane::run(config, mirror, capabilities, load, leaving).await;
            }
            None => attach::run(config, mirror, capabilities, load, leaving).await,
        }
    };
    tokio::join!(follow.mirror.follow(sources), telling);
}
