//! The keys of issuers while the router runs: rotation, reloads, and storms of unknown keys.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde_json::Value;
use splitrail_tests::cluster::eventually;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::tenants::{Keys, bearer, complete};
use splitrail_tests::trial::{completion, prompt};
use splitrail_tests::{Client, Cluster, Spec};
use tokio::task::JoinSet;

use super::issuer::{ISSUER, Signer, claims, claims_with, jwks, jwt, replace};

const TENANTS: &str = "tenants: [ { name: acme } ]";

/// Minimum time between two fetches of the keys of an issuer.
const FETCH_INTERVAL: Duration = Duration::from_secs(10);

/// A cluster that accepts the tokens of an issuer with the keys at this place, and API keys.
async fn start(keys: &Keys, place: &str) -> Cluster {
    let file = keys.path().display().to_string();
    let auth = format!("auth: [ {{ kind: keys, file: {file:?} }}, {} ]", jwt(place));
    Cluster::start(Spec { top: format!("{auth}\n{TENANTS}"), ..Spec::aggregated(1) }).await
}

/// A server of a key set on loopback.
async fn key_server(set: String) -> ScriptedServer {
    ScriptedServer::start(move |_| ScriptedReply::json(200, &set)).await
}

async fn status(client: &Client, credential: &str) -> u16 {
    complete(client, credential, &completion(&prompt(8, "a"))).await.status.as_u16()
}

async fn refreshes(cluster: &Cluster, result: &str) -> f64 {
    cluster.metric("splitrail_jwks_refreshes_total", &[("result", result)]).await
}

/// Requests with one credential, one after another, until they are told to stop.
struct Running {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<(usize, usize)>,
}

impl Running {
    fn start(clients: usize, client: &Client, credential: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for _ in 0..clients {
            let (stop, client) = (Arc::clone(&stop), client.clone());
            let credential = credential.to_owned();
            tasks.spawn(async move {
                let (mut sent, mut accepted) = (0, 0);
                while !stop.load(Relaxed) {
                    sent += 1;
                    accepted += usize::from(status(&client, &credential).await == 200);
                }
                (sent, accepted)
            });
        }
        Self { stop, tasks }
    }

    /// Asserts that there were requests, and that all were accepted.
    async fn assert_accepted(self) {
        self.stop.store(true, Relaxed);
        for (sent, accepted) in self.tasks.join_all().await {
            assert!(sent > 0 && accepted == sent, "{accepted} of {sent} were accepted");
        }
    }
}

#[tokio::test]
async fn a_router_whose_clients_have_tokens_only_is_ready_when_it_can_verify_them() {
    let keys = Keys::empty();
    let signer = Signer::ed("one");
    let (set, is_there) = (jwks(&[&signer]), Arc::new(AtomicBool::new(false)));
    let answers = Arc::clone(&is_there);
    let server = ScriptedServer::start(move |_| match answers.load(Relaxed) {
        true => ScriptedReply::json(200, &set),
        false => ScriptedReply::json(503, "{}"),
    })
    .await;
    let cluster = start(&keys, &server.url()).await;
    let api_keys = keys.path().display().to_string();
    let without = cluster.yaml.replace(&format!("{{ kind: keys, file: {api_keys:?} }}, "), "");
    assert_ne!(without, cluster.yaml);
    assert_eq!(cluster.reload(&without).await.status, 200);
    let ready = cluster.http.get("/ready").await;
    assert_eq!(ready.status, 503);
    assert!(ready.text().contains("no keys of the issuer"), "{}", ready.text());
    is_there.store(true, Relaxed);
    eventually("it is ready", async || cluster.http.get("/ready").await.status == 200).await;
    assert_eq!(status(&cluster.http, &signer.token(&claims("acme"))).await, 200);
}

#[tokio::test]
async fn keys_are_rotated_while_requests_run() {
    let keys = Keys::empty();
    let file: PathBuf = keys.folder().join("jwks.json");
    let [old, kept, new] = ["old", "kept", "new"].map(Signer::ed);
    replace(&file, &jwks(&[&old, &kept]));
    let cluster = start(&keys, &file.display().to_string()).await;
    let [by_old, by_kept, by_new] = [&old, &kept, &new].map(|signer| signer.token(&claims("acme")));
    assert_eq!(status(&cluster.http, &by_old).await, 200);
    assert_eq!(status(&cluster.http, &by_new).await, 401);
    let running = Running::start(3, &cluster.http, &by_kept);

    replace(&file, &jwks(&[&old, &kept, &new]));
    eventually("the new key counts", async || status(&cluster.http, &by_new).await == 200).await;
    assert_eq!(status(&cluster.http, &by_old).await, 200);
    replace(&file, &jwks(&[&kept, &new]));
    eventually("the old key is gone", async || status(&cluster.http, &by_old).await == 401).await;
    // Files that cannot be used change nothing.
    for broken in ["", "{\"keys\":[", "{\"keys\":[]}", "[]"] {
        let failures = refreshes(&cluster, "failed").await;
        replace(&file, broken);
        eventually("the broken file is read", async || {
            refreshes(&cluster, "failed").await > failures
        })
        .await;
        assert_eq!(status(&cluster.http, &by_new).await, 200, "{broken}");
    }
    std::fs::remove_file(&file).unwrap();
    let failures = refreshes(&cluster, "failed").await;
    eventually("the file is missed", async || refreshes(&cluster, "failed").await > failures).await;
    assert_eq!(status(&cluster.http, &by_new).await, 200);
    assert_eq!(status(&cluster.http, &by_old).await, 401);
    running.assert_accepted().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_unknown_keys_causes_few_fetches_and_affects_no_other_request() {
    const REQUESTS: usize = 10_000;
    const CLIENTS: usize = 16;
    let keys = Keys::empty();
    let signer = Signer::ed("known");
    let server = key_server(jwks(&[&signer])).await;
    let before = Instant::now();
    let cluster = start(&keys, &format!("{}/keys", server.url())).await;
    let valid = signer.token(&claims("acme"));
    eventually("the keys are fetched", async || status(&cluster.http, &valid).await == 200).await;

    let honest = Running::start(1, &cluster.http, &valid);
    let sent = Arc::new(AtomicUsize::new(0));
    let attacker = Arc::new(Signer::ed("x"));
    let mut storm = JoinSet::new();
    for _ in 0..CLIENTS {
        let (sent, attacker) = (Arc::clone(&sent), Arc::clone(&attacker));
        let client = cluster.http.clone();
        storm.spawn(async move {
            loop {
                let number = sent.fetch_add(1, Relaxed);
                if number >= REQUESTS {
                    return;
                }
                let token = attacker.token_of(&format!("k{number}"), &claims("acme"));
                let authorization = bearer(&token);
                let headers = [("authorization", authorization.as_str())];
                let refused = client.get_with("/v1/models", &headers).await;
                assert_eq!(refused.status, 401);
            }
        });
    }
    storm.join_all().await;
    honest.assert_accepted().await;
    let fetches = server.heard().len();
    let allowed = 1 + before.elapsed().as_secs() / FETCH_INTERVAL.as_secs();
    println!("{fetches} fetches in {:?}", before.elapsed());
    assert!(fetches as u64 <= allowed, "{fetches} fetches, {allowed} are allowed");
    let labels = [("listener", "http"), ("reason", "unknown")];
    let refused = cluster.metric("splitrail_refused_credentials_total", &labels).await;
    assert!(refused >= REQUESTS as f64);
}

#[tokio::test]
async fn an_issuer_that_a_reload_removes_is_not_trusted_or_asked_any_more() {
    let keys = Keys::empty();
    let signer = Signer::ed("e");
    let file = keys.folder().join("jwks.json");
    replace(&file, &jwks(&[&signer]));
    let place = file.display().to_string();
    let cluster = start(&keys, &place).await;
    let token = signer.token(&claims("acme"));
    assert_eq!(status(&cluster.http, &token).await, 200);
    let without = cluster.yaml.replace(&format!(", {}", jwt(&place)), "");
    assert_ne!(without, cluster.yaml);
    let reloaded = cluster.reload(&without).await;
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    assert_eq!(status(&cluster.http, &token).await, 401, "the next request is refused");
    assert_eq!(cluster.reload(&cluster.yaml).await.status, 200);
    assert_eq!(status(&cluster.http, &token).await, 200, "the issuer is back");
}

/// Two issuers, each with tenants of its own.
#[tokio::test]
async fn an_issuer_names_no_tenant_of_another() {
    let keys = Keys::empty();
    let [own, partner] = ["own", "partner"].map(Signer::ed);
    let item = |name: &str, signer: &Signer, tenants: &str| {
        let file = keys.folder().join(name);
        replace(&file, &jwks(&[signer]));
        let item = jwt(&file.display().to_string());
        let item = item.replace(ISSUER, &format!("https://{name}.example"));
        item.replace(" }", &format!(", tenants: [{tenants}] }}"))
    };
    let auth = [item("own", &own, "acme"), item("partner", &partner, "guest")].join(", ");
    let tenants = "tenants: [ { name: acme, identities: [acme-id] }, { name: guest } ]";
    let top = format!("auth: [ {auth} ]\n{tenants}");
    let cluster = Cluster::start(Spec { top, ..Spec::aggregated(1) }).await;
    let token = |name: &str, signer: &Signer, tenant: &str| {
        let issuer = format!("https://{name}.example");
        signer.token(&claims_with(tenant, &serde_json::json!({ "iss": issuer })))
    };
    for (name, signer, tenant, expected) in [
        ("own", &own, "acme", 200),
        ("own", &own, "acme-id", 200),
        ("own", &own, "guest", 403),
        ("partner", &partner, "guest", 200),
        ("partner", &partner, "acme", 403),
        ("partner", &partner, "acme-id", 403),
    ] {
        let found = status(&cluster.http, &token(name, signer, tenant)).await;
        assert_eq!(found, expected, "{name} says {tenant}");
    }
    // A reload may give it further tenants, and keeps its keys.
    let wider = cluster.yaml.replace("tenants: [guest]", "tenants: [guest, acme]");
    assert_eq!(cluster.reload(&wider).await.status, 200);
    assert_eq!(status(&cluster.http, &token("partner", &partner, "acme")).await, 200);
}

/// The task of the first configuration's issuer, and that of a later one's.
#[tokio::test]
async fn a_fetch_ends_with_the_reload_that_removes_its_issuer() {
    let keys = Keys::empty();
    let held =
        || ScriptedServer::start(|_| ScriptedReply::Held { first: Vec::new(), last: Vec::new() });
    let [first, second] = [held().await, held().await];
    let cluster = start(&keys, &first.url()).await;
    let asked = |server: &ScriptedServer| server.open() == 1;
    eventually("keys are asked for", async || asked(&first)).await;
    let next = cluster.yaml.replace(&first.url(), &second.url());
    assert_eq!(cluster.reload(&next).await.status, 200);
    eventually("the first issuer's fetch has ended", async || first.open() == 0).await;
    eventually("the second issuer is asked", async || asked(&second)).await;
    let without = cluster.yaml.replace(&format!(", {}", jwt(&first.url())), "");
    assert_ne!(without, cluster.yaml);
    assert_eq!(cluster.reload(&without).await.status, 200);
    eventually("the second issuer's fetch has ended", async || second.open() == 0).await;
    // A fetch that ends because of its own time limit is a failure.
    assert_eq!(refreshes(&cluster, "failed").await, 0.0);
}

#[tokio::test]
async fn an_issuer_that_a_reload_keeps_has_its_keys() {
    let keys = Keys::empty();
    let signer = Signer::ed("e");
    let set = jwks(&[&signer]);
    let is_away = Arc::new(AtomicBool::new(false));
    let away = Arc::clone(&is_away);
    let server = ScriptedServer::start(move |_| match away.load(Relaxed) {
        true => ScriptedReply::json(500, "{}"),
        false => ScriptedReply::json(200, &set),
    })
    .await;
    let cluster = start(&keys, &server.url()).await;
    let token = signer.token(&claims("acme"));
    eventually("the keys are fetched", async || status(&cluster.http, &token).await == 200).await;
    // The issuer is away, so its keys could not be fetched again.
    is_away.store(true, Relaxed);
    let running = Running::start(2, &cluster.http, &token);
    for weight in [2, 3] {
        let tenants = format!("tenants: [ {{ name: acme, weight: {weight} }} ]");
        let reloaded = cluster.reload(&cluster.yaml.replace(TENANTS, &tenants)).await;
        assert_eq!(reloaded.json()["result"], Value::from("changed"), "{}", reloaded.text());
        assert_eq!(status(&cluster.http, &token).await, 200);
    }
    // A reload that is refused changes nothing either.
    let wrong = cluster.yaml.replace("block_size: 16", "block_size: x");
    assert_eq!(cluster.reload(&wrong).await.status, 422);
    assert_eq!(status(&cluster.http, &token).await, 200);
    running.assert_accepted().await;
    // With another audience, the tokens are not for this router.
    let other = cluster.yaml.replace("audience: splitrail", "audience: other");
    assert_eq!(cluster.reload(&other).await.status, 200);
    assert_eq!(status(&cluster.http, &token).await, 401);
}

#[tokio::test]
async fn tokens_are_refused_while_their_issuer_has_never_been_reached() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let signer = Signer::ed("e");
    let server = ScriptedServer::start(|_| ScriptedReply::json(503, "{}")).await;
    let cluster = start(&keys, &server.url()).await;
    let token = signer.token(&claims("acme"));
    eventually("the fetch fails", async || refreshes(&cluster, "failed").await >= 1.0).await;
    assert_eq!(status(&cluster.http, &token).await, 401);
    assert_eq!(status(&cluster.http, &key).await, 200, "keys do not depend on an issuer");
}
