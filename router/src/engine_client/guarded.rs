//! Looks the names of workers up that are not written down. Promise 14: a name that led to an
//! allowed address when its worker attached may lead elsewhere when it is connected to.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use tower::Service;

use crate::engine_client::networks::Networks;

/// The system's resolver, which finds addresses in the allowed networks only, if there are any.
#[derive(Clone)]
pub(super) struct Resolver {
    system: GaiResolver,
    networks: Option<Networks>,
}

impl Resolver {
    pub(super) fn new(networks: Option<Networks>) -> Self {
        Self { system: GaiResolver::new(), networks }
    }
}

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.system.poll_ready(context)
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let (found, networks) = (self.system.call(name), self.networks.clone());
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
    use super::*;

    #[tokio::test]
    async fn p14_a_name_that_leads_outside_cannot_be_connected_to() {
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
}
