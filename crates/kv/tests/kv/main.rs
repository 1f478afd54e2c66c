//! The index of KV blocks, block hashes and hot prefixes. Suites of their own: `index_hostile`, which
//! counts allocations, and `index_model`.
#![allow(missing_docs, clippy::unwrap_used)]

mod adapters;
mod conversations;
mod corpus;
mod hashes;
mod hot;
mod index_chains;
mod index_concurrent;
mod index_events;
mod index_holds;
mod index_restore;
mod index_snapshot;
mod recent;
mod usage;
