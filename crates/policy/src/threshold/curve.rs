//! Learns the ratio that would have saved most time recently as the threshold.

/// The number of classes of hit ratios: each is a twentieth wide, and one is for whole prompts.
const CLASSES: usize = 21;
/// The weight of a comparison is halved after this time.
const HALF_LIFE_SECONDS: f64 = 60.0;
/// The maximum gain or loss that one comparison counts.
const SAVED_MAX_MS: f64 = 10_000.0;
/// With this number of comparisons the confidence reaches half of its value for very many.
const FEW: f64 = 20.0;

/// The time that local prefills would have saved, by the share of the prompt that was cached.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    /// For each class: the time saved by local prefill, in milliseconds; negative if it was lost.
    saved_ms: [f64; CLASSES],
    /// For each class: the sum of the absolute differences between both ways, in milliseconds.
    at_stake_ms: [f64; CLASSES],
    comparisons: f64,
    since_ns: u64,
    begin: f64,
}

impl Curve {
    pub(super) fn new(begin: f64) -> Self {
        Self {
            saved_ms: [0.0; CLASSES],
            at_stake_ms: [0.0; CLASSES],
            comparisons: 0.0,
            since_ns: 0,
            begin,
        }
    }

    pub(super) fn compared(&mut self, now_ns: u64, hit_ratio: f64, saved_ms: f64) {
        let kept = self.kept(now_ns);
        self.saved_ms.iter_mut().for_each(|saved| *saved *= kept);
        self.at_stake_ms.iter_mut().for_each(|stake| *stake *= kept);
        self.comparisons *= kept;
        self.since_ns = now_ns;
        let class = (hit_ratio.clamp(0.0, 1.0) * (CLASSES - 1) as f64) as usize;
        let saved_ms = saved_ms.clamp(-SAVED_MAX_MS, SAVED_MAX_MS);
        self.saved_ms[class] += saved_ms;
        self.at_stake_ms[class] += saved_ms.abs();
        self.comparisons += 1.0;
    }

    /// The lower bound of the class from which on local prefill saved most in total.
    pub(super) fn threshold_ratio(&self, now_ns: u64) -> f64 {
        if self.comparisons(now_ns) < 1.0 {
            return self.begin;
        }
        self.best().0 as f64 / (CLASSES - 1) as f64
    }

    pub(super) fn comparisons(&self, now_ns: u64) -> f64 {
        self.comparisons * self.kept(now_ns)
    }

    /// The share of the possible gain that this ratio achieves, from 0 to 1.
    pub(super) fn confidence(&self, now_ns: u64) -> f64 {
        let stake: f64 = self.at_stake_ms.iter().sum();
        if stake <= 0.0 {
            return 0.0;
        }
        // A remote prefill gains what a local prefill loses.
        let (_, saved) = self.best();
        let all: f64 = self.saved_ms.iter().sum();
        let net = 2.0 * saved - all;
        let right = f64::midpoint(1.0, net / stake);
        let count = self.comparisons(now_ns);
        right.clamp(0.0, 1.0) * count / (count + FEW)
    }

    /// The class from which on local prefill saves most, and how much it saves.
    fn best(&self) -> (usize, f64) {
        let (mut best, mut saved) = ((CLASSES - 1, 0.0f64), 0.0);
        for class in (0..CLASSES).rev() {
            saved += self.saved_ms[class];
            if saved >= best.1 && self.at_stake_ms[class] > 0.0 {
                best = (class, saved);
            }
        }
        best
    }

    fn kept(&self, now_ns: u64) -> f64 {
        let seconds = now_ns.saturating_sub(self.since_ns) as f64 / 1e9;
        0.5f64.powf(seconds / HALF_LIFE_SECONDS)
    }
}
