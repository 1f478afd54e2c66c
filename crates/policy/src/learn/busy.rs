//! Measures the share of recent time in which a worker was busy.

/// The time constant of the average: long enough to show load and not bursts, short enough to
/// follow the changes of a day.
const MEMORY_SECONDS: f64 = 60.0;

/// The share of about the last minute in which a worker computed prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BusyShare {
    share: f64,
    busy: bool,
    since_ns: u64,
}

impl BusyShare {
    /// Records whether the worker computes prompts from now on.
    pub fn set(&mut self, now_ns: u64, busy: bool) {
        self.share = self.at(now_ns);
        self.since_ns = self.since_ns.max(now_ns);
        self.busy = busy;
    }

    /// The share, from 0 to 1.
    pub fn at(&self, now_ns: u64) -> f64 {
        let seconds = now_ns.saturating_sub(self.since_ns) as f64 / 1e9;
        let kept = (-seconds / MEMORY_SECONDS).exp();
        let now = if self.busy { 1.0 } else { 0.0 };
        self.share * kept + now * (1.0 - kept)
    }
}
