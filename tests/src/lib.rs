//! Support for the whole-system suites: simulated clusters with a real router in
//! front, and a client that sees bytes.

pub mod accounting;
pub mod binary;
pub mod broker;
pub mod canned;
pub mod client;
pub mod cluster;
pub mod dialect;
pub mod fault_proxy;
pub mod frames;
pub mod front;
pub mod grpc;
pub mod json_reader;
pub mod leaks;
pub mod live;
pub mod machine;
pub mod page;
pub mod ports;
pub mod proc;
pub mod process;
pub mod process_cluster;
pub mod pty;
pub mod raw;
pub mod raw_engine;
pub mod scripted_server;
pub mod shape;
pub mod shim;
pub mod solo;
pub mod tenants;
pub mod tls;
pub mod tls_server;
pub mod traffic;
pub mod trial;
pub mod unanswering;

pub use client::{Client, Events, Reply};
pub use cluster::{Cluster, Spec};
pub use trial::Trial;
