//! What an engine has told about itself, and what an operator has written in its place.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use super::worker::Worker;
use arc_swap::ArcSwap;
use splitrail_config::model::{Connector, WorkerConfig};
use splitrail_engine::identity::EventSource;
use splitrail_engine::zmtp::Endpoint;
use splitrail_policy::{KvFormat, group_tag};
use tokio::sync::watch;

/// Where an engine publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Publication {
    /// The engine has not been asked yet.
    Unknown,
    /// Nowhere that the router could follow.
    Nowhere,
    /// At these addresses, one for each rank that is known; at least one.
    At(Vec<EventSource>),
}

/// How an engine stores KV, by its own names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct KvNames {
    /// The data type.
    pub dtype: Option<String>,
    /// The layout, if the engine was started with one.
    pub layout: Option<String>,
}

/// What an engine says of an adapter that the configuration names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterFacts {
    /// The tag of the path from which the engine loaded it last; 0 if the engine names none.
    pub(crate) root: u64,
    /// Whether the engine has it; `None` since the engine may be another process, until it lists its own.
    pub(crate) is_listed: Option<bool>,
    /// The greatest number of its loads from this path, by the KV events that came before the engine was
    /// asked; 0 if none is known.
    pub(crate) load: u64,
}

/// The adapters of one engine by name, with those that were unloaded.
pub type Adapters = BTreeMap<String, AdapterFacts>;

/// What is known about one engine.
#[derive(Debug)]
pub struct EngineFacts {
    /// The longest sequence that the engine accepts, in tokens; 0 until it has reported it.
    context_tokens: AtomicU32,
    /// Tokens per KV block as the engine reports it; 0 until it has.
    block_size: AtomicU32,
    /// [`KvFormat`] as the engine reports it, without its block size and group.
    kv_format: AtomicU64,
    /// The tag of the worker's transfer group; 0 without one.
    group: u64,
    kv_names: Mutex<Arc<KvNames>>,
    publication: watch::Sender<Publication>,
    /// Whether the engine is asked where it publishes, because nobody has written it down.
    asks_for_events: bool,
    /// What the engine has last listed of the adapters that the configuration names.
    adapters: ArcSwap<Adapters>,
    /// How often an adapter was loaded from another path.
    adapter_changes: AtomicU32,
}

impl EngineFacts {
    /// What a worker's configuration says.
    pub fn new(config: &WorkerConfig) -> Self {
        let asks_for_events = config.asks_for_events();
        let publication = match written(config) {
            Some(source) => Publication::At(vec![source]),
            None if asks_for_events => Publication::Unknown,
            None => Publication::Nowhere,
        };
        Self {
            context_tokens: AtomicU32::new(0),
            block_size: AtomicU32::new(0),
            kv_format: AtomicU64::new(0),
            group: config.transfer_group.as_deref().map_or(0, group_tag),
            kv_names: Mutex::default(),
            publication: watch::Sender::new(publication),
            asks_for_events,
            adapters: ArcSwap::default(),
            adapter_changes: AtomicU32::new(0),
        }
    }

    /// The longest sequence that the engine accepts, in tokens; `None` until it has reported it.
    pub fn context_tokens(&self) -> Option<u32> {
        Some(self.context_tokens.load(Relaxed)).filter(|tokens| *tokens > 0)
    }

    /// Records the longest sequence that the engine accepts, in tokens.
    pub fn set_context_tokens(&self, tokens: u32) {
        self.context_tokens.store(tokens, Relaxed);
    }

    /// Tokens per KV block as the engine reports it.
    pub fn block_size(&self) -> Option<u32> {
        Some(self.block_size.load(Relaxed)).filter(|tokens| *tokens > 0)
    }

    /// Records what the engine reports as its tokens per KV block; `None` forgets it.
    pub fn set_block_size(&self, tokens: Option<u32>) {
        self.block_size.store(tokens.unwrap_or(0), Relaxed);
    }

    /// How the engine stores KV, and its transfer group.
    pub fn kv_format(&self) -> KvFormat {
        let format = KvFormat::from_bits(self.kv_format.load(Relaxed));
        format.with_block_size(self.block_size()).in_group(self.group)
    }

    /// The same by the engine's own names.
    pub fn kv_names(&self) -> Arc<KvNames> {
        Arc::clone(&self.kv_names.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Records how the engine stores KV. Returns whether this is news.
    pub fn set_kv_names(&self, names: KvNames) -> bool {
        let mut known = self.kv_names.lock().unwrap_or_else(PoisonError::into_inner);
        if **known == names {
            return false;
        }
        let format = KvFormat::of(names.dtype.as_deref(), names.layout.as_deref());
        *known = Arc::new(names);
        self.kv_format.store(format.to_bits(), Relaxed);
        true
    }

    /// What the engine has last listed of the adapters that the configuration names.
    pub fn adapters(&self) -> Arc<Adapters> {
        self.adapters.load_full()
    }

    /// Records what the engine lists of adapters.
    pub fn set_adapters(&self, adapters: Adapters) {
        self.adapters.store(Arc::new(adapters));
    }

    /// Forgets which adapters are loaded, as the engine may be another process. Their paths are kept: what
    /// other workers hold of the former ones must not pass for what the next list names.
    pub fn forget_adapters(&self) {
        let mut adapters = Adapters::clone(&self.adapters.load());
        for adapter in adapters.values_mut() {
            (adapter.is_listed, adapter.load) = (None, 0);
        }
        self.set_adapters(adapters);
    }

    /// How often the engine has loaded an adapter from another path than before.
    pub fn adapter_changes(&self) -> u32 {
        self.adapter_changes.load(Relaxed)
    }

    /// Records that the engine has loaded an adapter from another path.
    pub fn count_adapter_change(&self) {
        self.adapter_changes.fetch_add(1, Relaxed);
    }

    /// Whether the engine is asked where it publishes KV events.
    pub fn asks_for_events(&self) -> bool {
        self.asks_for_events
    }

    /// Whether the engine publishes KV events that the router can follow; `None` while unknown.
    pub fn publishes(&self) -> Option<bool> {
        match &*self.publication.borrow() {
            Publication::Unknown => None,
            Publication::Nowhere => Some(false),
            Publication::At(_) => Some(true),
        }
    }

    /// The address of the first publisher.
    pub fn publisher(&self) -> Option<String> {
        match &*self.publication.borrow() {
            Publication::At(sources) => Some(sources.first()?.events.to_string()),
            Publication::Unknown | Publication::Nowhere => None,
        }
    }

    /// Records where the engine publishes. Returns whether that is news. What an operator has
    /// written down has precedence.
    pub fn set_publication(&self, found: Publication) -> bool {
        self.asks_for_events
            && self.publication.send_if_modified(|known| {
                let is_news = *known != found;
                *known = found;
                is_news
            })
    }

    /// A receiver for changes of where the engine publishes.
    pub fn follow_publication(&self) -> watch::Receiver<Publication> {
        self.publication.subscribe()
    }
}

impl Worker {
    /// Whether KV can move between both engines: they are of one transfer group and store KV alike, as
    /// far as they tell, in data type, layout and block size.
    pub fn stores_kv_as(&self, other: &Self) -> bool {
        self.engine.facts.kv_format().fits(other.engine.facts.kv_format())
    }

    /// Whether both workers are of one transfer group.
    pub fn is_of_group_of(&self, other: &Self) -> bool {
        self.engine.facts.kv_format().is_of_group_of(other.engine.facts.kv_format())
    }

    /// Whether the engine can take what `source` hands over: both are of one transfer group, and store
    /// KV alike as far as they tell.
    pub fn can_take_from(&self, source: &Self, connector: Connector) -> bool {
        can_take(self.engine.facts.kv_format(), source.engine.facts.kv_format(), connector)
    }
}

/// Whether an engine that stores KV as `own` can take a hand-off of one that stores it as `sources`, as
/// far as both are known. Never between transfer groups.
pub fn can_take(own: KvFormat, sources: KvFormat, connector: Connector) -> bool {
    match connector {
        // An engine that pulls splits its own blocks into those of the other engine.
        Connector::Nixl => {
            own.fits_but_for_blocks(sources) && own.has_multiple_of_blocks_of(sources)
        }
        // Storages keep tokens, not blocks.
        Connector::SharedStorage => own.fits_but_for_blocks(sources),
        Connector::NixlPush | Connector::Mooncake | Connector::Sglang | Connector::None => {
            own.fits(sources)
        }
    }
}

/// The addresses at which the first rank publishes, if they are written down.
fn written(config: &WorkerConfig) -> Option<EventSource> {
    let endpoint = |address: &str| address.parse::<Endpoint>().ok();
    let events = endpoint(config.written_events()?)?;
    let replay = config.kv_replay.as_deref().and_then(endpoint);
    Some(EventSource { rank: 0, events, replay })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::worker::tests::worker;
    use splitrail_engine::EngineKind;

    fn facts(keys: &str) -> EngineFacts {
        let config = format!(r#"{{"id": "w", "role": "both", "url": "http://w:1"{keys}}}"#);
        EngineFacts::new(&serde_json::from_str(&config).unwrap())
    }

    fn said(endpoint: &str) -> Publication {
        let text =
            format!(r#"{{"0": {{"enable_kv_cache_events": true, "endpoint": "{endpoint}"}}}}"#);
        Publication::At(EngineKind::Vllm.event_sources(&text, "w").unwrap())
    }

    #[test]
    fn configured_event_addresses_take_precedence_over_the_engines() {
        for (keys, publishes, publisher) in [
            (r#", "kv_events": "tcp://w:2", "kv_replay": "tcp://w:3""#, true, Some("tcp://w:2")),
            (r#", "kv_events": "none""#, false, None),
            (r#", "shim": true"#, false, None),
        ] {
            let facts = facts(keys);
            assert!(
                !facts.asks_for_events() && !facts.set_publication(said("tcp://*:9")),
                "{keys}"
            );
            assert_eq!(
                (facts.publishes(), facts.publisher().as_deref()),
                (Some(publishes), publisher)
            );
        }
    }

    #[test]
    fn omitted_event_addresses_follow_the_latest_report_of_the_engine() {
        let facts = facts("");
        assert_eq!((facts.asks_for_events(), facts.publishes()), (true, None));
        assert!(facts.set_publication(said("tcp://*:9")));
        assert_eq!(facts.publisher().as_deref(), Some("tcp://w:9"));
        assert!(!facts.set_publication(said("tcp://*:9")));
        assert!(facts.set_publication(Publication::Nowhere));
        assert_eq!(facts.publishes(), Some(false));
    }

    #[test]
    fn kv_moves_between_other_block_sizes_only_where_the_connector_can_convert() {
        let (small, large) = (worker("small"), worker("large"));
        assert!(small.stores_kv_as(&large), "they have not told yet");
        small.engine.facts.set_block_size(Some(16));
        assert!(small.stores_kv_as(&large) && large.stores_kv_as(&small));
        large.engine.facts.set_block_size(Some(32));
        assert!(!small.stores_kv_as(&large) && !large.stores_kv_as(&small));
        for (connector, into_larger, into_smaller) in [
            (Connector::Nixl, true, false),
            (Connector::NixlPush, false, false),
            (Connector::SharedStorage, true, true),
            (Connector::Mooncake, false, false),
            (Connector::Sglang, false, false),
        ] {
            let takes =
                (large.can_take_from(&small, connector), small.can_take_from(&large, connector));
            assert_eq!(takes, (into_larger, into_smaller), "{connector:?}");
        }
        large.engine.facts.set_kv_names(KvNames { dtype: Some("fp8".into()), layout: None });
        small.engine.facts.set_kv_names(KvNames { dtype: Some("auto".into()), layout: None });
        assert!(!large.can_take_from(&small, Connector::Nixl));
    }
}
