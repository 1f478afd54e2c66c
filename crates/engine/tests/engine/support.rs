//! Recorded replies and events of real engines.

use std::path::PathBuf;

/// A file recorded from a running vLLM.
pub(crate) fn fixture(name: &str) -> Vec<u8> {
    read(&format!("vllm-0.32.0/{name}"))
}

/// A file recorded from a running SGLang.
pub(crate) fn sglang_fixture(name: &str) -> Vec<u8> {
    read(&format!("sglang-0.5.23/{name}"))
}

fn read(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The same, as text.
pub(crate) fn fixture_text(name: &str) -> String {
    String::from_utf8(fixture(name)).unwrap()
}

/// The payloads of a recorded event stream, in order.
pub(crate) fn recorded_payloads(recording: &str) -> Vec<Vec<u8>> {
    let batches = fixture_text(&format!("kv/{recording}/events.jsonl")).lines().count();
    (0..batches).map(|index| fixture(&format!("kv/{recording}/pub{index:05}.frame2.bin"))).collect()
}
