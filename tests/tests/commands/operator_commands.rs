//! The commands with which operators ask and change running routers: the shipped program against
//! router processes.

mod access;
mod drains;
mod faults;
mod reloads;
mod state;
mod support;
mod top;
