//! Which limits there are.

use splitrail_config::TenantLimits;

use super::window::Column;

/// A limit of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitKind {
    /// Requests in a minute.
    Requests,
    /// Tokens in a minute.
    TokensPerMinute,
    /// Tokens in a day (UTC).
    TokensPerDay,
}

impl LimitKind {
    /// All limits.
    pub const ALL: [Self; 3] = [Self::Requests, Self::TokensPerMinute, Self::TokensPerDay];

    /// What a request with this number of tokens takes of the limit.
    pub(crate) fn cost(self, tokens: u64) -> u64 {
        match self {
            Self::Requests => 1,
            Self::TokensPerMinute | Self::TokensPerDay => tokens,
        }
    }

    /// The column of the window that the limit is about; `None` if it is about days.
    pub(crate) fn column(self) -> Option<Column> {
        match self {
            Self::Requests => Some(Column::Requests),
            Self::TokensPerMinute => Some(Column::Tokens),
            Self::TokensPerDay => None,
        }
    }
}

/// One value for each limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PerLimit<T>([T; 3]);

impl<T> PerLimit<T> {
    /// Makes the value for each limit.
    pub(crate) fn from_fn(mut make: impl FnMut(LimitKind) -> T) -> Self {
        Self(LimitKind::ALL.map(&mut make))
    }

    /// The values, with their limits.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (LimitKind, &T)> {
        LimitKind::ALL.into_iter().zip(&self.0)
    }
}

impl<T> std::ops::Index<LimitKind> for PerLimit<T> {
    type Output = T;

    fn index(&self, kind: LimitKind) -> &T {
        &self.0[kind as usize]
    }
}

impl<T> std::ops::IndexMut<LimitKind> for PerLimit<T> {
    fn index_mut(&mut self, kind: LimitKind) -> &mut T {
        &mut self.0[kind as usize]
    }
}

/// The limits of a tenant, of which this router admits the given share, but at least 1.
pub(crate) fn shares(limits: &TenantLimits, share: f64) -> PerLimit<Option<u64>> {
    let part = |limit: u64| match share {
        share if share < 1.0 => ((limit as f64 * share) as u64).clamp(1, limit.max(1)),
        _ => limit,
    };
    PerLimit::from_fn(|kind| {
        let limit = match kind {
            LimitKind::Requests => limits.requests_per_minute,
            LimitKind::TokensPerMinute => limits.tokens_per_minute,
            LimitKind::TokensPerDay => limits.tokens_per_day,
        };
        limit.map(part)
    })
}
