//! Limits that replicas share over a key-value bucket of NATS JetStream. The decisions are made by
//! [`super::plan`]; this module reads and writes the records.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use ring::rand::{SecureRandom as _, SystemRandom};
use splitrail_config::{NatsEvents, NatsQuotas, Storage, TenantLimits};
use splitrail_event_plane::async_nats::jetstream::kv::{
    Config as BucketConfig, Operation, Store, UpdateErrorKind, Watch,
};
use splitrail_event_plane::async_nats::jetstream::stream::StorageType;
use splitrail_event_plane::{Broker, names};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::account::MINUTE_MS;
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
/// Shortest time between two writes of one record by this replica, in milliseconds.
const WRITE_INTERVAL_MS: u64 = 500;
/// Attempts to write a record that other replicas write at the same time.
const ATTEMPTS: usize = 8;
/// Maximum number of records that are read or written at once.
const CONCURRENT_MAX: usize = 16;
/// Maximum time to give all shares back.
const LEAVE_TIME: Duration = Duration::from_secs(2);
/// Prefix of the keys of records.
const KEY_PREFIX: &str = "v1";

/// Why the bucket must be opened again.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// This replica among the replicas that share the limits of tenants. `Debug` shows no content.
pub struct Replicas {
    broker: Broker,
    bucket: BucketConfig,
    /// A random id. A router that restarts is another replica.
    id: String,
    terms: Terms,
    clock: SteadyClock,
    wants_share: Arc<Notify>,
    /// By the name of the tenant; as many as are configured.
    tenants: Mutex<HashMap<String, Arc<Tenant>>>,
}

/// The limits of a tenant, and the key of their record.
#[derive(Debug)]
struct Tenant {
    key: String,
    limits: Arc<Limits>,
    /// Whether the record should be read, because another replica has written it.
    is_stale: AtomicBool,
    /// When this replica last wrote the record.
    written_ms: AtomicU64,
    /// Whether an unreadable record has been logged.
    has_warned: AtomicBool,
}

/// The system has no random numbers.
#[derive(Debug, thiserror::Error)]
#[error("the system provides no random numbers")]
pub struct NoEntropy;

impl Replicas {
    /// A replica that keeps its shares at this broker. `clock` is the clock of all calls of
    /// [`Limits`].
    ///
    /// # Errors
    /// The system provides no random numbers.
    pub fn new(
        broker: Broker,
        quotas: &NatsQuotas,
        events: &NatsEvents,
        clock: SteadyClock,
    ) -> Result<Self, NoEntropy> {
        let lease_ms = u64::try_from(quotas.lease.as_millis()).unwrap_or(u64::MAX >> 1);
        let terms = Terms { lease_ms, window_ms: MINUTE_MS, margin_ms: MARGIN_MS };
        let bucket = BucketConfig {
            bucket: quotas.bucket.clone(),
            description: "Shares of the limits of tenants".to_owned(),
            max_value_size: i32::try_from(RECORD_MAX_BYTES).unwrap_or(i32::MAX),
            history: 1,
            storage: match events.storage {
                Storage::File => StorageType::File,
                Storage::Memory => StorageType::Memory,
            },
            num_replicas: events.stream_replicas,
            ..BucketConfig::default()
        };
        Self::with_terms(broker, bucket, terms, clock)
    }

    /// The same with other times.
    pub(crate) fn with_terms(
        broker: Broker,
        bucket: BucketConfig,
        terms: Terms,
        clock: SteadyClock,
    ) -> Result<Self, NoEntropy> {
        let mut random = [0; 16];
        SystemRandom::new().fill(&mut random).map_err(|_| NoEntropy)?;
        Ok(Self {
            broker,
            bucket,
            id: format!("{:032x}", u128::from_be_bytes(random)),
            terms,
            clock,
            wants_share: Arc::new(Notify::new()),
            tenants: Mutex::default(),
        })
    }

    /// The limits of a tenant. Limits that exist are changed; what was used stays used.
    pub fn limits(&self, tenant: &str, limits: &TenantLimits) -> Arc<Limits> {
        let now_ms = self.clock.now_ms();
        let mut tenants = self.tenants();
        if let Some(known) = tenants.get(tenant) {
            known.limits.change(limits, now_ms);
            return Arc::clone(&known.limits);
        }
        let made = Limits::shared(limits, self.terms, Arc::clone(&self.wants_share), now_ms);
        let entry = Tenant {
            key: format!("{KEY_PREFIX}.{}", names::token(tenant)),
            limits: Arc::clone(&made),
            is_stale: AtomicBool::new(false),
            written_ms: AtomicU64::new(0),
            has_warned: AtomicBool::new(false),
        };
        tenants.insert(tenant.to_owned(), Arc::new(entry));
        drop(tenants);
        self.wants_share.notify_one();
        made
    }

    /// Forgets the tenants for which `is_kept` is false. Their shares become free as if this replica
    /// had ended.
    pub fn retain(&self, is_kept: impl Fn(&str) -> bool) {
        self.tenants().retain(|tenant, _| is_kept(tenant));
    }

    /// Keeps the shares of this replica. Never ends; the caller owns the task, and calls [`leave`]
    /// after it has ended the task.
    ///
    /// [`leave`]: Self::leave
    pub async fn run(&self) {
        loop {
            self.broker.until_connected().await;
            if let Err(error) = self.follow().await {
                // A lost connection is logged by the connection itself.
                match self.broker.is_connected() {
                    true => tracing::warn!(%error, "shares of limits cannot be renewed"),
                    false => tracing::debug!(%error, "shares of limits cannot be renewed"),
                }
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Gives back what is not used, so that other replicas need not wait for the end of the lease.
    /// Afterwards no request is admitted any more. Ends after 2 s at the latest.
    pub async fn leave(&self) {
        let leaving = async {
            let store = self.broker.context.get_key_value(&self.bucket.bucket).await?;
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

    fn tenants(&self) -> MutexGuard<'_, HashMap<String, Arc<Tenant>>> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<Arc<Tenant>> {
        self.tenants().values().cloned().collect()
    }

    /// Renews shares, and adapts them to what is needed, until a failure.
    async fn follow(&self) -> Result<(), Failure> {
        let store = self.open().await?;
        let mut changes = store.watch_all().await?;
        // What has changed before now is not reported.
        self.all().iter().for_each(|tenant| tenant.is_stale.store(true, Ordering::Relaxed));
        let mut connected = self.broker.connected.clone();
        loop {
            self.renew_all(&store, self.due(), Purpose::Hold).await?;
            tokio::select! {
                () = sleep(CHECK_INTERVAL) => {}
                () = self.wants_share.notified() => {}
                change = changes.next() => self.mark(change.ok_or("the watch has ended")??.key),
                _ = connected.wait_for(|connected| !*connected) => return Ok(()),
            }
            sleep(PAUSE).await;
            self.mark_all(&mut changes)?;
        }
    }

    /// Opens the bucket, and creates it if it does not exist.
    async fn open(&self) -> Result<Store, Failure> {
        let context = &self.broker.context;
        if let Ok(store) = context.get_key_value(&self.bucket.bucket).await {
            return Ok(store);
        }
        Ok(context.create_key_value(self.bucket.clone()).await?)
    }

    /// Marks the records of all changes that have arrived.
    fn mark_all(&self, changes: &mut Watch) -> Result<(), Failure> {
        while let Some(change) = changes.next().now_or_never() {
            self.mark(change.ok_or("the watch has ended")??.key);
        }
        Ok(())
    }

    fn mark(&self, key: String) {
        let tenants = self.tenants();
        if let Some(tenant) = tenants.values().find(|tenant| tenant.key == key) {
            tenant.is_stale.store(true, Ordering::Relaxed);
        }
    }

    /// The tenants whose record should be read.
    fn due(&self) -> Vec<Arc<Tenant>> {
        let now_ms = self.clock.now_ms();
        let mut due = self.all();
        due.retain(|tenant| {
            let is_rested = now_ms >= tenant.written_ms.load(Ordering::Relaxed) + WRITE_INTERVAL_MS;
            let is_stale = tenant.is_stale.load(Ordering::Relaxed);
            is_rested && (is_stale || tenant.limits.account().is_due(now_ms))
        });
        due
    }

    async fn renew_all(
        &self,
        store: &Store,
        tenants: Vec<Arc<Tenant>>,
        purpose: Purpose,
    ) -> Result<(), Failure> {
        let renewals = tenants.iter().map(|tenant| self.renew(store, tenant, purpose));
        let mut renewals = futures_util::stream::iter(renewals).buffer_unordered(CONCURRENT_MAX);
        while let Some(renewed) = renewals.next().await {
            renewed?;
        }
        Ok(())
    }

    /// Reads the record of a tenant, and writes it if this replica's shares change.
    async fn renew(&self, store: &Store, tenant: &Tenant, purpose: Purpose) -> Result<(), Failure> {
        tenant.is_stale.store(false, Ordering::Relaxed);
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
            let proposal = tenant.limits.account().plan(&self.id, record, purpose, now_ms);
            let Some(proposal) = proposal else { return Ok(()) };
            let bytes = proposal.record.encode().into();
            match store.update(&tenant.key, bytes, revision).await {
                Ok(_) => {
                    tenant.limits.account().confirm(&proposal);
                    tenant.written_ms.store(now_ms, Ordering::Relaxed);
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

impl std::fmt::Debug for Replicas {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = out.debug_struct("Replicas");
        shown.field("id", &self.id).field("terms", &self.terms).finish_non_exhaustive()
    }
}
