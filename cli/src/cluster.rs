//! What replicas report about themselves and their workers.

mod ask_all;
mod merged;
mod poll;
mod snapshot;

pub(crate) use ask_all::{ask_all, worst_code};
pub(crate) use merged::{MergedWorker, merge, role_place, takes_work};
pub(crate) use poll::{known_model, model_names, snapshot, workers};
pub(crate) use snapshot::{Attention, LegTimesSnapshot, ReplicaState, WorkerSnapshot};
