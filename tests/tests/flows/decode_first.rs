//! Decode first: a decode worker that holds enough of a prompt serves it alone, and
//! nobody ever sees an attempt that was turned away.

mod gates;
mod guard;
mod logged;
mod only;
mod rejected;
mod support;
mod thresholds;
