#![no_main]

#[path = "../checks/jwt.rs"]
mod jwt;

libfuzzer_sys::fuzz_target!(|data: &[u8]| jwt::check(data));
