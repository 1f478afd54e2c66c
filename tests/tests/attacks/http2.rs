//! HTTP/2 clients: replies that are not read, resets, floods of frames.

mod answers;
mod arriving;
mod long_events;
mod resets;
mod riders;
