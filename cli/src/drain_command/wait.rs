//! Waits until no replica has requests on a drained worker.
//!
//! A prefill engine must live longer than its last request: a decode worker may still fetch the
//! hand-off. So the wait goes on until the requests that were in flight when the worker had none have
//! ended, or the model's `lease` has passed.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use serde_json::Value;
use splitrail_settings::command::print_error;
use splitrail_settings::scalar::parse_duration;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::requests;
use crate::admin::{AskError, Replica};
use crate::cluster::{WorkerSnapshot, ask_all, takes_work, workers};

/// Time between two rounds of questions.
const ROUND: Duration = Duration::from_millis(500);

/// Minimum time between two lines about the progress.
const PROGRESS: Duration = Duration::from_secs(2);

/// Number of rounds in a row that a replica may fail to answer.
const SILENT_ROUNDS_MAX: u32 = 3;

/// How a wait ended.
pub(super) enum WaitEnd {
    /// The person who runs the command does not want to wait any longer.
    Interrupted,
    /// What is known of each replica.
    Ended(Vec<Proof>),
}

/// What is known of one replica in the end.
#[derive(Clone, Debug)]
pub(super) enum Proof {
    /// The replica has not replied to the last question.
    Unknown,
    /// The replica has no requests on the worker, and none of its requests can still fetch a hand-off
    /// from it.
    NoRequests,
    /// The replica still had this number of requests on the worker when the time was over.
    Requests(u64),
    /// The replica has no requests on the worker, but requests that were prefilled there may still
    /// fetch their hand-offs.
    HandOffs,
    /// The replica cannot be asked any more.
    Gone(AskError),
    /// The replica does not list the worker any more.
    Left,
    /// Somebody has taken the worker back into service.
    Undrained,
}

impl Proof {
    /// Whether the replica is known to need the worker no more.
    pub(super) fn is_proved(&self) -> bool {
        matches!(self, Self::NoRequests)
    }

    /// The same in words.
    pub(super) fn text(&self, id: &str) -> String {
        match self {
            Self::Unknown => "not proved: the router has not replied".to_owned(),
            Self::NoRequests => format!("no requests on {id}"),
            Self::Requests(count) => format!("still {} on {id}", requests(*count)),
            Self::HandOffs => format!("hand-offs from {id} may still be fetched"),
            Self::Gone(error) => format!("not proved: {}", error.message()),
            Self::Left => format!("not proved: the router does not list {id} any more"),
            Self::Undrained => format!("not proved: {id} is back in service"),
        }
    }

    /// Whether further questions cannot change it.
    fn is_final(&self) -> bool {
        matches!(self, Self::Gone(_) | Self::Left | Self::Undrained)
    }
}

/// One replica during the wait.
struct WatchedReplica {
    replica: Replica,
    silent_rounds: u32,
    /// Whether it was said that the worker is the last one of its role.
    is_warned: bool,
    /// The ids of the requests that may still fetch hand-offs from the worker. `None` while the
    /// worker has requests, and until the replica has said which requests are in flight.
    fetching: Option<BTreeSet<String>>,
    proof: Proof,
}

/// Waits for one worker.
pub(super) struct WorkerWait<'w> {
    watched: Vec<WatchedReplica>,
    model: &'w str,
    id: &'w str,
    /// Whether the progress is shown.
    shows_progress: bool,
    /// The total that was shown last, and when.
    shown: Option<(u64, Instant)>,
    /// Since when the worker has no requests. `None` while it has some.
    idle_since: Option<Instant>,
    /// The longest lease of the model on the replicas. `None` until all of them have reported one.
    lease: Option<Duration>,
}

impl<'w> WorkerWait<'w> {
    pub(super) fn new(
        replicas: &[Replica],
        model: &'w str,
        id: &'w str,
        shows_progress: bool,
    ) -> Self {
        let watched = |replica: &Replica| WatchedReplica {
            replica: replica.clone(),
            silent_rounds: 0,
            is_warned: false,
            fetching: None,
            proof: Proof::Unknown,
        };
        let watched = replicas.iter().map(watched).collect();
        Self { watched, model, id, shows_progress, shown: None, idle_since: None, lease: None }
    }

    /// Waits for at most `time_max`, or until `interrupted`.
    pub(super) async fn run<T>(
        mut self,
        time_max: Option<Duration>,
        interrupted: impl Future<Output = T>,
    ) -> WaitEnd {
        let far = Duration::from_secs(365 * 24 * 3600);
        let mut is_late = pin!(sleep_until(Instant::now() + time_max.unwrap_or(far)));
        let mut interrupted = pin!(interrupted);
        let mut rounds = interval(ROUND);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_over = tokio::select! {
                biased;
                _signal = &mut interrupted => return WaitEnd::Interrupted,
                () = &mut is_late => true,
                is_over = async { rounds.tick().await; self.round().await } => is_over,
            };
            if is_over {
                return WaitEnd::Ended(self.watched.into_iter().map(|one| one.proof).collect());
            }
        }
    }

    /// Asks all replicas once. Returns whether nothing is left to wait for.
    async fn round(&mut self) -> bool {
        let asked: Vec<usize> =
            (0..self.watched.len()).filter(|at| !self.watched[*at].proof.is_final()).collect();
        let replicas: Vec<_> = asked.iter().map(|at| self.watched[*at].replica.clone()).collect();
        for (at, reply) in asked.iter().zip(ask_all(&replicas, workers).await) {
            self.note(*at, reply);
        }
        self.show_progress();
        let open = || self.watched.iter().filter(|one| !one.proof.is_final());
        if open().any(|one| !matches!(one.proof, Proof::NoRequests | Proof::HandOffs)) {
            self.idle_since = None;
            self.watched.iter_mut().for_each(|one| one.fetching = None);
            return false;
        }
        if open().any(|one| matches!(one.proof, Proof::HandOffs)) {
            self.look_for_hand_offs().await;
        }
        self.watched.iter().all(|one| one.proof.is_final() || one.proof.is_proved())
    }

    /// Notes what a replica says. That a prefill worker has no requests does not prove that its
    /// hand-offs were fetched.
    fn note(&mut self, at: usize, reply: Result<Vec<WorkerSnapshot>, AskError>) {
        let one = &mut self.watched[at];
        let list = match reply {
            Ok(list) => list,
            Err(error) => {
                one.silent_rounds += 1;
                if one.silent_rounds >= SILENT_ROUNDS_MAX {
                    if self.shows_progress {
                        print_error(&format!("{}: {}", one.replica.name(), error.message()));
                    }
                    one.proof = Proof::Gone(error);
                } else {
                    one.proof = Proof::Unknown;
                }
                return;
            }
        };
        one.silent_rounds = 0;
        let worker = list.iter().find(|worker| worker.is(self.model, self.id));
        let last = worker.filter(|worker| is_last(worker, &list));
        if let Some(last) = last.filter(|_| !one.is_warned && self.shows_progress) {
            one.is_warned = true;
            print_error(&format!("{}: {}", one.replica.name(), effect_of_last(last)));
        }
        one.proof = match worker {
            None => Proof::Left,
            Some(worker) if worker.state != "draining" => Proof::Undrained,
            Some(worker) if worker.requests > 0 => Proof::Requests(worker.requests),
            Some(worker) if worker.role == "decode" => Proof::NoRequests,
            Some(_) => Proof::HandOffs,
        };
    }

    /// Finds out on which replicas no hand-off of the worker can be fetched any more: the requests
    /// that were in flight when the worker had none have ended, or the lease has passed. A replica
    /// that does not answer is asked again in the next round.
    async fn look_for_hand_offs(&mut self) {
        let idle_since = *self.idle_since.get_or_insert_with(Instant::now);
        let now = Instant::now();
        let open: Vec<usize> = (0..self.watched.len())
            .filter(|at| matches!(self.watched[*at].proof, Proof::HandOffs))
            .collect();
        let replicas: Vec<_> = open.iter().map(|at| self.watched[*at].replica.clone()).collect();
        let replies =
            ask_all(&replicas, async |replica: Replica| replica.get("/admin/requests").await).await;
        for (at, reply) in open.iter().zip(&replies) {
            let Ok(reply) = reply else { continue };
            let mut in_flight: BTreeSet<String> = ids(reply, self.model).collect();
            let one = &mut self.watched[*at];
            if let Some(before) = &one.fetching {
                in_flight.retain(|id| before.contains(id));
            }
            one.fetching = Some(in_flight);
        }
        let is_fetched =
            |one: &WatchedReplica| one.fetching.as_ref().is_some_and(BTreeSet::is_empty);
        if self.lease.is_none() && open.iter().any(|at| !is_fetched(&self.watched[*at])) {
            self.lease = self.lease(&replicas).await;
        }
        let has_passed = self.lease.is_some_and(|lease| now >= idle_since + lease);
        for at in open {
            let one = &mut self.watched[at];
            if has_passed || is_fetched(one) {
                one.proof = Proof::NoRequests;
            }
        }
    }

    /// The longest lease of the model on the replicas; `None` if one of them does not say it.
    async fn lease(&self, replicas: &[Replica]) -> Option<Duration> {
        /// What the configuration has by default.
        const DEFAULT: Duration = Duration::from_secs(30);
        let configs =
            ask_all(replicas, async |replica: Replica| replica.get("/admin/config").await).await;
        let of_config = |config: &Value| {
            let mut models = config["models"].as_array()?.iter();
            let model = models.find(|model| model["name"] == self.model)?;
            match model["connector"] == "none" {
                true => Some(Duration::ZERO),
                false => parse_duration(model["lease"].as_str()?).ok(),
            }
        };
        let mut longest = None;
        for config in &configs {
            let lease = of_config(config.as_ref().ok()?).unwrap_or(DEFAULT);
            longest = longest.max(Some(lease));
        }
        longest
    }

    fn show_progress(&mut self) {
        if !self.shows_progress {
            return;
        }
        let counts = self.watched.iter().filter_map(|one| match one.proof {
            Proof::Requests(count) => Some((one.replica.name(), count)),
            _ => None,
        });
        let counts: Vec<(String, u64)> = counts.collect();
        let total = counts.iter().map(|(_, count)| count).sum();
        let now = Instant::now();
        let is_due = self.shown.is_none_or(|(shown, at)| shown != total && now - at >= PROGRESS);
        if total > 0 && is_due {
            let parts: Vec<_> =
                counts.iter().map(|(name, count)| format!("{name}: {count}")).collect();
            print_error(&format!("waiting for {} ({})", requests(total), parts.join(", ")));
            self.shown = Some((total, now));
        }
    }
}

/// What becomes of the requests of the last worker of its role: a router uses the worker although it
/// drains, unless the worker is for prefill alone.
fn effect_of_last(worker: &WorkerSnapshot) -> &'static str {
    match &*worker.role {
        "prefill" => {
            "no other prefill worker is left: decode workers compute prompts, or requests fail \
             (`on_no_prefill`)"
        }
        _ => "no other worker can take its requests, so it still gets them",
    }
}

/// Whether no other worker of its model takes new work of its role.
fn is_last(worker: &WorkerSnapshot, all: &[WorkerSnapshot]) -> bool {
    let replaces = |other: &WorkerSnapshot| {
        let has_role = other.role == worker.role || other.role == "both" || worker.role == "both";
        let is_other = other.model == worker.model && other.id != worker.id;
        is_other && has_role && takes_work(&other.state)
    };
    !all.iter().any(replaces)
}

/// The ids of the requests of a model that are in flight.
fn ids<'r>(reply: &'r Value, model: &'r str) -> impl Iterator<Item = String> {
    let requests = reply["requests"].as_array().into_iter().flatten();
    let of_model = requests.filter(move |request| request["model"] == model);
    of_model.filter_map(|request| request["request_id"].as_str().map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_the_last_one_if_no_other_takes_new_work_of_its_role() {
        let worker = |id: &str, role: &str, state: &str| WorkerSnapshot {
            model: "m".into(),
            id: id.into(),
            role: role.into(),
            state: state.into(),
            ..Default::default()
        };
        let drained = worker("d0", "decode", "draining");
        for (other, is_last_one) in [
            (worker("d1", "decode", "serving"), false),
            (worker("w", "both", "warming"), false),
            (worker("d1", "decode", "down"), true),
            (worker("p", "prefill", "serving"), true),
            (WorkerSnapshot { model: "n".into(), ..worker("d1", "decode", "serving") }, true),
        ] {
            assert_eq!(is_last(&drained, &[drained.clone(), other]), is_last_one);
        }
    }
}
