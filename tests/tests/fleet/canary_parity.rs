//! A worker that disagrees with the router on tokens or KV blocks is detected when it joins, with
//! the cause; a worker whose cache differs from its events is detected by its replies.

mod causes;
mod drift;
mod serving;
mod support;
