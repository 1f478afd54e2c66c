//! What a client may do at the admin listener.

/// What a client may do at the admin listener. The greater role includes the lesser one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The client may read metrics, health, workers and decisions.
    Read,
    /// The client may also change workers and models.
    Admin,
}

impl Role {
    /// The role with this name in credentials: `read` or `admin`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "read" => Some(Self::Read),
            "admin" => Some(Self::Admin),
            _ => None,
        }
    }
}
