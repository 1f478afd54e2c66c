#![no_main]

#[path = "../checks/client_body.rs"]
mod client_body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| client_body::check(data));
