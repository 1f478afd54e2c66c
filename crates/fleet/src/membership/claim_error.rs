//! Why a worker cannot be added to the fleet.

/// Why a worker cannot be added to the fleet.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The worker's model is not served by this router.
    #[error("model {0} is not served")]
    UnknownModel(String),
    /// The worker's URL has no address.
    #[error("worker {id}: {url} is not an address")]
    NoAddress {
        /// The worker's id.
        id: String,
        /// The URL as given.
        url: String,
    },
    /// The worker is not listed in the configuration, and one of its URLs lies outside
    /// `fleet.networks`.
    #[error("worker {id}: {url} lies outside fleet.networks")]
    Outside {
        /// The worker's id.
        id: String,
        /// The URL that lies outside.
        url: String,
    },
    /// The worker's shim attaches, but the model is not open to shims, and the worker is not listed
    /// in the configuration.
    #[error("model {0} has no `discovery` of kind `shim`")]
    ClosedToShims(String),
    /// The worker's URL leads to this router.
    #[error("worker {id}: {url} is a listener of this router")]
    OwnAddress {
        /// The worker's id.
        id: String,
        /// The URL as given.
        url: String,
    },
    /// The worker's URL is that of another worker. One engine is one worker.
    #[error("worker {id}: {url} is the address of worker {other}")]
    Taken {
        /// The worker's id.
        id: String,
        /// The URL as given.
        url: String,
        /// The id of the worker at this address.
        other: String,
    },
    /// The model has `WORKERS_MAX` workers.
    #[error("model {0} has the maximum number of workers")]
    Full(String),
}
