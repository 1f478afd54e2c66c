//! A policy and the scenario in which it serves a trace: one row of a replay's table.

use splitrail_sim::cluster::{SimulationResult, Workload};

use crate::named::NamedPolicy;
use crate::placement::PlacementRecord;
use crate::report::PolicyReport;
use crate::scenario::Scenario;

/// A policy and the scenario in which it serves the trace.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The policy.
    pub policy: NamedPolicy,
    /// The scenario.
    pub scenario: Scenario,
}

impl Entry {
    /// Serves the trace. `watch` is called from time to time with the number of requests that have
    /// arrived.
    pub fn serve(
        &self,
        workload: &Workload,
        watch: &mut dyn FnMut(usize),
    ) -> (SimulationResult, PolicyReport) {
        self.serve_recording(workload, &mut PlacementRecord::default(), watch)
    }

    /// Serves the trace as [`serve`](Self::serve) does, and records a placement.
    pub fn serve_recording(
        &self,
        workload: &Workload,
        record: &mut PlacementRecord,
        watch: &mut dyn FnMut(usize),
    ) -> (SimulationResult, PolicyReport) {
        let outcome = self.scenario.run(workload, &self.policy, record, watch);
        let load = self.scenario.utilisation;
        let report =
            PolicyReport { load, ..PolicyReport::new(&self.policy.name, workload, &outcome) };
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
