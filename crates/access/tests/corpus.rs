//! The inputs of the fuzz target for JSON Web Tokens, as ordinary tests. fuzz/README.md explains
//! their origin.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../../fuzz/checks/jwt.rs"]
mod jwt;
#[path = "../../../fuzz/checks/replay.rs"]
mod replay;

#[test]
fn jwt() {
    replay::replay("jwt", jwt::check);
}
