#![no_main]

#[path = "../checks/engine_reply.rs"]
mod engine_reply;

libfuzzer_sys::fuzz_target!(|data: &[u8]| engine_reply::check(data));
