//! Runs a scheduling round: decides which waiting requests are released now, and to which workers.

use super::{Queue, Release, Round, Ticket, View, shortest_prefill_ms};
use crate::candidate::Candidate;
use crate::choose::Choice;
use crate::fetch::Source;
use crate::index::WorkerIndex;
use crate::policy::Policy;

/// The number of estimates outside the window that each round updates, in turn.
const RENEWED: usize = 8;

/// A worker with the requests that this round has placed on it.
struct Placed {
    worker: WorkerIndex,
    rank: Option<u16>,
    wait_ns: u64,
    /// The queue positions of the requests that were placed on the worker.
    places: Vec<usize>,
    /// Whether one of these requests waits for the worker.
    held: bool,
}

/// The state of a round.
#[derive(Default)]
struct State {
    placed: Vec<Placed>,
    /// The number of workers with room left; `None` before the first request was examined.
    rooms: Option<usize>,
    due_ns: Option<u64>,
    released: Vec<(usize, Choice, Vec<Candidate>)>,
    /// The sources of the request that is examined.
    sources: Vec<Source>,
}

impl<T> Queue<T> {
    /// Releases the requests for which a worker has room. The cost is at most one choice for each
    /// request in the window.
    pub fn round(&mut self, now_ns: u64, policy: &Policy, view: &mut impl View<T>) -> Round<T> {
        let Some(oldest) = self.oldest() else {
            return Round { releases: Vec::new(), due_ns: None };
        };
        let mut order = self.next(now_ns);
        let owed = self.credit_ms >= self.waiting[oldest].prefill_ms;
        if owed {
            order.retain(|place| *place != oldest);
            order.insert(0, oldest);
        }
        let mut state = State::default();
        for place in order {
            if state.rooms == Some(0) {
                break;
            }
            self.bind(place, now_ns, policy, view, &mut state);
        }
        self.renew(view);
        let releases = self.take(state.released, oldest, owed);
        Round { releases, due_ns: state.due_ns }
    }

    /// Places one request, and releases it if its worker can begin it.
    fn bind(
        &mut self,
        place: usize,
        now_ns: u64,
        policy: &Policy,
        view: &mut impl View<T>,
        state: &mut State,
    ) {
        let mut candidates = Vec::new();
        view.candidates(&self.waiting[place].item.key, &mut candidates);
        let query = self.waiting[place].item.query;
        self.waiting[place].prefill_ms = shortest_prefill_ms(&candidates, &query);
        let lead_ns = (self.config.lead_ms * 1e6) as u64;
        let any_up = candidates.iter().any(|candidate| candidate.up);
        // If no worker is up, a real attempt gives the client the real error.
        let has_room = |candidate: &Candidate| !any_up || candidate.wait_ns <= lead_ns;
        if state.rooms.is_none() {
            let able = || candidates.iter().filter(|candidate| candidate.up || !any_up);
            state.rooms = Some(able().filter(|candidate| has_room(candidate)).count());
            let busy = able().filter(|candidate| !has_room(candidate));
            let soonest_ns = busy.map(|candidate| candidate.wait_ns - lead_ns).min();
            state.due_ns = soonest_ns.map(|wait_ns| now_ns.saturating_add(wait_ns));
            if state.rooms == Some(0) {
                return;
            }
        }
        for placed in &state.placed {
            let Some(candidate) = find(&mut candidates, placed.worker, placed.rank) else {
                continue;
            };
            candidate.wait_ns = candidate.wait_ns.saturating_add(placed.wait_ns);
            let key = &self.waiting[place].item.key;
            let shared = |other: &usize| view.shared_blocks(key, &self.waiting[*other].item.key);
            let assumed = placed.places.iter().map(shared).max().unwrap_or(0);
            candidate.assumed_blocks = candidate.assumed_blocks.max(assumed);
        }
        view.sources(&self.waiting[place].item.key, &mut state.sources);
        let sources = &state.sources;
        let waiting_here = self.waiting.len() - state.released.len();
        let mut choice = Choice::default();
        if !choice.decide(policy, &candidates, sources, &query, waiting_here) {
            return;
        }
        let chosen = candidates[choice.index];
        let cached = query.cached_tokens(choice.spared_blocks(&candidates));
        let prefill_ns = chosen.coefficients.prefill_ns(query.prompt_tokens, cached);
        let known = state
            .placed
            .iter()
            .position(|placed| (placed.worker, placed.rank) == (chosen.worker, chosen.rank));
        let at = known.unwrap_or_else(|| {
            let (worker, rank) = (chosen.worker, chosen.rank);
            state.placed.push(Placed { worker, rank, wait_ns: 0, places: Vec::new(), held: false });
            state.placed.len() - 1
        });
        let placed = &mut state.placed[at];
        let free = !placed.held && has_room(&chosen);
        placed.held |= !free;
        let room_before = has_room(&chosen);
        placed.wait_ns = placed.wait_ns.saturating_add(prefill_ns);
        placed.places.push(place);
        let room_after = !any_up || chosen.wait_ns.saturating_add(prefill_ns) <= lead_ns;
        if room_before && !room_after {
            state.rooms = state.rooms.map(|rooms| rooms.saturating_sub(1));
        }
        if free {
            state.released.push((place, choice, candidates));
        }
    }

    /// Removes the released requests from the queue and updates credit and fairness.
    fn take(
        &mut self,
        released: Vec<(usize, Choice, Vec<Candidate>)>,
        oldest: usize,
        owed: bool,
    ) -> Vec<Release<T>> {
        // Remove from the last position to the first, so that positions stay valid.
        let mut order: Vec<usize> = (0..released.len()).collect();
        order.sort_unstable_by_key(|i| std::cmp::Reverse(released[*i].0));
        let mut entries: Vec<Option<super::Entry<T>>> = released.iter().map(|_| None).collect();
        for i in order {
            entries[i] = Some(self.waiting.swap_remove(released[i].0));
        }
        let mut releases = Vec::with_capacity(released.len());
        for ((place, choice, candidates), entry) in released.into_iter().zip(entries) {
            let Some(entry) = entry else { continue };
            let chosen = &candidates[choice.index];
            let query = &entry.item.query;
            let cached = query.cached_tokens(choice.spared_blocks(&candidates));
            let spent_ms = chosen.coefficients.prefill_seconds(query.prompt_tokens, cached) * 1e3;
            if place != oldest {
                self.credit_ms += self.config.oldest_share * spent_ms;
            } else if owed {
                self.credit_ms = (self.credit_ms - spent_ms).max(0.0);
            }
            self.fair.served(entry.item.tenant, spent_ms, entry.item.tenant_weight);
            let ticket = Ticket(entry.number);
            releases.push(Release { ticket, item: entry.item, choice, candidates });
        }
        self.settle();
        releases
    }

    /// Updates the estimates of some requests outside the window, since their prefix may have been
    /// cached or evicted.
    fn renew(&mut self, view: &mut impl View<T>) {
        let mut candidates = Vec::new();
        for _ in 0..RENEWED.min(self.waiting.len()) {
            self.refreshed = (self.refreshed + 1) % self.waiting.len();
            let entry = &mut self.waiting[self.refreshed];
            candidates.clear();
            view.candidates(&entry.item.key, &mut candidates);
            entry.prefill_ms = shortest_prefill_ms(&candidates, &entry.item.query);
        }
    }
}

/// The candidate for a worker or rank. Usually its position is the worker's number.
fn find(
    candidates: &mut [Candidate],
    worker: WorkerIndex,
    rank: Option<u16>,
) -> Option<&mut Candidate> {
    let is = |candidate: &Candidate| (candidate.worker, candidate.rank) == (worker, rank);
    let usual = worker.place();
    let there = candidates.get(usual).is_some_and(is);
    let place = if there { Some(usual) } else { candidates.iter().position(is) };
    place.and_then(|place| candidates.get_mut(place))
}
