#![no_main]

#[path = "../checks/engine_metrics.rs"]
mod engine_metrics;

libfuzzer_sys::fuzz_target!(|data: &[u8]| engine_metrics::check(data));
