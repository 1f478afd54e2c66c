//! `splitrail health`.

use std::net::TcpListener;

use splitrail_tests::binary::RouterProcess;
use splitrail_tests::tls::fixture;

use super::support::{CONFIG, Run, run};

#[tokio::test]
async fn a_router_that_answers_is_healthy_and_one_without_workers_is_not_ready() {
    let files = tempfile::tempdir().unwrap();
    let log = files.path().join("log");
    let router = RouterProcess::serve(files.path(), CONFIG, &[], &log).await;
    for address in [router.http, router.admin] {
        for url in
            [format!("http://{address}/health"), format!("http://{address}"), address.to_string()]
        {
            let ran = run(&["health", "--url", &url]);
            assert_eq!((ran.code, &*ran.stdout), (0, "healthy\n"), "{url}: {ran:?}");
        }
        let ran = run(&["health", "--url", &format!("http://{address}/ready")]);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.stderr.starts_with("not ready: "), "{ran:?}");
    }
    let url = format!("http://{}/health", router.http);
    let env = [("SPLITRAIL_HEALTH_URL", &*url)];
    assert_eq!(Run { env: &env, ..Run::default() }.with(&["health"]).code, 0);
}

#[tokio::test]
async fn a_listener_with_tls_is_asked_over_tls() {
    let files = tempfile::tempdir().unwrap();
    let path = |name: &str| fixture(name).display().to_string();
    let tls = format!(
        "http: {{ address: 127.0.0.1:0, tls: {{ cert: {:?}, key: {:?} }} }}",
        path("router.pem"),
        path("router.key")
    );
    let config = CONFIG.replacen("http: 127.0.0.1:0", &tls, 1);
    let log = files.path().join("log");
    let router = RouterProcess::serve(files.path(), &config, &[], &log).await;
    let url = format!("https://{}/health", router.http);
    let ran = run(&["health", "--url", &url, "--ca", &path("ca.pem")]);
    assert_eq!((ran.code, &*ran.stdout), (0, "healthy\n"), "{ran:?}");
    let ran = run(&["health", "--url", &url, "--ca", &path("stranger.pem")]);
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.stderr.contains("certificate"), "{ran:?}");
    // A name that nothing resolves, which is not in the certificate either.
    let named = format!("https://router.invalid:{}/health", router.http.port());
    let to = ["health", "--url", &named, "--ca", &path("ca.pem"), "--connect-to", "127.0.0.1"];
    let ran = run(&to);
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.stderr.contains("is for another name"), "{ran:?}");
    let plain = format!("http://{}/health", router.http);
    assert_eq!(run(&["health", "--url", &plain]).code, 69);
}

#[test]
fn a_router_that_is_not_there_or_does_not_answer_is_not_healthy() {
    let ran = run(&["health", "--url", "http://127.0.0.1:1"]);
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.stderr.contains("nothing listens at 127.0.0.1:1"), "{ran:?}");
    // It accepts connections, by the system's queue, and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/ready", silent.local_addr().unwrap());
    let ran = run(&["health", "--url", &url, "--timeout", "100ms"]);
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.stderr.contains("did not reply within 100ms"), "{ran:?}");
    let ran = run(&["health", "--url", "http://127.0.0.1:1/metrics"]);
    assert_eq!(ran.code, 64, "{ran:?}");
}
