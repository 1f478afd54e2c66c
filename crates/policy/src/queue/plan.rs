//! Runs a scheduling round: decides which waiting requests are released now, and to which workers.

use super::{Queue, Release, Round, Ticket, View, shortest_prefill_ms};
use crate::candidate::{Candidate, Query};
use crate::choose::Choice;
use crate::coefficients::nanoseconds;
use crate::fetch::{FetchPlan, Source};
use crate::index::{CandidateIndex, WorkerIndex};
use crate::policy::Policy;
use crate::read_back::AvailablePrefix;

/// The number of estimates outside the window that each round updates, in turn.
const RENEWED: usize = 8;

/// A request that fetches a prefix is released earlier than others, by the time of its fetch and at
/// most by this time: then the blocks arrive while the worker ends what it computes.
pub(crate) const FETCH_LEAD_NS: u64 = 1_000_000_000;

/// A worker with the requests that this round has placed on it.
struct PlacedWorker {
    worker: WorkerIndex,
    rank: Option<u16>,
    wait_ns: u64,
    /// The queue positions of the requests that were placed on the worker.
    places: Vec<usize>,
    /// How long the fetches of these requests occupy the worker's incoming link.
    incoming_ns: u64,
    /// Whether one of these requests waits for the worker.
    held: bool,
}

/// The state of a round.
#[derive(Default)]
pub(super) struct RoundState {
    placed: Vec<PlacedWorker>,
    /// The workers and ranks with room left for some waiting request; one may be there several times,
    /// at most once for each request that the round examines.
    rooms: Vec<(WorkerIndex, Option<u16>)>,
    due_ns: Option<u64>,
    released: Vec<(usize, Choice, Vec<Candidate>)>,
    /// The sources of the request that is examined.
    sources: Vec<Source>,
    /// How long the fetches of this round's requests occupy the outgoing link of each source.
    sending: Vec<(WorkerIndex, u64)>,
    /// The kept KV that this round's requests read back.
    read: Vec<u64>,
}

/// When a worker may get its next request.
#[derive(Clone, Copy)]
pub(super) struct SendWindow {
    /// How long before the worker is free.
    lead_ns: u64,
    /// Whether any worker is up. If none is, every worker may get requests.
    any_up: bool,
    /// The time of the round.
    now_ns: u64,
}

impl SendWindow {
    /// The lead of a request that fetches for as long as it may.
    fn with_fetch_ns(self, candidate: &Candidate) -> u64 {
        self.lead_ns.saturating_add(if candidate.can_fetch { FETCH_LEAD_NS } else { 0 })
    }

    /// The lead of a request that fetches, or not, as its choice says.
    fn lead_ns_with(self, fetch: Option<FetchPlan>) -> u64 {
        let early_ns = |fetch: FetchPlan| nanoseconds(fetch.ready_ms / 1e3).min(FETCH_LEAD_NS);
        self.lead_ns.saturating_add(fetch.map_or(0, early_ns))
    }

    fn is_in_time(self, candidate: &Candidate, lead_ns: u64) -> bool {
        !self.any_up || candidate.wait_ns <= lead_ns
    }

    /// Whether the worker may get a request, at least one that fetches.
    fn opens(self, candidate: &Candidate, wait_ns: u64) -> bool {
        !self.any_up || wait_ns <= self.with_fetch_ns(candidate)
    }
}

impl RoundState {
    /// Adds the workers that may get a request now to those with room, and finds out when the next
    /// one may.
    fn add_rooms(&mut self, candidates: &[Candidate], window: SendWindow) {
        let able = || candidates.iter().filter(|candidate| candidate.up || !window.any_up);
        let open = able().filter(|candidate| window.opens(candidate, candidate.wait_ns));
        self.rooms.extend(open.map(|candidate| (candidate.worker, candidate.rank)));
        let busy = able().filter(|candidate| window.any_up && candidate.wait_ns > window.lead_ns);
        let soonest_ns = busy.map(|candidate| {
            let early_ns = candidate.wait_ns.checked_sub(window.with_fetch_ns(candidate));
            early_ns.filter(|ns| *ns > 0).unwrap_or(candidate.wait_ns - window.lead_ns)
        });
        let due_ns = soonest_ns.min().map(|wait_ns| window.now_ns.saturating_add(wait_ns));
        self.due_ns = self.due_ns.into_iter().chain(due_ns).min();
    }

    /// Whether a request with this choice could be released to the candidate now.
    fn begins(&self, candidate: &Candidate, fetch: Option<FetchPlan>, window: SendWindow) -> bool {
        let is = |placed: &&PlacedWorker| {
            (placed.worker, placed.rank) == (candidate.worker, candidate.rank)
        };
        let is_held = self.placed.iter().find(is).is_some_and(|placed| placed.held);
        !is_held && window.is_in_time(candidate, window.lead_ns_with(fetch))
    }

    /// Adds a request to those of the chosen worker. Whether the request can be released.
    fn place(
        &mut self,
        place: usize,
        chosen: &Candidate,
        fetch: Option<FetchPlan>,
        prefill_ns: u64,
        window: SendWindow,
    ) -> bool {
        let (worker, rank) = (chosen.worker, chosen.rank);
        let is = |placed: &PlacedWorker| (placed.worker, placed.rank) == (worker, rank);
        let at = self.placed.iter().position(is).unwrap_or_else(|| {
            let (wait_ns, incoming_ns, held) = (0, 0, false);
            let places = Vec::new();
            self.placed.push(PlacedWorker { worker, rank, wait_ns, places, incoming_ns, held });
            self.placed.len() - 1
        });
        let placed = &mut self.placed[at];
        let lead_ns = window.lead_ns_with(fetch);
        if let Some(fetch) = fetch {
            let link_ns = nanoseconds(chosen.coefficients.fetch_link_seconds(fetch.tokens));
            placed.incoming_ns = placed.incoming_ns.saturating_add(link_ns);
            self.sending.push((fetch.source, link_ns));
        }
        let in_time = window.is_in_time(chosen, lead_ns);
        let free = !placed.held && in_time;
        if !placed.held && !in_time && fetch.is_some() {
            let due_ns = window.now_ns.saturating_add(chosen.wait_ns - lead_ns);
            self.due_ns = self.due_ns.into_iter().chain([due_ns]).min();
        }
        placed.held |= !free;
        placed.wait_ns = placed.wait_ns.saturating_add(prefill_ns);
        placed.places.push(place);
        let after_ns = chosen.wait_ns.saturating_add(prefill_ns);
        if window.opens(chosen, chosen.wait_ns) && !window.opens(chosen, after_ns) {
            self.rooms.retain(|room| *room != (worker, rank));
        }
        free
    }
}

impl<T> Queue<T> {
    /// Releases the requests for which a worker has room. Where those in the window leave a worker
    /// idle, as many others are examined, in turn. The cost is at most two choices for each of them,
    /// and a list of candidates for each set of workers that may serve some.
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
        order.extend(self.beyond(&order));
        let mut state = self.begin(&order, now_ns, view);
        for place in order {
            if state.rooms.is_empty() {
                break;
            }
            self.bind(place, now_ns, policy, view, &mut state);
        }
        self.renew(view);
        let releases = self.take(state.released, oldest, owed);
        Round { releases, due_ns: state.due_ns }
    }

    /// The positions of further requests that a round examines, in turn, if those in `order` leave a
    /// worker idle.
    pub(super) fn beyond(&self, order: &[usize]) -> Vec<usize> {
        let count = self.waiting.len();
        if order.len() == count {
            return Vec::new();
        }
        let mut is_in_order = vec![false; count];
        order.iter().for_each(|place| is_in_order[*place] = true);
        let turn = (0..count).map(|step| (self.refreshed + 1 + step) % count);
        turn.filter(|place| !is_in_order[*place]).take(order.len()).collect()
    }

    /// Finds out which workers have room: those of the first request, and those of further requests
    /// that other workers may serve.
    fn begin(&self, order: &[usize], now_ns: u64, view: &mut impl View<T>) -> RoundState {
        let mut state = RoundState::default();
        let mut firsts: Vec<usize> = Vec::new();
        let mut candidates = Vec::new();
        for place in order {
            let key = &self.waiting[*place].item.key;
            if firsts.iter().any(|first| view.same_workers(key, &self.waiting[*first].item.key)) {
                continue;
            }
            firsts.push(*place);
            candidates.clear();
            view.candidates(key, &mut candidates);
            state.add_rooms(&candidates, self.send_window(&candidates, now_ns));
        }
        state
    }

    fn send_window(&self, candidates: &[Candidate], now_ns: u64) -> SendWindow {
        // If no worker is up, a real attempt gives the client the real error.
        let any_up = candidates.iter().any(|candidate| candidate.up);
        SendWindow { lead_ns: (self.config.lead_ms * 1e6) as u64, any_up, now_ns }
    }

    /// Places one request, and releases it if its worker can begin it.
    fn bind(
        &mut self,
        place: usize,
        now_ns: u64,
        policy: &Policy,
        view: &mut impl View<T>,
        state: &mut RoundState,
    ) {
        let mut candidates = Vec::new();
        view.candidates(&self.waiting[place].item.key, &mut candidates);
        let query = self.waiting[place].item.query;
        self.waiting[place].prefill_ms = shortest_prefill_ms(&candidates, &query);
        let window = self.send_window(&candidates, now_ns);
        for placed in &state.placed {
            let Some(candidate) = find(&mut candidates, placed.worker, placed.rank) else {
                continue;
            };
            candidate.wait_ns = candidate.wait_ns.saturating_add(placed.wait_ns);
            let key = &self.waiting[place].item.key;
            let shared = |other: &usize| view.shared_blocks(key, &self.waiting[*other].item.key);
            let shared_blocks = placed.places.iter().map(shared).max().unwrap_or(0);
            candidate.speculative_blocks = candidate.speculative_blocks.max(shared_blocks);
            candidate.link_wait_ns = candidate.link_wait_ns.saturating_add(placed.incoming_ns);
        }
        if !state.read.is_empty() {
            let is_read = |candidate: &&mut Candidate| state.read.contains(&candidate.readable_pin);
            let read = candidates.iter_mut().filter(is_read);
            read.for_each(|candidate| candidate.readable_blocks = 0);
        }
        view.sources(&self.waiting[place].item.key, &mut state.sources);
        for source in &mut state.sources {
            let sending = state.sending.iter().filter(|(sender, _)| *sender == source.worker);
            source.wait_ns = sending.fold(source.wait_ns, |sum, (_, ns)| sum.saturating_add(*ns));
        }
        let sources = &state.sources;
        let waiting_here = self.waiting.len() - state.released.len();
        let mut choice = Choice::default();
        if !choice.decide(policy, &candidates, sources, &query, waiting_here) {
            return;
        }
        if self.must_begin(place, &choice, &candidates, state, window) {
            let begins = |one: &Candidate| one.up && state.begins(one, None, window);
            let idle = candidates.iter().map(|one| Candidate { up: begins(one), ..*one });
            let idle: Vec<Candidate> = idle.collect();
            choice.decide(policy, &idle, &state.sources, &query, waiting_here);
            choice.veto_occupied(&candidates);
        }
        let available_prefix = choice.available_prefix(&candidates, &query);
        let chosen = &candidates[choice.index];
        if available_prefix.read_tokens > 0 {
            state.read.push(chosen.readable_pin);
        }
        let prefill_ns = prefill_ns(chosen, &query, available_prefix);
        if state.place(place, chosen, choice.fetch(), prefill_ns, window) {
            state.released.push((place, choice, candidates));
        }
    }

    /// Whether a request has to take one of the workers that can begin it at once: while there were
    /// any, it has waited for another worker for as long as that seemed worth it at first.
    pub(super) fn must_begin(
        &mut self,
        place: usize,
        choice: &Choice,
        candidates: &[Candidate],
        state: &mut RoundState,
        window: SendWindow,
    ) -> bool {
        let waits_until_ns = &mut self.waiting[place].waits_until_ns;
        if state.begins(&candidates[choice.index], choice.fetch(), window) {
            *waits_until_ns = None;
            return false;
        }
        let begins = |index: &CandidateIndex| {
            choice.vetoes[*index].is_none() && state.begins(&candidates[*index], None, window)
        };
        let idle = CandidateIndex::all(candidates.len()).filter(begins);
        let Some(price_ms) = choice.price_of_waiting_ms(idle) else {
            *waits_until_ns = None;
            return false;
        };
        let price_ns = nanoseconds(price_ms / 1e3);
        let until_ns = *waits_until_ns.get_or_insert(window.now_ns.saturating_add(price_ns));
        if until_ns > window.now_ns {
            state.due_ns = state.due_ns.into_iter().chain([until_ns]).min();
        }
        until_ns <= window.now_ns
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
        let mut entries: Vec<Option<super::WaitingItem<T>>> =
            released.iter().map(|_| None).collect();
        for i in order {
            entries[i] = Some(self.waiting.swap_remove(released[i].0));
        }
        let mut releases = Vec::with_capacity(released.len());
        for ((place, choice, candidates), entry) in released.into_iter().zip(entries) {
            let Some(entry) = entry else { continue };
            let chosen = &candidates[choice.index];
            let query = &entry.item.query;
            let available_prefix = choice.available_prefix(&candidates, query);
            let spent_ms = prefill_seconds(chosen, query, available_prefix) * 1e3;
            if place != oldest {
                self.credit_ms += self.config.oldest_share * spent_ms;
            } else if owed {
                self.credit_ms = (self.credit_ms - spent_ms).max(0.0);
            }
            self.received.served(entry.item.payer, spent_ms);
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

/// For how long a request occupies its worker.
fn prefill_seconds(chosen: &Candidate, query: &Query, available_prefix: AvailablePrefix) -> f64 {
    let cached = query.cached_tokens(available_prefix.blocks);
    available_prefix.read_seconds + chosen.coefficients.prefill_seconds(query.prompt_tokens, cached)
}

fn prefill_ns(chosen: &Candidate, query: &Query, available_prefix: AvailablePrefix) -> u64 {
    nanoseconds(prefill_seconds(chosen, query, available_prefix))
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
