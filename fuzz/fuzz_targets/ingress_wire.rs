#![no_main]

#[path = "../checks/ingress_wire.rs"]
mod ingress_wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| ingress_wire::check(data));
