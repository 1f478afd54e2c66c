//! The clients among which the router shares what it has.

/// A client among which the queue, the places in flight and the memory of requests are shared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClientShare {
    /// A number that stands for the client; 0 if clients are not distinguished.
    pub number: u64,
    /// The client's share relative to other clients; above 0.
    pub weight: f64,
}

impl ClientShare {
    /// Stands for all clients, if they are not distinguished.
    pub const EVERYONE: Self = Self { number: 0, weight: 1.0 };
}
