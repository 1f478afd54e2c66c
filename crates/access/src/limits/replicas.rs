//! Limits that replicas share over a key-value bucket of NATS JetStream. The decisions are made by
//! [`super::plan`]; this module reads and writes the records.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_nats::jetstream::kv::{Entry, Operation, Store, UpdateErrorKind, Watch};
use async_nats::jetstream::stream::{Config as StreamConfig, DiscardPolicy, StorageType};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use splitrail_api::text::random_id;
use splitrail_config::{NatsQuotas, TenantLimits};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use xxhash_rust::xxh3::xxh3_128;

use super::account::MINUTE_MS;
use super::broker::Broker;
use super::holdings::Terms;
use super::plan::Purpose;
use super::record::{RECORD_MAX_BYTES, Record};
use super::{Limits, SteadyClock};

/// Maximum difference between the clocks of replicas, in milliseconds.
const MARGIN_MS: u64 = 10_000;
/// Interval in which this replica checks whether its shares suffice.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest pause between two checks.
const PAUSE: Duration = Duration::from_millis(50);
/// Shortest time between two readings of one record by this replica, in milliseconds.
const READ_INTERVAL_MS: u64 = 250;
/// Attempts to write a record that other replicas write at the same time.
const ATTEMPTS: usize = 8;
/// Maximum number of records that are read or written at once.
const CONCURRENT_MAX: usize = 16;
/// Maximum time to give all shares back.
const LEAVE_TIME: Duration = Duration::from_secs(2);
/// Pause before another attempt with a configuration of the broker that cannot be used, for example
/// because a certificate is missing.
const UNUSABLE_RETRY: Duration = Duration::from_secs(30);
/// Prefix of the keys of records.
const KEY_PREFIX: &str = "v1";
/// Maximum length of a tenant's name in a key; a longer one is cut, and a hash is appended.
const TOKEN_MAX: usize = 120;

/// Why the bucket must be opened again.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// This replica among the replicas that share the limits of tenants. `Debug` shows no content.
pub struct Replicas {
    config: NatsQuotas,
    /// The connection to the broker, once [`run`](Self::run) has made it.
    connection: OnceLock<Broker>,
    /// A random id. A router that restarts is another replica.
    id: String,
    /// Number of tenants so far, those included that are gone.
    numbered: AtomicU64,
    terms: Terms,
    clock: SteadyClock,
    wants_share: Arc<Notify>,
    /// By the key of the record; as many as tenants are configured.
    tenants: Mutex<HashMap<String, Arc<SharedTenant>>>,
}

/// The limits of a tenant, and the key of their record.
#[derive(Debug)]
struct SharedTenant {
    name: String,
    key: String,
    /// The id of this replica in the record. A tenant that is removed and added again gets another
    /// one: what it had used is known only to the record, as with a replica that has died.
    replica: String,
    limits: Arc<Limits>,
    /// Whether the record should be read, because another replica has written it.
    is_stale: AtomicBool,
    /// When this replica last read the record.
    read_ms: AtomicU64,
    /// The revision that this replica last wrote.
    written: AtomicU64,
    /// Whether an unreadable record has been logged.
    has_warned: AtomicBool,
}

impl Replicas {
    /// A replica that keeps its shares at the broker of `quotas`. `clock` is the clock of all calls
    /// of [`Limits`].
    pub fn new(quotas: &NatsQuotas, clock: SteadyClock) -> Self {
        let lease_ms = u64::try_from(quotas.lease.as_millis()).unwrap_or(u64::MAX >> 1);
        let terms = Terms { lease_ms, window_ms: MINUTE_MS, margin_ms: MARGIN_MS };
        Self {
            config: quotas.clone(),
            connection: OnceLock::new(),
            id: random_id(),
            numbered: AtomicU64::new(0),
            terms,
            clock,
            wants_share: Arc::new(Notify::new()),
            tenants: Mutex::default(),
        }
    }

    /// The limits of a tenant. Limits that exist are changed; what was used stays used.
    pub fn limits(&self, tenant: &str, limits: &TenantLimits) -> Arc<Limits> {
        let now_ms = self.clock.now_ms();
        let key = format!("{KEY_PREFIX}.{}", token(tenant));
        let mut tenants = self.tenants();
        if let Some(known) = tenants.get(&key) {
            known.limits.change(limits, 1.0, now_ms);
            return Arc::clone(&known.limits);
        }
        let made = Limits::shared(limits, self.terms, Arc::clone(&self.wants_share), now_ms);
        let entry = SharedTenant {
            name: tenant.to_owned(),
            key: key.clone(),
            replica: format!("{}-{}", self.id, self.numbered.fetch_add(1, Ordering::Relaxed)),
            limits: Arc::clone(&made),
            is_stale: AtomicBool::new(false),
            read_ms: AtomicU64::new(0),
            written: AtomicU64::new(0),
            has_warned: AtomicBool::new(false),
        };
        tenants.insert(key, Arc::new(entry));
        drop(tenants);
        self.wants_share.notify_one();
        made
    }

    /// Forgets the tenants for which `is_kept` is false. Their shares become free as if this replica
    /// had died, also if a tenant is added again.
    pub fn retain(&self, is_kept: impl Fn(&str) -> bool) {
        self.tenants().retain(|_, tenant| is_kept(&tenant.name));
    }

    /// Keeps the shares of this replica. Never ends; the caller owns the only task, and calls
    /// [`leave`] after it has ended the task.
    ///
    /// [`leave`]: Self::leave
    pub async fn run(&self) {
        let broker = self.connect().await;
        let mut last = String::new();
        loop {
            broker.until_connected().await;
            if let Err(error) = self.follow(broker).await {
                // A lost connection is logged by the connection itself, and each error once in a row.
                let text = error.to_string();
                match broker.is_connected() && text != last {
                    true => tracing::warn!(%error, "shares of limits cannot be renewed"),
                    false => tracing::debug!(%error, "shares of limits cannot be renewed"),
                }
                last = text;
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Gives back what is not used, so that other replicas need not wait for the end of the lease.
    /// Afterwards no request is admitted any more. Ends after 2 s at the latest.
    pub async fn leave(&self) {
        let Some(broker) = self.connection.get() else { return };
        let leaving = async {
            let store = broker.context.get_key_value(&self.config.bucket).await?;
            self.renew_all(&store, self.all(), Purpose::Leave).await
        };
        match timeout(LEAVE_TIME, leaving).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(%error, "shares of limits were not given back");
            }
            Err(_) => tracing::debug!("shares of limits were not given back in time"),
        }
    }

    /// Whether the broker is connected.
    pub(crate) fn is_connected(&self) -> bool {
        self.connection.get().is_some_and(Broker::is_connected)
    }

    fn tenants(&self) -> MutexGuard<'_, HashMap<String, Arc<SharedTenant>>> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names of the tenants that have shares.
    #[cfg(test)]
    pub(crate) fn names(&self) -> Vec<String> {
        self.tenants().values().map(|tenant| tenant.name.clone()).collect()
    }

    fn all(&self) -> Vec<Arc<SharedTenant>> {
        self.tenants().values().cloned().collect()
    }

    /// Makes the connection to the broker, which is made again after each loss.
    async fn connect(&self) -> &Broker {
        loop {
            match Broker::connect(&self.config).await {
                Ok(broker) => return self.connection.get_or_init(|| broker),
                Err(error) => {
                    tracing::error!(%error, "limits cannot be shared; trying again in 30 s");
                }
            }
            sleep(UNUSABLE_RETRY).await;
        }
    }

    /// Renews shares, and adapts them to what is needed, until a failure.
    async fn follow(&self, broker: &Broker) -> Result<(), Failure> {
        let store = self.open(broker).await?;
        let mut changes = store.watch_all().await?;
        // What has changed before now is not reported.
        self.all().iter().for_each(|tenant| tenant.is_stale.store(true, Ordering::Relaxed));
        let mut connected = broker.connected.clone();
        loop {
            self.renew_all(&store, self.due(), Purpose::Hold).await?;
            tokio::select! {
                () = sleep(CHECK_INTERVAL) => {}
                () = self.wants_share.notified() => {}
                change = changes.next() => self.mark(&change.ok_or("the watch has ended")??),
                _ = connected.wait_for(|connected| !*connected) => return Ok(()),
            }
            sleep(PAUSE).await;
            self.mark_all(&mut changes)?;
        }
    }

    /// Opens the bucket, and creates it if it does not exist.
    async fn open(&self, broker: &Broker) -> Result<Store, Failure> {
        let context = &broker.context;
        let bucket = &self.config.bucket;
        if let Ok(store) = context.get_key_value(bucket).await {
            return Ok(store);
        }
        context.create_stream(bucket_stream(&self.config)).await?;
        Ok(context.get_key_value(bucket).await?)
    }

    /// Marks the records of all changes that have arrived.
    fn mark_all(&self, changes: &mut Watch) -> Result<(), Failure> {
        while let Some(change) = changes.next().now_or_never() {
            self.mark(&change.ok_or("the watch has ended")??);
        }
        Ok(())
    }

    fn mark(&self, change: &Entry) {
        if let Some(tenant) = self.tenants().get(&change.key) {
            let is_own = change.revision == tenant.written.load(Ordering::Relaxed);
            tenant.is_stale.fetch_or(!is_own, Ordering::Relaxed);
        }
    }

    /// The tenants whose record should be read.
    fn due(&self) -> Vec<Arc<SharedTenant>> {
        let now_ms = self.clock.now_ms();
        let mut due = self.all();
        due.retain(|tenant| {
            let is_rested = now_ms >= tenant.read_ms.load(Ordering::Relaxed) + READ_INTERVAL_MS;
            let is_stale = tenant.is_stale.load(Ordering::Relaxed);
            is_rested && (is_stale || tenant.limits.account().is_due(now_ms))
        });
        due
    }

    async fn renew_all(
        &self,
        store: &Store,
        tenants: Vec<Arc<SharedTenant>>,
        purpose: Purpose,
    ) -> Result<(), Failure> {
        let mut renewals = FuturesUnordered::new();
        for tenant in tenants {
            if renewals.len() >= CONCURRENT_MAX
                && let Some(renewed) = renewals.next().await
            {
                renewed?;
            }
            renewals.push(self.renew(store, tenant, purpose));
        }
        while let Some(renewed) = renewals.next().await {
            renewed?;
        }
        Ok(())
    }

    /// Reads the record of a tenant, and writes it if this replica's shares change.
    async fn renew(
        &self,
        store: &Store,
        tenant: Arc<SharedTenant>,
        purpose: Purpose,
    ) -> Result<(), Failure> {
        tenant.is_stale.store(false, Ordering::Relaxed);
        tenant.read_ms.store(self.clock.now_ms(), Ordering::Relaxed);
        for _ in 0..ATTEMPTS {
            let found = store.entry(tenant.key.as_str()).await?;
            // The revision 0 stands for a key that does not exist.
            let revision = found.as_ref().map_or(0, |entry| entry.revision);
            let record = match found.filter(|entry| entry.operation == Operation::Put) {
                Some(entry) => match Record::decode(&entry.value) {
                    Ok(record) => Some(record),
                    Err(error) => {
                        if !tenant.has_warned.swap(true, Ordering::Relaxed) {
                            let key = tenant.key.as_str();
                            tracing::error!(%error, key, "the shares of a tenant cannot be read; delete the key");
                        }
                        return Ok(());
                    }
                },
                None => None,
            };
            let now_ms = self.clock.now_ms();
            let proposal = tenant.limits.account().plan(&tenant.replica, record, purpose, now_ms);
            let Some(proposal) = proposal else { return Ok(()) };
            let bytes = proposal.record.encode().into();
            match store.update(&tenant.key, bytes, revision).await {
                Ok(revision) => {
                    tenant.limits.account().confirm(&proposal);
                    tenant.written.store(revision, Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => {}
                Err(error) => return Err(error.into()),
            }
        }
        // Others write often; the next check tries again.
        tenant.is_stale.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// The stream of a bucket as the specification of NATS key-value stores (ADR-8) has it. The
/// library's own way of creating a bucket fails with servers of version 2.9. Records are always read
/// from the leader (`allow_direct: false`), so that a replica does not take an old record for the
/// present one.
fn bucket_stream(quotas: &NatsQuotas) -> StreamConfig {
    let bucket = &quotas.bucket;
    StreamConfig {
        name: format!("KV_{bucket}"),
        description: Some("Shares of the limits of tenants".to_owned()),
        subjects: vec![format!("$KV.{bucket}.>")],
        max_messages_per_subject: 1,
        max_message_size: i32::try_from(RECORD_MAX_BYTES).unwrap_or(i32::MAX),
        discard: DiscardPolicy::New,
        allow_rollup: true,
        deny_delete: true,
        allow_direct: false,
        storage: StorageType::File,
        num_replicas: quotas.stream_replicas,
        ..StreamConfig::default()
    }
}

/// The name of a tenant as a token of a key: letters, digits and `-` are kept, any other byte becomes
/// `_` and its two hexadecimal digits. Different names have different tokens.
fn token(name: &str) -> String {
    let mut token = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte.is_ascii_alphanumeric() || byte == b'-' {
            true => token.push(char::from(byte)),
            false => token.push_str(&format!("_{byte:02x}")),
        }
    }
    if token.is_empty() || token.len() > TOKEN_MAX {
        // No other token contains two underscores in a row.
        token.truncate(TOKEN_MAX - 34);
        token.push_str(&format!("__{:032x}", xxh3_128(name.as_bytes())));
    }
    token
}

impl std::fmt::Debug for Replicas {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = out.debug_struct("Replicas");
        shown.field("id", &self.id).field("terms", &self.terms).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_safe_and_different_for_different_names() {
        let long = "x".repeat(300);
        let longer = "x".repeat(301);
        let dots = ".".repeat(128);
        let names = [
            "acme", "Acme/1", "Acme_2f1", "p.0", "p_0", "a b", "*", ">", "", "é", &long, &longer,
            &dots,
        ];
        let tokens: std::collections::BTreeSet<_> = names.iter().map(|name| token(name)).collect();
        assert_eq!(tokens.len(), names.len());
        for token in &tokens {
            let is_safe = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            assert!(!token.is_empty() && token.len() <= TOKEN_MAX && token.chars().all(is_safe));
        }
        assert_eq!(token("Acme/1"), "Acme_2f1");
    }
}
