//! What a tenant has used, and what it may use: the decisions, with the time as a parameter.

use super::exceeded::{LimitExceeded, LimitStanding, Standing};
use super::holdings::Holdings;
use super::kind::{LimitKind, PerLimit};
use super::window::{Day, Window};

/// Length of the window of the limits per minute.
pub(crate) const MINUTE_MS: u64 = 60_000;

/// Maximum number of tokens of one request. Higher numbers count as this one.
const REQUEST_TOKENS_MAX: u64 = 1 << 40;

/// Shortest wait for a larger share: replicas move shares about once a second.
const SHARE_WAIT_MS: u64 = 1000;

/// Where a request was counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountedRequest {
    part: u64,
    day: u64,
    /// The number of tokens that count now.
    pub(crate) tokens: u64,
    /// Whether the tokens are final.
    pub(crate) is_settled: bool,
}

/// What a tenant has used, and what it may use.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    minute: Window,
    day: Day,
    pub(crate) limits: PerLimit<Option<u64>>,
    /// The shares of this replica; `None` if the limits are not shared.
    pub(crate) holdings: Option<Holdings>,
    /// The latest time seen.
    latest_ms: u64,
}

impl Account {
    pub(crate) fn new(
        limits: PerLimit<Option<u64>>,
        minute_ms: u64,
        holdings: Option<Holdings>,
    ) -> Self {
        let (minute, day) = (Window::new(minute_ms), Day::default());
        Self { minute, day, limits, holdings, latest_ms: 0 }
    }

    /// Forgets what is too old, and returns the time. Time never goes back.
    pub(crate) fn advance(&mut self, now_ms: u64) -> u64 {
        self.latest_ms = self.latest_ms.max(now_ms);
        self.minute.advance(self.latest_ms);
        self.day.advance(self.latest_ms);
        self.latest_ms
    }

    /// Counts a request if all limits allow it.
    pub(crate) fn reserve(
        &mut self,
        now_ms: u64,
        tokens: u64,
    ) -> Result<CountedRequest, LimitExceeded> {
        let now_ms = self.advance(now_ms);
        let tokens = tokens.min(REQUEST_TOKENS_MAX);
        for (kind, limit) in self.limits.iter() {
            if let Some(maximum) = limit.filter(|limit| kind.cost(tokens) > *limit) {
                return Err(LimitExceeded::TooLarge { limit: kind, maximum });
            }
        }
        let waits = LimitKind::ALL.into_iter().filter_map(|kind| {
            let wait_ms = self.wait_ms(kind, kind.cost(tokens), now_ms)?;
            Some((kind, wait_ms))
        });
        let longest = waits.max_by_key(|(_, wait_ms)| *wait_ms);
        if let Some(holdings) = &mut self.holdings {
            holdings.note(tokens, longest.is_none());
        }
        match longest {
            Some((limit, retry_after_ms)) => Err(LimitExceeded::Used { limit, retry_after_ms }),
            None => {
                let (part, day) = (self.minute.add(tokens), self.day.add(tokens));
                Ok(CountedRequest { part, day, tokens, is_settled: false })
            }
        }
    }

    /// Whether the limit of requests allows one more, whose tokens are not known yet. If not, the
    /// error is that of the day if its tokens are used up as well: no retry of today can succeed.
    pub(crate) fn check_requests(&mut self, now_ms: u64) -> Result<(), LimitExceeded> {
        let (now_ms, requests) = (self.advance(now_ms), LimitKind::Requests);
        let Some(wait_ms) = self.wait_ms(requests, requests.cost(0), now_ms) else {
            return Ok(());
        };
        let day = LimitKind::TokensPerDay;
        let of_day_ms = self.wait_ms(day, day.cost(1), now_ms).filter(|ms| *ms > wait_ms);
        let (limit, retry_after_ms) = match of_day_ms {
            Some(of_day_ms) => (day, of_day_ms),
            None => (requests, wait_ms),
        };
        if let Some(holdings) = &mut self.holdings {
            holdings.note(0, false);
        }
        Err(LimitExceeded::Used { limit, retry_after_ms })
    }

    /// Replaces the tokens of a request by another number, in the minute and on the day in which the
    /// request was counted.
    pub(crate) fn correct(&mut self, counted: &mut CountedRequest, tokens: u64) {
        let tokens = tokens.min(REQUEST_TOKENS_MAX);
        self.minute.correct(counted.part, counted.tokens, tokens);
        self.day.correct(counted.day, counted.tokens, tokens);
        counted.tokens = tokens;
    }

    /// What is used of a limit.
    pub(crate) fn used(&self, kind: LimitKind) -> u64 {
        kind.column().map_or_else(|| self.day.used(), |column| self.minute.used(column))
    }

    /// What counts as used when a share is given back, if clocks differ by up to `margin_ms`.
    pub(crate) fn used_within(&self, kind: LimitKind, margin_ms: u64) -> u64 {
        match kind.column() {
            Some(column) => self.minute.used(column),
            None => self.day.used_within(margin_ms, self.latest_ms),
        }
    }

    /// What this replica may use of a limit now.
    pub(crate) fn capacity(&self, kind: LimitKind, limit: u64, now_ms: u64) -> u64 {
        let Some(holdings) = &self.holdings else { return limit };
        holdings.usable(kind, limit, now_ms).min(limit)
    }

    /// Milliseconds until a cost fits into a limit; `None` if it fits now.
    fn wait_ms(&self, kind: LimitKind, cost: u64, now_ms: u64) -> Option<u64> {
        let limit = self.limits[kind]?;
        let capacity = self.capacity(kind, limit, now_ms);
        if self.used(kind) + cost <= capacity {
            return None;
        }
        // With a larger share, what the other replicas have not used is available as well.
        let others = self.holdings.as_ref().map(|holdings| holdings.others_used(kind));
        let attainable = others.map_or(limit, |used| limit.saturating_sub(used)).max(capacity);
        let least_ms = if capacity < limit { SHARE_WAIT_MS } else { 0 };
        let wait_ms = match attainable.checked_sub(cost) {
            Some(most) => self.wait_until_used(kind, most, now_ms),
            None if kind.column().is_none() => self.day.rest_ms(now_ms),
            None => self.wait_until_used(kind, 0, now_ms),
        };
        Some(wait_ms.max(least_ms))
    }

    fn wait_until_used(&self, kind: LimitKind, most: u64, now_ms: u64) -> u64 {
        match kind.column() {
            Some(column) => self.minute.wait_ms(column, most, now_ms),
            None if self.day.used() > most => self.day.rest_ms(now_ms),
            None => 0,
        }
    }

    /// The standing of each limit.
    pub(crate) fn standing(&mut self, now_ms: u64) -> Standing {
        let now_ms = self.advance(now_ms);
        let of = |kind: LimitKind| {
            let limit = self.limits[kind]?;
            let others = self.holdings.as_ref().map_or(0, |holdings| holdings.others_used(kind));
            let used = self.used(kind);
            let mut remaining = limit.saturating_sub(used).saturating_sub(others);
            if self.holdings.as_ref().is_some_and(|holdings| !holdings.is_leased(now_ms)) {
                let capacity = self.capacity(kind, limit, now_ms);
                remaining = remaining.min(capacity.saturating_sub(used));
            }
            let reset_ms = self.wait_until_used(kind, 0, now_ms);
            Some(LimitStanding { limit, remaining, reset_ms })
        };
        Standing {
            requests: of(LimitKind::Requests),
            tokens_per_minute: of(LimitKind::TokensPerMinute),
            tokens_per_day: of(LimitKind::TokensPerDay),
        }
    }
}
