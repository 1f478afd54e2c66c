//! A connection of a client: where it comes from, and whether it carries requests.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use splitrail_settings::address_shares::AddressPlace;

/// A connection of a client.
#[derive(Debug)]
pub(super) struct ClientConnection {
    /// The client's address, by which places are divided.
    pub(super) address: IpAddr,
    /// Has a further reference for each open request.
    open: OpenRequest,
    /// Whether a request was opened since the last call of `is_in_use`.
    was_opened: AtomicBool,
}

/// An open request of a connection, which does not count as idle before this value is dropped.
pub(super) type OpenRequest = Arc<()>;

/// What a request to the engine holds until the last byte of its reply.
#[derive(Debug)]
pub(super) struct RequestPlace {
    /// Its place among all requests to the engine.
    pub(super) _place: AddressPlace,
    pub(super) _open: OpenRequest,
}

impl ClientConnection {
    pub(super) fn new(address: IpAddr) -> Self {
        Self { address, open: OpenRequest::default(), was_opened: AtomicBool::new(false) }
    }

    /// Counts a request.
    pub(super) fn open_request(&self) -> OpenRequest {
        self.was_opened.store(true, Ordering::Relaxed);
        Arc::clone(&self.open)
    }

    /// Waits until the connection has carried no request for once to twice this time.
    pub(super) async fn until_idle(&self, timeout: Duration) {
        loop {
            tokio::time::sleep(timeout).await;
            if !self.is_in_use() {
                return;
            }
        }
    }

    /// Whether a request is open, or was opened since the last call.
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.open) > 1 || self.was_opened.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::time::Instant;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_once_it_carried_no_request_for_a_whole_interval() {
        let client = ClientConnection::new(Ipv4Addr::LOCALHOST.into());
        let began = Instant::now();
        client.until_idle(TIMEOUT).await;
        assert_eq!(began.elapsed(), TIMEOUT, "it never had a request");
        drop(client.open_request());
        client.until_idle(TIMEOUT).await;
        assert_eq!(began.elapsed(), 3 * TIMEOUT, "its request has ended");
        let open = client.open_request();
        let long = tokio::time::timeout(100 * TIMEOUT, client.until_idle(TIMEOUT)).await;
        assert!(long.is_err(), "its request is open");
        drop(open);
        client.until_idle(TIMEOUT).await;
    }
}
