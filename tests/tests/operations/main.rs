//! What operators see and change while the router runs: admin listener, live page, reload.
#![allow(missing_docs, clippy::unwrap_used)]

mod admin;
mod incidents;
mod live;
#[cfg(feature = "chromium")]
mod live_page;
mod reload;
