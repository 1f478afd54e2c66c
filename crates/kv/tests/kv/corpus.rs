//! The inputs of the fuzz target for the index, as ordinary tests. fuzz/README.md explains their
//! origin.

#[path = "../../../../fuzz/checks/kv_index.rs"]
mod kv_index;
#[path = "../../../../fuzz/checks/replay.rs"]
mod replay;

#[test]
fn kv_index() {
    replay::replay("kv_index", kv_index::check);
}
