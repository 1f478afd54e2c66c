//! The connection to the broker. It is made again after each loss, and its state can be read at any
//! time.

use std::time::Duration;

use async_nats::jetstream::{self, Context};
use async_nats::{Auth, AuthError, Client, ConnectOptions, Event, ServerAddr};
use tokio::sync::watch;

use crate::config::{BrokerConfig, Login};

/// Maximum time to make a connection, and for a reply of the broker.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of pings; two without a reply end a connection.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Pause before another attempt to connect; it doubles with each attempt ...
const RETRY_MIN: Duration = Duration::from_millis(50);
/// ... up to this value.
const RETRY_MAX: Duration = Duration::from_secs(2);
/// Maximum number of messages on their way to the broker; further publishers wait.
const OUTGOING_MAX: usize = 256;
/// Maximum number of messages of one subscription that wait to be read; further ones are dropped
/// and counted.
const INCOMING_MAX: usize = 8192;

/// A connection to the broker, which is made again whenever it ends.
#[derive(Clone)]
pub struct Broker {
    /// Publishes and subscribes to subjects.
    pub client: Client,
    /// Gives access to streams and stores.
    pub context: Context,
    /// Whether the broker is connected.
    pub connected: watch::Receiver<bool>,
}

/// Why no connection can ever be made.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The configuration cannot be used.
    #[error("the broker cannot be connected to: {0}")]
    Unusable(String),
}

impl Broker {
    /// Starts to connect under the client name `name`. Does not wait for the connection.
    ///
    /// # Errors
    /// The configuration cannot be used.
    pub async fn connect(config: &BrokerConfig, name: &str) -> Result<Self, BrokerError> {
        let unusable = |error: &dyn std::fmt::Display| BrokerError::Unusable(error.to_string());
        let servers: Result<Vec<ServerAddr>, _> =
            config.servers.iter().map(|server| server.parse()).collect();
        let servers = servers.map_err(|error| unusable(&error))?;
        let (is_connected, connected) = watch::channel(false);
        let said = move |event: Event| {
            match &event {
                Event::Connected => _ = is_connected.send_replace(true),
                Event::Disconnected | Event::Closed => _ = is_connected.send_replace(false),
                _ => {}
            }
            match event {
                Event::Connected => tracing::info!("connected to the broker"),
                Event::Disconnected => {
                    tracing::warn!("the connection to the broker was lost; connecting again")
                }
                event => tracing::warn!(%event, "event of the broker's connection"),
            }
            std::future::ready(())
        };
        let mut options = match &config.login {
            Some(login) => with_login(login.clone()),
            None => ConnectOptions::new(),
        };
        if let Some(path) = &config.tls_ca {
            options = options.add_root_certificates(path.clone());
        }
        let client = options
            .name(name)
            .retry_on_initial_connect()
            .max_reconnects(None)
            .reconnect_delay_callback(pause)
            .connection_timeout(TIMEOUT)
            .request_timeout(Some(TIMEOUT))
            .ping_interval(PING_INTERVAL)
            .client_capacity(OUTGOING_MAX)
            .subscription_capacity(INCOMING_MAX)
            .event_callback(said)
            .connect(servers)
            .await
            .map_err(|error| unusable(&error))?;
        let mut context = jetstream::new(client.clone());
        context.set_timeout(TIMEOUT);
        Ok(Self { client, context, connected })
    }

    /// Whether the broker is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        *self.connected.borrow()
    }

    /// Waits until the broker is connected.
    pub async fn until_connected(&self) {
        let mut connected = self.connected.clone();
        if connected.wait_for(|connected| *connected).await.is_err() {
            // The library has given up, although it is configured never to do so.
            std::future::pending().await
        }
    }
}

/// Secrets are read for each connection, because they may be replaced at any time.
fn with_login(login: Login) -> ConnectOptions {
    ConnectOptions::with_auth_callback(move |_| {
        let login = login.clone();
        async move {
            let secret = login.secret().resolve().map_err(|error| {
                tracing::error!(%error, "the broker's login cannot be read");
                AuthError::new(error)
            })?;
            let mut auth = Auth::new();
            match login {
                Login::User { name, .. } => {
                    auth.username = Some(name);
                    auth.password = Some(secret.expose().to_owned());
                }
                Login::Token { .. } => auth.token = Some(secret.expose().to_owned()),
            }
            Ok(auth)
        }
    })
}

/// Pause before an attempt, after this number of failed attempts.
fn pause(attempts: usize) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1)).unwrap_or(u32::MAX).min(10);
    RETRY_MIN.saturating_mul(1 << doublings).min(RETRY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconnect_delays_grow_to_a_limit() {
        assert_eq!(pause(0), RETRY_MIN);
        assert_eq!(pause(1), RETRY_MIN);
        assert_eq!(pause(2), 2 * RETRY_MIN);
        assert_eq!(pause(usize::MAX), RETRY_MAX);
    }
}
