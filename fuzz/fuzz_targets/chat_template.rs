#![no_main]

#[path = "../checks/chat_template.rs"]
mod chat_template;

libfuzzer_sys::fuzz_target!(|data: &[u8]| chat_template::check(data));
