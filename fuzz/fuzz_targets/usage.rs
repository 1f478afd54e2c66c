#![no_main]

#[path = "../checks/usage.rs"]
mod usage;

libfuzzer_sys::fuzz_target!(|data: &[u8]| usage::check(data));
