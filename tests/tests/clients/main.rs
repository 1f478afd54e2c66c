//! Clients that leave, are slow, send too much or come all at once: what they get, and what others
//! notice of them.
#![allow(missing_docs, clippy::unwrap_used)]

mod bounds;
mod disconnect;
mod floods;
mod framing;
mod overload;
mod queue;
mod reactor;
mod slow_clients;
