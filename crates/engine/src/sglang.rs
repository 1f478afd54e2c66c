//! SGLang's hand-off: both legs are sent at once, with the same sampling parameters,
//! and meet in a room at the prefill engine's bootstrap server. Prefill samples the
//! first token and pushes it with the KV.
//!
//! An engine that runs as one half of a pair refuses requests without a room. A
//! decode request whose prefill fails keeps its slot for minutes: it must be
//! cancelled.

/// The bootstrap server's port unless configured (`--disaggregation-bootstrap-port`).
pub const BOOTSTRAP_PORT: u16 = 8998;

/// The members that lead a request to its room; all of them are the router's own.
pub const MEMBERS: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];

/// One pair's meeting place.
///
/// It is good for one prefill and one decode request: it cannot be cloned, and
/// [`Room::into_members`] gives what both are sent.
#[derive(Debug)]
pub struct Room(u64);

impl Room {
    /// A room from random bits; SGLang keeps it as a signed 64-bit integer.
    pub fn from_random(bits: u64) -> Self {
        Self(bits & i64::MAX as u64)
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.0
    }

    /// The members of both legs' bodies, with their raw JSON.
    pub fn into_members(self, host: &str, port: u16) -> [(&'static str, String); 3] {
        let [host_key, port_key, room_key] = MEMBERS;
        let host = serde_json::Value::from(host).to_string();
        [(host_key, host), (port_key, port.to_string()), (room_key, self.0.to_string())]
    }
}
