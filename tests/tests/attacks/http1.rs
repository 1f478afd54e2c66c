//! HTTP/1.1 clients: framing, slow readers and writers, connections that are given up.

mod connections;
mod expect;
mod heads;
mod pipelined;
mod readers;
mod stop;
mod unread_bodies;
