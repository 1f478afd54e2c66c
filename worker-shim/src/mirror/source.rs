//! The addresses at which an engine publishes its KV events.

use splitrail_engine::zmtp::{Endpoint, EndpointError};

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

impl RankSource {
    /// Returns the sources of an engine with `ranks` ranks. Rank `r` uses the given ports plus
    /// `r`, as in vLLM.
    ///
    /// # Errors
    /// If a port exceeds 65535.
    pub fn of_ranks(
        events: &Endpoint,
        replay: Option<&Endpoint>,
        ranks: u16,
    ) -> Result<Vec<Self>, EndpointError> {
        let of_rank = |rank| {
            let replay = replay.map(|replay| shift_port(replay, rank)).transpose()?;
            Ok(Self { rank, events: shift_port(events, rank)?, replay })
        };
        (0..ranks.max(1)).map(of_rank).collect()
    }
}

fn shift_port(endpoint: &Endpoint, by: u16) -> Result<Endpoint, EndpointError> {
    let text = endpoint.to_string();
    let (host, port) = text.rsplit_once(':').ok_or(EndpointError)?;
    let port: u16 = port.parse().map_err(|_| EndpointError)?;
    format!("{host}:{}", port.checked_add(by).ok_or(EndpointError)?).parse()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn each_rank_gets_its_own_event_and_replay_ports() {
        let endpoint = |text: &str| text.parse::<Endpoint>().unwrap();
        let (events, replay) = (endpoint("tcp://[::1]:5557"), endpoint("tcp://e:5570"));
        let sources = RankSource::of_ranks(&events, Some(&replay), 2).unwrap();
        assert_eq!(
            sources[0],
            RankSource { rank: 0, events: events.clone(), replay: Some(replay) }
        );
        assert_eq!(sources[1].events, endpoint("tcp://[::1]:5558"));
        assert_eq!(sources[1].replay, Some(endpoint("tcp://e:5571")));
        assert_eq!(RankSource::of_ranks(&events, None, 0).unwrap().len(), 1);
        assert!(RankSource::of_ranks(&endpoint("tcp://e:65535"), None, 2).is_err());
    }
}
