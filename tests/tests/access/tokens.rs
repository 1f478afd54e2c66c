//! JSON Web Tokens: which are accepted over HTTP and gRPC, and how others are refused.

use serde_json::{Value, json};
use splitrail_proto::v1::ListModelsRequest;
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::tenants::{Keys, bearer, complete, post};
use splitrail_tests::trial::{completion, prompt};
use splitrail_tests::{Cluster, Spec};
use tempfile::TempDir;
use tonic::Code;

use super::issuer::{Signer, claims, claims_with, jwks, jwt, now};

const TENANTS: &str = "tenants:
- { name: acme, identities: [\"https://id.example/orgs/7\"], models: [sim] }
- { name: beta, models: [default] }";

/// A router that accepts the tokens of one issuer, whose keys are in a file.
struct JwtRouter {
    cluster: Cluster,
    _files: TempDir,
}

impl JwtRouter {
    async fn start(signers: &[&Signer], spec: Spec) -> Self {
        let files = tempfile::tempdir().unwrap();
        let file = files.path().join("jwks.json");
        std::fs::write(&file, jwks(signers)).unwrap();
        let auth = jwt(&file.display().to_string());
        let top = format!("auth: [ {auth} ]\n{TENANTS}\n{}", spec.top);
        Self { cluster: Cluster::start(Spec { top, ..spec }).await, _files: files }
    }

    /// The status of a completion over HTTP, and the code of its error.
    async fn http(&self, token: &str) -> (u16, Value) {
        let reply = complete(&self.cluster.http, token, &completion(&prompt(8, "a"))).await;
        (reply.status.as_u16(), reply.json()["error"]["code"].clone())
    }

    /// A completion over gRPC.
    async fn grpc(&self, token: &str) -> Result<(), tonic::Status> {
        let mut call = tonic::Request::new(text_request("a b c", ""));
        call.metadata_mut().insert("authorization", bearer(token).parse().unwrap());
        let mut client = grpc_client(self.cluster.running.addresses.grpc.unwrap());
        let mut events = client.generate(call).await?.into_inner();
        while events.message().await?.is_some() {}
        Ok(())
    }
}

#[tokio::test]
async fn a_token_names_its_tenant_over_http_and_grpc() {
    let (rsa, ed) = (Signer::rsa("r"), Signer::ed("e"));
    let router = JwtRouter::start(&[&rsa, &ed], Spec::aggregated(1)).await;
    for signer in [&rsa, &ed] {
        for tenant in ["acme", "https://id.example/orgs/7"] {
            let token = signer.token(&claims(tenant));
            // The second time, the token is remembered.
            for _ in 0..2 {
                assert_eq!(router.http(&token).await, (200, Value::Null), "{tenant}");
                router.grpc(&token).await.unwrap();
            }
        }
        // Tokens are for `authorization`; Anthropic's clients send them as keys.
        let token = signer.token(&claims("acme"));
        let headers = [("x-api-key", token.as_str())];
        let listed = router.cluster.http.get_with("/v1/models", &headers).await;
        assert_eq!(listed.json()["data"][0]["id"], "sim", "{}", listed.text());
        // Another tenant's models.
        let other = signer.token(&claims("beta"));
        assert_eq!(router.http(&other).await, (403, json!("permission_denied")));
        assert_eq!(router.grpc(&other).await.unwrap_err().code(), Code::PermissionDenied);
        let mut call = tonic::Request::new(ListModelsRequest {});
        call.metadata_mut().insert("authorization", bearer(&other).parse().unwrap());
        let mut grpc = grpc_client(router.cluster.running.addresses.grpc.unwrap());
        let listed = grpc.list_models(call).await.unwrap().into_inner();
        let model = &listed.models[0];
        assert_eq!(model.name, "default", "the name that the tenant may use");
        assert!(model.aliases.is_empty(), "{:?}", model.aliases);
    }
    for seen in router.cluster.engine("w0").requests() {
        assert_eq!(seen.header("authorization"), None, "no engine sees a token");
    }
}

/// Tokens that are refused, each with what is wrong and with the reason in metrics.
fn refused(rsa: &Signer, ed: &Signer) -> Vec<(String, String, &'static str)> {
    let now = now();
    let mut cases = Vec::new();
    let with = |replaced: Value| claims_with("acme", &replaced);
    for signer in [rsa, ed] {
        for (replaced, reason) in [
            (json!({"exp": now - 60}), "expired"),
            (json!({"nbf": now + 600}), "unknown"),
            (json!({"iat": now + 600}), "unknown"),
            (json!({"aud": "another"}), "unknown"),
            (json!({"aud": ["another", "splitrail2"]}), "unknown"),
            (json!({"aud": null}), "unknown"),
            (json!({"iss": "https://id.example/"}), "unknown"),
            (json!({"iss": "https://other.example"}), "unknown"),
            (json!({"exp": null}), "unknown"),
            (json!({"org": "nobody"}), "no_tenant"),
            (json!({"org": ["acme"]}), "no_tenant"),
            (json!({"org": ""}), "no_tenant"),
        ] {
            cases.push((replaced.to_string(), signer.token(&with(replaced)), reason));
        }
        for token in signer.unsigned(&with(json!({}))) {
            cases.push(("none".to_owned(), token, "unknown"));
        }
        for token in signer.confused(&with(json!({}))) {
            cases.push(("HS256 with the public key".to_owned(), token, "unknown"));
        }
        let token = signer.token(&with(json!({})));
        let (signed, signature) = token.rsplit_once('.').unwrap();
        let (header, _) = signed.split_once('.').unwrap();
        let other = signer.token(&claims("beta"));
        let (_, others) = other.rsplit_once('.').unwrap();
        cases.push(("signature of another".into(), format!("{signed}.{others}"), "unknown"));
        cases.push(("no claims".into(), format!("{header}..{signature}"), "unknown"));
        cases.push(("no signature".into(), format!("{signed}."), "unknown"));
        cases.push(("four parts".into(), format!("{token}.{signature}"), "unknown"));
        cases.push(("padding".into(), format!("{token}=="), "unknown"));
    }
    // The key of the attacker's own, under a name of the issuer's and under its own.
    let attacker = Signer::ed("e");
    cases.push(("own key".into(), attacker.token(&with(json!({}))), "unknown"));
    cases.push(("own kid".into(), attacker.token_of("x", &with(json!({}))), "unknown"));
    // The key of one algorithm for the other.
    cases.push(("algorithm".into(), ed.token_of("r", &with(json!({}))), "unknown"));
    cases
}

#[tokio::test]
async fn other_tokens_are_refused_over_http_and_grpc_and_reach_no_engine() {
    let (rsa, ed) = (Signer::rsa("r"), Signer::ed("e"));
    let router = JwtRouter::start(&[&rsa, &ed], Spec::aggregated(1)).await;
    let before = router.cluster.engine("w0").requests().len();
    let cases = refused(&rsa, &ed);
    for (wrong, token, reason) in &cases {
        let (status, code, grpc) = match *reason {
            "no_tenant" => (403, "permission_denied", Code::PermissionDenied),
            _ => (401, "invalid_api_key", Code::Unauthenticated),
        };
        // A refusal is not remembered as anything else.
        for _ in 0..2 {
            assert_eq!(router.http(token).await, (status, json!(code)), "{wrong}");
        }
        assert_eq!(router.grpc(token).await.unwrap_err().code(), grpc, "{wrong}");
    }
    assert_eq!(router.cluster.engine("w0").requests().len(), before, "no engine was asked");
    for reason in ["expired", "unknown", "no_tenant"] {
        let count = cases.iter().filter(|case| case.2 == reason).count() as f64;
        for (listener, times) in [("http", 2.0), ("grpc", 1.0)] {
            let labels = [("listener", listener), ("reason", reason)];
            let counted =
                router.cluster.metric("splitrail_refused_credentials_total", &labels).await;
            assert_eq!(counted, times * count, "{listener} {reason}");
        }
    }
    assert_eq!(router.http(&rsa.token(&claims("acme"))).await.0, 200);
}

#[tokio::test]
async fn clocks_may_differ_by_half_a_minute() {
    let signer = Signer::ed("e");
    let router = JwtRouter::start(&[&signer], Spec::aggregated(1)).await;
    let ahead = claims_with("acme", &json!({"iat": now() + 25, "nbf": now() + 25}));
    assert_eq!(router.http(&signer.token(&ahead)).await.0, 200);
    let behind = claims_with("acme", &json!({"exp": now() - 2}));
    assert_eq!(router.http(&signer.token(&behind)).await.0, 200);
}

#[tokio::test]
async fn the_longest_token_is_accepted_and_a_longer_one_is_not() {
    let signer = Signer::ed("e");
    // With the default, the head of a request has no room for such a token.
    let spec = Spec { limits: "{ header_size_max: 32768 }", ..Spec::aggregated(1) };
    let router = JwtRouter::start(&[&signer], spec).await;
    let padded = |bytes: usize| {
        let claims = claims_with("acme", &json!({"groups": "g".repeat(bytes)}));
        signer.token(&claims)
    };
    // Three bytes of claims are four of the token.
    let without = padded(0).len();
    let fits = padded(((16 << 10) - without) / 4 * 3 - 3);
    assert!(fits.len() <= 16 << 10 && fits.len() > (16 << 10) - 16, "{}", fits.len());
    assert_eq!(router.http(&fits).await.0, 200);
    let longer = padded(((16 << 10) - without) / 4 * 3 + 12);
    assert!(longer.len() > 16 << 10);
    assert_eq!(router.http(&longer).await.0, 401);
}

#[tokio::test]
async fn the_role_of_a_token_counts_on_the_admin_listener() {
    let signer = Signer::rsa("r");
    let spec = Spec { admin_access: ", admin_access: roles", ..Spec::aggregated(1) };
    let router = JwtRouter::start(&[&signer], spec).await;
    let admin = &router.cluster.admin;
    let now = now();
    let drain = "/admin/workers/w0/drain";
    for (replaced, read, change) in [
        (json!({"roles": "admin"}), 200, 200),
        (json!({"roles": ["staff", "admin"]}), 200, 200),
        (json!({"roles": ["read"]}), 200, 403),
        (json!({"roles": ["Admin", "administrator"]}), 403, 403),
        (json!({"roles": {"admin": true}}), 403, 403),
        (json!({}), 403, 403),
        (json!({"role": "admin"}), 403, 403),
        (json!({"roles": "admin", "exp": now - 60}), 401, 401),
        (json!({"roles": "admin", "aud": "another"}), 401, 401),
        (json!({"roles": "admin", "iss": "https://other.example"}), 401, 401),
    ] {
        let token = signer.token(&claims_with("acme", &replaced));
        let headers = bearer(&token);
        let headers = [("authorization", headers.as_str())];
        let status = admin.get_with("/metrics", &headers).await.status;
        assert_eq!(status, read, "{replaced}");
        let status = post(admin, drain, &token, &Value::Null).await.status;
        assert_eq!(status, change, "{replaced}");
    }
    for token in signer.unsigned(&claims_with("acme", &json!({"roles": "admin"}))) {
        assert_eq!(post(admin, drain, &token, &Value::Null).await.status, 401);
    }
    assert_eq!(admin.get("/metrics").await.status, 401);
}

#[tokio::test]
async fn keys_and_tokens_of_several_audiences_are_accepted_side_by_side() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let signer = Signer::ed("e");
    let file = keys.folder().join("jwks.json");
    std::fs::write(&file, jwks(&[&signer])).unwrap();
    let first = jwt(&file.display().to_string());
    let second = first.replace("audience: splitrail", "audience: batch");
    let keys_file = keys.path().display().to_string();
    let top =
        format!("auth: [ {first}, {{ kind: keys, file: {keys_file:?} }}, {second} ]\n{TENANTS}");
    let cluster = Cluster::start(Spec { top, ..Spec::aggregated(1) }).await;
    let body = completion(&prompt(8, "a"));
    for (audience, status) in [("splitrail", 200), ("batch", 200), ("another", 401)] {
        let token = signer.token(&claims_with("acme", &json!({"aud": audience})));
        assert_eq!(complete(&cluster.http, &token, &body).await.status, status, "{audience}");
    }
    assert_eq!(complete(&cluster.http, &key, &body).await.status, 200);
}
