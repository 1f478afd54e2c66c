#![no_main]

#[path = "../checks/config_yaml.rs"]
mod config_yaml;

libfuzzer_sys::fuzz_target!(|data: &[u8]| config_yaml::check(data));
