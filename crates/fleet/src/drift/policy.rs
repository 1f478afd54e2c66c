//! Decides how to react to a worker's drift. Pure functions.

use std::time::Instant;

use splitrail_config::model::DriftConfig;

/// Measurements of one worker since its part of the index was built: moving averages per reply.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measurements {
    /// Number of replies that were compared.
    pub samples: u64,
    /// Blocks that the index estimated.
    pub promised_blocks: f64,
    /// Blocks that the engine found in its cache.
    pub found_blocks: f64,
    /// Blocks that were estimated and not found.
    pub over_blocks: f64,
    /// Blocks that were found and not estimated.
    pub under_blocks: f64,
}

/// Whether the index or the engine had more blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The index estimated more than the engine found.
    Over,
    /// The engine found more than the index estimated.
    Under,
}

impl Direction {
    /// The label in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Over => "over",
            Self::Under => "under",
        }
    }
}

/// The reactions so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PastReactions {
    /// Resynchronisations in a row after which the worker still found less than estimated.
    pub over_resyncs: u32,
    /// Resynchronisations in a row after which the worker still found more than estimated.
    pub under_resyncs: u32,
    /// When the last resynchronisation was requested.
    pub last_resync: Option<Instant>,
}

impl PastReactions {
    /// Records a reaction at a time.
    pub fn note(&mut self, reaction: &DriftReaction, now: Instant) {
        match reaction {
            DriftReaction::NoDrift => (self.over_resyncs, self.under_resyncs) = (0, 0),
            DriftReaction::Resync(direction) => {
                self.last_resync = Some(now);
                match direction {
                    Direction::Over => self.over_resyncs += 1,
                    Direction::Under => self.under_resyncs += 1,
                }
            }
            DriftReaction::Wait | DriftReaction::Tolerate | DriftReaction::Exclude => {}
        }
    }
}

/// What the router does about the drift of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriftReaction {
    /// Nothing: there is no drift, so earlier resynchronisations have helped.
    NoDrift,
    /// Nothing yet: too few replies, or the last resynchronisation was too recent, or drift is
    /// ignored.
    Wait,
    /// Nothing any more: resynchronising does not help, and the drift does no harm.
    Tolerate,
    /// Read the worker's KV events again.
    Resync(Direction),
    /// Exclude the worker from KV routing.
    Exclude,
}

/// The decision about one worker's measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriftDecision {
    /// The share of the worker's overlap to ignore, from 0 to 1: the blocks that were estimated and
    /// not found, divided by the blocks that were estimated.
    pub discount: f64,
    /// The reaction.
    pub reaction: DriftReaction,
}

/// Decides the reaction to one worker's measurements.
pub fn decide(
    config: &DriftConfig,
    measured: &Measurements,
    past: &PastReactions,
    now: Instant,
) -> DriftDecision {
    if !config.enabled || measured.samples < config.samples_min {
        return DriftDecision { discount: 0.0, reaction: DriftReaction::Wait };
    }
    let beyond =
        |blocks: f64, bound: f64, whole: f64, share: f64| blocks > bound && blocks > share * whole;
    let Measurements { over_blocks, under_blocks, .. } = *measured;
    let over = beyond(
        over_blocks,
        config.over_blocks_max,
        measured.promised_blocks,
        config.over_share_max,
    );
    let under = beyond(
        under_blocks,
        config.under_blocks_max,
        measured.found_blocks,
        config.under_share_max,
    );
    let discount = match over {
        true => (over_blocks / measured.promised_blocks.max(over_blocks)).clamp(0.0, 1.0),
        false => 0.0,
    };
    let waits = past
        .last_resync
        .is_some_and(|last| now.saturating_duration_since(last) < config.resync_interval_min);
    let reaction = match (over, under) {
        (false, false) => DriftReaction::NoDrift,
        _ if waits => DriftReaction::Wait,
        (true, _) if past.over_resyncs >= config.resyncs_max => DriftReaction::Exclude,
        (true, _) => DriftReaction::Resync(Direction::Over),
        (false, true) if past.under_resyncs >= config.resyncs_max => DriftReaction::Tolerate,
        (false, true) => DriftReaction::Resync(Direction::Under),
    };
    DriftDecision { discount, reaction }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const CONFIG: DriftConfig = DriftConfig {
        enabled: true,
        over_blocks_max: 4.0,
        over_share_max: 0.25,
        under_blocks_max: 16.0,
        under_share_max: 0.5,
        samples_min: 32,
        resync_interval_min: Duration::from_secs(300),
        resyncs_max: 3,
    };

    fn measured(promised_blocks: f64, found_blocks: f64) -> Measurements {
        let difference = promised_blocks - found_blocks;
        Measurements {
            samples: 100,
            promised_blocks,
            found_blocks,
            over_blocks: difference.max(0.0),
            under_blocks: (-difference).max(0.0),
        }
    }

    fn first(measured: Measurements) -> DriftDecision {
        decide(&CONFIG, &measured, &PastReactions::default(), Instant::now())
    }

    #[test]
    fn a_promise_that_is_not_kept_counts_for_what_is_left_of_it() {
        let decision = first(measured(40.0, 10.0));
        assert_eq!(
            decision,
            DriftDecision { discount: 0.75, reaction: DriftReaction::Resync(Direction::Over) }
        );
        assert_eq!(first(measured(40.0, 0.0)).discount, 1.0);
        for fine in [measured(40.0, 31.0), measured(3.0, 0.0), measured(0.0, 0.0)] {
            assert_eq!(
                first(fine),
                DriftDecision { discount: 0.0, reaction: DriftReaction::NoDrift },
                "{fine:?}"
            );
        }
        let few = Measurements { samples: 31, ..measured(40.0, 0.0) };
        assert_eq!(first(few), DriftDecision { discount: 0.0, reaction: DriftReaction::Wait });
    }

    #[test]
    fn to_find_more_than_was_promised_costs_nothing_but_readings() {
        let more = measured(10.0, 60.0);
        assert_eq!(
            first(more),
            DriftDecision { discount: 0.0, reaction: DriftReaction::Resync(Direction::Under) }
        );
        let tired = PastReactions { under_resyncs: 3, ..PastReactions::default() };
        let decision = decide(&CONFIG, &more, &tired, Instant::now());
        assert_eq!(decision, DriftDecision { discount: 0.0, reaction: DriftReaction::Tolerate });
    }

    /// The reactions to a worker that is measured every minute.
    fn course(minutes: u64, drifts: impl Fn(u64) -> Measurements) -> Vec<DriftReaction> {
        let (start, mut past) = (Instant::now(), PastReactions::default());
        let reactions = (0..minutes).map(|minute| {
            let now = start + Duration::from_secs(60 * minute);
            let decision = decide(&CONFIG, &drifts(minute), &past, now);
            past.note(&decision.reaction, now);
            decision.reaction
        });
        reactions.collect()
    }

    #[test]
    fn lasting_drift_is_resynchronised_up_to_the_maximum_and_then_excluded() {
        let reactions = course(20, |_| measured(40.0, 0.0));
        let at = |wanted: DriftReaction| {
            (0..reactions.len()).filter(|i| reactions[*i] == wanted).collect::<Vec<_>>()
        };
        assert_eq!(at(DriftReaction::Resync(Direction::Over)), [0, 5, 10]);
        assert_eq!(at(DriftReaction::Exclude)[0], 15);
    }

    #[test]
    fn a_resynchronisation_that_helped_resets_the_count() {
        // Drifts for one minute in seven: each resynchronisation helps.
        let drifts =
            |minute: u64| measured(40.0, if minute.is_multiple_of(7) { 0.0 } else { 40.0 });
        let reactions = course(70, drifts);
        let readings = reactions
            .iter()
            .filter(|reaction| matches!(reaction, DriftReaction::Resync(_)))
            .count();
        assert_eq!(readings, 10);
        assert!(!reactions.contains(&DriftReaction::Exclude));
    }

    proptest! {
        #[test]
        fn only_a_broken_promise_ever_lowers_an_overlap_or_gives_up(
            samples in 0u64..100, promised in 0.0..200.0f64, found in 0.0..200.0f64,
            over in 0.0..200.0f64, under in 0.0..200.0f64,
            over_resyncs in 0u32..5, under_resyncs in 0u32..5, ago in proptest::option::of(0u64..900),
        ) {
            let now = Instant::now() + Duration::from_secs(1000);
            let measured = Measurements {
                samples,
                promised_blocks: promised,
                found_blocks: found,
                over_blocks: over,
                under_blocks: under,
            };
            let last_resync = ago.map(|ago| now - Duration::from_secs(ago));
            let past = PastReactions { over_resyncs, under_resyncs, last_resync };
            let decision = decide(&CONFIG, &measured, &past, now);
            prop_assert!((0.0..=1.0).contains(&decision.discount));
            let broken = samples >= 32 && over > 4.0 && over > 0.25 * promised;
            prop_assert_eq!(decision.discount > 0.0, broken);
            match decision.reaction {
                DriftReaction::Exclude => prop_assert!(broken && over_resyncs >= 3),
                DriftReaction::Resync(Direction::Over) => prop_assert!(broken && over_resyncs < 3),
                DriftReaction::Resync(Direction::Under) => prop_assert!(!broken && under_resyncs < 3),
                DriftReaction::NoDrift => prop_assert!(!broken),
                DriftReaction::Wait | DriftReaction::Tolerate => {}
            }
            if matches!(decision.reaction, DriftReaction::Resync(_) | DriftReaction::Exclude) {
                prop_assert!(ago.is_none_or(|ago| ago >= 300));
            }
        }

        #[test]
        fn a_larger_share_that_is_missing_never_counts_for_more(
            promised in 1.0..200.0f64, a in 0.0..1.0f64, b in 0.0..1.0f64
        ) {
            let discount = |missing: f64| first(measured(promised, promised * (1.0 - missing))).discount;
            let (less, more) = if a < b { (a, b) } else { (b, a) };
            prop_assert!(discount(less) <= discount(more) + 1e-12);
        }
    }
}
