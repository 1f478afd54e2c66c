//! A worker that does not agree with the router on prompts or KV blocks is found out when it
//! joins, with the cause; one whose cache is not what its events say is found out by its replies.

mod causes;
mod drift;
mod serving;
mod support;
