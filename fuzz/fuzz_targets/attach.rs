#![no_main]

#[path = "../checks/attach.rs"]
mod attach;

libfuzzer_sys::fuzz_target!(|data: &[u8]| attach::check(data));
