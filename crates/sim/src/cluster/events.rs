//! The queue of future events.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The kinds of events, in the order in which simultaneous events are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EventKind {
    /// The blocks of a request's fetch have arrived. First, because a worker that ends an iteration at
    /// that instant can begin the request.
    FetchArrive,
    /// A prefill worker's iteration ends.
    PrefillEnd,
    /// What a waiting prefill worker waited for has arrived.
    Wake,
    /// The transfer of a request's fetch begins.
    FetchStart,
    /// A request's KV has arrived at its decode worker.
    KvArrive,
    /// A decode worker's step ends.
    StepEnd,
    /// The router requested to be called.
    Router,
}

/// Ordered by time, kind, index (of a worker or a request) and creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Event {
    pub(super) at_ns: u64,
    pub(super) kind: EventKind,
    pub(super) index: u32,
    number: u64,
}

/// The future events. At most two per worker, one per fetch and one per request in transfer.
#[derive(Debug, Default)]
pub(super) struct Events {
    heap: BinaryHeap<Reverse<Event>>,
    created: u64,
}

impl Events {
    pub(super) fn push(&mut self, at_ns: u64, kind: EventKind, index: usize) {
        let event = Event { at_ns, kind, index: index as u32, number: self.created };
        self.created += 1;
        self.heap.push(Reverse(event));
    }

    /// The next event at or before this time.
    pub(super) fn pop_until(&mut self, at_ns: u64) -> Option<Event> {
        if self.heap.peek()?.0.at_ns > at_ns {
            return None;
        }
        self.heap.pop().map(|Reverse(event)| event)
    }
}
