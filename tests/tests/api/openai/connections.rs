//! Connections of clients, methods and the paths that say how the router is.

use super::*;

#[tokio::test]
async fn http2_clients_with_prior_knowledge_are_served() {
    let cluster = start().await;
    let client: Hyper<_, Full<Bytes>> =
        Hyper::builder(TokioExecutor::new()).http2_only(true).build_http();
    let address = cluster.running.addresses.http;
    for stream in [false, true] {
        let body = with(chat("hello"), "stream", stream).to_string();
        let request = Request::post(format!("http://{address}{CHAT}"))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .unwrap();
        let reply = client.request(request).await.unwrap();
        assert_eq!(reply.version(), http::Version::HTTP_2);
        assert_eq!(reply.status(), 200);
        let body = reply.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert_eq!(text.ends_with("data: [DONE]\n\n"), stream, "{text}");
    }
    cluster.quiet().await;
}

#[tokio::test]
async fn a_connection_serves_one_request_after_another() {
    let cluster = start().await;
    let socket = tokio::net::TcpStream::connect(cluster.running.addresses.http);
    let io = TokioIo::new(socket.await.unwrap());
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
    let conversation = async {
        // A refusal, a stream and a whole reply leave the connection usable.
        let bodies = [
            ("nonsense".to_owned(), 400),
            (with(chat("a"), "stream", true).to_string(), 200),
            (chat("b").to_string(), 200),
            (with(chat("c"), "model", "nope").to_string(), 404),
            (chat("d").to_string(), 200),
        ];
        for (body, status) in bodies {
            sender.ready().await.expect("the connection is still open");
            let request = Request::post(CHAT)
                .header("host", "splitrail")
                .header("content-type", "application/json");
            let request = request.body(Full::new(Bytes::from(body))).unwrap();
            let reply = sender.send_request(request).await.unwrap();
            assert_eq!(reply.status(), status);
            reply.into_body().collect().await.unwrap();
        }
    };
    tokio::select! {
        () = conversation => {}
        ended = connection => panic!("the connection ended early: {ended:?}"),
    }
}

#[tokio::test]
async fn methods_that_a_path_does_not_have_are_refused_with_those_it_has() {
    let cluster = start().await;
    let send = async |method: Method, path: &str| {
        let request = cluster.http.request(method, path, &[], Bytes::new());
        let reply = cluster.http.send(request).await;
        let (status, headers) = (reply.status(), reply.headers().clone());
        let body = reply.into_body().collect().await.unwrap().to_bytes();
        Reply { status, headers, body }
    };
    for path in ["/health", "/ready", "/v1/models"] {
        let reply = send(Method::HEAD, path).await;
        assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 0), "{path}");
    }
    for (method, path, allowed) in [
        (Method::GET, CHAT, "POST"),
        (Method::PUT, COMPLETIONS, "POST"),
        (Method::DELETE, CHAT, "POST"),
        (Method::OPTIONS, CHAT, "POST"),
        (Method::GET, "/v1/embeddings", "POST"),
        (Method::GET, "/tokenize", "POST"),
        (Method::DELETE, "/detokenize", "POST"),
        (Method::POST, "/v1/models", "GET"),
        (Method::POST, "/health", "GET"),
    ] {
        let what = format!("{method} {path}");
        let reply = send(method, path).await;
        check_error(&reply, 405, None, &what);
        assert!(reply.header("allow").contains(allowed), "{what}");
    }
    let head = send(Method::HEAD, CHAT).await;
    assert_eq!((head.status.as_u16(), head.body.len()), (405, 0));
    for path in ["/", "/v1", "/v1/chat", "/v1/audio/speech", "/v1/models/a/b"] {
        let reply = send(Method::GET, path).await;
        check_error(&reply, 404, None, path);
    }
    assert!(received(&cluster).is_empty());
}

#[tokio::test]
async fn readiness_is_served_on_both_listeners_and_health_means_alive() {
    let cluster = start().await;
    for client in [&cluster.http, &cluster.admin] {
        assert_eq!(client.get("/health").await.status, 200);
        assert_eq!(client.get("/ready").await.status, 200);
    }
    cluster.running.core.drain();
    for client in [&cluster.http, &cluster.admin] {
        assert_eq!(client.get("/health").await.status, 200);
        assert_eq!(client.get("/ready").await.status, 503);
    }
    // While connections are still accepted, requests are still served.
    let reply = cluster.http.post(CHAT, &chat("late")).await;
    assert_eq!(reply.status, 200);

    let nobody = Cluster::start(Spec {
        prefill: 0,
        decode: 1,
        extra_workers: vec![
            "{ id: p9, role: prefill, url: \"http://127.0.0.1:9\", kv_events: \"tcp://127.0.0.1:9\" }".into(),
        ],
        model: "on_no_prefill: fail\nretries: { prefill: 0, decode: 0 }".into(),
        ..Spec::default()
    })
    .await;
    for client in [&nobody.http, &nobody.admin] {
        assert_eq!(client.get("/health").await.status, 200);
        assert_eq!(client.get("/ready").await.status, 503);
    }
    let reply = nobody.http.post(CHAT, &chat("hello")).await;
    check_error(&reply, 503, None, "no prefill worker");
    assert!(!reply.header("retry-after").is_empty());
    nobody.quiet().await;
}
