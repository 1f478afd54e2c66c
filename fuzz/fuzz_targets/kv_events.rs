#![no_main]

#[path = "../checks/kv_events.rs"]
mod kv_events;

libfuzzer_sys::fuzz_target!(|data: &[u8]| kv_events::check(data));
