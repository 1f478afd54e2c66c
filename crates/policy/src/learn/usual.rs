//! What the usual worker of a fleet is like.

use super::{Learner, stage::Stage};

/// The scales of the usual worker, stage by stage: those of the worker in the middle when the observed
/// workers are ordered by the time of their work relative to their priors. One very slow worker
/// therefore changes little. `None` if no worker was observed twice. What was learned does not fade
/// here: a fleet that nobody uses is expected to be as it was.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UsualScales {
    pub(super) prefill: Option<[f64; 3]>,
    pub(super) hand_off: Option<[f64; 2]>,
    pub(super) fetch: Option<[f64; 2]>,
    pub(super) read: Option<[f64; 1]>,
    pub(super) load: Option<[f64; 3]>,
    pub(super) step: Option<[f64; 3]>,
}

impl UsualScales {
    /// The usual one of these workers.
    pub fn of<'a>(learners: impl Iterator<Item = &'a Learner> + Clone) -> Self {
        Self {
            prefill: middle(learners.clone().map(|learner| &learner.prefill)),
            hand_off: middle(learners.clone().map(|learner| &learner.hand_off)),
            fetch: middle(learners.clone().map(|learner| &learner.fetch)),
            read: middle(learners.clone().map(|learner| &learner.read)),
            load: middle(learners.clone().map(|learner| &learner.load)),
            step: middle(learners.map(|learner| &learner.step)),
        }
    }

    /// These scales, or those of `others` for stages of which nothing was observed.
    pub fn or(self, others: &Self) -> Self {
        Self {
            prefill: self.prefill.or(others.prefill),
            hand_off: self.hand_off.or(others.hand_off),
            fetch: self.fetch.or(others.fetch),
            read: self.read.or(others.read),
            load: self.load.or(others.load),
            step: self.step.or(others.step),
        }
    }
}

/// The scales of the worker in the middle, of those that were observed more than once; of two, the faster
/// one.
fn middle<'a, const N: usize>(stages: impl Iterator<Item = &'a Stage<N>>) -> Option<[f64; N]> {
    let observed = stages.filter(|stage| stage.is_confirmed());
    let relative = |stage: &Stage<N>| {
        let scales = stage.fit.learned();
        (stage.times_the_prior(&scales), scales)
    };
    let mut found: Vec<_> = observed.map(relative).collect();
    let place = found.len().checked_sub(1)? / 2;
    let (_, (_, scales), _) = found.select_nth_unstable_by(place, |a, b| a.0.total_cmp(&b.0));
    Some(*scales)
}
