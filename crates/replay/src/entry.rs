//! A policy and the scenario in which it serves a trace: one row of a replay's table.

use splitrail_sim::cluster::{Outcome, Workload};

use crate::named::Named;
use crate::report::Report;
use crate::scenario::Scenario;

/// A policy and the scenario in which it serves the trace.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The policy.
    pub policy: Named,
    /// The scenario.
    pub scenario: Scenario,
}

impl Entry {
    /// Serves the trace. `watch` is called from time to time with the number of requests that have
    /// arrived.
    pub fn serve(&self, workload: &Workload, watch: &mut dyn FnMut(usize)) -> (Outcome, Report) {
        let outcome = self.scenario.run(workload, &self.policy, watch);
        let load = self.scenario.utilisation;
        let report = Report { load, ..Report::new(&self.policy.name, workload, &outcome) };
        (outcome, report)
    }
}

/// All entries at every load.
pub fn sweep(entries: &[Entry], loads: &[f64]) -> Vec<Entry> {
    let at = |entry: &Entry, load: f64| Entry {
        policy: entry.policy.clone(),
        scenario: Scenario { utilisation: Some(load), ..entry.scenario.clone() },
    };
    entries.iter().flat_map(|entry| loads.iter().map(move |load| at(entry, *load))).collect()
}
