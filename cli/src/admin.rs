//! The client of the admin listeners of one or several replicas, which all commands that ask a
//! running router share.

mod address;
mod args;
mod ask_error;
mod connection;
mod events;
mod replica;

pub(crate) use address::AdminAddress;
pub(crate) use args::{AdminArgs, client_tls, positive};
pub(crate) use ask_error::{AskError, AskErrorKind};
pub(crate) use events::Event;
pub(crate) use replica::{Replica, percent_encoded};
