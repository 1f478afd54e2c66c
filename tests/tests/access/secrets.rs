//! No key, token or certificate of a client is in logs at any level, metrics, admin pages, the
//! audit file, the ledger or the record, however it is refused. A router process runs with
//! everything at TRACE while marked credentials take every way there is; then all that it said is
//! searched.

use std::path::{Path, PathBuf};

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use splitrail_config::keys::OperatorRole;
use splitrail_proto::v1::ListModelsRequest;
use splitrail_tests::Client;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::leaks::{leaks, spelled};
use splitrail_tests::raw;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::whole_reply;
use splitrail_tests::tenants::{Keys, bearer};
use splitrail_tests::tls::{EACH_VERSION, TlsClient, fixture};
use splitrail_tests::trial::COMPLETIONS;

use super::issuer::{Signer, claims_with, first_parts, jwks, jwt, now, replace};
use super::tls::support::yaml;

/// In credentials that are no key and no token.
const WRONG: &str = "Zq1WrongKeyMarkerXk";
/// In the headers and claims of tokens.
const HEADER: &str = "Zq2HeaderMarkerXk";
const CLAIM: &str = "Zq3ClaimMarkerXk";
/// In files that operators have damaged.
const KEY_FILE: &str = "Zq4KeyFileMarkerXk";
const KEY_SET: &str = "Zq5KeySetMarkerXk";
/// In what the server of a key set replies.
const SERVER: &str = "Zq6ServerMarkerXk";
/// In queries.
const QUERY: &str = "Zq7QueryMarkerXk";

const MARKERS: [&str; 7] = [WRONG, HEADER, CLAIM, KEY_FILE, KEY_SET, SERVER, QUERY];

/// Names in the certificate of the client `acme` that are not in the configuration.
const CERTIFICATE_NAMES: [&str; 3] = ["urn:acme:batch", "*.acme.example", "ops@acme.example"];

/// The body of a completion.
const BODY: &str = r#"{"model": "sim", "max_tokens": 4, "prompt": "a"}"#;

struct World {
    router: RouterProcess,
    http: Client,
    admin: Client,
    keys: Keys,
    log: PathBuf,
    key_set: PathBuf,
    signer: Signer,
    /// The key of an operator.
    operator: String,
    _servers: [ScriptedServer; 2],
    secrets: Vec<String>,
    /// What clients were told.
    told: String,
}

/// Texts that are found only in what shows a certificate.
fn certificate_secrets() -> Vec<String> {
    let mut secrets = CERTIFICATE_NAMES.map(str::to_owned).to_vec();
    for name in ["clients/acme", "stranger", "clients/lapsed"] {
        let der = CertificateDer::from_pem_file(fixture(&format!("{name}.pem"))).unwrap();
        // A part of the signature.
        let bytes = &der[der.len() - 24..];
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let list: Vec<_> = bytes.iter().map(ToString::to_string).collect();
        secrets.extend([hex.to_uppercase(), hex, list.join(", ")]);
    }
    secrets
}

/// A configuration with all kinds of credentials and all files.
fn configuration(keys: &Keys, key_set: &Path, broken_url: &str, engine_url: &str) -> String {
    let fixture = |name: &str| fixture(name).display().to_string();
    let file = |name: &str| keys.folder().join(name).display().to_string();
    let top = format!(
        "auth:
- {{ kind: keys, file: {:?} }}
- {}
- {}
- {{ kind: client_certificate, tenant: san_uri }}
tenants:
- {{ name: acme, identities: [\"spiffe://clusters.example/tenant/acme\"] }}
audit: {{ path: {:?} }}
ledger: {{ path: {:?} }}
record: {{ path: {:?} }}",
        keys.path().display().to_string(),
        jwt(&key_set.display().to_string()),
        jwt(broken_url).replace("id.example", "other.example"),
        file("audit.jsonl"),
        file("ledger.jsonl"),
        file("record.jsonl"),
    );
    let tls = format!(
        "cert: {:?}, key: {:?}, client_ca: {:?}, plain_text: true",
        fixture("router.pem"),
        fixture("router.key"),
        fixture("clients/ca.pem")
    );
    let http = format!("{{ address: 127.0.0.1:0, tls: {{ {tls} }} }}");
    let others = "grpc: 127.0.0.1:0, admin: 127.0.0.1:0, admin_access: roles";
    let listen = format!("{{ http: {http}, {others} }}");
    yaml(&listen, "{ header_size_max: 32768 }", &top, engine_url)
}

impl World {
    async fn start() -> Self {
        let mut keys = Keys::empty();
        let operator = keys.role(OperatorRole::Admin);
        let signer = Signer::ed("e");
        let key_set = keys.folder().join("jwks.json");
        replace(&key_set, &jwks(&[&signer]));
        let engine = ScriptedServer::start(|heard| match heard.is_inference() {
            true => whole_reply(),
            false => ScriptedReply::json(200, "{}"),
        })
        .await;
        let broken =
            ScriptedServer::start(|_| ScriptedReply::json(200, &format!("[\"{SERVER}\"]"))).await;
        let yaml = configuration(&keys, &key_set, &broken.url(), &engine.url());
        let log = keys.folder().join("router.log");
        let env = [("RUST_LOG", "trace"), ("NO_COLOR", "1")];
        let router = RouterProcess::serve(keys.folder(), &yaml, &env, &log).await;
        let (http, admin) = (Client::new(router.http), Client::new(router.admin));
        eventually("the router is ready", async || admin.get("/ready").await.status == 200).await;
        let mut secrets = MARKERS.map(str::to_owned).to_vec();
        secrets.extend(certificate_secrets());
        secrets.push(operator.clone());
        let (_servers, told) = ([engine, broken], String::new());
        Self { router, http, admin, keys, log, key_set, signer, operator, _servers, secrets, told }
    }

    /// Sends a credential to all listeners, in all headers that may carry one; returns the status
    /// of a completion.
    async fn send(&mut self, credential: &str) -> u16 {
        self.secrets.push(credential.to_owned());
        // Also the parts of a token.
        let parts = credential.split('.').filter(|part| part.len() >= 16);
        self.secrets.extend(parts.map(str::to_owned));
        let authorization = bearer(credential);
        let mut status = 0;
        for header in [
            ("x-api-key", credential),
            ("authorization", &format!("Basic {credential}")),
            ("authorization", credential),
            ("authorization", &authorization),
        ] {
            let completion = self.http.post_with(COMPLETIONS, &[header], BODY).await;
            status = completion.status.as_u16();
            let read = self.admin.get_with("/admin/workers", &[header]).await;
            let changed = self.admin.post_with("/admin/workers/w0/undrain", &[header], "").await;
            for reply in [completion, read, changed] {
                self.told += &format!("{:?} {}", reply.headers, reply.text());
            }
        }
        let mut client = grpc_client(self.router.grpc);
        for name in ["authorization", "x-api-key"] {
            let mut call = tonic::Request::new(text_request("a", ""));
            call.metadata_mut().insert(name, authorization.parse().unwrap());
            match client.generate(call).await {
                Ok(events) => {
                    let mut events = events.into_inner();
                    while events.message().await.is_ok_and(|event| event.is_some()) {}
                }
                Err(status) => self.told += &format!("{status:?}"),
            }
            let mut call = tonic::Request::new(ListModelsRequest {});
            call.metadata_mut().insert(name, credential.parse().unwrap());
            if let Err(status) = client.list_models(call).await {
                self.told += &format!("{status:?}");
            }
        }
        status
    }

    async fn keys_of_all_kinds(&mut self) {
        let (valid, expired) = (self.keys.tenant("acme"), self.keys.expired("acme"));
        let authorization = bearer(&valid);
        let headers = [("authorization", authorization.as_str())];
        eventually("the new keys are in use", async || {
            self.http.get_with("/v1/models", &headers).await.status == 200
        })
        .await;
        let operator = self.operator.clone();
        let wrong = [valid[..valid.len() - 1].to_owned(), format!("{valid}0"), WRONG.repeat(700)];
        for (key, status) in [(&valid, 200), (&expired, 401), (&operator, 403)]
            .into_iter()
            .chain([WRONG.to_owned()].iter().chain(&wrong).map(|key| (key, 401)))
        {
            assert_eq!(self.send(key).await, status);
        }
        // Longer than any head.
        let headers = [("authorization", WRONG.repeat(2000))];
        let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
        assert_eq!(self.http.get_with("/v1/models", &headers).await.status, 431);
    }

    async fn tokens_of_all_kinds(&mut self) {
        let marked = |name: &str, value: Value| {
            let mut claims = claims_with("acme", &json!({"sub": CLAIM, "jti": CLAIM}));
            claims[name] = value;
            claims
        };
        let plain = marked("sub", json!(CLAIM));
        let (signer, attacker) = (&self.signer, Signer::ed("e"));
        let header = json!({"alg": HEADER, "kid": HEADER, "typ": HEADER});
        let [unsigned, half_signed] = signer.unsigned(&plain);
        let [confused, ..] = signer.confused(&plain);
        let tokens = [
            (signer.token(&plain), 200),
            (signer.token(&marked("roles", json!([CLAIM]))), 200),
            (signer.token(&marked("exp", json!(now() - 100))), 401),
            (signer.token(&marked("nbf", json!(now() + 100))), 401),
            (signer.token(&marked("exp", json!(CLAIM))), 401),
            (signer.token(&marked("aud", json!(CLAIM))), 401),
            (signer.token(&marked("iss", json!(CLAIM))), 401),
            (signer.token(&marked("iss", json!("https://other.example"))), 401),
            (signer.token(&marked("org", json!(CLAIM))), 403),
            (signer.token(&marked("org", json!({CLAIM: CLAIM}))), 403),
            (signer.token_of(HEADER, &plain), 401),
            (attacker.token(&plain), 401),
            (unsigned, 401),
            (half_signed, 401),
            (confused, 401),
            (format!("{}.c2lnbmF0dXJl", first_parts(&header, &plain)), 401),
            (format!("{WRONG}.{WRONG}.{WRONG}"), 401),
        ];
        for (token, status) in tokens {
            assert_eq!(self.send(&token).await, status, "{token}");
        }
    }

    async fn certificates_of_all_kinds(&mut self) {
        for versions in EACH_VERSION {
            for identity in ["clients/acme", "stranger", "clients/lapsed"] {
                let client =
                    TlsClient { identity: Some(identity), versions, ..TlsClient::default() };
                for headers in [&[][..], &[("x-api-key", WRONG)]] {
                    let request = raw::request("POST", COMPLETIONS, headers, BODY.as_bytes());
                    let reply = client.exchange(self.router.http, &request).await.text();
                    let is_served = reply.starts_with("HTTP/1.1 200 ");
                    assert_eq!(is_served, identity == "clients/acme" && headers.is_empty());
                    self.told += &reply;
                }
            }
        }
    }

    /// Requests that are refused before their credential is read, and credentials in wrong places.
    async fn broken_requests(&mut self) {
        let key = format!("authorization: Bearer {WRONG}");
        let models = "GET /v1/models HTTP/1.1\r\nhost: localhost";
        let post = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost");
        for head in [
            format!("GET /v1/models HTTP/1.1\r\n{key}"),
            format!("{models}\r\n{key}\r\n{key}"),
            format!("{models}\r\n{key}\0"),
            format!("{models}\r\nauthorization: Bearer \u{e9}{WRONG}"),
            format!("{models}\r\n{key}\r\n folded: {WRONG}"),
            format!("{post}\r\n{key}\r\ncontent-length: x"),
            format!("{post}\r\n{key}\r\ncontent-length: 1\r\ntransfer-encoding: chunked"),
            format!("GET /v1/models?api_key={QUERY} HTTP/1.1\r\nhost: localhost"),
            format!("GET /admin/workers?api_key={QUERY} HTTP/1.1\r\nhost: localhost\r\n{key}"),
            format!("GET /v1/models HTTP/1.1\r\nhost: localhost\r\ncookie: key={WRONG}"),
        ] {
            let head = format!("{head}\r\nconnection: close\r\n\r\n");
            for address in [self.router.http, self.router.admin, self.router.grpc] {
                let reply = raw::exchange(address, head.as_bytes()).await.unwrap_or_default();
                self.told += &format!("{} {}", reply.head, reply.text());
            }
        }
        let path = format!("/admin/reload?key={QUERY}");
        let refused = self.admin.post_with(&path, &[("x-api-key", WRONG)], "").await;
        assert_eq!(refused.status, 401);
    }

    /// Files that an operator has damaged, so that they contain what they should not.
    async fn broken_files(&mut self) {
        let (key_file, key_set) = (self.keys.path(), self.key_set.clone());
        let usable = [&key_file, &key_set].map(|file| std::fs::read_to_string(file).unwrap());
        for text in [
            format!("keys: [ {{ id: k, tenant: acme, sha256: {KEY_FILE} }} ]"),
            format!("keys: [ {{ id: k, tenant: acme, key: {KEY_FILE} }} ]"),
            format!("keys: [ {{ id: k, role: {KEY_FILE}, sha256: 00 }} ]"),
            format!("keys: [ {{ id: k, tenant: acme, expires: {KEY_FILE}, sha256: 00 }} ]"),
            format!("keys: [ \"{KEY_FILE}\" ]"),
            format!("keys: {KEY_FILE}"),
            format!("{{\"{KEY_FILE}\n"),
            KEY_FILE.to_owned(),
        ] {
            self.damage(&key_file, &text, "the file of API keys cannot be used").await;
        }
        replace(&key_file, &usable[0]);
        let mut private = self.signer.jwk();
        (private["d"], private["x"]) = (json!(KEY_SET), json!(KEY_SET));
        for text in [
            KEY_SET.to_owned(),
            json!([KEY_SET]).to_string(),
            json!({"keys": [{"kty": "oct", "k": KEY_SET}]}).to_string(),
            json!({"keys": [private]}).to_string(),
        ] {
            // The same line is logged at most every 30 s.
            replace(&key_set, &text);
            self.reload(422).await;
        }
        replace(&key_set, &usable[1]);
        self.reload(200).await;
    }

    /// Damages a file, and waits until the log says so.
    async fn damage(&mut self, file: &Path, text: &str, says: &str) {
        let count = |log: &Path| {
            String::from_utf8_lossy(&std::fs::read(log).unwrap()).matches(says).count()
        };
        let before = count(&self.log);
        replace(file, text);
        eventually(says, async || count(&self.log) > before).await;
        self.reload(422).await;
    }

    async fn reload(&mut self, status: u16) {
        let headers = [("x-api-key", self.operator.as_str())];
        let reply = self.admin.post_with("/admin/reload", &headers, "").await;
        assert_eq!(reply.status, status, "{}", reply.text());
        self.told += &reply.text();
    }

    async fn search_pages(&self, found: &mut Vec<String>) {
        let headers = [("x-api-key", self.operator.as_str())];
        for page in [
            "/metrics",
            "/admin/config",
            "/admin/decisions?limit=1000",
            "/admin/workers",
            "/admin/attention",
            "/admin/models",
            "/admin/requests",
            "/admin/live/history",
        ] {
            let reply = self.admin.get_with(page, &headers).await;
            assert_eq!(reply.status, 200, "{page}");
            leaks(page, &reply.text(), &self.secrets, found);
        }
    }

    /// Ends the router, which writes its files first, and searches all that it has written.
    async fn search_files(self, found: &mut Vec<String>) {
        let Self { mut router, keys, log, secrets, told, .. } = self;
        router.signal("TERM");
        eventually("the router has ended", async || router.has_ended()).await;
        leaks("a reply", &told, &secrets, found);
        for name in ["audit.jsonl", "ledger.jsonl", "record.jsonl"] {
            let text = std::fs::read_to_string(keys.folder().join(name)).unwrap();
            assert!(!text.is_empty(), "{name} is empty");
            leaks(name, &text, &secrets, found);
        }
        let log = String::from_utf8_lossy(&std::fs::read(&log).unwrap()).into_owned();
        for source in [" TRACE ", "splitrail_router::", "hyper_util::", "h2::", "rustls::"] {
            assert!(log.contains(source), "{source} is not in a log of everything");
        }
        leaks("the log", &log, &secrets, found);
        leaks("the log, letter by letter,", &spelled(&log), &secrets, found);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_key_token_or_certificate_is_shown_anywhere() {
    let mut world = World::start().await;
    world.keys_of_all_kinds().await;
    world.tokens_of_all_kinds().await;
    world.certificates_of_all_kinds().await;
    world.broken_requests().await;
    world.broken_files().await;
    let mut found = Vec::new();
    world.search_pages(&mut found).await;
    world.search_files(&mut found).await;
    assert!(found.is_empty(), "{}", found.join("\n"));
}
