//! Resolves the host names of workers that are not in the configuration. A name that resolved to an
//! allowed address when its worker attached may resolve to another address when it is connected to:
//! each look-up keeps only addresses of the allowed networks.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use tower::Service;

use crate::networks::Networks;

/// A resolver that, if `networks` is set, returns only addresses of these networks. Tests replace
/// the system's look-up.
#[derive(Clone)]
pub(super) struct Resolver<L = GaiResolver> {
    look_up: L,
    networks: Option<Networks>,
}

impl Resolver {
    pub(super) fn new(networks: Option<Networks>) -> Self {
        Self { look_up: GaiResolver::new(), networks }
    }
}

impl<L> Service<Name> for Resolver<L>
where
    L: Service<Name, Error = io::Error>,
    L::Response: Iterator<Item = SocketAddr>,
    L::Future: Send + 'static,
{
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.look_up.poll_ready(context)
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let (found, networks) = (self.look_up.call(name), self.networks.clone());
        Box::pin(async move {
            let admitted = |address: &SocketAddr| {
                networks.as_ref().is_none_or(|networks| networks.admit(address.ip()))
            };
            let allowed: Vec<SocketAddr> = found.await?.filter(admitted).collect();
            if allowed.is_empty() {
                let why = "its address lies outside fleet.networks";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
            Ok(allowed.into_iter())
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::future::{Ready, ready};
    use std::net::IpAddr;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn no_connection_is_made_to_a_name_outside_the_allowed_networks() {
        let find = async |networks: &[&str]| {
            let networks: Vec<_> = networks.iter().map(|text| text.parse().unwrap()).collect();
            let mut resolver = Resolver::new(Some(Networks::new(&networks)));
            let found = resolver.call("localhost".parse().unwrap()).await;
            found.map(|addresses| addresses.count())
        };
        assert!(find(&["127.0.0.0/8", "::1"]).await.unwrap() > 0);
        let refused = find(&["10.0.0.0/8"]).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    /// A name that resolves to another single address at each look-up.
    #[derive(Clone)]
    struct Rebinding(Arc<Mutex<Vec<IpAddr>>>);

    impl Service<Name> for Rebinding {
        type Response = std::vec::IntoIter<SocketAddr>;
        type Error = io::Error;
        type Future = Ready<io::Result<Self::Response>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Name) -> Self::Future {
            let address = self.0.lock().unwrap().remove(0);
            ready(Ok(vec![SocketAddr::new(address, 0)].into_iter()))
        }
    }

    #[tokio::test]
    async fn a_name_that_later_resolves_outside_gets_no_new_connection() {
        let inside: IpAddr = [127, 0, 0, 1].into();
        let outside: IpAddr = [127, 0, 0, 2].into();
        let listener = std::net::TcpListener::bind((inside, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let elsewhere = std::net::TcpListener::bind((outside, port)).unwrap();
        elsewhere.set_nonblocking(true).unwrap();
        let look_up = Rebinding(Arc::new(Mutex::new(vec![inside, outside, inside])));
        let networks = Some(Networks::new(&["127.0.0.1".parse().unwrap()]));
        let resolver = Resolver { look_up, networks };
        let mut connector = super::super::connector(resolver, Duration::from_secs(30));
        let mut connect = async || {
            let url: http::Uri = format!("http://worker.example:{port}").parse().unwrap();
            connector.call(url).await.map(drop)
        };
        connect().await.unwrap();
        connect().await.unwrap_err();
        connect().await.unwrap();
        // The kernel accepts connections before the listener does, so none is missed.
        assert_eq!(elsewhere.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
