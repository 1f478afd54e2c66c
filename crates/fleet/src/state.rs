//! The states of a worker and their transitions. Pure functions.
//!
//! ```text
//! joining -> warming -> serving -> ejected -> warming
//!    each of the first three -> stuck -> serving
//!    any of them -> down -> warming;  -> unready -> warming;  -> draining -> joining;  -> left
//! ```

/// The state of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WorkerState {
    /// New: no probe has succeeded yet, and the worker is presumed alive.
    Joining = 0,
    /// In slow start: the worker gets a growing share of new work.
    Warming = 1,
    /// In full service.
    Serving = 2,
    /// Alive, but so much worse than the others that it gets no work for a while.
    Ejected = 3,
    /// Not reachable.
    Down = 4,
    /// Gets no new work; current work continues.
    Draining = 5,
    /// Removed from the fleet. Final.
    Left = 6,
    /// Its engine makes no progress with the legs that it was sent, whatever its probes answer. It
    /// gets no new work until it shows work again.
    Stuck = 7,
    /// Its engine answers and says that it does not serve now: it sleeps, or it does not take the
    /// router's key.
    Unready = 8,
}

/// What happens to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The worker answered.
    Alive,
    /// The worker did not answer or could not be reached.
    Dead,
    /// The slow start is over.
    Warm,
    /// The worker performs much worse than the others.
    Eject,
    /// The time of the ejection is over.
    Readmit,
    /// A leg waits for much longer than predicted, without any sign of work.
    Stall,
    /// There is a sign of work, or no leg that waits.
    Progress,
    /// The engine says that it does not serve.
    Withdraw,
    /// The engine serves again.
    Return,
    /// An operator or the shim drains the worker.
    Drain,
    /// An operator or the shim ends the draining.
    Undrain,
    /// The worker is removed from the fleet.
    Leave,
}

impl WorkerState {
    /// All states, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::Joining,
        Self::Warming,
        Self::Serving,
        Self::Ejected,
        Self::Down,
        Self::Draining,
        Self::Left,
        Self::Stuck,
        Self::Unready,
    ];

    /// The label in metrics, logs and the admin listener.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Warming => "warming",
            Self::Serving => "serving",
            Self::Ejected => "ejected",
            Self::Down => "down",
            Self::Draining => "draining",
            Self::Left => "left",
            Self::Stuck => "stuck",
            Self::Unready => "unready",
        }
    }

    /// Whether a worker in this state gets new work.
    pub fn takes_work(self) -> bool {
        matches!(self, Self::Joining | Self::Warming | Self::Serving)
    }

    /// Whether a worker in this state does not go on with the legs that it was sent.
    pub fn strands_legs(self) -> bool {
        matches!(self, Self::Down | Self::Unready | Self::Stuck)
    }

    /// The state after an event; `None` if the state does not change.
    pub fn after(self, event: Event) -> Option<Self> {
        use WorkerState::{
            Down, Draining, Ejected, Joining, Left, Serving, Stuck, Unready, Warming,
        };
        Some(match (self, event) {
            (Left, _) => return None,
            (_, Event::Leave) => Left,
            (Draining, Event::Undrain) => Joining,
            (Draining, _) | (_, Event::Undrain) => return None,
            (_, Event::Drain) => Draining,
            (Joining | Down, Event::Alive) => Warming,
            (Joining | Warming | Serving | Ejected | Stuck | Unready, Event::Dead) => Down,
            (Joining | Warming | Serving | Ejected | Stuck, Event::Withdraw) => Unready,
            (Unready, Event::Return) => Warming,
            (Unready, _) | (_, Event::Withdraw | Event::Return) => return None,
            (Joining | Warming | Serving, Event::Stall) => Stuck,
            (Stuck, Event::Progress) => Serving,
            (Stuck, _) | (_, Event::Stall | Event::Progress) => return None,
            (Warming, Event::Warm) => Serving,
            (Warming | Serving, Event::Eject) => Ejected,
            (Ejected, Event::Readmit) => Warming,
            (Warming | Serving | Ejected, Event::Alive) => return None,
            (Down, Event::Dead | Event::Warm | Event::Eject | Event::Readmit) => return None,
            (Joining, Event::Warm | Event::Eject | Event::Readmit) => return None,
            (Serving, Event::Warm | Event::Readmit) => return None,
            (Ejected, Event::Warm | Event::Eject) => return None,
            (Warming, Event::Readmit) => return None,
        })
    }

    pub(super) fn from_u8(state: u8) -> Self {
        Self::ALL.get(usize::from(state)).copied().unwrap_or(Self::Left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVENTS: [Event; 12] = [
        Event::Alive,
        Event::Dead,
        Event::Warm,
        Event::Eject,
        Event::Readmit,
        Event::Stall,
        Event::Progress,
        Event::Withdraw,
        Event::Return,
        Event::Drain,
        Event::Undrain,
        Event::Leave,
    ];

    #[test]
    fn numbers_name_states() {
        for state in WorkerState::ALL {
            assert_eq!(WorkerState::from_u8(state as u8), state);
        }
    }

    #[test]
    fn every_state_can_be_reached_from_the_first() {
        let mut reached = vec![WorkerState::Joining];
        for at in 0..WorkerState::ALL.len() {
            let Some(state) = reached.get(at).copied() else { break };
            for next in EVENTS.iter().filter_map(|event| state.after(*event)) {
                if !reached.contains(&next) {
                    reached.push(next);
                }
            }
        }
        assert_eq!(reached.len(), WorkerState::ALL.len(), "{reached:?}");
    }

    proptest! {
        #[test]
        fn a_worker_that_left_stays_left_and_a_draining_worker_gets_no_work(
            events in proptest::collection::vec(0..EVENTS.len(), 0..40)
        ) {
            let mut state = WorkerState::Joining;
            let (mut drained, mut left) = (false, false);
            for event in events.into_iter().map(|at| EVENTS[at]) {
                drained = (drained || event == Event::Drain) && event != Event::Undrain;
                left |= event == Event::Leave;
                let after = state.after(event);
                prop_assert_ne!(after, Some(state), "a change changes something");
                state = after.unwrap_or(state);
                prop_assert_eq!(left, state == WorkerState::Left);
                prop_assert!(!(drained && state.takes_work()));
            }
        }

        #[test]
        fn a_worker_that_is_down_gets_no_work_until_it_answers(
            events in proptest::collection::vec(0..EVENTS.len(), 0..40)
        ) {
            let mut state = WorkerState::Joining;
            let mut dead = false;
            for event in events.into_iter().map(|at| EVENTS[at]) {
                // After draining, a worker is presumed alive until a probe fails.
                dead = (dead || event == Event::Dead)
                    && !matches!(event, Event::Alive | Event::Undrain);
                let drained = state == WorkerState::Draining;
                state = state.after(event).unwrap_or(state);
                prop_assert!(!(dead && !drained && state.takes_work()), "{:?}", state);
            }
        }
    }
}
