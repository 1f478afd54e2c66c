//! Rules about the queue of a model, and the goal between tokens.

use std::time::Duration;

use crate::scalar::{format_duration, parse_duration};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;

/// The least and the greatest value of each duration: section, key and both values.
const RANGES: [(&str, &str, Duration, Duration); 5] = [
    ("queue", "max_wait", Duration::from_millis(1), Duration::MAX),
    ("queue", "lead", Duration::ZERO, Duration::from_secs(60)),
    ("queue", "fairness", Duration::from_millis(1), Duration::MAX),
    ("queue", "ttft_goal", Duration::from_millis(1), Duration::MAX),
    ("auto", "tbt_goal", Duration::from_millis(1), Duration::from_secs(60)),
];

/// Reports durations that are too short or too long.
pub(super) fn check(model: &Node, path: &str, report: &mut ProblemReport) {
    for (section, key, least, most) in RANGES {
        let Some(node) = model.get(section).and_then(|section| section.get(key)) else { continue };
        let Some(duration) = node.text().and_then(|text| parse_duration(text).ok()) else {
            continue;
        };
        if duration < least {
            let message =
                format!("`{path}.{section}.{key}` is less than {}", format_duration(least));
            report.error(node.at, message, "give it more time");
        } else if duration > most {
            let message =
                format!("`{path}.{section}.{key}` is more than {}", format_duration(most));
            report.error(node.at, message, "give it less time");
        }
    }
}
