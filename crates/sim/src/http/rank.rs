//! Selects the data-parallel rank of a request.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use http::{HeaderMap, StatusCode};

use super::App;
use crate::config::KvConnector;
use crate::engine::Engine;
use crate::error::ApiError;
use crate::record::SimState;

/// The header that pins a request to a rank.
const HEADER: &str = "x-data-parallel-rank";

impl App {
    /// The rank that serves a request: the one that it names, or the next one. The real engine
    /// ignores values that are not numbers; here they are refused, so that no client relies on
    /// that.
    pub(super) fn of_request(&self, headers: &HeaderMap) -> Result<&Arc<Engine>, ApiError> {
        let mut named = headers.get_all(HEADER).iter();
        let Some(rank) = named.next().filter(|_| self.engine.config.honour_rank_header) else {
            let next = self.next_rank.fetch_add(1, Relaxed);
            return Ok(&self.ranks[next % self.ranks.len()]);
        };
        let rank = rank.to_str().ok().and_then(|rank| rank.parse::<usize>().ok());
        let (Some(rank), None) = (rank, named.next()) else {
            let message = "data_parallel_rank must be a whole number, given once.";
            return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
        };
        self.ranks.get(rank).ok_or_else(|| {
            let ranks = self.ranks.len();
            let message = match self.engine.config.connector {
                KvConnector::Sglang => format!("routed_dp_rank={rank} out of range [0, {ranks})"),
                _ => format!("data_parallel_rank {rank} is out of range [0, {ranks})."),
            };
            ApiError::new(StatusCode::BAD_REQUEST, message)
        })
    }

    /// The state of all ranks together.
    pub(crate) fn state(&self) -> SimState {
        let mut states = self.ranks.iter().map(|engine| engine.state());
        // There is always at least one rank.
        let first = states.next().unwrap_or_else(|| self.engine.state());
        states.fold(first, SimState::with)
    }

    /// Ends all ranks, like a crash.
    pub(crate) fn die(&self) {
        self.ranks.iter().for_each(|engine| engine.die());
    }
}
