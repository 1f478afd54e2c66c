//! What was learned of one stage of a worker's work.

use super::fit::{Fit, RENEWED};

/// If the last observation of a stage is older than this, what was learned of that stage is gradually
/// trusted less.
const TRUSTED_SECONDS: f64 = 60.0;
/// After each further period of this length, half of the difference from the usual worker is left.
const HALF_LIFE_SECONDS: f64 = 300.0;
/// A worker whose times differ from the usual ones by no more than its predictions usually err, within
/// these bounds (as a difference of natural logarithms), counts as equal: noise would choose otherwise.
const EQUAL_WITHIN: (f64, f64) = (0.05, 0.25);
/// The number of observations from which on a worker is compared with the others. A slow one gets few.
const COMPARABLE_AFTER: u64 = 4;

/// What was learned of one stage, and when.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stage<const N: usize> {
    pub(super) fit: Fit<N>,
    /// The scales of the usual worker of the fleet.
    pub(super) usual: [f64; N],
    /// The mean share of each part in the work of this worker, by the prior: the work by which it is
    /// compared with the others. Of other work, its observations say little.
    work: [f64; N],
    /// The time of the last usable observation, in nanoseconds.
    observed_ns: u64,
}

impl<const N: usize> Stage<N> {
    /// A stage of which nothing was observed.
    pub(super) fn new() -> Self {
        Self { fit: Fit::default(), usual: [1.0; N], work: [1.0; N], observed_ns: 0 }
    }

    /// Learns as [`Fit::observe`]. What has faded since the last observation stays so, and its
    /// uncertainty has grown, so that this observation weighs more.
    pub(super) fn observe(&mut self, now_ns: u64, parts: [f64; N], seconds: f64) {
        let trust = self.trust(now_ns);
        let mut faded = self.fit.clone();
        // Engines compile something for their first requests, and one may be much faster than the usual one.
        let has_settled = self.fit.evidence().observations >= COMPARABLE_AFTER;
        if !self.is_observed() {
            faded = Fit::starting_at(self.usual);
        } else if !has_settled && 2.0 * seconds < self.fit.predict(parts) {
            let ratio = seconds / Fit::starting_at(self.usual).predict(parts);
            faded = Fit::starting_at(self.usual.map(|scale| scale * ratio));
        } else if trust < 1.0 {
            faded.fade(trust, &self.usual);
        }
        if faded.observe(parts, seconds) {
            self.fit = faded;
            let (sum, observations) = (parts.iter().sum::<f64>(), self.fit.evidence().observations);
            let weight = (1.0 / observations as f64).max(RENEWED);
            for (mean, part) in self.work.iter_mut().zip(parts) {
                *mean += weight * (part / sum - *mean);
            }
            self.observed_ns = now_ns.max(self.observed_ns);
        }
    }

    /// The scales as far as they are trusted at the time `now_ns`: those of the usual worker before
    /// the second observation, and as long as the two differ by noise.
    pub(super) fn scales(&self, now_ns: u64) -> [f64; N] {
        if !self.is_observed() {
            return self.usual;
        }
        let difference = self.times_the_usual().ln();
        let within = self.fit.evidence().error.clamp(EQUAL_WITHIN.0, EQUAL_WITHIN.1);
        // Zero for a difference within the noise, and almost one for a large one.
        let counts = (1.0 - (within / difference).powi(2)).max(0.0);
        // The first requests of an engine may take longer, and a worker that is thought slow gets few.
        let settled = 1.0 - 1.0 / self.fit.evidence().observations as f64;
        self.fit.scales(self.trust(now_ns) * counts * settled, &self.usual)
    }

    /// How many times as long as on the usual worker this stage takes.
    pub(super) fn slowdown(&self) -> Option<f64> {
        let is_known = self.fit.evidence().observations >= COMPARABLE_AFTER;
        is_known.then(|| self.times_the_usual())
    }

    /// Drops what was learned of this worker.
    pub(super) fn forget(&mut self) {
        (self.fit, self.observed_ns) = (Fit::default(), 0);
    }

    /// Whether a second observation has confirmed the first one.
    pub(super) fn is_confirmed(&self) -> bool {
        self.fit.evidence().observations > 1
    }

    /// Whether the worker was observed.
    pub(super) fn is_observed(&self) -> bool {
        self.fit.evidence().observations > 0
    }

    /// How many times as long as by the prior the work of this worker takes with these scales.
    pub(super) fn times_the_prior(&self, scales: &[f64; N]) -> f64 {
        let times: f64 = scales.iter().zip(self.work).map(|(scale, part)| scale * part).sum();
        times / self.work.iter().sum::<f64>()
    }

    fn times_the_usual(&self) -> f64 {
        self.times_the_prior(&self.fit.learned()) / self.times_the_prior(&self.usual)
    }

    /// How far the scales are trusted at the time `now_ns`, from 0 to 1.
    fn trust(&self, now_ns: u64) -> f64 {
        let idle_seconds = now_ns.saturating_sub(self.observed_ns) as f64 / 1e9;
        let half_lives = (idle_seconds - TRUSTED_SECONDS).max(0.0) / HALF_LIFE_SECONDS;
        0.5f64.powf(half_lives)
    }
}
