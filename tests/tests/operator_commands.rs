//! The commands with which operators ask and change running routers: the shipped program against
//! router processes.
#![allow(missing_docs, clippy::unwrap_used)]

mod operator_commands {
    mod access;
    mod drains;
    mod faults;
    mod reloads;
    mod state;
    mod support;
    mod top;
}
