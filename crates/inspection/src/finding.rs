//! Findings: what does not fit, and what to change.

use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Worth knowing; nothing is wrong.
    Note,
    /// The cluster works, but not as well as it could.
    Warning,
    /// Requests fail, are placed blindly, or get wrong figures.
    Fault,
}

impl Severity {
    /// The name in text and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Fault => "fault",
        }
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What kind of finding it is.
    pub kind: FindingKind,
    /// How much it matters.
    pub severity: Severity,
    /// The model's name.
    pub model: String,
    /// The worker's id; `None` if it is about several workers or a source.
    pub worker: Option<String>,
    /// What is wrong, in one line. Contains texts of engines, whose control characters are not
    /// escaped.
    pub what: String,
    /// What to change.
    pub remedy: String,
}

/// Declares the kinds, each with its name, its severity and its usual remedy.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident $name:literal $severity:ident $remedy:literal,)*) => {
        /// The kinds of findings.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        pub enum FindingKind {
            $($(#[$doc])* #[serde(rename = $name)] $kind,)*
        }

        impl FindingKind {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// The name in text, JSON and the documentation.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)* }
            }

            /// How much findings of this kind matter.
            #[must_use]
            pub fn severity(self) -> Severity {
                match self { $(Self::$kind => Severity::$severity,)* }
            }

            /// What to change, if nothing more is known.
            #[must_use]
            pub fn remedy(self) -> &'static str {
                match self { $(Self::$kind => $remedy,)* }
            }
        }
    };
}

kinds! {
    /// Nothing accepts connections at the address.
    Refused "refused" Fault
        "start the engine, or correct host and port in `url`; a firewall that rejects connections to this port looks the same",
    /// The network, or the engine's host, rejects packets.
    Unreachable "unreachable" Fault
        "the router's host needs a route to the host in `url`, and firewalls and network policies must let it connect to that port",
    /// No connection, or no reply, in time.
    Late "late" Fault
        "correct the host in `url`, open the port in firewalls and network policies, or restart the engine if it hangs",
    /// The host name has no address.
    UnknownHost "unknown_host" Fault
        "correct the host in `url`, or add the name to DNS",
    /// The address is not in `fleet.networks`.
    OutsideNetworks "outside_networks" Fault
        "add the engines' network to `fleet.networks`, or list the worker under `workers`",
    /// The TLS handshake fails.
    TlsFailed "tls_failed" Fault
        "write `http://` if the engine does not use TLS; otherwise set `engine_tls` (`ca`, `server_name`, `cert` and `key`)",
    /// The peer does not speak HTTP.
    NotHttp "not_http" Fault
        "use the port of the engine's HTTP server (not that of its KV events), and `https://` if it uses TLS",
    /// Something between router and engine refuses requests.
    Forbidden "forbidden" Fault
        "let the router pass at the proxy, service mesh or gateway that answers at this address, or set `url` to the engine itself",
    /// The engine refuses the credential.
    KeyRefused "key_refused" Fault
        "set `engine_api_key` to the key with which the engine was started (`--api-key`)",
    /// Something answers that is no engine.
    NotAnEngine "not_an_engine" Fault
        "correct host and port in `url`: they must be those of the engine, without a path",
    /// The time was over before the worker was asked.
    NotAsked "not_asked" Fault
        "repeat the check with a longer `--timeout`",
    /// The engine reports that it is not healthy.
    Unhealthy "unhealthy" Fault
        "look into the engine's log, and restart it",
    /// The engine does not serve the model.
    WrongModel "wrong_model" Fault
        "set the model's `name` to the engine's, or start the engine with `--served-model-name`",
    /// The engine is another one than the configuration says.
    OtherEngine "other_engine" Warning
        "set the model's `engine` (and `connector`) to what its workers run",
    /// The engine does not serve an adapter.
    AdapterMissing "adapter_missing" Warning
        "load the adapter on the engine (`--lora-modules`), or delete it from `adapters`",
    /// The engine is older than any version that the router knows.
    TooOld "too_old" Warning
        "upgrade the engine to vLLM 0.32, with which the router is tested",
    /// The clock of the engine's host is off.
    ClockOff "clock_off" Warning
        "synchronise the clocks of both hosts (NTP): leases, dates in prompts and logs depend on them",
    /// The block size differs from the configuration.
    BlockSizeDiffers "block_size_differs" Fault
        "set `block_size` to the engine's, or to `auto`",
    /// Engines of one model have different block sizes.
    BlockSizesDiffer "block_sizes_differ" Fault
        "start all engines of the model with the same `--block-size`",
    /// Engines of one model store KV in different data types or layouts.
    KvFormatsDiffer "kv_formats_differ" Fault
        "start all engines of the model with the same `--kv-cache-dtype` and KV layout: no KV moves between those that differ",
    /// Engines of one model accept sequences of different lengths.
    ContextsDiffer "contexts_differ" Warning
        "start all engines of the model with the same `--max-model-len`",
    /// The number of ranks differs from the configuration.
    RanksDiffer "ranks_differ" Fault
        "set `data_parallel_ranks` to the engine's number, or delete it",
    /// No KV events are configured, and the engine tells of none.
    KvEventsUnused "kv_events_unused" Warning
        "start the engine with `--kv-events-config` (`enable_kv_cache_events`, `publisher: zmq`) and `--enable-prefix-caching`; if it has no `/kv_event_sources`, set `kv_events`",
    /// The engine publishes no KV events.
    KvEventsOff "kv_events_off" Fault
        "start the engine with `--kv-events-config` (`enable_kv_cache_events`, `publisher: zmq`) and `--enable-prefix-caching` (a decode engine of SGLang with `--disaggregation-decode-enable-radix-cache`), or set `kv_events: none`",
    /// The address of the KV events cannot be used.
    KvEventsUnreachable "kv_events_unreachable" Fault
        "correct `kv_events`: the address of the engine's publisher, which must be bound to all interfaces (`tcp://*:5557`) and open for the router in firewalls and network policies",
    /// Connected, and nothing arrives.
    KvEventsSilent "kv_events_silent" Fault
        "`kv_events` must be the publisher's own address; the engine needs `--kv-events-config` and `--enable-prefix-caching`",
    /// Events arrive that are not those of the engine's requests.
    KvEventsOfAnother "kv_events_of_another" Fault
        "`kv_events` and `url` must be those of the same engine, and of its first data-parallel rank",
    /// Events cannot be decoded.
    KvEventsUnreadable "kv_events_unreadable" Fault
        "use an engine version that is supported, or correct `kv_events`",
    /// There is no replay.
    KvReplayOff "kv_replay_off" Warning
        "start the engine with a `replay_endpoint` in `--kv-events-config`, and set `kv_replay`: without it, a gap in the events empties the index",
    /// The replay does not answer.
    KvReplayFails "kv_replay_fails" Fault
        "correct `kv_replay`: the engine's `replay_endpoint`, which is another port than that of the events",
    /// Usage has no cached tokens.
    DetailsOff "details_off" Warning
        "start the engine with `--enable-prompt-tokens-details`: without it, clients get the router's estimate of cached tokens",
    /// The chat's tokens differ.
    ChatDiffers "chat_differs" Fault
        "give the router the engine's chat template: the same model folder, and the engine's template options under `tokenizer`",
    /// The text's tokens differ.
    TextDiffers "text_differs" Fault
        "`tokenizer.path` must be the folder of the engine's model (`--tokenizer`), of the same revision",
    /// The tokens cannot be compared.
    TokensUnknown "tokens_unknown" Note
        "nothing to do; the canary compares tokens by the engine's replies while a router runs",
    /// The router relies on the engine's tokens and gets none.
    NoTokens "no_tokens" Fault
        "its `/tokenize` must be reachable (vLLM always has it); otherwise give the router the model's files in `tokenizer`",
    /// The router cannot tokenise.
    TokenizerInexact "tokenizer_inexact" Warning
        "nothing to change in the engine: prompts of this kind are placed by load; see docs/parity.md",
    /// The engine did not serve a small prompt.
    TrialFailed "trial_failed" Fault
        "look into the engine's log; with `--enable-log-requests` the request id begins with `splitrail-check-`",
    /// The engine did not reply to a small prompt in time.
    TrialLate "trial_late" Warning
        "repeat the check when the engine is less busy; if it is idle, restart it",
    /// A prefill reply has no hand-off.
    NoHandOff "no_hand_off" Fault
        "start the engine with `--kv-transfer-config '{\"kv_connector\": \"NixlConnector\", ...}'`, or correct `connector`",
    /// The hand-off is one of another connector.
    OtherConnector "other_connector" Fault
        "start all engines of the model with the same connector, and set `connector` to it",
    /// The engine has a connector that the configuration does not use.
    ConnectorUnused "connector_unused" Warning
        "set `connector: nixl`, and the workers' roles",
    /// The hand-off names a host that the router does not allow.
    HandOffHost "hand_off_host" Fault
        "start the engine with `VLLM_NIXL_SIDE_CHANNEL_HOST` set to its own address, or add its network to `hand_off_networks`",
    /// A decode worker cannot fetch a hand-off.
    HandOffFails "hand_off_fails" Fault
        "are the roles of prefill and decode swapped? Otherwise both engines need the same engine version, model, connector and KV layout, and the decode host must reach the prefill host's side channel port",
    /// A decode worker computes what was handed to it.
    HandOffIgnored "hand_off_ignored" Fault
        "start the decode engine with the same `--kv-transfer-config` connector as the prefill engine",
    /// The hand-off was not tested.
    HandOffUntested "hand_off_untested" Warning
        "correct the other findings, and repeat the check",
    /// Versions differ between engines that hand over.
    VersionsDiffer "versions_differ" Warning
        "run the same engine version on all workers of the model",
    /// The configuration relies on `cache_hit_threshold`, and the engine ignores it.
    ThresholdIgnored "threshold_ignored" Fault
        "set `gate: { kind: auto }` (or `router`, `shim`) and delete `supports_cache_hit_threshold`: no released vLLM supports `cache_hit_threshold`",
    /// Nothing can decide on decode-first.
    NoGate "no_gate" Warning
        "decode-first needs KV events and a tokenizer, a shim, or an engine that supports `cache_hit_threshold`",
    /// No shim answers.
    NotAShim "not_a_shim" Fault
        "set `url` to the shim's `listen`, or delete `shim: true`",
    /// The shim takes no work.
    ShimUnready "shim_unready" Fault
        "look into the logs of shim and engine",
    /// The shim is another worker than configured.
    ShimMismatch "shim_mismatch" Fault
        "give shim and router the same `id` and `role` for this engine, or correct `url`",
    /// The shim's mirror misses events.
    ShimMirrorStale "shim_mirror_stale" Warning
        "check the engine's `--kv-events-config` and the shim's `kv_events` and `kv_replay`: until then every gate is a miss",
    /// The shim is attached to no router.
    ShimDetached "shim_detached" Warning
        "check the shim's `router` and token, and `listen.fleet` of the routers",
    /// The bootstrap server does not answer.
    BootstrapFails "bootstrap_fails" Fault
        "set `bootstrap` to the prefill engine's bootstrap server, and open its port for router and decode engines",
    /// A source of workers found none.
    SourceEmpty "source_empty" Warning
        "check the name and the selector of the source, and whether the engines run",
    /// A source of workers cannot be asked.
    SourceFails "source_fails" Fault
        "correct the name in `discovery`, or repair DNS",
    /// A source of workers is known to running routers only.
    SourceNotAsked "source_not_asked" Note
        "ask running routers: `splitrail status` and `splitrail workers`",
}

impl Finding {
    /// A finding about one worker, with the usual severity and remedy of its kind.
    pub(crate) fn of_worker(kind: FindingKind, model: &str, worker: &str, what: String) -> Self {
        Self { worker: Some(worker.to_owned()), ..Self::of_model(kind, model, what) }
    }

    /// A finding about several workers of a model.
    pub(crate) fn of_model(kind: FindingKind, model: &str, what: String) -> Self {
        let (severity, remedy) = (kind.severity(), kind.remedy().to_owned());
        Self { kind, severity, model: model.to_owned(), worker: None, what, remedy }
    }

    /// The finding with a remedy that names more.
    pub(crate) fn with_remedy(self, remedy: String) -> Self {
        Self { remedy, ..self }
    }
}
