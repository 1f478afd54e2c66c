//! What stays known, and what is forgotten, when another description takes the place of a worker's, or
//! another process that of its engine's.

use std::sync::atomic::Ordering::Relaxed;

use super::{Bootstrap, Worker};
use crate::engine_facts::KvNames;
use crate::state::{Event, WorkerState};
use splitrail_policy::Leg;

impl Worker {
    /// Takes over the state of the worker that this one replaces, if both are the same engine with
    /// another description: drain, ejection, the last probe, the engine's identity and block size,
    /// its stranded legs, and whether it was there at the start.
    pub fn succeed_to(&self, before: &Self) {
        if !self.has_the_address_of(before) {
            return;
        }
        let why = "taken over from the same engine's earlier description";
        self.take_over_drain(before, why);
        if before.is_probed() {
            self.set_probed(before.is_up(), why);
        }
        self.health.presence.succeed_to(&before.health.presence);
        self.engine.facts.set_block_size(before.engine.facts.block_size());
        self.transfer.push.succeed_to(&before.transfer.push);
        self.health.ejections.succeed_to(&before.health.ejections);
        if before.state() == WorkerState::Ejected {
            self.health.lifecycle.change(Event::Eject, before.health.lifecycle.since().why);
        }
        // It is new, so that nobody has set this.
        let _set = self.joined.set(before.joined());
        self.health.initial_member.store(before.health.initial_member.load(Relaxed), Relaxed);
    }

    fn has_the_address_of(&self, other: &Self) -> bool {
        (&self.address.authority, self.address.uses_tls)
            == (&other.address.authority, other.address.uses_tls)
    }

    /// Whether this worker has taken the place of `before`, and is the same process of the same engine.
    pub(crate) fn is_later_description_of(&self, before: &Self) -> bool {
        self.index != before.index
            && self.id() == before.id()
            && self.has_the_address_of(before)
            && self.health.presence.restarts() == before.health.presence.restarts()
    }

    /// Forgets what was learned of the engine, since its process is or may be another one.
    pub fn becomes_another(&self) {
        self.health.presence.record_possible_restart();
        self.forget_process();
    }

    /// Records that the engine's reports are of a new process, to which no connection exists yet.
    pub fn record_restart(&self) {
        for leg in [Leg::Prefill, Leg::Decode] {
            self.breaker(leg).succeed();
        }
        self.health.presence.record_restart();
        self.forget_version();
        self.forget_process();
        self.transfer.push.forget_stranded_legs();
        self.end_quarantine("its engine is another process, with an empty cache");
        self.rejoin("its engine is another process");
    }

    /// Forgets what another version of the engine, or one with other options, does differently.
    pub(super) fn forget_version(&self) {
        self.set_supports_cache_hit_threshold(None);
        self.ranks.set_takes_rank_header(None);
        self.engine.facts.set_block_size(None);
        self.engine.facts.set_kv_names(KvNames::default());
    }

    fn forget_process(&self) {
        self.load.costs.forget();
        self.engine.endpoint_support.forget();
        self.engine.facts.forget_adapters();
        self.transfer.missing_hand_offs.forget();
        self.transfer.failed_hand_offs.forget();
        self.transfer.push.forget_identities();
        self.transfer.bootstrap.iter().for_each(Bootstrap::forget_process);
        self.transfer.read_back.forget();
        self.transfer.fetches.forget_trials();
        self.engine.echoes.forget();
        self.kv.parity.forget();
        self.kv.drift.forget();
        self.kv.last_block.forget();
        self.kv.usage_stats.restart();
    }
}
