//! Recursive least squares with bounded influence of outliers.

use super::Evidence;

/// What an observation still counts after each further one: about the last hundred are
/// remembered, minutes of a busy worker.
const KEPT: f64 = 0.99;
/// Uncertainty of each scale at the start, and the most there ever is: without new kinds of
/// prompts, forgetting alone would let it grow without end.
const VARIANCE: f64 = 1.0;
/// How uncertain an observation is: a tenth, squared.
const NOISE: f64 = 0.01;
/// So many clipped errors in a row to the same side are no accident: the worker has changed,
/// and what was learned of it counts no more than the prior did.
const CHANGED: i32 = 8;
/// A surprise counts up to so many usual errors.
const CLIP: f64 = 3.0;
/// How much of the usual error each observation renews.
const RENEWED: f64 = 0.05;
/// The usual error is never thought to be less: clocks and schedulers are not better.
const LEAST_ERROR: f64 = 0.02;
/// A scale stays between one part in so many and so many times its prior.
const BOUND: f64 = 100.0;

/// By how much each of `N` terms of a prediction is off.
///
/// An error counts only up to three times the usual one (Huber's rule), so that one stalled
/// request moves little. Errors that stay raise what is usual by a tenth each, so that a worker
/// which became twice as slow is believed after some dozens of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit<const N: usize> {
    scales: [f64; N],
    covariance: [[f64; N]; N],
    usual_error: f64,
    /// Clipped errors in a row, below 0 for those that were too long predictions.
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
    /// Takes in that what the prior predicts as the sum of these parts took so many seconds.
    /// False if that says nothing.
    pub fn observe(&mut self, parts: [f64; N], seconds: f64) -> bool {
        let sum: f64 = parts.iter().sum();
        if !(sum.is_finite() && sum > 0.0 && seconds.is_finite() && seconds > 0.0) {
            return false;
        }
        let predicted: f64 = (0..N).map(|i| self.scales[i] * parts[i]).sum();
        let x = parts.map(|part| part / predicted);
        let error = seconds / predicted - 1.0;
        let limit = CLIP * self.usual_error;
        let clipped = error.clamp(-limit, limit);

        // The textbook's gain, over a covariance that is kept symmetric.
        let spread: [f64; N] =
            std::array::from_fn(|i| (0..N).map(|j| self.covariance[i][j] * x[j]).sum());
        let surprise: f64 = KEPT * NOISE + (0..N).map(|i| x[i] * spread[i]).sum::<f64>();
        // What was clipped says where to, not how far: there is as much to be learned after it.
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

    /// Nobody observed it for a while: as much of what was learned as this share is doubted,
    /// and the next observations count for more.
    pub fn doubt(&mut self, share: f64) {
        for (i, row) in self.covariance.iter_mut().enumerate() {
            row[i] += share * VARIANCE;
        }
        self.bound_covariance();
        self.usual_error += share * (1.0 - self.usual_error).max(0.0);
    }

    /// The scales, as far from 1 as they are trusted.
    pub fn scales(&self, trust: f64) -> [f64; N] {
        // Between factors: half of "four times" is twice.
        self.scales.map(|scale| scale.powf(trust))
    }

    /// What they rest on.
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
