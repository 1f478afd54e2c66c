//! Compares the reference model with the figures of an independent implementation for the
//! conversation trace, with eight prefill and four decode workers.

use splitrail_replay::{Entry, NamedPolicy, PolicyReport, Scenario};

use super::report::{Goal, Row, print_line};
use super::{Failure, Run};

/// Share of the ceiling; mean, p50, p90 and p99 of TTFT; shares of requests within 30 s and 5 s;
/// imbalance. All figures have the decimals with which they were printed.
type Cells = [&'static str; 8];

/// The figures of each policy with 10,000 blocks per worker, at loads 0.9 and 1.3.
const FIGURES: [(&str, Cells, Cells); 10] = [
    (
        "random",
        ["33", "12.8", "7.5", "33", "61", "88", "41", "1.08"],
        ["33", "174", "167", "305", "407", "5", "2", "1.08"],
    ),
    (
        "least_loaded",
        ["34", "2.70", "1.6", "6.2", "17", "100", "85", "1.02"],
        ["34", "150", "160", "235", "271", "6", "1", "1.01"],
    ),
    (
        "prefix_hash",
        ["99", "6.18", "2.1", "19", "45", "97", "68", "1.07"],
        ["99", "20.9", "11", "56", "101", "74", "36", "1.07"],
    ),
    (
        "exact_overlap",
        ["99", "2.05", ".8", "4.7", "20", "100", "91", "1.10"],
        ["98", "4.64", "2.0", "14", "27", "99", "74", "1.02"],
    ),
    (
        "llmd",
        ["97", "2.47", "1.0", "5.8", "24", "100", "88", "1.07"],
        ["95", "6.18", "2.5", "18", "39", "97", "67", "1.02"],
    ),
    (
        "dynamo",
        ["76", "1.63", ".8", "3.7", "14", "100", "94", "1.05"],
        ["68", "18.4", "12.5", "41", "52", "68", "33", "1.01"],
    ),
    (
        "mooncake",
        ["80", "1.49", ".8", "3.3", "13", "100", "96", "1.06"],
        ["73", "14.1", "7.6", "34", "41", "78", "42", "1.01"],
    ),
    (
        "work_aware",
        ["92", "1.48", ".7", "3.2", "14", "100", "95", "1.06"],
        ["90", "3.85", "1.8", "13", "22", "100", "79", "1.02"],
    ),
    (
        "mooncake_fetch",
        ["98", "1.24", ".5", "2.7", "13", "100", "96", "1.06"],
        ["97", "3.29", "1.3", "12", "20", "100", "83", "1.02"],
    ),
    (
        "pooled_belady",
        ["100", "1.22", ".5", "2.6", "13", "100", "96", "1.04"],
        ["100", "2.86", "1.2", "9.6", "18", "100", "84", "1.02"],
    ),
];

/// The mean TTFT of each policy with 2,000 blocks per worker, at load 1.3.
const SMALL_CACHES: [(&str, &str); 6] = [
    ("dynamo", "156"),
    ("mooncake", "137"),
    ("exact_overlap", "48"),
    ("work_aware", "20"),
    ("pooled_lru", "6.9"),
    ("pooled_belady", "2.9"),
];

pub(super) fn run(run: &mut Run) -> Result<(), Failure> {
    if !run.is_reference {
        return Ok(print_line(
            "# reference is left out: it needs --trace with Mooncake's conversation trace",
        )?);
    }
    for (name, low, high) in FIGURES {
        for (load, cells) in [(0.9, low), (1.3, high)] {
            let figures = figures(&serve(run, name, load, 10_000));
            let differ = figures.iter().zip(cells).filter(|(ours, cell)| !prints_as(**ours, cell));
            let differ = differ.count();
            add(run, format!("{name}, load {load}"), differ)?;
        }
    }
    for (name, cell) in SMALL_CACHES {
        let mean_s = serve(run, name, 1.3, 2_000).ttft.mean_s;
        add(run, format!("{name}, load 1.3, 2,000 blocks"), usize::from(!prints_as(mean_s, cell)))?;
    }
    Ok(())
}

fn serve(run: &Run, name: &str, load: f64, blocks: usize) -> PolicyReport {
    let mut scenario = Scenario { utilisation: Some(load), ..Scenario::default() };
    scenario.cluster.prefill_cache_blocks = blocks;
    let Some(policy) = NamedPolicy::by_name(name) else { return PolicyReport::default() };
    Entry { policy, scenario }.serve(&run.workload, &mut |_| {}).1
}

fn add(run: &mut Run, measure: String, differ: usize) -> Result<(), Failure> {
    run.report.add(Row {
        workload: "reference".to_owned(),
        measure,
        unit: "cells",
        ours: differ as f64,
        peer: None,
        goal: Some(Goal::AtMost(0.0)),
    })?;
    Ok(())
}

fn figures(report: &PolicyReport) -> [f64; 8] {
    let PolicyReport { ceiling_percent, ttft, good30_percent, good5_percent, imbalance, .. } =
        report;
    [
        *ceiling_percent,
        ttft.mean_s,
        ttft.p50_s,
        ttft.p90_s,
        ttft.p99_s,
        *good30_percent,
        *good5_percent,
        *imbalance,
    ]
}

/// Whether a figure rounds to a cell. The tolerance is 0.55 units of the cell's last digit instead
/// of 0.5, because the cells were rounded twice.
fn prints_as(figure: f64, cell: &str) -> bool {
    let decimals = cell.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let unit = 10f64.powi(-(decimals as i32));
    cell.parse::<f64>().is_ok_and(|printed| (figure - printed).abs() <= 0.55 * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_stands_for_what_rounds_to_it() {
        assert!(prints_as(0.849, ".8") && prints_as(95.46, "96") && prints_as(2.704, "2.70"));
        assert!(!prints_as(0.86, ".8") && !prints_as(95.4, "96") && !prints_as(2.706, "2.70"));
    }
}
