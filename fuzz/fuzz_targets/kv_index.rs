#![no_main]

#[path = "../checks/kv_index.rs"]
mod kv_index;

libfuzzer_sys::fuzz_target!(|data: &[u8]| kv_index::check(data));
