//! Asks the task that follows a worker's KV events to read all of them again.

use tokio::sync::watch;

/// Requests to read a worker's KV events again: one side makes them, the other side follows the
/// events.
#[derive(Debug)]
pub struct Resync(watch::Sender<ResyncRequest>);

/// A request to read a worker's KV events again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResyncRequest {
    /// The reason, as in `splitrail_index_resyncs_total`.
    pub reason: &'static str,
    /// Whether the events are read again even if the engine does not have all of them any more.
    pub is_last_resort: bool,
}

/// Receives the requests that are made after its creation.
#[derive(Debug)]
pub struct ResyncRequests(watch::Receiver<ResyncRequest>);

impl Default for Resync {
    fn default() -> Self {
        Self(watch::Sender::new(ResyncRequest::default()))
    }
}

impl Resync {
    /// Requests a resynchronisation. Of requests that have not been received yet, the last one counts.
    pub fn request(&self, request: ResyncRequest) {
        self.0.send_replace(request);
    }

    /// A receiver for requests from now on.
    pub fn requests(&self) -> ResyncRequests {
        ResyncRequests(self.0.subscribe())
    }
}

impl ResyncRequests {
    /// Waits for the next request. Never returns once the worker is gone.
    pub async fn next(&mut self) -> ResyncRequest {
        match self.0.changed().await {
            Ok(()) => *self.0.borrow_and_update(),
            Err(_) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_later_requests_are_received() {
        let request = |reason| ResyncRequest { reason, is_last_resort: false };
        let resync = Resync::default();
        resync.request(request("before"));
        let mut requests = resync.requests();
        resync.request(request("drift"));
        assert_eq!(requests.next().await, request("drift"));
        resync.request(request("drift"));
        assert_eq!(requests.next().await, request("drift"));
    }
}
