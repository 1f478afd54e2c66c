#![no_main]

#[path = "../checks/form.rs"]
mod form;

libfuzzer_sys::fuzz_target!(|data: &[u8]| form::check(data));
