//! The token ids of a prompt that is prepared already: computed again for the few requests that need
//! them, because all others do without.

use std::sync::Arc;

use splitrail_kv::BlockHasher;

use super::{Preparer, Unit, prompt_bytes, tokens};
use splitrail_api::Endpoint;
use splitrail_api::error::Error;
use splitrail_api::memory_budget::{self, Charge, Meter};
use splitrail_api::request::prompt_again;
use splitrail_fleet::ServedModel;
use splitrail_prompt::watch::{self, Watch};

/// The token ids of a prompt.
pub(crate) struct PromptIds {
    /// The ids of all tokens.
    pub(crate) ids: Vec<u32>,
    /// The charge for their memory.
    _memory: Charge,
}

impl Preparer {
    /// The token ids of a prompt, off the reactor; `None` if they cannot be computed, or are not
    /// those that the prompt's blocks were computed from (a template that prints the time, say).
    pub(crate) async fn prompt_ids(
        self: &Arc<Self>,
        served: &Arc<ServedModel>,
        endpoint: Endpoint,
        unit: &Unit,
    ) -> Option<PromptIds> {
        let (preparer, served, unit) = (Arc::clone(self), Arc::clone(served), unit.clone());
        let template_max = self.cluster.serving().limits.template_timeout;
        let bytes = prompt_bytes(endpoint, &unit.body);
        let work = move || {
            let watch = Watch { abandoned: None, template_max };
            watch::with(watch, || compute(&preparer, &served, endpoint, &unit).ok().flatten())
        };
        self.cores.run_off_reactor(bytes, work).await.ok()?
    }
}

fn compute(
    preparer: &Preparer,
    served: &ServedModel,
    endpoint: Endpoint,
    unit: &Unit,
) -> Result<Option<PromptIds>, Error> {
    let cluster = &preparer.cluster;
    let max_bytes = cluster.serving().limits.request_memory_max_bytes;
    // The request is served without these ids: nothing is shed.
    let mut memory = Meter::new(preparer.memory.charge(), max_bytes, &memory_budget::full);
    let length = unit.prompt_tokens.unwrap_or(0) as usize;
    memory.take(length * size_of::<u32>() + prompt_bytes(endpoint, &unit.body))?;
    let Some(prompt) = prompt_again(endpoint, &unit.body, &mut memory)? else { return Ok(None) };
    let Some(ids) = tokens::ids(served, &unit.body, prompt) else { return Ok(None) };
    let hasher = BlockHasher::new(cluster.hash_seed);
    let are_same = ids.len() == length && fill_blocks(&ids, unit, served.pool.block_size(), hasher);
    Ok(are_same.then(|| PromptIds { ids, _memory: memory.into_charge() }))
}

/// Whether the blocks of these tokens are the blocks of the prompt.
fn fill_blocks(ids: &[u32], unit: &Unit, block_size: u32, hasher: BlockHasher) -> bool {
    let blocks = ids.chunks_exact(block_size.max(1) as usize);
    let mut parent = unit.namespace;
    blocks.len() == unit.hashes.len()
        && blocks.zip(unit.hashes.iter()).all(|(block, expected)| {
            parent = hasher.next(parent, block);
            parent == *expected
        })
}
