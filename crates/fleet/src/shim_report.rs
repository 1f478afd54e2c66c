//! What a shim reports about its engine: its capabilities, and how much load other routers cause.
//!
//! A router knows exactly what it has sent to a worker itself. What other routers have sent, it
//! knows only from the shim, which sees all requests. So a report is split when it arrives: the
//! load beyond the router's own bookings at that time is that of other routers. Afterwards the own
//! part follows the bookings, and the part of other routers stays as reported.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use splitrail_proto::v1;

use splitrail_workload::booking::BookedSums;

/// How a worker's KV events reach the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventOrigin {
    /// The engine publishes them, and the router follows it.
    Engine,
    /// The worker's shim reports them.
    Shim,
}

impl EventOrigin {
    /// All origins.
    pub const ALL: [Self; 2] = [Self::Engine, Self::Shim];

    /// The label in metrics and in `/admin/workers`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Shim => "shim",
        }
    }
}

/// The latest reports of a worker's shim; empty for a worker without a shim.
#[derive(Debug, Default)]
pub struct ShimReport {
    capabilities: ArcSwapOption<v1::Capabilities>,
    load: ArcSwapOption<ShimLoad>,
}

#[derive(Debug)]
struct ShimLoad {
    /// From this time on the report is too old to be used alone.
    stale_at: Instant,
    others: OtherLoad,
}

/// The load that other routers cause on a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OtherLoad {
    /// Requests of other routers.
    pub requests: u32,
    /// Prompt tokens of those requests whose reply has not begun.
    pub prefill_tokens: u64,
    /// Prompt tokens of those requests in the engine's KV blocks.
    pub active_tokens: u64,
}

impl OtherLoad {
    /// The load in a report that exceeds the router's own bookings.
    pub fn beyond(load: &v1::Load, booked: &BookedSums, block_size: u32) -> Self {
        let all = load.requests.unwrap_or(0);
        let own = u64::from(booked.requests());
        let requests = all.saturating_sub(own);
        if requests == 0 {
            return Self::default();
        }
        // A shim counts whole prompts, but bookings count only the tokens to compute. So the tokens
        // of other routers are limited to their share of the requests.
        let share =
            |tokens: u64| (u128::from(tokens) * u128::from(requests) / u128::from(all)) as u64;
        let queued = load.prefill_tokens_queued.unwrap_or(0);
        let blocks = f64::from(load.kv_blocks.unwrap_or(0));
        let used = blocks * load.kv_used_ratio.unwrap_or(0.0).clamp(0.0, 1.0);
        let held = used as u64 * u64::from(block_size);
        Self {
            requests: u32::try_from(requests).unwrap_or(u32::MAX),
            prefill_tokens: share(queued).min(queued.saturating_sub(booked.prefill_tokens())),
            active_tokens: share(held).min(held.saturating_sub(booked.active_tokens())),
        }
    }

    /// The highest value of each kind over all workers, if any worker's last report is too old:
    /// such a worker must not appear idle. Otherwise 0.
    pub fn busiest<'a>(all: impl Iterator<Item = &'a ShimReport> + Clone, now: Instant) -> Self {
        if !all.clone().any(|told| told.is_stale(now)) {
            return Self::default();
        }
        all.filter_map(|told| told.load.load().as_deref().map(|report| report.others))
            .fold(Self::default(), Self::or_more)
    }

    fn or_more(self, other: Self) -> Self {
        Self {
            requests: self.requests.max(other.requests),
            prefill_tokens: self.prefill_tokens.max(other.prefill_tokens),
            active_tokens: self.active_tokens.max(other.active_tokens),
        }
    }
}

impl ShimReport {
    /// The engine's capabilities, if a shim has reported them.
    pub fn capabilities(&self) -> Option<Arc<v1::Capabilities>> {
        self.capabilities.load_full()
    }

    /// Records the engine's capabilities.
    pub fn set_capabilities(&self, capabilities: v1::Capabilities) {
        self.capabilities.store(Some(Arc::new(capabilities)));
    }

    /// Whether a shim reports the engine's KV blocks.
    pub fn publishes(&self) -> bool {
        let capabilities = self.capabilities.load();
        capabilities.as_deref().is_some_and(|known| known.publishes_kv_events != Some(false))
    }

    /// Records the load of other routers; it is stale after `lasts`.
    pub fn set_others(&self, now: Instant, lasts: Duration, others: OtherLoad) {
        self.load.store(Some(Arc::new(ShimLoad { stale_at: now + lasts, others })));
    }

    /// Whether the last report is too old to be used alone.
    pub fn is_stale(&self, now: Instant) -> bool {
        self.load.load().as_deref().is_some_and(|report| now >= report.stale_at)
    }

    /// The load of other routers as last reported; at least `busiest` if the report is stale.
    pub fn others(&self, now: Instant, busiest: OtherLoad) -> OtherLoad {
        match self.load.load().as_deref() {
            None => OtherLoad::default(),
            Some(report) if now >= report.stale_at => report.others.or_more(busiest),
            Some(report) => report.others,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use splitrail_workload::Booking;

    fn load(requests: u64, queued: u64) -> v1::Load {
        v1::Load {
            up: true,
            requests: Some(requests),
            prefill_tokens_queued: Some(queued),
            kv_blocks: Some(100),
            kv_used_ratio: Some(0.5),
            ..v1::Load::default()
        }
    }

    #[test]
    fn own_requests_are_not_others() {
        let booked = Arc::new(BookedSums::default());
        let _own = [Booking::new(&booked, 100, 400), Booking::new(&booked, 50, 100)];
        assert_eq!(OtherLoad::beyond(&load(2, 900), &booked, 16), OtherLoad::default());
        assert_eq!(
            OtherLoad::beyond(&load(1, 900), &booked, 16),
            OtherLoad::default(),
            "one is on its way"
        );
        let others = OtherLoad::beyond(&load(8, 1000), &booked, 16);
        assert_eq!(others, OtherLoad { requests: 6, prefill_tokens: 750, active_tokens: 300 });
        let unknown = v1::Load { requests: Some(4), ..v1::Load::default() };
        let others = OtherLoad::beyond(&unknown, &booked, 16);
        assert_eq!(others, OtherLoad { requests: 2, prefill_tokens: 0, active_tokens: 0 });
    }

    #[test]
    fn an_old_report_makes_a_worker_as_busy_as_the_busiest() {
        let (now, lasts) = (Instant::now(), Duration::from_secs(5));
        let workers = [ShimReport::default(), ShimReport::default(), ShimReport::default()];
        let of =
            |requests, prefill_tokens| OtherLoad { requests, prefill_tokens, active_tokens: 0 };
        workers[0].set_others(now, lasts, of(1, 900));
        workers[1].set_others(now + lasts, lasts, of(7, 10));
        let seen = |at: Instant| {
            let busiest = OtherLoad::busiest(workers.iter(), at);
            [0, 1, 2].map(|worker: usize| workers[worker].others(at, busiest))
        };
        assert_eq!(seen(now), [of(1, 900), of(7, 10), of(0, 0)]);
        let late = seen(now + lasts);
        assert_eq!(late, [of(7, 900), of(7, 10), of(0, 0)], "one without a shim is known");
    }
}
