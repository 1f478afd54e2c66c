#![no_main]

#[path = "../checks/plane.rs"]
mod plane;

libfuzzer_sys::fuzz_target!(|data: &[u8]| plane::check(data));
