//! What stands in one row of a table.

use splitrail_sim::cluster::{Outcome, Workload};

use crate::named::Named;
use crate::report::Report;
use crate::scenario::Scenario;

/// A policy and how the trace is served under it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What decides.
    pub policy: Named,
    /// The rest.
    pub scenario: Scenario,
}

impl Entry {
    /// Serves the trace. `watch` is told now and then how many requests have come.
    pub fn serve(&self, workload: &Workload, watch: &mut dyn FnMut(usize)) -> (Outcome, Report) {
        let outcome = self.scenario.run(workload, &self.policy, watch);
        let load = self.scenario.utilisation;
        let report = Report { load, ..Report::new(&self.policy.name, workload, &outcome) };
        (outcome, report)
    }
}

/// Every entry at every load.
pub fn sweep(entries: &[Entry], loads: &[f64]) -> Vec<Entry> {
    let at = |entry: &Entry, load: f64| Entry {
        policy: entry.policy.clone(),
        scenario: Scenario { utilisation: Some(load), ..entry.scenario.clone() },
    };
    entries.iter().flat_map(|entry| loads.iter().map(move |load| at(entry, *load))).collect()
}
