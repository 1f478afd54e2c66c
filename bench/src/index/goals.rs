//! The goals of the rows of results.

/// The goal of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// Maximum of our figure divided by the better peer's, for measures where less is better.
    RatioAtMost(f64),
    /// Minimum of our figure divided by the better peer's, for measures where more is better.
    RatioAtLeast(f64),
    /// Maximum of our figure, in the row's unit.
    OursAtMost(f64),
}

impl Goal {
    /// Whether a row meets the goal; `None` if a figure is missing.
    pub fn met(self, ours: Option<f64>, ratio: Option<f64>) -> Option<bool> {
        match self {
            Self::RatioAtMost(bound) => ratio.map(|ratio| ratio <= bound),
            Self::RatioAtLeast(bound) => ratio.map(|ratio| ratio >= bound),
            Self::OursAtMost(bound) => ours.map(|ours| ours <= bound),
        }
    }

    /// The goal as it is printed.
    pub fn text(self) -> String {
        match self {
            Self::RatioAtMost(bound) => format!("<= {bound} x"),
            Self::RatioAtLeast(bound) => format!(">= {bound} x"),
            Self::OursAtMost(bound) => format!("<= {bound}"),
        }
    }
}

/// Names of measures that have goals or are reported by several workloads.
pub mod measure {
    /// Median time of a lookup.
    pub const MATCH_P50: &str = "match p50";
    /// 99th percentile of the time of a lookup.
    pub const MATCH_P99: &str = "match p99";
    /// Median time of a lookup after which all overlaps are read.
    pub const MATCH_READ_P50: &str = "match and read all p50";
    /// Blocks applied per second of processor time.
    pub const APPLY_CPU: &str = "apply per CPU second";
    /// Blocks applied per second of wall time.
    pub const APPLY_WALL: &str = "apply per second";
    /// Blocks looked up, stored and removed per second.
    pub const MIXED: &str = "block operations";
    /// Allocated bytes per entry.
    pub const BYTES: &str = "bytes/entry";
    /// Resident bytes per entry.
    pub const BYTES_RSS: &str = "bytes/entry, RSS";
    /// Bytes per live entry after churn.
    pub const BYTES_AFTER: &str = "bytes/live entry after";
    /// Bytes per live entry after churn, divided by those before.
    pub const GROWTH: &str = "bytes/live entry, after over before";
    /// Time until readers no longer find a removed worker.
    pub const UNSEEN: &str = "until unseen";
    /// Time until the memory of a removed worker has been freed, per entry of the worker.
    pub const RETURNED: &str = "until returned, per entry";
    /// Longest delay of a reader.
    pub const STALL: &str = "longest reader stall";
    /// Number of panics and hangs.
    pub const FAILED: &str = "panicked or hung";
    /// Time to hash a prompt.
    pub const HASHING: &str = "hash 131,072 tokens";
}

use Goal::{OursAtMost, RatioAtLeast, RatioAtMost};

/// Workload, measure and goal. A workload that ends with `*` stands for all workloads with that
/// beginning.
const GOALS: &[(&str, &str, Goal)] = &[
    ("depth W=512 D=8 full", measure::MATCH_P50, RatioAtMost(0.5)),
    ("depth W=512 D=64 full", measure::MATCH_P50, RatioAtMost(0.5)),
    ("depth W=512 D=512 full", measure::MATCH_P50, RatioAtMost(0.5)),
    ("depth W=8 D=4096 full", measure::MATCH_P50, RatioAtMost(0.25)),
    ("depth W=512 D=4096 full", measure::MATCH_P50, RatioAtMost(0.25)),
    ("depth W=512 D=512 staggered", measure::MATCH_P50, RatioAtMost(0.5)),
    ("depth W=512 D=4096 staggered", measure::MATCH_P50, RatioAtMost(0.5)),
    ("trace E=32 *", measure::MATCH_P50, RatioAtMost(0.5)),
    ("trace E=32 *", measure::APPLY_CPU, RatioAtLeast(1.5)),
    ("contended *", measure::MATCH_P99, RatioAtMost(0.5)),
    ("mixed *", measure::MIXED, RatioAtLeast(1.5)),
    ("memory trace E=32 *", measure::BYTES, RatioAtMost(0.6)),
    ("memory trace E=32 *", measure::BYTES_RSS, RatioAtMost(0.6)),
    ("memory small *", measure::BYTES, RatioAtMost(0.6)),
    ("memory small *", measure::BYTES_RSS, RatioAtMost(0.6)),
    ("churn tail-first", measure::BYTES_AFTER, RatioAtMost(0.6)),
    ("churn tail-first", measure::GROWTH, OursAtMost(1.1)),
    ("churn holes", measure::BYTES_AFTER, RatioAtMost(0.3)),
    ("remove_worker *", measure::UNSEEN, OursAtMost(20.0)),
    ("remove_worker *", measure::RETURNED, RatioAtMost(1.0)),
    ("roots *", measure::STALL, OursAtMost(1000.0)),
    ("roots *", measure::FAILED, OursAtMost(0.0)),
    ("hashing", measure::HASHING, RatioAtMost(0.667)),
];

/// The goal of a row, if it has one.
pub fn goal_of(workload: &str, measure: &str) -> Option<Goal> {
    let names = |pattern: &str| match pattern.strip_suffix('*') {
        Some(start) => workload.starts_with(start),
        None => workload == pattern,
    };
    GOALS.iter().find(|(w, m, _)| *m == measure && names(w)).map(|(_, _, goal)| *goal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_found_by_pattern_and_measure() {
        assert_eq!(goal_of("trace E=32 W=8", measure::MATCH_P50), Some(RatioAtMost(0.5)));
        assert_eq!(goal_of("trace E=1 W=8", measure::MATCH_P50), None);
        assert_eq!(goal_of("depth W=8 D=8 full", measure::MATCH_P50), None);
    }

    #[test]
    fn a_missing_figure_is_neither_met_nor_missed() {
        assert_eq!(RatioAtMost(0.5).met(Some(1.0), None), None);
        assert_eq!(RatioAtLeast(1.5).met(Some(3.0), Some(1.5)), Some(true));
        assert_eq!(OursAtMost(20.0).met(Some(21.0), Some(0.1)), Some(false));
    }
}
