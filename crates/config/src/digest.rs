//! A hash of what replicas of a router have in common in their configurations.

use std::path::PathBuf;

use std::net::SocketAddr;

use super::model::{Config, Listen, Listener};

impl Config {
    /// A hash of 48 bits, which a metric can represent exactly. Equal configurations have the same
    /// hash, even if their files differ in form; different ones almost never do. What each replica
    /// has for itself is left out: addresses, names and certificates of the listeners (not whether there
    /// is one, nor who may use it), and the paths of the files that the router writes (not whether there
    /// is one). Secrets are hashed as the references in the file, not by their value.
    #[must_use]
    pub fn digest(&self) -> u64 {
        const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0100_0000_01b3;
        // Members are serialised in the order of their declaration.
        let text = serde_json::to_vec(&self.shared_part()).unwrap_or_default();
        // FNV-1a is the same for all versions and machines; the hash of the standard library is
        // not.
        let hash =
            text.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME));
        ((hash >> 48) ^ hash) & ((1 << 48) - 1)
    }

    /// The configuration without what is necessarily different for each replica.
    fn shared_part(&self) -> Self {
        let mut shared = self.clone();
        shared.listen = without_own(shared.listen);
        let paths = [
            &mut shared.ledger.path,
            &mut shared.record.path,
            &mut shared.audit.path,
            &mut shared.access_log.path,
        ];
        for path in paths.into_iter().flatten() {
            *path = PathBuf::new();
        }
        shared
    }
}

/// The listeners without addresses, names and files of one replica.
fn without_own(listen: Listen) -> Listen {
    let none = SocketAddr::from(([0, 0, 0, 0], 0));
    let shared = |listener: Listener| {
        let tls = listener.tls.map(|mut tls| {
            (tls.cert, tls.key) = Default::default();
            tls.client_ca = tls.client_ca.map(|_| PathBuf::new());
            tls
        });
        Listener { address: none, tls }
    };
    Listen {
        http: shared(listen.http),
        grpc: listen.grpc.map(shared),
        fleet: listen.fleet.map(|_| none),
        admin: shared(listen.admin),
        admin_hosts: Vec::new(),
        metrics: listen.metrics.map(shared),
        ..listen
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use crate::parse;

    fn digest(top: &str) -> u64 {
        let text = format!(
            "{top}\nmodels:\n  - name: m\n    tokenizer: {{ kind: none }}\n    flow: aggregated\n    \
             workers: [{{ id: w, role: both, url: 'http://127.0.0.1:1' }}]\n"
        );
        parse("splitrail.yaml", &text, Path::new("/")).unwrap().config.digest()
    }

    #[test]
    fn replicas_with_their_own_addresses_and_files_have_the_same_digest() {
        let replica = |number: u8| {
            digest(&format!(
                "listen: {{ http: '10.0.0.{number}:8000', admin: '10.0.0.{number}:9090', \
                 admin_hosts: [router-{number}], metrics: '10.0.0.{number}:9091' }}\n\
                 ledger: {{ path: ledger-{number}.jsonl }}\n\
                 record: {{ path: record-{number}.jsonl }}\n\
                 audit: {{ path: audit-{number}.jsonl }}\n\
                 access_log: {{ path: access-{number}.jsonl }}\n"
            ))
        };
        assert_eq!(replica(1), replica(2));
    }

    #[test]
    fn replicas_that_should_be_alike_and_are_not_have_different_digests() {
        let all = [
            "",
            "hash_seed: 1",
            "ledger: { path: ledger.jsonl }",
            "listen: { grpc: '127.0.0.1:8001', grpc_explain: true }",
            "listen: { grpc: '127.0.0.1:8001' }",
            "listen: { http_hosts: [llm.example] }",
            "quotas: { kind: nats, servers: ['nats://127.0.0.1:4222'] }",
            "quotas: { kind: nats, servers: ['nats://127.0.0.2:4222'] }",
        ];
        let digests: std::collections::BTreeSet<u64> = all.into_iter().map(digest).collect();
        assert_eq!(digests.len(), all.len());
    }
}
