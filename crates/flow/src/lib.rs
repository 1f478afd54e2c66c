//! Plans the legs of a request and runs them: which engine gets which leg, in which order, what is
//! retried, and what is cancelled when the client leaves.
//!
//! A request passes [`prepare`], [`decide`], [`run`] and [`reply`] in this order; [`explain`] decides
//! without sending anything.

pub mod context;
pub mod decide;
pub mod explain;
pub mod prepare;
pub mod reply;
pub mod run;
