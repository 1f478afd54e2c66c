//! Every flow of a request from prefill to decode, with the same replies in all of them.
#![allow(missing_docs, clippy::unwrap_used)]

mod auto;
mod connectors;
mod decode_first;
mod hand_off_hosts;
mod kv_format;
mod lease;
mod matrix;
mod migrate;
mod peer_fetch;
mod prewarm;
mod read_back;
mod replies;
mod transfer_groups;
