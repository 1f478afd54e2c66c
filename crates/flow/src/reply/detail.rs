//! `usage.splitrail`: for clients that ask with `x-splitrail-usage: detail`, the origin of each prompt's cached
//! tokens and the source of the figure. Counts only; no worker is named.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::json;
use splitrail_engine::dialect::Dialect;

use splitrail_api::JsonObject;
use splitrail_config::model::CachedTokensFallback;
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_ledger::record::PromptRecord;
use splitrail_reply::dialect::{self, Chunk, data_of};

/// The ledger entries of a request's prompts, as a client may see them.
#[derive(Clone)]
pub struct Detail {
    /// One decision record per prompt.
    pub decisions: Arc<[DecisionHandle]>,
    /// What clients get if the engine reports no cached tokens.
    pub fallback: CachedTokensFallback,
    /// The dialect of the reply.
    pub dialect: Dialect,
}

impl Detail {
    /// Adds `usage.splitrail` to a whole reply or to the last chunk of a stream, if it has usage.
    pub fn add(&self, reply: &mut JsonObject) {
        let usage = reply.raw("usage").filter(|raw| *raw != "null").map(JsonObject::parse_str);
        let Some(Ok(mut usage)) = usage else { return };
        let record = |decision: &DecisionHandle| {
            decision.with(|decision| PromptRecord::for_client(&decision.ledger, self.fallback))
        };
        let prompts: Vec<_> = self.decisions.iter().map(record).collect();
        usage.set("splitrail", json!({ "prompts": prompts }).to_string());
        reply.set("usage", usage.to_string());
    }

    /// An event of a stream, with `usage.splitrail` if it has the usage of the whole reply.
    pub(crate) fn with(&self, event: Bytes) -> Bytes {
        let data = data_of(self.dialect, &event);
        let usage = Chunk::read(self.dialect, &data).and_then(|chunk| chunk.usage);
        if !usage.is_some_and(|usage| usage.is_final) {
            return event;
        }
        let edited = dialect::edit(self.dialect, &event, |holder| self.add(holder));
        edited.unwrap_or(event)
    }
}
