//! The order of waiting requests.

use std::cmp::Ordering;

use super::{Order, Queue, WaitingItem};

/// The keys by which requests are ordered, smallest first.
#[derive(Clone, Copy, Debug)]
struct Rank {
    class: i32,
    /// Whether the tenant is ahead of others, and the session of others of the tenant.
    is_ahead: (bool, bool),
    /// For a request that is about to miss its deadline: the latest time to begin, in milliseconds
    /// from now. Infinite for others.
    latest_ms: f64,
    length_ms: f64,
    number: u64,
}

impl Rank {
    fn compare(&self, other: &Self) -> Ordering {
        let classes = other.class.cmp(&self.class);
        classes
            .then(self.is_ahead.cmp(&other.is_ahead))
            .then(self.latest_ms.total_cmp(&other.latest_ms))
            .then(self.length_ms.total_cmp(&other.length_ms))
            .then(self.number.cmp(&other.number))
    }
}

impl<T> Queue<T> {
    /// The positions of the next requests, at most as many as the window.
    pub(super) fn next(&self, now_ns: u64) -> Vec<usize> {
        let ranks: Vec<Rank> = self.ranks(now_ns);
        let mut places: Vec<usize> = (0..ranks.len()).collect();
        let window = self.config.window.max(1);
        if places.len() > window {
            places.select_nth_unstable_by(window, |a, b| ranks[*a].compare(&ranks[*b]));
            places.truncate(window);
        }
        places.sort_unstable_by(|a, b| ranks[*a].compare(&ranks[*b]));
        places
    }

    /// The position of the request that has waited longest.
    pub(super) fn oldest(&self) -> Option<usize> {
        let age = |place: &usize| {
            let WaitingItem { item, number, .. } = &self.waiting[*place];
            (item.arrival_ns, *number)
        };
        (0..self.waiting.len()).min_by_key(age)
    }

    fn ranks(&self, now_ns: u64) -> Vec<Rank> {
        let total: f64 = self.waiting.iter().map(|entry| entry.prefill_ms).sum();
        let usual_ms = total / self.waiting.len().max(1) as f64;
        let fairness_ms = self.config.fairness_ms;
        let rank = |entry: &WaitingItem<T>| Rank {
            class: entry.item.class,
            is_ahead: self.received.is_ahead(entry.item.payer, fairness_ms),
            latest_ms: latest_ms(entry, now_ns, usual_ms),
            length_ms: match self.config.order {
                Order::ShortestFirst => entry.prefill_ms,
                Order::Arrival => entry.item.arrival_ns as f64,
            },
            number: entry.number,
        };
        self.waiting.iter().map(rank).collect()
    }
}

/// When a request must begin to meet its deadline, if that is soon: within its own prefill time or
/// the mean one, whichever is longer, because about that time passes before a worker is free. A
/// deadline that cannot be met any more does not count.
fn latest_ms<T>(entry: &WaitingItem<T>, now_ns: u64, usual_ms: f64) -> f64 {
    let Some(deadline_ns) = entry.item.deadline_ns else { return f64::INFINITY };
    let slack_ms = (deadline_ns as f64 - now_ns as f64) / 1e6 - entry.prefill_ms;
    let soon_ms = entry.prefill_ms.max(usual_ms);
    if (0.0..=soon_ms).contains(&slack_ms) { slack_ms } else { f64::INFINITY }
}
