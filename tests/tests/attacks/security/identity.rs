//! What engines get instead of the clients' names: request ids and the credential of the router.

use super::*;

fn ids(requests: &[RecordedRequest]) -> BTreeSet<String> {
    let ids = requests.iter().map(|seen| seen.header("x-request-id").unwrap());
    ids.map(str::to_owned).collect()
}

#[tokio::test]
async fn engine_request_ids_are_the_routers_and_never_repeat() {
    let spec = Spec { prefill: 1, decode: 1, ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    let mut all = HashSet::new();
    for round in 0..16 {
        let prompts: Vec<_> = (0..64).map(|i| format!("{round} and {i}")).collect();
        let mut body = completion("");
        body["max_tokens"] = 2.into();
        body["user"] = format!("round-{round}").into();
        body["prompt"] = json!(prompts);
        let id = [("x-request-id", "the-clients-own")];
        let reply = cluster.http.post_with(COMPLETIONS, &id, body.to_string()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let of_round = |name: &str| {
            let mut seen = cluster.engine(name).requests();
            seen.retain(|seen| seen.body["user"] == body["user"]);
            ids(&seen)
        };
        let (prefill, decode) = (of_round("p0"), of_round("d0"));
        assert_eq!(prefill.len(), 64, "one id per prompt");
        assert_eq!(prefill, decode, "the legs of an attempt share their id");
        for id in prefill {
            assert!(id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()), "{id}");
            assert!(all.insert(id), "an id came twice");
        }
    }
    assert_eq!(all.len(), 1024);
}

#[tokio::test]
async fn each_attempt_has_its_own_id_shared_by_its_legs() {
    let cluster = Cluster::start(Spec { prefill: 1, decode: 2, ..Spec::default() }).await;
    for name in ["d0", "d1"] {
        cluster
            .engine(name)
            .set_fault(Fault { kind: FaultKind::Status { status: 500 }, times: Some(1) });
    }
    let id = [("x-request-id", "mine-1")];
    let body = completion("retried").to_string();
    let failed = cluster.http.post_with(COMPLETIONS, &id, body.clone()).await;
    assert_eq!(failed.status, 502, "{}", failed.text());
    let served = cluster.http.post_with(COMPLETIONS, &id, body).await;
    assert_eq!(served.status, 200, "{}", served.text());
    let prefill = cluster.engine("p0").requests();
    assert_eq!((prefill.len(), ids(&prefill).len()), (3, 3), "a new id per attempt");
    let mut decode = cluster.engine("d0").requests();
    decode.extend(cluster.engine("d1").requests());
    assert_eq!(decode.len(), 3);
    assert_eq!(ids(&decode), ids(&prefill));
    assert!(!ids(&prefill).contains("mine-1"));
}

#[tokio::test]
async fn a_clients_sane_id_names_its_request_and_an_insane_one_is_replaced() {
    let cluster = Cluster::start(Spec::default()).await;
    let body = completion("x").to_string();
    let long = "a".repeat(129);
    let longest = "b".repeat(128);
    for (sent, kept) in [
        ("ticket-4711", true),
        ("a.b_c:D-9", true),
        (longest.as_str(), true),
        (long.as_str(), false),
        ("has space", false),
        ("semi;colon", false),
        ("<script>", false),
        ("../../etc", false),
        ("\u{e9}t\u{e9}", false),
        ("", false),
    ] {
        for path in [COMPLETIONS, "/nowhere"] {
            let reply = cluster.http.post_with(path, &[("x-request-id", sent)], body.clone()).await;
            let told = reply.header("x-request-id").to_owned();
            assert_eq!(told == sent, kept, "{sent:?} became {told:?}");
            assert!(!told.is_empty());
            if path == COMPLETIONS {
                assert_eq!(cluster.decisions(&told).await.len(), 1, "{sent:?}");
            }
        }
    }
    for (name, engine) in &cluster.engines {
        for seen in engine.requests() {
            assert_eq!(seen.header("x-request-id").unwrap().len(), 32, "{name}");
        }
    }
    let mut request = text_request("x", "");
    request.request_id = "grpc-ticket".into();
    let address = cluster.running.addresses.grpc.unwrap();
    let events = generate(address, request).await.unwrap();
    let told = events.iter().find_map(|event| match event {
        splitrail_proto::v1::generate_response::Event::Started(started) => {
            Some(&*started.request_id)
        }
        _ => None,
    });
    assert_eq!(told, Some("grpc-ticket"));
    assert_eq!(cluster.decisions("grpc-ticket").await.len(), 1);
}

#[tokio::test]
async fn only_engines_get_the_routers_credential() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("key");
    let secret = "sk-router-own-9f3c1";
    std::fs::write(&path, format!("  {secret}\n")).unwrap();
    let model = format!("engine_api_key: {{ kind: file, path: {:?} }}", path.display().to_string());
    let (post, cluster) = behind_a_post(model).await;
    let body = completion("x").to_string();
    let clients = [
        ("authorization", "Bearer sk-client-1"),
        ("authorization", "Basic c2stY2xpZW50"),
        ("x-api-key", "sk-client-2"),
        ("cookie", "key=sk-client-3"),
    ];
    let mut told = String::new();
    for header in clients {
        let reply = cluster.http.post_with(COMPLETIONS, &[header], body.clone()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        told += &format!("{:?} {}", reply.headers, reply.text());
        let refused = cluster.http.post_with(COMPLETIONS, &[header], "{").await;
        told += &format!("{:?} {}", refused.headers, refused.text());
    }
    let heard = post.heard();
    assert!(heard.iter().filter(|heard| heard.is_inference()).count() == 4);
    for heard in &heard {
        let of_name = heard.headers.iter().filter(|(name, _)| name == "authorization");
        let values: Vec<_> = of_name.map(|(_, value)| value.as_str()).collect();
        assert_eq!(values, [format!("Bearer {secret}")], "{} {}", heard.method, heard.target);
        assert!(!format!("{heard:?}").contains("sk-client"), "{heard:?}");
    }
    for page in
        ["/metrics", "/admin/decisions", "/admin/workers", "/admin/models", "/admin/requests"]
    {
        let page = cluster.admin.get(page).await;
        assert_eq!(page.status, 200);
        told += &page.text();
    }
    assert!(!told.contains(secret) && !told.contains("sk-client"), "{told}");
}
