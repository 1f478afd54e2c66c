//! The share of recent time in which a worker was busy.

/// About so long is remembered: long enough to see load rather than bursts, short enough to
/// follow a day's tide.
const MEMORY_SECONDS: f64 = 60.0;

/// The share of the last minute in which a worker computed prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BusyShare {
    share: f64,
    busy: bool,
    since_ns: u64,
}

impl BusyShare {
    /// Says whether it computes something from now on.
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
