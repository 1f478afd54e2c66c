//! The addresses at which an engine publishes its KV events.

use splitrail_engine::zmtp::Endpoint;

/// The KV events of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSource {
    /// The data-parallel rank.
    pub rank: u16,
    /// The publisher of the events.
    pub events: Endpoint,
    /// The address for replays of earlier events, if the engine offers replays.
    pub replay: Option<Endpoint>,
}
