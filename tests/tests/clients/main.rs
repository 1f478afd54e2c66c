//! Clients that leave, are slow, send too much or arrive all together: what they get, and how this
//! affects other clients.
#![allow(missing_docs, clippy::unwrap_used)]

mod bounds;
mod disconnect;
mod floods;
mod framing;
mod overload;
mod queue;
mod reactor;
mod slow_clients;
