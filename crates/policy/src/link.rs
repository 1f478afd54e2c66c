//! How much longer KV takes between workers that are far from each other.
//!
//! What is learned of a worker's hand-offs is what they take from a worker of its zone. A hand-off over
//! another distance takes a multiple of that, which is learned for all workers of a model together: an
//! own figure for each pair of workers would rarely be observed.

use crate::kv_format::group_tag;

/// The weight of each observation in the moving average of a scale: about the last 16 count.
const WEIGHT: f64 = 1.0 / 16.0;
/// A scale, and what an observation counts for it, stay between `1 / BOUND` and `BOUND`.
const BOUND: f64 = 16.0;
/// What a hand-off between zones is expected to take before one was observed.
const FAR_PRIOR: f64 = 2.0;

/// Where a worker is: its zone, and its host there, each as a tag of its name; 0 if it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Location {
    zone: u64,
    host: u64,
}

impl Location {
    /// The location `ZONE` or `ZONE/HOST`; either may be empty.
    pub fn of(text: &str) -> Self {
        let (zone, host) = text.split_once('/').unwrap_or((text, ""));
        let tag = |name: &str| if name.is_empty() { 0 } else { group_tag(name) };
        Self { zone: tag(zone), host: tag(host) }
    }

    /// How far two workers are from each other, as far as it is known of both.
    pub fn distance(self, other: Self) -> Distance {
        let is_known = |one: u64, other: u64| one != 0 && other != 0;
        if is_known(self.zone, other.zone) && self.zone != other.zone {
            Distance::Far
        } else if is_known(self.host, other.host) && self.host == other.host {
            Distance::Host
        } else {
            Distance::Zone
        }
    }
}

/// How far two workers are from each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distance {
    /// On one host.
    Host,
    /// In one zone, or it is not known.
    #[default]
    Zone,
    /// In different zones.
    Far,
}

/// How many times as long as within a zone a hand-off takes, for each distance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkScales {
    host: f64,
    far: f64,
}

impl Default for LinkScales {
    fn default() -> Self {
        Self { host: 1.0, far: FAR_PRIOR }
    }
}

impl LinkScales {
    /// The scale of a distance.
    pub fn of(&self, distance: Distance) -> f64 {
        match distance {
            Distance::Host => self.host,
            Distance::Zone => 1.0,
            Distance::Far => self.far,
        }
    }

    /// Learns from a hand-off that took `seconds` and would have taken `expected_seconds` within a
    /// zone. Values that cannot be used are ignored.
    pub fn observe(&mut self, distance: Distance, seconds: f64, expected_seconds: f64) {
        let scale = match distance {
            Distance::Host => &mut self.host,
            Distance::Zone => return,
            Distance::Far => &mut self.far,
        };
        let ratio = seconds / expected_seconds;
        if ratio.is_finite() && ratio > 0.0 {
            *scale += (ratio.clamp(1.0 / BOUND, BOUND) - *scale) * WEIGHT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Candidate, CandidateIndex, Coefficients, Leg, Policy, Query, pick};

    #[test]
    fn only_what_is_known_of_both_workers_makes_a_distance() {
        let distance = |one: &str, other: &str| Location::of(one).distance(Location::of(other));
        for other in ["", "a", "a/", "/h", "a/i"] {
            assert_eq!(distance("a/h", other) == Distance::Host, other == "/h", "{other}");
            assert_ne!(distance("a/h", other), Distance::Far, "{other}");
            assert_eq!(distance("", other), Distance::Zone, "{other}");
        }
        assert_eq!(distance("a/h", "a/h"), Distance::Host);
        assert_eq!(distance("a/h", "b/h"), Distance::Far);
    }

    /// The decode worker that is chosen of a near one and of a far one that is a little less busy.
    fn chosen(scales: LinkScales) -> CandidateIndex {
        let of = |distance, requests| Candidate {
            up: true,
            requests,
            coefficients: Coefficients::default().with_hand_off_scale(scales.of(distance)),
            ..Candidate::default()
        };
        let candidates = [of(Distance::Zone, 20), of(Distance::Far, 0)];
        let query = Query {
            leg: Leg::Decode,
            prompt_tokens: 4_000,
            prompt_blocks: 0,
            block_size: 16,
            turn: 0,
            draw: 0,
            sharing: Default::default(),
        };
        let choice = pick(&Policy::predicted_ttft(), &candidates, &[], query);
        choice.map_or_else(|| panic!("there are candidates"), |choice| choice.index)
    }

    #[test]
    fn a_label_is_a_prior_that_observations_replace() {
        let mut scales = LinkScales::default();
        assert_eq!(chosen(scales), CandidateIndex(0), "the far one is expected to take longer");
        for _ in 0..64 {
            scales.observe(Distance::Far, 0.02, 0.02);
        }
        assert!((scales.of(Distance::Far) - 1.0).abs() < 0.05, "{scales:?}");
        assert_eq!(chosen(scales), CandidateIndex(1), "it is not, so the less busy one is better");
        scales.observe(Distance::Far, f64::NAN, 0.0);
        (0..64).for_each(|_| scales.observe(Distance::Far, 1.0, 0.001));
        assert!(scales.of(Distance::Far) <= BOUND && scales.of(Distance::Zone) == 1.0);
    }
}
