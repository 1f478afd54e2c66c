//! Credentials and TLS of the admin listener.

use splitrail_tests::tls::fixture;

use super::support::{Routers, run};

/// Makes a key of a role in a file of keys; returns the path of a file with the key.
async fn key(folder: &std::path::Path, role: &str) -> String {
    let keys = folder.join("keys.yaml").display().to_string();
    let made = run(&["keys", "new", "--role", role, "--file", &keys, "--json"]).await;
    assert_eq!(made.code, 0, "{made:?}");
    let path = folder.join(format!("{role}.key"));
    std::fs::write(&path, made.json()["key"].as_str().unwrap()).unwrap();
    path.display().to_string()
}

#[tokio::test]
async fn a_credential_is_asked_for_and_its_role_counts() {
    let folder = tempfile::tempdir().unwrap();
    let reads = key(folder.path(), "read").await;
    let changes = key(folder.path(), "admin").await;
    let keys = folder.path().join("keys.yaml");
    let top = |_| format!("auth: [ {{ kind: keys, file: {:?} }} ]", keys.display().to_string());
    let listen = "admin: 127.0.0.1:0, admin_access: roles";
    let routers = Routers::start_with(2, listen, top).await;
    let admins = routers.admins();
    for command in [&["status"][..], &["workers"], &["drain", "d0"], &["top", "--once"]] {
        let ran = run(&[command, &["--admin", &admins]].concat()).await;
        assert_eq!(ran.code, 77, "{ran:?}");
        let told = ran.stdout + &ran.stderr;
        assert!(told.contains("asks for a credential"), "{told}");
        assert!(told.contains("--admin-key-file"), "{told}");
    }
    let with = |key: &str| ["--admin", &admins, "--admin-key-file", key].map(str::to_owned);
    let ran = async |command: &[&str], key: &str| {
        let with = with(key);
        run(&[command, &with.each_ref().map(|text| &**text)].concat()).await
    };
    let status = ran(&["status"], &reads).await;
    assert_eq!(status.code, 0, "{status:?}");
    let refused = ran(&["drain", "d0"], &reads).await;
    assert_eq!(refused.code, 77, "{refused:?}");
    assert!(refused.stdout.contains("role `admin`"), "{refused:?}");
    assert_eq!(ran(&["drain", "d0"], &changes).await.code, 0);
    assert_eq!(routers_state(&ran(&["workers", "--json"], &reads).await.json()), "draining");
    let secret = std::fs::read_to_string(&changes).unwrap();
    for log in &routers.files {
        let log = std::fs::read_to_string(log.path().join("log")).unwrap();
        assert!(!log.contains(&secret));
    }
}

#[tokio::test]
async fn a_name_that_the_listener_does_not_accept_is_told_with_what_helps() {
    let routers = Routers::start_with(1, "admin: 127.0.0.1:0", |_| String::new()).await;
    let name = routers.name(0);
    let port = name.rsplit_once(':').unwrap().1;
    // Linux connects this address to loopback, and the router does not know it as its own.
    let ran = run(&["workers", "--admin", &format!("0.0.0.0:{port}")]).await;
    assert_eq!(ran.code, 77, "{ran:?}");
    let told = ran.stdout + &ran.stderr;
    assert!(told.contains("hint: call the router by its IP address"), "{told}");
}

fn routers_state(told: &serde_json::Value) -> String {
    let workers = told["workers"].as_array().unwrap();
    let worker = workers.iter().find(|worker| worker["id"] == "d0").unwrap();
    worker["replicas"][0]["state"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn listeners_with_tls_are_asked_over_tls() {
    let path = |name: &str| fixture(name).display().to_string();
    let tls = format!(
        "admin: {{ address: 127.0.0.1:0, tls: {{ cert: {:?}, key: {:?}, client_ca: {:?}, \
         client_certificates: required }} }}",
        path("router.pem"),
        path("router.key"),
        path("clients/ca.pem"),
    );
    let routers = Routers::start_with(1, &tls, |_| String::new()).await;
    let url = format!("https://{}", routers.name(0));
    let (ca, stranger) = (path("ca.pem"), path("stranger.pem"));
    let (cert, key) = (path("clients/acme.pem"), path("clients/acme.key"));
    let identity = ["--admin-cert", &cert, "--admin-cert-key", &key];
    let ran = run(&[&["status", "--admin", &url, "--admin-ca", &ca][..], &identity].concat()).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let once = ["top", "--once", "--admin", &url, "--admin-ca", &ca];
    let ran = run(&[&once[..], &identity].concat()).await;
    assert_eq!(ran.code, 0, "{ran:?}");

    let ran = run(&["status", "--admin", &url, "--admin-ca", &ca]).await;
    assert_eq!(ran.code, 77, "{ran:?}");
    assert!(ran.stdout.contains("asks for a client certificate"), "{ran:?}");
    assert!(ran.stdout.contains("--admin-cert"), "{ran:?}");
    let ran = run(&["status", "--admin", &url, "--admin-ca", &stranger]).await;
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.stdout.contains("not from a trusted authority"), "{ran:?}");
    assert!(ran.stdout.contains("--admin-ca"), "{ran:?}");
    let ran = run(&["status", "--admin", &routers.name(0)]).await;
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.stdout.contains("write https://"), "{ran:?}");
    let missing = run(&["status", "--admin", &url, "--admin-ca", "/nowhere.pem"]).await;
    assert_eq!(missing.code, 66, "{missing:?}");
    assert!(missing.stderr.contains("--admin-ca"), "{missing:?}");
}
