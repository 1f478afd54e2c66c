#![no_main]

#[path = "../checks/engine_wire.rs"]
mod engine_wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| engine_wire::check(data));
