//! The bytes of a client's connection, before the HTTP library reads them: checked, counted, and
//! bounded in pace. Nothing here knows a request.

pub mod certificate;
pub mod checked_socket;
pub mod client_stream;
pub mod connection_activity;
pub mod pace;
pub mod recorded_socket;
pub mod unread_rest;
pub mod wire;
