//! The connection to the broker. It is made again after each loss, and its state can be read at any
//! time.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::{self, Context};
use async_nats::{Auth, AuthError, ConnectOptions, Event, Server, ServerAddr};
use splitrail_config::{BrokerLogin, NatsQuotas};
use splitrail_settings::log_throttle::KeyedLogThrottle;
use tokio::sync::watch;

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
pub(super) struct Broker {
    /// Gives access to streams and stores.
    pub(super) context: Context,
    /// Whether the broker is connected.
    pub(super) connected: watch::Receiver<bool>,
}

/// Why no connection can ever be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum BrokerError {
    /// The configuration cannot be used.
    #[error("the broker cannot be connected to: {0}")]
    Unusable(String),
}

impl Broker {
    /// Starts to connect. Does not wait for the connection.
    ///
    /// # Errors
    /// The configuration cannot be used.
    pub(super) async fn connect(config: &NatsQuotas) -> Result<Self, BrokerError> {
        let unusable = |error: &dyn std::fmt::Display| BrokerError::Unusable(error.to_string());
        let servers: Result<Vec<ServerAddr>, _> =
            config.servers.iter().map(|server| server.parse()).collect();
        let servers = servers.map_err(|error| unusable(&error))?;
        let (is_connected, connected) = watch::channel(false);
        let failures = Arc::new(FailureLog::default());
        let (noted, attempts) = (Arc::clone(&failures), failures);
        let said = move |event: Event| {
            match &event {
                Event::Connected => {
                    noted.connected();
                    is_connected.send_replace(true);
                }
                Event::Disconnected | Event::Closed => _ = is_connected.send_replace(false),
                _ => {}
            }
            match event {
                Event::Connected => tracing::info!("connected to the broker"),
                Event::Disconnected => {
                    tracing::warn!("the connection to the broker was lost; connecting again")
                }
                // `FailureLog` logs it with its server and its cause.
                Event::ClientError(_) => {}
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
            .name("splitrail quotas")
            .retry_on_initial_connect()
            .max_reconnects(None)
            .reconnect_delay_callback(pause)
            .connection_timeout(TIMEOUT)
            .request_timeout(Some(TIMEOUT))
            .ping_interval(PING_INTERVAL)
            .client_capacity(OUTGOING_MAX)
            .subscription_capacity(INCOMING_MAX)
            .event_callback(said)
            .reconnect_to_server_callback(move |servers, _| {
                attempts.before_attempt(&servers);
                // The library chooses the server.
                std::future::ready(None)
            })
            .connect(servers)
            .await
            .map_err(|error| unusable(&error))?;
        let mut context = jetstream::new(client);
        context.set_timeout(TIMEOUT);
        Ok(Self { context, connected })
    }

    /// Whether the broker is connected.
    pub(super) fn is_connected(&self) -> bool {
        *self.connected.borrow()
    }

    /// Waits until the broker is connected.
    pub(super) async fn until_connected(&self) {
        let mut connected = self.connected.clone();
        if connected.wait_for(|connected| *connected).await.is_err() {
            // The library has given up, although it is configured never to do so.
            std::future::pending().await
        }
    }
}

/// Logs attempts to connect that fail, at most twice a minute. The library names the cause of a
/// failure at the next attempt only.
#[derive(Default)]
struct FailureLog {
    /// Whether an attempt has failed since the last connection.
    has_failed: AtomicBool,
    throttle: Mutex<KeyedLogThrottle>,
}

impl FailureLog {
    /// A connection was made.
    fn connected(&self) {
        self.has_failed.store(false, Relaxed);
    }

    /// Logs why the attempt before this one failed, if there was one.
    fn before_attempt(&self, servers: &[Server]) {
        let has_failed = self.has_failed.swap(true, Relaxed);
        let mut throttle = self.throttle.lock().unwrap_or_else(PoisonError::into_inner);
        if has_failed && throttle.may_log("broker") {
            let (servers, cause) = failure(servers);
            tracing::warn!(
                servers,
                cause,
                "the broker cannot be connected to; trying again (said at most twice a minute)"
            );
        }
    }
}

/// The servers that could not be connected to, and why.
fn failure(servers: &[Server]) -> (String, String) {
    // The library notes every cause but one: that a name has no address.
    let known: Vec<_> = servers
        .iter()
        .filter_map(|server| Some((address(server), server.last_error.clone()?)))
        .collect();
    match &known[..] {
        [] => {
            let names: Vec<_> = servers.iter().map(address).collect();
            (names.join(", "), "the host name cannot be resolved".to_owned())
        }
        known => {
            let (names, mut causes): (Vec<_>, Vec<_>) = known.iter().cloned().unzip();
            causes.dedup();
            (names.join(", "), causes.join(", "))
        }
    }
}

/// The address without a login, which those that a server announces may have.
fn address(server: &Server) -> String {
    format!("{}:{}", server.addr.host(), server.addr.port())
}

/// Secrets are read for each connection, because they may be replaced at any time.
fn with_login(login: BrokerLogin) -> ConnectOptions {
    ConnectOptions::with_auth_callback(move |_| {
        let login = login.clone();
        async move {
            let secret = login.secret().resolve().map_err(|error| {
                tracing::error!(%error, "the broker's login cannot be read");
                AuthError::new(error)
            })?;
            let mut auth = Auth::new();
            match login {
                BrokerLogin::User { name, .. } => {
                    auth.username = Some(name);
                    auth.password = Some(secret.expose().to_owned());
                }
                BrokerLogin::Token { .. } => auth.token = Some(secret.expose().to_owned()),
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn reconnect_delays_grow_to_a_limit() {
        assert_eq!(pause(0), RETRY_MIN);
        assert_eq!(pause(1), RETRY_MIN);
        assert_eq!(pause(2), 2 * RETRY_MIN);
        assert_eq!(pause(usize::MAX), RETRY_MAX);
    }

    #[test]
    fn a_failure_names_the_servers_and_the_cause_and_no_login() {
        let server = |url: &str, last_error: Option<&str>| Server {
            addr: url.parse().unwrap(),
            failed_attempts: 1,
            did_connect: false,
            is_discovered: false,
            last_error: last_error.map(str::to_owned),
        };
        let refused = "IO error: Connection refused (os error 111)";
        let servers = [
            server("nats://user:secret@a:4222", Some(refused)),
            server("nats://b:4222", Some(refused)),
        ];
        let (names, cause) = failure(&servers);
        assert_eq!((&*names, &*cause), ("a:4222, b:4222", refused));
        let (names, cause) = failure(&[server("nats://nowhere.invalid:4222", None)]);
        assert_eq!(names, "nowhere.invalid:4222");
        assert!(cause.contains("resolved"), "{cause}");
    }
}
