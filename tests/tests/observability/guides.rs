//! The decision trees of the guides, walked with the fault switched on that they end in: each query
//! and each command is taken from the page, and gives what the page says. They run the shipped
//! program and a real Prometheus, and need `curl` and `jq`.

mod hits;
mod hits_events;
mod ttft;
mod ttft_workers;
mod walk;
