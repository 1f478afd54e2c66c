//! Keys from a file.

use std::time::Duration;

use splitrail_config::JwtAuth;
use splitrail_telemetry::Metrics;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::support::{NOW, Signer, acme, auth, claims, jwks};
use crate::jwt::source::Pace;
use crate::jwt::{JwksSource, JwtRefusal};

#[test]
fn a_file_is_read_before_the_first_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jwks.json");
    let signer = Signer::ed("k");
    std::fs::write(&path, jwks(&[&signer])).unwrap();
    let auth = JwtAuth { jwks: path.display().to_string(), ..auth() };
    let source = JwksSource::new(&auth, &Metrics::new().unwrap()).unwrap();
    assert_eq!(source.verifier().verify(&signer.token(&claims()), NOW), Ok(acme()));
}

#[tokio::test]
async fn a_changed_file_is_read_and_a_broken_one_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jwks.json");
    let (first, second) = (Signer::ed("first"), Signer::ec("second"));
    let auth = JwtAuth { jwks: path.display().to_string(), ..auth() };
    let metrics = Metrics::new().unwrap();
    let source = JwksSource::new(&auth, &metrics).unwrap();
    let (verifier, stop) = (source.verifier(), CancellationToken::new());
    let is_accepted = |signer: &Signer| match verifier.verify(&signer.token(&claims()), NOW) {
        Ok(_) => true,
        Err(JwtRefusal::UnknownKey) => false,
        Err(other) => panic!("{other}"),
    };
    let refreshes =
        |result| metrics.jwks_refreshes.with_label_values(&["https://id.example", result]).get();
    let pace = Pace { file_interval: Duration::from_millis(2), ..Pace::default() };
    let mut tasks = JoinSet::new();
    tasks.spawn(source.run_at(pace, stop.clone()));
    let until = async |is_met: &dyn Fn() -> bool| {
        while !is_met() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert!(!is_accepted(&first), "the file does not exist yet");
    std::fs::write(&path, jwks(&[&first])).unwrap();
    until(&|| is_accepted(&first)).await;
    assert!(!is_accepted(&second));
    let failed = refreshes("failed");
    std::fs::write(&path, "").unwrap();
    until(&|| refreshes("failed") > failed).await;
    assert!(is_accepted(&first), "an emptied file keeps the earlier keys");
    let failed = refreshes("failed");
    std::fs::remove_file(&path).unwrap();
    until(&|| refreshes("failed") > failed + 1).await;
    assert!(is_accepted(&first), "a missing file keeps the earlier keys");
    let next = folder.path().join("next.json");
    std::fs::write(&next, jwks(&[&second])).unwrap();
    std::fs::rename(&next, &path).unwrap();
    until(&|| is_accepted(&second)).await;
    assert!(!is_accepted(&first), "the key is gone");
    // As a mounted secret of Kubernetes changes: a link gets another target.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(folder.path().join("a"), jwks(&[&first])).unwrap();
    std::os::unix::fs::symlink(folder.path().join("a"), &path).unwrap();
    until(&|| is_accepted(&first)).await;
    stop.cancel();
    tasks.join_next().await.unwrap().unwrap();
}

#[test]
fn a_file_that_has_not_changed_is_not_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jwks.json");
    std::fs::write(&path, jwks(&[&Signer::ed("k")])).unwrap();
    let auth = JwtAuth { jwks: path.display().to_string(), ..auth() };
    let metrics = Metrics::new().unwrap();
    let source = JwksSource::new(&auth, &metrics).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    let stop = CancellationToken::new();
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        tasks.spawn(source.run(stop.clone()));
        tokio::time::sleep(Duration::from_secs(10)).await;
    });
    let text = metrics.encode();
    assert!(text.contains("result=\"changed\"} 1"), "{text}");
    assert!(text.contains("result=\"unchanged\"} 0"), "{text}");
}
