//! Where an engine publishes its KV events.

use splitrail_engine::zmtp::{Endpoint, EndpointError};

/// One rank's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The data-parallel rank.
    pub rank: u16,
    /// Its publisher.
    pub events: Endpoint,
    /// Where what it published can be had again.
    pub replay: Option<Endpoint>,
}

impl Source {
    /// The sources of an engine with so many ranks. As vLLM does it, rank `r` publishes, and
    /// replays, on the given port plus `r`.
    ///
    /// # Errors
    /// If there are not so many ports.
    pub fn of_ranks(
        events: &Endpoint,
        replay: Option<&Endpoint>,
        ranks: u16,
    ) -> Result<Vec<Self>, EndpointError> {
        let of_rank = |rank| {
            let replay = replay.map(|replay| shifted(replay, rank)).transpose()?;
            Ok(Self { rank, events: shifted(events, rank)?, replay })
        };
        (0..ranks.max(1)).map(of_rank).collect()
    }
}

fn shifted(endpoint: &Endpoint, by: u16) -> Result<Endpoint, EndpointError> {
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
    fn each_rank_has_a_port_of_its_own_for_events_and_for_replays() {
        let endpoint = |text: &str| text.parse::<Endpoint>().unwrap();
        let (events, replay) = (endpoint("tcp://[::1]:5557"), endpoint("tcp://e:5570"));
        let sources = Source::of_ranks(&events, Some(&replay), 2).unwrap();
        assert_eq!(sources[0], Source { rank: 0, events: events.clone(), replay: Some(replay) });
        assert_eq!(sources[1].events, endpoint("tcp://[::1]:5558"));
        assert_eq!(sources[1].replay, Some(endpoint("tcp://e:5571")));
        assert_eq!(Source::of_ranks(&events, None, 0).unwrap().len(), 1);
        assert!(Source::of_ranks(&endpoint("tcp://e:65535"), None, 2).is_err());
    }
}
