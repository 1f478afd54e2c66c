//! SGLang's hand-off: both legs are sent at once, with the same sampling parameters, and meet in a
//! room at the prefill engine's bootstrap server. The prefill engine samples the first token and
//! pushes it with the KV.
//!
//! An engine that runs as one half of a pair refuses requests without a room. A decode request
//! whose prefill fails keeps its slot for minutes, so it must be cancelled.

/// Default port of the bootstrap server (`--disaggregation-bootstrap-port`).
pub const BOOTSTRAP_PORT: u16 = 8998;

/// The members that lead a request to its room; only the router sets them.
pub const MEMBERS: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];

/// The meeting place of one pair (SGLang's term).
///
/// A room serves one prefill and one decode request: it cannot be cloned, and
/// [`Room::into_members`] returns the members for both.
#[derive(Debug)]
pub struct Room(u64);

impl Room {
    /// A room from random bits; SGLang keeps it as a signed 64-bit integer.
    pub fn from_random(bits: u64) -> Self {
        Self(bits & i64::MAX as u64)
    }

    /// The number of the room.
    pub fn number(&self) -> u64 {
        self.0
    }

    /// The members for both legs' bodies, with their raw JSON.
    pub fn into_members(self, host: &str, port: u16) -> [(&'static str, String); 3] {
        let [host_key, port_key, room_key] = MEMBERS;
        let host = serde_json::Value::from(host).to_string();
        [(host_key, host), (port_key, port.to_string()), (room_key, self.0.to_string())]
    }
}
