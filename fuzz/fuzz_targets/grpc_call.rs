#![no_main]

#[path = "../checks/grpc_call.rs"]
mod grpc_call;

libfuzzer_sys::fuzz_target!(|data: &[u8]| grpc_call::check(data));
