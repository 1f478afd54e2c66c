//! Follows the engine's events and reports to routers. Both start again when the engine's
//! identity changes, because the engine is then another worker.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::attach;
use crate::engine::{Engine, EngineIdentity};
use crate::mirror::Mirror;

/// The parts that [`run`] connects.
pub(super) struct FollowerInputs {
    /// The settings of the attachments. The model's name comes from the engine.
    pub(super) attach: attach::AttachConfig,
    pub(super) mirror: Mirror,
    pub(super) engine: Engine,
    pub(super) leaving: CancellationToken,
}

/// Follows the engine until the future is dropped.
pub(super) async fn run(inputs: FollowerInputs) {
    let mut identities = inputs.engine.identity.clone();
    loop {
        let known = identities.wait_for(Option::is_some).await;
        let Ok(Some(identity)) = known.map(|identity| identity.clone()) else { return };
        // Following ends when the other branch completes.
        tokio::select! {
            () = follow_identity(&inputs, &identity) => {}
            next = identities.wait_for(|next| *next != Some(Arc::clone(&identity))) => {
                if next.is_err() {
                    return;
                }
                tracing::warn!(model = identity.model, "the engine's identity has changed: attaching again");
            }
        }
    }
}

async fn follow_identity(inputs: &FollowerInputs, identity: &EngineIdentity) {
    let sources = identity.sources.clone();
    let config = attach::AttachConfig { model: identity.model.clone(), ..inputs.attach.clone() };
    let (capabilities, load) = (inputs.engine.capabilities.clone(), inputs.engine.load.clone());
    let (mirror, leaving) = (inputs.mirror.clone(), inputs.leaving.clone());
    let reporting = attach::run(config, mirror, capabilities, load, leaving);
    tokio::join!(inputs.mirror.follow(sources), reporting);
}
