//! The description of the API: it has exactly the paths that are served.

use std::collections::BTreeSet;

use http::{Method, StatusCode};
use serde_json::Value;
use splitrail_api::Endpoint;
use splitrail_tests::tenants::{Keys, start};
use splitrail_tests::{Client, Cluster, Spec};

const METHODS: [Method; 4] = [Method::GET, Method::POST, Method::DELETE, Method::PUT];

async fn status(client: &Client, method: &Method, path: &str) -> StatusCode {
    let path = path.replace("{id}", "sim");
    let json = [("content-type", "application/json")];
    client.send(client.request(method.clone(), &path, &json, "{}")).await.status()
}

/// The described methods of each path.
fn described(document: &Value) -> BTreeSet<(String, String)> {
    let paths = document["paths"].as_object().unwrap().iter();
    let methods = |(path, methods): (&String, &Value)| {
        let methods = methods.as_object().unwrap();
        methods.keys().map(|method| (path.clone(), method.to_uppercase())).collect::<Vec<_>>()
    };
    paths.flat_map(methods).collect()
}

#[tokio::test]
async fn each_path_and_method_that_is_described_is_served_and_no_other_method() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let document = cluster.http.get("/openapi.json").await.json();
    let described = described(&document);
    let paths: BTreeSet<_> = described.iter().map(|(path, _)| path.as_str()).collect();
    for path in &paths {
        for method in METHODS {
            let is_described = described.contains(&((*path).to_owned(), method.to_string()));
            let is_refused =
                status(&cluster.http, &method, path).await == StatusCode::METHOD_NOT_ALLOWED;
            assert_ne!(is_described, is_refused, "{method} {path}");
        }
    }
    for endpoint in Endpoint::ALL {
        assert!(paths.contains(endpoint.path()), "{endpoint:?}");
    }
    let page = cluster.http.get("/docs").await.text();
    for (path, method) in &described {
        assert!(page.contains(&format!("{method} {path}")), "{method} {path}");
    }
}

#[tokio::test]
async fn the_description_has_the_paths_of_the_manual() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let document = cluster.http.get("/openapi.json").await.json();
    let manual = include_str!("../../../docs/http.md");
    let table = manual.split("## Front door").nth(1).unwrap().split("\n\n").nth(1).unwrap();
    let cells = table.lines().skip(2).filter_map(|row| row.split(" | ").next());
    let told: BTreeSet<&str> = cells
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .filter_map(|words| words.split(' ').next_back())
        .collect();
    let paths = document["paths"].as_object().unwrap().keys().map(String::as_str);
    // Both only say that nothing is there, and how a page looks.
    let apart = ["/v1/responses/{id}", "/docs/docs.css"];
    assert_eq!(told, paths.filter(|path| !apart.contains(path)).collect());
}

#[tokio::test]
async fn a_body_is_described_by_the_fields_that_are_forwarded() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let document = cluster.http.get("/openapi.json").await.json();
    let body = |path: &str| {
        let body = &document["paths"][path]["post"]["requestBody"];
        body["content"]["application/json"]["schema"].clone()
    };
    let chat = body("/v1/chat/completions");
    assert_eq!(chat["required"], serde_json::json!(["model"]));
    assert_eq!(chat["additionalProperties"], true);
    let options = &chat["properties"]["stream_options"]["properties"];
    assert!(options["include_usage"].is_object(), "{options}");
    for (field, is_there) in [
        ("messages", true),
        ("cache_hit_threshold", true),
        ("priority", false),
        ("kv_transfer_params", false),
        ("input", false),
    ] {
        assert_eq!(chat["properties"][field].is_object(), is_there, "{field}");
    }
    assert!(body("/tokenize")["required"].is_null());
    assert!(body("/tokenize")["properties"]["cache_hit_threshold"].is_null());
}

#[tokio::test]
async fn the_description_is_public_and_names_nothing_of_the_cluster() {
    let mut keys = Keys::empty();
    keys.tenant("team");
    let cluster = start(&keys, "tenants: [{ name: team }]", Spec::aggregated(1)).await;
    assert_eq!(cluster.http.get("/v1/models").await.status, StatusCode::UNAUTHORIZED);
    for path in ["/openapi.json", "/docs", "/docs/docs.css"] {
        let reply = cluster.http.get(path).await;
        assert_eq!(reply.status, StatusCode::OK, "{path}");
        let text = reply.text();
        for word in ["\"sim\"", "w0", "http://", "https://", env!("CARGO_PKG_VERSION")] {
            assert!(!text.contains(word), "{path} has {word}");
        }
    }
    let page = cluster.http.get("/docs").await;
    assert!(page.header("content-security-policy").starts_with("default-src 'none'"));
}
