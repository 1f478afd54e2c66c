//! What happens next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What happens, in the order in which things at the same instant do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// A prefill worker's iteration ends.
    PrefillEnd,
    /// What a waiting prefill worker waited for is there.
    Wake,
    /// A request's KV is at its decode worker.
    KvArrive,
    /// A decode worker's step ends.
    StepEnd,
    /// The router wants to be asked.
    Router,
}

/// Ordered by time, kind, index (of a worker, or of a request) and creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Event {
    pub(super) at_ns: u64,
    pub(super) kind: Kind,
    pub(super) index: u32,
    number: u64,
}

/// Events to come. Bounded by two per worker, one per fetch and one per request in transfer.
#[derive(Debug, Default)]
pub(super) struct Events {
    heap: BinaryHeap<Reverse<Event>>,
    created: u64,
}

impl Events {
    pub(super) fn push(&mut self, at_ns: u64, kind: Kind, index: usize) {
        let event = Event { at_ns, kind, index: index as u32, number: self.created };
        self.created += 1;
        self.heap.push(Reverse(event));
    }

    /// The next one that happens no later than that.
    pub(super) fn pop_until(&mut self, at_ns: u64) -> Option<Event> {
        if self.heap.peek()?.0.at_ns > at_ns {
            return None;
        }
        self.heap.pop().map(|Reverse(event)| event)
    }
}
