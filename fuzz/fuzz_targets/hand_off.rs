#![no_main]

#[path = "../checks/hand_off.rs"]
mod hand_off;

libfuzzer_sys::fuzz_target!(|data: &[u8]| hand_off::check(data));
