//! Recursive least squares with bounded influence of outliers.

use super::Evidence;

/// The factor by which the weight of an observation shrinks with each further one: about the last
/// hundred count, which is some minutes of a busy worker.
const KEPT: f64 = 0.99;
/// The variance of each scale at the start, and its upper bound. Without a bound, forgetting would
/// let the variance grow without end if all prompts are of the same kind.
const VARIANCE: f64 = 1.0;
/// The variance of an observation: the square of a tenth.
const NOISE: f64 = 0.01;
/// After this number of clipped errors in a row in the same direction the worker is assumed to have
/// changed; the variance is then reset, so that the scales are learned again.
const CHANGED: i32 = 8;
/// An error counts at most this many times the usual error.
const CLIP: f64 = 3.0;
/// The weight of each observation in the moving averages of the usual error and the usual work.
pub(super) const RENEWED: f64 = 0.05;
/// Lower bound of the usual error, since clocks and schedulers are not more precise.
const LEAST_ERROR: f64 = 0.02;
/// A scale stays between `1 / BOUND` and `BOUND`.
const BOUND: f64 = 100.0;

/// Learns a factor for each of the `N` terms of a prediction.
///
/// An error counts at most three times the usual error (Huber's rule), so that one stalled request
/// changes little. Lasting errors raise the usual error by a tenth each, so that a worker that
/// became twice as slow is recognised after some dozens of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit<const N: usize> {
    scales: [f64; N],
    covariance: [[f64; N]; N],
    usual_error: f64,
    /// The number of clipped errors in a row; negative if the predictions were too long.
    clipped_in_a_row: i32,
    observations: u64,
}

impl<const N: usize> Default for Fit<N> {
    fn default() -> Self {
        let mut covariance = [[0.0; N]; N];
        (0..N).for_each(|i| covariance[i][i] = VARIANCE);
        Self {
            scales: [1.0; N],
            covariance,
            usual_error: 1.0,
            clipped_in_a_row: 0,
            observations: 0,
        }
    }
}

impl<const N: usize> Fit<N> {
    /// A fit that expects these scales before the first observation.
    pub fn starting_at(scales: [f64; N]) -> Self {
        Self { scales, ..Self::default() }
    }

    /// The seconds that work takes, for which the prior predicts the sum of `parts`.
    pub fn predict(&self, parts: [f64; N]) -> f64 {
        (0..N).map(|i| self.scales[i] * parts[i]).sum()
    }

    /// Learns that the work for which the prior predicts the sum of `parts` took `seconds`. False
    /// if the values cannot be used.
    pub fn observe(&mut self, parts: [f64; N], seconds: f64) -> bool {
        let sum: f64 = parts.iter().sum();
        if !(sum.is_finite() && sum > 0.0 && seconds.is_finite() && seconds > 0.0) {
            return false;
        }
        let predicted = self.predict(parts);
        let x = parts.map(|part| part / predicted);
        let error = seconds / predicted - 1.0;
        let limit = CLIP * self.usual_error;
        let clipped = error.clamp(-limit, limit);

        // The standard gain of recursive least squares; the covariance stays symmetric.
        let spread: [f64; N] =
            std::array::from_fn(|i| (0..N).map(|j| self.covariance[i][j] * x[j]).sum());
        let surprise: f64 = KEPT * NOISE + (0..N).map(|i| x[i] * spread[i]).sum::<f64>();
        // A clipped error shows only a direction, so it does not reduce the uncertainty.
        let settles = error == clipped;
        for i in 0..N {
            let scale = self.scales[i] + spread[i] / surprise * clipped;
            self.scales[i] = scale.clamp(1.0 / BOUND, BOUND);
            for j in 0..N {
                let told = if settles { spread[i] * spread[j] / surprise } else { 0.0 };
                self.covariance[i][j] = (self.covariance[i][j] - told) / KEPT;
            }
        }
        self.bound_covariance();
        self.notice_change(error, clipped);
        let usual = self.usual_error + RENEWED * (clipped.abs() - self.usual_error);
        self.usual_error = usual.max(LEAST_ERROR);
        self.observations += 1;
        true
    }

    /// Raises the uncertainty by this share, after a time without observations, so that the next
    /// observations count for more.
    pub fn doubt(&mut self, share: f64) {
        self.widen(share);
        self.expect_errors(share);
    }

    /// Moves the scales towards `usual` as [`scales`](Self::scales) does, and raises their uncertainty
    /// by what they are no longer trusted. After minutes, one error still counts at most three times
    /// the usual one: requests that are that far apart are still comparable.
    pub fn fade(&mut self, trust: f64, usual: &[f64; N]) {
        self.scales = self.scales(trust, usual);
        self.widen(1.0 - trust);
        self.expect_errors((1.0 - trust).powi(4));
    }

    fn widen(&mut self, share: f64) {
        for (i, row) in self.covariance.iter_mut().enumerate() {
            row[i] += share * VARIANCE;
        }
        self.bound_covariance();
    }

    fn expect_errors(&mut self, share: f64) {
        self.usual_error += share * (1.0 - self.usual_error).max(0.0);
    }

    /// The scales, moved towards `usual` as `trust` falls from 1 to 0.
    pub fn scales(&self, trust: f64, usual: &[f64; N]) -> [f64; N] {
        // Factors are interpolated geometrically: half of "four times" is twice.
        std::array::from_fn(|i| usual[i] * (self.scales[i] / usual[i]).powf(trust))
    }

    /// The scales as they were learned.
    pub fn learned(&self) -> [f64; N] {
        self.scales
    }

    /// The quality of the scales.
    pub fn evidence(&self) -> Evidence {
        Evidence { observations: self.observations, error: self.usual_error }
    }

    fn notice_change(&mut self, error: f64, clipped: f64) {
        let side = if error > clipped { 1 } else { -i32::from(error < clipped) };
        let same = side != 0 && side.signum() == self.clipped_in_a_row.signum();
        self.clipped_in_a_row = if same { self.clipped_in_a_row + side } else { side };
        if self.clipped_in_a_row.abs() >= CHANGED {
            self.covariance = Self::default().covariance;
            self.clipped_in_a_row = 0;
        }
    }

    fn bound_covariance(&mut self) {
        let trace: f64 = (0..N).map(|i| self.covariance[i][i]).sum();
        let most = VARIANCE * N as f64;
        if trace > most {
            self.covariance.iter_mut().flatten().for_each(|cell| *cell *= most / trace);
        }
    }
}
