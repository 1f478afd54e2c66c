//! HTTP/2 clients: replies that are not read, resets, floods of frames.

mod arriving;
mod empty_frames;
mod long_events;
mod replies;
mod resets;
mod unread_bodies;
mod waiting;
